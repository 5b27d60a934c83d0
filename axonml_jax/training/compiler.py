"""How a step is compiled: what XLA must be told for the program to do what it says."""

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from axonml_jax.compat.versions import CPU_BARRIER_OPTIONS
from axonml_jax.parallel.placement import Placement
from axonml_jax.program.collective_order import collectives_in_order


def compiler_options(placement: Placement, mesh: Mesh) -> dict[str, str] | None:
    """Options of `jax.jit` for steps under a plan, or None.

    Without them XLA:CPU of jax 0.10 gathers every unit once and keeps it, as if parameters were whole during the step.
    """
    return CPU_BARRIER_OPTIONS if _on_cpu(mesh) and placement.gathers_when_used else None


def ordered(local: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """What each rank does, `local`, with its collectives in one order on all ranks (`program/collective_order.py`)."""
    return collectives_in_order(local) if _on_cpu(mesh) and mesh.size > 1 else local


def _on_cpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"
