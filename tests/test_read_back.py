"""Checkpoints read again from their disk before they count: what that finds, and what becomes of one that is damaged."""

import ctypes
import errno
import mmap
import os
import subprocess

import jax.numpy as jnp
import pytest

import axonml_jax as ax
from axonml_jax.checkpoint import saving as room

STATE = {"w": jnp.arange(4096.0)}


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "owner.json")


@pytest.fixture
def lying(monkeypatch):
    """A disk that has another byte than the page cache, of the first file with such a name: seen when the cache is dropped."""

    def of(pattern):
        def forget(handle, *_):
            path = os.readlink(f"/proc/self/fd/{handle}")
            if pattern in path and not found:
                found.append(path)
                with open(path, "r+b") as file:
                    file.seek(-9, os.SEEK_END)
                    byte = file.read(1)
                    file.seek(-9, os.SEEK_END)
                    file.write(bytes([byte[0] ^ 4]))

        found = []
        monkeypatch.setattr(room.os, "posix_fadvise", forget)
        return found

    return of


@pytest.mark.skipif(not room.PAST_THE_CACHE, reason="this system cannot be asked to drop a file from its cache")
@pytest.mark.parametrize("pattern", ["/d/", "_METADATA", "checkpoint.json"])
def test_what_the_disk_made_of_a_write_is_found_before_an_older_checkpoint_goes(tmp_path, lying, pattern):
    with ax.CheckpointManager(tmp_path, every=1, keep=1, verify=True) as manager:
        manager.save(1, STATE)
        manager.wait()
        changed = lying(pattern)
        manager.save(2, STATE)
        with pytest.raises(OSError, match=r"step_00000002 failed: .*its disk gives something else back") as caught:
            manager.wait()
        assert changed[0].rpartition("step_00000002.saving/")[2] in str(caught.value)
        assert caught.value.errno == errno.EIO
        assert names(tmp_path) == ["step_00000001"]
        assert manager.save(2, STATE)
        manager.wait()
        assert names(tmp_path) == ["step_00000002"]


@pytest.mark.skipif(not room.PAST_THE_CACHE, reason="this system cannot be asked to drop a file from its cache")
def test_only_what_asks_for_it_is_read_back(tmp_path, lying):
    lying("/d/")
    path = ax.save(tmp_path / "it", STATE)
    ax.restore(path, STATE)
    with pytest.raises(OSError, match="something else back"):
        ax.save(path, STATE, replace=True, verify=True)
    ax.restore(path, STATE)
    assert names(tmp_path) == ["it"]


def test_every_file_and_folder_is_on_disk_before_a_checkpoint_counts(tmp_path, monkeypatch):
    """Orbax syncs the arrays alone: after a power cut a whole checkpoint could have had empty files of metadata."""
    real, synced = os.fsync, set()

    def fsync(handle):
        synced.add(os.readlink(f"/proc/self/fd/{handle}").replace(".saving", ""))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    path = ax.save(tmp_path / "it", STATE)
    assert {path, path.parent, *path.rglob("*")} <= {type(path)(each) for each in synced}


def test_a_file_that_is_forgotten_is_read_from_the_disk(tmp_path):
    if b"tmpfs" in subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True).stdout:
        pytest.skip("a file system in memory has no disk")
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert _pages_in_memory(path) == 256
    room._forget(path)
    assert _pages_in_memory(path) == 0


def _pages_in_memory(path):
    """How many pages of a file the page cache holds, asked without reading any.

    A read that must not wait (RWF_NOWAIT) is no such question: it starts to read ahead, and a fast disk has answered
    before the read looks again.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore") or mmap.PAGESIZE != 4096:
        pytest.skip("this system does not say what is in its page cache")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        first = ctypes.c_char.from_buffer(view)
        pages = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(view)), pages)
        del first
    assert not failed, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages)
