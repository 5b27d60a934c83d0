"""How a step is compiled: what XLA must be told, and what must be added, for the program to do what it says."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from axonml_jax.compat.around import trace_settings
from axonml_jax.compat.versions import CPU_BARRIER_OPTIONS
from axonml_jax.parallel.placement import Placement
from axonml_jax.program.on_cpu.collective_order import collectives_in_order, may_overlap
from axonml_jax.program.on_cpu.kernel_gradients import with_transposed_operands
from axonml_jax.program.program import read_program
from axonml_jax.program.run import run_program


def compiler_options(placement: Placement, mesh: Mesh) -> dict[str, str] | None:
    """Options of `jax.jit` for steps under a plan, or None.

    Without them XLA:CPU of jax 0.10 gathers every unit once and keeps it, as if parameters were whole during the step.
    """
    return CPU_BARRIER_OPTIONS if is_on_cpu(mesh) and placement.gathers_when_used else None


class Compiled:
    """A jitted function that on CPUs is run as XLA:CPU needs it.

    The ranks' collectives cannot overtake each other (`program/on_cpu/collective_order.py`): where they could, on several
    devices, what was traced is run in an order. And gradients of kernels are multiplied fast
    (`program/on_cpu/kernel_gradients.py`).

    Args:
      whole: the function.
      mesh: that it runs on.
      accept: called with every program compiled for a call before it first runs; it may refuse it.
      options: of `jax.jit`; arguments by keyword are static.
    """

    def __init__(
        self, whole: Callable[..., Any], mesh: Mesh, accept: Callable[[Any], None] | None = None, **options: Any
    ):
        self._whole, self._options, self._plain = whole, options, jax.jit(whole, **options)
        self._on_cpu, self._several = is_on_cpu(mesh), mesh.size > 1
        self._known: dict[Any, Any] = {}
        self._accept = accept
        self._accepted: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        run = self._choose(args, kwargs)
        return run(*args, **kwargs) if self._accept is None else self._accepted_for(run, args, kwargs)(*args)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit`'s."""
        return self._choose(args, kwargs).trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit`'s."""
        return self._choose(args, kwargs).lower(*args, **kwargs)

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
            compiled = run.lower(*args, **kwargs).compile()
            self._accept(compiled)
            self._accepted[like] = compiled
        return self._accepted[like]

    def _choose(self, args: tuple, kwargs: dict) -> Any:
        """The function for arguments like these under JAX's settings around the call.

        All arguments but the first are looked at, which is a run's state or variables.
        """
        if not self._on_cpu:
            return self._plain
        like = (trace_settings(), _types(args[1:]), *kwargs.items())
        if like not in self._known:
            traced = self._plain.trace(*args, **kwargs)
            jaxpr = with_transposed_operands(traced.jaxpr)
            overlaps = self._several and may_overlap(jaxpr)
            changes = overlaps or jaxpr is not traced.jaxpr
            self._known[like] = self._changed(traced, _types(args), overlaps) if changes else self._plain
        return self._known[like]

    def _changed(self, traced: Any, types: Any, overlaps: bool) -> Any:
        """What was traced on arguments of some types, as a jitted function that does it as XLA:CPU needs it."""

        @functools.wraps(self._whole)
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
