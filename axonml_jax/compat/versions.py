"""Differences between versions of JAX that cannot be probed, only known."""

from importlib.metadata import version

import jax

PACKAGES = ("axonml-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
"""Packages whose versions checkpoints and flight records name."""

BRANCHES_WRITE_IN_PLACE: bool = jax.__version_info__ >= (0, 11)
"""Whether XLA lets a branch write into a buffer of the loop around it; before, it copies the whole buffer in every tick."""

COLLECTIVES_HOLD_THREADS: bool = jax.__version_info__ < (0, 12)
"""Whether collectives of simulated devices wait in threads of the pool that products share: with too few threads, all wait."""

CPU_BARRIER_OPTIONS: dict[str, str] | None = (
    None
    if jax.__version_info__ >= (0, 11)
    else {"xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting"}
)
"""Options of `jax.jit` with which XLA:CPU respects barriers; None: it needs none.

XLA:CPU of jax 0.10 removes barriers before it merges equal operations (0.11 and later do not). It also compiles loops over
little data as one function, in which a barrier that is still there aborts the process.
"""

BARRIERS_JOIN_TYPES: bool = jax.__version_info__ < (0, 11)
"""Whether a barrier types all its results as varying over every axis that any operand varies over, as before jax 0.11."""


def installed(package: str) -> str | None:
    """The version of a package; None without metadata, as for a package used from its source tree or built into a bundle.

    >>> installed("jax") == jax.__version__, installed("no package of this name")
    (True, None)
    """
    try:
        return version(package)
    except (ImportError, KeyError, OSError, TypeError, ValueError):  # no metadata, or such as cannot be read
        return None
