"""Checkpoints that have no copy in the object store yet: whoever claims their folder copies those that stay."""

import pytest
from test_checkpoint_manager import Weights, names
from test_mirror import URL, committed, go_on, s3, save  # noqa: F401

import axonml_jax as ax


def claimed(folder, **options):
    with ax.CheckpointManager(folder, mirror=URL, **options) as manager:
        manager.claim()


@pytest.mark.slow
def test_whoever_claims_a_folder_copies_what_has_no_copy_yet(tmp_path, s3, caplog):  # noqa: F811
    s3.refuse = lambda method, path: 403 if method == "PUT" and "step_00000002" in path else None
    with pytest.raises(OSError, match="the newest checkpoint is not copied"):
        save(tmp_path, 1, 2)
    with pytest.raises(OSError, match="the newest checkpoint is not copied"):  # nothing is saved, and still it is not
        claimed(tmp_path)
    s3.refuse = lambda method, path: None
    assert committed(s3) == [1]
    claimed(tmp_path)
    assert committed(s3) == [1, 2]
    s3.log.clear()
    claimed(tmp_path)
    assert not any(method == "PUT" for method, _ in s3.log)
    with ax.CheckpointManager(tmp_path, every=1, keep=None, asynchronous=False) as manager:  # without a mirror
        for step in (2, 3, 4, 5):
            manager.save(step, Weights(step), force=True)
    damaged = next((tmp_path / "step_00000004").rglob("_METADATA"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    claimed(tmp_path, keep=2, keep_every=2)
    puts = [path for method, path in s3.log if method == "PUT" and path.endswith(".commit")]
    assert puts == [f"/bucket/run/step_0000000{step}.commit" for step in (5, 2)] and committed(s3) == [2, 5]
    assert "step_00000004 has no copy, and is not copied: " in caplog.text and "_METADATA: its checksum" in caplog.text


@pytest.mark.slow
def test_a_program_that_only_restores_copies_at_its_end_what_nobody_else_will(tmp_path, s3, caplog):  # noqa: F811
    s3.refuse = lambda method, path: 403 if method == "PUT" and "step_00000002" in path else None
    with pytest.raises(OSError, match="the newest checkpoint is not copied"):
        save(tmp_path, 1, 2)
    assert go_on(tmp_path) == 2 and committed(s3) == [1]  # it may read alone, and that spoils no evaluation
    assert "stay without a copy: the newest checkpoint is not copied to s3://bucket/run" in caplog.text
    s3.refuse = lambda method, path: None
    with ax.CheckpointManager(tmp_path, every=1) as owner:
        owner.claim()
        assert go_on(tmp_path) == 2 and committed(s3) == [1]  # the owner's to copy
    with pytest.raises(KeyError), ax.CheckpointManager(tmp_path, mirror=URL) as manager:
        manager.restore(Weights())
        raise KeyError
    with ax.CheckpointManager(tmp_path, mirror=URL):
        pass  # has not looked at anything
    assert committed(s3) == [1]
    assert go_on(tmp_path) == 2 and committed(s3) == [1, 2]
    assert names(tmp_path) == ["step_00000001", "step_00000002"] and not (tmp_path / "owner.json").exists()
    s3.log.clear()
    assert go_on(tmp_path) == 2 and not any(method == "PUT" for method, _ in s3.log)


def test_whoever_claims_a_folder_leaves_the_copies_of_another_run(tmp_path, s3):  # noqa: F811
    save(tmp_path / "a", 1, 2)
    with ax.CheckpointManager(tmp_path / "b", every=1, asynchronous=False) as manager:
        manager.save(1, Weights(1))
    before = dict(s3.objects)
    claimed(tmp_path / "b")
    assert s3.objects == before
