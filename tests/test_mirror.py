"""Checkpoints copied to an object store: a server here stands in for S3, is busy, refuses, and loses a client half-way."""

import collections
import shutil
import time

import numpy as np
import pytest
from s3_stand_in import StandIn, killed_while_it_puts
from test_checkpoint_manager import Weights, names, value
from test_train_resume import QUICKSTART, SMALL

import axonml_jax as ax
from axonml_jax.__main__ import main
from axonml_jax.checkpoint import object_store
from axonml_jax.checkpoint.object_store import ObjectStore
from axonml_jax.checkpoint.places import COMMIT
from axonml_jax.cli.records import read_records
from axonml_jax.cli.train import train as run
from axonml_jax.config.config import ConfigError, read_config

URL = "s3://bucket/run"


@pytest.fixture
def s3(monkeypatch):
    with StandIn() as server:
        for name, said in server.environ().items():
            monkeypatch.setenv(name, said)
        monkeypatch.setattr(object_store, "_FIRST", 0.01)
        yield server


def save(folder, *steps, **options):
    """One checkpoint after the other, each copied before the next."""
    with ax.CheckpointManager(folder, every=1, asynchronous=False, mirror=URL, **options) as manager:
        for step in steps:
            manager.save(step, Weights(step), metrics={"loss": abs(step - 2)})
            manager._place.mirror.close()


def go_on(folder, step=None):
    """The step that a machine with this folder goes on from, its values checked; None: from none."""
    module = Weights()
    with ax.CheckpointManager(folder, mirror=URL) as manager:
        said = manager.restore(module, step=step)
    assert said is None or value(module) == said.step
    return said and said.step


def committed(server):
    return [int(path[-15:-7]) for path in sorted(server.objects) if COMMIT.fullmatch(path.split("/")[-1])]


def test_copies_are_committed_last_and_stay_by_the_same_rules(tmp_path, s3):
    save(tmp_path / "a", *range(1, 7), keep=1, keep_every=4, best="loss")
    assert committed(s3) == [2, 4, 6]
    puts = [path for method, path in s3.log if method == "PUT" and "step_00000006" in path]
    assert puts[-1].endswith("/step_00000006.commit") and len(puts) > 5
    prefixes = {path.split("/")[3].split(".")[0] for path in s3.objects if "/step_" in path}
    assert prefixes == {"step_00000002", "step_00000004", "step_00000006"}  # nothing of the others is left
    assert go_on(tmp_path / "b") == 6 and names(tmp_path / "b") == ["step_00000006"]
    # Whoever goes on elsewhere has one checkpoint, and deletes no copy that a rule keeps.
    save(tmp_path / "b", 7, keep=1, keep_every=4, best="loss")
    assert committed(s3) == [2, 4, 7]
    assert go_on(tmp_path / "b", step=4) == 4
    assert names(tmp_path / "b") == ["step_00000004", "step_00000006", "step_00000007"]  # of those here 6 was the best
    (tmp_path / "c").mkdir()
    assert go_on(tmp_path / "c") == 7


@pytest.mark.slow
def test_the_best_is_the_best_of_all_copies_on_a_machine_without_them_too(tmp_path, s3):
    save(tmp_path / "a", 1, 2, 3, 4, keep=1, best="loss")
    assert committed(s3) == [2, 4] and names(tmp_path / "a") == ["step_00000002", "step_00000004"]
    for place in ("a", "b", "b"):
        module = Weights()
        with ax.CheckpointManager(tmp_path / place, keep=1, best="loss", mirror=URL) as manager:
            assert manager.restore(module, step="best").step == value(module) == 2
    assert names(tmp_path / "b") == ["step_00000002"]
    with ax.CheckpointManager(tmp_path / "c", mirror=URL) as manager, pytest.raises(ValueError, match="needs a metric"):
        manager.restore(Weights(), step="best")


