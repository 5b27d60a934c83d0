"""ZeRO-3: each unit's parameters are gathered when they are used, in the forward and again in the backward."""

from axonml_jax.model.functional import Variables
from axonml_jax.parallel.units.replayed import Replayed
from axonml_jax.training.engine.accumulate import OneByOne, OneMicrobatch


class ByUnit(OneByOne):
    """Nothing is whole but the units at work and those gathered ahead."""

    def one(self, variables: Variables) -> OneMicrobatch:
        """See `OneMicrobatch`."""
        loss = self.objective.differentiable_with_frozen(self.parts)
        replayed, given = Replayed(self.placement, self.objective.model), (variables.params, variables.frozen)

        def run(state, key, batch, axes, accumulated):
            (loss_, state), grads = replayed.value_and_grad(loss, *given, (state, key, batch), axes, accumulated)
            return grads, loss_, state, None

        return run
