"""The strict test world: simulated devices (pyproject's `fake_devices`), float64 allowed, warnings are errors."""

import collections
import os
import zlib

import jax
import numpy as np
import pytest

jax.config.update("jax_enable_x64", True)

# Most programs here are compiled once and run for milliseconds, in this process and in those that tests start.
jax.config.update("jax_disable_most_optimizations", True)
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


@pytest.fixture(scope="module")
def compiled_for_users():
    """Programs compiled with all optimizations: for tests that read them."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session")
def float16():
    """Skips a test where XLA:CPU cannot compile float16: on processors without F16C it lacks `__extendhfsf2`."""
    try:
        jax.jit(lambda x: x * x * x)(np.ones(4, np.float16))
    except jax.errors.JaxRuntimeError as error:
        pytest.skip(f"XLA:CPU compiles no float16 for this processor: {str(error)[:80]}")


BOTH = (
    "architecture", "buckets", "collectives_pairs", "ddp_program", "init_environment", "ledger_published", "mesh_shape",
    "migration", "pipeline_program", "pipeline_schedule", "random_plans", "spawn", "spawn_errors",
)  # fmt: skip
"""Modules that run whole at both ends of the JAX range: cheap ones, and those about what differs between versions."""


COVERS = (
    "ddp_equality", "fsdp_equality", "laws", "ledger_difference", "models_generate", "models_parallel", "pipeline_executor",
    "pipeline_training", "processes_ddp", "tensor_3d", "tensor_auto", "tensor_block", "tensor_embedding", "tensor_linear",
    "tensor_plans",
)  # fmt: skip
"""Modules whose cases are covers of a product of plans: CI takes every other one."""


def pytest_collection_modifyitems(config, items):
    """All other tests are shared between the two ends: CI runs each once, at the one end or the other.

    Whoever names tests gets all of them, and so does AXONML_ALL_ROWS=1.
    """
    if os.environ.get("AXONML_ALL_ROWS") or config.args_source is not config.ArgsSource.TESTPATHS:
        return
    old = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11)
    counts, kept, dropped = collections.Counter(), [], []
    for item in items:
        module = item.module.__name__.removeprefix("test_")
        counts[module] += 1
        # Thue and Morse's sequence: no option that alternates from case to case falls to one end alone.
        mine = module in BOTH or counts[module].bit_count() % 2 == old
        if module in COVERS and hasattr(item, "callspec"):
            mine = mine and zlib.crc32(item.nodeid.encode()) % 2
        (kept if mine else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept
