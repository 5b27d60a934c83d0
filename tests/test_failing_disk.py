"""Disks that are full or read-only while a run goes on: real ones (small file systems in memory, root), and errors as text."""

import contextlib
import errno
import gc
import json
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import axonml_jax as ax
from axonml_jax.checkpoint import saving
from axonml_jax.checkpoint.format import Manifest, Team
from axonml_jax.checkpoint.saving import Failures, cause_of
from axonml_jax.cli.loop import Record
from axonml_jax.cli.records import Csv, JsonLines, Patient, read_records
from axonml_jax.launch.workers import Failure, looks_like_a_consequence

SIZE = 4 << 20
STATE = {"w": jnp.zeros(200_000)}  # 0.8 MB


@pytest.fixture
def disk(tmp_path):
    """A file system of its own with 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no small file system here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def mount_again(folder, how):
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


@contextlib.contextmanager
def full(folder, *, left=0):
    """Nothing more fits in meanwhile."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(filler, max(filler.stat().st_size - left, 0))
    yield
    filler.unlink()


@contextlib.contextmanager
def read_only(folder):
    """Nothing can be changed meanwhile."""
    mount_again(folder, "ro")
    yield
    mount_again(folder, "rw")


FAULTS = {
    "full": (full, "No space left on device", "bytes are free .*: delete something there"),
    "full while arrays are written": (
        lambda folder: full(folder, left=300_000),
        "No space left on device",
        "bytes are free",
    ),
    "read-only": (read_only, "Read-only file system", "mounted read-only"),
}


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "owner.json")


