"""Traced programs: the parts of a jaxpr, a typed view of an equation (`Operation`), and rewriting equations in place."""

import contextlib
import functools
import inspect
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import PurePath
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core.primitives import dot_general_p, transpose_p
from jax.interpreters import mlir
from jax.interpreters.partial_eval import dce_jaxpr
from jax.lax import optimization_barrier_p
from jax.sharding import get_abstract_mesh

from axonml_jax import base
from axonml_jax.base import PyTree
from axonml_jax.compat.order import CALLS_WITH_GRADIENTS, under_mesh
from axonml_jax.compat.varying_types import varying_alike, varying_axes

# --------------------------------------------------------------------------------------------------
# Traced programs as JAX keeps them: jaxprs, open or closed, in every supported version; only this folder reads one.
# --------------------------------------------------------------------------------------------------


class Traced(NamedTuple):
    """A function traced on given arguments: its jaxpr over flat arguments, and the structure of what it returns."""

    jaxpr: Any
    out_tree: Any

    @property
    def made(self) -> list[Any]:
        """The abstract values of what it returns, flat."""
        return [atom.aval for atom in _inner(self.jaxpr).outvars]


class Opened(NamedTuple):
    """The parts of a jaxpr.

    Attributes:
      inputs: its arguments; variables, which are compared by identity and have an `aval`.
      constants: pairs of a variable and the value that it stands for.
      equations: as JAX keeps them; `Operation` reads one.
      outputs: variables or literals.
    """

    inputs: Sequence[Any]
    constants: Sequence[tuple[Any, Any]]
    equations: Sequence[Any]
    outputs: Sequence[Any]


def trace(fun: Callable[..., PyTree], *args: PyTree) -> Traced:
    """Traces `fun` on `args` (arrays or tracers), under the mesh axes that are bound around the call."""
    jaxpr, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    return Traced(jaxpr, jax.tree.structure(shape))


def traced_with(value: Any, tree: PyTree) -> bool:
    """Whether a value may depend on the arrays of a tree, judged by the class of tracers; True for a tree without arrays.

    If False, the value does not depend on them in a trace that differentiates by them.
    """
    leaves = jax.tree.leaves(tree)
    return not leaves or any(type(value) is type(leaf) for leaf in leaves)


def is_jaxpr(value: Any) -> bool:
    """Whether a value is a jaxpr, open or closed (one type since JAX 0.12), or has one as `jaxpr`, as a traced `jax.jit`."""
    return isinstance(_inner(value), Jaxpr)


def jaxprs_among(params: Mapping[str, Any]) -> tuple[Any, ...]:
    """The jaxprs among an equation's parameters, and in tuples among them; closed ones stay closed."""
    found = []
    for value in params.values():
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            found.append(value)
        elif isinstance(value, tuple):
            found += [each for each in value if isinstance(each, (ClosedJaxpr, Jaxpr))]
    return tuple(found)


def opened(jaxpr: Any) -> Opened:
    """The parts of a jaxpr; the constants of an open one have no values: None stands for them."""
    inner = _inner(jaxpr)
    values = list(getattr(jaxpr, "consts", ())) or [None] * len(inner.constvars)
    return Opened(inner.invars, list(zip(inner.constvars, values, strict=True)), inner.eqns, inner.outvars)


def constants_within(jaxpr: Any) -> list[Any]:
    """The constants of a closed jaxpr, and of all jaxprs inside its equations."""
    found, known, within = [], set(), [jaxpr]
    while within:
        each = within.pop()
        if id(each) not in known:
            known.add(id(each))
            found += getattr(each, "consts", ())
            within += [inner for eqn in _inner(each).eqns for inner in jaxprs_among(eqn.params)]
    return found


def live(jaxpr: Any) -> Any:
    """Removes the equations that no result needs, as lowering does; inputs stay, and the constants of a closed jaxpr."""
    inner = _inner(jaxpr)
    kept, _ = dce_jaxpr(inner, [True] * len(inner.outvars), instantiate=True)
    return kept if isinstance(jaxpr, Jaxpr) or not isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(kept, jaxpr.consts)