def test_what_is_here_is_not_fetched_and_without_copies_nothing_is(tmp_path, s3):
    assert go_on(tmp_path / "none") is None
    save(tmp_path / "a", 1, 2)
    s3.log.clear()
    assert go_on(tmp_path / "a") == 2
    read = [path for method, path in s3.log if method == "GET" and path.count("/") > 2]
    assert read == ["/bucket/run/step_00000002.commit"] * 2  # whose copies these are, and at the end whether it is one


@pytest.mark.slow
def test_a_damaged_copy_is_passed_over_by_name(tmp_path, s3, caplog):
    save(tmp_path / "a", 1, 2, 3, 4)
    path = next(path for path in s3.objects if "step_00000004." in path and path.endswith("_METADATA"))
    s3.objects[path] = s3.objects[path][:-1] + b"?"
    s3.objects["/bucket/run/step_00000003.commit"] = b'{"prefix": "../../etc/"}'
    assert go_on(tmp_path / "b") == 2 and names(tmp_path / "b") == ["step_00000002"]
    assert "_METADATA: its checksum is" in caplog.text and "step_00000003.commit is damaged" in caplog.text
    assert "the checkpoint of step 2 comes from its copy in s3://bucket/run" in caplog.text


def test_without_a_good_copy_nothing_begins_anew(tmp_path, s3):
    save(tmp_path / "a", 1, 2)
    assert go_on(tmp_path / "b", step=np.int64(1)) == 1 and names(tmp_path / "b") == ["step_00000001"]
    for path in s3.objects:
        if path.endswith("_METADATA"):
            s3.objects[path] = s3.objects[path][:-1] + b"?"
    with pytest.raises(
        ax.DamagedCheckpoint, match=r"no copy in s3://bucket/run is intact, and .* has none; the last one tried: "
    ):
        go_on(tmp_path / "c")
    with pytest.raises(ax.DamagedCheckpoint, match="no copy in s3://bucket/run is intact"):
        go_on(tmp_path / "b", step=2)
    assert go_on(tmp_path / "b") == 1


def test_copies_of_another_run_are_refused_by_name(tmp_path, s3):
    save(tmp_path / "a", 1, 2)
    with ax.CheckpointManager(tmp_path / "b", every=1, asynchronous=False) as manager:
        manager.save(1, Weights(1))
    before = dict(s3.objects)
    said = rf"s3://bucket/run has copies of another run, which is in {tmp_path}/a, not of that in {tmp_path}/b"
    for step in (None, 2):  # with no id, and with one of its own
        with pytest.raises(ValueError, match=said):
            go_on(tmp_path / "b", step=step)
        (tmp_path / "b" / "run_id.txt").write_text("5")
    assert names(tmp_path / "b") == ["step_00000001"] and s3.objects == before


def test_where_all_stay_no_commit_is_read_to_choose(tmp_path, s3):
    with ax.CheckpointManager(tmp_path, every=1, keep=None, asynchronous=False, mirror=URL) as manager:
        manager.save(1, Weights(1))
        manager._place.mirror.close()
        s3.log.clear()
        manager.save(2, Weights(2))
    assert committed(s3) == [1, 2] and ("GET", "/bucket/run/step_00000001.commit") not in s3.log


def test_all_wait_for_the_last_copy_unless_one_has_failed(tmp_path, s3, monkeypatch):
    waits = []
    monkeypatch.setattr(
        "axonml_jax.checkpoint.places.decide_at_length", lambda team, what, act: waits.append(what) or act()
    )
    with pytest.raises(KeyError), ax.CheckpointManager(tmp_path, every=1, mirror=URL) as manager:
        manager.save(1, Weights(1))
        raise KeyError
    assert committed(s3) == [1] and not waits
    with ax.CheckpointManager(tmp_path, every=1, mirror=URL) as manager:
        manager.save(2, Weights(2))
    assert committed(s3) == [1, 2] and waits == ["copy to s3://bucket/run"]


