"""The checkpoints of a run on disk: which are kept, what a crash or a damaged file leaves, who waits for whom."""

import json
import os
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import axonml_jax as ax
from axonml_jax.checkpoint import format as arrays
from axonml_jax.checkpoint import saving
from axonml_jax.checkpoint.format import describe, rebuilt
from axonml_jax.checkpoint.ownership import FolderInUse


class Weights(nnx.Module):
    """A few numbers, cheap to save."""

    def __init__(self, value=0.0):
        self.w = nnx.Param(jnp.full((64, 64), value, jnp.float32))


def value(module):
    return float(module.w[0, 0])


def test_what_failed_first_is_said_and_the_folder_let_go_where_closing_fails_too(tmp_path, monkeypatch):
    """Orbax's checkpointer says at its end what its last save died of, in its own words."""

    def failing(said):
        raise OSError(said)

    manager = ax.CheckpointManager(tmp_path, every=1)
    manager.claim()
    monkeypatch.setattr(manager, "wait", lambda: failing("saving step 1 failed"))
    monkeypatch.setattr(manager._saver, "close", lambda: failing("no _CHECKPOINT_METADATA"))
    with pytest.raises(OSError, match="saving step 1 failed"):
        manager.close()
    assert not (tmp_path / "owner.json").exists()


def names(folder):
    """What is in a folder but who owns it (test_checkpoint_owner.py) and whose copies are its own (test_mirror.py)."""
    return sorted(path.name for path in folder.iterdir() if path.name not in ("owner.json", "run_id.txt"))


def damage(folder, name, change):
    path = next(path for path in folder.rglob(name) if path.is_file() and path.stat().st_size > 20)
    content = bytearray(path.read_bytes())
    path.write_bytes(change(content))
    return path.relative_to(folder).as_posix()