def _inner(jaxpr: Any) -> Any:
    """The open jaxpr in a closed one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


# --------------------------------------------------------------------------------------------------
# StableHLO text as MLIR operations: `jax.jit(f).lower(...)` promises the text, not Python's access to what it says.
# --------------------------------------------------------------------------------------------------


def parsed(text: str) -> Any:
    """The module of a lowered program: operations with `name`, `attributes`, `operands`, `results` and `regions`.

    Keep it as long as its operations are read: they do not keep it alive, and without it some read as empty.

    Args:
      text: what `lowered.as_text()` returns.
    """
    return mlir.ir.Module.parse(text, context=mlir.make_ir_context())


# --------------------------------------------------------------------------------------------------
# `Operation`: a typed view of one equation of a jaxpr, and how it is run again; nobody else reads an equation's fields.
# --------------------------------------------------------------------------------------------------


class Scan(NamedTuple):
    """A scan, whose operands are constants, then the carry, then what is scanned over.

    Attributes:
      num_consts, num_carry: how many of each; the rest is scanned over.
      body: the jaxpr of one trip.
      options: `length`, `reverse` and `unroll`, as `jax.lax.scan` takes them.
    """

    num_consts: int
    num_carry: int
    body: Any
    options: Mapping[str, Any]

    @property
    def first_scanned(self) -> int:
        """The position of the first operand that is scanned over."""
        return self.num_consts + self.num_carry


class While(NamedTuple):
    """A while loop, whose operands are the condition's constants, the body's, then the carry."""

    condition: Any
    body: Any
    num_condition_consts: int
    num_body_consts: int


class Checkpointed(NamedTuple):
    """A call under `jax.checkpoint`.

    Attributes:
      body: its jaxpr.
      options: options that `jax.checkpoint` takes.
      in_backward: whether it computes again in a backward; it is then lowered with a barrier.
    """

    body: Any
    options: Mapping[str, Any]
    in_backward: bool


class Mapped(NamedTuple):
    """A `shard_map`: its jaxpr, the sizes of its mesh's axes, the axes that it makes manual, and its other arguments."""

    body: Any
    axis_sizes: Mapping[str, int]
    manual: frozenset[str]
    options: Mapping[str, Any]


class Solve(NamedTuple):
    """The parts of a linear solve (`jax.lax.custom_linear_solve`): each a jaxpr, and what it reads before the vector.

    Attributes:
      matvec: the product with the matrix, whose results are like the right side.
      solve: the solution for a right side, then other results.
      transposed: the solution with the transposed matrix; None: it cannot be differentiated backwards.
      first: the first operand of the right side.
    """

    matvec: tuple[Any, slice]
    solve: tuple[Any, slice]
    transposed: tuple[Any, slice] | None
    first: int


class Contraction(NamedTuple):
    """The dims of a product's two operands that are contracted, and those that are batched."""

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    batched: tuple[tuple[int, ...], tuple[int, ...]]


_CALLS = frozenset(("jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2"))


_OVER_DIMS = {"psum": "reduce_sum", "pmax": "reduce_max", "pmin": "reduce_min"}


def _over_dims(eqn: Any) -> str:
    name, axes = eqn.primitive.name, eqn.params["axes"]
    if any(isinstance(axis, str) for axis in axes):
        return name
    return _OVER_DIMS[name] if axes else "copy"


