"""How a step is compiled: what XLA must be told, and what must be added, for the program to do what it says."""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
from jax.sharding import Mesh

from axonml_jax.compat.versions import CPU_BARRIER_OPTIONS
from axonml_jax.parallel.placement import Placement
from axonml_jax.program.collective_order import collectives_in_order, may_overlap

_ORDERING: ContextVar[bool] = ContextVar("ordering", default=False)
"""Whether what is being traced must order its collectives."""


def compiler_options(placement: Placement, mesh: Mesh) -> dict[str, str] | None:
    """Options of `jax.jit` for steps under a plan, or None.

    Without them XLA:CPU of jax 0.10 gathers every unit once and keeps it, as if parameters were whole during the step.
    """
    return CPU_BARRIER_OPTIONS if _on_cpu(mesh) and placement.gathers_when_used else None


def ordered(local: Callable[..., Any]) -> Callable[..., Any]:
    """What each rank does, `local`, for `shard_map` in a function that `Compiled` compiles."""
    return collectives_in_order(local) if _ORDERING.get() else local


class Compiled:
    """A jitted function of which the ranks' collectives cannot overtake each other (`program/collective_order.py`).

    On several CPU devices it is traced once more where they could.

    Args:
      whole: the function; what it gives to `shard_map` goes through `ordered`.
      mesh: that it runs on.
      options: of `jax.jit`; arguments by keyword are static.
    """

    def __init__(self, whole: Callable[..., Any], mesh: Mesh, **options: Any):
        @functools.wraps(whole)
        def in_order(*args: Any, **kwargs: Any) -> Any:
            token = _ORDERING.set(True)
            try:
                return whole(*args, **kwargs)
            finally:
                _ORDERING.reset(token)

        self._plain, self._in_order = jax.jit(whole, **options), jax.jit(in_order, **options)
        self._chosen = None if _on_cpu(mesh) and mesh.size > 1 else self._plain
        self._known: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self._choose(args, kwargs)(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit`'s."""
        return self._choose(args, kwargs).trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit`'s."""
        return self._choose(args, kwargs).lower(*args, **kwargs)

    def _choose(self, args: tuple, kwargs: dict) -> Any:
        """The function for arguments like these; all but the first are looked at, which is a run's state or variables."""
        if self._chosen is not None:
            return self._chosen
        leaves, treedef = jax.tree.flatten(args[1:])
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self._in_order
        like = (treedef, *((jax.numpy.shape(x), getattr(x, "dtype", type(x))) for x in leaves), *kwargs.items())
        if like not in self._known:
            overlap = may_overlap(self._plain.trace(*args, **kwargs).jaxpr)
            self._known[like] = self._in_order if overlap else self._plain
        return self._known[like]


def _on_cpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"
