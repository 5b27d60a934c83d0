"""Names of what fully sharded data parallelism keeps sharded, and the strategy that each means."""

import enum
from typing import Any

from axonml_jax.parallel.strategies.packed_shards import Wire
from axonml_jax.parallel.strategies.packed_sums import ReduceWire
from axonml_jax.parallel.strategies.replicate import Replicate
from axonml_jax.parallel.strategies.shard import Shard
from axonml_jax.synonyms import member


class ShardingStrategy(enum.Enum):
    """What a step of FSDP keeps sharded (ZeRO, Rajbhandari et al. 2020; names as in PyTorch).

    FULL_SHARD: parameters, gradients and optimizer state (ZeRO-3). SHARD_GRAD_OP: parameters are whole during the step
    (ZeRO-2). SHARD_OPTIMIZER: gradients too (ZeRO-1). NO_SHARD: everything whole (DDP). HYBRID_SHARD: FULL_SHARD along
    `fsdp`, replicated along `data`. Between steps parameters and optimizer state rest sharded in all but NO_SHARD.
    """

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    SHARD_OPTIMIZER = "shard_optimizer"
    NO_SHARD = "no_shard"
    HYBRID_SHARD = "hybrid_shard"

    @classmethod
    def _missing_(cls, value: object) -> "ShardingStrategy | None":
        return member(cls, "sharding_strategy", value)

    @property
    def stage(self) -> int | None:
        """ZeRO's stage; None when nothing is sharded."""
        if self is ShardingStrategy.NO_SHARD:
            return None
        return {ShardingStrategy.SHARD_OPTIMIZER: 1, ShardingStrategy.SHARD_GRAD_OP: 2}.get(self, 3)

    def on_axis(
        self, gather: Wire | None = None, reduce: ReduceWire | None = None, **options: Any
    ) -> "Shard | Replicate":
        """The strategy of the `fsdp` axis that this name means: `Shard` with these options, or `Replicate`.

        Args:
          gather: as what parameters travel (`Shard.wire`).
          reduce: as what gradients travel (`Shard.reduce_wire`).
          options: others of `Shard`.

        Raises:
          ValueError: for options that are wrong, or given where nothing is sharded.
        """
        if self.stage is not None:
            return Shard(stage=self.stage, wire=gather, reduce_wire=reduce, **options)
        if idle := {name: value for name, value in {"gather": gather, "reduce": reduce, **options}.items() if value}:
            raise ValueError(f"{idle} acts on sharded parameters and has no effect with sharding_strategy={self.value}")
        return Replicate()
