"""From the section `plan` of a configuration to an `ax.Plan`."""

from typing import TYPE_CHECKING

from axonml_jax.collectives.buckets import GradSyncStrategy
from axonml_jax.model.precision import Precision
from axonml_jax.parallel.ddp import Replicate
from axonml_jax.parallel.fsdp import Shard, ShardingStrategy
from axonml_jax.parallel.offload import CPUOffload
from axonml_jax.parallel.plan import Plan

if TYPE_CHECKING:
    from axonml_jax.launch.config import PlanConfig


def build_plan(config: "PlanConfig") -> Plan:
    """The plan that a section describes, without stages.

    Raises:
      ValueError, TypeError: for values that do not go together.
    """
    data = Replicate(
        sync_strategy=GradSyncStrategy(config.sync_strategy),
        bucket_size_mb=config.bucket_size_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        comm_dtype=config.comm_dtype,
    )
    return Plan(
        data=data,
        fsdp=_sharding(config),
        precision=Precision.of(config.precision),
        offload=CPUOffload(config.offload),
        accumulate=config.accumulate,
        remat=config.remat,
        check_vma=config.check_vma,
    )


def _sharding(config: "PlanConfig") -> Shard | Replicate:
    view = config.gradient_as_bucket_view
    strategy = ShardingStrategy(config.sharding_strategy or "full_shard")
    if strategy is ShardingStrategy.NO_SHARD:
        return strategy.on_axis(prefetch=config.prefetch)
    return strategy.on_axis(prefetch=config.prefetch, flat=None if view is None else not view)
