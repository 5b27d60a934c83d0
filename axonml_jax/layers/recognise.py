"""Finds norms and cross entropies in other people's models and losses, and computes them by kernels on GPUs.

A value is recognised by what it is of one array x [..., n]: its mean, its mean square, 1 / its deviation, its log weights. So
any spelling in plain operations is found: Flax's own modules, optax's losses, or a few plain lines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.base import logger
from axonml_jax.compat.varying_types import CASTS, cast_to_varying, varying_axes
from axonml_jax.layers import fused
from axonml_jax.layers.losses import as_counted, cross_entropy_of_rows
from axonml_jax.model.view import Variables
from axonml_jax.program.program import (
    Atom,
    Equation,
    Program,
    aval_of,
    is_constant,
    is_elementwise,
    names_of,
    results_of,
    run_bodies,
    run_program,
    run_traced,
    value_of,
    values_of,
)
from axonml_jax.program.values import Level, Nested, NotStatic, elements, nested, number

# --------------------------------------------------------------------------------------------------
# How a value of a program depends on an array x [..., n]. A "number" of a value is its name in the program.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """A value recognised as a function of x [..., n].

    Attributes:
      what: "x", "squares", "centered", "normed", "lowered" (minus its largest), "exps", "log weights" and more, each [..., n];
        or one value for each row, such as "mean", "inverse" (of the deviation), "peak", "normalizer" (the log of the sum of
        exponentials), "log weight" (the target's), "loss" (its negative).
      x: the number of x.
      centers: whether x minus its mean is meant: a variance in the place of a mean square.
      epsilon: what was added to the mean square.
      scale, shift: the numbers of the vectors [n] that it was multiplied by, and that were added; None: there are none.
      targets: the rows' targets, a number or a constant.
      beyond: what the log weight of a target outside of 0 to n - 1 is: "nan", "zero" or that of the "nearest".
    """

    what: str
    x: int = -1
    centers: bool = False
    epsilon: float = 0.0
    scale: int | None = None
    shift: int | None = None
    targets: Atom | None = None
    beyond: str = ""


_FULL = (
    "x",
    "squares",
    "centered",
    "normed",
    "scaled inverse",
    "lowered",
    "exps",
    "log weights",
    "is target",
    "picked",
)
"""The forms with all of x's elements; all others have one value for each row."""

_OF_ONE = {
    ("rsqrt", "mean square"): "inverse",
    ("sqrt", "mean square"): "root",
    ("is_finite", "peak"): "finite",
    ("stop_gradient", "peak"): "peak",
    ("exp", "lowered"): "exps",
    ("abs", "sum of exps"): "sum of exps",
    ("log", "sum of exps"): "log sum",
    ("neg", "loss"): "log weight",
    ("neg", "log weight"): "loss",
    ("square", "x"): "squares",
    ("square", "centered"): "squares",
    ("square", "mean"): "mean squared",
    ("reduce_sum", "x"): "sum",
    ("reduce_sum", "squares"): "sum of squares",
    ("reduce_sum", "exps"): "sum of exps",
    ("reduce_sum", "picked"): "log weight",
    ("reduce_max", "x"): "peak",
    ("gather", "x"): "target",
    ("gather", "lowered"): "lowered target",
    ("gather", "log weights"): "log weight",
}
"""The form of a result, by the primitive and the form of its operand."""

_OF_TWO = {
    ("sub", "mean square", "mean squared"): "mean square",
    ("sub", "x", "mean"): "centered",
    ("mul", "x", "inverse"): "normed",
    ("mul", "centered", "inverse"): "normed",
    ("mul", "x", "scaled inverse"): "normed",
    ("mul", "centered", "scaled inverse"): "normed",
    ("div", "x", "root"): "normed",
    ("div", "centered", "root"): "normed",
    ("sub", "x", "peak"): "lowered",
    ("add", "log sum", "peak"): "normalizer",
    ("sub", "lowered", "log sum"): "log weights",
    ("sub", "x", "normalizer"): "log weights",
    ("sub", "normalizer", "target"): "loss",
    ("sub", "target", "normalizer"): "log weight",
    ("sub", "log sum", "lowered target"): "loss",
    ("sub", "lowered target", "log sum"): "log weight",
}
"""The same for primitives of two operands, which must be forms of one x."""

_SAME = ("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", *CASTS)
_FLOATS = lambda aval: jnp.issubdtype(aval.dtype, jnp.floating)


def _ever_the_same(name: str) -> bool:
    """Whether an operation maps arrays of equal elements to arrays of equal elements."""
    return is_elementwise(name) or name in ("broadcast_in_dim", "reshape", "squeeze")


def _holds(narrow: Any, wide: Any) -> bool:
    """Whether a dtype holds all numbers of a floating dtype."""
    if not jnp.issubdtype(wide, jnp.floating):
        return False
    a, b = jnp.finfo(narrow), jnp.finfo(wide)
    return bool(a.nmant <= b.nmant and a.maxexp <= b.maxexp and a.minexp >= b.minexp)


class _Reader:
    """The facts about the values of one level of a program, by their numbers.

    Attributes:
      forms: the forms of values.
      roots: of a float that was cast to a wider type, or is unchanged otherwise, the number of the original.
      vectors: of a value that repeats a vector [n] for every row, the number of the vector.
      words: the values that are 0, 1, 2 ... along their last dim.
    """

    def __init__(self, values: Nested, level: Level, spread: set[int]):
        self.values, self.level, self.spread = values, level, spread
        self.avals = level.program.avals
        self.forms: dict[int, Form] = {}
        self.roots: dict[int, int] = {}
        self.vectors: dict[int, int] = {}
        self.words: set[int] = set()
        spread.update(level.of([*level.program.constants]))
        for equation in level.program.equations:
            if len(equation.outputs) == 1 and not equation.bodies:
                self._read(equation, equation.outputs[0])

    def _read(self, equation: Equation, made: int) -> None:
        name = equation.name
        if _ever_the_same(name) and self.spread.issuperset(names_of(self.level.of(equation.inputs))):
            self.spread.update(self.level.of((made,)))
        elif name in _SAME:
            self._follow(equation, equation.read[0], made)
        elif name == "iota":
            self.words |= {made} if equation.op.options["dimension"] == len(self.avals[made].shape) - 1 else set()
        elif (same := self._unchanged(equation)) is not None:
            self._hand_on(same, made)
        elif (form := self._form(equation)) is not None:
            self.forms[made] = form

    # Numbers known while the program is traced, and what leaves a value as it is.

    def number(self, atom: Atom) -> float | None:
        """The number that all elements of a value equal; None if there is none, or it is unknown."""
        (value,) = self.level.of((atom,))
        return number(self.values, value) if is_constant(value) or value in self.spread else None

    def _unchanged(self, equation: Equation) -> int | None:
        """The operand that an operation returns unchanged: plus 0, times 1, a known choice, a peak made finite."""
        if equation.name == "select_n":
            chosen = self.number(equation.inputs[0])
            if chosen is not None:
                return _name(equation.inputs[1 + int(chosen)])
            finite, peak = (self.form(each) for each in (equation.inputs[0], equation.inputs[-1]))
            made_finite = finite is not None and finite.what == "finite" and peak == replace(finite, what="peak")
            return equation.inputs[-1] if made_finite and len(equation.inputs) == 3 else None
        if len(equation.inputs) != 2:
            return None
        a, b = equation.inputs
        left, right = self.number(a), self.number(b)
        if (equation.name in ("add", "sub") and right == 0) or (equation.name in ("mul", "div") and right == 1):
            return _name(a)
        if (equation.name == "add" and left == 0) or (equation.name == "mul" and left == 1):
            return _name(b)
        if equation.name == "max":
            for bound, other in ((left, _name(b)), (right, _name(a))):
                variance = self._is(other, "mean square") and bound == 0
                if variance or (self._is(other, "peak") and bound == -np.inf):
                    return other
        return None

    def form(self, atom: Atom | None) -> Form | None:
        """The form of a value; None if none is recognised."""
        return None if atom is None or is_constant(atom) else self.forms.get(atom)

    def _is(self, atom: Atom | None, what: str) -> bool:
        form = self.form(atom)
        return form is not None and form.what == what

    def _hand_on(self, same: int, made: int) -> None:
        """Note that `made` has the elements of `same`, possibly broadcast over more rows."""
        if self.avals[same].shape == self.avals[made].shape:
            self.roots[made] = self._root(same)
            if same in self.forms:
                self.forms[made] = self.forms[same]
        if same in self.vectors and self.avals[same].shape[-1:] == self.avals[made].shape[-1:]:
            self.vectors[made] = self.vectors[same]

    # Casts, reshapes and broadcasts.

    def _follow(self, equation: Equation, given: int, made: int) -> None:
        a, b = self.avals[given], self.avals[made]
        if equation.name in CASTS or equation.name == "convert_element_type":
            form = self.forms.get(given)
            if form is not None and (form.what == "is target" or _holds(self.avals[form.x].dtype, b.dtype)):
                self.forms[made] = form
            if _FLOATS(a) and _holds(a.dtype, b.dtype):
                self.roots[made] = self._root(given)
                if (vector := self._vector(given)) is not None:
                    self.vectors[made] = vector
            return
        along = equation.op.options.get("broadcast_dimensions") if equation.name == "broadcast_in_dim" else None
        last = along is None or tuple(along)[-1:] == (len(b.shape) - 1,)
        if last and a.shape[-1:] == b.shape[-1:] != ():
            if (vector := self._vector(given)) is not None:
                self.vectors[made] = vector
            self.words |= {made} if given in self.words else set()
        if (form := self.forms.get(given)) is None or form.what in _FULL:
            return
        rows = self.avals[form.x].shape[:-1]
        inner = b.shape in (rows, (*rows, 1)) if along is None else b.shape in ((*rows, 1), self.avals[form.x].shape)
        if inner and (along is None or tuple(along) == tuple(range(len(a.shape)))):
            self.forms[made] = form

    def _root(self, number: int) -> int:
        return self.roots.get(number, number)

    def _vector(self, atom: Atom) -> int | None:
        """The number of the vector [n] that a value repeats for every row; None if it repeats none."""
        if is_constant(atom):
            return None
        shape = self.avals[atom].shape
        own = shape and shape[-1] > 1 and all(size == 1 for size in shape[:-1])
        return self.vectors.get(atom, atom if own else None)

    # The form of a result, from the forms of its operands.

    def _seen(self, atom: Atom) -> list[Form]:
        """The possible forms of a value: the recognised one, and an array by itself."""
        if is_constant(atom):
            return []
        found = [self.forms[atom]] if atom in self.forms else []
        aval = self.avals[atom]
        return [*found, Form("x", self._root(atom))] if aval.shape and _FLOATS(aval) else found

    def _form(self, equation: Equation) -> Form | None:
        name, inputs = equation.name, equation.inputs
        if name == "gather":
            return self._gathered(equation)
        if name == "integer_pow":
            return self._of_one("square", inputs[0]) if equation.op.options["y"] == 2 else None
        if name == "mul" and len(equation.read) == 2 and len(set(equation.read)) == 1:
            return self._of_one("square", inputs[0])
        if name in ("reduce_sum", "reduce_max"):
            last = len(self.avals[inputs[0]].shape) - 1 if names_of(inputs[:1]) else None
            return self._of_one(name, inputs[0]) if tuple(equation.op.options["axes"]) == (last,) else None
        if len(inputs) == 1:
            return self._of_one(name, inputs[0])
        if len(inputs) != 2:
            return None
        if name == "eq":
            return self._is_target(*inputs) or self._is_target(*inputs[::-1])
        return self._with_number(name, *inputs) or self._of_two(name, *inputs)

    def _of_one(self, name: str, atom: Atom) -> Form | None:
        for form in self._seen(atom):
            if (what := _OF_ONE.get((name, form.what))) is not None:
                return replace(form, what=what)
        return None

    def _with_number(self, name: str, a: Atom, b: Atom) -> Form | None:
        """The form of an operation with one known number."""
        right, left = self.number(b), self.number(a)
        if left is not None and name in ("mul", "add"):
            a, left, right = b, None, left
        if left is not None:
            return (
                replace(self.forms[b], what="inverse") if (name, left) == ("div", 1) and self._is(b, "root") else None
            )
        form = self.form(a)
        if form is None or form.x < 0 or right is None:
            return None
        size = self.avals[form.x].shape[-1]
        if form.what in ("sum", "sum of squares") and name in ("mul", "div"):
            all_of = right * size if name == "mul" else right / size
            what = "mean" if form.what == "sum" else "mean square"
            return replace(form, what=what) if abs(all_of - 1) < 1e-6 else None
        if form.what == "mean square" and name == "add" and right >= 0 and not form.epsilon:
            return replace(form, epsilon=float(right))
        return replace(form, what="inverse") if form.what == "mean square" and (name, right) == ("pow", -0.5) else None

    def _of_two(self, name: str, a: Atom, b: Atom) -> Form | None:
        orders = [(a, b), (b, a)] if name in ("mul", "add") else [(a, b)]
        for left, right in orders:
            vector = self._vector(right)
            for one in self._seen(left):
                if vector is not None and (found := self._with_vector(name, one, vector)) is not None:
                    return found
                for other in self._seen(right):
                    if (found := _together(name, one, other, self.avals)) is not None:
                        return found
        return None

    def _with_vector(self, name: str, form: Form, vector: int) -> Form | None:
        size = self.avals[vector].shape[-1]
        if form.x < 0 or self.avals[form.x].shape[-1:] != (size,) or not _FLOATS(self.avals[vector]):
            return None
        if name == "mul" and form.scale is None and form.shift is None and form.what in ("normed", "inverse"):
            return replace(form, what="normed" if form.what == "normed" else "scaled inverse", scale=vector)
        return replace(form, shift=vector) if (name, form.what, form.shift) == ("add", "normed", None) else None

    def _is_target(self, a: Atom, b: Atom) -> Form | None:
        """The form "is target": for each row the one-hot mask of its target word."""
        if names_of([a, b]) != (a, b) or b not in self.words or self.avals[a].shape[-1:] != (1,):
            return None
        dtype, words = self.avals[a].dtype, self.avals[b].shape[-1]
        counts = jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).max >= words - 1
        return Form("is target", targets=a, beyond="zero") if counts else None

    def _gathered(self, equation: Equation) -> Form | None:
        """The form of each row's element at its target, or of its only element."""
        operand, indices = equation.inputs
        if is_constant(operand):
            return None
        shape, made, form = self.avals[operand].shape, equation.op.made[0].shape, self.forms.get(operand)
        if self.number(indices) == 0 and shape[-1:] == (1,) and made == shape[:-1]:
            return None if form is None or form.what in _FULL else form
        targets = self._targets(equation.op.options, operand, indices)
        if targets is None or made not in (shape[:-1], (*shape[:-1], 1)):
            return None
        beyond = _BEYOND.get(jax.lax.GatherScatterMode.from_any(equation.op.options["mode"]))
        filled = equation.op.options.get("fill_value")
        found = self._of_one("gather", operand)
        if beyond == "nan" and not (filled is None or np.isnan(filled)):
            return None
        return (
            None
            if found is None or beyond is None or self.avals[found.x].shape != shape
            else replace(found, targets=targets, beyond=beyond)
        )

    def _targets(self, options: Mapping[str, Any], operand: int, indices: int) -> Atom | None:
        """The index along the last dim from which one element of each row is taken; None for other gathers."""
        shape, numbers = self.avals[operand].shape, options["dimension_numbers"]
        last = len(shape) - 1
        if set(options["slice_sizes"]) != {1} or not set(numbers.offset_dims) <= {last}:
            return None
        rows, of = tuple(range(last)), lambda dims: tuple(map(int, dims))
        if of(numbers.start_index_map) == (last,) and of(numbers.operand_batching_dims) == rows:
            in_order = of(numbers.start_indices_batching_dims) == rows
            return (
                indices
                if in_order and aval_of(indices, self.avals).size == self.avals[operand].size // shape[-1]
                else None
            )
        if last != 1 or of(numbers.start_index_map) != (0, 1) or of(numbers.collapsed_slice_dims) != (0, 1):
            return None
        pair = next((each for each in self.level.program.equations if indices in each.outputs), None)
        if pair is None or pair.name != "concatenate" or [each.shape for each in pair.op.given] != [(shape[0], 1)] * 2:
            return None
        try:
            (row,) = self.level.of(pair.inputs[:1])
            counted = elements(self.values, row, (np.arange(shape[0]), np.zeros(shape[0], int)))
        except NotStatic:
            return None
        return pair.inputs[1] if np.array_equal(counted, np.arange(shape[0])) else None


