"""Checkpoints that have no copy in the object store yet: whoever claims their folder copies those that stay."""

import pytest
from test_checkpoint_manager import Weights
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
    assert go_on(tmp_path) == 2 and committed(s3) == [1]  # whoever only reads copies nothing
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


def test_whoever_claims_a_folder_leaves_the_copies_of_another_run(tmp_path, s3):  # noqa: F811
    save(tmp_path / "a", 1, 2)
    with ax.CheckpointManager(tmp_path / "b", every=1, asynchronous=False) as manager:
        manager.save(1, Weights(1))
    before = dict(s3.objects)
    claimed(tmp_path / "b")
    assert s3.objects == before
