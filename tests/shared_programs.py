"""Programs that are alike are compiled once in a process: oracles, initializers and small operations of many tests are.

What is shared is XLA's executable itself; JAX traces and lowers every program as ever, so nothing of ours is skipped. JAX's
persistent cache would share between processes too, but loads what was saved in another way than users run it, and on some
processors rejects all of it (jax-ml/jax#38445).
"""

import collections
import hashlib

from jax._src import compiler

KEPT = 1000
"""Executables that are kept, those last used; a small one holds about 100 kB."""


class SharedPrograms:
    """JAX's compiler, which knows what it has compiled."""

    def __init__(self):
        self.compile, self.kept = compiler.backend_compile_and_load, collections.OrderedDict()
        self.found, self.compiled = 0, 0

    def __call__(self, backend, module, executable_devices, options, host_callbacks):
        """The executable of a module for these devices; one that calls Python is a new one each time."""
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


def share_programs() -> SharedPrograms:
    """From now on."""
    compiler.backend_compile_and_load = shared = SharedPrograms()
    return shared