def test_a_busy_store_is_tried_again_and_said_once(tmp_path, s3, caplog):
    seen = collections.Counter()

    def refuse(method, path):
        seen[method, path] += 1
        return (None, 503, 500)[seen[method, path]] if seen[method, path] < 3 else None

    s3.refuse = refuse
    save(tmp_path / "a", 1)
    assert committed(s3) == [1] and caplog.text.count("it is tried 6 times") == 1


def test_tries_have_a_limit_and_what_cannot_pass_is_not_tried_again(s3):
    store = ObjectStore(URL, tries=3)
    s3.refuse = lambda method, path: 503
    with pytest.raises(OSError, match=r"cannot write key at s3://bucket/run, tried 3 times: .*503"):
        store.put("key", b"content")
    tried = len(s3.log)
    s3.refuse = lambda method, path: 403
    with pytest.raises(OSError, match=r"cannot write key at s3://bucket/run: .*403"):
        store.put("key", b"content")
    assert tried == 6 and len(s3.log) == tried + 1  # TensorStore tries each once more
    for wrong in ("s3://bucket", "/folder", "http://host/path", "file://host/path", "s3:///path", "s3://bucket/p?q"):
        with pytest.raises(ValueError, match=r"must be s3://bucket/path, gs://bucket/path or file:///folder"):
            ObjectStore(wrong)


def test_a_store_that_refuses_spoils_no_checkpoint_and_the_end_says_so(tmp_path, s3, caplog):
    s3.refuse = lambda method, path: 403 if method == "PUT" and path.endswith("step_00000002.commit") else None
    with ax.CheckpointManager(tmp_path, every=1, mirror=URL) as manager:
        for step in (1, 2):
            manager.save(step, Weights(step))
            manager.wait()
            while manager._place.mirror.copying:
                time.sleep(0.01)
        assert manager.steps == [1, 2] and "stays where it is, and the next one is copied" in caplog.text
        manager.save(3, Weights(3))
    assert committed(s3) == [1, 3] and not any("step_00000002" in path for path in s3.objects)
    with (
        pytest.raises(OSError, match=r"the newest checkpoint is not copied to s3://bucket/run: .*403"),
        ax.CheckpointManager(tmp_path, every=1, mirror=URL) as manager,
    ):
        s3.refuse = lambda method, path: 403 if method == "PUT" else None
        manager.save(4, Weights(4))


def test_the_last_run_to_claim_a_url_owns_it(tmp_path, s3, caplog):
    with ax.CheckpointManager(tmp_path / "a", every=1, mirror=URL) as first:
        first.save(1, Weights(1))
        first.wait()
        first._place.mirror.close()
        save(tmp_path / "b", 5, keep=1)
        first.save(2, Weights(2))
    assert committed(s3) == [5] and "belongs to another run by now" in caplog.text
    assert not any("step_00000002" in path for path in s3.objects)
    assert go_on(tmp_path / "c") == 5


def test_a_copy_is_withdrawn_when_another_run_claims_the_url_as_it_is_committed(tmp_path, s3, caplog):
    save(tmp_path, 1)
    before = dict(s3.objects)

    def claimed(method, path):
        if method == "PUT" and path.endswith(".commit"):
            s3.objects["/bucket/run/mirror.json"] = b'{"token": "another"}'

    s3.refuse = claimed
    with ax.CheckpointManager(tmp_path, every=1, mirror=URL) as manager:
        manager.save(1, Weights(5))
        manager.wait()
        manager._place.mirror.close()
        manager.save(2, Weights(2))
    assert s3.objects == before | {"/bucket/run/mirror.json": b'{"token": "another"}'}
    assert caplog.text.count("belongs to another run by now") == 1


def test_what_is_no_copy_is_left_alone(tmp_path, s3):
    others = {
        f"/bucket/run/{key}": b"mine"
        for key in ("step_00000009/array/d", "step_1.txt", "owner.json", "step_00000009.a/b")
    }
    s3.objects.update(others)
    save(tmp_path, 1, 2, keep=1)
    assert committed(s3) == [2] and others.items() <= s3.objects.items()


