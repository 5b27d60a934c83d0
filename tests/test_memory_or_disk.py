"""Which of the two a run goes on from, and when copies in memory are given up."""

import os
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_memory_copies import trained, trainer_and_data

from axonml_jax.checkpoint.format import DamagedCheckpoint, Manifest
from axonml_jax.checkpoint.memory import START, MemoryCopies, restore_newest
from axonml_jax.cli.loop import Saves
from axonml_jax.config.config import read_config
from axonml_jax.launch.standby import HostMemory
from axonml_jax.mesh.environment import MEMORY


class Disk:
    """Checkpoints on disk: those that are listed, and which of them is good."""

    place = "the disk"

    def __init__(self, *steps, good=None):
        self.steps, self.good = list(steps), good

    def restore(self, run, data=None):
        if self.steps and self.good is None:
            raise DamagedCheckpoint("all are damaged")
        return None if self.good is None else Manifest(step=self.good)


def damage(memory):
    """A flipped byte in every copy."""
    for handle in memory.of(0).own:
        if byte := os.pread(handle, 1, START):
            os.pwrite(handle, bytes([byte[0] ^ 1]), START)


def test_copies_are_given_up_only_when_the_run_has_gone_on_from_disk():
    """Memory has step 6; a newer one on disk counts only when it can be restored."""
    with HostMemory([1], 0) as memory:
        place, (run, loader) = {"NODE_RANK": "0", MEMORY: memory.of(0).text()}, trainer_and_data("data", 0)
        with closing(MemoryCopies(2, place)) as copies:
            copies.look(run)
            trained(run, loader, range(1, 7), copies)

        def goes_on(disk):
            with closing(MemoryCopies(2, place)) as copies:
                found, here = restore_newest(copies, disk, run, data=loader)
                return found and found.step, here

        for disk in (Disk(), Disk(6, good=6), Disk(3, 7, good=3), Disk(3, 7)):
            assert goes_on(disk) == (6, True)
        assert goes_on(Disk(7, good=7)) == (7, False)
        assert goes_on(Disk()) == (None, False)  # that step is the run's now, and nobody has it


def test_nothing_begins_anew_when_what_all_had_in_memory_is_gone():
    for steps, disk, wanted in ((2, Disk(), (None, False)), (4, Disk(3, good=3), (3, False)), (4, Disk(), None)):
        with HostMemory([1], 0) as memory:
            place, (run, loader) = {"NODE_RANK": "0", MEMORY: memory.of(0).text()}, trainer_and_data("data", 0)
            with closing(MemoryCopies(2, place)) as copies:
                copies.look(run)
                trained(run, loader, range(1, steps + 1), copies)
            damage(memory)
            with closing(MemoryCopies(2, place)) as copies:
                if wanted is not None:
                    found, here = restore_newest(copies, disk, run)
                    assert (found and found.step, here) == wanted
                    continue
                with pytest.raises(
                    DamagedCheckpoint,
                    match=r"had a copy of step 2 in memory.*not restarted from the beginning by itself",
                ):
                    restore_newest(copies, disk, run)


QUICKSTART = str(Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml")


def test_the_last_copy_in_memory_does_not_wait_for_a_disk_that_fails():
    def full(*args, **options):
        raise OSError("No space left on device")

    made, trainer = [], SimpleNamespace(state=SimpleNamespace(guard=None))
    memory = SimpleNamespace(keep=lambda step, run, data, now: made.append((step, now)))
    manager = SimpleNamespace(due=lambda step: False, save=full)
    asked, loader = SimpleNamespace(stop_after=lambda step: step == 4), SimpleNamespace(state_dict=dict)
    saves = Saves(manager, trainer, loader, read_config("train", [QUICKSTART]), asked, None, memory=memory)
    with pytest.raises(OSError, match="No space"):
        saves(4, {})
    assert made == [(4, True)]
