"""The launchers of a job's machines in touch: they gather, agree on ranks and port, and share alarms and the verdict.

Node 0's launcher listens on the master port of the named address; the others call it. The workers' coordinator gets the
ports after that one, another at every attempt, so that nothing of a dead attempt can answer a new one.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict

from axonml_jax.launch.config.run_config import ConfigError
from axonml_jax.launch.processes.machines.connection import Connection, called
from axonml_jax.launch.processes.interrupts import Interrupts
from axonml_jax.launch.processes.launch_options import LaunchOptions
from axonml_jax.launch.processes.machines.news import is_answer, is_hello, is_news
from axonml_jax.launch.processes.post_mortem import root_cause
from axonml_jax.launch.processes.supervise import print_note
from axonml_jax.launch.processes.worker import Failure
from axonml_jax.mesh.job.callers import Callers, readable
from axonml_jax.mesh.job.coordinator import bind_address, listen
from axonml_jax.mesh.job.sealed import TOKEN, job_token

GATHER_TIMEOUT = 300.0
"""Seconds in which the launchers of all machines must be started."""

_SUBJECT = "launchers"
_TICK = 0.1
_SAME_TOKEN = f"has every machine the same {TOKEN}, or none?"


class Stopped(Exception):
    """A signal came while the launcher waited for others."""


class Nodes:
    """All launchers of a job, as one of them sees them. A context; entered once everybody has come.

    Args:
      options: of this launcher.
      local_size: its number of workers.
      interrupts: its signals.

    Attributes:
      sizes: the number of workers of every machine.
      lost: why no further attempt makes sense, in words; None while all launchers are there.
    """

    def __init__(self, options: LaunchOptions, local_size: int, interrupts: Interrupts):
        self.sizes = [local_size]
        self.lost: str | None = None
        self._options = options
        self._interrupts = interrupts
        self._me = options.node_rank
        self._token = job_token()
        self._opened: list[Connection] = []
        self._lines: dict[int, Connection] = {}
        # By attempt, because the others may be an attempt ahead of this launcher.
        self._attempt = 0
        self._alarms: set[int] = set()
        self._ended: defaultdict[int, dict[int, Failure | None]] = defaultdict(dict)
        self._ports: dict[int, int] = {}

    def __enter__(self) -> "Nodes":
        try:
            if self._options.nnodes > 1:
                self._gather() if self._me == 0 else self._call()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        for line in self._opened:
            line.close()

    def start(self, restarts: int, port: int) -> int:
        """The port of an attempt's coordinator: node 0's choice, heard by all."""
        self._attempt = restarts
        if self._me == 0:
            self._ports[restarts] = port
            self._tell({"start": restarts, "port": port})
        self._wait(lambda: restarts in self._ports)
        return self._ports.get(restarts, port)

    def sockets(self) -> Sequence[Connection]:
        """See `Others`."""
        return [line for line in self._lines.values() if not line.cut]

    def poll(self, done: bool) -> bool:
        """See `Others`."""
        if done and self._me not in self._ended[self._attempt]:
            self._end(None)
        self._listen()
        return self._attempt in self._alarms or self.lost is not None

    def waiting(self) -> bool:
        """See `Others`."""
        return not self._all_ended()

    def alarm(self) -> None:
        """See `Others`."""
        self._tell({"alarm": self._attempt})

    def leave(self, why: str) -> None:
        """Tell the others that this launcher stops for good."""
        self._tell({"leave": why})

    def verdict(self, failure: Failure | None) -> Failure | None:
        """The root cause of a failed attempt, the same on every machine.

        Args:
          failure: what failed here first, if anything.
        """
        self._end(failure)
        self._wait(self._all_ended)
        failures = [found for found in self._ended[self._attempt].values() if found is not None]
        return root_cause(failures) if failures else None

    def _all_ended(self) -> bool:
        return len(self._ended[self._attempt]) == self._options.nnodes

    def _end(self, failure: Failure | None) -> None:
        self._ended[self._attempt][self._me] = failure
        self._tell({"ended": self._attempt, "node": self._me, "failure": failure and asdict(failure)})

    def _tell(self, message: dict, but: int | None = None) -> None:
        for node, line in self._lines.items():
            if node != but:
                line.send(message)

    def _listen(self) -> None:
        """Take in what the others say; node 0 passes it on to the rest."""
        for node, line in self._lines.items():
            for message in line.messages():
                if not is_news(message, self._options.nnodes):
                    print_note(
                        f"ignored what the launcher of node {node} said, which no launcher says: {list(message)[:5]}"
                    )
                    continue
                self._take(message)
                if self._me == 0:
                    self._tell(message, but=node)
            if line.cut and not self._all_ended():
                self.lost = (
                    self.lost or f"the launcher of node {node} has gone without a word: killed, or its machine lost"
                )

    def _take(self, message: dict) -> None:
        if "alarm" in message:
            self._alarms.add(message["alarm"])
        elif "ended" in message:
            failure = message["failure"]
            lines = {"lines": tuple(failure["lines"])} if failure else {}
            self._ended[message["ended"]][message["node"]] = failure and Failure(**failure | lines)
        elif "leave" in message:
            self.lost = self.lost or message["leave"]
        elif "start" in message:
            self._ports[message["start"]] = message["port"]

    def _wait(self, until: Callable[[], bool]) -> None:
        while not until() and self.lost is None:
            self._pause(self.sockets())
            self._listen()

    def _pause(self, sources: Sequence) -> None:
        readable([self._interrupts, *sources], _TICK)
        self._interrupts.drain()
        if self._interrupts.received:
            self.leave(f"the launcher of node {self._me} was stopped by {self._interrupts.received[0].name}")
            raise Stopped

    def _gather(self) -> None:
        """Node 0: wait for a call from every other launcher, then tell all the sizes."""
        options = self._options
        sizes, fault, deadline = {0: self.sizes[0]}, "", time.monotonic() + GATHER_TIMEOUT
        address = bind_address(f"{options.master_addr}:{options.master_port}")
        with (
            listen(*address, options.nnodes) as server,
            closing(Callers(server, self._token, _SUBJECT, is_hello)) as callers,
        ):
            while len(sizes) < options.nnodes and not fault and time.monotonic() < deadline:
                self._pause(callers.sources())
                for connection, talk, hello in callers.pump():
                    self._opened.append(line := Connection(connection, talk))
                    fault = fault or self._fault(hello, sizes)
                    sizes[hello["node"]], self._lines[hello["node"]] = hello["size"], line
        if missing := sorted(set(range(options.nnodes)) - set(sizes)):
            fault = fault or f"node(s) {missing} never called within {GATHER_TIMEOUT:g} s"
        self.sizes = [sizes.get(node, 0) for node in range(options.nnodes)]
        for line in self._opened:
            line.send({"sizes": self.sizes, "fault": fault})
        self._refuse(fault)

    def _fault(self, hello: dict, sizes: dict[int, int]) -> str:
        node, options = hello["node"], self._options
        if node in sizes:
            return f"two launchers have --node-rank {node}"
        ours = {"nnodes": options.nnodes, "max-restarts": options.max_restarts}
        return ", ".join(
            f"--{name} is {hello[name]} on node {node} and {value} on node 0"
            for name, value in ours.items()
            if hello[name] != value
        )

    def _call(self) -> None:
        """Another node: find node 0's launcher, say who this is, hear what it says."""
        options, deadline = self._options, time.monotonic() + GATHER_TIMEOUT
        line = self._find_node_0(deadline)
        self._opened, self._lines = [line], {0: line}
        line.send(
            {"node": self._me, "size": self.sizes[0], "nnodes": options.nnodes, "max-restarts": options.max_restarts}
        )
        while not (answers := line.messages()):
            if line.cut or time.monotonic() > deadline + GATHER_TIMEOUT:
                self._refuse(f"the launcher of node 0 {'hung up' if line.cut else 'was silent'}; {_SAME_TOKEN}")
            self._pause([line])
        if not is_answer(answers[0], options.nnodes):
            self._refuse(f"something that is no launcher answers there; {_SAME_TOKEN}")
        self._refuse(answers[0]["fault"])
        self.sizes = answers[0]["sizes"]
        for message in answers[1:]:
            if is_news(message, options.nnodes):
                self._take(message)

    def _find_node_0(self, deadline: float) -> Connection:
        place = (self._options.master_addr.strip("[]"), self._options.master_port or 0)
        while True:
            try:
                return called(place, self._token, _SUBJECT)
            except OSError as error:
                if time.monotonic() > deadline:
                    self._refuse(f"node 0's launcher did not answer within {GATHER_TIMEOUT:g} s ({error})")
            self._pause([])

    def _refuse(self, fault: str) -> None:
        if fault:
            options = self._options
            raise ConfigError(
                f"launch: node {self._me} of {options.nnodes} at {options.master_addr}:{options.master_port}: {fault}. Start "
                "one launcher per machine, all with the same --nnodes, --master-addr and --master-port, --node-rank from 0"
            )
