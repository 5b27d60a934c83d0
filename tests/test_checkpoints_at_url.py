"""Checkpoints whose place is a URL: written there, kept by the rules, restored from there; a server stands in for S3."""

import collections
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from test_checkpoint_manager import Weights, names, value
from test_mirror import URL, committed, s3  # noqa: F401

import axonml_jax as ax


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "axonml_jax"


def save(*steps, url=URL, **options):
    with ax.CheckpointManager(url, every=1, **{"asynchronous": False} | options) as manager:
        for step in steps:
            manager.save(step, Weights(step), metrics={"loss": abs(step - 2)})
        return manager.steps


def go_on(step=None, url=URL, **options):
    """The step that is restored, its values checked; None: none."""
    module = Weights()
    with ax.CheckpointManager(url, **options) as manager:
        said = manager.restore(module, step=step)
    assert said is None or value(module) == said.step
    return said and said.step


def left(cache):
    """What is left of checkpoints beside the run."""
    return [name for folder in cache.glob("*") for name in names(folder)]


def test_a_checkpoint_at_a_url_is_committed_last_kept_by_the_rules_and_restored(s3, cache):  # noqa: F811
    assert go_on() is None
    assert save(*range(1, 7), keep=1, keep_every=4, best="loss") == [2, 4, 6] == committed(s3)
    puts = [path for method, path in s3.log if method == "PUT" and "step_00000006" in path]
    assert puts[-1].endswith("/step_00000006.commit") and len(puts) > 5
    prefixes = {path.split("/")[3].split(".")[0] for path in s3.objects if "/step_" in path}
    assert prefixes == {"step_00000002", "step_00000004", "step_00000006"}  # nothing of the others is left
    before = dict(s3.objects)
    assert (go_on(), go_on(4), go_on("best", best="loss")) == (6, 4, 2) and s3.objects == before
    assert left(cache) == []
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/run has no checkpoint of step 3; it has \[2, 4, 6\]"):
        go_on(3)
    assert save(7, keep=2) == [6, 7]


def test_copies_of_a_folder_and_checkpoints_at_a_url_are_the_same(tmp_path, s3):  # noqa: F811
    with ax.CheckpointManager(tmp_path / "here", every=1, asynchronous=False, mirror=URL) as manager:
        manager.save(1, Weights(1))
    assert go_on() == 1 and save(2) == [1, 2]
    assert value(ax.restore(f"{URL}/step_00000002", Weights())) == 2


def test_a_file_url_is_a_folder_in_which_the_same_lies(tmp_path, cache):
    url = f"file://{tmp_path}/there"
    assert save(1, 2, url=url) == [1, 2] and go_on(url=url) == 2
    assert {"step_00000001.commit", "step_00000002.commit"} <= {path.name for path in (tmp_path / "there").iterdir()}


@pytest.mark.slow
def test_training_goes_on_from_a_url_bit_for_bit(s3):  # noqa: F811
    import jax.numpy as jnp
    import optax
    from meshes import mesh_of

    rows = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    loss = lambda model, batch: jnp.mean((model(batch) - batch.sum(1, keepdims=True)) ** 2)

    def train(steps, **degrees):
        mesh = mesh_of(**degrees)
        loader = ax.create_dataloader(rows, 8, mesh, seed=3)
        trainer = ax.FSDP(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), mesh).trainer(optax.adam(0.1), loss)
        with ax.CheckpointManager(URL, every=2) as checkpoints:
            restored = checkpoints.restore(trainer, data=loader)
            start = restored.step if restored else 0
            for step, batch in zip(range(start + 1, steps + 1), loader, strict=False):
                trainer.step(batch)
                checkpoints.save(step, trainer, data=loader)
        return start, np.asarray(trainer.model.module.kernel[...])

    assert train(4, fsdp=2)[0] == 0
    start, on = train(8, fsdp=2)
    s3.objects.clear()
    assert start == 4
    np.testing.assert_array_equal(on, train(8, fsdp=2)[1])