_BEYOND = {
    jax.lax.GatherScatterMode.FILL_OR_DROP: "nan",
    jax.lax.GatherScatterMode.CLIP: "nearest",
    jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS: "nearest",
}


def _name(atom: Atom) -> int | None:
    return None if is_constant(atom) else atom


def _together(name: str, a: Form, b: Form, avals: Mapping[int, Any]) -> Form | None:
    if (name, {a.what, b.what}) == ("mul", {"is target", "log weights"}):
        one, weights = (a, b) if a.what == "is target" else (b, a)
        fits = aval_of(one.targets, avals).shape == (*avals[weights.x].shape[:-1], 1)
        return replace(weights, what="picked", targets=one.targets, beyond=one.beyond) if fits else None
    what = _OF_TWO.get((name, a.what, b.what))
    if what is None or a.x != b.x:
        return None
    if what == "centered":
        return replace(a, what=what, centers=True)
    if what == "mean square":
        return replace(a, what=what, centers=True) if not (a.centers or a.epsilon) else None
    if what == "normed" and a.centers != b.centers:
        return None
    more = b if b.epsilon or b.scale is not None or b.targets is not None else a
    return replace(more, what=what)


# --------------------------------------------------------------------------------------------------
# Which values become results of kernels, and what need not be computed any more.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Body:
    """How one level of a program is run with kernels.

    Attributes:
      live: its equations whose results are read, in order.
      instead: the equations whose result a kernel computes, with the form of that result.
      goes_on: those of the latter whose x is read by later equations too.
    """

    live: tuple[Equation, ...]
    instead: Mapping[Equation, Form]
    goes_on: frozenset[Equation]


