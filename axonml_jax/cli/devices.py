"""`devices`: what JAX sees."""

import sys
from functools import partial

import jax

from axonml_jax.base import print0
from axonml_jax.cli.run import all_or_refuse, start_devices
from axonml_jax.ledger.count import aligned
from axonml_jax.mesh.world import MockBackend


def devices(simulated: int | None = None) -> int:
    """Print versions, backend, processes, and a table of devices with their memory where it is known.

    Args:
      simulated: number of simulated CPU devices; None: the devices that JAX finds.

    Raises:
      ConfigError: for a number below 1, or launch variables that describe no job.
    """
    [world] = all_or_refuse(partial(start_devices, simulated))
    rows = [[str(d.id), d.platform, d.device_kind, str(d.process_index), _memory(d)] for d in jax.devices()]
    carrier = "memory of this process" if world.backend.name == MockBackend.name else world.backend.name
    print0(f"jax {jax.__version__} on Python {sys.version.split()[0]}, messages by {carrier}")
    print0(
        f"{world.num_processes} process(es), {world.world_size} device(s), {len(world.local_ranks)} in this process\n"
    )
    print0(aligned(["device", "platform", "kind", "process", "memory"], rows, left=3))
    return 0


def _memory(device) -> str:
    # Only the process that holds a device may ask; CPU devices share the host's memory and report none.
    if device.process_index != jax.process_index():
        return "-"
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return f"{limit / 2**30:.1f} GiB" if limit else "-"