def flip(content):
    content[len(content) // 2] ^= 1
    return content


@pytest.fixture
def three(tmp_path):
    """A manager with checkpoints of steps 2, 4 and 6."""
    with ax.CheckpointManager(tmp_path / "run", every=2) as manager:
        for step in range(1, 7):
            assert manager.save(step, Weights(step), metrics={"loss": 1 / step}) is (step % 2 == 0)
        manager.wait()
        yield manager


def test_the_newest_and_the_best_are_kept_and_restored(tmp_path):
    losses = [5.0, 1.0, 4.0, float("nan"), 3.0, 2.0]
    with ax.CheckpointManager(tmp_path, every=1, keep=2, best="loss") as manager:
        for step, loss in enumerate(losses, 1):
            manager.save(step, Weights(step), metrics={"loss": loss}, about={"who": "me"})
        assert not manager.save(6, Weights(9), force=True)  # it is there already
        manager.wait()
        assert manager.steps == [2, 5, 6] and manager.best_step == 2
        module = Weights()
        said = manager.restore(module, step="best")
        assert (value(module), said.step, said.metrics, said.about["who"]) == (2, 2, {"loss": 1.0}, "me")
        assert manager.restore(module).step == 6 and value(module) == 6
        with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 3; it has \[2, 5, 6\]"):
            manager.restore(module, step=3)
    assert names(tmp_path) == ["step_00000002", "step_00000005", "step_00000006"]
    about = json.loads((tmp_path / "step_00000006" / "checkpoint.json").read_text())["about"]
    assert about["versions"]["jax"] == jax.__version__
    highest = ax.CheckpointManager(tmp_path, best="loss", mode="max")
    assert highest.best_step == 5
    highest.close()


def test_an_empty_folder_restores_nothing_and_numbers_are_checked(tmp_path):
    with ax.CheckpointManager(tmp_path / "new") as manager:
        assert manager.restore(Weights(1)) is None and manager.steps == []
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        ax.CheckpointManager(tmp_path, keep=0)
    with pytest.raises(ValueError, match="mode='low' must be"):
        ax.CheckpointManager(tmp_path, mode="low")
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        ax.restore(tmp_path / "nothing", Weights())


def test_without_every_each_call_saves_and_with_it_those_that_are_due(tmp_path):
    """`CheckpointManager(folder).save(7, ...)` saved nothing."""
    with ax.CheckpointManager(tmp_path / "all") as manager:
        assert manager.due(7) and manager.save(7, Weights(7)) and manager.save(9, Weights(9))
        assert not manager.save(9, Weights(8)) and not manager.due(9)
    with ax.CheckpointManager(tmp_path / "all") as manager:
        manager.restore(module := Weights())
        assert manager.steps == [7, 9] and value(module) == 9 and not manager.save(9, module)
    with ax.CheckpointManager(tmp_path / "thinned", every=5) as manager:
        assert [manager.save(step, Weights()) for step in (4, 5, 6)] == [False, True, False]


DAMAGE = {
    "a flipped bit": ("d/*", flip),
    "a truncated file": ("manifest.ocdbt", lambda content: content[:-7]),
    "an emptied file": ("_METADATA", lambda content: b""),
    "a flipped bit in the list itself": ("checkpoint.json", flip),
}


@pytest.mark.parametrize(
    "kind", [ax.DamagedCheckpoint, FolderInUse, FileExistsError, FileNotFoundError, ValueError, OSError]
)
def test_an_error_of_the_main_process_is_of_its_kind_in_the_others(kind):
    """A damaged list of files was any ValueError there: the others ended where the main process fell back."""
    heard = rebuilt(describe(kind("why")))
    assert type(heard) is kind and str(heard) == "why"
    assert type(rebuilt(describe(PermissionError("why")))) is OSError


def test_a_reader_whose_checkpoint_is_removed_while_it_reads_takes_the_next(three, monkeypatch, caplog):
    """Its writer keeps a few and deletes the others; that one was called damaged, and the reader ended."""
    read, newest = arrays.read, Weights()

    def late(saver, path, *rest):
        if "00000006" in str(path):
            shutil.rmtree(path.parent)
        return read(saver, path, *rest)

    monkeypatch.setattr(arrays, "read", late)
    with ax.CheckpointManager(three.folder) as reader:
        assert reader.restore(newest).step == 4 and value(newest) == 4
    assert "step_00000006 was removed while it was read" in caplog.text
    assert "falling back to the last good checkpoint" in caplog.text


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_passed_over(three, kind, caplog):
    name, change = DAMAGE[kind]
    newest = three.folder / "step_00000006"
    file = damage(newest, name, change)
    with pytest.raises(ax.DamagedCheckpoint, match="is damaged") as caught:
        ax.restore(newest, Weights())
    assert file in str(caught.value)
    module = Weights()
    with pytest.raises(ax.DamagedCheckpoint):
        three.restore(module, step=6)
    with caplog.at_level("WARNING", "axonml_jax"):
        assert three.restore(module).step == 4 and value(module) == 4
    assert file in caplog.text and "falling back to the last good checkpoint" in caplog.text
    assert names(three.folder) == ["step_00000002", "step_00000004", "step_00000006.damaged"]
    assert three.save(6, Weights(66)) and three.restore(module).step == 6 and value(module) == 66


def test_a_missing_file_is_damage_and_without_a_good_one_nothing_is_restored(three):
    for name in names(three.folder):
        shutil.rmtree(three.folder / name / "arrays" / "d")
    with pytest.raises(ax.DamagedCheckpoint, match=r"no checkpoint in .* is intact; .*\n.*: No such file"):
        three.restore(Weights())


def test_what_killed_processes_left_is_removed_and_a_cut_off_replacement_undone(three):
    three.close()
    whole = three.folder / "step_00000004"
    shutil.copytree(whole, three.folder / "step_00000008.saving")
    whole.rename(three.folder / "step_00000004.replaced")
    shutil.copytree(three.folder / "step_00000006", three.folder / "step_00000006.replaced")
    left = names(three.folder)
    with ax.CheckpointManager(three.folder) as manager:
        module = Weights()
        assert manager.steps == [2, 4, 6] and manager.restore(module, step=4) and value(module) == 4
        assert names(three.folder) == left  # whoever reads changes nothing
        manager.claim()
        assert manager.steps == [2, 4, 6]
    assert names(three.folder) == ["step_00000002", "step_00000004", "step_00000006"]


def test_a_save_is_asynchronous_atomic_and_keeps_what_was_given(tmp_path, monkeypatch):
    gate, real = threading.Event(), saving.checksums
    monkeypatch.setattr(saving, "checksums", lambda folder: gate.wait(60) and real(folder))
    with ax.CheckpointManager(tmp_path, every=1) as manager:
        module = Weights(1)
        manager.save(1, module)
        module.w[...] = jnp.full((64, 64), 5.0)
        manager.check()
        assert names(tmp_path) == ["step_00000001.saving"]
        gate.set()
        manager.wait()
        assert names(tmp_path) == ["step_00000001"]
        assert manager.restore(module).step == 1 and value(module) == 1


def test_a_save_that_fails_leaves_nothing_and_is_told_at_the_next_call(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device")

    with ax.CheckpointManager(tmp_path, every=1) as manager:
        manager.save(1, Weights(1))
        manager.wait()
        monkeypatch.setattr(saving, "checksums", full)
        manager.save(2, Weights(2))
        with pytest.raises(OSError, match=r"saving .*step_00000002 failed: .*No space left on device"):
            manager.wait()
        monkeypatch.undo()
        assert names(tmp_path) == ["step_00000001"]
        with pytest.raises(FileExistsError, match="exists already"):
            ax.save(tmp_path / "step_00000001", Weights())
        ax.save(tmp_path / "step_00000001", Weights(7), replace=True)
        module = Weights()
        assert manager.restore(module).step is None and value(module) == 7


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_an_error_with_its_name(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(OSError, match="locked"):
        ax.save(tmp_path / "locked" / "it", Weights())


class Loader:
    """A data loader as checkpoints see one."""

    def __init__(self, position):
        self.position = position

    def state_dict(self):
        """Its position."""
        return {"samples": self.position}

    def load_state_dict(self, state):
        """Go there."""
        self.position = state["samples"]


def test_the_data_position_is_kept(tmp_path):
    path = ax.save(tmp_path / "it", Weights(1), data=Loader(12))
    loader = Loader(0)
    ax.restore(path, Weights(), data=loader)
    assert loader.position == 12
    bare = ax.save(tmp_path / "bare", Weights(1))
    with pytest.raises(ValueError, match="holds no data position"):
        ax.restore(bare, Weights(), data=loader)


def test_orbax_itself_reads_the_arrays(tmp_path):
    import orbax.checkpoint as ocp

    path = ax.save(tmp_path / "it", Weights(3))
    with ocp.PyTreeCheckpointer() as plain:
        args = ocp.args.PyTreeRestore(restore_args={"model/w": ocp.RestoreArgs(restore_type=np.ndarray)})
        found = plain.restore(Path(path) / "arrays", args=args)
    np.testing.assert_array_equal(found["model/w"], np.full((64, 64), 3))


def test_a_newer_format_is_refused_and_not_taken_for_damage(tmp_path, monkeypatch):
    from axonml_jax.checkpoint import format as manifest

    monkeypatch.setattr(manifest, "FORMAT", 2)
    path = ax.save(tmp_path / "it", Weights(3))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has format 2, this version reads 1"):
        ax.restore(path, Weights())


def test_a_step_whose_save_has_failed_may_be_tried_again(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device")

    with ax.CheckpointManager(tmp_path, every=1) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(saving, "checksums", full)
            manager.save(3, Weights(3))
            with pytest.raises(OSError, match=r"step_00000003 failed"):
                manager.save(4, Weights(4))
        assert manager.save(3, Weights(3)) and manager.restore(Weights()).step == 3


def test_a_folder_of_checkpoints_is_told_from_a_checkpoint(three):
    run = three.folder.parent
    for folder in (three.folder, run):
        with pytest.raises(
            FileNotFoundError, match=r"has no checkpoint.json; the newest .* is \S*/run/step_00000006: give"
        ):
            ax.restore(folder, Weights())


def test_a_mismatch_of_many_leaves_is_ten_lines_and_a_count(tmp_path):
    path = ax.save(tmp_path / "it", {f"old{n}": jnp.zeros(1) for n in range(30)} | {"w": jnp.zeros(2)})
    with pytest.raises(ValueError, match="does not fit") as caught:
        ax.restore(path, {f"new{n}": jnp.zeros(1) for n in range(20)} | {"w": jnp.zeros(3)})
    lines = str(caught.value).splitlines()
    assert len(lines) == 13 and lines[11] == "  ... and 41 more; in all 20 missing, 30 unexpected, 1 mismatched"


ODD = ["a[1]", "back\\slash", "tail\\", "x*y", "q?r", "no utf-8 \udcff"]


@pytest.mark.parametrize("odd", ODD)
def test_whatever_stands_in_a_path_what_is_saved_there_is_restored(tmp_path, odd):
    """Orbax globs its own folder, and merges nothing, or another's; TensorStore took a backslash for a slash."""
    (tmp_path / "xzy" / "run" / "step_00000001.saving" / "arrays.orbax-checkpoint-tmp" / "ocdbt.process_7").mkdir(
        parents=True
    )
    folder, before = tmp_path / odd / "run", {path.name for path in tmp_path.iterdir()}
    with ax.CheckpointManager(folder, every=1, keep=1) as manager:
        for step in (1, 2):
            manager.save(step, Weights(step))
    alone = ax.save(tmp_path / odd / odd, {"a": np.arange(3)})
    with ax.CheckpointManager(folder) as manager:
        assert manager.restore(module := Weights()).step == 2 and value(module) == 2 and manager.steps == [2]
    np.testing.assert_array_equal(ax.restore(alone, {"a": np.zeros(3, int)})["a"], np.arange(3))
    assert {path.name for path in tmp_path.iterdir()} == {*before, odd} and names(folder) == ["step_00000002"]


def test_names_that_orbax_takes_for_something_else_are_seen():
    odd = ["/runs/[a", "/s3/run", "/gs", "//runs", "/runs/../a", "/a\\b/c"]
    assert not [path for path in odd if arrays.is_plain(Path(path))]
    assert all(arrays.is_plain(Path(path)) for path in ("/", "/runs/s3", "/runs/a b%20{#}ü..\n", "/.runs/~$x"))


def test_arrays_that_were_not_merged_are_no_checkpoint_and_none_is_deleted_for_them(tmp_path, monkeypatch):
    with ax.CheckpointManager(tmp_path / "[run]", every=1, keep=1, asynchronous=False) as manager:
        manager.save(1, Weights(1))
        monkeypatch.setattr(arrays, "is_plain", lambda folder: True)
        with pytest.raises(OSError, match=r"\[run\]/step_00000002 failed: what was written there lacks model/w"):
            manager.save(2, Weights(2))
        monkeypatch.undo()
        assert names(tmp_path / "[run]") == ["step_00000001"] and manager.restore(Weights()).step == 1


def test_where_no_link_can_be_made_nothing_is_written_and_nothing_called_damaged(tmp_path, monkeypatch):
    path = ax.save(tmp_path / "[a]" / "run" / "step_00000001", Weights(1))
    with ax.CheckpointManager(path.parent, every=1) as manager, monkeypatch.context() as patch:
        patch.setattr(arrays, "_rooms", list)
        with pytest.raises(OSError, match="no folder for temporary files takes one"):
            manager.restore(Weights())
        for act in (lambda: ax.CheckpointManager(tmp_path / "[b]"), lambda: ax.save(tmp_path / "[b]", Weights())):
            with pytest.raises(ValueError, match=r"\[b\] has one of .* or set TMPDIR"):
                act()
        with pytest.raises(ValueError, match="no folder for temporary files"):
            ax.CheckpointManager(f"file://{tmp_path}/c", staging=tmp_path / "[b]")
    assert names(tmp_path) == ["[a]"] and names(path.parent) == ["step_00000001"]


@pytest.mark.parametrize("kind", ["link", "file", "folder"])
def test_what_somebody_has_put_where_a_checkpoint_is_made_is_named_and_what_it_leads_to_stays(tmp_path, kind):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "data").write_text("mine")
    place = tmp_path / "run.saving"
    if kind == "folder":
        shutil.copytree(tmp_path / "theirs", place)
    else:
        place.symlink_to(tmp_path / "theirs") if kind == "link" else place.write_text("mine")
    with pytest.raises(OSError, match=rf"run\.saving, where it is made, is a {kind} of someone else: remove it, or"):
        ax.save(tmp_path / "run", Weights())
    assert os.path.lexists(place)
    (tmp_path / "step_00000001").symlink_to(tmp_path / "theirs")
    (tmp_path / "step_00000002").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="step_00000002 exists already"):
        ax.save(tmp_path / "step_00000002", Weights())
    with ax.CheckpointManager(tmp_path, every=1, keep=1, asynchronous=False) as manager:
        manager.save(2, Weights(2))
    assert names(tmp_path) == ["run.saving", "step_00000002", "theirs"]
    assert (tmp_path / "theirs" / "data").read_text() == "mine"


def test_a_run_that_goes_back_keeps_what_it_saves_then_and_puts_what_it_left_aside(tmp_path, caplog):
    """The new branch was deleted, as its steps were lower, and the next restore gave the one that was left."""
    with ax.CheckpointManager(tmp_path, keep=3, best="loss") as manager:
        for step in (10, 20, 30, 40):
            manager.save(step, Weights(step), metrics={"loss": step})
    for _ in range(2):  # the second time over what was put aside before
        with ax.CheckpointManager(tmp_path, keep=3) as manager:
            manager.restore(module := Weights(), step=20)
            for step in (25, 28, 30):
                manager.save(step, Weights(-step))
        with ax.CheckpointManager(tmp_path) as manager:
            assert manager.steps == [25, 28, 30] and manager.restore(module).step == 30 and value(module) == -30
            manager.claim()
        assert value(ax.restore(tmp_path / "step_00000040.abandoned", Weights())) == 40
        shutil.copytree(tmp_path / "step_00000028", tmp_path / "step_00000020")
    aside = [name for name in names(tmp_path) if "." in name]
    assert aside == [f"step_000000{step}.abandoned" for step in (25, 28, 30, 40)]
    assert "the earlier checkpoints of this or later steps, [30, 40], no longer count" in caplog.text


def test_a_state_alone_and_a_whole_trainer_are_told_apart(tmp_path):
    """A manager that was asked to restore a `TrainState` made one, dropped it, and the run began anew."""
    trainer = ax.DDP(Weights(1), ax.make_mesh(data=8)).trainer(
        optax.sgd(0.1), lambda m, b: jnp.mean(m.w[...] * b[:, None])
    )
    with ax.CheckpointManager(tmp_path, every=1, asynchronous=False) as manager:
        manager.save(1, trainer.state)
        manager.save(2, trainer)
        with pytest.raises(
            TypeError, match=rf"not into a TrainState: use ax\.restore\(path, like\) with a path in {tmp_path}"
        ):
            manager.restore(trainer.state)
        with pytest.raises(
            ValueError,
            match=r"only a trainer's state: read it by state = ax\.restore\('.*step_00000001', trainer\.state\)",
        ):
            manager.restore(trainer, step=1)
    with pytest.raises(
        ValueError,
        match=r"does not hold a trainer's state: ax\.restore\('.*step_00000002', x\) needs the kind of object",
    ):
        ax.restore(tmp_path / "step_00000002", trainer.state)
    state = ax.restore(tmp_path / "step_00000001", trainer.state)
    assert float(state.params["w"][0, 0]) == 1


def test_what_is_beside_a_checkpoint_and_what_orbax_wrote_is_told(tmp_path):
    ax.save(tmp_path / "run", Weights(1))
    shutil.copytree(tmp_path / "run" / "arrays", tmp_path / "orbax")
    for path, said in (("run/arrays", r"; the checkpoint is .*run: give that"), ("orbax", "; Orbax wrote it: orbax")):
        with pytest.raises(FileNotFoundError, match=said):
            ax.restore(tmp_path / path, Weights())


def saved_by_a_manager(folder):
    with ax.CheckpointManager(folder, asynchronous=False) as manager:
        manager.save(1, Weights(1))


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("name", ["results", "results.replaced", "step_00000001"])
def test_what_is_no_checkpoint_is_not_replaced(tmp_path, name, kind):
    """`ax.save("results", ..., replace=True)` deleted the user's folder, or file, of this name."""
    path = tmp_path / name
    data = path if kind == "file" else path / "data"
    data.parent.mkdir(exist_ok=True)
    data.write_text("mine")
    by_itself = lambda: ax.save(tmp_path / "results", Weights(1), replace=True)
    with pytest.raises(
        FileExistsError, match=rf"{name} is no checkpoint \(it has no checkpoint\.json\), and is not replaced"
    ):
        saved_by_a_manager(tmp_path) if name == "step_00000001" else by_itself()
    assert data.read_text() == "mine" and names(tmp_path) == [name]
    (tmp_path / "empty").mkdir()
    for number in (1, 2):  # an empty folder, then a checkpoint
        path = ax.save(tmp_path / "empty", Weights(number), replace=True)
        assert value(ax.restore(path, Weights())) == number


def test_a_manager_leaves_folders_of_others_that_end_like_its_own(tmp_path):
    """`notes.saving` was deleted, and `v1.replaced` renamed."""
    for name in ("notes.saving", "v1.replaced", "v2.replaced"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.saving" / "data").write_text("mine")
    (tmp_path / "v2.replaced" / "data").write_text("mine")
    saved_by_a_manager(tmp_path)
    assert names(tmp_path) == ["notes.saving", "step_00000001", "v1.replaced", "v2.replaced"]
    assert (tmp_path / "notes.saving" / "data").exists() and (tmp_path / "v2.replaced" / "data").exists()
