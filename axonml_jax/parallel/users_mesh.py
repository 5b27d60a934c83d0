"""A model's code that places arrays over the user's own axes: traced under the user's mesh, replayed without placements.

Inside `shard_map` code runs on one device, so the mesh that it sees is the user's with every degree 1: there each spelling of
JAX's and Flax's is legal and means nothing. The traced program runs again under the mesh around, without its placements.
Along axes that are left to XLA's partitioner placements mean something, and are kept under our names.

It is done only where JAX has refused the code as it is (`Compiled` in `training/compile.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from axonml_jax.base import AXIS_SYNONYMS, PyTree
from axonml_jax.compat.jaxpr import Operation, trace
from axonml_jax.compat.order import (
    axis_not_found,
    callers_line,
    mesh_around,
    meshes_around,
    refuses_placement,
    standing_for,
)
from axonml_jax.meaning.interpreter import floats_of, forward_derivative, no_tangent, shapes_of
from axonml_jax.mesh.axes import as_axes
from axonml_jax.model.view import Functional, Made, Variables
from axonml_jax.program.program import (
    ArraysOf,
    Equation,
    Program,
    all_but_named,
    named_call,
    read_program,
    run_bodies,
    run_program,
)

T = TypeVar("T")

_PLACES = {"sharding_constraint": "sharding", "reshard": "dst_sharding", "mesh_cast": "dst_sharding"}
"""Primitives that place their operand, and the parameter with the sharding."""

_ALSO_PLACED = ("sharding", "out_sharding")
"""Parameters of other primitives with the sharding of their results."""


def reading_placed(
    fun: Callable[..., PyTree],
    model: Functional,
    around: Sequence[AbstractMesh],
    automatic: frozenset[str],
    check_vma: bool,
    variables: Variables,
    *args: PyTree,
) -> PyTree:
    """Runs `fun(variables, *args)`, whose placements of arrays are read under the user's mesh.

    Args:
      fun: the model's code.
      model: whose code it is; it knows the mesh that it was given with, and on which the user's arrays lay.
      around: the meshes that the user has set.
      automatic: the axes that are left to XLA's partitioner.
      check_vma: whether varying types are checked.
      variables: the model's.
      *args: pytrees of arrays.

    Raises:
      ValueError: for an axis that no mesh has, and with `check_vma=True`.
    """
    if check_vma:
        raise ValueError(
            "the model's code places arrays over axes of your own mesh, but check_vma=True checks types over the plan's mesh: "
            "leave out check_vma=True (the result is the same), or remove the placement from the model"
        )
    meshes = [*around, *model.users_meshes, mesh_around()]
    leaves, treedef = jax.tree.flatten((variables, *args))
    arrays_of, first = ArraysOf(lambda *leaves: fun(*treedef.unflatten(leaves))), None
    for one, typed in _attempts(meshes, model, len(jax.tree.leaves(variables))):
        given = [_like(leaf, one, typed(k, leaf)) for k, leaf in enumerate(leaves)]
        try:
            with standing_for(one):
                traced = trace(arrays_of, *given)
            return arrays_of.restored(_Replayed(one, automatic).run(_read(traced.jaxpr), leaves))
        except Exception as error:
            if not refuses_placement(error):
                raise
            first = first or error
    assert first is not None
    _explain(first, meshes)
    if any(isinstance(leaf, jax.Array) and leaf.shape[:1] == (1,) for leaf in jax.tree.leaves(args)):
        first.add_note(
            "A rank has one row here, and JAX may lose over which Explicit axes one row is split: give each rank two or more"
        )
    raise first


def made_on_one_device(make: Callable[[Made], T], given: Any) -> T:
    """Runs `make(made)`; `made` wraps functions that make arrays, so that their placements over the user's axes are left out.

    Args:
      make: traces such functions for shapes, and keeps what `made` makes of them.
      given: the mesh that the model is given with, or what stands for one.

    Raises:
      ValueError: for an axis that no mesh has.
    """
    meshes = [*meshes_around(), *([given.abstract_mesh] if isinstance(given, Mesh) else [])]
    one = one_device(meshes)

    def made(fun: Callable[[], PyTree]) -> Callable[[], PyTree]:
        def made_of() -> PyTree:
            arrays_of = ArraysOf(fun)
            with standing_for(one):
                traced = trace(arrays_of)
            return arrays_of.restored(_Replayed(one, frozenset()).run(_read(traced.jaxpr), []))

        return made_of

    try:
        with standing_for(one):
            return make(made)
    except ValueError as error:
        _explain(error, meshes)
        raise


def _read(jaxpr: Any) -> Program:
    return read_program(jaxpr, all_but_named)


# --------------------------------------------------------------------------------------------------
# The mesh that code sees, and how arrays lie on it: for Explicit axes that is a part of their type.
# --------------------------------------------------------------------------------------------------

Typed = Callable[[int, jax.Array], PartitionSpec | None]
"""`typed(k, leaf)`: the spec of the k-th array that code is given; None: it is whole on every device."""


def one_device(meshes: Iterable[AbstractMesh]) -> AbstractMesh:
    """The mesh of one device with the axes of all meshes, and this library's other names of them; Explicit if any is.

    >>> one_device([AbstractMesh((2, 4), ("rows", "model")), AbstractMesh((8,), ("fsdp",))]).axis_names
    ('rows', 'model', 'fsdp', 'zero', 'dp_shard')
    """
    meshes = list(meshes)
    names = dict.fromkeys(name for mesh in meshes for name in mesh.axis_names)
    names |= dict.fromkeys(name for name, axis in AXIS_SYNONYMS.items() if axis in names)
    # A name may be Explicit in the user's mesh and Manual in ours.
    explicit = any(AxisType.Explicit in mesh.axis_types for mesh in meshes)
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return AbstractMesh((1,) * len(names), tuple(names), axis_types=(kind,) * len(names))


def _attempts(
    meshes: Sequence[AbstractMesh], model: Functional, num_variables: int
) -> Iterator[tuple[AbstractMesh, Typed]]:
    """Meshes to trace under, and the specs of arrays on them, the likeliest first."""
    one = one_device(meshes)
    if AxisType.Explicit not in one.axis_types:
        yield one, lambda k, leaf: None
        return
    named = dict.fromkeys(name for mesh in meshes for name in mesh.axis_names)
    rows = [name for name in named if AXIS_SYNONYMS.get(name, name) in ("data", "fsdp")]
    given = list(model.users_specs)
    for axes in dict.fromkeys((tuple(rows[:1]), tuple(rows), ())):
        batch = PartitionSpec(axes if len(axes) > 1 else next(iter(axes))) if axes else None

        def lies(k: int, leaf: jax.Array, batch: PartitionSpec | None = batch) -> PartitionSpec | None:
            if k < num_variables:
                return given[k] if len(given) == num_variables else None
            return batch if leaf.ndim else None

        yield one, lies
    yield one, lambda k, leaf: None
    autos = AbstractMesh(one.axis_sizes, one.axis_names, axis_types=(AxisType.Auto,) * len(one.axis_names))
    yield autos, lambda k, leaf: None


def _like(leaf: Any, one: AbstractMesh, spec: PartitionSpec | None) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    sharding = None if spec is None else NamedSharding(one, spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False))


def _explain(error: Exception, meshes: Sequence[AbstractMesh]) -> None:
    """Raise an error that names the axis that no mesh has, where that is the cause.

    Raises:
      ValueError: naming it, the user's line, and the remedy.
    """
    if (axis := axis_not_found(error)) is None:
        return
    known = ", ".join(map(repr, dict.fromkeys(name for mesh in meshes for name in mesh.axis_names)))
    raise ValueError(
        f"the model's code places arrays over {axis!r} at {callers_line(error)}, which no mesh here has ({known}): wrap the "
        f"model under your own mesh, `with jax.set_mesh(mesh):`, or give the plan a mesh with the axis {axis!r}"
    ) from error


# --------------------------------------------------------------------------------------------------
# A program that was traced under the mesh of one device, run under the one around.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Replayed:
    """Runs programs without the primitives that place arrays, except along axes left to XLA's partitioner.

    Attributes:
      one: the mesh that they were traced under.
      automatic: the axes that are left to XLA's partitioner.
    """

    one: AbstractMesh
    automatic: frozenset[str]

    def run(self, program: Program, values: Sequence[Any]) -> list[Any]:
        """The results of a program."""
        return run_program(program, values, self._at)

    def _at(self, equation: Equation, values: list[Any]) -> Sequence[Any]:
        name, options = equation.name, equation.op.options
        if name in _PLACES:
            return [self._kept(values[0], options[_PLACES[name]])]
        if name == "device_put" and all(isinstance(to, NamedSharding) for to in options["devices"]):
            return [self._kept(x, to) for x, to in zip(values, options["devices"], strict=True)]
        if name in ("custom_jvp_call", "custom_vjp_call"):
            with equation.op.scope():
                return (self._custom_jvp if name == "custom_jvp_call" else self._custom_vjp)(equation)(*values)
        if (named := named_call(equation.op)) is not None:
            with equation.op.scope():
                return jax.tree.leaves(named.call(*values))
        # XLA wants all values of a conditional placed alike.
        inside = replace(self, automatic=frozenset()) if equation.branches else self
        if (made := run_bodies(equation, values, inside.run)) is not None:
            return made
        said = {key: options[key] for key in _ALSO_PLACED if options.get(key) is not None}
        made = equation.op.bind_here(values, **dict.fromkeys(said))
        return [self._kept(x, to) for x in made for to in said.values()] if said and len(made) == 1 else made

    def _kept(self, x: jax.Array, to: Any) -> jax.Array:
        """Constrains a value along the axes left to the partitioner, as the code says in the user's names."""
        if not self.automatic or not isinstance(to, NamedSharding):
            return x
        ours = lambda entry: tuple(
            axis for name in as_axes(entry or ()) if (axis := AXIS_SYNONYMS.get(name, name)) in self.automatic
        )
        free = PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(*(free if entry is free else ours(entry) or free for entry in to.spec))
        if all(entry is free for entry in spec):
            return x
        return jax.lax.with_sharding_constraint(x, spec)

    # Derivatives of one's own, whose rules are programs too

    def _custom_jvp(self, equation: Equation) -> Callable[..., list[Any]]:
        assert equation.called is not None
        op, call = equation.op, jax.custom_jvp(partial(self._called, equation.called))
        floats = floats_of(op.given)

        @call.defjvp
        def _(primals: Any, tangents: Any) -> tuple[list, list]:
            with standing_for(self.one):
                rule = forward_derivative(op, typed=True)
            outs = self.run(rule, [*primals, *(tangents[k] for k in floats)])
            made, changes = outs[: len(op.made)], iter(outs[len(op.made) :])
            moved = floats_of(op.made)
            return made, [next(changes) if k in moved else no_tangent(x) for k, x in enumerate(made)]

        return call

    def _custom_vjp(self, equation: Equation) -> Callable[..., list[Any]]:
        assert equation.called is not None
        call, parts = jax.custom_vjp(partial(self._called, equation.called)), _Parts(equation.op)

        def forward(*values: Any) -> tuple[list, list]:
            with standing_for(self.one):
                program = parts.forward()
            outs = self.run(program, values)
            return outs[: len(equation.outputs)], outs[len(equation.outputs) :]

        def backward(kept: list, cotangents: list) -> tuple:
            with standing_for(self.one):
                program = parts.backward()
            changes = iter(self.run(program, [*kept, *(cotangents[k] for k in parts.moved)]))
            return tuple(
                next(changes) if k in parts.floats else no_tangent(aval) for k, aval in enumerate(equation.op.given)
            )

        call.defvjp(forward, backward)
        return call

    def _called(self, program: Program, *values: Any) -> list[Any]:
        return self.run(program, values)


