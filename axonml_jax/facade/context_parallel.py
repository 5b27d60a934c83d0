"""`ContextParallel`: sequences split over devices."""

from typing import Any, Literal

from jax.sharding import Mesh

from axonml_jax._types import PyTree
from axonml_jax.collectives.gradients.bucketed import CommHook
from axonml_jax.collectives.gradients.buckets import GradSyncStrategy
from axonml_jax.facade.accepting import traffic_along
from axonml_jax.facade.parallel_model import ParallelModel
from axonml_jax.facade.trainer import Trainer
from axonml_jax.ledger.across_positions import PositionTraffic
from axonml_jax.mesh.as_mesh import as_mesh
from axonml_jax.mesh.group import ProcessGroup
from axonml_jax.mesh.shape import make_mesh
from axonml_jax.mesh.world import World
from axonml_jax.model.functional import Trainable
from axonml_jax.model.precision import Precision
from axonml_jax.parallel.context.method import Method
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.strategies.context import Context
from axonml_jax.parallel.strategies.replicate import Replicate
from axonml_jax.parallel.units.remat_policy import Remat
from axonml_jax.sharding.sequence_order import Order

CONTEXT = "context"


class ContextParallel(ParallelModel):
    """Every device holds other positions of the same sequences, and the whole model or a part of it.

    The code of a model that is written for it sees the positions of one device, and says so by the class attribute
    `splits_positions = True`; what goes across positions is `ax.context_attention` (Liu et al. 2023; Jacobs et al. 2023). The
    code of any other model sees whole sequences; the attention in it is recognised and computed so.

    Args:
      model: an NNX module, a function without arguments that makes one, or a Linen module with `params=`.
      mesh: a Mesh with a `context` axis, a World, a ProcessGroup, or None: then all devices split sequences. Other axes
        combine: `data`, `fsdp` (parameters sharded, gathered unit by unit), and those of parallel layers.
      method: how attention reads the keys and values of other ranks: "auto", "gather", "ulysses", "ring", or (U, "ring") or
        (U, "gather"), Ulysses among U ranks (see `ax.context_attention`).
      order: in which order ranks hold positions (see `ax.sequence_order`); "auto" is "zigzag", which balances causal attention.
        Batches are given and outputs come back in the sequence's own.
      sees: what positions the model's code sees: "own", those of its device; "whole", those of all; "auto": as the model says.
      allow_communication: what code that sees whole sequences may send across positions besides attention (see `ax.Context`).
      shard: parameters rest sharded over `fsdp` and `context` together, and are gathered over both at once (ZeRO-3).
      params: a Linen module's variables.
      bucket_size_mb, gradient_as_bucket_view, comm_dtype, comm_hook, remat, batch_stats, precision, trainable, check_vma, seed:
        see `ax.DDP`.
      sync_strategy: OVERLAPPED or SYNCHRONOUS (see `ax.GradSyncStrategy`).

    Raises:
      TypeError, ValueError: for anything that cannot work, before anything is allocated.
    """

    def __init__(
        self,
        model: Any,
        mesh: Any = None,
        *,
        method: Method = "auto",
        order: Order | Literal["auto"] = "auto",
        sees: Literal["auto", "own", "whole"] = "auto",
        allow_communication: bool | int = False,
        shard: bool = False,
        params: PyTree | None = None,
        bucket_size_mb: float = 25,
        remat: Remat = None,
        batch_stats: Literal["global", "local"] = "global",
        gradient_as_bucket_view: bool | None = None,
        sync_strategy: GradSyncStrategy | str = GradSyncStrategy.OVERLAPPED,
        comm_dtype: Any = None,
        comm_hook: CommHook | None = None,
        precision: Precision | str | None = None,
        trainable: Trainable = None,
        check_vma: bool = False,
        seed: int = 0,
    ):
        reducing: dict[str, Any] = {
            "sync_strategy": sync_strategy,
            "bucket_size_mb": bucket_size_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "comm_dtype": comm_dtype,
            "comm_hook": comm_hook,
        }
        own: dict[str, Any] = {"sees": sees, "allow_communication": allow_communication, "shard": shard}
        plan = Plan(
            context=Context(method=method, order=order, **own, **reducing),
            data=Replicate(**reducing),
            precision=Precision.of(precision),
            remat=remat,
            batch_stats=batch_stats,
            check_vma=check_vma,
        )
        super().__init__(model, _mesh(mesh, shard), plan, params=params, trainable=trainable, seed=seed)

    def context_traffic(self, trainer: Trainer, batch: PyTree) -> PositionTraffic:
        """What a step of a model that sees whole sequences sends along `context`, counted in the compiled program.

        Args:
          trainer: one of this model.
          batch: arrays or shapes of a global batch; nothing runs.

        Raises:
          ValueError: for a model that sees its device's positions: `ax.explain` counts what it sends.
        """
        if "context" not in self._placement.left:
            raise ValueError(
                "the model's code sees its device's positions, and nothing is left to the partitioner: use ax.explain"
            )
        return traffic_along(self._placement, trainer.trace(batch).lower().compile(), "context")


def _mesh(given: Any, shard: bool) -> Mesh:
    """The mesh with a `context` axis that the user means."""
    mesh = as_mesh(given)
    if given is None or isinstance(given, World | ProcessGroup):
        devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else None
        return make_mesh(context=-1, devices=devices, **({"fsdp": 1} if shard else {}))
    if CONTEXT not in mesh.axis_names:
        raise ValueError(
            f"ContextParallel splits sequences over the mesh axis {CONTEXT!r}, which {dict(mesh.shape)} lacks: use "
            "ax.make_mesh(context=-1), ax.make_mesh(data=..., context=...), or leave the mesh out"
        )
    return mesh  # pyright: ignore[reportReturnType]  # ParallelModel refuses meshes without devices
