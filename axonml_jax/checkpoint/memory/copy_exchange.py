"""The copies that the processes of one job send each other: who listens where, and what is expected there."""

import secrets
from collections.abc import Callable, Mapping
from copy import copy

import jax

from axonml_jax.checkpoint.memory.generation import Generation
from axonml_jax.checkpoint.memory.post import Box, Post, own_addresses, send
from axonml_jax.checkpoint.places.long_work import tell_all_at_length
from axonml_jax.checkpoint.team import Team
from axonml_jax.logging import logger
from axonml_jax.mesh.job.sealed import job_token

REFILL = "refill"
"""Purpose of what a process sends to one that has lost its state."""

KEEP = "keep"
"""Purpose of what a process sends to the one that keeps its copies."""

_PARTING = 60.0
"""Seconds that a process waits at its end for another one that says nothing more."""


class Exchange:
    """Listens for copies, and knows where the others do; all processes make one at once.

    Args:
      team: the processes.
      environ: the launcher's variables.
      boxes: what is expected here, by purpose and the sender's rank.
    """

    def __init__(self, team: Team, environ: Mapping[str, str], boxes: Mapping[tuple[str, int], Box]):
        nonce = team.decide("prepare copies in memory", lambda: secrets.token_hex(16))
        self._rank, self._team, self._token = team.rank, team, job_token(environ) + nonce.encode()
        listens, reached = own_addresses(environ)
        self._post = Post(listens, self._token, reached)
        self._post.boxes.update(boxes)
        self._addresses = team.tell_all("prepare copies in memory", self._post.address)

    def send(self, to: int, purpose: str, generation: Generation, keep: int | None = None) -> None:
        """Send a copy to the process of a rank (see `post.send`).

        Raises:
          OSError: when it is not kept there.
        """
        send(self._addresses[to], self._token, purpose, self._rank, generation, keep)

    def part(self, sent: Callable[[], None]) -> None:
        """Return when no process sends anything more, or when one no longer says anything.

        Args:
          sent: returns when this process has sent all.
        """
        team = copy(self._team)
        team.timeout = _PARTING
        try:
            tell_all_at_length(team, "end with copies in memory", sent)
        except (TimeoutError, jax.errors.JaxRuntimeError) as error:
            logger.warning("the last copies of the state in memory may not be complete: %s", error)

    def close(self) -> None:
        """Listen no more."""
        self._post.close()
