"""An optimizer's update of what ranks hold: it sees its own part of every parameter, and is right, or is refused."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from axonml_jax._types import PyTree
from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.varying_types import CASTS
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.placement import Placement
from axonml_jax.program.atoms import entry_of, is_constant
from axonml_jax.program.program import Program, no_calls, read_program
from axonml_jax.program.run import run_program
from axonml_jax.sharding.layout import Layout, is_layout
from axonml_jax.sharding.stored import map_layouts
from axonml_jax.training.optimizer.apply import apply
from axonml_jax.training.optimizer.opt_state import opt_owners, whole_shape
from axonml_jax.training.optimizer.optimizer_name import culprit
from axonml_jax.training.optimizer.sharded.mixing import Mixing
from axonml_jax.training.optimizer.sharded.read_update import read_update
from axonml_jax.training.optimizer.sharded.sharded_program import ShardedProgram


@dataclass(frozen=True, eq=False)
class OnShards:
    """An optimizer on a plan whose ranks hold parts of the parameters.

    Attributes:
      tx: the optimizer.
      placement: the plan on its mesh.
      state: the layout of every leaf of its state.
      owners: the parameter that each belongs to, or None.
    """

    tx: optax.GradientTransformation
    placement: Placement
    state: PyTree
    owners: tuple[int | None, ...]

    @classmethod
    def of(cls, tx: optax.GradientTransformation, placement: Placement) -> "OnShards | None":
        """None where every rank updates whole leaves.

        Raises:
          ValueError: when the update of shards would not be the update of the whole; says why.
        """
        layouts, plan = jax.tree.leaves(placement.params, is_leaf=is_layout), placement.plan
        held = placement.stages is not None or any(layout.axes for layout in layouts)
        if plan.update == "whole" or not held:
            return None
        state, owners = opt_owners(placement, tx)
        on_shards = cls(tx, placement, state, tuple(owners))
        assert on_shards.program(jax.ShapeDtypeStruct((), jnp.float32))
        return on_shards

    def program(self, loss: Any) -> ShardedProgram:
        """The update (gradients, state, parameters, loss) -> (parameters, state), for a loss of this dtype."""
        return self._program(jnp.dtype(loss.dtype))

    @functools.cached_property
    def first(self) -> ShardedProgram:
        """The optimizer's first state, of parameters."""
        return self._read(_traced(self.tx.init, _whole_shapes(self.placement.params))[0], self._owners)

    @functools.cache  # noqa: B019  # an update is traced once per trainer, which holds this
    def _program(self, loss: Any) -> ShardedProgram:
        params, state = self._owners
        return self._read(self._whole(loss), ((*params, *state, *params, None), (*params, *state)))

    @functools.cache  # noqa: B019  # likewise
    def _whole(self, loss: Any) -> Program:
        """The update of whole arrays."""
        trees = (self.placement.params, self.state, self.placement.params)
        return _traced(self._apply, *map(_whole_shapes, trees), jax.ShapeDtypeStruct((), loss))[0]

    def _apply(self, grads: PyTree, opt_state: PyTree, params: PyTree, loss: Any) -> tuple[PyTree, PyTree]:
        return apply(self.tx, grads, opt_state, params, loss)

    def _read(self, program: Program, owners: Any) -> ShardedProgram:
        pipe = (AXIS,) if self.placement.stages is not None else ()
        try:
            return read_update(program, owners, self._layouts, pipe)
        except Mixing as mixing:
            raise ValueError(
                f"{culprit(self.tx, mixing.frames)} does not treat every element alike ({mixing.what}), so on the parts of "
                f"parameters that devices hold it would be silently wrong: {_remedy(self.placement)} updates gathered leaves, "
                "or choose an optimizer that acts element by element or on sums over all elements (adam, lion, lamb, "
                "optax.clip_by_global_norm)"
            ) from mixing

    def update(self, grads: PyTree, opt_state: PyTree, params: PyTree, loss: jax.Array) -> tuple[PyTree, PyTree]:
        """The update of this rank's shards, inside `shard_map`. Communicates: see `ShardedProgram.run`."""
        layouts = (self.placement.params, self.state)
        grads, params = (map_layouts(seen_shard, tree, layouts[0]) for tree in (grads, params))
        opt_state = map_layouts(seen_shard, opt_state, layouts[1])
        results = self._own(grads, opt_state, params, loss)
        if results is None:
            program = self.program(loss)
            values, structure = (
                jax.tree.leaves((grads, opt_state, params, loss)),
                jax.tree.structure((params, opt_state)),
            )
            parts = {i: value for i, value in enumerate(values) if program.owners[0][i] is not None}
            whole = {i: value for i, value in enumerate(values) if i not in parts}
            mine, loose = program.run(whole, lambda work: work(parts), dict)
            results = structure.unflatten([(mine | loose)[i] for i in range(structure.num_leaves)])
        new, state = (map_layouts(stored_shard, *each) for each in zip(results, layouts, strict=True))
        return new, state

    def _own(self, *parts: PyTree) -> tuple[PyTree, PyTree] | None:
        """What the optimizer's own code makes of parts; None where it does not the same to them as to whole arrays.

        The program that is compared is the one that is run: it is traced once.
        """
        loss = parts[-1]
        if self.program(loss).communicates:
            return None
        try:
            program, tree = _traced(self._apply, *parts)
        except (TypeError, ValueError):
            return None
        if operations(program) != operations(self._whole(jnp.dtype(loss.dtype))):
            return None
        return tree.unflatten(run_program(program, jax.tree.leaves(parts)))

    @property
    def _layouts(self) -> list[Layout]:
        return jax.tree.leaves(self.placement.params, is_leaf=is_layout)

    @property
    def _owners(self) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        """Of parameters and of the state: who owns what is not whole on every rank."""
        layouts, staged = self._layouts, self.placement.stages is not None
        split = [staged or bool(layout.axes) for layout in layouts]
        params = tuple(i if own else None for i, own in enumerate(split))
        return params, tuple(None if owner is None else params[owner] for owner in self.owners)


