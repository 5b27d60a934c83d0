"""JAX's behaviour at its edge: contexts around code, barriers, waiting, residuals, checkpoint policies, random bits."""

import contextlib
import contextvars
import functools
import os
import re
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import flax
import jax
import jax.numpy as jnp
from flax.core import Scope
from jax._src.config import trace_context
from jax._src.core import trace_state_clean
from jax._src.lax import parallel
from jax._src.mesh import thread_resources
from jax.ad_checkpoint import Offloadable as Offloadable
from jax.core import Tracer
from jax.extend.core import Primitive, Var, get_opaque_trace_state
from jax.extend.random import threefry_2x32
from jax.interpreters import ad, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.compat.versions import BARRIERS_JOIN_TYPES

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# --------------------------------------------------------------------------------------------------
# The surroundings of code that is being traced: its trace, JAX's settings, the bound mesh axes, the platform.
# --------------------------------------------------------------------------------------------------


def current_trace() -> Any:
    """A token of the trace that this code runs in; equal tokens mean that values of one may be used in the other.

    Inside `jax.checkpoint`, a scan's body or another traced function it differs from what is around them.
    """
    return get_opaque_trace_state()


def is_traced_around() -> bool:
    """Whether a function of JAX's (`jit`, `grad`, `vmap`, `scan`) traces this code, whose results may then be tracers."""
    return not trace_state_clean()


def trace_settings() -> Hashable:
    """A key of JAX's settings in this thread on which a traced program depends, such as the precision of products.

    `jax.jit` traces anew where the key differs; a cache of traced programs must have it in its key too.
    """
    return trace_context()


def manual_axes() -> frozenset[str]:
    """The mesh axes over which the code being traced runs inside `shard_map`.

    They include neither axes that `shard_map` leaves to the partitioner, nor an axis that only `vmap` names.
    """
    return frozenset(mesh_around().manual_axes)


def typed_axes() -> frozenset[str]:
    """The axes of `manual_axes` over which values can be typed as varying; none inside `standing_for`."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def mesh_around() -> AbstractMesh:
    """The mesh of the `shard_map` around this code, even inside `standing_for`; outside of one JAX's current mesh."""
    return jax.sharding.get_abstract_mesh() if _REAL.value is None else _REAL.value


def platform_around(mesh: Mesh | None = None) -> str:
    """The platform that is compiled for, as devices name it ("cpu", "gpu", "tpu").

    Args:
      mesh: where the program will run; None: the mesh around this code, if any, else the default backend.
    """
    around = mesh_around() if mesh is None else mesh.abstract_mesh
    device = None if around.empty else around.abstract_device
    return jax.default_backend() if device is None else device.platform


# --------------------------------------------------------------------------------------------------
# The user's meshes. The library's programs name their own mesh, which JAX refuses under another that the user has set.
#
# The user's code inside these programs runs as on one device: the mesh that it sees is the user's with every degree 1,
# where placements are legal and have no effect (`parallel/users_mesh.py`).
# --------------------------------------------------------------------------------------------------

_USERS: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("users_mesh", default=None)
_PLACED = jax.make_user_context(None)  # known to JAX: what was traced otherwise is traced anew
_REAL = jax.make_user_context(None)
_EMPTY = AbstractMesh((), ())


class no_mesh_around:  # as contexts of JAX's are written
    """Context, or decorator, in which no mesh of the user's is set (`jax.set_mesh`); public entries run in it.

    Inside a trace it does nothing. The mesh is set again at its end, and inside it in `users_mesh_again`.
    """

    __slots__ = ("left", "token")

    def __enter__(self) -> None:
        self.left = None
        if not jax.sharding.get_abstract_mesh().empty and not is_traced_around():
            self.token = _USERS.set(jax.sharding.get_mesh())
            self.left = jax.set_mesh(None)

    def __exit__(self, *exception: Any) -> None:
        if self.left is not None:
            self.left.__exit__(*exception)
            _USERS.reset(self.token)

    def __call__(self, fun: F) -> F:
        """Decorates a function; where no mesh is set it is called directly."""

        @functools.wraps(fun)
        def entered(*args: Any, **kwargs: Any) -> Any:
            if jax.sharding.get_abstract_mesh().empty:
                return fun(*args, **kwargs)
            with no_mesh_around():
                return fun(*args, **kwargs)

        return entered  # pyright: ignore[reportReturnType]


