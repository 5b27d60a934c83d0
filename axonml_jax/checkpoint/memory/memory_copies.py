"""A run's state in memory every few steps, and back after a restart: what `CheckpointManager` does on disk."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

import jax

from axonml_jax.checkpoint.manifest import Manifest
from axonml_jax.checkpoint.memory.common_step import Agreed, agree, missing, steps_of
from axonml_jax.checkpoint.memory.copy_exchange import KEEP, REFILL, Exchange
from axonml_jax.checkpoint.memory.copy_rounds import CopyRounds
from axonml_jax.checkpoint.memory.generation import START, Generation, holds, laid_out, peek
from axonml_jax.checkpoint.memory.handed import GENERATIONS, handed
from axonml_jax.checkpoint.memory.held_parts import parts_of, shard_name
from axonml_jax.checkpoint.memory.members import Members, gather
from axonml_jax.checkpoint.memory.own_copies import OwnCopies, whole_copies
from axonml_jax.checkpoint.memory.post import Box
from axonml_jax.checkpoint.memory.refill import refill
from axonml_jax.checkpoint.store import Positioned, manifest_of
from axonml_jax.checkpoint.team import Team
from axonml_jax.logging import logger, print0


class AtRest(Protocol):
    """Something whose arrays can be copied as they rest: a trainer."""

    def resting_arrays(self) -> dict[str, jax.Array]:
        """Every array by a name, as it lies on the devices."""
        ...

    def take_resting(self, arrays: Mapping[str, jax.Array]) -> None:
        """Go on from such arrays."""
        ...


class MemoryCopies:
    """Copies of what this process's devices hold, in memory of its launcher. All processes make the same calls.

    Call `look` once before the first step, then `restore` or `forget` (see `restore_newest`), `keep` after every step, `close`
    at the end. A copy blocks while the arrays are copied to the host; checksums, and sending it to another machine, happen
    behind the training's back.

    Args:
      every: steps between copies.
      environ: the launcher's variables.

    Attributes:
      lost: the newest step that the copies say all processes had, where `look` finds none that all can have; else None.

    Raises:
      ValueError: without a launcher that restarts processes: nothing would outlive them.
    """

    def __init__(self, every: int, environ: Mapping[str, str] = os.environ):
        if every < 1:
            raise ValueError(f"every={every} must be at least 1")
        given = handed(environ)
        if given is None:
            raise ValueError(
                f"copies of the state in memory (every {every} steps) need a launcher that outlives the processes and starts "
                "them again, on Linux: axonml-jax launch --max-restarts 3 ..., or leave them out"
            )
        self._every, self._environ, self._team = every, environ, Team()
        self._own = OwnCopies([Generation(handle) for handle in given.own])
        self._held = {rank: [Generation(handle) for handle in files] for rank, files in given.others.items()}
        self._rounds, self._last, self._told = CopyRounds(self._team), -1, False
        self.lost: int | None = None
        self._members: Members | None = None
        self._agreed: Agreed | None = None
        self._exchange: Exchange | None = None
        self._thread: threading.Thread | None = None
        self._made, self._blocked = 0, 0.0

    def close(self, *, together: bool = True) -> None:
        """Wait for a copy under way, and listen no more.

        Args:
          together: listen until the others are ready too, who may be sending their last copy here; a minute at most where one
            no longer comes. False: this process ends with an error, and so may they.
        """
        self._told = self._told or not together  # the others may have closed already
        if self._exchange is not None and together:
            self._exchange.part(self._wait)
        self._wait()
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    @property
    def bound(self) -> str:
        """How much memory the copies take at most, in words."""
        members, rank = self._known, self._team.rank
        if not members.own:
            return "none is made: there is too little on these machines"
        whose = [
            (members.sizes[rank], "its own"),
            *((members.sizes[r], f"process {r}'s") for r in members.kept_by(rank)),
        ]
        sizes = ", ".join(f"{GENERATIONS} x {size / 1e6:,.1f} MB of {name} state" for size, name in whose)
        return f"copied every {self._every} steps; process {rank} keeps {sizes}"

    @property
    def cost(self) -> str:
        """What the copies have cost this process so far, in words."""
        skipped = f", {self._rounds.skipped} left out as the one before was under way" if self._rounds.skipped else ""
        each = 1000 * self._blocked / max(self._made, 1)
        return f"{self._made} copies in memory, each blocked {each:.1f} ms{skipped}"

    def look(self, run: AtRest, *, of: str = "") -> int | None:
        """Hear what copies all processes have, and prepare to make some. Nothing that is there is changed.

        Args:
          run: as its arrays lie, copies are taken back, and made.
          of: the run's name: copies of another one, in the same launch, are not taken.

        Returns:
          The newest step that `restore` can go on from; None: there is none.

        Raises:
          ValueError: when the copies would take more than half of a machine's memory.
        """
        arrays = run.resting_arrays()
        size = laid_out(parts_of(arrays))[1] - START
        self._members = gather(self._team, self._environ, f"{shard_name(arrays)} {of}", size)
        self._agreed = self._agree()
        if (self._agreed and self._agreed.moves()) or any(keeper is not None for keeper in self._members.keepers):
            self._exchange = Exchange(self._team, self._environ, self._boxes(self._agreed))
        return None if self._agreed is None else self._agreed.step

    def restore(self, run: AtRest, *, data: Positioned | None = None) -> Manifest:
        """Go on from the step that `look` has found; whoever has lost its state gets it from another process before.

        Args:
          run: takes its arrays back.
          data: the data loader, which goes on from where it was.

        Returns:
          What a checkpoint of the step would say about itself.

        Raises:
          OSError: in every process, when one does not get its state. All that was there still is, for the next start.
          ValueError: when the data is another.
        """
        agreed, shard = self._agreed, self._known.shards[self._team.rank]
        assert agreed is not None, "look has found nothing"
        if moves := agreed.moves():
            refill(self._team, agreed, partial(self._deliver, agreed.step))
            said = [f"process {rank} from process {source}" for rank, source in moves.items()]
            print0(f"state of step {agreed.step} sent: {', '.join(said)}")
        if self._team.rank not in moves and (shard, agreed.step) not in self._own.held:  # it kept this for another one
            self._own.for_refill(agreed.step, ()).become(self._find(shard, agreed.step))
        self._drop_after(agreed.step)
        values, about = self._own.read(shard, agreed.step, run.resting_arrays())
        manifest = Manifest(**about)
        if data is not None and manifest.data is not None:
            data.load_state_dict(manifest.data)
        run.take_resting(values)
        self._rounds.go_on_from(agreed.step)
        self._last = agreed.step
        return manifest

    def forget(self) -> None:
        """Give up all copies, as the run goes on from elsewhere."""
        self._wait()
        self._own.forget()
        for generation in self._others:
            generation.clear()
        self._free_unused(() if self._known.own else self._own.generations)
        self._rounds.go_on_from(None)
        self._last = -1

    def keep(self, step: int, run: Any, *, data: Positioned | None = None, now: bool = False) -> bool:
        """Make a copy if it is time.

        Args:
          step: updates made.
          run: the trainer.
          data: the data loader, whose position belongs to the step.
          now: make one in any case, as the run ends here and others may go on from it.

        Returns:
          Whether one was begun, the same in all processes: not while some are still at the one before, without `now`.
        """
        if now:
            self._wait()
        elif step % self._every:
            return False
        if not self._known.own:
            return False
        began = time.perf_counter()
        if step <= self._last:  # the run went back
            self.forget()
        if not self._rounds.may_begin(step) and not now:
            self._rounds.skip()
            return False
        self._wait()
        self._rounds.begin(step)
        self._last = step
        about = asdict(manifest_of(run, {}, step=step, data=data))
        shard = self._known.shards[self._team.rank]
        finish = self._own.begin(step, run.resting_arrays(), shard, about, self._rounds.complete)
        self._thread = threading.Thread(target=self._finish, args=(step, finish), name=f"copy of step {step}")
        self._thread.start()
        self._made, self._blocked = self._made + 1, self._blocked + time.perf_counter() - began
        return True

    @property
    def _known(self) -> Members:
        assert self._members is not None, "call look first"
        return self._members

    @property
    def _others(self) -> list[Generation]:
        """Where the copies of other processes are."""
        return [generation for held in self._held.values() for generation in held]

    def _agree(self) -> Agreed | None:
        """The newest step that all can go on from."""
        shards, generations = self._known.shards, (*self._own.generations, *self._others)
        # Before those are forgotten whose parts are damaged: they too say what there once was.
        indices = [index for each in generations if (index := peek(each)) is not None and index.shard in shards]
        known = max((index.complete for index in indices if index.complete is not None), default=None)
        whole = [*self._own.look(), *(index for index in whole_copies(self._others) if index is not None)]
        said = self._team.tell_all("compare copies of the state in memory", [steps_of(whole), known])
        everyone = [found for found, _ in said]
        agreed = agree(shards, everyone, self._known.nodes)
        if agreed is None:
            self.lost = max((step for _, step in said if step is not None), default=None)
            if any(everyone):
                gone = missing(shards, everyone)
                what = f"none of process(es) {list(gone)}'s" if gone else "no step of which every process's"
                print0(f"of the copies in memory {what} is there")
        return agreed

    def _boxes(self, agreed: Agreed | None) -> dict[tuple[str, int], Box]:
        """What other processes will send."""
        members, rank = self._known, self._team.rank
        boxes = {(KEEP, r): Box(self._held[r], members.sizes[r], members.shards[r]) for r in members.kept_by(rank)}
        moves = {} if agreed is None else agreed.moves()
        if agreed is not None and rank in moves:
            sent = {members.shards[other] for other, source in moves.items() if source == rank}
            place = [self._own.for_refill(agreed.step, sent)]
            boxes[REFILL, moves[rank]] = Box(place, members.sizes[rank], members.shards[rank])
        return boxes

    def _deliver(self, step: int, rank: int) -> None:
        """Send another process its state."""
        assert self._exchange is not None
        self._exchange.send(rank, REFILL, self._find(self._known.shards[rank], step))

    def _drop_after(self, step: int) -> None:
        """Forget copies of later steps, which not everybody has: made again, in another world, they come out otherwise."""
        self._own.keep_only(self._known.shards[self._team.rank], step)
        for generation in self._others:
            if (held := holds(generation)) is not None and held[1] > step:
                generation.clear()
        self._free_unused()

    def _free_unused(self, own: Sequence[Generation] = ()) -> None:
        """Give back the memory of copies that are too much to be made on these machines; by now each process has its state."""
        if not self._known.partners:
            for generation in (*own, *self._others):
                generation.free()

    def _find(self, shard: str, step: int) -> Generation:
        return next(each for each in (*self._own.generations, *self._others) if holds(each) == (shard, step))

    def _finish(self, step: int, finish: Callable[[], Generation]) -> None:
        """Behind the training's back: checksums, the copy on another machine, and word of how that went."""
        made, keeper = False, self._known.keepers[self._team.rank]
        try:
            generation = finish()
            if keeper is not None:
                assert self._exchange is not None
                self._exchange.send(keeper, KEEP, generation, self._rounds.complete)
            made = True
        except Exception as error:  # whatever it is: the others wait for word of this copy
            self._tell_once(step, error)
        try:
            self._rounds.end(step, made)
        except jax.errors.JaxRuntimeError as error:
            self._tell_once(step, error)

    def _tell_once(self, step: int, error: Exception) -> None:
        if not self._told:
            self._told = True
            logger.warning("the copy of step %d in memory is not complete, the ones before stay: %s", step, error)

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
