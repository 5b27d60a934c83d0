"""Compiling a step: what XLA is told, passes for XLA:CPU, and the errors that users read, in their own words."""

import functools
import math
import os
import sysconfig
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flax
import flax.errors
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from axonml_jax.compat.jaxpr import constants_within
from axonml_jax.compat.order import callers_line, placements_read, platform_around, refuses_placement, trace_settings
from axonml_jax.compat.versions import CPU_BARRIER_OPTIONS
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import is_layout

if TYPE_CHECKING:
    from axonml_jax.training.outside import Outside

# --------------------------------------------------------------------------------------------------
# How a step is compiled: what XLA must be told, and what must be added, for the program to do what it says.
# --------------------------------------------------------------------------------------------------


_TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"
_TRIED_FROM = 50_000_000


def compiler_options(placement: Placement, mesh: Mesh) -> dict[str, str] | None:
    """Options of `jax.jit` for steps under a plan, or None.

    On CPU: without them XLA of jax 0.10 gathers every unit once and keeps it, as if parameters were whole during the step, and
    keeps what was to be recomputed.

    On GPU XLA compiles and times dozens of Triton kernels for each product of another shape, beside cuBLASLt's. That takes tens
    of seconds before the first step, and of products of 8 bits minutes. It pays for large products in 16 bits alone
    (docs/performance.md), so it is left out for models below 50 million parameters and in 8 bits. Who names the flag in
    `XLA_FLAGS` decides.
    """
    if platform_around(mesh) == "gpu":
        size = sum(math.prod(layout.shape) for layout in jax.tree.leaves(placement.params, is_leaf=is_layout))
        few = size < _TRIED_FROM or placement.plan.precision.products is not None
        return {_TRITON_PRODUCTS: "False"} if few and _TRITON_PRODUCTS not in os.environ.get("XLA_FLAGS", "") else None
    barriers = placement.at_use or placement.plan.remat is not None or placement.plan.memory is not None
    return CPU_BARRIER_OPTIONS if is_on_cpu(mesh) and barriers else None


