"""The launchers of a job's machines in touch: they gather, agree on ranks and port, and share alarms and the verdict.

Node 0's launcher listens on the master port of the named address; the others call it. The workers' coordinator gets the
16 ports after that one in turn, another at every attempt, so that nothing of a dead attempt can answer a new one. Where
machines may come and go (`--nnodes MIN:MAX`) node 0 goes on listening, and says at every attempt who belongs to it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from axonml_jax.launch.processes.interrupts import Interrupts
from axonml_jax.launch.processes.launch_options import LaunchOptions
from axonml_jax.launch.processes.machines.door import call, refuse
from axonml_jax.launch.processes.machines.gathering import Gathering
from axonml_jax.launch.processes.machines.heard import Heard
from axonml_jax.launch.processes.machines.lines import Lines
from axonml_jax.launch.processes.machines.roster import Roster
from axonml_jax.launch.processes.machines.start import Over, Start, Stopped
from axonml_jax.launch.processes.post_mortem import root_cause
from axonml_jax.launch.processes.supervise import print_note
from axonml_jax.launch.processes.worker import Failure
from axonml_jax.mesh.job.callers import readable
from axonml_jax.mesh.job.sealed import job_token

GATHER_TIMEOUT = 300.0
"""Seconds in which the launchers of all machines must be started, or of as many as there must be."""

_TICK = 0.1


class Nodes:
    """All launchers of a job, as one of them sees them. A context; entered once everybody has come, or enough have.

    Args:
      options: of this launcher.
      local_size: its number of workers.
      interrupts: its signals.

    Attributes:
      sizes: by node, the number of workers of every machine that had come when this one was let in; 0 where none had.
    """

    def __init__(self, options: LaunchOptions, local_size: int, interrupts: Interrupts):
        self.sizes = [local_size]
        self._options = options
        self._interrupts = interrupts
        self._me = options.node_rank
        self._token = job_token()
        self._roster: Roster | None = None  # node 0's
        self._lines = Lines(options.nnodes)
        self._gathering: Gathering | None = None
        self._heard = Heard()
        self._start = Start(0, 0, (), ())

    def __enter__(self) -> "Nodes":
        try:
            if self._options.nnodes > 1:
                self._gather() if self._me == 0 else self._call()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        if self._gathering is not None:
            self._gathering.close()
        self._lines.close()

    def start(self, number: int, port: int) -> Start:
        """The next attempt that this machine belongs to: node 0's choice, heard by all.

        Args:
          number: of the attempt, at least; node 0 takes it.
          port: of its coordinator; node 0's counts.

        Raises:
          Over: when there is none.
        """
        if self._roster is None and self._me == 0:
            self._heard.starts[number] = Start(number, port, (0,), tuple(self.sizes))
        elif self._roster is not None:
            self._wait_for_enough(self._roster)
            if self.lost is None:
                nodes = self._roster.next_nodes(self._start.nodes)
                start = Start(number, port, nodes, tuple(self._roster.sizes[node] for node in nodes))
                self._roster.trial.begin(self._start.nodes, nodes)
                self._lines.tell(start.message)
                self._heard.starts[number] = start
        heard = self._heard
        self._wait(lambda: heard.newest_with(self._me) >= number or heard.status is not None)
        if heard.newest_with(self._me) < number:
            raise Over(self.lost or "", 1) if heard.status is None else Over("the job is over", heard.status)
        self._start = heard.starts[heard.newest_with(self._me)]
        return self._start

    @property
    def lost(self) -> str | None:
        """Why no further attempt makes sense, in words; None while there may be one."""
        return self._heard.lost

    def sockets(self) -> Sequence[Any]:
        """See `Others`."""
        lines = self._lines.sources()
        return lines if self._roster is None else [*lines, *self._roster.sources()]

    def poll(self, done: bool) -> bool:
        """See `Others`."""
        if done and self._me not in self._heard.ended[self._start.number]:
            self._end(None, well=True)
        self._listen(silent=self._options.elastic)  # of a fixed number, no one that stands still harms workers
        self._consider_growing()
        number = self._start.number
        return number in self._heard.alarms or self.lost is not None or bool(self._heard.gone[number]) or self.gently

    @property
    def gently(self) -> bool:
        """See `Others`."""
        return self._start.number in self._heard.regroups

    def waiting(self) -> bool:
        """See `Others`."""
        return not self._all_ended()

    def alarm(self) -> None:
        """See `Others`."""
        self._lines.tell({"alarm": self._start.number})

    def beat(self) -> None:
        """See `Others`."""
        self._lines.beat()

    def stopping(self) -> None:
        """See `Others`."""
        if self._options.elastic and self._me != 0:
            self._lines.tell({"leaving": self._start.number})

    def leave(self, why: str) -> None:
        """Tell the others that this launcher stops for good."""
        self._lines.tell({"leave": why})

    def over(self, status: int) -> None:
        """Node 0 tells those that wait for a place that there will be none."""
        if self._options.elastic and self._me == 0:
            self._lines.tell({"over": status})

    @property
    def decides(self) -> bool:
        """Whether this launcher says for itself if there is another attempt; where machines come and go, only node 0 does."""
        return self._me == 0 or not self._options.elastic

    @property
    def changed(self) -> bool:
        """Whether the next attempt has other machines than the one before."""
        if self._heard.gone[self._start.number] or self.gently:
            return True
        return self._roster is not None and self._roster.next_nodes(self._start.nodes) != self._start.nodes

    def send_away(self) -> bool:
        """Node 0: whether machines have to go because the first attempt with them has failed, and the others go on."""
        heard, number = self._heard, self._start.number
        if not self._manages or self.gently or heard.gone[number] or not any(heard.ended[number].values()):
            return False
        assert self._roster is not None
        for node in (away := self._roster.to_send_away(self._start.nodes)):
            why = f"the first attempt with node {node} has failed, and the others go on without it"
            self._roster.trial.send_away(node)
            self._drop(node, why, farewell={"leave": why})
        return bool(away)

    def verdict(self, failure: Failure | None, well: bool = False) -> Failure | None:
        """The root cause of a failed attempt, the same on every machine.

        Args:
          failure: what failed here first, if anything.
          well: whether all workers here have ended with 0.
        """
        self._end(failure, well)
        self._wait(self._all_ended)
        failures = [found for found in self._heard.ended[self._start.number].values() if found is not None]
        return root_cause(failures) if failures else None

    @property
    def finished_well(self) -> bool:
        """Whether the workers of every machine have ended with 0."""
        return set(self._start.nodes) <= self._heard.well[self._start.number]

    def _all_ended(self) -> bool:
        return self._heard.all_ended(self._start)

    def _finished(self) -> bool:
        """Whether all workers have ended, and none so that there will be another attempt."""
        failed = self._manages and any(self._heard.ended[self._start.number].values())
        return bool(self._start.nodes) and self._all_ended() and not failed

    def _end(self, failure: Failure | None, well: bool) -> None:
        said = {"ended": self._start.number, "node": self._me, "well": well, "failure": failure and asdict(failure)}
        self._heard.take(said)
        self._lines.tell(said)

    def _listen(self, silent: bool = True) -> None:
        """Take in what the others say; node 0 passes it on to the rest. `silent`: who stands still counts as gone."""
        for node, message in self._lines.hear():
            if self._manages and "leave" in message:
                self._drop(node, message["leave"])
            elif self._manages and "leaving" in message:
                self._regroup()
            else:
                self._heard.take(message)
                if "start" in message and self._me not in message["nodes"]:
                    print_note(f"attempt {message['start']} runs without node {self._me}, which waits for a place")
                if self._me == 0:
                    self._lines.tell(message, but=node)
        for node, why in [] if self._finished() else self._lines.dead(silent):
            if self._manages:
                self._drop(node, why)
            else:
                self._heard.lost = self.lost or why
        if self._gathering is not None:
            self._gathering.welcome()

    def _drop(self, node: int, why: str, farewell: dict | None = None) -> None:
        """Node 0: a machine that may go has gone."""
        assert self._roster is not None
        self._lines.drop(node, farewell)
        self._roster.drop(node)
        self._heard.take(message := {"gone": node, "why": why})
        self._lines.tell(message)

    def _regroup(self) -> None:
        """Node 0: all workers shall end by themselves, and start again on other machines."""
        self._heard.take(message := {"regroup": self._start.number})
        self._lines.tell(message)

    @property
    def _manages(self) -> bool:
        """Whether this is node 0 of machines that may come and go."""
        return self._roster is not None and self._options.elastic

    def _consider_growing(self) -> None:
        """Node 0: ask for another attempt when machines wait that could join, unless this one ends anyway."""
        roster, now = self._roster, self._start
        if roster is not None and not self._heard.ends(now.number) and roster.could_grow(now.nodes):
            self._regroup()

    def _wait(self, until: Callable[[], bool]) -> None:
        while not until() and self.lost is None:
            self._pause(self.sockets())
            self._listen()

    def _pause(self, sources: Sequence) -> None:
        readable([self._interrupts, *sources], _TICK)
        self._lines.beat()
        self._interrupts.drain()
        if self._interrupts.received:
            self.leave(f"the launcher of node {self._me} was stopped by {self._interrupts.received[0].name}")
            raise Stopped

    def _wait_for_enough(self, roster: Roster) -> None:
        """Node 0: wait until as many machines are there as there must be."""
        before, deadline = self._start.nodes, time.monotonic() + GATHER_TIMEOUT
        if few := roster.few(before):
            print_note(f"{few}: waiting up to {GATHER_TIMEOUT:g} s for others")
            self._wait(lambda: not roster.few(before) or time.monotonic() > deadline)
            if few := roster.few(before):
                self._heard.lost = self.lost or f"{few}: no other came within {GATHER_TIMEOUT:g} s"

    def _gather(self) -> None:
        """Node 0: wait for a call from every other launcher, or from enough of them, then tell all the sizes."""
        elastic, deadline = self._options.elastic, time.monotonic() + GATHER_TIMEOUT
        self._roster = Roster(self._options, self.sizes[0], self._token)
        self._gathering = gathering = Gathering(self._options, self._roster, self._lines)
        while gathering.waits and (time.monotonic() < deadline or not self._roster.few(())):
            self._pause(self.sockets())
            self._listen() if elastic else gathering.welcome()
        fault, self.sizes = gathering.end(GATHER_TIMEOUT), gathering.sizes
        if fault:
            self.over(1)
            refuse(self._options, fault)

    def _call(self) -> None:
        """Another node: find node 0's launcher."""
        size, patience = self.sizes[0], GATHER_TIMEOUT
        line, self.sizes = call(self._options, size, self._token, patience, self._pause)
        self._lines.add(0, line)