def test_copies_and_checkpoints_lie_apart(tmp_path):
    for wrong in (tmp_path / "run" / "checkpoints", tmp_path, tmp_path / "run" / "checkpoints" / "copies"):
        with pytest.raises(ValueError, match="lie one within the other: copies need a place of their own"):
            ax.CheckpointManager(tmp_path / "run" / "checkpoints", mirror=f"file://{wrong}")
    for odd, said in (
        ("back\\slash", "a backslash"),
        ("a/../b", r"one of \.\. \."),
        ("a?b", "without . and #"),
        ("\udcff", "no UTF-8"),
    ):
        with pytest.raises(ValueError, match=said):  # copies went into back/slash, or nowhere
            ax.CheckpointManager(tmp_path / "run", mirror=f"file://{tmp_path}/{odd}")
    flags = ["--name=mine", f"--output.dir={tmp_path}", f"--checkpoint.mirror=file://{tmp_path}/mine/checkpoints"]
    with pytest.raises(ConfigError, match="lie one within the other"):
        run(read_config("train", [QUICKSTART, *SMALL, *flags]))
    assert not any(tmp_path.iterdir())


KILLED = """
import sys
from test_mirror import save
save(sys.argv[1], 1, 2)
"""


@pytest.mark.slow
def test_a_process_killed_while_it_copies_leaves_the_copy_before(tmp_path, s3):
    """The server holds the commit of step 2 back until its client is dead; what that has left goes with the next claim."""
    killed_while_it_puts(s3, "step_00000002.commit", KILLED, str(tmp_path / "a"))
    assert committed(s3) == [1] and any("step_00000002." in path for path in s3.objects)
    assert go_on(tmp_path / "b") == 1
    save(tmp_path / "b", 2)
    assert committed(s3) == [1, 2] and go_on(tmp_path / "c") == 2
    assert len({path.split("/")[3] for path in s3.objects if "step_00000002." in path}) == 2  # one prefix, one commit


@pytest.mark.slow
def test_a_run_whose_folder_is_gone_goes_on_from_the_copies(tmp_path, s3, capsys):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the cat sat on the mat. " * 60)
    given = [f"--data.path={tmp_path / 'text'}", "--checkpoint.mirror=s3://bucket/mine", "--name=mine"]

    def train(out, *flags):
        return main(["train", QUICKSTART, *SMALL, *given, f"--output.dir={tmp_path / out}", *flags])

    assert train("one", "--train.steps=6") == 0
    assert committed(s3) == [3, 6]
    shutil.rmtree(tmp_path / "one")
    capsys.readouterr()
    with pytest.raises(ConfigError, match="go on with that run by resume=auto"):
        run(read_config("train", [QUICKSTART, *SMALL, *given, f"--output.dir={tmp_path / 'two'}"]))
    with pytest.raises(
        ConfigError, match=r"copies of the run in .*one/mine, whose name is not other: give another URL"
    ):
        flags = [*given, "--name=other", "--resume=auto", f"--output.dir={tmp_path / 'two'}"]
        run(read_config("train", [QUICKSTART, *SMALL, *flags]))
    assert train("two", "--resume=auto") == 0
    assert "resumed after step 6" in capsys.readouterr().out
    assert committed(s3) == [3, 6, 9]
    assert [record.step for record in read_records(tmp_path / "two" / "mine" / "metrics.jsonl")] == [8, 9]


@pytest.mark.slow
def test_a_run_that_goes_back_leaves_copies_behind_too(tmp_path, s3, monkeypatch):
    save(tmp_path, 10, 20, 30, 40)
    save(tmp_path, 25)
    assert committed(s3) == [20, 25] and go_on(tmp_path) == 25 and go_on(tmp_path / "elsewhere") == 25
    monkeypatch.setattr("axonml_jax.checkpoint.places.Copies.abandon_from", lambda self, step: None)
    save(tmp_path, 40)
    save(tmp_path, 28)  # a process that is killed before it has told the store
    assert committed(s3) == [25, 28, 40] and go_on(tmp_path) == 28
