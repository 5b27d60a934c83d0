"""Programs that are alike are compiled once in a process: oracles, initializers and small operations of many tests are.

What is shared is XLA's executable itself; JAX traces and lowers every program as ever, so nothing of ours is skipped. JAX's
persistent cache would share between processes too, but loads what was saved in another way than users run it, and on some
processors rejects all of it (jax-ml/jax#38445).

Where optimizations are off, an XLA that still has its older emitters of kernels uses them: they take a third of the time.
"""

import collections
import gc
import hashlib
import pathlib

import jax
from jax._src import compiler
from workers.launch import OLDER_EMITTERS

KEPT = 1000
"""Executables that are kept, those last used; a small one holds about 100 kB."""
MOST_MAPS = 30_000
"""Stretches of memory that a process may map before all programs are let go: Linux allows 65,530, a small program has 15, and
XLA's compiler crashes when it gets no more."""


class SharedPrograms:
    """JAX's compiler, which knows what it has compiled."""

    def __init__(self):
        self.compile, self.kept = compiler.backend_compile_and_load, collections.OrderedDict()
        self.found, self.compiled, self.looked = 0, 0, 0

    def __call__(self, backend, module, executable_devices, options, host_callbacks):
        """The executable of a module for these devices; one that calls Python is a new one each time."""
        if options.executable_build_options.debug_options.xla_backend_optimization_level == 0:
            options.env_option_overrides = [
                *OLDER_EMITTERS.items(),
                *options.env_option_overrides,
            ]  # the last of a name counts
        given = (backend, module, executable_devices, options, host_callbacks)
        if host_callbacks:
            self.compiled += 1
            return self.compile(*given)
        devices = tuple(device.id for device in executable_devices)
        key = (
            id(backend),
            devices,
            options.SerializeAsString(),
            hashlib.sha256(str(module).encode()).digest(),
        )
        if key not in self.kept:
            self.kept[key] = self.compile(*given)
            self.compiled += 1
        else:
            self.found += 1
        self.kept.move_to_end(key)
        if len(self.kept) > KEPT:
            self.kept.popitem(last=False)
        return self.kept[key]

    def make_room(self, most: int = MOST_MAPS) -> bool:
        """Let go of all programs where they map too much memory; looked at once in 50 compilations."""
        if self.compiled < self.looked + 50:
            return False
        self.looked = self.compiled
        if mappings() <= most:
            return False
        self.kept.clear()
        jax.clear_caches()
        gc.collect()
        return True


def mappings() -> int:
    """Stretches of memory that this process maps; 0 where the system does not say."""
    maps = pathlib.Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def share_programs() -> SharedPrograms:
    """From now on."""
    compiler.backend_compile_and_load = shared = SharedPrograms()
    return shared
