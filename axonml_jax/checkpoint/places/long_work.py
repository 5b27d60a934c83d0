"""What the main process decides may take an hour, as bringing back a checkpoint does: the others wait as long as it works."""

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
    outcome: Future = Future()

    def work():
        try:
            outcome.set_result(act())
        except BaseException as error:
            outcome.set_exception(error)

    def ended() -> bool:
        wait([outcome], _MEET)
        return outcome.done()

    if team.leads:
        Thread(target=work, name=what, daemon=True).start()
    try:
        while not team.decide(what, ended):
            pass
    except Exception:
        if team.leads:
            wait([outcome])
        raise
    return team.decide(what, outcome.result)