class Compiled:
    """A jitted function, run with the passes that XLA:CPU needs where its mesh is on CPUs.

    Both are in `program/on_cpu.py`. Where the collectives of several devices could overtake each other, the traced program
    is run with all of them in one order; and operands of the products that make kernels' gradients are transposed, which is
    faster.

    Args:
      fun: the function.
      mesh: the mesh that it runs on.
      accept: called with every program compiled for a call before it first runs; it may refuse it.
      reads: the user's function in it; what that reads outside must stay as it is (`Outside`).
      options: options of `jax.jit`; arguments by keyword are static.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        mesh: Mesh,
        accept: Callable[[Any], None] | None = None,
        *,
        reads: Callable[..., Any] | None = None,
        **options: Any,
    ):
        self._fun, self._options = fun, options
        self._plain: Any = jax.jit(fun, **options)
        self._mesh = mesh
        self._on_cpu, self._several = is_on_cpu(mesh), mesh.size > 1
        self._known: dict[Any, Any] = {}
        self._written: dict[Any, Any] = {}  # what was traced for them, as it was written
        self._accept = accept
        self._accepted: dict[Any, Any] = {}
        self._inner: Compiled | None = None  # the same as a part of other programs
        self._reading: Callable[[], AbstractContextManager] = nullcontext
        self._reads, self._traces = reads, 0
        self._outside: Outside | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function."""
        while True:
            try:
                with self._reading():
                    run = self._choose(args, kwargs)
                    if self._accept is not None:
                        return self._accepted_for(run, args, kwargs)(*args)
                    made = run(*args, **kwargs)
                    if not self._on_cpu and (traces := self._plain._cache_size()) != self._traces:
                        self._traces = traces
                        self._note(self._plain.trace(*args, **kwargs))
                    return made
            except Exception as error:
                if not self._reads_placements(error):
                    raise

    def inlined(self, *args: Any) -> Any:
        """Run it on arrays that JAX traces, as a part of the program around it, whose compiler options and donation count.

        Raises:
          TypeError: for a function with `accept`, as there is no compiled program of its own to accept.
        """
        if self._accept is not None:
            raise TypeError(
                "what XLA's partitioner sends in this plan's step is read from the step's compiled program, which does not "
                "exist inside jax.jit or jax.lax.scan: call the step in a Python loop"
            )
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), args)
        if self._inner is None:
            self._inner = Compiled(self._fun, self._mesh, reads=self._reads)
        return self._inner._again("__call__", shapes, {}, args)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Traces the function, as `jax.jit` does, with the passes for CPUs."""
        return self._again("trace", args, kwargs)

    def as_written(self, *args: Any) -> Any:
        """The traced program of a call on arguments like these, without the passes for CPUs."""
        with self._reading():
            kept = self._written.get(self._like(args, {}))
        return self.trace(*args) if kept is None else kept

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the function, as `jax.jit` does, with the passes for CPUs."""
        return self._again("lower", args, kwargs)

    def _again(self, name: str, args: tuple, kwargs: dict, given: tuple | None = None) -> Any:
        """A method of the function for arguments like these, called on these or on those that are given."""
        while True:
            try:
                with self._reading():
                    run = self._choose(args, kwargs)
                    if not self._on_cpu and name != "__call__":
                        self._note(run.trace(*args, **kwargs))
                    return getattr(run, name)(*(args if given is None else given), **kwargs)
            except Exception as error:
                if not self._reads_placements(error):
                    raise

    def _reads_placements(self, error: Exception) -> bool:
        """Whether JAX has refused that code places arrays over the user's axes: what is traced from now on may do so."""
        anew = self._reading is not placements_read and refuses_placement(error)
        self._reading = placements_read if anew else self._reading
        return anew

    def compile(self, *args: Any) -> Any:
        """The compiled program that a call with such arguments runs; only of a function that has `accept`."""
        self.trace(*args)  # says how placements are read
        with self._reading():
            return self._accepted_for(self._choose(args, {}), args, {})

    @property
    def compilations(self) -> int:
        """How many programs were compiled for calls."""
        return len(self._accepted) + sum(each._cache_size() for each in {self._plain, *self._known.values()})

    def _accepted_for(self, run: Any, args: tuple, kwargs: dict) -> Any:
        """The program compiled for arrays like these, once it is accepted."""
        assert self._accept is not None
        leaves, treedef = jax.tree.flatten(args)
        like = (trace_settings(), treedef, *((x.shape, x.dtype, x.sharding) for x in leaves), *kwargs.items())
        if like not in self._accepted:
            traced = run.trace(*args, **kwargs)
            if not self._on_cpu:
                self._note(traced)
            compiled = traced.lower().compile()
            self._accept(compiled)
            self._accepted[like] = compiled
        return self._accepted[like]

    def _choose(self, args: tuple, kwargs: dict) -> Any:
        """The function for arguments like these under JAX's settings around the call.

        All arguments but the first are looked at, which is a run's state or variables.

        Raises:
          ValueError: where a program has constants that the user's function would read otherwise now.
        """
        if self._outside is not None:
            self._outside.refuse_changed()
        if not self._on_cpu:
            return self._plain
        from axonml_jax.program.on_cpu import may_overlap, with_transposed_operands

        like = self._like(args, kwargs)
        if like not in self._known:
            traced = self._plain.trace(*args, **kwargs)
            self._note(traced)
            jaxpr = with_transposed_operands(traced.jaxpr)
            overlaps = self._several and may_overlap(jaxpr)
            changes = overlaps or jaxpr is not traced.jaxpr
            self._known[like] = self._changed(traced, _types(args), overlaps) if changes else self._plain
            self._written[like] = traced
        return self._known[like]

    def changed(self) -> list[str]:
        """Names of what its programs hold as constants, and the user's function would read otherwise now."""
        return [] if self._outside is None else self._outside.changed()

    def _note(self, traced: Any) -> None:
        """Remembers the constants of a traced program, which `Outside` compares with what the user's function reads."""
        if self._reads is None or not (constants := constants_within(traced.jaxpr)):
            return
        from axonml_jax.training.outside import Outside

        self._outside = self._outside or Outside(self._reads)
        self._outside.note(constants)

    def _like(self, args: tuple, kwargs: dict) -> Any:
        return trace_settings(), _types(args[1:]), *kwargs.items()

    def _changed(self, traced: Any, types: Any, overlaps: bool) -> Any:
        """A jitted function that runs what was traced as XLA:CPU needs it; arguments of other types are traced anew."""

        from axonml_jax.program.on_cpu import collectives_in_order, with_transposed_operands
        from axonml_jax.program.program import read_program, run_program

        @functools.wraps(self._fun)
        def whole(*args: Any, **kwargs: Any) -> Any:
            run = traced if _types(args) == types else self._plain.trace(*args, **kwargs)
            jaxpr, values = with_transposed_operands(run.jaxpr), jax.tree.leaves(args)
            made = collectives_in_order(jaxpr, values) if overlaps else run_program(read_program(jaxpr), values)
            return jax.tree.unflatten(jax.tree.structure(run.out_info), made)

        return jax.jit(whole, **self._options)