# TensorStore's threads may tell a write that has failed to Orbax's event loop, which is closed by then.
@pytest.mark.filterwarnings("ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_last_good_checkpoint_is_kept_and_the_next_step_is_tried(disk, caplog, fault, asynchronous):
    break_it, cause, remedy = FAULTS[fault]
    folder = disk / "run"
    with ax.CheckpointManager(folder, every=2, keep=1, max_failures=3, asynchronous=asynchronous) as manager:
        manager.save(2, STATE)
        manager.wait()
        with break_it(disk):
            assert not manager.save(3, STATE)
            for step in (4, 6):
                manager.save(step, STATE)
            with pytest.raises(OSError, match=cause):
                manager.wait()  # whoever asks is told
            assert manager.failed_saves == 2 and manager.steps == [2]
        said = [each.getMessage() for each in caplog.records if "The run goes on" in each.getMessage()]
        assert len(said) == 1 and cause in said[0] and "the last good checkpoint is that of step 2" in said[0]
        assert remedy.split(".*")[0] in said[0] and "3 failures in a row end it" in said[0]
        assert manager.save(8, STATE)
        manager.wait()
        assert "saved again, after 2 that failed" in caplog.text
        assert names(folder) == ["step_00000008"] and manager.failed_saves == 2
        with break_it(disk):
            manager.save(10, STATE)
            manager.save(12, STATE)
            with pytest.raises(OSError, match=rf"3 saves in a row failed, the last: (.|\n)*{cause}"):
                manager.save(14, STATE)
                manager.wait()
    assert names(folder) == ["step_00000008"]
    gc.collect()  # what Orbax has left of its tasks
    assert "Traceback" not in caplog.text


def test_what_cannot_be_removed_now_is_removed_before_the_next_save(disk, monkeypatch):
    """The disk becomes read-only while a checkpoint is written: nothing of it can be deleted then."""
    real = saving.checksums

    def remounted(folder):
        mount_again(disk, "ro")
        return real(folder)

    with ax.CheckpointManager(disk, every=1, keep=1, max_failures=2) as manager:
        manager.save(1, STATE)
        manager.wait()
        with monkeypatch.context() as patched:
            patched.setattr(saving, "checksums", remounted)
            manager.save(2, STATE)
            with pytest.raises(OSError, match="Read-only file system"):
                manager.wait()
        assert names(disk) == ["step_00000001", "step_00000002.saving"]
        mount_again(disk, "rw")
        manager.save(3, STATE)
        manager.wait()
        assert names(disk) == ["step_00000003"]


def test_an_older_checkpoint_that_cannot_be_deleted_spoils_no_save(tmp_path, monkeypatch, caplog):
    from axonml_jax.checkpoint import places as room

    def fails(path):
        raise OSError(errno.EIO, "Input/output error")

    with ax.CheckpointManager(tmp_path, every=1, keep=1, asynchronous=False) as manager:
        manager.save(1, {"w": jnp.zeros(3)})
        with monkeypatch.context() as patched:
            patched.setattr(room, "remove", fails)
            assert manager.save(2, {"w": jnp.zeros(3)})
        assert manager.steps == [1, 2] and "is saved, but older ones could not be deleted" in caplog.text
        manager.save(3, {"w": jnp.zeros(3)})
        assert names(tmp_path) == ["step_00000003"]


def test_only_causes_that_may_pass_do_and_each_is_said_once(tmp_path, caplog):
    full_, denied, broken = (OSError(n, os.strerror(n)) for n in (errno.ENOSPC, errno.EACCES, errno.EIO))
    assert [cause_of(each) for each in (full_, denied, broken)] == [errno.ENOSPC, None, errno.EIO]
    quota = OSError("saving it failed: on process 3: INTERNAL: Disk quota exceeded [OS error 122: EDQUOT]")
    assert cause_of(quota) == errno.EDQUOT
    with pytest.raises(ValueError, match="max_failures=0 must be at least 1"):
        Failures(tmp_path, list, 0)
    with pytest.raises(
        OSError, match=r"No space left on device\nthere is no good .* bytes are free .*: delete"
    ) as caught:
        Failures(tmp_path, list, 1).take(full_, tell=True)
    assert caught.value.errno == errno.ENOSPC
    some = Failures(tmp_path, list, 5)
    with pytest.raises(PermissionError):
        some.take(denied, tell=True)
    for error in (full_, broken, full_, broken):
        some.take(error, tell=True)
    assert (some.total, some.in_a_row, len(caplog.records)) == (4, 4, 2)
    assert "there is no good checkpoint yet" in caplog.text and "bytes are free for" in caplog.text
    some.passed(tell=True)
    some.tell()
    some.take(full_, tell=True)
    assert (some.total, some.in_a_row, len(caplog.records)) == (5, 1, 4)
    with pytest.raises(OSError, match="No space left"):
        some.tell()


def test_of_several_processes_too_a_cause_that_does_not_pass_ends_the_run_at_once(tmp_path):
    class Failed:
        done = True

        def __init__(self, number):
            self.failure = OSError(number, os.strerror(number))

        def wait(self):
            raise OSError(f"saving failed: {self.failure}") from self.failure

    manager = ax.CheckpointManager(tmp_path, every=1, max_failures=3)
    manager._team.size = 2
    manager._saving = Failed(errno.ENOSPC)
    manager.check()
    assert manager.failed_saves == 0  # counted where all processes are at the same step
    manager._saving = Failed(errno.EACCES)
    with pytest.raises(OSError, match="Permission denied"):
        manager.check()


def test_an_error_without_text_is_told_to_the_others_too(monkeypatch):
    class Coordinator:
        def __init__(self):
            self.values = {}

        def key_value_set(self, key, value):
            self.values[key] = value

        def wait_at_barrier(self, name, timeout_in_ms):
            return

        def key_value_dir_get(self, folder):
            return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    client = Coordinator()
    monkeypatch.setattr("axonml_jax.checkpoint.format.coordinator_client", lambda: client)
    team = Team()
    team.size = 2
    team.writes_as("step")
    assert str(team.not_written(MemoryError())) == "on process 0: MemoryError()"


def test_a_process_that_ends_during_a_save_is_named_in_the_place_of_a_timeout(monkeypatch):
    class Deserted:
        def key_value_set(self, key, value):
            pass

        def wait_at_barrier(self, name, timeout_in_ms):
            raise jax.errors.JaxRuntimeError("INTERNAL: Barrier failed because: UNAVAILABLE: Task 1 heartbeat timeout.")

        blocking_key_value_get = wait_at_barrier

    monkeypatch.setattr("axonml_jax.checkpoint.format.coordinator_client", Deserted)
    monkeypatch.setattr(saving, "coordinator_client", Deserted)
    team, gone = Team(), r"process\(es\) \[1\] ended or were lost "
    team.size, led = 2, saving.Saving.__new__(saving.Saving)
    led._team, led._placed, led._key = team, None, "key"
    waits = {
        "before all had come to save x": lambda: team.tell_all("save x", None),
        "while the others were writing": lambda: team.written(key="", timeout_ms=1),
    }
    for words, wait in waits.items():
        with pytest.raises(OSError, match=gone + words) as error:
            wait()
        assert looks_like_a_consequence(Failure(0, "host", 1, 1, 1.0, (str(error.value),)))
    team.rank = 1
    with pytest.raises(OSError, match=gone + "while the others were writing"):
        led._hear_outcome()


class Mailbox:
    """A coordinator's keys."""

    def __init__(self):
        self.values, self.news = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.news:
            self.values[key] = value
            self.news.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.news:
            if not self.news.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self.values[key]


@pytest.mark.parametrize("where", [None, "write", "commit"])
def test_the_others_wait_as_long_as_process_0_commits_and_hear_of_its_end(where, tmp_path, monkeypatch):
    mailbox, limit = Mailbox(), 0.3
    monkeypatch.setattr(saving, "coordinator_client", lambda: mailbox)
    monkeypatch.setattr(saving, "_AS_LONG_AS_IT_TAKES", 5.0)
    failed = lambda at: (lambda *_: (_ for _ in ()).throw(TimeoutError("gone"))) if where == at else lambda *_: {}
    monkeypatch.setattr(saving, "checksums", lambda folder: time.sleep(3 * limit) or failed("commit")())

    def finish(rank):
        one = saving.Saving.__new__(saving.Saving)
        one._team, one._told = Team(limit), False
        one._team.size, one._team.rank = 2, rank
        one._saver = SimpleNamespace(wait_until_finished=failed("write") if rank == 0 else lambda: None)
        one._owner, one._shared, one._verify = SimpleNamespace(check=lambda: None), True, False
        one._manifest, one._key, one._links = Manifest(), "key", contextlib.ExitStack()
        one._placed = one._committed = one._unstarted = one._error = None
        one.folder = tmp_path / "saved"
        one._unfinished = one._written_at = tmp_path / "saved.saving"
        one._finish()
        return one._error

    (tmp_path / "saved.saving").mkdir()
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(finish, range(2)))
    assert (tmp_path / "saved").exists() == (where is None) and not (tmp_path / "saved.saving").exists()
    assert list(map(str, errors)) == (["None"] * 2 if where is None else ["gone", "on process 0: gone"])


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_records_that_a_full_disk_does_not_take_are_written_later(disk, kind, caplog):
    path, steps = disk / "records", range(1, 60)
    patient = Patient(kind(path))
    with full(disk):
        # A page of a file may have room for some rows.
        for step in steps:
            patient.write(Record(step, {"loss": 1 / step, "text": 1e-9 * step}))
    assert caplog.text.count("a record could not be written") == 1
    patient.write(Record(60, {"loss": 0.5}))
    patient.close()
    if kind is JsonLines:
        assert [record.step for record in read_records(path)] == [*steps, 60]
        assert all(json.loads(line) for line in path.read_text().splitlines())
    else:
        assert [line.split(",")[0] for line in path.read_text().splitlines()] == ["step", *map(str, steps), "60"]