@dataclass(frozen=True)
class Found:
    """The recognised norms and cross entropies of a program.

    Attributes:
      bodies: how each program in it, itself included, is run.
      inside: the equations whose bodies contain recognised norms or cross entropies.
    """

    bodies: Mapping[Program, Body]
    inside: frozenset[Equation]

    @property
    def all(self) -> list[Form]:
        """All recognised forms."""
        return [form for body in self.bodies.values() for form in body.instead.values()]

    def __str__(self) -> str:
        losses = sum(form.what in _LOSSES for form in self.all)
        return f"{len(self.all) - losses} norms and {losses} cross entropies of the model's own code"


_LOSSES = ("loss", "log weight")


def recognised(program: Program) -> Found:
    """Find the norms and cross entropies of a program that kernels may compute here (`fused.chosen`)."""
    values, spread = nested(program), set()
    bodies: dict[Program, Body] = {}
    inside: set[Equation] = set()

    def read(level: Level) -> bool:
        reader = _Reader(values, level, spread)
        for equation in level.program.equations:
            levels = () if equation.name.startswith("custom_") else values.levels.get(equation, ())
            has_some = [read(each) for each in levels]
            if any(has_some):
                inside.add(equation)
        body = bodies[level.program] = _body(level.program, reader.forms)
        return bool(body.instead) or not inside.isdisjoint(level.program.equations)

    read(values.top)
    return Found(bodies, frozenset(inside))


