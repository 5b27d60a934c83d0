"""Over which ranks a collective runs, and in which context: traced inside `shard_map`, or eagerly per rank."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer

from axonml_jax.collectives.varying import types_are_checked, vary
from axonml_jax.compat.around import manual_axes
from axonml_jax.mesh.axes import as_axes
from axonml_jax.mesh.group import ProcessGroup

Group: TypeAlias = ProcessGroup | str | tuple[str, ...] | list[str]
"""A process group, or (inside `shard_map` only) one mesh axis name or several that count as one, the first slowest."""


@dataclasses.dataclass(frozen=True)
class Scope:
    """The ranks of a traced collective: all along `axes`, or only the `members` among them.

    Attributes:
      axes: bound mesh axes, the first slowest.
      members: positions along the axes, in the group's order; None for all of them.
    """

    axes: tuple[str, ...]
    members: tuple[int, ...] | None = None

    @property
    def extent(self) -> int:
        """The number of ranks along the axes, outsiders included."""
        return int(jax.lax.axis_size(self.axes))

    @property
    def size(self) -> int:
        """The number of ranks that take part."""
        return self.extent if self.members is None else len(self.members)

    @property
    def positions(self) -> tuple[int, ...]:
        """Where along the axes the group's ranks sit, in the group's order."""
        return tuple(range(self.extent)) if self.members is None else self.members

    @property
    def partition(self) -> list[list[int]] | None:
        """All ranks in groups of one size, the members first, as `axis_index_groups` wants them; None if impossible."""
        assert self.members is not None
        if self.extent % self.size:
            return None
        others = [i for i in range(self.extent) if i not in self.members]
        return [list(self.members)] + [others[i : i + self.size] for i in range(0, len(others), self.size)]

    @property
    def types_are_checked(self) -> bool:
        """Whether the surrounding `shard_map` runs with `check_vma=True`."""
        return types_are_checked(self.axes[0])

    def index(self) -> jax.Array:
        """This rank's position in the group; outside the group 0, to be masked by `inside`."""
        along = jnp.asarray(jax.lax.axis_index(self.axes))
        if self.members is None:
            return along
        table = [self.members.index(i) if i in self.members else 0 for i in range(self.extent)]
        return jnp.asarray(table)[along]

    def inside(self) -> jax.Array:
        """Whether this rank is a member, a traced boolean."""
        assert self.members is not None
        return (jax.lax.axis_index(self.axes) == jnp.asarray(self.members)).any()

    def only_members(self, result: jax.Array, otherwise: jax.Array | float = 0) -> jax.Array:
        """`result` on the group's ranks, `otherwise` outside; typed as varying over the axes."""
        result = vary(result, self.axes)
        if self.members is None:
            return result
        return jnp.where(self.inside(), result, jnp.asarray(otherwise, result.dtype))


Program = Callable[..., Any]
"""A collective as traced code: `program(x, scope, **options)` is this rank's result.

A module's own function with hashable options, so that the group finds an eager call's compiled program again.
"""


def run_collective(name: str, program: Program, x, group: Group, **options) -> Any:
    """Run `program` in the context at hand: traced where the group's axes are bound, else eagerly through the group.

    Args:
      name: the public function with what distinguishes the call; errors and the ranks' agreement check show it.
      program: what one rank computes.
      x: this rank's value, an array or a pytree of arrays.
      group: where to run it.
      **options: passed on to `program`, with `name`.

    Raises:
      ValueError: when axis names are given outside `shard_map`, or a traced value meets unbound axes.
    """
    x = jax.tree.map(jnp.asarray, x)
    scope = bound_scope(group)
    if scope is not None:
        return program(vary(x, scope.axes), scope, name=name, **options)
    eager = require_eager(name, group, x)
    return eager.run(partial(_on_sub_mesh, program, name=name, **options), x, name=name)


def _on_sub_mesh(program: Program, x, **options):
    return program(vary(x, ("data",)), Scope(("data",)), **options)


def require_eager(name: str, group: Group, x=None) -> ProcessGroup:
    """The process group of an eager call, or a ValueError saying why this cannot be one."""
    if isinstance(group, str | tuple | list):
        raise ValueError(
            f"{name}: axis names {as_axes(group)} were given where they are not bound: call it inside jax.shard_map "
            "over these axes (manual, not auto ones), or pass a ProcessGroup to use it eagerly, one value per rank"
        )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x)) or manual_axes():
        raise ValueError(
            f"{name}: traced code met {group!r} where its axes {group.axes} are not bound. jax.jit and jax.grad "
            "alone cannot communicate: call it inside jax.shard_map over these axes, or inside ax.spmd(fn, group)"
        )
    return group


def bound_scope(group: Group) -> Scope | None:
    """The traced scope of `group`, or None where its axes are not bound (an eager call)."""
    if isinstance(group, str | tuple | list):
        axes = as_axes(group)
        return Scope(axes) if _bound_sizes(axes) else None
    sizes = _bound_sizes(group.axes)
    if sizes and sizes == tuple(group.mesh.shape[axis] for axis in group.axes):
        everyone = group.positions == tuple(range(math.prod(sizes)))
        return Scope(group.axes, None if everyone else group.positions)
    # Inside `spmd` the group's own sub-mesh is bound: one axis, just its ranks.
    bound = jax.sharding.get_abstract_mesh()
    own = bound.axis_names == ("data",) and manual_axes() == {"data"} and bound.size == group.size
    return Scope(("data",)) if own else None


def _bound_sizes(axes: tuple[str, ...]) -> tuple[int, ...] | None:
    try:
        return tuple(int(jax.lax.axis_size(axis)) for axis in axes)
    except NameError:
        return None
