"""The strict test world: simulated devices (pyproject's `fake_devices`), float64 allowed, warnings are errors."""

import collections
import functools
import gc
import os
import signal
import subprocess
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
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

# On a machine that is busy examples are slow to draw, which says nothing of what is tested.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


ROOT = Path(__file__).resolve().parents[1]
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


def pytest_xdist_auto_num_workers():
    """Two workers, whatever the machine has: each simulates eight devices. `-n 0` and `--pdb` run the tests in one process."""
    return 2


EVERY_ROW = (
    "architecture", "buckets", "collectives_pairs", "compat", "ddp_program", "init_environment", "ledger_published",
    "mesh_shape", "migration", "pipeline_program", "pipeline_schedule", "program", "spawn", "spawn_errors",
)  # fmt: skip
"""Modules that run whole on both ends of the range: cheap ones, and those about what differs between versions of JAX."""

EVERY_ROW_WHEN_ASKED = ("docs",)
"""Modules that run whole with AXONML_ROWS, so on the newest end: pages of the documentation, each a row."""


ON_BOTH_ENDS = (
    "test_launcher_training.py::test_two_processes_train_as_one_device_does",
    "test_memory_resume.py::test_restarted_workers_go_on_from_memory_and_end_bit_for_bit_like_an_uninterrupted_run[6]",
    "test_train_resume.py::test_a_run_stopped_by_sigterm_and_resumed_ends_bit_for_bit_like_an_uninterrupted_one",
    "test_shrink.py::test_a_run_takes_in_a_machine_and_goes_on_when_it_is_lost_with_the_losses_of_one_device",
)
"""Slow tests that the oldest JAX always runs too: processes, a restart, SIGTERM, a job that shrinks."""

SLOW_PARTS = 16
"""Of the other slow tests the oldest JAX runs one in so many."""

PINNED = (
    "test_bad_input.py::test_a_trainer_that_cannot_work_is_refused_before_its_state_is_allocated[clipping to zero]",
    "test_models_generate.py::test_masks_of_padding_on_either_side_are_right_under_every_plan[context]",
    "test_pipeline_facade.py::test_losses_optimizers_and_precisions_of_every_kind_equal_one_device[whole]",
    "test_planner_cli.py::test_what_is_missing_is_said_before_anything_is_printed[a plan's picture]",
    "test_read_back.py::test_what_the_disk_made_of_a_write_is_found_before_an_older_checkpoint_goes[checkpoint.json]",
    "test_recognised_attention.py::test_attention_is_found_told_and_put_back[logsumexp, spread late]",
)
"""Rows that are always taken: a mutant of the package died in no other (benchmarks/truth/mutants.py)."""


@functools.cache
def salt() -> str:
    """What chooses the rows of tables: `AXONML_SALT`, or the commit, so that each commit tries other rows."""
    if given := os.environ.get("AXONML_SALT"):
        return given
    try:
        asked = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    except OSError:  # no git here
        return "none"
    return asked.stdout.strip() if asked.returncode == 0 else "none"


def pytest_report_header():
    """Says which rows of tables are tried, and how to try the same again."""
    return f"rows of tables: chosen by AXONML_SALT={salt()}"


def _drawn(name):
    return zlib.crc32(f"{salt()} {name}".encode())


def pytest_collection_modifyitems(config, items):
    """Of every table of cases one row, and every test without rows; of those marked `slow` one in `SLOW_PARTS`.

    AXONML_ROWS=N asks for all slow ones, all pages of the documentation, and N rows of every table; `all` for everything.
    Tests and rows are drawn by their names and a salt that changes with each commit; `ON_BOTH_ENDS` and `PINNED` are always
    taken. The choice is the same on every machine and for every version; the rows of a smaller number are among those of a
    larger. Whoever names files or tests gets all of them. AXONML_SHARE=N takes, of what neither of this asked for alone, every
    Nth: of tests that the other end of the range runs all, this one need not.
    """
    asked, share = os.environ.get("AXONML_ROWS", ""), os.environ.get("AXONML_SHARE", "1")
    if asked == "all" or config.args_source is not config.ArgsSource.TESTPATHS:
        return
    if asked and not (asked.isdecimal() and int(asked)):
        raise pytest.UsageError(f"AXONML_ROWS={asked!r}: it is a number of rows, or 'all'")
    if not (share.isdecimal() and int(share)):
        raise pytest.UsageError(f"AXONML_SHARE={share!r}: it is a number, of which one part is taken")
    always = {*ON_BOTH_ENDS, *PINNED}
    if gone := always - {item.nodeid.partition("/")[2] for item in items}:
        raise pytest.UsageError(f"tests/conftest.py names tests that are gone: {sorted(gone)}")
    tables, kept = collections.defaultdict(list), set()
    whole = EVERY_ROW + EVERY_ROW_WHEN_ASKED if asked else EVERY_ROW
    for item in items:
        name, waits = item.nodeid.split("[")[0], not asked and item.get_closest_marker("slow") is not None
        in_whole = not waits and item.module.__name__.removeprefix("test_") in whole
        if in_whole or item.nodeid.partition("/")[2] in always:
            kept.add(item.nodeid)
        elif _drawn(name) % (int(share) * (SLOW_PARTS if waits else 1)):
            continue
        elif hasattr(item, "callspec"):
            tables[name].append(item.nodeid)
        else:
            kept.add(item.nodeid)
    for rows in tables.values():
        kept.update(sorted(rows, key=_drawn)[: int(asked or 1)])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]