@pytest.mark.slow
def test_a_store_that_is_busy_is_tried_again_and_one_that_stays_away_is_an_error(s3, cache):  # noqa: F811
    seen = collections.Counter()

    def busy(method, path):
        seen[method, path] += 1
        return (None, 503, 500)[seen[method, path]] if seen[method, path] < 3 else None

    s3.refuse = busy
    assert save(1) == [1]
    s3.refuse = lambda method, path: 503 if method == "PUT" else None
    with pytest.raises(
        OSError, match=r"(?s)saving .* failed: .*cannot write .* at s3://bucket/run, tried 6 times: .*503"
    ):
        save(2)
    s3.refuse = lambda method, path: None
    assert committed(s3) == [1] and left(cache) == ["step_00000002"]
    assert go_on() == 2  # it waits in the folder, and is whole
    assert committed(s3) == [1, 2] and left(cache) == []  # whoever restores sends it, as nobody else will


@pytest.mark.slow
def test_failures_of_a_store_that_may_pass_are_counted_and_what_waits_goes_with_the_next(s3, caplog):  # noqa: F811
    with ax.CheckpointManager(URL, every=1, max_failures=3) as manager:
        manager.save(1, Weights(1))
        manager.wait()
        s3.refuse = lambda method, path: 503 if method == "PUT" else None
        manager.save(2, Weights(2))
        manager.settle()
        assert manager.failed_saves == 1
        assert "the last good checkpoint is that of step 1" in caplog.text and "the object store is busy" in caplog.text
        s3.refuse = lambda method, path: None
        manager.save(3, Weights(3))
        manager.wait()
        assert manager.steps == [1, 2, 3]


def test_what_a_store_refuses_ends_the_run_at_once(s3):  # noqa: F811
    s3.refuse = lambda method, path: 403 if method == "PUT" else None
    with (
        pytest.raises(OSError, match=r"cannot write mirror.json at s3://bucket/run: .*403"),
        ax.CheckpointManager(URL, every=1, max_failures=5) as manager,
    ):
        manager.save(1, Weights(1))
        manager.settle()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_by_name(s3, caplog):  # noqa: F811
    save(1, 2, 3)
    path = next(path for path in s3.objects if "step_00000003." in path and path.endswith("_METADATA"))
    s3.objects[path] = s3.objects[path][:-1] + b"?"
    assert go_on() == 2 and "_METADATA: its checksum is" in caplog.text
    with pytest.raises(ax.DamagedCheckpoint, match=r"s3://bucket/run/step_00000003\..* is damaged"):
        go_on(3)
    for path in s3.objects:
        if path.endswith("_METADATA"):
            s3.objects[path] = s3.objects[path][:-1] + b"?"
    with pytest.raises(ax.DamagedCheckpoint, match="no checkpoint at s3://bucket/run is intact; the last one tried: "):
        go_on()


def test_verified_files_are_read_back_before_the_commit(s3):  # noqa: F811
    save(1, verify=True)
    read = {path for method, path in s3.log if method == "GET" and "step_00000001." in path}
    assert {path for path in s3.objects if "step_00000001." in path and not path.endswith(".commit")} <= read
    spoil(s3)
    with pytest.raises(OSError, match=r"was written, and the store gives .* other bytes back: try another store"):
        save(2, verify=True)
    assert committed(s3) == [1]


def spoil(server):
    """From now on the server changes the last byte of every array's description."""

    class Spoiling(dict):
        def __setitem__(self, path, content):
            super().__setitem__(path, content[:-1] + b"?" if path.endswith("_METADATA") else content)

    server.objects = Spoiling(server.objects)


def test_the_last_run_to_claim_a_url_owns_it_and_the_other_ends(s3, tmp_path):  # noqa: F811
    with (
        pytest.raises(OSError, match=r"s3://bucket/run belongs to another run by now"),
        ax.CheckpointManager(URL, every=1, max_failures=5, asynchronous=False) as first,
    ):
        first.save(1, Weights(1))
        save(5, keep=1, staging=tmp_path / "another machine")
        first.save(2, Weights(2))
    assert committed(s3) == [5]


