"""Memory that a CPU process keeps for its next step: pages are asked for once, within a bound, and the user's settings win."""

import os
import subprocess
import sys

import pytest

from axonml_jax.mesh import simulate as kept_memory

STEPS = """
    import resource
    {start}
    import jax, jax.numpy as jnp
    step = jax.jit(lambda x: ((x @ x.T) @ x).sum())  # a product of 44 MB: blocks above 32 MiB are always mapped
    x = jnp.ones((3300, 4))
    faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    of_steps = []
    for _ in range(10):
        before = faults()
        step(x).block_until_ready()
        of_steps.append(faults() - before)
    print(sorted(of_steps)[2])
"""
BOUND = """
    from axonml_jax.mesh import simulate as kept_memory
    import numpy as np
    assert kept_memory.keep_memory()
    resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
    held = np.ones(2**26, np.uint8), np.ones(8, np.uint8)
    del held
    before = resident()
    assert not kept_memory.bound_kept_memory()  # a quarter of the machine
    assert not kept_memory.bound_kept_memory(most=0)  # looked at a moment ago
    kept_memory._looked -= kept_memory.SECONDS_BETWEEN
    assert kept_memory.bound_kept_memory(most=2**20)
    print(before - resident())
"""
STARTS = {
    "simulated devices": "from axonml_jax.mesh.simulate import fake_devices; fake_devices(1)",
    "init": "import axonml_jax as ax; ax.init()",
    "a backend that has started already": "import jax; jax.devices(); import axonml_jax as ax; ax.init()",
    "not ours": "",
}
OWN = [{kept_memory.SWITCH: "0"}, {"MALLOC_ARENA_MAX": "4"}, {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}]


def printed(script, **environ):
    lines = [line.removeprefix("    ") for line in script.splitlines()]
    kept = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != kept_memory.SWITCH}
    environ = {**kept, "JAX_PLATFORMS": "cpu", **environ}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], env=environ, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


linux = pytest.mark.skipif(kept_memory._glibc() is None, reason="the C library is not glibc 2.33 or newer")


@linux
@pytest.mark.parametrize("start", STARTS)
def test_a_step_asks_for_its_pages_once(start):
    faults = printed(STEPS.format(start=STARTS[start]))
    assert faults < 50 if start in ("simulated devices", "init") else faults > 1_000, faults


@linux
@pytest.mark.parametrize("own", OWN)
def test_the_switch_and_the_users_own_settings_win(own):
    assert printed(STEPS.format(start=STARTS["simulated devices"]), **own) > 1_000


@linux
def test_memory_above_the_bound_is_given_back():
    assert printed(BOUND) > 2**25


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(kept_memory, "_glibc", lambda: None)
    monkeypatch.setattr(kept_memory, "_kept", False)
    assert not kept_memory.keep_memory() and not kept_memory.bound_kept_memory(most=0)


def test_the_memory_of_the_machine_is_known_or_the_containers():
    assert 2**26 < kept_memory.machine_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
