"""Where launchers meet: node 0's listens on the master port, the others call there and say who they are."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any, NoReturn

from axonml_jax.launch.config.run_config import ConfigError
from axonml_jax.launch.processes.launch_options import LaunchOptions
from axonml_jax.launch.processes.machines.connection import Connection, called
from axonml_jax.launch.processes.machines.news import is_answer, is_hello
from axonml_jax.launch.processes.machines.same_run import likeness, unlike
from axonml_jax.mesh.job.callers import Callers
from axonml_jax.mesh.job.coordinator import bind_address, listen, unresolved
from axonml_jax.mesh.job.sealed import TOKEN

SUBJECT = "launchers"
"""What launchers talk about."""

_SAME_TOKEN = f"has every machine the same {TOKEN}, or none?"


class Door:
    """Node 0's listening socket; close it when nobody else is expected.

    Args:
      options: of node 0's launcher.
      size: its number of workers.
      token: the job's.
    """

    def __init__(self, options: LaunchOptions, size: int, token: bytes):
        self._options, self._size, self._likeness = options, size, likeness(options, token)
        with ExitStack() as stack:
            address = bind_address(f"{options.master_addr}:{options.master_port}")
            server = stack.enter_context(listen(*address, options.nnodes))
            self._callers = stack.enter_context(closing(Callers(server, token, SUBJECT, is_hello)))
            self.close: Callable[[], None] = stack.pop_all().close

    def sources(self) -> Sequence[Any]:
        """What to select on."""
        return self._callers.sources()

    def pump(self, taken: Collection[int]) -> Iterator[tuple[int, int, Connection, str]]:
        """Who has called: its node, its number of workers, the line to it, and what is wrong with it, if anything.

        Args:
          taken: nodes that have called before.
        """
        for connection, talk, hello in self._callers.pump():
            yield hello["node"], hello["size"], Connection(connection, talk), self._fault(hello, taken)

    def _fault(self, hello: dict, taken: Collection[int]) -> str:
        node, here, there = hello["node"], _flags(settings(self._options)), _flags(hello)
        if node in taken:
            return f"two launchers have --node-rank {node}"
        if self._options.elastic:
            here["nproc-per-node"], there["nproc-per-node"] = self._size, hello["size"]
        found = [
            f"--{name} is {there[name]} on node {node} and {value} on node 0"
            for name, value in here.items()
            if there[name] != value
        ]
        return ", ".join([*found, *(unlike(hello, self._likeness, node) if self._options.elastic else [])])


def settings(options: LaunchOptions) -> dict[str, int]:
    """What all launchers must be told alike."""
    return {
        "nnodes": options.nnodes,
        "min-nodes": options.min_nodes,
        "node-unit": options.node_unit,
        "max-restarts": options.max_restarts,
    }


def _flags(said: dict) -> dict:
    """Settings as flags say them."""
    smallest, largest = said["min-nodes"], said["nnodes"]
    counts = largest if smallest == largest else f"{smallest}:{largest}"
    return {"nnodes": counts, "node-unit": said["node-unit"], "max-restarts": said["max-restarts"]}


def call(
    options: LaunchOptions, size: int, token: bytes, patience: float, pause: Callable[[Sequence[Any]], None]
) -> tuple[Connection, list[int]]:
    """Another node: find node 0's launcher, say who this is, hear what it says.

    Args:
      options: of this launcher.
      size: its number of workers.
      token: the job's.
      patience: seconds to wait for node 0.
      pause: waits a moment for some sources.

    Returns:
      The line to node 0, and the sizes of all nodes (0: not there).

    Raises:
      ConfigError: when node 0 is not there, or does not want this one.
    """
    deadline = time.monotonic() + patience
    line = _find_node_0(options, token, deadline, patience, pause)
    try:
        line.send({"node": options.node_rank, "size": size, **settings(options), **likeness(options, token)})
        while not (answers := line.messages()):
            if line.cut or time.monotonic() > deadline + patience:
                refuse(options, f"the launcher of node 0 {'hung up' if line.cut else 'was silent'}; {_SAME_TOKEN}")
            pause([line])
        if not is_answer(answers[0], options.nnodes):
            refuse(options, f"something that is no launcher answers there; {_SAME_TOKEN}")
        if answers[0]["fault"]:
            refuse(options, answers[0]["fault"])
    except BaseException:
        line.close()
        raise
    line.put_back(answers[1:])
    return line, answers[0]["sizes"]


def _find_node_0(
    options: LaunchOptions, token: bytes, deadline: float, patience: float, pause: Callable[[Sequence[Any]], None]
) -> Connection:
    place = (options.master_addr.strip("[]"), options.master_port or 0)
    while True:
        try:
            return called(place, token, SUBJECT)
        except OSError as error:
            if time.monotonic() > deadline:
                why = unresolved(place[0]) or error
                refuse(options, f"node 0's launcher did not answer within {patience:g} s ({why})")
        pause([])


def refuse(options: LaunchOptions, fault: str) -> NoReturn:
    """Say what is wrong with the gathering.

    Raises:
      ConfigError: always.
    """
    raise ConfigError(
        f"launch: node {options.node_rank} of {options.nnodes} at {options.master_addr}:{options.master_port}: {fault}. Start "
        "one launcher per machine, all with the same --nnodes, --master-addr and --master-port, --node-rank from 0"
    )