def test_two_jobs_of_one_machine_do_not_write_to_one_url_and_readers_may_read(s3):  # noqa: F811
    with ax.CheckpointManager(URL, every=1, asynchronous=False) as first:
        first.save(1, Weights(1))
        with pytest.raises(ax.FolderInUse):
            save(2)
        assert go_on() == 1
        first.save(2, Weights(2))
    assert committed(s3) == [1, 2]


@pytest.mark.slow
def test_one_checkpoint_is_saved_to_and_restored_from_a_url(s3, cache):  # noqa: F811
    assert ax.save(f"{URL}/final", Weights(7), verify=True) == f"{URL}/final"
    assert value(ax.restore(f"{URL}/final", Weights())) == 7 and left(cache) == []
    with pytest.raises(FileExistsError, match="s3://bucket/run/final exists already"):
        ax.save(f"{URL}/final", Weights(8))
    ax.save(f"{URL}/final", Weights(8), replace=True)
    assert value(ax.restore(f"{URL}/final", Weights())) == 8
    assert len({path.split("/")[3] for path in s3.objects}) == 2  # one prefix, one commit
    with pytest.raises(FileNotFoundError, match="s3://bucket/run/last is no checkpoint: s3://bucket/run has no object"):
        ax.restore(f"{URL}/last", Weights())
    save(3)
    with pytest.raises(FileNotFoundError, match="the newest that is in it is s3://bucket/run/step_00000003: give that"):
        ax.restore(URL, Weights())
    ax.save("s3://bucket/mine", Weights(2))
    assert value(ax.restore("s3://bucket/mine", Weights())) == 2 and go_on() == 3


def test_a_url_that_was_made_a_path_is_no_folder_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for act in (lambda path: ax.save(path, {"w": np.ones(2)}), lambda path: ax.restore(path, {}), ax.CheckpointManager):
        with pytest.raises(ValueError, match=r"PosixPath\('s3:/bucket/run'\) has lost a slash"):
            act(Path("s3://bucket/run"))
    assert not list(tmp_path.iterdir())


def test_what_a_url_does_not_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match="leave mirror out"):
        ax.CheckpointManager(URL, mirror="s3://other/run")
    with pytest.raises(ValueError, match="is for checkpoints at a URL"):
        ax.CheckpointManager(tmp_path / "run", staging=tmp_path / "other")
    with pytest.raises(ValueError, match=r"must be s3://bucket/path, gs://bucket/path or file:///folder"):
        ax.CheckpointManager("http://host/run")
    with pytest.raises(ValueError, match="lie one within the other"):
        ax.CheckpointManager(f"file://{tmp_path}/run", staging=tmp_path / "run" / "staging")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_at_a_url_that_goes_back_keeps_what_it_saves_then(s3, caplog):  # noqa: F811
    for again in (False, True):  # the second time over what was put aside before
        save(*(10, 20, 30, 40)[again:])
        assert save(25, 28, 30) == [25, 28, 30] and go_on() == 30
        assert value(ax.restore(f"{URL}/step_00000040.abandoned", Weights())) == 40
        assert "the earlier checkpoints of this or later steps, [30, 40], no longer count" in caplog.text
    assert len({path.split("/")[3] for path in s3.objects if ".commit" not in path and "/step_" in path}) == 3 + 4


@pytest.mark.slow
def test_a_save_that_is_tried_again_at_its_step_puts_nothing_aside(s3, cache, caplog):  # noqa: F811
    with ax.CheckpointManager(URL, every=1, max_failures=3) as manager:
        manager.save(1, Weights(1))
        manager.wait()
        s3.refuse = lambda method, path: 503 if method == "PUT" else None
        manager.save(2, Weights(7))
        manager.settle()
        s3.refuse = lambda method, path: None
        assert manager.save(2, Weights(2))
        manager.wait()
        assert manager.steps == [1, 2] and left(cache) == []
    assert "went back" not in caplog.text and go_on() == 2
