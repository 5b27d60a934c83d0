"""How a step is compiled: what XLA must be told for the program to do what it says."""

from jax.sharding import Mesh

from axonml_jax.compat.versions import CPU_BARRIER_OPTIONS
from axonml_jax.parallel.placement import Placement


def compiler_options(placement: Placement, mesh: Mesh) -> dict[str, str] | None:
    """Options of `jax.jit` for steps under a plan, or None.

    Without them XLA:CPU of jax 0.10 gathers every unit once and keeps it, as if parameters were whole during the step.
    """
    cpu = mesh.devices.flat[0].platform == "cpu"
    return CPU_BARRIER_OPTIONS if cpu and placement.gathers_when_used else None