def _body(program: Program, forms: Mapping[int, Form]) -> Body:
    """Choose the equations to replace, from the results backwards, so that the last step of a norm counts."""
    needed, live, instead, goes_on = set(names_of(program.outputs)), [], {}, set()
    for equation in reversed(program.equations):
        if needed.isdisjoint(equation.outputs) and not equation.op.acts:
            continue
        live.append(equation)
        form = forms.get(equation.outputs[0]) if len(equation.outputs) == 1 else None
        if form is not None and _has_kernel(form, equation.op.made[0], program.avals):
            instead[equation] = form
            goes_on |= {equation} if form.x in needed else set()
            needed.add(form.x)
            needed.update(names_of(each for each in (form.scale, form.shift, form.targets) if each is not None))
        else:
            needed.update(equation.read)
    return Body(tuple(live[::-1]), instead, frozenset(goes_on))


def _has_kernel(form: Form, made: Any, avals: Mapping[int, Any]) -> bool:
    x: Any = avals.get(form.x)
    if form.what == "normed":
        return made.dtype == x.dtype and made.shape == x.shape and fused.chosen(x) != "xla"
    of_rows = form.what in _LOSSES and made.shape in (x.shape[:-1], (*x.shape[:-1], 1))
    return of_rows and fused.chosen(x, features=x.shape[-1]) != "xla"


