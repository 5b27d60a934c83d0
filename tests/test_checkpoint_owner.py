"""One folder of checkpoints has one writer: who is refused, who takes over, and what reading leaves alone."""

import dataclasses
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest
from flax import nnx

import axonml_jax as ax
from axonml_jax.checkpoint import ownership, saving
from axonml_jax.checkpoint.ownership import FolderInUse, Owner, Ownership

ELSEWHERE = {"host": "far-away", "machine": "another boot", "pid": 7, "since": "2026-11-22 09:30:00+00:00"}


class Weights(nnx.Module):
    """A few numbers, cheap to save."""

    def __init__(self, value=0.0):
        self.w = nnx.Param(jnp.full((4, 4), value, jnp.float32))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def written(record, **changes):
    """A record as another process leaves it."""
    record.parent.mkdir(exist_ok=True)
    record.write_text(dataclasses.replace(Owner.this_process(), **changes).text())
    return record


@pytest.fixture
def hurried(monkeypatch):
    for name, seconds in (("QUIET", 0.6), ("BEAT", 0.05), ("_POLL", 0.05), ("_SETTLE", 0.2)):
        monkeypatch.setattr(ownership, name, seconds)


@pytest.fixture
def other():
    """Python in a process of its own, which says `ready` when it is; killed at the end."""
    started = []

    def start(code, *argv):
        process = subprocess.Popen([sys.executable, "-c", code, *map(str, argv)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


OWNS = """
import sys, time, pathlib
from axonml_jax.checkpoint.ownership import Ownership
mine = Ownership(pathlib.Path(sys.argv[1]) / "owner.json", pathlib.Path(sys.argv[1]))
(pathlib.Path(sys.argv[1]) / "step_00000009.saving").mkdir()
print("ready", flush=True)
time.sleep(60)
"""

EVALUATES = """
import sys, jax.numpy as jnp, axonml_jax as ax
from flax import nnx
module = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
module.kernel = nnx.Param(jnp.zeros(3))
with ax.CheckpointManager(sys.argv[1], every=1) as manager:
    assert manager.restore(module, accept=["missing", "unexpected"]).step == 1 and manager.steps == [1]
print("ready", flush=True)
"""


def test_an_evaluation_that_opens_the_folder_of_a_saving_run_changes_nothing(tmp_path, monkeypatch, other):
    gate, real = threading.Event(), saving.checksums
    with ax.CheckpointManager(tmp_path / "run", every=1) as manager:
        manager.save(1, Weights(1))
        manager.wait()
        monkeypatch.setattr(saving, "checksums", lambda folder: gate.wait(60) and real(folder))
        manager.save(2, Weights(2))
        there = names(tmp_path / "run")
        assert there == ["owner.json", "step_00000001", "step_00000002.saving"]
        other(EVALUATES, tmp_path / "run").wait()
        assert names(tmp_path / "run") == there
        gate.set()
        manager.wait()
        assert manager.steps == [1, 2]
    assert names(tmp_path / "run") == ["step_00000001", "step_00000002"]
    with ax.CheckpointManager(tmp_path / "nothing") as manager:
        assert manager.restore(Weights()) is None
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(ValueError, match="is no folder"):
        ax.CheckpointManager(tmp_path / "run" / "step_00000001" / "checkpoint.json")


def test_a_second_writer_is_refused_by_name_and_takes_over_when_the_first_is_killed(tmp_path, other, caplog):
    first = other(OWNS, tmp_path)
    since = json.loads((tmp_path / "owner.json").read_text())["since"]
    with ax.CheckpointManager(tmp_path, every=1) as manager:
        with pytest.raises(FolderInUse) as caught:
            manager.save(1, Weights(1))
        said = f"{tmp_path} is being written by process {first.pid} on {os.uname().nodename} since {since}"
        assert said in str(caught.value)
        first.send_signal(signal.SIGSTOP)  # it may go on any moment
        with pytest.raises(FolderInUse):
            manager.claim()
        assert names(tmp_path) == ["owner.json", "step_00000009.saving"]
        first.kill()  # a zombie until somebody waits for it
        deadline = time.monotonic() + 20
        while Owner.parse((tmp_path / "owner.json").read_text()).lives() and time.monotonic() < deadline:
            time.sleep(0.01)
        with caplog.at_level("WARNING", "axonml_jax"):
            assert manager.save(1, Weights(1))
        assert (
            f"belonged to process {first.pid} on " in caplog.text
            and "that process has ended: taken over" in caplog.text
        )
        manager.wait()
    assert names(tmp_path) == ["step_00000001"]


def test_a_writer_of_the_same_launch_that_has_joined_nobody_is_told_so(tmp_path, other, monkeypatch):
    monkeypatch.setenv("AXONML_JAX_RUN_ID", "one")
    other(OWNS, tmp_path)
    for launch, joined, told in (("one", False, True), ("one", True, False), ("another", False, False)):
        monkeypatch.setenv("AXONML_JAX_RUN_ID", launch)
        monkeypatch.setattr(ownership, "in_a_job", lambda joined=joined: joined)
        with pytest.raises(FolderInUse) as caught:
            Ownership(tmp_path / "owner.json", tmp_path)
        assert ("of one launch" in str(caught.value) and "ax.init()" in str(caught.value)) == told


def test_a_record_from_before_launches_were_kept_is_read(tmp_path):
    record = json.loads(Owner.this_process().text())
    del record["launch"]
    assert Owner.parse(json.dumps(record)).pid == os.getpid()


def test_of_many_that_find_a_dead_owner_one_takes_over(tmp_path):
    # Another process has its number now.
    record = written(tmp_path / "owner.json", pid=os.getppid(), started="long ago")

    def claim(_):
        try:
            return Ownership(record, tmp_path)
        except FolderInUse as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        [owner] = [each for each in pool.map(claim, range(8)) if isinstance(each, Ownership)]
    owner.check()
    owner.release()
    assert names(tmp_path) == []


def test_an_owner_on_another_machine_is_watched(tmp_path, hurried, caplog):
    """No clock of another machine is believed, and no process number."""
    record = written(tmp_path / "owner.json", **ELSEWHERE)
    stop = threading.Event()
    beats = threading.Thread(target=ownership._beat, args=(record, Owner.parse(record.read_text()).token, stop))
    beats.start()
    with pytest.raises(FolderInUse, match=r"process 7 on far-away since 2026-11-22 09:30:00\+00:00"):
        Ownership(record, tmp_path)
    stop.set()
    beats.join()
    began = time.monotonic()
    owner = Ownership(record, tmp_path)
    assert time.monotonic() - began >= ownership.QUIET
    assert "its heartbeat is watched for up to 0.6 s" in caplog.text
    assert "belonged to process 7 on far-away" in caplog.text and "quiet for 0.6 s: taken over" in caplog.text
    first = record.read_text()
    time.sleep(4 * ownership.BEAT)
    assert record.read_text() != first  # its own heart beats
    owner.release()


def test_of_an_owner_that_cannot_be_seen_from_here_nobody_says_that_it_has_ended(tmp_path):
    """A process of this number may well have ended here: it runs elsewhere."""
    here, unseen = Owner.this_process(), tmp_path / f"step_00000009{saving.SAVING}"
    gone = subprocess.Popen(["true"])
    gone.wait()
    for changes, lives in (
        ({}, True),
        ({"pid": gone.pid}, False),
        ({"pid": gone.pid, "machine": "another boot"}, None),
    ):
        assert dataclasses.replace(here, **changes).lives() is lives
        record = written(saving.record_of(tmp_path / "step_00000009"), **changes)
        assert ownership.in_use(record) is (lives is not False)
        unseen.mkdir(exist_ok=True)
        saving.tidy(tmp_path)
        assert unseen.exists() is record.exists() is (lives is not False)
    assert dataclasses.replace(here, pid=os.getppid(), started=None).lives() is None  # its number may be another's now


@pytest.mark.parametrize("text", ["{", "[]", '{"pid": 3}', '{"pid": -1}', "\x00" * 300])
def test_a_record_that_cannot_be_read_is_watched_too(tmp_path, hurried, text):
    (tmp_path / "owner.json").write_text(text)
    Ownership(tmp_path / "owner.json", tmp_path).release()


def test_a_record_that_is_no_text_does_not_end_a_claim(tmp_path):
    record = saving.record_of(tmp_path / "step_00000009")
    record.write_bytes(b"\xff\xfe{")
    assert ownership.in_use(record)
    saving.tidy(tmp_path)
    assert record.exists()


def test_a_run_that_has_lost_its_folder_saves_nothing_more_and_removes_nothing(tmp_path):
    with ax.CheckpointManager(tmp_path, every=1) as manager:
        manager.save(1, Weights(1))
        manager.wait()
        (tmp_path / "owner.json").unlink()  # by hand: nobody else writes
        manager.save(2, Weights(2))
        manager.wait()
        assert json.loads((tmp_path / "owner.json").read_text())["pid"] == os.getpid()
        written(tmp_path / "owner.json", **ELSEWHERE)
        (tmp_path / "step_00000003.saving").mkdir()  # the new owner's
        with pytest.raises(FolderInUse, match=r"belongs to process 7 on far-away .* this process has lost it"):
            manager.save(3, Weights(3))
    assert names(tmp_path) == ["owner.json", "step_00000001", "step_00000002", "step_00000003.saving"]


def test_what_is_lost_during_a_save_is_not_committed(tmp_path, monkeypatch):
    gate, real = threading.Event(), saving.checksums
    monkeypatch.setattr(saving, "checksums", lambda folder: gate.wait(60) and real(folder))
    manager = ax.CheckpointManager(tmp_path, every=1)
    manager.save(1, Weights(1))
    written(tmp_path / "owner.json", **ELSEWHERE)
    gate.set()
    with pytest.raises(OSError, match=r"step_00000001 failed: .* belongs to process 7 on far-away"):
        manager.close()
    assert names(tmp_path) == ["owner.json", "step_00000001.saving"]


def test_within_one_process_too_a_folder_has_one_writer(tmp_path, monkeypatch):
    first, second = (ax.CheckpointManager(tmp_path, every=1) for _ in range(2))
    first.save(1, Weights())
    with pytest.raises(FolderInUse, match="by this process itself"):
        second.save(1, Weights())
    first.close()
    second.save(1, Weights())
    second.wait()
    third = ax.CheckpointManager(tmp_path, every=1)
    del second  # forgotten, not closed, as in a notebook
    gc.collect()  # what was raised above still knows it
    third.save(2, Weights())
    third.wait()
    assert third.steps == [1, 2]
    monkeypatch.setattr(ownership, "_held", set())  # as after os.exec
    fourth = ax.CheckpointManager(tmp_path, every=1)
    fourth.claim()
    for manager in (third, fourth):
        manager.close()
    assert names(tmp_path) == ["step_00000001", "step_00000001.abandoned", "step_00000002"]


def test_a_fork_neither_ends_the_ownership_nor_has_it(tmp_path):
    owner = Ownership(tmp_path / "owner.json", tmp_path)
    real = os.getpid()
    owner._me = dataclasses.replace(owner._me, pid=real + 1)  # what a fork sees
    with pytest.raises(FolderInUse):
        owner.check()
    ownership._release(owner.record, owner._me, threading.Event(), False)
    assert names(tmp_path) == ["owner.json"]
    owner.release()


def test_without_locks_the_last_to_write_has_it(tmp_path, hurried, monkeypatch):
    def none(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(ownership.fcntl, "flock", none)
    owner = Ownership(tmp_path / "owner.json", tmp_path)
    with pytest.raises(FolderInUse):
        Ownership(tmp_path / "owner.json", tmp_path)
    owner.release()
    slow = threading.Timer(0.1, lambda: written(tmp_path / "owner.json", pid=os.getppid(), started=parent()))
    slow.start()
    with pytest.raises(FolderInUse, match=f"process {os.getppid()} on"):
        Ownership(tmp_path / "owner.json", tmp_path)


def parent():
    from axonml_jax.checkpoint import ownership as owner

    return owner._start_of(os.getppid())


def test_a_claim_that_saves_nothing_leaves_nothing(tmp_path):
    with ax.CheckpointManager(tmp_path / "run") as manager:
        manager.claim()
        assert names(tmp_path / "run") == ["owner.json"]
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    with ax.CheckpointManager(tmp_path / "mine") as manager:
        manager.claim()
    assert (tmp_path / "mine").exists()


def test_of_two_that_save_one_checkpoint_the_second_is_refused(tmp_path, monkeypatch):
    gate, begun, real = threading.Event(), threading.Event(), saving.checksums
    monkeypatch.setattr(saving, "checksums", lambda folder: begun.set() or (gate.wait(60) and real(folder)))
    with ThreadPoolExecutor(1) as pool, ax.CheckpointManager(tmp_path, asynchronous=False) as manager:
        first = pool.submit(ax.save, tmp_path / "best", Weights(1))
        begun.wait(60)
        with pytest.raises(FolderInUse, match=re.escape(f"{tmp_path / 'best'} is being written by")):
            ax.save(tmp_path / "best", Weights(2), replace=True)
        manager.claim()  # removes what nobody writes, and only that
        assert names(tmp_path) == ["best.owner.json", "best.saving", "owner.json"]
        gate.set()
        assert first.result() == tmp_path / "best"
        assert names(tmp_path) == ["best", "owner.json"]
        ax.save(tmp_path / "best", Weights(2), replace=True)
        with pytest.raises(FileExistsError):
            ax.save(tmp_path / "best", Weights(2))
    assert names(tmp_path) == ["best"]


def test_a_record_that_is_never_there_is_an_error_at_last(tmp_path, monkeypatch):
    """`ax.save("/proc/foo", ...)` tried for ever."""
    with pytest.raises(
        OSError, match=r"saving /proc/foo failed: .*No such file or directory: '/proc/foo\.owner\.json'"
    ):
        ax.save("/proc/foo", Weights())
    monkeypatch.setattr(ownership, "_is_at", lambda record, handle: False)
    with pytest.raises(OSError, match=r"owner\.json is replaced again and again"):
        ax.save(tmp_path / "run", Weights())


def test_a_place_below_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    for below in ("file/run", "file/runs/run"):
        with pytest.raises(
            OSError, match=rf"saving .*{below} failed: .*a part of this path is a file.*choose another place"
        ):
            ax.save(tmp_path / below, Weights())