class Operation:
    """A typed view of one equation.

    Args:
      eqn: JAX's own.
      call: the call that it was taken out of; None: none.

    Attributes:
      name: the primitive's; of a collective over dims (`jax.vmap` makes them of one over its own axis) that of the reduction.
      operands: the variables and literals that it reads.
      results: the variables that it defines.
      call_around: the call that it was taken out of.
    """

    def __init__(self, eqn: Any, call: "Operation | None" = None):
        self.eqn, self.call_around = eqn, call
        name = eqn.primitive.name
        self.name: str = name if name not in _OVER_DIMS else _over_dims(eqn)
        self.operands: Sequence[Any] = eqn.invars
        self.results: Sequence[Any] = eqn.outvars

    @property
    def given(self) -> list[Any]:
        """The abstract values of its operands."""
        return [atom.aval for atom in self.eqn.invars]

    @property
    def made(self) -> list[Any]:
        """The abstract values of its results."""
        return [var.aval for var in self.eqn.outvars]

    @property
    def options(self) -> Mapping[str, Any]:
        """The primitive's parameters by name; those of `jax.lax` operations are its own arguments."""
        return self.eqn.params

    @property
    def label(self) -> str:
        """The name that a `jit` or a `checkpoint_name` gives; "" for all others."""
        return str(self.eqn.params.get("name", "")) if self.name in ("jit", "name") else ""

    @property
    def has_effects(self) -> bool:
        """Whether JAX knows of an effect, a collective's mesh axes among them."""
        return bool(self.eqn.effects)

    @property
    def acts(self) -> bool:
        """Whether it does something besides making its results, such as printing."""
        return any(type(effect).__name__ != "NamedAxisEffect" for effect in self.eqn.effects)

    # Inner programs

    @cached_property
    def bodies(self) -> tuple[Any, ...]:
        """All jaxprs among its parameters; closed ones stay closed."""
        return jaxprs_among(self.eqn.params)

    @property
    def called(self) -> Any | None:
        """The jaxpr that it merely calls (`jit`), whose body may stand in its place; None for all others."""
        return self.eqn.params["jaxpr"] if self.name == "jit" else None

    @property
    def call(self) -> Any | None:
        """The jaxpr that it calls once on the same operands, derivatives of its own or not; None for all others."""
        if self.name not in _CALLS:
            return None
        params = self.eqn.params
        inner = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
        return inner if inner is not None and len(opened(inner).inputs) == len(self.operands) else None

    @property
    def scan(self) -> Scan | None:
        """Its view as a scan; None for all others."""
        if self.name != "scan":
            return None
        params = self.eqn.params
        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        if "num_consts" in params:  # jax < 0.12
            return Scan(params["num_consts"], params["num_carry"], params["jaxpr"], options)
        consts, carry, _ = params["ft_in"].unpack()
        return Scan(len(consts), len(carry), params["jaxpr"], options)

    @property
    def loop(self) -> While | None:
        """Its view as a while loop; None for all others."""
        if self.name != "while":
            return None
        params = self.eqn.params
        return While(params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"], params["body_nconsts"])

    @property
    def branches(self) -> Sequence[Any] | None:
        """The jaxprs of which a conditional runs one, on all operands but the first; None for all others."""
        return self.eqn.params["branches"] if self.name == "cond" else None

    @property
    def chooses_by_platform(self) -> bool:
        """Whether it is a conditional whose branch is chosen by the platform that is compiled for."""
        return self.eqn.params.get("branches_platforms") is not None

    @property
    def checkpointed(self) -> Checkpointed | None:
        """Its view as a call under `jax.checkpoint`; None for all others."""
        if self.name != "remat2":
            return None
        params = self.eqn.params
        options = {key: params[key] for key in ("prevent_cse", "policy")}
        return Checkpointed(params["jaxpr"], options, params["differentiated"])

    @property
    def mapped(self) -> Mapped | None:
        """Its view as a `shard_map`; None for all others."""
        if self.name != "shard_map":
            return None
        params = self.eqn.params
        manual = frozenset(params["newly_manual_axes"])
        options = {key: params[key] for key in ("mesh", "in_specs", "out_specs", "check_vma")} | {"axis_names": manual}
        return Mapped(params["jaxpr"], dict(params["mesh"].shape), manual, options)

    # What it does

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes that it names; positional ones (ints, as in `reduce_sum`) are none."""
        axes = self.eqn.params.get("axis_name", self.eqn.params.get("axes", ()))
        axes = axes if isinstance(axes, (tuple, list)) else (axes,)
        return tuple(axis for axis in axes if isinstance(axis, str))

    @property
    def groups(self) -> Sequence[Sequence[int]] | None:
        """The groups of ranks that a collective is done in; None: all of its axes."""
        return self.eqn.params.get("axis_index_groups")

    @property
    def contraction(self) -> Contraction:
        """The dims of a `dot_general`."""
        contracted, batched = self.eqn.params["dimension_numbers"]
        pair = lambda dims: (tuple(dims[0]), tuple(dims[1]))
        return Contraction(pair(contracted), pair(batched))

    def does_the_same(self, other: "Operation") -> bool:
        """Whether another equation is of the same primitive with the same parameters."""
        return self.is_alike(other) and str(self.eqn.params) == str(other.eqn.params)

    def is_alike(self, other: "Operation") -> bool:
        """Whether another equation is of the same primitive."""
        return self.eqn.primitive is other.eqn.primitive

    # Running it

    def bind(self, values: Sequence[Any], **changed: Any) -> list[Any]:
        """Runs it on `values`, with some parameters changed, keeping its source line and name scopes; returns its results."""
        return self._bound(values, changed, contextlib.nullcontext())

    def bind_here(self, values: Sequence[Any], **changed: Any) -> list[Any]:
        """Runs it as `bind` does, but under the mesh around the call instead of the one that it was traced under."""
        return self._bound(values, changed, under_mesh(get_abstract_mesh()))

    def _bound(
        self, values: Sequence[Any], changed: dict[str, Any], around: contextlib.AbstractContextManager
    ) -> list[Any]:
        primitive = self.eqn.primitive
        if not self.bodies or self.name.startswith("scatter"):  # whose body joins two numbers
            values = varying_alike(values, self.given)
        if self.name == "pvary":  # the value may vary over more axes than when it was traced
            changed = {"axes": tuple(axis for axis in self.options["axes"] if axis not in varying_axes(values[0]))}
            if not changed["axes"]:
                return list(values)
        params = primitive.get_bind_params({**self.eqn.params, **changed})
        if isinstance(params, tuple):  # jax < 0.11 returned (functions, params) for call-like primitives
            functions, params = params
            values = [*functions, *values]
        with self.scope(), self.eqn.ctx.manager, around:
            results = primitive.bind(*values, **params)
        return list(results) if primitive.multiple_results else [results]

    def bind_in_backward(self, values: Sequence[Any]) -> list[Any]:
        """Runs a call under `jax.checkpoint` as one that recomputes in a backward; returns its results."""
        return self.bind(values, differentiated=True)

    def scope(self) -> Any:
        """A context in which new equations carry its source line and name scopes."""
        stack = source_info_util.current_name_stack()
        stack = stack + self.scopes
        return source_info_util.user_context(self.eqn.source_info.traceback, name_stack=stack)

    # Where it comes from

    @property
    def scopes(self) -> Any:
        """Its name scopes, those of the calls around it first; prints as a path."""
        own = self.eqn.source_info.name_stack
        return own if self.call_around is None else self.call_around.scopes + own

    @property
    def traceback(self) -> Any:
        """The traceback of where it was traced; None where JAX does not say."""
        return self.eqn.source_info.traceback

    @property
    def functions(self) -> list[str]:
        """Names of the functions that were called when it was traced, innermost first."""
        traceback = self.traceback
        return [frame.function_name for frame in traceback.frames] if traceback is not None else []

    @property
    def line(self) -> str:
        """The user's line that it comes from, or the call that it was taken out of; "" where JAX does not say."""
        path, line, function = _place_of(self)
        return f"line {line} of {PurePath(path).name}, {function}" if path else ""


def solve_of(op: Operation) -> Solve | None:
    """The view of an operation as a linear solve; None for all others."""
    if op.name != "custom_linear_solve":
        return None
    jaxprs, counts = op.eqn.params["jaxprs"], op.eqn.params["const_lengths"]
    ends = list(itertools.accumulate(counts))
    parts = [(jaxpr, slice(end - count, end)) for jaxpr, count, end in zip(jaxprs, counts, ends, strict=True)]
    matvec, _, solve, transposed = parts
    return Solve(matvec, solve, transposed if transposed[0] is not None else None, ends[-1])


def written_in(op: Operation) -> Any | None:
    """The jaxpr that may stand in an operation's place: what it merely calls, or what JAX itself writes it in; None for others.

    The latter are primitives of `jax.experimental.hijax` (JAX 0.12), such as `jnp.searchsorted`, of which no result has a
    derivative: for others they have rules.
    """
    primitive = op.eqn.params.get("_prim") if op.name == "call_hi_primitive" else None
    if primitive is None:
        return op.called
    if op.has_effects or any(jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact) for aval in op.made):
        return None

    def written(*given: Any) -> list[Any]:
        with op.scope():
            return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, given)))

    return trace(written, *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in op.given)).jaxpr


