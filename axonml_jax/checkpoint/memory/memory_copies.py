"""A run's state in memory every few steps, and back after a restart: what `CheckpointManager` does on disk."""

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

import jax

from axonml_jax.checkpoint.manifest import Manifest
from axonml_jax.checkpoint.memory.common_step import Agreed, agree, missing
from axonml_jax.checkpoint.memory.complete_step import complete, tell
from axonml_jax.checkpoint.memory.generation import START, Generation, laid_out
from axonml_jax.checkpoint.memory.handed import GENERATIONS, handed
from axonml_jax.checkpoint.memory.held_parts import parts_of, shard_name
from axonml_jax.checkpoint.memory.members import Members, gather
from axonml_jax.checkpoint.memory.own_copies import OwnCopies, whole_copies
from axonml_jax.checkpoint.memory.post import Box, Post, held_step, own_addresses, send
from axonml_jax.checkpoint.store import Positioned, manifest_of
from axonml_jax.checkpoint.team import Team
from axonml_jax.logging import logger, print0
from axonml_jax.mesh.job.sealed import job_token

_REFILL, _KEEP = "refill", "keep"
_COUNTERS = "axonml_jax/memory/"


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

    Call `restore` once before the first step, `keep` after every step, `close` at the end. A copy blocks while the arrays are
    copied to the host; checksums, and sending it to another machine, happen behind the training's back.

    Args:
      every: steps between copies.
      environ: the launcher's variables.

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
        self._every, self._environ, self._team, self._token = every, environ, Team(), b""
        self._own = OwnCopies([Generation(handle) for handle in given.own])
        self._held = {rank: [Generation(handle) for handle in files] for rank, files in given.others.items()}
        self._complete: int | None = None  # the newest step of which every process has a copy
        self._finished: int | None = None  # of which this one has, and has not asked yet for the others
        self._last, self._round, self._told = -1, 0, False
        self._members: Members | None = None
        self._post: Post | None = None
        self._addresses: list[str] = []
        self._thread: threading.Thread | None = None
        self._made, self._skipped, self._blocked = 0, 0, 0.0

    def close(self) -> None:
        """Wait for a copy under way, and listen no more."""
        self._told = True  # the others may have closed already
        self._wait()
        if self._post is not None:
            self._post.close()
            self._post = None

    @property
    def bound(self) -> str:
        """How much memory the copies take at most, in words."""
        members, rank = self._known, self._team.rank
        whose = [
            (members.sizes[rank], "its own"),
            *((members.sizes[r], f"process {r}'s") for r in members.kept_by(rank)),
        ]
        sizes = ", ".join(f"{GENERATIONS} x {size / 1e6:,.1f} MB of {name} state" for size, name in whose)
        return f"copied every {self._every} steps; process {rank} keeps {sizes}"

    @property
    def cost(self) -> str:
        """What the copies have cost this process so far, in words."""
        skipped = f", {self._skipped} left out as the one before was under way" if self._skipped else ""
        each = 1000 * self._blocked / max(self._made, 1)
        return f"{self._made} copies in memory, each blocked {each:.1f} ms{skipped}"

    def restore(self, run: AtRest, *, of: str = "", data: Positioned | None = None, after: int = -1) -> Manifest | None:
        """Go on from the newest step that all processes have, or can get from another; prepare to make copies.

        Args:
          run: takes its arrays back.
          of: the run's name: copies of another one, in the same launch, are not taken.
          data: the data loader, which goes on from where it was.
          after: only from a step after this one.

        Returns:
          What a checkpoint of the step would say about itself; None: there is none.

        Raises:
          ValueError: when the copies would take more than half of a machine's memory, or the data is another.
        """
        arrays = run.resting_arrays()
        size = laid_out(parts_of(arrays))[1] - START
        self._members = gather(self._team, self._environ, f"{shard_name(arrays)} {of}", size)
        agreed = self._agree(after)
        moves = agreed is not None and any(source != rank for rank, source in enumerate(agreed.sources))
        if moves or any(keeper is not None for keeper in self._members.keepers):
            self._open_post(agreed)
        if agreed is None or (moves and not self._refill(agreed)):
            self._forget()
            return None
        self._drop_after(agreed.step)
        values, about = self._own.read(agreed.step, arrays)
        manifest = Manifest(**about)
        if data is not None and manifest.data is not None:
            data.load_state_dict(manifest.data)
        run.take_resting(values)
        self._complete = self._last = agreed.step
        return manifest

    def keep(self, step: int, run: Any, *, data: Positioned | None = None, now: bool = False) -> bool:
        """Make a copy if it is time.

        Args:
          step: updates made.
          run: the trainer.
          data: the data loader, whose position belongs to the step.
          now: make one in any case, as the run ends here and others may go on from it.

        Returns:
          Whether one was begun; not while the one before is still checked and sent.
        """
        if now:
            self._wait()
        elif step % self._every:
            return False
        if self._thread is not None and self._thread.is_alive():
            self._skipped += 1
            return False
        began = time.perf_counter()
        if step <= self._last:  # the run went back
            self._forget()
            self._round += 1
        self._last = step
        self._look_for_complete()
        about = asdict(manifest_of(run, {}, step=step, data=data))
        shard = self._known.shards[self._team.rank]
        finish = self._own.begin(step, run.resting_arrays(), shard, about, self._complete)
        self._thread = threading.Thread(target=self._finish, args=(step, finish), name=f"copy of step {step}")
        self._thread.start()
        self._made, self._blocked = self._made + 1, self._blocked + time.perf_counter() - began
        return True

    @property
    def _known(self) -> Members:
        assert self._members is not None, "call restore first"
        return self._members

    def _agree(self, after: int) -> Agreed | None:
        """The newest step that all can go on from."""
        found = self._own.look()
        for generations in self._held.values():
            for index in whole_copies(generations):
                if index is not None:
                    found.setdefault(index.shard, []).append(index.step)
        everyone = self._team.tell_all("compare copies of the state in memory", found)
        shards = self._known.shards
        agreed = agree(shards, everyone)
        if agreed is None and any(everyone):
            lost = missing(shards, everyone)
            what = f"none of process(es) {list(lost)}'s" if lost else "no step of which every process's"
            print0(f"of the copies in memory {what} is there: the run goes on from disk")
        return None if agreed is None or agreed.step <= after else agreed

    def _open_post(self, agreed: Agreed | None) -> None:
        """Listen for copies, and hear where the others do."""
        members, rank = self._known, self._team.rank
        nonce = self._team.decide("prepare copies in memory", lambda: secrets.token_hex(16))
        self._token = job_token(self._environ) + nonce.encode()
        listens, reached = own_addresses(self._environ)
        self._post = Post(listens, self._token, reached)
        if agreed is not None and (source := agreed.sources[rank]) != rank:
            self._post.boxes[_REFILL, source] = Box(self._own.generations, members.sizes[rank])
        for other in members.kept_by(rank):
            self._post.boxes[_KEEP, other] = Box(self._held[other], members.sizes[other])
        self._addresses = self._team.tell_all("prepare copies in memory", self._post.address)

    def _refill(self, agreed: Agreed) -> bool:
        """Send state to those that have lost theirs; whether all have it now."""
        fault, rank = "", self._team.rank
        for other in (r for r, source in enumerate(agreed.sources) if source == rank != r):
            try:
                generation = self._find(self._known.shards[other], agreed.step)
                send(self._addresses[other], self._token, _REFILL, rank, generation, None)
            except OSError as error:
                fault = f"process {other} did not get its state from process {rank}: {error}"
        faults = [each for each in self._team.tell_all("refill processes from memory", fault) if each]
        if faults:
            print0(*faults, "the run goes on from disk", sep="\n")
            return False
        moved = [f"process {r} from process {source}" for r, source in enumerate(agreed.sources) if source != r]
        print0(f"state of step {agreed.step} sent: {', '.join(moved)}")
        self._own.look()
        return True

    def _drop_after(self, step: int) -> None:
        """Forget copies of later steps, which not everybody has: made again, in another world, they come out otherwise."""
        self._own.drop_after(step)
        for generation in (each for held in self._held.values() for each in held):
            if (held := held_step(generation)) is not None and held > step:
                generation.clear()

    def _find(self, shard: str, step: int) -> Generation:
        every = [*self._own.generations, *(each for held in self._held.values() for each in held)]
        indices = ((each, each.index()) for each in every)
        return next(g for g, found in indices if found and (found[0].shard, found[0].step) == (shard, step))

    def _finish(self, step: int, finish: Callable[[], Generation]) -> None:
        """Behind the training's back: checksums, the copy on another machine, and word that it is made."""
        rank, keeper = self._team.rank, self._known.keepers[self._team.rank]
        try:
            generation = finish()
            if keeper is not None:
                send(self._addresses[keeper], self._token, _KEEP, rank, generation, self._complete)
            self._finished = step  # before that is told: word may arrive of which the sender hears nothing
            if self._team.size > 1:
                tell(self._counter(step))
        except (OSError, jax.errors.JaxRuntimeError) as error:
            if not self._told:
                self._told = True
                logger.warning("the copy of step %d in memory is not complete, the ones before stay: %s", step, error)

    def _look_for_complete(self) -> None:
        """Whether all processes have the step that this one has finished; call it before another one is overwritten."""
        step, self._finished = self._finished, None
        if step is not None and (self._team.size == 1 or complete(self._counter(step), self._team.size)):
            self._complete = step

    def _counter(self, step: int) -> str:
        return f"{_COUNTERS}{self._round}/{step}"

    def _forget(self) -> None:
        self._wait()
        self._own.forget()
        for generations in self._held.values():
            for generation in generations:
                generation.clear()
        self._complete, self._finished, self._last = None, None, -1

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