def users_mesh_again() -> Any:
    """A context in which the mesh that `no_mesh_around` unset is set again, for the user's code that an entry calls."""
    mesh = _USERS.get()
    return contextlib.nullcontext() if mesh is None or is_traced_around() else jax.set_mesh(mesh)


def under_users_mesh(values: Iterable[Any]) -> Iterator[Any]:
    """Yields an iterable's values, each made under the mesh that the user has set, as the iterable is the user's code."""
    found = iter(values)
    while True:
        with users_mesh_again():
            try:
                value = next(found)
            except StopIteration:
                return
        yield value


def handed_back(tree: T) -> T:
    """Gives arrays shardings on the user's own mesh, if it has Explicit axes: under it JAX computes with no others.

    Nothing is moved. Arrays on a mesh of the same devices in the same shape, and replicated ones, get the names of the user's
    mesh; others keep their shardings, until the user calls `jax.device_put(x, PartitionSpec(...))`.
    """
    mesh = _USERS.get()
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return tree
    return jax.tree.map(lambda leaf: _told(leaf, mesh) if isinstance(leaf, jax.Array) else leaf, tree)


def taken_in(tree: T) -> T:
    """Gives arrays on a mesh with Explicit axes shardings on the same mesh with Auto axes; the inverse of `handed_back`."""
    auto = lambda mesh: Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    explicit = lambda leaf: (
        isinstance(lies := getattr(leaf, "sharding", None), NamedSharding)
        and (AxisType.Explicit in lies.mesh.axis_types)
    )
    return jax.tree.map(lambda leaf: _told(leaf, auto(leaf.sharding.mesh)) if explicit(leaf) else leaf, tree)


def _told(leaf: Any, mesh: Mesh) -> Any:
    """The same array with a sharding on another mesh of the same devices; unchanged where the sharding has no name there."""
    lies = leaf.sharding
    if not isinstance(lies, NamedSharding) or isinstance(leaf, Tracer):
        return leaf
    devices: Any = lies.mesh.devices
    if devices.shape == mesh.devices.shape and (devices == mesh.devices).all():
        names = dict(zip(lies.mesh.axis_names, mesh.axis_names, strict=True))
        entry = lambda e: tuple(map(names.get, e)) if isinstance(e, tuple) else names.get(e)
        spec = PartitionSpec(*map(entry, lies.spec))
    elif lies.is_fully_replicated and lies.device_set == set(mesh.devices.flat):
        spec = PartitionSpec()
    else:
        return leaf
    target = NamedSharding(mesh, spec, memory_kind=lies.memory_kind)
    return jax.make_array_from_single_device_arrays(leaf.shape, target, [part.data for part in leaf.addressable_shards])


def meshes_around() -> tuple[AbstractMesh, ...]:
    """The meshes that the user has set around a public entry, by `jax.set_mesh` and by `with mesh:`."""
    taken = _USERS.get()
    named = (jax.sharding.get_abstract_mesh() if taken is None else taken, thread_resources.env.physical_mesh)
    return tuple(mesh.abstract_mesh for mesh in named if not mesh.empty and not mesh.abstract_mesh.manual_axes)


def placements_read() -> Any:
    """A context that notes the meshes around it (`meshes_around`), for `users_meshes` inside traced code."""
    return _PLACED(meshes_around())


def users_meshes() -> tuple[AbstractMesh, ...] | None:
    """The meshes that were set around `placements_read`, if this code runs inside it; else None."""
    return _PLACED.value


@contextlib.contextmanager
def standing_for(mesh: AbstractMesh) -> Iterator[None]:
    """Context in which code sees another mesh in the place of the one around, which `mesh_around` still gives."""
    with _REAL(mesh_around()), under_mesh(mesh):
        yield


