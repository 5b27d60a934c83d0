"""`TensorParallel`: any Flax model split by path rules over axes that are left to XLA's partitioner."""

from typing import Any, Literal

from axonml_jax._types import PyTree
from axonml_jax.collectives.gradients.buckets import GradSyncStrategy
from axonml_jax.facade.parallel_model import ParallelModel
from axonml_jax.facade.trainer import Trainer
from axonml_jax.ledger.partitioner import PartitionedTraffic, partitioned_traffic
from axonml_jax.mesh.as_mesh import as_mesh
from axonml_jax.model.functional import Trainable
from axonml_jax.model.precision import Precision
from axonml_jax.parallel.partition import PARTITIONED, Partition, Rules
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.strategies.replicate import Replicate
from axonml_jax.parallel.units.remat_policy import Remat


class TensorParallel(ParallelModel):
    """Parameters of a model written by others are split over `tensor`, or `expert`, by their names; its code is not touched.

    The batch is split over `data` by explicit collectives as everywhere, and its rows over `expert`; what is sent along
    `tensor` and `expert` XLA's partitioner chooses (`tensor_traffic` counts it in the compiled program). Models of this
    library's layers, and those that `ax.auto_parallelize` can swap, communicate explicitly there too: prefer them.

    Args:
      model: an NNX module, or a Linen module with `params=`.
      mesh: a Mesh with `tensor` or `expert`, and perhaps `data`.
      rules: pairs of a regular expression and a PartitionSpec over "tensor" and "expert", in order, or a mapping of them; the
        first that matches a parameter's whole path name (`blocks/0/up/kernel`) holds. Every parameter must match, and every
        rule be used: `(".*", PartitionSpec())` as the last keeps the rest whole.
      params: a Linen module's variables.
      precision, remat, batch_stats, sync_strategy, trainable, check_vma, seed: see `ax.DDP`.

    Raises:
      TypeError, ValueError: for anything that cannot work, with every offender, before anything is allocated.

    >>> import jax
    >>> import axonml_jax as ax
    >>> from flax import nnx
    >>> from jax.sharding import PartitionSpec as P
    >>> model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    >>> mesh = ax.make_mesh(tensor=1, devices=jax.devices()[:1])
    >>> ax.TensorParallel(model, mesh, rules={"kernel": P(None, "tensor"), "bias": P("tensor")})(jax.numpy.ones((2, 4))).shape
    (2, 8)
    """

    def __init__(
        self,
        model: Any,
        mesh: Any = None,
        *,
        rules: Rules,
        params: PyTree | None = None,
        precision: Precision | str | None = None,
        remat: Remat = None,
        batch_stats: Literal["global", "local"] = "global",
        sync_strategy: GradSyncStrategy | str = GradSyncStrategy.OVERLAPPED,
        trainable: Trainable = None,
        check_vma: bool = False,
        seed: int = 0,
    ):
        mesh = as_mesh(mesh)
        if not set(PARTITIONED) & set(mesh.shape):
            raise ValueError(
                f"TensorParallel splits parameters over the mesh axis 'tensor' or 'expert', and the mesh has "
                f"{dict(mesh.shape)}: make one with ax.make_mesh(tensor=..., data=...)"
            )
        plan = Plan(
            data=Replicate(sync_strategy=sync_strategy),  # pyright: ignore[reportArgumentType]  # it checks and converts names
            partition=Partition.of(rules),
            precision=Precision.of(precision),
            remat=remat,
            batch_stats=batch_stats,
            check_vma=check_vma,
        )
        super().__init__(model, mesh, plan, params=params, trainable=trainable, seed=seed)

    def tensor_traffic(self, trainer: Trainer, batch: PyTree, axis: str = "tensor") -> PartitionedTraffic:
        """What a step sends along an axis of the rules, counted in the compiled program; `ax.explain` counts what `data` sends.

        Args:
          trainer: one of this model.
          batch: arrays or shapes of a global batch; nothing runs.
          axis: "tensor" or "expert".

        Raises:
          ValueError: for an axis that the mesh or the rules do not have.
        """
        left = self._placement.left.intersection(self.mesh.shape)
        if axis not in left:
            raise ValueError(
                f"tensor_traffic: axis={axis!r} must be one that rules split over: {', '.join(sorted(left))}"
            )
        compiled = trainer.trace(batch).lower().compile()
        return partitioned_traffic(compiled, dict(self.mesh.shape), axis)
