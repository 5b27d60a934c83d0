"""Replicas train parameters of their own for rounds of steps: these rest stacked, the outer ones as `Plain` has them."""

from functools import cached_property

import jax
import optax
from jax.sharding import Mesh

from axonml_jax._types import PyTree
from axonml_jax.model.functional import Variables
from axonml_jax.training.rest.plain import Plain
from axonml_jax.training.rest.rest import Rest
from axonml_jax.training.rest.stacked import Stacked
from axonml_jax.training.state.round_state import RoundState

_OWN = optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, state))
"""Its state are the parameters: replicas' own ones rest as the state of their optimizers does."""


class InRounds(Stacked):
    """The model's variables are the outer parameters; what a step updates is a `RoundState`'s, and the optimizer's state."""

    @cached_property
    def agreed(self) -> Rest:
        """How the outer parameters rest, and what replicas keep together of them."""
        assert self.placement.agreed is not None
        return Plain(self.placement.agreed)

    @property
    def layouts(self) -> PyTree:
        """Of the outer parameters."""
        return self.placement.params

    def whole(self, variables: Variables, mesh: Mesh) -> Variables:
        """The outer parameters."""
        return self.agreed.whole(variables, mesh)

    def clip(self, grads: PyTree, max_norm: jax.Array, p: float, mesh: Mesh) -> tuple[PyTree, jax.Array]:
        """Of the outer parameters."""
        return self.agreed.clip(grads, max_norm, p, mesh)

    def round_specs(self) -> RoundState:
        """Replicas' own parameters as their optimizers' state, what is kept together as the outer ones."""
        return RoundState(self.opt_specs(_OWN), self.agreed.opt_specs(self._keeping))

    def first_round(self, params: PyTree, mesh: Mesh) -> RoundState:
        """Every replica begins with the outer parameters."""
        return RoundState(
            self.first_opt_state(_OWN, params, mesh), self.agreed.first_opt_state(self._keeping, params, mesh)
        )

    def round_shapes(self, shapes: Variables) -> RoundState:
        """As zeros."""
        return RoundState(self.shapes(shapes, _OWN)[1], self.agreed.shapes(shapes, self._keeping)[1])

    def round_leaves(self, rounds: RoundState) -> RoundState:
        """With their layouts."""
        kept = self.agreed.opt_leaves(self._keeping, rounds.kept)
        return RoundState(self.opt_leaves(_OWN, rounds.own), kept)

    def _stored(self, variables: Variables) -> Variables:
        return Plain._stored(self, variables)

    def _first_opt_state(self, tx: optax.GradientTransformation, params: PyTree) -> PyTree:
        return super()._first_opt_state(tx, self._repeated(params, self.placement.own_axes))

    @property
    def _keeping(self) -> optax.GradientTransformation:
        """Something whose `init` makes what replicas keep together."""
        assert self.placement.agreed is not None
        (rounds,) = self.placement.agreed.plan.rounds.values()
        first = lambda params: jax.tree.map(rounds.first_kept, params)
        return optax.GradientTransformation(first, lambda updates, state, params=None: (updates, state))
