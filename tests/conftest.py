"""The strict test world: simulated devices (pyproject's `fake_devices`), float64 allowed, warnings are errors."""

import collections
import os

import jax
import pytest

jax.config.update("jax_enable_x64", True)

# Most programs here are compiled once and run for milliseconds, in this process and in those that tests start.
jax.config.update("jax_disable_most_optimizations", True)
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


@pytest.fixture(scope="module")
def compiled_fast():
    """What every module gets."""


@pytest.fixture(scope="module")
def compiled_for_users():
    """Programs compiled with all optimizations: for tests that read them."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


SHARED = (
    "bad_input", "checkpoint_manager", "checkpoint_plans", "cli", "collectives_eager", "collectives_spmd",
    "collectives_traced", "config", "data_loader", "docs", "examples", "facade_buffers", "facade_forward",
    "facade_gradients", "facade_module", "faults", "fit", "fsdp_facade", "fsdp_program", "launcher_flags",
    "laws", "ledger_lowered", "ledger_traced", "models_huggingface", "models_mlp", "models_transformer",
    "nonfinite", "processes", "processes_ddp", "tensor_auto", "tensor_partitioned", "tensor_plans", "training_loss",
    "world_groups",
)  # fmt: skip


def pytest_collection_modifyitems(config, items):
    """Cases of a parametrized test are shared between the two ends of the JAX range, as `plan_tables.this_end` shares rows."""
    if os.environ.get("AXONML_ALL_ROWS") or config.args_source is not config.ArgsSource.TESTPATHS:
        return  # whoever names tests gets all of them
    old = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11)
    counts, kept, dropped = collections.Counter(), [], []
    for item in items:
        shared = item.module.__name__.removeprefix("test_") in SHARED and hasattr(item, "callspec")
        key = (item.module.__name__, item.originalname)
        counts[key] += shared
        # Thue and Morse's sequence: no option that alternates from case to case falls to one end alone.
        (kept if not shared or counts[key].bit_count() % 2 == old else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept
