"""Parameters that layers split and that all other code sees gathered."""

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import PartitionSpec

from axonml_jax.base import named_leaves, path_name
from axonml_jax.collectives.gradients import copy_to, gather_from, own_slice, split_to
from axonml_jax.collectives.primitives import bound, degree, gather_whole, types_are_checked
from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.order import BARRIER
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.mesh.axes import BATCH_AXES, LAYER_AXES, as_axes
from axonml_jax.model.loss import Loss
from axonml_jax.model.view import Functional, Variables
from axonml_jax.program.program import (
    NAMED_CALLS,
    ArraysOf,
    Atom,
    Equation,
    NamedCall,
    Program,
    is_constant,
    read_program,
    results,
    rule_of,
    run_program,
    run_traced,
    through,
)
from axonml_jax.program.values import Axes, differing
from axonml_jax.sharding.layout import as_spec

# --------------------------------------------------------------------------------------------------
# How each parameter of a model is split over the tensor axes: written in its metadata, read for a mesh, checked at
# once.
#
# A parameter carries `tensor_spec`, a PartitionSpec over the layer's axes, and, where its last dim consists of parts
# that must stay in one piece, such as attention heads, `tensor_units`.
# --------------------------------------------------------------------------------------------------

SPEC = "tensor_spec"
UNITS = "tensor_units"
PADS = "tensor_pads"
"""On a parameter whose dims may leave a remainder: the last ranks' parts then end with zeros, which its layer knows."""
WHOLE = "tensor_whole"
"""The full shape, without stacked dims, of a parameter that all code but its own layer sees gathered (`own_part`)."""


@dataclass(frozen=True)
class Units:
    """The last dim of a parameter consists of `count` equal parts, each of which stays on one rank.

    Attributes:
      count: how many.
      name: what they are, for messages.
      replicated: True: where there are fewer parts than ranks, every rank holds all of them; False: that is refused.
    """

    count: int
    name: str
    replicated: bool = False

    def whole_on(self, ranks: int) -> bool:
        """Whether each of `ranks` ranks holds all units."""
        return self.replicated and self.count < ranks and ranks % self.count == 0


def metadata(
    spec: PartitionSpec, given: Mapping[str, Any] | None = None, units: Units | None = None, *, pads: bool = False
) -> dict[str, Any]:
    """The metadata of a parameter: the user's, then its split."""
    return {**(given or {}), SPEC: spec, **({} if units is None else {UNITS: units}), **({PADS: True} if pads else {})}


def tensor_specs(model: nnx.Module | None, axis_sizes: Mapping[str, int]) -> dict[str, Any]:
    """The specs of a model's parameters on a mesh, by path.

    Args:
      model: a module with or without parallel layers, on arrays or on shapes; None (a Linen model) gives no specs.
      axis_sizes: the sizes of the mesh's axes (`mesh.shape`). An axis that the mesh lacks splits nothing.

    Returns:
      A PartitionSpec for every `nnx.Param`, in the structure of `nnx.to_pure_dict(nnx.state(model, nnx.Param))`.

    Raises:
      ValueError: when dims do not divide; every offender is listed by path, with the remedy.
    """
    specs, offenders = {}, []
    if model is None:
        return specs
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        written = variable.get_metadata()
        stacked = len(variable.shape) - len(written.get(WHOLE, variable.shape))  # by `nnx.vmap`, along new first dims
        spec = PartitionSpec(*[None] * stacked, *written.get(SPEC, PartitionSpec()))
        spec = split_of(spec, written.get(UNITS), axis_sizes)
        specs[path] = spec
        if written.get(PADS):
            continue
        offenders += _indivisible("/".join(map(str, path)), variable.shape, spec, written.get(UNITS), axis_sizes)
    if offenders:
        raise ValueError(
            "these parameters do not divide over the tensor axes of the mesh:\n"
            + "\n".join(offenders)
            + "\nchange the sizes or the degrees of the mesh (of a table of words or its head: pads=True of the layer)"
        )
    return unflatten_dict(specs)


def split_of(spec: PartitionSpec, units: Units | None, axis_sizes: Mapping[str, int]) -> PartitionSpec:
    """A declared spec on a mesh: without absent axes, and replicated if there are fewer units than ranks."""
    entries = [tuple(axis for axis in as_axes(entry or ()) if axis in axis_sizes) for entry in spec]
    if units is not None and entries and units.whole_on(_ranks(entries[-1], axis_sizes)):
        entries[-1] = ()
    return as_spec(entries)


def padded_sizes(model: nnx.Module | None) -> set[int]:
    """The sizes of dims that may be padded to divide over the ranks that split them."""
    if model is None:
        return set()
    found = [(each.shape, each.get_metadata()) for _, each in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    return {
        size
        for shape, written in found
        if written.get(PADS)
        for size, entry in zip(shape, written[SPEC], strict=False)
        if entry
    }


def check_shard(what: str, array: jax.Array, shape: Sequence[int], spec: PartitionSpec, *, pads: bool = False) -> None:
    """Refuse a parameter that is not the shard its spec says (in a layer's call, where its axes are bound).

    Args:
      what: the layer and the parameter, for the message.
      array: what the layer was given.
      shape: that of the whole parameter.
      spec: how it is split.
      pads: whether dims may leave a remainder.

    Raises:
      ValueError: when a dim does not divide, or the parameter was not split.
    """
    parts = [degree(entry or ()) for entry in spec] + [1] * (len(shape) - len(spec))
    uneven = [dim for dim, (size, count) in enumerate(zip(shape, parts, strict=True)) if size % count]
    expected = tuple(-(-size // count) for size, count in zip(shape, parts, strict=True))
    if uneven and not pads:
        raise ValueError(
            f"{what} of shape {tuple(shape)} does not divide into {tuple(parts)} parts ({spec}): dims {uneven} leave a "
            "remainder; change the sizes or the degrees of the mesh (of a table of words or its head: pads=True of the layer)"
        )
    if array.shape != expected:
        raise ValueError(
            f"{what} has shape {array.shape} on each rank, but its full shape {tuple(shape)} split by {spec} gives {expected}: "
            "give shard_map the parameters' specs that axonml_jax.layers.whole.tensor_specs(model, mesh.shape) returns"
        )


def check_units(what: str, units: Units | None, axis: str) -> None:
    """Refuse to cut units (in a layer's call, where its axis is bound).

    Raises:
      ValueError: naming the layer, the units and the ranks.
    """
    if units is not None and units.count % degree(axis):
        raise ValueError(
            f"{what}: {units.count} {units.name} do not divide over the {degree(axis)} ranks of {axis!r}: choose a degree "
            "that divides them"
        )


def _ranks(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _indivisible(path, shape, spec, units: Units | None, sizes) -> list[str]:
    found = []
    for dim, entry in enumerate(spec):
        ranks = _ranks(as_axes(entry or ()), sizes)
        if shape[dim] % ranks:
            found.append(
                f"  {path}: dim {dim} of {tuple(shape)} over {entry} ({shape[dim]} % {ranks} = {shape[dim] % ranks})"
            )
        elif units is not None and dim == len(spec) - 1 and units.count % ranks:
            found.append(
                f"  {path}: {units.count} {units.name} over {entry} ({units.count} % {ranks} = {units.count % ranks})"
            )
    return found


# --------------------------------------------------------------------------------------------------
# Where split parameters and split activations begin and end in a traced program: equations known by name.
# --------------------------------------------------------------------------------------------------

MARK = "axonml_"
"""How the names of all calls begin that mean something to the library."""

GATHERED, OWN = f"{MARK}gathered_parameter", f"{MARK}own_part"
OPENED, CLOSED = f"{MARK}split_over_", f"{MARK}was_split_over_"
"""The names of the equations, each a `jit`; the last two are followed by the axis."""

Places = tuple[tuple[int, str], ...]
"""Which dims an array is split along, over which axis each: the outermost axis of a dim first."""


def marked_program(jaxpr: Any) -> Program:
    """A program with its marked calls kept and all others inlined."""
    return read_program(jaxpr, lambda op, inputs: op.called is not None and not op.label.startswith(MARK))


@dataclass(frozen=True, eq=False)
class SplitValue:
    """A gathered parameter that no code has read yet."""

    value: Any
    places: Places

    @functools.cached_property
    def gathered(self) -> jax.Array:
        """The gathered parameter; gathered once."""
        return _gather(self.value, self.places)

    def sliced(self) -> "SplitValue | None":
        """The value that a scan over dim 0 slices, still split; None if dim 0 itself is split."""
        if any(dim == 0 for dim, _ in self.places):
            return None
        return SplitValue(self.value, tuple((dim - 1, axis) for dim, axis in self.places))


@dataclass(frozen=True, eq=False)
class Part:
    """A value between two paired layers: each rank of an axis has a part of it, along the split dim."""

    value: Any
    axis: str


def gathered(shard: jax.Array, places: Places) -> jax.Array:
    """Gather a parameter, as a marked call.

    Communicates: an all-gather; nothing backward, but over depth, where every rank has a batch of its own, a reduce-scatter.
    """
    return _named_mark(GATHERED, _gather, places)(shard)


def part_of(whole: jax.Array, places: Places) -> jax.Array:
    """This rank's part of a gathered parameter. Communicates: an all-gather of its gradient, but nothing over depth."""
    return _own(places)(whole)


def opened(y: jax.Array, axis: str) -> jax.Array:
    """Mark a layer's output of which every rank of an axis keeps a part."""
    return _border(OPENED, CLOSED, axis)(y)


def closed(x: jax.Array, axis: str) -> jax.Array:
    """Mark the input of a layer that takes the part that `opened` leaves on each rank."""
    return _border(CLOSED, OPENED, axis)(x)


def _gather(shard: jax.Array, places: Places) -> jax.Array:
    for dim, axis in reversed(places):
        if axis in BATCH_AXES:
            shard = gather_whole(shard, axis, dim, invarying=False)
        else:
            shard = gather_from(shard, axis, dim)
    return shard


def _part(whole: jax.Array, places: Places) -> jax.Array:
    for dim, axis in places:
        whole = own_slice(whole, axis, dim) if axis in BATCH_AXES else split_to(whole, axis, dim)
    return whole


def _same(x: jax.Array, places: Places) -> jax.Array:
    return x


# A loss may differentiate the model by itself. JAX gives the derivative of a `jit` the `jit`'s name, which would be the
# wrong mark: these marks therefore define their own derivatives.


@functools.cache
def _border(name: str, opposite: str, axis: str) -> Callable[[jax.Array], jax.Array]:
    mark = jax.custom_vjp(_named_mark(name + axis, _same, ()))
    mark.defvjp(lambda x: (mark(x), None), lambda _, ct: (_border(opposite, name, axis)(ct),))
    return mark


@functools.cache
def _own(places: Places) -> Callable[[jax.Array], jax.Array]:
    mark = jax.custom_vjp(_named_mark(OWN, _part, places))
    mark.defvjp(lambda x: (mark(x), x), lambda x, ct: jax.vjp(functools.partial(_part, places=places), x)[1](ct))
    return mark


def _mark(equation: Equation) -> str:
    """The name of a marked call, with or without a custom derivative."""
    called = equation.called if equation.name == "custom_vjp_call" else None
    inside = called.equations if called is not None else ()
    return inside[0].op.label if len(inside) == 1 else equation.op.label


@functools.cache
def _named_mark(name: str, fn: Callable, places: Places) -> Callable[[jax.Array], jax.Array]:
    def run(x: jax.Array) -> jax.Array:
        return fn(x, places)

    run.__name__ = run.__qualname__ = name
    return jax.jit(run)


# --------------------------------------------------------------------------------------------------
# Losses of which every rank computes a part: an equation known by name, so that a whole operand is never taken for a
# part.
#
# A loss gets an array of which each rank should have its own part: logits or an output layer. Shapes do not tell a part
# from the whole, but the traced program does (`program/values.py`). Where layers were swapped code sees whole arrays,
# and so does the loss: `run_marked` takes the form that is right for what it is given. Elsewhere a whole operand
# is refused.
# --------------------------------------------------------------------------------------------------

PREFIX = f"{MARK}split_loss_"
"""How the equations' names begin."""


@dataclass(frozen=True)
class Form:
    """A loss that is computed from parts of its operand.

    Attributes:
      name: the function's, for messages.
      options: all values that its result depends on besides the operands; they are part of the equation's name.
      subject: what its first operand is called.
      remedy: what to do where that is whole, for messages.
      axes: the mesh axes that split it.
      part: the loss of parts.
      whole: the loss of the same operands, whole over all axes.
      dims: how many dims each operand has.
      places: where the first operand is split, as of a parameter; () where it is none.
    """

    name: str
    options: tuple[Any, ...]
    subject: str
    remedy: str
    axes: tuple[str, ...]
    part: Callable[..., jax.Array]
    whole: Callable[..., jax.Array]
    dims: tuple[int, ...]
    places: Places = ()

    def require(self, operand: Any, differs: Axes) -> None:
        """Refuse an operand (or its type) that does not differ over an axis that should split it.

        Raises:
          ValueError: with the remedy.
        """
        over = tuple(axis for axis in self.axes if degree(axis) > 1 and axis not in differs)
        if over:
            raise ValueError(
                f"{self.name} over {self.axes} takes each rank's own part of the {self.subject}, but this "
                f"{jnp.dtype(operand.dtype).name}{list(operand.shape)} is the same on every rank of {over}: {self.remedy}"
            )


_forms: dict[str, Form] = {}
_recorded: ContextVar[list[bool] | None] = ContextVar("recorded", default=None)
_marking: ContextVar[bool] = ContextVar("marking", default=False)


def split_loss(form: Form, *operands: jax.Array) -> jax.Array:
    """Compute a loss of parts, as an equation that is found by its name.

    Raises:
      ValueError: where JAX's types say that the first operand is whole; not while a model with swapped layers is traced.
    """
    if degree(form.axes) == 1:
        return form.part(*operands)
    if (seen := _recorded.get()) is not None:
        seen.append(True)
    if types_are_checked(form.axes[0]) and not _marking.get():
        form.require(operands[0], varying_axes(operands[0]))
    return _named_form(form)(*operands)


@contextmanager
def recorded() -> Iterator[list[bool]]:
    """Collect in the block whether a loss of parts is traced."""
    token = _recorded.set(seen := [])
    try:
        yield seen
    finally:
        _recorded.reset(token)


@contextmanager
def whole_allowed() -> Iterator[None]:
    """Block in which a traced program will be run by `run_marked`, which chooses the form of each loss."""
    token = _marking.set(True)
    try:
        yield
    finally:
        _marking.reset(token)


class WholeLosses:
    """The losses of a program whose first operand is gathered.

    Args:
      program: a program whose marked calls are kept.
      given: over which axes each input differs.
    """

    def __init__(self, program: Program, given: Sequence[Axes]):
        self._axes: dict[Equation, Axes] = {}
        self._done: set[Equation] = set()
        differing(program, given, self._visit)

    def _visit(self, equation: Equation, operands: Sequence[Axes]) -> None:
        form = _form(equation)
        if form is not None and len(operands) == len(form.dims):
            self._axes[equation] = self._axes.get(equation, frozenset()) | operands[0]

    def taken(self, equation: Equation) -> Form | None:
        """The form of an equation to run for gathered operands; None if it is not one, or is not as it was written."""
        form, op = _form(equation), equation.op
        as_written = form is not None and tuple(aval.ndim for aval in op.given) == form.dims and len(op.made) == 1
        if form is None or not as_written or equation not in self._axes or self._axes[equation] & set(form.axes):
            return None
        self._done.add(equation)
        return form

    def within(self, program: Program) -> bool:
        """Whether a body contains one of them."""
        return any(each in self._axes or any(map(self.within, each.bodies)) for each in program.equations)

    def refuse(self) -> None:
        """Refuse losses that were not taken: batched, in branches, or gathered over some of the axes only.

        Raises:
          ValueError: naming the first.
        """
        for equation, differs in self._axes.items():
            if equation not in self._done and (form := _form(equation)) is not None:
                form.require(equation.op.given[0], differs)


def _form(equation: Equation) -> Form | None:
    return _forms.get(equation.op.label)


@functools.cache
def _named_form(form: Form) -> Callable[..., jax.Array]:
    def run(*operands: jax.Array) -> jax.Array:
        return form.part(*operands)

    words = (form.name, *form.axes, *form.options, *form.dims)
    run.__name__ = run.__qualname__ = PREFIX + "_".join(map(str, words))
    _forms[run.__name__] = form
    NAMED_CALLS[run.__name__] = NamedCall(functools.partial(split_loss, form), form.dims)
    return jax.jit(run)


# --------------------------------------------------------------------------------------------------
# Running a marked program on shards: parameters are gathered late, and what enters between paired layers has its
# gradient.
#
# A gathered parameter stays a shard until something besides its own layer reads it. Between a layer that leaves its
# output split and the one that takes it so, every rank works on a part: a value that is the same on all of them enters
# there, and its gradient is the sum of theirs.
# --------------------------------------------------------------------------------------------------


def run_marked(program: Program, values: Sequence[Any], losses: WholeLosses) -> list[Any]:
    """Run a program; layers that take their part of a gathered parameter get the shard directly.

    Args:
      program: a program whose marked calls are kept.
      values: its inputs; a `SplitValue` in the place of each parameter that the program gathers first.
      losses: those that take a whole operand.

    Raises:
      ValueError: when a result is only a rank's part.

    Communicates: an all-gather of every shard that something else reads, and an all-reduce of the gradient of every value
    that enters between paired layers.
    """
    results = _Level(losses).run(program, values)
    if any(isinstance(value, Part) for value in results):
        raise ValueError(
            "auto_parallelize paired layers as example= showed, so that the output of one stays split until the other takes "
            "it, but in this call the model, or loss_fn, returns that output: give the arguments of this call as the example, "
            "or no example"
        )
    return [_read(value) for value in results]


class _Level:
    """A program in one trace."""

    def __init__(self, losses: WholeLosses):
        self.losses = losses
        self.entered: dict[Any, Any] = {}  # a value enters once, and its gradient is summed once

    def run(self, program: Program, values: Sequence[Any]) -> list[Any]:
        """The results of the program."""
        return run_program(program, values, self._at)

    def _at(self, equation: Equation, given: list[Any]) -> Sequence[Any]:
        op, name = equation.op, _mark(equation)
        if name.startswith(OPENED):
            return [Part(_read(given[0]), name.removeprefix(OPENED))]
        if name.startswith((CLOSED, GATHERED)):
            return [given[0].value if isinstance(given[0], Part) else given[0]]
        if name == OWN and isinstance(given[0], SplitValue):
            return [given[0].value]
        results = _opened(equation, given, self.losses)
        if results is not None:
            return results
        axis = next((value.axis for value in given if isinstance(value, Part)), None)
        if axis is None:
            return op.bind([_read(value) for value in given])
        with op.scope():
            values = [self._enter(*each, axis) for each in zip(equation.inputs, given, strict=True)]
        return [Part(result, axis) for result in op.bind(values)]

    def _enter(self, atom: Atom, value: Any, axis: str) -> Any:
        """A value for code that works on parts; with `check_vma` JAX has already cast a replicated one."""
        if isinstance(value, Part) or is_constant(atom):
            return _value(value)
        if atom not in self.entered:
            whole = _read(value)
            cast = not jnp.issubdtype(whole.dtype, jnp.inexact) or axis in varying_axes(whole)
            self.entered[atom] = whole if cast else copy_to(whole, axis)
        return self.entered[atom]


def _loss(form: Form, equation: Equation, given: list[Any]) -> Any:
    """Compute a loss of gathered operands; of a table that no code has read yet, the shard is the part."""
    own, *others = given
    with equation.op.scope():
        if isinstance(own, SplitValue) and own.places == form.places:
            return form.part(own.value, *map(_read, others))
        return form.whole(*map(_read, given))


def _opened(equation: Equation, given: list[Any], losses: WholeLosses) -> list[Any] | None:
    """The results of an equation whose body is run with shards and parts as they are; None if it is run unchanged."""
    shards = any(isinstance(value, SplitValue) for value in given)
    parts = any(isinstance(value, Part) for value in given)
    if not parts and (form := losses.taken(equation)) is not None:
        return [_loss(form, equation, given)]
    body = equation.body
    if body is None or equation.op.loop is not None:
        return None
    marked = shards or _has_marks(body) or losses.within(body)
    if equation.op.checkpointed is not None and (parts or marked):
        with equation.op.scope():
            return _checkpointed(equation, body, given, losses)
    if equation.op.scan is not None and marked and not parts:
        with equation.op.scope():
            return _scanned(equation, body, given, losses)
    return None


def _checkpointed(equation: Equation, body: Program, given: list[Any], losses: WholeLosses) -> list[Any]:
    results: list[Any] = []

    def call(*values: Any) -> list[Any]:
        again = [_on(old, value) for old, value in zip(given, values, strict=True)]
        results[:] = _Level(losses).run(body, again)
        return [value.value if isinstance(value, Part) else _read(value) for value in results]

    view = equation.op.checkpointed
    assert view is not None
    made = jax.checkpoint(call, **view.options)(*map(_value, given))
    return [Part(value, old.axis) if isinstance(old, Part) else value for old, value in zip(results, made, strict=True)]


def _scanned(equation: Equation, body: Program, given: list[Any], losses: WholeLosses) -> list[Any]:
    scan = equation.op.scan
    assert scan is not None
    first = scan.first_scanned
    consts, carry = given[: scan.num_consts], [_read(value) for value in given[scan.num_consts : first]]
    stacks = [(value.sliced() or value.gathered) if isinstance(value, SplitValue) else value for value in given[first:]]

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        own = [_on(old, _value(old)) for old in consts]  # what this body gathers belongs to its own trace
        own += [*carry, *(_on(old, value) for old, value in zip(stacks, slices, strict=True))]
        results = run_marked(body, own, losses)
        return results[: scan.num_carry], results[scan.num_carry :]

    carry, ys = jax.lax.scan(step, carry, [_value(value) for value in stacks], **scan.options)
    return [*carry, *ys]


def _has_marks(program: Program) -> bool:
    """Whether layers leave outputs split within a body."""
    return any(_mark(each).startswith(OPENED) or any(map(_has_marks, each.bodies)) for each in program.equations)


def _read(value: Any) -> Any:
    """A value as all equations except a layer's own read it."""
    return value.gathered if isinstance(value, SplitValue) else value


def _value(value: Any) -> Any:
    return value.value if isinstance(value, (SplitValue, Part)) else value


def _on(old: Any, value: Any) -> Any:
    """A value of the same kind (split, part or plain) with another array."""
    if isinstance(old, SplitValue):
        return SplitValue(value, old.places)
    return Part(value, old.axis) if isinstance(old, Part) else value


# --------------------------------------------------------------------------------------------------
# Parameters that `auto_parallelize` split are whole to whoever reads them; only the layer that owns one reads its part.
#
# The model's program is traced on gathered parameters, so that no code of a user ever sees a shard, however it reads:
# an attribute, a shape, `nnx.state`. Then it is run with the shards in their place: the part that a layer takes of a
# gathered parameter is the shard that it was gathered from, and only what others read is gathered (`run_marked`).
# --------------------------------------------------------------------------------------------------


def own_part(parameter: nnx.Variable) -> jax.Array:
    """The array that a layer multiplies with: its rank's part of a parameter that is stored split, or gathered in a trace."""
    value, written = parameter[...], parameter.get_metadata()
    if WHOLE not in written or value.shape != tuple(written[WHOLE]):
        return value
    places = _places(written[SPEC])
    return part_of(value, places) if places else value


def left_split(layer: nnx.Module, y: jax.Array, axis: str) -> jax.Array:
    """Mark a layer's output that stays split for another one, if layers were swapped."""
    return opened(y, axis) if _is_swapped(layer) else y


def taken_split(layer: nnx.Module, x: jax.Array, axis: str) -> jax.Array:
    """Mark the input of a layer that takes another layer's split output, if layers were swapped."""
    return closed(x, axis) if _is_swapped(layer) else x


def _is_swapped(layer: Any) -> bool:
    return WHOLE in layer.kernel.get_metadata()


def reading_whole(fun: Callable, model: Functional, trains: bool, variables: Variables, *args: Any) -> Any:
    """Call `fun(variables, *args)` inside `shard_map` with the split parameters of swapped layers seen as gathered.

    Args:
      fun: returns a pytree; leaves that are no arrays are handed through.
      model: whose variables they are.
      trains: whether a loss that it returns is differentiated.
      variables: as one rank reads them.
      *args: pytrees of arrays.

    Communicates: an all-gather of every such parameter that something besides its own layer reads, nothing backward; of
    3-D layers' a reduce-scatter of its gradient over depth.
    """
    places, swapped = _split(model) if bound(LAYER_AXES) else ({}, set())
    if not swapped:
        return _checked(fun, places, trains, variables, *args)
    leaves, treedef, found = _with_places(places, variables, args)
    own = [at if path_name(path[1:]) in swapped else () for (path, _), at in zip(leaves, found, strict=True)]
    named: dict[int, str] = {}  # of a loss's numbers, by their places among the results

    def on_wholes(*parts: Any) -> Any:
        given = [gathered(leaf, at) if at else leaf for leaf, at in zip(jax.tree.leaves(parts), own, strict=True)]
        params, frozen, state, args = treedef.unflatten(given)
        with whole_allowed():
            out = fun(Variables(params, frozen, state), *args)
        arrays = [x for x in jax.tree.leaves(out) if isinstance(x, jax.Array)]
        named.update({next(k for k, x in enumerate(arrays) if x is loss): name for name, loss in _losses(out).items()})
        return out

    def on_shards(program: Program, values: Sequence[Any]) -> list[Any]:
        given = [frozenset(axis for _, axis in at) for at in found]
        losses = WholeLosses(program, given)
        shards = [SplitValue(leaf, at) if at else leaf for leaf, at in zip(values, own, strict=True)]
        made = run_marked(program, shards, losses)
        losses.refuse()
        # What was swapped is gathered in the program; layers that split by themselves may leave parts.
        differ = differing(program, given, lambda *_: None)
        _refuse_parts({name: differ[k].difference(BATCH_AXES) for k, name in named.items()})
        if trains and named:
            first = next(iter(named))
            _refuse_gradients(program, given, len(jax.tree.leaves(variables.params)), made[first], first)
        return made

    given = variables.params, variables.frozen, variables.state, *args
    return run_traced(on_wholes, on_shards, *given, read=marked_program)


def _checked(fun: Callable, places: Mapping[str, Places], trains: bool, variables: Variables, *args: Any) -> Any:
    """Call `fun(variables, *args)`; refuses losses of parts that get a full operand, a part alone, or wrong gradients."""
    with recorded() as seen:
        out = fun(variables, *args)
    whole = _losses(out) if places else {}
    if not seen and not whole:
        return out
    leaves, treedef, found = _with_places(places, variables, args)

    def again(*leaves: Any) -> Any:
        params, frozen, state, args = treedef.unflatten(leaves)
        out = fun(Variables(params, frozen, state), *args)
        return list(_losses(out).values()), out

    jaxpr = trace(ArraysOf(again), *(leaf for _, leaf in leaves)).jaxpr
    given = [frozenset(axis for _, axis in at) for at in found]
    if seen:
        WholeLosses(marked_program(jaxpr), given).refuse()
    if whole:
        program = read_program(jaxpr)
        # The losses are the program's first results; `out` follows.
        alone = from_parts_alone(program, given, [path[0].idx == 3 for path, _ in leaves])
        differ, by_rows = differing(program, given, lambda *_: None), frozenset(BATCH_AXES)
        both = zip(whole, differ, alone, strict=False)
        _refuse_parts({name: one - by_rows | other & by_rows for name, one, other in both})
        if trains:
            _refuse_gradients(program, given, len(jax.tree.leaves(variables.params)), next(iter(whole.values())))
    return out


def _border_at(equation: Equation) -> tuple[bool, str] | None:
    """Whether a marked call opens (True) or closes code on parts, and over which axis; None if it is no border."""
    for name in (OPENED, CLOSED):
        if (mark := _mark(equation)).startswith(name):
            return name == OPENED, mark.removeprefix(name)
    return None


def _refuse_gradients(program: Program, given: Sequence[Axes], trained: int, loss: jax.Array, number: int = 0) -> None:
    """Refuse a loss whose gradients are not complete along the axes that layers split.

    Args:
      program: a traced program that returns it.
      given: over which axes each input may differ.
      trained: how many of the inputs are trained; they come first.
      loss: the loss, as the program returned it.
      number: which of the program's results the loss is.

    Raises:
      ValueError: with all lines and the remedy.
    """
    from axonml_jax.layers.entering import AXES, faults

    axes = frozenset(axis for axis in bound(LAYER_AXES) if axis in AXES and degree(axis) > 1)
    if axes and types_are_checked(next(iter(axes))):  # JAX's own types say how gradients are summed
        typed = sorted(axes & varying_axes(loss))
        said = [
            f"check_vma=True: the loss is typed as differing over {typed}: take gather_from for an all_gather"
        ] * bool(typed)
    else:
        said = faults(program, axes, given, [k < trained for k in range(len(given))], _border_at)[number]
    if said:
        raise ValueError(
            "the loss, or a layer, has wrong gradients along mesh axes over which layers split their parameters:\n  "
            + "\n  ".join(said)
            + "\n(copy_to, split_to, reduce_from and gather_from are in axonml_jax.collectives.gradients; "
            "docs/guides/extending.md says where each belongs)"
        )


def _losses(out: Any) -> dict[str, jax.Array]:
    """The numbers of a returned `Loss` and its metrics, by the names that users know."""
    found: dict[str, jax.Array] = {}
    for loss in jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, Loss)):
        if isinstance(loss, Loss):
            named = {"the loss": (loss.total, loss.weight)} | {f"metric {k!r}": x for k, x in loss.metrics.items()}
            found |= {
                name if i == 0 else f"the weight of {name}": x
                for name, numbers in named.items()
                for i, x in enumerate(jax.tree.leaves(numbers))
                if isinstance(x, jax.Array)
            }
    return found


def _refuse_parts(differ: Mapping[str, Axes]) -> None:
    """Refuse a loss or metric that each rank computes from its part of what layers split.

    Args:
      differ: over which axes each may differ because of what layers split, by its name.

    Raises:
      ValueError: naming all of them.
    """
    wrong = {name: sorted(axes.intersection(LAYER_AXES)) for name, axes in differ.items()}
    if said := "; ".join(f"{name} (over {', '.join(axes)})" for name, axes in wrong.items() if axes):
        raise ValueError(
            f"these results differ between ranks of the mesh axes over which layers split: {said}. They were computed from one "
            "rank's part of a layer's split output, such as logits over the words, or of a split parameter, as if it were the "
            "full array. Use the model's own loss (model.loss) or ax.vocab_parallel_cross_entropy(logits, targets, axis=...), "
            "let the last layer gather its output (gather_output=True), leave weight decay to the optimizer, or combine the "
            "parts by reduce_from or gather_from of axonml_jax.collectives.gradients; over expert and depth, where ranks have "
            "rows of their own, by ax.all_reduce_sum or ax.all_gather"
        )


_ROWS, _LOST = "rows", "lost over "


def from_parts_alone(program: Program, given: Sequence[Axes], rows: Sequence[bool]) -> list[Axes]:
    """The axes over which results are made of a split parameter's part that no rows meet, as a norm of the part is.

    Along axes that split rows too (`expert`, `depth`) results differ anyway. What tells a loss that reads a parameter from the
    layer that multiplies rows with it: its part, alone, becomes a single number, or a result.

    Args:
      program: a traced program.
      given: over which axes each input is a parameter's part.
      rows: whether each input is of the batch.

    Returns:
      Of every result the axes.
    """

    def rule(equation: Equation, operands: list[Axes]) -> Sequence[Axes]:
        if equation.name == BARRIER:  # each result is its operand
            return operands
        # `reduce_from` and `gather_from` have the gradient of one loss that all ranks have, and here every rank has its own.
        pair = equation.name.startswith("custom_vjp") and _ROWS not in frozenset[str]().union(*operands)
        inside = None if pair else through(equation, operands, rule, operator.or_, frozenset())
        if inside is not None:
            return inside
        axes = set(equation.op.mesh_axes) if rule_of(equation.name).kind == "collective" else set()
        made = frozenset[str]().union(*operands) - axes - {_LOST + axis for axis in axes}
        if _ROWS in made:
            return [frozenset(tag for tag in made if tag == _ROWS or tag.startswith(_LOST))] * len(equation.outputs)
        lost = frozenset(tag if tag.startswith(_LOST) else _LOST + tag for tag in made)
        return [made if aval.shape else lost for aval in equation.op.made]

    known = [axes | {_ROWS} if own else axes for axes, own in zip(given, rows, strict=True)]
    found = results(program, known, rule, frozenset())
    return [frozenset(tag.removeprefix(_LOST) for tag in tags if tag != _ROWS) for tags in found]


def _with_places(places: Mapping[str, Places], variables: Variables, args: tuple) -> tuple[list, Any, list[Places]]:
    """All leaves with their paths, their tree structure, and where each is split."""
    tree = (variables.params, variables.frozen, variables.state, args)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    found = [places.get(path_name(path[1:]), ()) if path[0].idx < 2 else () for path, _ in leaves]
    return leaves, treedef, found


def _places(spec: PartitionSpec) -> Places:
    """Where a spec splits an array, as (dim, axis), over axes that are bound here."""
    split = ((dim, axis) for dim, entry in enumerate(spec) for axis in bound(as_axes(entry or ())))
    return tuple((dim, axis) for dim, axis in split if degree(axis) > 1)


def _split(model: Functional) -> tuple[dict[str, Places], set[str]]:
    """The parameters that are split here, by name, and those of them that code sees gathered."""
    if (module := model.abstract_module) is None:
        return {}, set()
    specs = named_leaves(tensor_specs(module, {axis: degree(axis) for axis in bound(LAYER_AXES)}))
    places = {name: at for name, spec in specs.items() if (at := _places(spec))}
    marked = (
        "/".join(map(str, path))
        for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param))
        if WHOLE in leaf.get_metadata()
    )
    return places, places.keys() & set(marked)
