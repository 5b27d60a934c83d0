"""The strict test world: simulated devices (pyproject's `fake_devices`), float64 allowed, warnings are errors."""

import collections
import gc
import os
import signal
import zlib

import jax
import numpy as np
import pytest
from shared_programs import share_programs

jax.config.update("jax_enable_x64", True)

# Most programs here are compiled once and run for milliseconds, in this process and in those that tests start.
jax.config.update("jax_disable_most_optimizations", True)
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# Tests send Ctrl-C to processes that they start; whoever starts the tests in the background may have it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What they compile is theirs: nothing is kept between runs, nor in the folder of whoever runs them.
jax.config.update("jax_enable_compilation_cache", False)
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "0")


SHARED = share_programs()


@pytest.fixture(scope="session")
def shared_programs():
    """What is compiled in this process, shared by programs that are alike."""
    return SHARED


def pytest_collection_finish():
    """Modules stay: the collector need not walk them again and again. It runs less often, as JAX makes many objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_runtest_logfinish():
    """After a test: a process may not keep more programs than the kernel lets it map."""
    SHARED.make_room()


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


EVERY_ROW = (
    "architecture", "buckets", "collectives_pairs", "compat", "ddp_program", "init_environment", "ledger_published",
    "mesh_shape", "migration", "pipeline_program", "pipeline_schedule", "program", "spawn", "spawn_errors",
)  # fmt: skip
"""Modules that run whole on both ends of the range: cheap ones, and those about what differs between versions of JAX."""


LARGE = (
    "cli", "context_attention", "context_axis", "context_traced", "context_transformer", "ddp_equality", "facade_gradients",
    "foreign_models", "fsdp_equality", "fsdp_facade", "laws", "ledger_difference", "literals", "lora", "models_generate",
    "models_parallel", "offload_streams", "optimizers_on_shards", "own_axes", "pipeline_executor", "pipeline_facade",
    "pipeline_linen", "pipeline_training", "positions", "processes_ddp", "recognised_attention", "state_joins", "tensor_3d",
    "tensor_auto", "tensor_auto_reads", "tensor_block", "tensor_embedding", "tensor_linear", "tensor_plans",
    "tensor_split_losses",
)  # fmt: skip
"""Modules whose tables are products of plans, each row compiled."""

PARTS = 8
SHARES = {"alone": (4, 8), "LARGE": (1, 5), "others": (2, 6)}
"""Rows of a table fall into eighths by their names. Of each kind of table the selection has those below the first number, the
other rows are those from there to the second. Tests without rows are one table together."""


def _kind(item):
    module = item.module.__name__.removeprefix("test_")
    if module in EVERY_ROW:
        return None
    if not hasattr(item, "callspec"):
        return "alone"
    return "LARGE" if module in LARGE else "others"


def pytest_collection_modifyitems(config, items):
    """Of a table of cases some rows run, at least one, chosen by their names: see `SHARES`.

    The choice is the same on every machine and for every version. Whoever names files or tests gets all rows, and so does
    AXONML_ALL_ROWS=1; AXONML_OTHER_ROWS=1 gives the other rows.
    """
    if os.environ.get("AXONML_ALL_ROWS") or config.args_source is not config.ArgsSource.TESTPATHS:
        return
    tables, kept = collections.defaultdict(list), set()
    for item in items:
        kind = _kind(item)
        tables[kind, "" if kind == "alone" else item.nodeid.split("[")[0]].append(item.nodeid)
    for (kind, _), rows in tables.items():
        if kind is None:
            kept.update(rows)
            continue
        first, last = SHARES[kind]
        eighth = lambda row: zlib.crc32(row.encode()) % PARTS
        chosen = [row for row in rows if eighth(row) < first] or [min(rows, key=eighth)]
        left = [row for row in rows if row not in chosen]
        others = [row for row in left if eighth(row) < last] or left[:1] or chosen
        kept.update(others if os.environ.get("AXONML_OTHER_ROWS") else chosen)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]