@contextlib.contextmanager
def under_mesh(mesh: AbstractMesh) -> Iterator[None]:
    """Context in which a mesh, perhaps of another size, replaces the one around."""
    with use_abstract_mesh(_EMPTY), use_abstract_mesh(mesh):  # JAX lets a mesh that is set neither grow nor shrink
        yield


_OWN = os.path.dirname(os.path.abspath(__file__))
_LIBRARIES = (
    *(os.path.dirname(str(module.__file__)) + os.sep for module in (jax, flax)),
    *(os.path.join(os.path.dirname(_OWN), name) + os.sep for name in (os.path.basename(_OWN), "meaning", "model")),
)
_REFUSALS = re.compile(
    "is not found in mesh|can only refer to Auto axes|contains a manual axes|are of type Auto or Manual"
    "|should match the (?:mesh of sharding|aval mesh)|is incompatible with mesh_shape|can map every mesh axis to at most one"
    "|set a mesh via|`Manual` AxisType|requires a non-empty mesh|auto mesh context or metadata is required"
    "|with_sharding_constraint|not under a mesh context"
)
"""Matches messages of JAX and Flax that refuse placements: tracebacks lack their frames. A canary tries several spellings."""


def refuses_placement(error: BaseException) -> bool:
    """Whether JAX or Flax has refused where code places arrays."""
    return type(error).__name__ == "ShardingTypeError" or _REFUSALS.search(str(error)) is not None


def axis_not_found(error: BaseException) -> str | None:
    """The mesh axis that JAX's error says is not in the mesh; None for other errors."""
    found = re.search(r"Resource axis: (\S+) of .* is not found in mesh", str(error))
    return found[1] if found else None


def callers_line(error: BaseException) -> str:
    """The user's line in an error's traceback: the innermost outside of JAX, Flax, and what binds and traces models here."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_LIBRARIES)]
    return f"{frames[-1].filename}:{frames[-1].lineno} (in {frames[-1].name})"


# --------------------------------------------------------------------------------------------------
# Order without data flow: values that are available only when others are; no compiler pass may merge or hoist across.
#
# A barrier changes no value. XLA's schedulers and its search for common subexpressions respect it, on CPU with
# `versions.CPU_BARRIER_OPTIONS`.
#
# Types. Since jax 0.11 a barrier leaves varying types as they are (`check_vma=True`). Before, it types every result as
# varying over whatever any operand varies over (`versions.BARRIERS_JOIN_TYPES`): type operands alike first, or compare
# `varying_axes` of what comes back.
# --------------------------------------------------------------------------------------------------

BARRIER = "optimization_barrier"
"""The name of a barrier's primitive in traced programs."""


def together(values: T) -> T:
    """Ties values by a barrier: none is available before all are.

    Args:
      values: a pytree of arrays without typed random keys, which have no barrier.
    """
    return jax.lax.optimization_barrier(values)


def together_as_typed(values: Sequence[Any]) -> list[Any]:
    """`together` for arrays that may vary over different axes; each keeps its type.

    Before jax 0.11, whose barriers type all results alike, it makes one barrier for each type, so that values of different
    types are not tied.
    """
    if not BARRIERS_JOIN_TYPES:
        return list(together(list(values)))
    found: list[Any] = list(values)
    for axes in {varying_axes(value): None for value in values}:
        own = [i for i, value in enumerate(values) if varying_axes(value) == axes]
        for i, value in zip(own, together([values[i] for i in own]), strict=True):
            found[i] = value
    return found


def after(value: T, others: Any) -> T:
    """Ties `value` to `others` by a barrier: it is not available before them, and they are not removed as dead code.

    Args:
      value: a pytree of arrays without typed random keys.
      others: another one.
    """
    return jax.lax.optimization_barrier((value, others))[0]


