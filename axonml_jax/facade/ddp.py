"""`DDP`: distributed data parallelism, named as in PyTorch."""

import warnings
from typing import Any, Literal

from axonml_jax._types import PyTree
from axonml_jax.collectives.gradients.bucketed import CommHook
from axonml_jax.collectives.gradients.buckets import GradSyncStrategy
from axonml_jax.facade.parallel_model import ParallelModel
from axonml_jax.mesh.as_mesh import as_mesh
from axonml_jax.model.functional import Trainable
from axonml_jax.model.precision import Precision
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.strategies.replicate import Replicate
from axonml_jax.parallel.units.remat_policy import Remat


class DDP(ParallelModel):
    """Every device holds the whole model; the batch is split, gradients are averaged (Li et al. 2020).

    Args:
      model: an NNX module, or a Linen module with `params=`.
      mesh: a Mesh, a World, a ProcessGroup, or None for all devices; the batch is split over its `data` axis.
      params: a Linen module's variables.
      bucket_size_mb: gradients are reduced in buckets of this many MiB.
      remat: what the backward recomputes, unit by unit: None, "full", or "selective" (all but weight multiplications).
      batch_stats: "global": BatchNorm statistics of the global batch; "local": each rank's own, as in PyTorch.
      broadcast_buffers: with "local": give every rank the first rank's buffers each step.
      gradient_as_bucket_view: True: no flat copy; False: one flat buffer per bucket; None: the faster on the backend.
      sync_strategy: OVERLAPPED, SYNCHRONOUS or NO_SYNC (see `ax.GradSyncStrategy`).
      comm_dtype: the dtype in which gradients travel ("bfloat16", "float16"), None as they are.
      comm_hook: `hook(flat_bucket, axes) -> summed flat bucket` in the place of the all-reduce.
      precision: "float32", "bf16", or an `ax.Precision`.
      trainable: which parameters train: regular expressions, a predicate of the path name, or an NNX variable type.
      check_vma: let JAX check varying types (see `ax.Plan`).
      seed: of dropout and other random streams.

    Raises:
      TypeError, ValueError: for anything that cannot work, before anything is allocated.
    """

    def __init__(
        self,
        model: Any,
        mesh: Any = None,
        *,
        params: PyTree | None = None,
        bucket_size_mb: float = 25,
        remat: Remat = None,
        batch_stats: Literal["global", "local"] = "global",
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool | None = None,
        sync_strategy: GradSyncStrategy | str = GradSyncStrategy.OVERLAPPED,
        comm_dtype: Any = None,
        comm_hook: CommHook | None = None,
        precision: Precision | str | None = None,
        trainable: Trainable = None,
        check_vma: bool = False,
        seed: int = 0,
    ):
        if batch_stats == "global" and not broadcast_buffers:
            warnings.warn(
                'broadcast_buffers=False has no effect with batch_stats="global", where buffers are equal by construction: '
                'give batch_stats="local" to keep buffers local, or leave the flag out',
                stacklevel=2,
            )
        data = Replicate(
            sync_strategy=sync_strategy,  # pyright: ignore[reportArgumentType]  # Replicate checks and converts names
            bucket_size_mb=bucket_size_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            comm_dtype=comm_dtype,
            comm_hook=comm_hook,
        )
        plan = Plan(
            data=data,
            precision=Precision.of(precision),
            remat=remat,
            batch_stats=batch_stats,
            broadcast_buffers=broadcast_buffers,
            check_vma=check_vma,
        )
        mesh = as_mesh(mesh)
        if mesh.shape.get("fsdp", 1) > 1:
            raise ValueError(
                f"mesh axes {{'fsdp': {mesh.shape['fsdp']}}} have no strategy in DDP, which replicates along 'data': use "
                "ax.FSDP, or a mesh with these devices on `data`"
            )
        super().__init__(model, mesh, plan, params=params, trainable=trainable, seed=seed)
