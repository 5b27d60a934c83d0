"""What may take an hour, as bringing back a checkpoint does: the others wait for it as long as it works."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any

from axonml_jax.checkpoint.team import Team

_MEET = 30.0
"""Seconds between two meetings, far fewer than processes wait for each other at one of them."""


def decide_at_length(team: Team, what: str, act: Callable[[], Any]) -> Any:
    """`team.decide`, for an `act` without a limit in time; the processes meet meanwhile, so that none waits for a dead one.

    Raises:
      TimeoutError: when a process no longer comes; what the main one has begun ends first.
    """
    if team.size == 1:
        return act()
    outcome = _begun(what, act) if team.leads else Future()
    try:
        while not team.decide(what, lambda: _ended(outcome)):
            pass
    except Exception:
        if team.leads:
            wait([outcome])
        raise
    return team.decide(what, outcome.result)


def tell_all_at_length(team: Team, what: str, act: Callable[[], Any]) -> list[Any]:
    """`team.tell_all` of what `act` returns in every process, without a limit in time; the processes meet meanwhile.

    Args:
      team: the processes.
      what: for the error when a process does not come.
      act: returns plain values, and raises nothing: the others would wait for this process.

    Raises:
      TimeoutError: when a process no longer comes.
    """
    if team.size == 1:
        return [act()]
    outcome = _begun(what, act)
    while not all(team.tell_all(what, _ended(outcome))):
        pass
    return team.tell_all(what, outcome.result())


def _begun(what: str, act: Callable[[], Any]) -> Future:
    outcome: Future = Future()

    def work():
        try:
            outcome.set_result(act())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=work, name=what, daemon=True).start()
    return outcome


def _ended(outcome: Future) -> bool:
    wait([outcome], _MEET)
    return outcome.done()
