"""How a step is compiled: what XLA must be told for the program to do what it says."""

import jax
from jax.sharding import Mesh

from axonml_jax.parallel.placement import Placement


def compiler_options(placement: Placement, mesh: Mesh) -> dict[str, str] | None:
    """Options of `jax.jit` for steps under a plan, or None.

    XLA:CPU of jax 0.10 removes optimization barriers before it merges equal operations, and so gathers every unit once and
    keeps it, as if parameters were whole during the step (jax-ml/jax 0.11 and later do not). It also compiles loops over little
    data as one function, in which a barrier that is still there aborts the process.
    """
    old = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11)
    cpu = mesh.devices.flat[0].platform == "cpu"
    if not (old and cpu and placement.gathers_when_used):
        return None
    return {"xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting"}
