"""Evaluation: the loss and metrics of a global batch, without gradients or changes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from axonml_jax._types import LossFn, PyTree
from axonml_jax.mesh.fake_devices import bound_run_ahead
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.check_batch import check_batch
from axonml_jax.training.compiler import Compiled, compiler_options
from axonml_jax.training.gradients import means
from axonml_jax.training.objective import shard_key
from axonml_jax.training.rest.choose import rest_of
from axonml_jax.training.step import objective_of
from axonml_jax.training.typed_errors import explain_typed_scan


class EvalStep:
    """`step(variables, batch) -> metrics`, compiled once per batch shape; nothing is donated or changed.

    The model runs in evaluation mode: dropout off, running averages used. Rows are taken in as many microbatches as in
    training, or in as many as the two numbers have in common. `accept` may refuse a program (see `Compiled`).
    """

    def __init__(
        self,
        model: Functional,
        placement: Placement,
        mesh: Mesh,
        loss_fn: LossFn,
        accept: Callable[[Any], None] | None = None,
    ):
        self.placement, self.rest, self.mesh = placement, rest_of(placement), mesh
        self.objective = objective_of(model, loss_fn, placement, training=False)
        self._compiled = Compiled(self._whole, mesh, accept, compiler_options=compiler_options(placement, mesh))

    def __call__(self, variables: Variables, batch: PyTree) -> dict[str, jax.Array]:
        """The loss and the loss function's metrics over the global batch [B, ...]; B divides by the batch shards."""
        check_batch(self.placement.batch_layout, batch)
        with explain_typed_scan(self.placement.plan.check_vma):
            return bound_run_ahead(self._compiled(variables, self.placement.batch_layout.place(batch, self.mesh)))

    def _whole(self, variables: Variables, batch: PyTree) -> dict[str, jax.Array]:
        batch = self.placement.batch_layout.opened(batch)
        return jax.shard_map(
            self._local,
            mesh=self.mesh,
            in_specs=(self.rest.specs(variables), self.placement.batch_layout.specs(batch)),
            out_specs=self.rest.means,
            axis_names=self.placement.manual_axes,
            check_vma=self.placement.plan.check_vma,
        )(variables, batch)

    def _local(self, variables: Variables, batch: PyTree) -> dict[str, jax.Array]:
        placement, variables = self.placement, self.rest.enter(variables)
        key = shard_key(jax.random.key(0), 0, placement.key_number())
        loss = self.rest.loss(self.objective, variables, key, batch)
        mean, metrics, _ = means(jax.tree.map(lambda x: x[None], loss), placement, 1, True)
        return self.rest.kept({**metrics, "loss": mean})