# --------------------------------------------------------------------------------------------------
# Which results `jax.checkpoint` keeps, decided by a function that is asked about every operation.
#
# JAX documents policies that go by names and is retiring callables, whose protocol is `policy(prim, *avals, **params)`.
# They alone reach what lies inside custom gradients, where no name can be given. Under `jax_remat3` JAX asks about
# products and little else, and recomputes all the rest, collectives too: a canary fails.
# --------------------------------------------------------------------------------------------------


def policies_are_asked() -> bool:
    """Whether JAX asks policies about every operation."""
    return not jax.config.jax_remat3


def require_policies() -> None:
    """Refuses policies that are functions where JAX does not ask them about every operation.

    Raises:
      ValueError: with the remedy.
    """
    if jax.config.jax_remat3:
        raise ValueError(
            "jax_remat3 is on: jax.checkpoint then asks its policy about products alone and recomputes all the rest, so that a "
            "scan or a pipeline would send twice and do most work twice. Set JAX_REMAT3=0, or "
            "jax.config.update('jax_remat3', False)"
        )


def partitions_by_shardy() -> bool:
    """Whether XLA partitions by Shardy, JAX's default, and not by GSPMD, which newer versions drop."""
    return getattr(jax.config, "jax_use_shardy_partitioner", True)


CALLS_WITH_GRADIENTS = frozenset(("custom_vjp_call", "custom_jvp_call"))
"""Calls that a checkpoint policy is asked about as a whole where their gradients are not derived again."""


class Saveable(NamedTuple):
    """A result under `jax.checkpoint` that may be saved for the backward, with the operation that makes it.

    Attributes:
      primitive: its primitive's name.
      operands: abstract values (shape, dtype), one per operand.
      params: its static parameters by JAX's names.
    """

    primitive: str
    operands: tuple[Any, ...]
    params: Mapping[str, Any]

    @property
    def given_name(self) -> str | None:
        """The name that `checkpoint_name` gave to its operand; None for every other operation."""
        return self.params["name"] if self.primitive == "name" else None

    @property
    def made_by(self) -> tuple[str, ...]:
        """The primitives that make the result; for a call with gradients of its own, those inside of it."""
        body = self.params.get("call_jaxpr") if self.primitive in CALLS_WITH_GRADIENTS else None
        if body is None:
            return (self.primitive,)
        inner = getattr(body, "jaxpr", body)
        names = {variable: equation.primitive.name for equation in inner.eqns for variable in equation.outvars}
        return tuple(names[atom] for atom in inner.outvars if isinstance(atom, Var) and atom in names)

    @property
    def body(self) -> "list[Saveable] | None":
        """The operations inside a call with gradients of its own, or inside a `jit`; None for all others."""
        body = self.params.get("jaxpr" if self.primitive == "jit" else "call_jaxpr")
        if body is None or self.primitive not in {*CALLS_WITH_GRADIENTS, "jit"}:
            return None
        equations = getattr(body, "jaxpr", body).eqns
        avals = lambda equation: tuple(atom.aval for atom in equation.invars)
        return [Saveable(equation.primitive.name, avals(equation), equation.params) for equation in equations]

    @property
    def fft_type(self) -> jax.lax.FftType | None:
        """The type of a Fourier transform; None for every other operation."""
        return self.params["fft_type"] if self.primitive == "fft" else None


@dataclass(frozen=True)
class SaveWhere:
    """A policy for `jax.checkpoint`: a result is kept for the backward where `saves(result)`, else recomputed.

    Equal ones compare equal, so that equal calls share a trace.

    Args:
      saves: a function of a `Saveable`; `TO_HOST` keeps the result in the host's memory.
    """

    saves: Callable[[Saveable], bool | Offloadable]

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        """JAX's protocol of policies: whether to save, or an `Offloadable`."""
        return self.saves(Saveable(prim.name, avals, params))


TO_HOST = Offloadable(src="device", dst="pinned_host")
"""A policy's answer that sends a result to the host's memory, and back for the backward. XLA:CPU drops both copies."""


@dataclass(frozen=True)
class TellsHost:
    """Wraps a policy for `jax.checkpoint` so that `told` is called for every result that it offloads.

    Args:
      policy: a policy of JAX's, or the user's.
      told: called with the name of the result, or of its operation; it may refuse by raising an error.
    """

    policy: Callable[..., Any]
    told: Callable[[str], None]

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        """The protocol of JAX's policies."""
        found = self.policy(prim, *avals, **params)
        if isinstance(found, Offloadable):
            self.told(str(params.get("name", prim.name)))
        return found


# --------------------------------------------------------------------------------------------------
# Whether a thread traces or compiles, from the files of the calls on its stack.
# --------------------------------------------------------------------------------------------------

_FOLDER = os.path.join(os.path.dirname(jax.__file__), "_src")
_FILES = tuple(
    os.path.join(_FOLDER, *name.split("/"))
    for name in ("compiler.py", "interpreters/partial_eval.py", "interpreters/mlir.py")
)


def is_compiling(files: Iterable[str]) -> bool:
    """Whether a thread traces, lowers or compiles a program, from the files of the calls on its stack.

    While a compiled program runs, none of JAX's files for that is on the stack.
    """
    return any(file in _FILES for file in files)


# --------------------------------------------------------------------------------------------------
# Random bits of single elements: what `jax.random` draws for an element of an array, without drawing the array.
# --------------------------------------------------------------------------------------------------


def can_draw_elements(key: jax.Array) -> bool:
    """Whether `bernoulli_at` supports this key: threefry under `jax_threefry_partitionable`, whose bits follow from an index.

    It does not support keys of rows (`compat/row_keys.py`).
    """
    threefry = not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or "threefry" in str(jax.random.key_impl(key))
    return threefry and jax.config.jax_threefry_partitionable


def bernoulli_at(key: jax.Array, rate: float, high: jax.Array, low: jax.Array) -> jax.Array:
    """Computes `jax.random.bernoulli(key, rate, shape).ravel()[index]` without drawing the whole.

    Args:
      key: one key, typed or of two uint32.
      rate: the probability of True.
      high, low: uint32 [...], the upper and the lower half of each index in the flat array.

    Returns:
      bool [...].
    """
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    counts = jnp.concatenate([high.reshape(-1), low.reshape(-1)])
    first, second = jnp.split(threefry_2x32(data, counts), 2)
    probability = jnp.asarray(rate, jnp.result_type(float))
    if probability.dtype.itemsize == 8:
        bits = (first.astype(jnp.uint64) << 32) | second.astype(jnp.uint64)
    else:
        bits = first ^ second
    return (_uniform(bits, probability.dtype) < probability).reshape(low.shape)