def _place_of(op: Operation) -> tuple[str, str, str]:
    """The file, line and function of the user's line that an operation, or the call around it, comes from; "" where unknown.

    That is the innermost one outside of JAX; but one outside of what runs a model, where there is one: of calls of the model
    in a loss, and of NNX's variables, whose operators are code of its own.
    """
    info = op.eqn.source_info
    found = _FRAME.findall(source_info_util.summarize(info))
    if found and _runs_models(found[0][0]):
        frames = _FRAME.findall(source_info_util.summarize(info, num_frames=_MANY))
        found = [frame for frame in frames if not _runs_models(frame[0])][-1:] or found
    if found:
        return found[0]
    call = op.call_around
    return ("", "", "") if call is None else _place_of(call)


_FRAME = re.compile(r"^(.*?):(\d+)(?::\d+)? \((.*)\)$", re.MULTILINE)
_MANY = 40


def _runs_models(path: str) -> bool:
    """Whether a file has code that runs a model for the user."""
    return path.startswith(_MACHINERY) or path == _VARIABLES


def is_ours(op: Operation) -> bool:
    """Whether an operation is written in this library."""
    return _place_of(op)[0].startswith(_NOT_THE_USERS[1])


def function_of(op: Operation) -> str:
    """The name of the function that a `custom_vjp` call runs; "" for all other equations."""
    return _inner(op.call).debug_info.func_name if op.name == "custom_vjp_call" and op.call is not None else ""


