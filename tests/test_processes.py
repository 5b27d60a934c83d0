"""Real processes (jax.distributed, gloo) pass the same eager cases as the threads of `spawn`."""

import functools
import json
import os
import pathlib

import pytest
from workers.eager_cases import CASES
from workers.launch import launch

WORKERS = pathlib.Path(__file__).parent / "workers"
TIME_LIMIT = 120


@functools.cache
def outcomes(num_processes):
    """{case: [failure or None, by process]}, and what the processes left in standard error."""
    results = launch(str(WORKERS / "run_cases.py"), num_processes, TIME_LIMIT)
    table = {}
    for _, out, _ in results:
        for line in out.splitlines():
            if line.startswith("{"):
                outcome = json.loads(line)
                table.setdefault(outcome["case"], []).append(outcome["failure"])
    return table, [(code, error[-3000:]) for code, _, error in results]


@pytest.mark.parametrize("num_processes", [2, 4])
def test_every_process_ends_well(num_processes):
    _, ends = outcomes(num_processes)
    assert [code for code, _ in ends] == [0] * num_processes, ends


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_processes", [2, 4])
def test_eager_case(num_processes, name):
    table, ends = outcomes(num_processes)
    assert name in table and len(table[name]) == num_processes, f"not every process came to it: {ends}"
    assert table[name] == [None] * num_processes, "\n".join(str(failure) for failure in table[name])


def test_a_launch_that_hangs_ends_at_its_limit_and_leaves_no_child(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(__file__).with_name(sys.argv[3]).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(TimeoutError, match="2 processes"):
        launch(str(script), 2, timeout=2)
    for name in ("0", "1"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), 0)
