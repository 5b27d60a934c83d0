"""`join`: ranks with unequal numbers of batches; those that are done shadow the others, as in PyTorch's Join."""

from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.collectives.ops import ReduceOp
from axonml_jax.collectives.reduce import all_reduce_max, all_reduce_sum, reduced
from axonml_jax.collectives.scatter import broadcasted
from axonml_jax.collectives.scope import Group, Scope, bound_scope, require_eager, run_collective


class JoinStopped(RuntimeError):
    """A rank has run out of batches, and the others were told to stop there."""


class join:
    """A context in which each rank averages gradients as often as it has batches.

    A rank that leaves the `with` block shadows the others' reductions with zeros until all have left. Eager only: the
    ranks of one compiled program have equally many steps.

    Args:
      group: the ranks that take part; each enters with its own batches.
      like: a pytree with the shapes and dtypes of the gradients, such as the parameters: what a finished rank shadows.
      divide_by_initial_world_size: True divides by the group's size, so that every example counts alike; False by the
        number of ranks that still have batches.
      throw_on_early_termination: True raises JoinStopped on every rank when the first one is done.

    Example:
      >>> with join(group, like=params) as joined:             # doctest: +SKIP
      ...     for batch in my_batches:
      ...         grads = joined.sync_gradients(grad_fn(params, batch))
      ...         params = update(params, grads)
      >>> params = joined.final(params)                        # doctest: +SKIP
    """

    def __init__(
        self,
        group: Group,
        *,
        like: Any,
        divide_by_initial_world_size: bool = True,
        throw_on_early_termination: bool = False,
    ):
        if bound_scope(group) is not None:
            raise ValueError("join cannot be traced: the ranks of one compiled program take equally many steps")
        self.group = require_eager("join", group)
        self.divide_by_initial_world_size = divide_by_initial_world_size
        self.throw_on_early_termination = throw_on_early_termination
        self._shadow = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        self._num_steps = 0

    def __enter__(self) -> "join":
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        if error_type is not None:
            return
        while self._num_active(here=False):
            self._sum(self._shadow)

    def sync_gradients(self, gradients):
        """The average over the ranks of a pytree like `like`; finished ranks count as zeros.

        Raises:
          ValueError: when the tree, a shape or a dtype differs from `like`.
          JoinStopped: when a rank is done and `throw_on_early_termination` is set.

        Communicates: one all-reduce of a counter, and one per leaf.
        """
        self._check_like(gradients)
        num_active = self._num_active(here=True)
        self._num_steps += 1
        divisor = self.group.size if self.divide_by_initial_world_size else num_active
        return jax.tree.map(lambda total: total / divisor, self._sum(gradients))

    def final(self, tree):
        """After the block: the tree of a rank that took the most steps, on every rank.

        Args:
          tree: a pytree of arrays, such as the parameters; a rank that stopped early missed the last updates.

        Communicates: two all-reduces of a counter, and one broadcast per leaf.
        """
        most = int(all_reduce_max(jnp.int32(self._num_steps), self.group))
        last = self.group.rank if self._num_steps == most else -1
        src = int(all_reduce_max(jnp.int32(last), self.group))
        return run_collective(f"join, final from position {src}", _from_source, tree, self.group, src=src)

    def _num_active(self, here: bool) -> int:
        num_active = int(all_reduce_sum(jnp.int32(here), self.group))
        if self.throw_on_early_termination and 0 < num_active < self.group.size:
            raise JoinStopped(
                f"{self.group.size - num_active} of {self.group.size} ranks have no batch left while others go on "
                f"(after {self._num_steps} steps on this rank)"
            )
        return num_active

    def _sum(self, tree):
        return run_collective("join", _summed, tree, self.group)

    def _check_like(self, gradients) -> None:
        expected, given = (jax.tree.map(_described, tree) for tree in (self._shadow, gradients))
        if expected != given:
            raise ValueError(f"join expected gradients like {expected}, but got {given}: give join(like=...) that tree")


def _described(leaf) -> str:
    return f"{jnp.result_type(leaf).name}{list(jnp.shape(leaf))}"


def _from_source(tree, scope: Scope, name: str, src: int):
    return jax.tree.map(lambda leaf: broadcasted(leaf, scope, name, src), tree)


def _summed(tree, scope: Scope, name: str):
    return jax.tree.map(lambda leaf: reduced(leaf, scope, name, ReduceOp.SUM), tree)
