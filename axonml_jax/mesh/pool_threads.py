"""How many threads XLA:CPU splits its products among, which the environment variable NPROC says when the backend starts."""

import os

from axonml_jax.compat.versions import COLLECTIVES_HOLD_THREADS


def pool_threads(devices: int, processes: int = 1) -> dict[str, str]:
    """The variable to set, if any (docs/adr/0003).

    XLA has a thread per core. Processes that share a machine get their part of the cores each, as torchrun sets
    OMP_NUM_THREADS; whoever set NPROC keeps it. But before jax 0.12 collectives wait in these threads, and with fewer than
    two per device a program hangs until it is aborted: there it becomes so many at least.

    Args:
      devices: of this process.
      processes: of this machine that share its cores.
    """
    asked = os.environ.get("NPROC", "")
    given, cores = asked.isdigit(), _cores()
    wanted = int(asked) if given else max(1, cores // processes)
    if COLLECTIVES_HOLD_THREADS:
        return {"NPROC": str(max(wanted, 2 * devices))}
    return {} if given or processes == 1 else {"NPROC": str(wanted)}


def _cores() -> int:
    """Those that this process may run on, as XLA counts them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
