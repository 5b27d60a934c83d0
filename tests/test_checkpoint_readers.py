"""Processes that read checkpoints beside the run that writes them, and deletes some."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

from test_checkpoint_manager import Weights, three, value  # noqa: F401
from test_memory_worlds import Meeting, Team

import axonml_jax as ax
from axonml_jax.checkpoint import format as arrays


def test_all_readers_take_the_next_where_one_of_them_finds_its_checkpoint_removed(three, monkeypatch):  # noqa: F811
    """Threads in the place of processes: the first has read it all when the second finds it gone."""
    meeting, read, done, ranks = Meeting(2), arrays.read, threading.Event(), threading.local()

    def late(saver, path, *rest):
        if "00000006" in str(path) and ranks.own == 1:
            assert done.wait(60)
            shutil.rmtree(path.parent)
        try:
            return read(saver, path, *rest)
        finally:
            done.set()

    def reads(rank):
        ranks.own, module = rank, Weights()
        with ax.CheckpointManager(three.folder) as reader:
            reader._team = Team(meeting, rank)
            found = reader.restore(module).step
        return found, value(module)

    monkeypatch.setattr(arrays, "read", late)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(reads, range(2))) == [(4, 4), (4, 4)]
