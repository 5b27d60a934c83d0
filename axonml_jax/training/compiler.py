"""How a step is compiled: what XLA must be told, and what must be added, for the program to do what it says."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from axonml_jax.compat.around import trace_settings
from axonml_jax.compat.versions import CPU_BARRIER_OPTIONS
from axonml_jax.parallel.placement import Placement
from axonml_jax.program.collective_order import collectives_in_order, may_overlap


def compiler_options(placement: Placement, mesh: Mesh) -> dict[str, str] | None:
    """Options of `jax.jit` for steps under a plan, or None.

    Without them XLA:CPU of jax 0.10 gathers every unit once and keeps it, as if parameters were whole during the step.
    """
    return CPU_BARRIER_OPTIONS if is_on_cpu(mesh) and placement.gathers_when_used else None


class Compiled:
    """A jitted function of which the ranks' collectives cannot overtake each other (`program/collective_order.py`).

    Where they could on several CPU devices, what was traced is run in an order.

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
        self._overlaps = is_on_cpu(mesh) and mesh.size > 1
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
        if not self._overlaps:
            return self._plain
        like = (trace_settings(), _types(args[1:]), *kwargs.items())
        if like not in self._known:
            traced = self._plain.trace(*args, **kwargs)
            self._known[like] = self._in_order(traced, _types(args)) if may_overlap(traced.jaxpr) else self._plain
        return self._known[like]

    def _in_order(self, traced: Any, types: Any) -> Any:
        """What was traced on arguments of some types, as a jitted function that keeps the order."""

        @functools.wraps(self._whole)
        def whole(*args: Any, **kwargs: Any) -> Any:
            run = traced if _types(args) == types else self._plain.trace(*args, **kwargs)
            made = collectives_in_order(run.jaxpr, jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(run.out_info), made)

        return jax.jit(whole, **self._options)


def _types(args: Any) -> Any:
    """The structure of arguments, and their leaves' shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(args)
    return treedef, *((jax.numpy.shape(x), getattr(x, "dtype", type(x))) for x in leaves)


def is_on_cpu(mesh: Mesh) -> bool:
    """Whether a program for a mesh runs on CPUs."""
    return mesh.devices.flat[0].platform == "cpu"