def _uniform(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Numbers from 0 to 1 from random bits, as `jax.random.uniform` makes them: the upper bits are a mantissa."""
    info = jnp.finfo(dtype)
    one = jax.lax.bitcast_convert_type(jnp.ones((), dtype), bits.dtype)
    mantissa = jax.lax.shift_right_logical(bits, jnp.asarray(info.bits - info.nmant, bits.dtype))
    return jax.lax.bitcast_convert_type(mantissa | one, dtype) - jnp.ones((), dtype)


# --------------------------------------------------------------------------------------------------
# Random streams that Linen modules ask for and do not have.
#
# Flax does not report them: `Scope.has_rng`, which `make_rng` calls too, returns False, and `make_rng` takes the stream
# "params".
# --------------------------------------------------------------------------------------------------

_LACKED: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("lacked", default=None)


@contextlib.contextmanager
def noting_lacked_streams(found: set[str]) -> Iterator[None]:
    """Context in which names of streams that Linen modules ask for and do not have are added to `found`."""
    token = _LACKED.set(found)
    try:
        yield
    finally:
        _LACKED.reset(token)


def _noting(has_rng: Callable[[Any, str], bool]) -> Callable[[Any, str], bool]:
    @functools.wraps(has_rng)
    def noted(self: Any, name: str) -> bool:
        has = has_rng(self, name)
        if not has and (found := _LACKED.get()) is not None:
            found.add(name)
        return has

    return noted


Scope.has_rng = _noting(Scope.has_rng)  # pyright: ignore[reportAttributeAccessIssue]


# --------------------------------------------------------------------------------------------------
# `jax.vjp` split in two: a forward that keeps activations but no weights, and a backward that is given weights again.
#
# This is the trick under ZeRO-3 and the pipeline (docs/adr/0006): the backward re-reads weights without recomputing the
# forward. `jax.vjp` returns a pytree whose leaves are its residuals; those that *are* a value the caller can provide
# again are dropped by identity and put back by position. JAX promises neither that pytree nor the identity. Where a
# weight came back as another object it would be kept, whole, from forward to backward: right results, and ZeRO-3's
# memory lost. With `check_vma=True` identity holds only for weights that are cast to varying first.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """The residuals of a forward, without the values that its backward gets again.

    Attributes:
      residuals: the arrays kept.
      treedef: the structure of the vjp function, over all its residuals.
      places: for every residual where it is: (True, index among the values provided again) or (False, index among the kept).
    """

    residuals: list[jax.Array]
    treedef: Any
    places: tuple[tuple[bool, int], ...]

    def restore(self, provided: Sequence[Any]) -> Callable:
        """The vjp function, with `provided` (in the forward's order) in the place of the dropped residuals."""
        return self.treedef.unflatten([(provided if again else self.residuals)[i] for again, i in self.places])


def vjp_without(fun: Callable, args: Sequence[Any], provided: Sequence[Any]) -> tuple[Any, Any, Saved]:
    """Computes `jax.vjp(fun, *args, has_aux=True)`, keeping no residual that is one of `provided`, and no array twice.

    Args:
      fun: a function of `args` that returns (outputs, what has no gradient).
      args: what to differentiate for.
      provided: values used by `fun` (arguments or closed over) that the backward will have again, such as gathered weights.

    Returns:
      Both results of `fun`, and the `Saved` residuals; `saved.restore(provided_again)(cotangents)` gives the cotangents of
      `args`.
    """
    out, vjp, aux = jax.vjp(fun, *args, has_aux=True)
    leaves, treedef = jax.tree.flatten(vjp)
    place = {id(value): (True, i) for i, value in enumerate(provided)}
    kept: list[Any] = []
    for leaf in leaves:
        if id(leaf) not in place:
            place[id(leaf)] = (False, len(kept))
            kept.append(leaf)
    return out, aux, Saved(kept, treedef, tuple(place[id(leaf)] for leaf in leaves))


# --------------------------------------------------------------------------------------------------
# Order that XLA:CPU keeps when it runs a program: a value that is computed from others, although they do not change it.
#
# XLA:CPU runs independent operations at the same time, and its compiled programs have no barriers: an operation waits for
# another one only if it reads its result. Collectives start in the program's order, but a loop with
# collectives inside counts as started with its first one. So a collective that is independent of an earlier loop meets
# the loop's own ones on other devices: wrong numbers, a hang, or an abort, in jax 0.10 to 0.12 (`program/on_cpu.py` is
# the remedy).
# --------------------------------------------------------------------------------------------------

WAITING = "wait_for"
"""The name of the primitive of `waiting` in traced programs."""


def can_wait(value: Any) -> bool:
    """Whether `waiting` takes an array: it has elements, which are numbers or truth values (typed random keys are not)."""
    return value.size > 0 and not jnp.issubdtype(value.dtype, jax.dtypes.extended)


def waiting(value: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """Makes `value` wait for `others` on XLA:CPU; returns it unchanged, at the cost of one more pass over it.

    Args:
      value: any array that `can_wait`.
      others: arrays that can; one element of each is read.
    """
    return _wait_for.bind(value, *others)


def _selected(value: jax.Array, *others: jax.Array) -> jax.Array:
    """`value`, selected by a condition on `others` that always holds, which no compiler pass can tell."""
    total = sum((_bits(other) for other in others), jnp.uint32(0))
    even = (total * (total + 1)) & 1 == 0  # one of two neighbours is
    return jnp.where(even, value, ~value if value.dtype == bool else value + jnp.ones((), value.dtype))


def _bits(value: jax.Array) -> jax.Array:
    """The first element of an array as some integer."""
    first = jax.lax.slice(value, (0,) * value.ndim, (1,) * value.ndim).reshape(())
    if jnp.iscomplexobj(first):
        first = first.real
    if jnp.issubdtype(first.dtype, jnp.inexact):
        first = jax.lax.bitcast_convert_type(first, jnp.dtype(f"uint{8 * first.dtype.itemsize}"))
    return first.astype(jnp.uint32)


_wait_for = Primitive(WAITING)
_wait_for.def_impl(_selected)
_wait_for.def_abstract_eval(lambda value, *others: value)
ad.primitive_jvps[_wait_for] = lambda primals, tangents: (_wait_for.bind(*primals), tangents[0])
mlir.register_lowering(_wait_for, mlir.lower_fun(_selected, multiple_results=False))


# --------------------------------------------------------------------------------------------------
# Reductions over ranks beside axes that XLA partitions, lowered in a form that XLA:CPU compiles in bfloat16.
#
# XLA:CPU reduces bfloat16 over ranks in float32, for which it rewrites the reduction's computation of two scalars, an
# addition or a maximum. Where `shard_map` leaves axes of the mesh to the partitioner, JAX writes a sharding constraint
# into this computation, on a scalar, and XLA ends the process ("Invalid binary instruction opcode copy", jax 0.10 to
# 0.12). Without the constraint the computation is the one that JAX writes where every axis is manual.
# --------------------------------------------------------------------------------------------------

REDUCTIONS = ("psum_p", "psum_invariant_p", "pmax_p", "pmin_p", "reduce_scatter_p")
"""Primitives that reduce, by which attribute of `jax._src.lax.parallel` holds them."""

_REDUCING = frozenset(("stablehlo.all_reduce", "stablehlo.reduce_scatter"))
_AFTERWARDS = frozenset(("sdy.sharding_constraint", "stablehlo.custom_call", "stablehlo.reshape"))
_CONSTRAINTS = frozenset(("sdy.sharding_constraint", "stablehlo.custom_call"))  # Shardy's, and the older partitioner's


def reduce_without_constraints() -> None:
    """Makes JAX lower reductions over ranks without sharding constraints on the two scalars that they reduce.

    It replaces JAX's lowering rules in the whole process, for the user's own reductions too; calling it again changes nothing.
    Programs for platforms other than CPU are lowered as before.
    """
    for name in REDUCTIONS:
        primitive = getattr(parallel, name)
        rule = _rule_of(primitive)
        if not hasattr(rule, "axonml_jax_own"):
            mlir.register_lowering(primitive, _unconstrained(rule))


def _rule_of(primitive: Any) -> Callable[..., Any]:
    from jax._src.interpreters.mlir import _lowerings

    return _lowerings[primitive].rule


def _unconstrained(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering rule that calls `rule`, JAX's own, and removes constraints from the reductions that it wrote, on CPU."""

    def lowered(ctx: Any, *args: Any, **params: Any) -> Any:
        results = rule(ctx, *args, **params)
        if "cpu" in ctx.module_context.platforms:
            for result in jax.tree.leaves(results):
                _take_out(result.owner)
        return results

    lowered.axonml_jax_own = rule  # pyright: ignore[reportFunctionMemberAccess]
    return lowered


def _take_out(written: Any) -> None:
    """Takes the constraints out of the computation of a reduction, after which JAX may constrain or reshape the result.

    Args:
      written: the operation that made a result; a sum over no axis returns its operand, which may be a block's argument.
    """
    while getattr(written, "name", None) in _AFTERWARDS and len(written.operands) == 1:
        written = written.operands[0].owner
    if getattr(written, "name", None) not in _REDUCING:
        return
    for inner in list(written.regions[0].blocks[0]):
        if inner.operation.name in _CONSTRAINTS:
            inner.operation.results[0].replace_all_uses_with(inner.operation.operands[0])
            inner.operation.erase()