def _types(args: Any) -> Any:
    """The structure of arguments, and their leaves' shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(args)
    return treedef, *((jax.numpy.shape(x), getattr(x, "dtype", type(x))) for x in leaves)


def is_on_cpu(mesh: Mesh) -> bool:
    """Whether a program for a mesh runs on CPUs."""
    return mesh.devices.flat[0].platform == "cpu"


# --------------------------------------------------------------------------------------------------
# What users read of errors in their models and losses: the scan that `check_vma=True` refuses, no frames of ours above
# it.
# --------------------------------------------------------------------------------------------------

_INSIDE = tuple(str(Path(str(module.__file__)).parent) for module in (jax, flax))
_OURS = str(Path(__file__).parents[1]) + "/"
_STANDARD = sysconfig.get_path("stdlib") + "/"
_NOTE = "axonml_jax has left its own frames out above code that it called; JAX_TRACEBACK_FILTERING=off shows them."


class _Folding:
    """Context in which errors of code that is called back, such as a loss, lose this library's frames above it.

    As JAX's traceback filtering does, and switched off as that is (`jax_traceback_filtering`). Errors of the library itself
    keep all their frames. It is no decorator, whose own frame would stand between a step and its loss.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, frames: Any) -> None:
        shown = jax.config.jax_traceback_filtering == "off"  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(error, Exception) and not shown:
            _fold(error)


folding = _Folding()


def _fold(error: Exception) -> None:
    frames = list(_frames(error))
    theirs = [i for i, each in enumerate(frames) if _is_theirs(_file(each))]
    if not theirs:
        return
    last, kept = theirs[-1], None
    for i, each in reversed(list(enumerate(frames))):
        if i > last or not _file(each).startswith(_OURS):
            kept = types.TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    error.__traceback__ = kept
    if _NOTE not in getattr(error, "__notes__", ()):
        error.add_note(_NOTE)


def _frames(error: Exception) -> Iterator[types.TracebackType]:
    each = error.__traceback__
    while each is not None:
        yield each
        each = each.tb_next


def _file(each: types.TracebackType) -> str:
    return each.tb_frame.f_code.co_filename


def _is_theirs(filename: str) -> bool:
    """Whether code is neither this library's, nor JAX's or Flax's, nor Python's own."""
    standard = filename.startswith(_STANDARD) and "site-packages" not in filename
    return not (standard or filename.startswith((_OURS, *_INSIDE, "<")))


_UNLIKE_TYPES = {
    "branches must have equal": (
        "one branch of the conditional at {} gives a value that is the same on every rank, and another one that differs from "
        "rank to rank",
        "make the first from a value that differs, such as x * 0 for zeros",
    ),
    "carry": (
        "the loop at {} starts from a value that is the same on every rank (such as plain zeros) but carries one that differs "
        "from rank to rank",
        "start the loop from a value derived from its input, such as jnp.zeros_like(x[0])",
    ),
}
"""Words of JAX's error -> what is refused, and the remedy besides `check_vma=False`."""


@contextmanager
def explain_types(check_vma: bool) -> Iterator[None]:
    """Turn JAX's errors about varying types that code of the user's mixes into one that names its line and the remedy."""
    try:
        yield
    except AssertionError as error:
        removed = any(
            "JAX has removed" in note for note in getattr(error, "__notes__", ())
        )  # frames of JAX, the last ones
        if not check_vma or str(error) or not removed:
            raise
        raise ValueError(
            f"check_vma=True: an assertion of JAX's typed mode fails at {callers_line(error)}, as it does of a collective over "
            "an axis of jax.vmap. Use check_vma=False (the default), or a reduction without such an axis, such as x.mean(0)"
        ) from error
    except TypeError as error:
        text = str(error)
        found = next((said for words, said in _UNLIKE_TYPES.items() if words in text), None)
        if not check_vma or found is None or "varying" not in text:
            raise
        raise ValueError(
            f"check_vma=True: {found[0].format(callers_line(error))}, which typed mode refuses. Use check_vma=False (the "
            f"default; the result is the same), or {found[1]}. JAX says: {text}"
        ) from error