def seen_shard(shard: jax.Array, layout: Layout) -> jax.Array:
    """What the optimizer sees of a shard: scalars, which rest as one element per rank, as scalars."""
    return jnp.reshape(shard, ()) if not layout.shape and shard.ndim else shard


def stored_shard(seen: Any, layout: Layout) -> Any:
    """The inverse of `seen_shard`."""
    return jnp.reshape(seen, layout.shard) if not layout.shape and layout.shard else seen


def operations(program: Program) -> list[tuple[Any, ...]]:
    """The operations of a program with their constants, in order: they differ where its Python code looks at shapes.

    Casts of varying types, which are no operations, stand for what they cast.
    """
    found: list[tuple[Any, ...]] = []
    cast: dict[int, Any] = {}
    for equation in program.equations:
        inputs, some = equation.inputs, len(equation.read) < len(equation.inputs)
        if cast:
            inputs = [entry_of(atom, cast, atom) for atom in inputs]
        if equation.name in CASTS:
            cast[equation.outputs[0]] = inputs[0]
            continue
        constants = [str(atom.val) for atom in inputs if is_constant(atom)] if some or cast else ()
        found.append((equation.name, *constants))
        for body in equation.bodies:
            found += operations(body)
    return found


def _traced(fun: Callable[..., PyTree], *args: PyTree) -> tuple[Program, Any]:
    """A function's program, in which calls stay calls, and the structure of what it returns."""
    traced = trace(fun, *args)
    return read_program(traced.jaxpr, no_calls), traced.out_tree


def _whole_shapes(layouts: PyTree) -> PyTree:
    return jax.tree.map(whole_shape, layouts, is_leaf=is_layout)


def _remedy(placement: Placement) -> str:
    """How a user asks for `update="whole"`."""
    if placement.stages is not None:
        return 'ax.Pipeline(..., update="whole")'
    if placement.degrees.get("fsdp", 1) > 1:
        return 'ax.FSDP(..., update="whole")'
    return 'ax.parallelize(model, mesh, ax.Plan(update="whole"))'
