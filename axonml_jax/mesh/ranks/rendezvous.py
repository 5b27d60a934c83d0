"""Where ranks that are threads of one process meet: the last to arrive acts for all, errors reach every one of them."""

import copy
import threading
from collections.abc import Callable
from typing import Any


class PeerError(RuntimeError):
    """Another rank of the group has stopped, so this rank's group call can never complete."""


class Rendezvous:
    """One group's meeting place: a condition and a generation counter.

    Args:
      ranks: global ranks of the members.
      board: the board that knows which ranks have stopped.
    """

    def __init__(self, ranks: tuple[int, ...], board: "Board"):
        self.ranks = ranks
        self._board = board
        self._condition = threading.Condition()
        self._generation = 0
        self._offers: dict[int, Any] = {}
        self._outcomes: dict[int, _Outcome] = {}
        self._broken: Exception | None = None

    def meet(self, rank: int, offer: Any, act: Callable[[dict[int, Any]], dict[int, Any]], name: str) -> Any:
        """Wait until every member has come; the last one runs `act(offers)`, each takes its own part of the result.

        Args:
          rank: the caller's global rank.
          offer: what this rank brings.
          act: offers by rank -> results by rank. Its exception is raised in every member.
          name: what is being called, for the errors.

        Raises:
          TimeoutError: naming the ranks that did not come in time; the group is broken from then on.
          PeerError: when a missing rank has failed or returned and can never come.
        """
        with self._condition:
            self._refuse_if_hopeless(name)
            assert rank not in self._offers, f"rank {rank} entered {name} twice: a rank is one thread"
            generation = self._generation
            self._offers[rank] = offer
            if len(self._offers) == len(self.ranks):
                self._act(act)
            else:
                self._wait(generation, name)
            return self._take(generation, rank)

    def wake(self) -> None:
        """Let the waiting members look at the board again."""
        with self._condition:
            self._condition.notify_all()

    def _act(self, act):
        offers, self._offers = self._offers, {}
        try:
            outcome = _Outcome(act({rank: offers[rank] for rank in self.ranks}), None, len(self.ranks))
        except Exception as error:
            outcome = _Outcome({}, error, len(self.ranks))
        self._outcomes[self._generation] = outcome
        self._generation += 1
        self._condition.notify_all()

    def _wait(self, generation, name):
        def settled():
            return self._generation != generation or self._broken or self._stopped()

        if not self._condition.wait_for(settled, self._board.timeout):
            missing = [rank for rank in self.ranks if rank not in self._offers]
            self._broken = TimeoutError(
                f"{name} on ranks {list(self.ranks)}: rank(s) {missing} did not call it within "
                f"{self._board.timeout:g} s; every member of a group must make the same calls in the same order"
            )
            self._condition.notify_all()
        if self._generation == generation:
            self._refuse_if_hopeless(name)

    def _refuse_if_hopeless(self, name):
        if self._broken:
            raise _own_copy(self._broken)
        if stopped := self._stopped():
            reasons = "; ".join(f"rank {rank} {reason}" for rank, reason in stopped.items())
            raise PeerError(f"{name} on ranks {list(self.ranks)} cannot complete: {reasons}")

    def _stopped(self):
        stopped = self._board.stopped
        return {rank: stopped[rank] for rank in self.ranks if rank in stopped and rank not in self._offers}

    def _take(self, generation, rank):
        outcome = self._outcomes[generation]
        outcome.left -= 1
        if outcome.left == 0:
            del self._outcomes[generation]
        if outcome.error is not None:
            raise _own_copy(outcome.error)
        return outcome.results[rank]


def _own_copy(error):
    # One exception raised in several threads would mix their tracebacks.
    try:
        return copy.copy(error).with_traceback(error.__traceback__)
    except TypeError:  # an exception whose constructor does not take its own args
        return error


class _Outcome:
    def __init__(self, results: dict[int, Any], error: Exception | None, left: int):
        self.results, self.error, self.left = results, error, left


class Board:
    """What the ranks of one threaded world share: a rendezvous per group, and who has stopped and why.

    Args:
      timeout: seconds a rank waits for the others at a group call.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.stopped: dict[int, str] = {}
        self._lock = threading.Lock()
        self._rendezvous: dict[tuple[int, ...], Rendezvous] = {}

    def rendezvous(self, ranks: tuple[int, ...]) -> Rendezvous:
        """The meeting place of these ranks: the same for every group that has them in this order."""
        with self._lock:
            return self._rendezvous.setdefault(ranks, Rendezvous(ranks, self))

    def stop(self, rank: int, reason: str) -> None:
        """Record that a rank makes no further calls; members waiting for it get an error at once.

        Args:
          rank: its global rank.
          reason: the rest of the sentence "rank 3 ...".
        """
        with self._lock:
            self.stopped[rank] = reason
            meeting_places = list(self._rendezvous.values())
        for place in meeting_places:
            place.wake()
