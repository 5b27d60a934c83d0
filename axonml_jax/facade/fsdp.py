"""`FSDP`: fully sharded data parallelism, named as in PyTorch and AxonML."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from axonml_jax._types import PyTree
from axonml_jax.facade.device_memory import FSDPMemoryStats, MemoryStats, estimate, measure
from axonml_jax.facade.parallel_model import ParallelModel
from axonml_jax.mesh.as_mesh import as_mesh
from axonml_jax.mesh.group import ProcessGroup
from axonml_jax.mesh.shape import make_mesh
from axonml_jax.mesh.world import World
from axonml_jax.model.functional import Trainable
from axonml_jax.model.precision import Precision
from axonml_jax.parallel.offload import CPUOffload
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.strategies.sharding_strategy import ShardingStrategy
from axonml_jax.parallel.units.remat_policy import Remat
from axonml_jax.parallel.units.wrap import Wrap
from axonml_jax.sharding.place import replicated
from axonml_jax.synonyms import is_choice


class FSDP(ParallelModel):
    """Every device holds a part of parameters, gradients and optimizer state (ZeRO, Rajbhandari et al. 2020; PyTorch FSDP).

    Args:
      model: an NNX module or a function without arguments that makes one (then no device ever holds the whole model), or
        a Linen module with `params=`.
      mesh: a Mesh with an `fsdp` axis, a World, a ProcessGroup, or None for all devices; the batch is split over `fsdp` and
        `data`. HYBRID_SHARD without a Mesh shards over each host's devices and replicates over hosts.
      params: a Linen module's variables, or a function without arguments that makes them.
      sharding_strategy: what is sharded during a step (see `ax.ShardingStrategy`).
      cpu_offload: what rests in host memory (see `ax.CPUOffload`).
      mixed_precision: "float32", "bf16", "fp16" (with a dynamic loss scale), or an `ax.Precision`: shards are cast, then
        gathered, so that half the bytes travel.
      precision: another name for mixed_precision.
      wrap: which parts are gathered together (FULL_SHARD) and recomputed together (`remat`): None finds repeated blocks;
        module types, regular expressions of module paths, or a predicate of the path.
      prefetch: units gathered ahead while one computes; each costs a unit of memory.
      gather: parameters are gathered as "int8" or "fp8" with a scale per block of at most 256 elements (`ax.Shard.wire`); the
        model computes with what was sent. None: as they are.
      reduce: parts of gradients travel as "bf16" or "int8" to the device that sums them, in float32 (`ax.Shard.reduce_wire`);
        "int8-feedback" adds what rounding left out of a device's gradients to its next ones (SHARD_OPTIMIZER).
        None: a reduce-scatter in the dtype of gradients.
      update: "shards", or "whole" for optimizers that are refused on them.
      remat: what the backward recomputes, unit by unit: None, "full", or "selective" (all but weight multiplications).
      batch_stats, trainable, check_vma, seed: see `ax.DDP`.

    Raises:
      TypeError, ValueError: for anything that cannot work, before anything is allocated.
    """

    def __init__(
        self,
        model: Any,
        mesh: Any = None,
        *,
        params: PyTree | None = None,
        sharding_strategy: ShardingStrategy | str = ShardingStrategy.FULL_SHARD,
        cpu_offload: CPUOffload | str = CPUOffload.NONE,
        mixed_precision: Precision | str | None = None,
        precision: Precision | str | None = None,
        wrap: Wrap = None,
        prefetch: int = 0,
        gather: Literal["int8", "fp8"] | None = None,
        reduce: Literal["bf16", "int8", "int8-feedback"] | None = None,
        update: Literal["shards", "whole"] = "shards",
        remat: Remat = None,
        batch_stats: Literal["global", "local"] = "global",
        trainable: Trainable = None,
        check_vma: bool = False,
        seed: int = 0,
    ):
        strategy = _strategy(sharding_strategy)
        if mixed_precision is not None and precision is not None:
            raise ValueError("mixed_precision= and precision= are two names for the same policy: give one")
        plan = Plan(
            fsdp=strategy.on_axis(wrap=wrap, prefetch=prefetch, gather=gather, reduce=reduce),
            precision=Precision.of(mixed_precision if precision is None else precision),
            offload=cpu_offload,  # pyright: ignore[reportArgumentType]  # Plan checks and converts names
            update=update,
            remat=remat,
            batch_stats=batch_stats,
            check_vma=check_vma,
        )
        self.strategy, mesh = strategy, _mesh(mesh, strategy)
        idle = {name: wire for name, wire in {"gather": gather, "reduce": reduce}.items() if wire is not None}
        if idle and mesh.shape["fsdp"] == 1:
            raise ValueError(
                f"FSDP({', '.join(f'{name}={wire!r}' for name, wire in idle.items())}) says how arrays travel, "
                f"and along fsdp of the mesh {dict(mesh.shape)} there is one rank, to which nothing travels: leave "
                f"{' and '.join(idle)} out, or give fsdp more ranks"
            )
        super().__init__(model, mesh, plan, params=params, trainable=trainable, seed=seed)

    def gather_parameters(self) -> PyTree:
        """The trained parameters, whole on every device. Nothing here holds them: they are freed with the last reference."""
        return replicated(self.parameters(), self.mesh)

    def reshard_parameters(self, params: PyTree | None = None) -> None:
        """Take whole parameters (as `gather_parameters` gave them, changed or not) and keep this device's parts.

        Args:
          params: whole parameters; None changes nothing, since resting parameters are always sharded.

        Raises:
          ValueError: listing every missing, unexpected and mismatched parameter, before anything is changed.
        """
        if params is not None:
            self.set_parameters(params)

    @contextmanager
    def whole_parameters(self) -> Iterator[PyTree]:
        """Within this context a nest of dicts with whole parameters; what is changed in it is written back at the end.

        Like PyTorch's `summon_full_params(writeback=True)`. After an exception nothing is written back.
        """
        params = jax.tree.map(lambda x: x, self.gather_parameters())
        yield params
        self.reshard_parameters(params)

    def memory_estimate(self, moments: int = 2) -> FSDPMemoryStats:
        """Bytes per device by formula, padding included, without activations.

        Args:
          moments: arrays the optimizer keeps per parameter: 2 for Adam, 1 for momentum or Lion, 0 for SGD.
        """
        return estimate(self._placement, moments, self._functional)

    def memory_stats(self) -> MemoryStats:
        """Measured memory of the fullest device: current allocation, and the peak."""
        return measure(self.mesh, self._newest_trainer)


def _strategy(given: ShardingStrategy | str) -> ShardingStrategy:
    names = [each.value for each in ShardingStrategy]
    if not is_choice(ShardingStrategy, given):
        raise ValueError(f"sharding_strategy={given!r} must be an ax.ShardingStrategy or one of {names}")
    return ShardingStrategy(given)


def _mesh(given: Any, strategy: ShardingStrategy) -> Any:
    """The mesh with an `fsdp` axis that the user means."""
    if given is None and strategy is ShardingStrategy.HYBRID_SHARD:
        hosts = len({device.process_index for device in jax.devices()})
        return make_mesh(data=hosts, fsdp=-1)
    if given is None or isinstance(given, World | ProcessGroup):
        mesh = as_mesh(given)
        devices = mesh.devices if isinstance(mesh, Mesh) else None
        return make_mesh(fsdp=-1, devices=None if devices is None else list(devices.flat))
    mesh = as_mesh(given)
    if "fsdp" not in mesh.axis_names:
        raise ValueError(
            f"FSDP shards over the mesh axis 'fsdp', which {dict(mesh.shape)} lacks: use ax.make_mesh(fsdp=-1), "
            "ax.make_mesh(data=..., fsdp=...) for HYBRID_SHARD, or leave the mesh out"
        )
    return mesh
