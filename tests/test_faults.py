"""A short benchmarks/faults/fault_campaign.py: real processes, faults, and a run that ends bit for bit as it should."""

import importlib
import json
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from conftest import salt

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"


@pytest.fixture(scope="module")
def benchmarks():
    """Imports a script of benchmarks/faults, benchmarks/truth or benchmarks itself by its name."""
    before, places = set(sys.modules), list(sys.path)
    sys.path[:0] = [str(ROOT / "benchmarks" / folder) for folder in ("faults", "truth", "")]
    yield importlib.import_module
    sys.path[:] = places
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def campaign(benchmarks):
    return benchmarks("fault_campaign")


def test_a_campaign_is_the_same_for_the_same_seed_and_tries_every_kind_plan_and_world(campaign):
    drawn = [campaign.draw(number, 3) for number in range(120)]
    assert drawn == [campaign.draw(number, 3) for number in range(120)]
    assert drawn != [campaign.draw(number, 4) for number in range(120)]
    assert {fault.kind for fault in drawn} == {*campaign.KINDS}
    assert {(fault.axis, fault.world) for fault in drawn} == {
        (a, w) for a, worlds in campaign.WORLDS.items() for w in worlds
    }
    assert all(fault.rank == 0 for fault in drawn if fault.kind in campaign.IN_THE_MAIN_PROCESS)


@pytest.mark.parametrize(
    "script, name", [("fault_campaign", "faults"), ("random_plans", "random plans"), ("shrunk_runs", "shrunk runs")]
)
def test_the_tables_of_the_page_are_those_of_the_records(benchmarks, script, name):
    module = benchmarks(script)
    _, inside, _ = benchmarks("written_table").between(PAGE, name)
    assert inside.strip() == module.table(module.known(module.RECORDS, 0)), f"run {script}.py --write"


PARENT = """
import os, subprocess, sys, tempfile
sys.path.insert(0, BENCHMARKS)
import fault_forks
fault_forks.IMPORTS = ("json",)
fault_forks.begin({})
child = [sys.executable, "child.py", "a", "b c"]
pipes = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
with tempfile.TemporaryDirectory() as mine, fault_forks.forking(True):
    with subprocess.Popen(child, env=os.environ | {"MARK": "x y"}, **pipes) as process:
        out, _ = process.communicate()
    print(out, process.returncode, os.path.exists(mine), process.pid != os.getpid())
"""
CHILD = """
import atexit, os, sys
atexit.register(print, "taken leave")
command, variables = (open(f"/proc/self/{name}").read() for name in ("cmdline", "environ"))
print(sys.argv, __name__, os.getsid(0) == os.getpid(), "child.py a b c" in command, "MARK=x y" in variables.split(chr(0)))
print("json" in sys.modules, sorted(int(each) for each in os.listdir("/proc/self/fd"))[:-1])
sys.exit(7)
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a fork writes its command where /proc reads it")
def test_a_fork_of_the_campaign_is_the_program_that_was_to_be_started(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "parent.py").write_text(PARENT.replace("BENCHMARKS", repr(str(ROOT / "benchmarks" / "faults"))))
    command = [sys.executable, "parent.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    wanted = ["['child.py', 'a', 'b c'] __main__ True True True", "True [0, 1, 2]", "taken leave", " 7 True True"]
    assert run.stdout.splitlines() == wanted, run.stderr


@pytest.mark.slow
def test_a_save_that_one_rank_cannot_write_is_passed_over_and_a_rank_that_hangs_is_named(benchmarks, tmp_path):
    """Rank 1 may write no file of more than 16 bytes for a step, and the run goes on; later it hangs. One training has both."""
    folder = tmp_path / "a [1]\\*"  # a path that Orbax would glob
    folder.mkdir()
    job = benchmarks("fault_job").Job(folder, "fsdp")
    job.environ["FAULT_UNDISTURBED"] = "1"
    job.launch("file-too-large-passes", 1, 3, "sleep", 1, 8)
    digest, losses = job.undisturbed
    assert job.digests == [digest] and job.losses == losses and not job.leftovers(), job.said[-4000:]
    failed = (
        r"step_00000003 failed: (.|\n)*on process 1: .*File too large(.|\n)*The run goes on(.|\n)*saved again, after 1"
    )
    assert re.search(failed, job.said) and "start=6" in job.said, job.said[-4000:]
    warning = (
        r"^\[rank 0\].*rank\(s\) \[1\] are missing: rank 1 has begun step \d only and is in before at .* the job ends"
    )
    assert len(re.findall(warning, job.said, re.MULTILINE)) == 1, job.said[-4000:]  # long before, once, by one process
    assert re.search(benchmarks("fault_kinds").ON_ONE_RANK["sleep"].format(rank=1), job.said), job.said[-4000:]


@pytest.mark.slow
def test_faults_of_kinds_that_each_commit_chooses_anew_are_survived(campaign, tmp_path):
    """Of two processes. On a busy machine a fault may come at another moment than it should: what fails is tried twice more."""
    small = {fault.kind: n for n in reversed(range(500)) if (fault := campaign.draw(n, 0)).world == 2}
    assert small.keys() == {*campaign.KINDS}
    first = zlib.crc32(salt().encode()) % 9  # all kinds take a quarter of an hour of processor time
    numbers = [small[kind] for kind in [*campaign.KINDS][first::9]]
    records = tmp_path / "faults.jsonl"
    options = ["--jobs", "3", "--stuck-after", "30", "--records", str(records), "--again"]
    command = [sys.executable, str(ROOT / "benchmarks" / "faults" / "fault_campaign.py"), *options]
    for _ in range(3):
        run = subprocess.run(
            [*command, "--numbers", *map(str, numbers)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        if not run.returncode:
            break
    assert not run.returncode, run.stdout[-6000:] + run.stderr[-2000:]
    assert {json.loads(line)["number"] for line in records.read_text().splitlines()} == {*numbers}