def is_users_function(op: Operation) -> bool:
    """Whether a call with a derivative of its own has one that is neither JAX's nor this library's."""
    params = op.eqn.params
    derivative = params.get("bwd", params.get("jvp_jaxpr_fun"))
    path = _written_at(derivative)
    if "custom_derivatives.py" in path:  # a wrapper of JAX's: of `jax.custom_gradient`, or of `defjvps`
        return "bwd" in params or not _written_at(_inner(op.call)).startswith(_NOT_THE_USERS)
    return not path.startswith(_NOT_THE_USERS)


def _written_at(traced: Any) -> str:
    """The file and line of a function that JAX has traced, or is to trace; "" where JAX does not say."""
    about = getattr(traced, "debug_info", None)
    return (about.func_src_info or "").rpartition(" at ")[2] if about is not None else ""


def num_closed_over(op: Operation) -> int:
    """How many of its first operands a function with a derivative of its own (`jax.custom_vjp`) closes over.

    JAX refuses to differentiate by them. Of a call that was traced and then batched there are more, among the other operands.
    """
    return op.eqn.params.get("num_consts", 0) if op.name == "custom_vjp_call" else 0


def is_closed_over(error: Exception) -> bool:
    """Whether JAX refuses to differentiate by what a function with a derivative of its own closes over."""
    return type(error).__name__ == "CustomVJPException"


def has_users_derivatives(jaxpr: Any) -> bool:
    """Whether such a call is in a jaxpr, or in one inside it."""
    calls = (Operation(eqn) for eqn in opened(jaxpr).equations if eqn.primitive.name in CALLS_WITH_GRADIENTS)
    inner = (body for eqn in opened(jaxpr).equations for body in jaxprs_among(eqn.params))
    return any(map(is_users_function, calls)) or any(map(has_users_derivatives, inner))


_NOT_THE_USERS = tuple(os.path.join(os.path.dirname(path), "") for path in (jax.__file__, base.__file__))
_MACHINERY = tuple(os.path.join(_NOT_THE_USERS[1], floor, "") for floor in ("compat", "meaning", "model"))
_VARIABLES = inspect.getfile(nnx.Variable)


# --------------------------------------------------------------------------------------------------
# Rewriting: equations of a traced program, in its bodies too, are replaced by others without tracing again.
# --------------------------------------------------------------------------------------------------

At = Callable[[Operation, "Reader", "Writer"], bool]
"""`at(operation, reader, writer)`: True if it has written equations that give the operation's result; False: it stays."""

Reader = Callable[[], Operation | None]
"""`reader()`: the one operation that reads the result; None: several do, or it is returned."""

_OPEN = frozenset(("jit", "closed_call", "scan", "while", "cond", "remat2", "shard_map"))