class _Parts:
    """The programs of both halves of a function with its own backward, traced under the same mesh.

    Attributes:
      floats, moved: the positions of its operands, and of its results, that have derivatives.
    """

    def __init__(self, op: Operation):
        self.op, self.floats, self.moved = op, floats_of(op.given), floats_of(op.made)
        self._pull: Any = None

    def forward(self) -> Program:
        """The program of the operands that returns the results, then the residuals of the backward."""

        def both(*given: Any) -> list[Any]:
            def call(*moving: Any) -> tuple[list, list]:
                own = dict(zip(self.floats, moving, strict=True))
                outs = self.op.bind([own.get(k, x) for k, x in enumerate(given)])
                return [outs[k] for k in self.moved], [x for k, x in enumerate(outs) if k not in self.moved]

            made, pull, others = jax.vjp(call, *[given[k] for k in self.floats], has_aux=True)
            kept, self._pull = jax.tree.flatten(pull)
            floats, rest = iter(made), iter(others)
            return [*(next(floats if k in self.moved else rest) for k in range(len(self.op.made))), *kept]

        traced = trace(both, *shapes_of(self.op.given, typed=True))
        self._kept = traced.made[len(self.op.made) :]
        return _read(traced.jaxpr)

    def backward(self) -> Program:
        """The program from residuals, and cotangents of the results, to cotangents of the operands."""
        count = len(self._kept)
        pulled = lambda *given: self._pull.unflatten(given[:count])(list(given[count:]))
        cotangents = [self.op.made[k] for k in self.moved]
        return _read(trace(pulled, *shapes_of([*self._kept, *cotangents], typed=True)).jaxpr)