# --------------------------------------------------------------------------------------------------
# A model's code with kernels in it: its program is traced and run with them in the place of what was found.
# --------------------------------------------------------------------------------------------------


def reading_kernels(fun: Callable, kernels: str, variables: Variables, *args: Any) -> Any:
    """Call `fun(variables, *args)` with its norms and cross entropies computed by kernels where they apply.

    Args:
      fun: returns a pytree; leaves that are no arrays are handed through.
      kernels: as a plan asks for.
      variables: as one rank reads them.
      *args: pytrees of arrays.
    """

    def with_kernels(program: Program, values: Sequence[Any]) -> list[Any]:
        with fused.asking_for(kernels):
            found = recognised(program)
            if found.all:
                _say(str(found))
            return _Running(found).run(program, values)

    call = lambda params, frozen, state, *args: fun(Variables(params, frozen, state), *args)
    return run_traced(call, with_kernels, variables.params, variables.frozen, variables.state, *args)


@lru_cache
def _say(found: str) -> None:
    """Log what was found, once for each text."""
    logger.info("kernels: %s", found)


@dataclass(frozen=True)
class _Running:
    found: Found

    def run(self, program: Program, values: Sequence[Any]) -> list[Any]:
        """The results of the program, or of a body in it."""
        body = self.found.bodies.get(program)
        if body is None:  # the condition of a loop
            return run_program(program, values)
        env: dict[int, Any] = dict(program.constants)
        env.update(zip(program.inputs, values, strict=True))
        for equation in body.live:
            if (form := body.instead.get(equation)) is not None:
                with equation.op.scope():
                    found = self._kernel(form, equation, env, equation in body.goes_on)
                    lacks = varying_axes(equation.op.made[0]) - varying_axes(found)
                    made = [cast_to_varying(found, tuple(sorted(lacks))) if lacks else found]
            else:
                made = self._plain(equation, values_of(equation.inputs, env))
            env.update(zip(equation.outputs, made, strict=True))
        return results_of(program.outputs, env)

    def _plain(self, equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        made = run_bodies(equation, operands, self.run) if equation in self.found.inside else None
        return equation.op.bind(list(operands)) if made is None else made

    def _kernel(self, form: Form, equation: Equation, env: dict[int, Any], goes_on: bool) -> Any:
        """The result of a kernel; a norm also returns x for a residual stream, so that one pass computes both gradients."""
        (made,), x = equation.op.made, env[form.x]
        if form.what in _LOSSES:
            losses = _losses(form, x, jnp.asarray(value_of(form.targets, env)))
            return (losses if form.what == "loss" else -losses).astype(made.dtype).reshape(made.shape)
        flat = lambda number: env[number].reshape(-1)
        scale = jnp.ones(x.shape[-1], x.dtype) if form.scale is None else flat(form.scale)
        shift = None if form.shift is None else flat(form.shift)
        kind: Any = {"epsilon": form.epsilon, "centers": form.centers, "form": fused.chosen(x)}
        if not goes_on:
            return fused.norm(x, scale, shift, **kind)
        y, same = fused.norm_beside(x, scale, shift, **kind)
        if varying_axes(same) == varying_axes(x):
            env[form.x] = same
        return y


def _losses(form: Form, logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The loss of every row; a row with loss NaN has no gradient, so that it can be masked out afterwards."""
    words, targets = logits.shape[-1], as_counted(targets.reshape(logits.shape[:-1]), None)
    if form.beyond == "nearest":
        return cross_entropy_of_rows(logits, jnp.clip(targets, 0, words - 1))
    outside = (targets < 0) | (targets >= words)
    losses = cross_entropy_of_rows(logits, jnp.where(outside, -1, targets))
    return losses if form.beyond == "zero" else jnp.where(outside, jnp.nan, losses)