class Writer:
    """Writes equations in the place of one with one result; the last one written defines that result.

    Args:
      eqn: JAX's equation.
    """

    def __init__(self, eqn: JaxprEqn):
        self._eqn = eqn
        self._written: list[JaxprEqn] = []

    def transpose(self, x: Any, permutation: Sequence[int]) -> Any:
        """A value with its dims in another order."""
        return self._write(transpose_p, x, permutation=tuple(permutation))

    def barrier(self, x: Any) -> Any:
        """A value across which the compiler merges nothing (`compat/order.py`)."""
        return self._write(optimization_barrier_p, x)

    def product(self, a: Any, b: Any, **options: Any) -> Any:
        """`jax.lax.dot_general` of two values."""
        return self._write(dot_general_p, a, b, **options)

    def _write(self, primitive: Any, *operands: Any, **params: Any) -> Any:
        made, _ = primitive.abstract_eval(*(x.aval for x in operands), **params)
        made = made[0] if primitive.multiple_results else made
        result = Var(operands[0].aval.update(shape=made.shape, sharding=made.sharding))
        new = {"primitive": primitive, "invars": list(operands), "outvars": [result], "params": params}
        self._written.append(self._eqn.replace(**new))
        return result

    def equations(self) -> list[JaxprEqn]:
        """The equations that were written, of which the last defines the result."""
        *others, last = self._written
        return [*others, last.replace(outvars=list(self._eqn.outvars))]


def rewritten(jaxpr: Any, at: At, *, where: Callable[[Operation], bool]) -> Any:
    """Replaces equations of a jaxpr; returns the same object where none is replaced.

    Args:
      jaxpr: what `trace` returns.
      at: called for every equation that has one result and no body.
      where: whether to rewrite the bodies of an equation too: of loops, branches, calls and `shard_map`s.
    """
    return _Rewriting(at, where).of(jaxpr)


class _Rewriting:
    def __init__(self, at: At, where: Callable[[Operation], bool]):
        self.at, self.where = at, where
        self._known: dict[int, tuple[Any, Any]] = {}  # what is called several times stays one

    def of(self, value: Any) -> Any:
        """Rewrites a jaxpr, or a tuple of some; returns the value itself where nothing changes."""
        if isinstance(value, tuple):
            new = tuple(map(self.of, value))
            return value if all(a is b for a, b in zip(new, value, strict=True)) else new
        if not isinstance(value, (ClosedJaxpr, Jaxpr)):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value, self._jaxpr(value)
        return self._known[id(value)][1]

    def _jaxpr(self, jaxpr: Any) -> Any:
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        readers = functools.cache(lambda: _readers(inner))
        equations = [new for eqn in inner.eqns for new in self._equation(eqn, readers)]
        if len(equations) == len(inner.eqns) and all(a is b for a, b in zip(equations, inner.eqns, strict=True)):
            return jaxpr
        kept = inner.replace(eqns=equations)
        closed = isinstance(jaxpr, ClosedJaxpr) and not isinstance(jaxpr, Jaxpr)
        return ClosedJaxpr(kept, jaxpr.consts) if closed else kept

    def _equation(self, eqn: JaxprEqn, readers: Callable[[], dict[Var, list[Any]]]) -> list[JaxprEqn]:
        op = Operation(eqn)
        if op.bodies:
            if op.name not in _OPEN or not self.where(op):
                return [eqn]
            new = {key: self.of(value) for key, value in eqn.params.items()}
            changed = any(new[key] is not value for key, value in eqn.params.items())
            return [eqn.replace(params=new) if changed else eqn]
        writer = Writer(eqn)

        def reader() -> Operation | None:
            found = readers().get(op.results[0], ())
            return Operation(found[0]) if len(found) == 1 and found[0] is not None else None

        changes = len(op.results) == 1 and self.at(op, reader, writer)
        return writer.equations() if changes else [eqn]


def _readers(jaxpr: Any) -> dict[Var, list[Any]]:
    """The equations that read each variable of an open jaxpr; None where it is returned."""
    found: dict[Var, list[Any]] = {}
    for eqn in (*jaxpr.eqns, None):
        for atom in jaxpr.outvars if eqn is None else eqn.invars:
            if not isinstance(atom, Literal):
                found.setdefault(atom, []).append(eqn)
    return found
