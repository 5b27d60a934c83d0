"""The launchers of a job's machines: how they gather, communicate, and form the next world."""

import hashlib
import hmac
import math
import selectors
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from axonml_jax.config.config import ConfigError
from axonml_jax.launch.options import LaunchOptions
from axonml_jax.launch.workers import Failure, Interrupts, print_note, root_cause
from axonml_jax.mesh.join import (
    TOKEN,
    Callers,
    Talk,
    bind_address,
    greet,
    is_count,
    job_token,
    listen,
    readable,
    unresolved,
)

# --------------------------------------------------------------------------------------------------
# Whole JSON messages between two launchers over one TCP connection.
# --------------------------------------------------------------------------------------------------

SILENCE = 30.0
"""Seconds without a byte after which the other launcher counts as stopped; a running one sends something every second."""

_BEAT = 1.0
_CALL_TIMEOUT = 5.0
_SEND_TIMEOUT = 5.0
# The last lines of a failed worker's output are the longest message.
_LONGEST_MESSAGE = 2**26
# A machine that loses its power or its network says nothing: found out in about ten seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


class Connection:
    """One end of a connection between launchers.

    Args:
      connection: a connected socket, which `close` closes.
      talk: the talk after the greetings; a message without its seal cuts the connection.

    Attributes:
      cut: whether the connection is over: the other end has gone, or has sent what no launcher sends.
    """

    def __init__(self, connection: socket.socket, talk: Talk):
        self.cut = False
        self._connection = connection
        self._talk = talk
        self._part = bytearray()
        self._unread: list[dict] = []
        self._said = self._heard = time.monotonic()
        connection.settimeout(_SEND_TIMEOUT)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """The file descriptor to select on."""
        return self._connection.fileno()

    def send(self, message: dict) -> None:
        """Send a message; it is lost if the connection is cut, and cuts it if the other end does not take it in 5 s."""
        self._said = time.monotonic()
        try:
            self._connection.sendall(self._talk.sealed(message))
        except OSError:
            self.cut = True

    def beat(self) -> None:
        """Send a heartbeat once a second, and read what the other end has sent."""
        self._receive()
        if not self.cut and time.monotonic() - self._said > _BEAT and self._has_room():
            self.send({})

    @property
    def silent(self) -> bool:
        """Whether the other end has sent nothing for `SILENCE` seconds."""
        return time.monotonic() - self._heard > SILENCE

    def messages(self) -> list[dict]:
        """The messages that have arrived since the last call, without waiting."""
        self._receive()
        *whole, rest = self._part.split(b"\n")
        self._part = bytearray(rest)
        messages = [self._talk.opened(bytes(text)) for text in whole]
        self.cut = self.cut or None in messages  # a message without the seal
        unread, self._unread = self._unread, []
        return unread + [message for message in messages if message]

    def put_back(self, messages: list[dict]) -> None:
        """Make the next call of `messages` return these first."""
        self._unread = messages

    def _receive(self) -> None:
        while not self.cut and readable([self._connection], 0):
            try:
                chunk = self._connection.recv(2**16)
            except OSError:
                chunk = b""
            self.cut = not chunk
            self._part += chunk
            self.cut = self.cut or len(self._part) > _LONGEST_MESSAGE
            self._heard = time.monotonic()

    def _has_room(self) -> bool:
        """Whether the socket accepts data without waiting; that of a stalled launcher does not."""
        with selectors.PollSelector() as selector:
            selector.register(self._connection, selectors.EVENT_WRITE)
            return bool(selector.select(0))

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
        self.cut = True


def called(place: tuple[str, int], token: bytes, subject: str) -> Connection:
    """Connect to a listening launcher, and exchange greetings.

    Raises:
      OSError: when nobody listens there, or what answers is no launcher.
    """
    connection = socket.create_connection(place, timeout=_CALL_TIMEOUT)
    try:
        return Connection(connection, greet(connection, token, subject))
    except BaseException:
        connection.close()
        raise


# --------------------------------------------------------------------------------------------------
# What launchers may say to each other, checked when it is received: types, ranges, and the nodes of the job.
# --------------------------------------------------------------------------------------------------

_PORTS = (1, 65536)
_STATUS = (0, 256)
_LONGEST_NEWS = 300


def is_hello(message: dict) -> bool:
    """Whether a message is a valid introduction of a launcher on a node other than 0."""
    known = {"node", "size", "nnodes", "min-nodes", "node-unit", "max-restarts", "program", "arguments", "versions"}
    return (
        message.keys() == known
        and is_count(message["nnodes"], 2)
        and is_count(message["min-nodes"], 1, message["nnodes"] + 1)
        and is_count(message["node-unit"], 1)
        and is_count(message["node"], 1, message["nnodes"])
        and is_count(message["size"], 1)
        and is_count(message["max-restarts"])
        and all(_is_text(message[name]) for name in ("program", "arguments", "versions"))
    )


def is_answer(message: dict, nnodes: int) -> bool:
    """Whether a message is node 0's answer to a gathering: the sizes of all nodes (0: missing), and what was wrong."""
    sizes, fault = message.get("sizes"), message.get("fault")
    if not isinstance(fault, str) or not isinstance(sizes, list):
        return False
    return bool(fault) or (len(sizes) == nnodes and all(is_count(size) for size in sizes))


def is_news(message: dict, nnodes: int) -> bool:
    """Whether a message is one that launchers exchange while workers run."""
    kinds: dict[str, Callable[[], bool]] = {
        "alarm": lambda: is_count(message["alarm"]),
        "start": lambda: (
            is_count(message["start"]) and is_count(message.get("port"), *_PORTS) and _is_world(message, nnodes)
        ),
        "leave": lambda: isinstance(message["leave"], str),
        "leaving": lambda: is_count(message["leaving"]),
        "regroup": lambda: is_count(message["regroup"]),
        "gone": lambda: is_count(message["gone"], 0, nnodes) and isinstance(message.get("why"), str),
        "over": lambda: is_count(message["over"], *_STATUS),
        "ended": lambda: (
            is_count(message["ended"])
            and is_count(message.get("node"), 0, nnodes)
            and isinstance(message.get("well"), bool)
            and (message.get("failure", False) is None or _is_failure(message.get("failure")))
        ),
    }
    return any(kind in message and check() for kind, check in kinds.items())


def _is_text(given: object) -> bool:
    """Whether a value is a short printable text."""
    return isinstance(given, str) and len(given) <= _LONGEST_NEWS and given.isprintable()


def _is_world(message: dict, nnodes: int) -> bool:
    nodes, sizes = message.get("nodes"), message.get("sizes")
    return (
        isinstance(nodes, list)
        and isinstance(sizes, list)
        and len(nodes) == len(sizes) > 0
        and all(is_count(node, 0, nnodes) for node in nodes)
        and len(set(nodes)) == len(nodes)
        and all(is_count(size, 1) for size in sizes)
    )


def _is_failure(given: object) -> bool:
    if not isinstance(given, dict) or given.keys() != {field.name for field in fields(Failure)}:
        return False
    lines = given["lines"]
    return (
        all(is_count(given[name], low) for name, low in (("rank", 0), ("pid", 0), ("returncode", -1024)))
        and isinstance(given["host"], str)
        and isinstance(given["seconds"], int | float)
        and isinstance(lines, list)
        and all(isinstance(line, str) for line in lines)
    )


# --------------------------------------------------------------------------------------------------
# Digests of what a machine's workers would run, which node 0 compares before it lets a machine in.
#
# A machine that joins a running job ends the attempt under way. One that would run something else would end it for nothing.
# --------------------------------------------------------------------------------------------------

_PACKAGES = ("axonml_jax", "jax", "jaxlib", "flax", "optax")
_CONFIGURATIONS = (".yaml", ".yml", ".json", ".toml")
_LARGEST = 2**20
_WORDS = {
    "program": "its script or module is another one than on node 0",
    "arguments": "its arguments, or a configuration that they name, are others than on node 0",
}


def likeness(options: LaunchOptions, token: bytes) -> dict[str, str]:
    """What must be equal on all machines that come and go: digests of program and arguments, and versions.

    A script and the configurations among the arguments count by what they hold, not by where they are.

    Args:
      options: of this launcher.
      token: the job's; it keys the digests, so that nobody else can test guesses of the arguments.
    """
    script = b"" if options.module else _held_by(options.target)
    program = [b"module" if options.module else b"script", script or options.target.encode()]
    arguments = [_configuration(each) or each.encode() for each in options.arguments]
    return {
        "program": _digest(token, program),
        "arguments": _digest(token, arguments),
        "versions": f"Python {sys.version_info[0]}.{sys.version_info[1]}, {', '.join(map(_installed, _PACKAGES))}",
    }


def unlike(there: Mapping[str, str], here: Mapping[str, str], node: int) -> list[str]:
    """Describe what on a machine differs from node 0.

    >>> one = {"program": "1", "arguments": "2", "versions": "jax 0.10.2"}
    >>> unlike(one, one, 3), unlike(one | {"program": "4"}, one, 3)
    ([], ['its script or module is another one than on node 0'])
    >>> unlike(one | {"versions": "jax 0.12.0"}, one, 3)
    ['it has jax 0.12.0 on node 3 and jax 0.10.2 on node 0']

    Args:
      there, here: `likeness` on that machine and on node 0.
      node: that machine's number.
    """
    found = [words for name, words in _WORDS.items() if there[name] != here[name]]
    if there["versions"] != here["versions"]:
        found.append(f"it has {there['versions']} on node {node} and {here['versions']} on node 0")
    return found


def _digest(token: bytes, parts: list[bytes]) -> str:
    found = hmac.new(token, digestmod=hashlib.sha256)
    for part in parts:
        found.update(b"%d " % len(part) + part)
    return found.hexdigest()


def _configuration(argument: str) -> bytes:
    """An argument's flag and the content of the configuration file that it names; empty if it names none."""
    flag, equals, path = argument.rpartition("=")
    held = _held_by(path) if Path(path).suffix in _CONFIGURATIONS else b""
    return (flag + equals).encode() + held if held else b""


def _held_by(path: str) -> bytes:
    try:
        given = Path(path)
        return given.read_bytes() if given.is_file() and given.stat().st_size <= _LARGEST else b""
    except OSError:  # whoever runs it will say so
        return b""


def _installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


# --------------------------------------------------------------------------------------------------
# An attempt of several machines, as node 0 announces it; and exceptions for when there is none.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """The start of an attempt: its number, port, nodes and sizes.

    Attributes:
      number: attempts before this one.
      port: where its coordinator listens.
      nodes: the machines that belong to it, in the order of their ranks.
      sizes: their numbers of workers, in the same order.
    """

    number: int
    port: int
    nodes: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def message(self) -> dict:
        """The start as a message.

        >>> start = Start(1, 29502, (0, 2), (4, 4))
        >>> Start.of(start.message) == start
        True
        """
        return {"start": self.number, "port": self.port, "nodes": list(self.nodes), "sizes": list(self.sizes)}

    @staticmethod
    def of(message: dict) -> "Start":
        """The inverse of `message`."""
        return Start(message["start"], message["port"], tuple(message["nodes"]), tuple(message["sizes"]))


class Stopped(Exception):
    """Raised when a signal comes while the launcher waits for others."""


class Over(Exception):
    """Raised when no further attempt is made: the reason, and the launcher's exit status as `status`."""

    def __init__(self, why: str, status: int):
        super().__init__(why)
        self.status = status


# --------------------------------------------------------------------------------------------------
# Which machines make up the next world, when some have gone and others have come: pure rules, without a socket.
# --------------------------------------------------------------------------------------------------


def regrouped(before: Sequence[int], present: Collection[int], unit: int = 1) -> tuple[int, ...]:
    """Choose the machines of the next world, in the order of their ranks.

    Machines form groups of `unit`, each of which holds whole replicas of the model. A machine keeps its place within a
    group, because the parts of the state that it has in memory belong there; others fill the places of those that have gone.
    Machines that do not fill another group are left out.

    >>> regrouped([0, 1, 2], [0, 2])  # 1 has gone
    (0, 2)
    >>> regrouped([0, 2], [0, 1, 2, 3])  # 1 and 3 have come
    (0, 2, 1, 3)
    >>> regrouped([0, 1, 2, 3], [0, 2, 3], 2)  # 3 has what 1 had: 2 waits
    (0, 3)
    >>> regrouped([0, 3], [0, 1, 2, 3], 2)
    (0, 3, 1, 2)

    Args:
      before: the machines of the world before, in its order; none at the beginning.
      present: the machines that are there.
      unit: how many make up a group.
    """
    groups = len(present) // unit
    columns = [[node for node in before[place::unit] if node in present] for place in range(unit)]
    kept = [column[:groups] for column in columns]
    placed = {node for column in kept for node in column}
    others = iter([*(node for node in before if node in present and node not in placed), *_new(before, present)])
    return tuple(
        kept[place][group] if group < len(kept[place]) else next(others)
        for group in range(groups)
        for place in range(unit)
    )


def changes(before: Sequence[int], now: Sequence[int]) -> str:
    """Describe how the machines changed between two worlds.

    >>> changes([0, 1, 2], [0, 2]), changes([0, 2], [0, 2, 1])
    ('without node(s) [1]', 'with node(s) [1]')
    """
    gone, come = sorted(set(before) - set(now)), sorted(set(now) - set(before))
    words = [f"{how} node(s) {nodes}" for how, nodes in (("without", gone), ("with", come)) if nodes]
    return " and ".join(words) or "with the same machines"


def _new(before: Sequence[int], present: Collection[int]) -> list[int]:
    return sorted(set(present) - set(before))


# --------------------------------------------------------------------------------------------------
# The first attempt with new machines: if it fails soon, the others go on without them.
# --------------------------------------------------------------------------------------------------

TRIAL = 1800.0
"""Seconds from the start of an attempt in which a failure is blamed on the machines that are new in it.

It is long because programs may compile for long before their first step, and launchers see no steps.
"""


class Trial:
    """Node 0's record of a new attempt, and of the machines that were sent away after one failed."""

    def __init__(self):
        self._new: tuple[int, ...] = ()
        self._began = 0.0
        self._away: dict[int, float] = {}

    def begin(self, before: Collection[int], now: Sequence[int]) -> None:
        """Note the start of an attempt, and which machines are new in it.

        Args:
          before: the machines of the attempt before; none at the first.
          now: its machines.
        """
        self._new = tuple(node for node in now if before and node not in before)
        self._began = time.monotonic()

    @property
    def blamed(self) -> tuple[int, ...]:
        """The machines that are new in the attempt, while it is younger than `TRIAL`."""
        return self._new if time.monotonic() - self._began < TRIAL else ()

    def send_away(self, node: int) -> None:
        """Note that a machine is sent away because the attempt has failed."""
        self._away[node] = time.monotonic()

    def fault(self, node: int) -> str:
        """Returns why a calling machine is not accepted yet; empty if it is."""
        left = self._away[node] + TRIAL - time.monotonic() if node in self._away else 0.0
        if left <= 0:
            return ""
        return (
            f"the first attempt with node {node} failed, and the others went on without it; it may come again in {left:.0f} s, "
            "or at once with a --node-rank that is free"
        )


# --------------------------------------------------------------------------------------------------
# The connections of one launcher to others of its job.
# --------------------------------------------------------------------------------------------------


class Lines:
    """The connections to other nodes, one each.

    Args:
      nnodes: the largest number of machines of the job, by which messages are checked.
    """

    def __init__(self, nnodes: int):
        self._nnodes = nnodes
        self._lines: dict[int, Connection] = {}

    def add(self, node: int, line: Connection) -> None:
        """Add the connection of a node."""
        self._lines[node] = line

    def drop(self, node: int, farewell: dict | None = None) -> None:
        """Close a node's connection, after a farewell if one is given; does nothing if it is closed already."""
        if (line := self._lines.pop(node, None)) is not None:
            if farewell is not None:
                line.send(farewell)
            line.close()

    def sources(self) -> Sequence[Connection]:
        """The connections to select on."""
        return [line for line in self._lines.values() if not line.cut]

    def tell(self, message: dict, but: int | None = None) -> None:
        """Send a message to all nodes but one."""
        for node, line in self._lines.items():
            if node != but:
                line.send(message)

    def beat(self) -> None:
        """Send a heartbeat to all."""
        for line in self._lines.values():
            line.beat()

    def hear(self) -> list[tuple[int, dict]]:
        """The messages that have arrived since the last call; invalid ones are reported and ignored."""
        heard = []
        for node, line in self._lines.items():
            for message in line.messages():
                if is_news(message, self._nnodes):
                    heard.append((node, message))
                else:
                    said = list(message)[:5]
                    print_note(f"ignored what the launcher of node {node} said, which no launcher says: {said}")
        return heard

    def dead(self, silent: bool = True) -> list[tuple[int, str]]:
        """The nodes whose connection is cut or silent, each with a description.

        Args:
          silent: whether silent launchers count too.
        """
        cut = "has gone without a word: killed, or its machine lost"
        still = f"has said nothing for {SILENCE:g} s: it was stopped, or nobody reads its output"
        return [
            (node, f"the launcher of node {node} {cut if line.cut else still}")
            for node, line in self._lines.items()
            if line.cut or (silent and line.silent)
        ]

    def close(self) -> None:
        """Close all connections."""
        for line in self._lines.values():
            line.close()


# --------------------------------------------------------------------------------------------------
# Where launchers meet: node 0's listens on the master port, the others connect to it and introduce themselves.
# --------------------------------------------------------------------------------------------------

SUBJECT = "launchers"
"""The subject of launchers' talks, which keeps them apart from other talks under the same token (see `Talk`)."""

_SAME_TOKEN = f"has every machine the same {TOKEN}, or none?"


class Door:
    """Node 0's listening socket.

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
        """The sockets to select on."""
        return self._callers.sources()

    def pump(self, taken: Collection[int]) -> Iterator[tuple[int, int, Connection, str]]:
        """Yield for each caller its node, its number of workers, its connection, and what is wrong with it, if anything.

        Args:
          taken: nodes that are present.
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
    """The settings that all launchers must share."""
    return {
        "nnodes": options.nnodes,
        "min-nodes": options.min_nodes,
        "node-unit": options.node_unit,
        "max-restarts": options.max_restarts,
    }


def _flags(said: dict) -> dict:
    """Settings as they are written in flags."""
    smallest, largest = said["min-nodes"], said["nnodes"]
    counts = largest if smallest == largest else f"{smallest}:{largest}"
    return {"nnodes": counts, "node-unit": said["node-unit"], "max-restarts": said["max-restarts"]}


def call(
    options: LaunchOptions, size: int, token: bytes, patience: float, pause: Callable[[Sequence[Any]], None]
) -> tuple[Connection, list[int]]:
    """From another node: find node 0's launcher, introduce this one, and wait for its answer.

    Args:
      options: of this launcher.
      size: its number of workers.
      token: the job's.
      patience: seconds to wait for node 0, and as many again for its answer.
      pause: waits a moment for some sources.

    Returns:
      The connection to node 0, and the sizes of all nodes (0: not there).

    Raises:
      ConfigError: when node 0 is not there, or refuses this node.
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
    """Raise a ConfigError that says what is wrong with the gathering.

    Raises:
      ConfigError: always.
    """
    raise ConfigError(
        f"launch: node {options.node_rank} of {options.nnodes} at {options.master_addr}:{options.master_port}: {fault}. Start "
        "one launcher per machine, all with the same --nnodes, --master-addr and --master-port, --node-rank from 0"
    )


# --------------------------------------------------------------------------------------------------
# What the launchers of a job have announced, by attempt, because others may be an attempt ahead of this launcher.
# --------------------------------------------------------------------------------------------------


class Heard:
    """What the launchers have announced so far.

    Attributes:
      starts: the attempts that node 0 has announced.
      alarms: attempts in which a worker has failed.
      regroups: attempts that shall end because machines come or go.
      ended: by attempt and node, what failed there first when all workers had ended.
      well: by attempt, the machines on which all workers have ended with 0.
      gone: by attempt, the machines that have left it.
      lost: why no further attempt is possible, in words; None while one is.
      status: the job's exit status, for launchers that wait for a place in it; None while it goes on.
    """

    def __init__(self):
        self.starts: dict[int, Start] = {}
        self.alarms: set[int] = set()
        self.regroups: set[int] = set()
        self.ended: defaultdict[int, dict[int, Failure | None]] = defaultdict(dict)
        self.well: defaultdict[int, set[int]] = defaultdict(set)
        self.gone: defaultdict[int, set[int]] = defaultdict(set)
        self.lost: str | None = None
        self.status: int | None = None

    def take(self, message: dict) -> None:
        """Record a message for which `is_news` holds."""
        if "alarm" in message:
            self.alarms.add(message["alarm"])
        elif "ended" in message:
            failure = message["failure"]
            lines = {"lines": tuple(failure["lines"])} if failure else {}
            self.ended[message["ended"]][message["node"]] = failure and Failure(**failure | lines)
            if message["well"]:
                self.well[message["ended"]].add(message["node"])
        elif "leave" in message:
            self.lost = self.lost or message["leave"]
        elif "start" in message:
            self.starts[message["start"]] = Start.of(message)
        elif "regroup" in message:
            self.regroups.add(message["regroup"])
        elif "gone" in message:
            print_note(message["why"])
            newest = max(self.starts, default=None)
            if newest is not None and message["gone"] in self.starts[newest].nodes:
                self.gone[newest].add(message["gone"])
        elif "over" in message:
            self.status = message["over"]

    def newest_with(self, node: int) -> int:
        """The newest attempt that includes a node; -1 if there is none."""
        return max((number for number, start in self.starts.items() if node in start.nodes), default=-1)

    def ends(self, number: int) -> bool:
        """Whether an attempt is about to end: a worker has failed or ended, or machines come or go."""
        return bool(number in self.regroups | self.alarms or self.gone[number] or self.ended[number])

    def all_ended(self, start: Start) -> bool:
        """Whether the workers of all machines left in an attempt have ended."""
        return set(start.nodes) - self.gone[start.number] <= self.ended[start.number].keys()


# --------------------------------------------------------------------------------------------------
# Node 0's list of the machines that are present, and which of them make up the next world.
# --------------------------------------------------------------------------------------------------


class Roster:
    """The machines that are present; node 0 listens for the others until `close`.

    Args:
      options: of node 0's launcher.
      size: its number of workers.
      token: the job's.

    Attributes:
      sizes: numbers of workers of the machines that are present, by node.
      trial: the record of the machines that are new in the current attempt.
    """

    def __init__(self, options: LaunchOptions, size: int, token: bytes):
        self.sizes = {0: size}
        self.trial = Trial()
        self._options = options
        self._door: Door | None = Door(options, size, token)
        self._newest = time.monotonic()

    def sources(self) -> Sequence[Any]:
        """The sockets to select on."""
        return [] if self._door is None else self._door.sources()

    def hear(self) -> list[tuple[int, Connection, str]]:
        """Process callers: their node, connection and fault; one without a fault is present from now on."""
        heard = []
        for node, size, line, fault in () if self._door is None else self._door.pump(self.sizes):
            fault = fault or self.trial.fault(node)
            if not fault:
                self.sizes[node], self._newest = size, time.monotonic()
            heard.append((node, line, fault))
        return heard

    def drop(self, node: int) -> None:
        """Remove a machine that has gone."""
        self.sizes.pop(node, None)

    def next_nodes(self, before: Sequence[int]) -> tuple[int, ...]:
        """Returns the machines of the next world, after one with the machines `before`."""
        return regrouped(before, self.sizes, self._options.node_unit)

    def few(self, before: Sequence[int]) -> str:
        """Returns why the machines that are present are too few for a world; empty if they are enough."""
        options, count = self._options, len(self.next_nodes(before))
        if count >= options.min_nodes:
            return ""
        unit = f" in groups of {options.node_unit}" if options.node_unit > 1 else ""
        return f"{len(self.sizes)} machine(s) are there, and --nnodes asks for {options.min_nodes}{unit}"

    def could_grow(self, before: Sequence[int]) -> bool:
        """Whether waiting machines would make a larger world, and no more machines are waited for."""
        return len(self.next_nodes(before)) > len(before) and self.settled

    def to_send_away(self, before: Sequence[int]) -> tuple[int, ...]:
        """The new machines to exclude because the first attempt with them failed; empty if the others are too few."""
        blamed, options = self.trial.blamed, self._options
        others = regrouped(before, self.sizes.keys() - set(blamed), options.node_unit)
        return blamed if len(others) >= options.min_nodes else ()

    @property
    def settled(self) -> bool:
        """Whether no more machines are waited for: all are present, or none has come for `--last-call` seconds."""
        if len(self.sizes) == self._options.nnodes:
            return True
        return self._options.elastic and time.monotonic() > self._newest + self._options.last_call

    def close(self) -> None:
        """Stop listening."""
        if self._door is not None:
            self._door.close()
            self._door = None


# --------------------------------------------------------------------------------------------------
# The callers that node 0 lets in: it answers at once if machines come and go, else when all have called.
# --------------------------------------------------------------------------------------------------


class Gathering:
    """Answers the callers of node 0: before the first attempt and, if machines come and go, later too.

    Args:
      options: of its launcher.
      roster: its list of the machines that are present.
      lines: get the connections of those that are let in.
    """

    def __init__(self, options: LaunchOptions, roster: Roster, lines: Lines):
        self._options, self._roster, self._lines = options, roster, lines
        self._refused: list[Connection] = []  # if all nodes must come, they are answered when all are
        self._fault = ""

    @property
    def waits(self) -> bool:
        """Whether the first attempt still waits for other machines."""
        return (not self._roster.settled or bool(self._roster.few(()))) and not self._fault

    @property
    def sizes(self) -> list[int]:
        """The number of workers of each node; 0 for nodes that have not called."""
        return [self._roster.sizes.get(node, 0) for node in range(self._options.nnodes)]

    def welcome(self) -> None:
        """Accept callers; if all nodes must come, a faulty one makes the gathering fail."""
        for node, line, fault in self._roster.hear():
            if self._options.elastic:
                line.send({"sizes": [0] * self._options.nnodes, "fault": fault})
            if not fault:
                self._lines.add(node, line)
            elif self._options.elastic:
                line.close()
            else:
                self._refused.append(line)
                self._fault = self._fault or fault

    def end(self, seconds: float) -> str:
        """End the gathering; if all nodes had to come, answer all callers and stop listening.

        Args:
          seconds: how long node 0 has waited for others.

        Returns:
          What was wrong, in words; empty if nothing was.
        """
        if self._roster.few(()):
            missing = sorted(set(range(self._options.nnodes)) - set(self._roster.sizes))
            self._fault = self._fault or f"node(s) {missing} never called within {seconds:g} s"
        if not self._options.elastic:
            self._roster.close()
            answer = {"sizes": self.sizes, "fault": self._fault}
            self._lines.tell(answer)
            for line in self._refused:
                line.send(answer)
        return self._fault

    def close(self) -> None:
        """Stop listening, and close the connections of refused callers."""
        self._roster.close()
        for line in self._refused:
            line.close()


# --------------------------------------------------------------------------------------------------
# The launchers of a job's machines: they gather, agree on ranks and port, and share alarms and the cause of a failure.
#
# Node 0's launcher listens on the master port of the named address; the others call it. The workers' coordinator gets
# the 16 ports after that one in turn, another at every attempt, so that nothing of a dead attempt can answer a new one.
# Where machines may come and go (`--nnodes MIN:MAX`) node 0 goes on listening, and says at every attempt who belongs to
# it.
# --------------------------------------------------------------------------------------------------

GATHER_TIMEOUT = 300.0
"""Seconds in which the launchers of all machines, or of the smallest number of them, must be started."""

QUIET = 10.0
"""Seconds after which a launcher prints what it waits for."""

_TICK = 0.1


class Nodes:
    """All launchers of a job, as one of them sees them. A context, entered once all, or enough, have come.

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
        self._says_at = math.inf

    def __enter__(self) -> "Nodes":
        self._says_at = time.monotonic() + QUIET
        try:
            if self._options.nnodes > 1:
                self._gather() if self._me == 0 else self._call()
            self._says_at = math.inf
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        if self._gathering is not None:
            self._gathering.close()
        self._lines.close()

    def start(self, number: int, port: int) -> Start:
        """The next attempt that includes this machine: node 0 decides and tells all.

        Args:
          number: the attempt's, which node 0 takes as it is; on other nodes the attempt may be a later one.
          port: its coordinator's; only node 0's is used.

        Raises:
          Over: when there is no further attempt.
          Stopped: when a signal comes before.
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
        """Why no further attempt is possible; None while one is."""
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
        """In node 0: tell launchers that wait for a place that there will be no further attempt."""
        if self._options.elastic and self._me == 0:
            self._lines.tell({"over": status})

    @property
    def decides(self) -> bool:
        """Whether this launcher decides if another attempt is made; if machines come and go, only node 0 does."""
        return self._me == 0 or not self._options.elastic

    @property
    def changed(self) -> bool:
        """Whether the next attempt has other machines than the last."""
        if self._heard.gone[self._start.number] or self.gently:
            return True
        return self._roster is not None and self._roster.next_nodes(self._start.nodes) != self._start.nodes

    def send_away(self) -> bool:
        """In node 0: send new machines away because the first attempt with them failed; returns whether any went."""
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
        """Wait until the workers of all machines have ended; returns the attempt's root cause, equal on every machine.

        Args:
          failure: what failed here first, if anything.
          well: whether all workers here have ended with 0.

        Returns:
          The cause, or None if no worker of the machines that are left has failed.
        """
        self._end(failure, well)
        self._wait(self._all_ended)
        failures = [found for found in self._heard.ended[self._start.number].values() if found is not None]
        return root_cause(failures) if failures else None

    @property
    def finished_well(self) -> bool:
        """Whether the workers of every machine ended with exit code 0."""
        return set(self._start.nodes) <= self._heard.well[self._start.number]

    def _all_ended(self) -> bool:
        return self._heard.all_ended(self._start)

    def _finished(self) -> bool:
        """Whether all workers have ended, and no further attempt follows."""
        failed = self._manages and any(self._heard.ended[self._start.number].values())
        return bool(self._start.nodes) and self._all_ended() and not failed

    def _end(self, failure: Failure | None, well: bool) -> None:
        said = {"ended": self._start.number, "node": self._me, "well": well, "failure": failure and asdict(failure)}
        self._heard.take(said)
        self._lines.tell(said)

    def _listen(self, silent: bool = True) -> None:
        """Process the others' messages, which node 0 passes on; with `silent`, a silent launcher counts as gone."""
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
        """In node 0: remove a machine that may go."""
        assert self._roster is not None
        self._lines.drop(node, farewell)
        self._roster.drop(node)
        self._heard.take(message := {"gone": node, "why": why})
        self._lines.tell(message)

    def _regroup(self) -> None:
        """In node 0: make all workers end by themselves, to start again on other machines."""
        self._heard.take(message := {"regroup": self._start.number})
        self._lines.tell(message)

    @property
    def _manages(self) -> bool:
        """Whether this is node 0 of a job whose machines come and go."""
        return self._roster is not None and self._options.elastic

    def _consider_growing(self) -> None:
        """In node 0: ask for another attempt if waiting machines could join, unless the current one ends anyway."""
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
        if time.monotonic() > self._says_at:
            self._says_at, there = math.inf, f"{self._options.master_addr}:{self._options.master_port}"
            whom = f"node 0's launcher at {there}" if self._me else "the launchers of the other machines"
            print_note(f"waiting for {whom}, up to {GATHER_TIMEOUT:g} s")
        self._interrupts.drain()
        if self._interrupts.received:
            self.leave(f"the launcher of node {self._me} was stopped by {self._interrupts.received[0].name}")
            raise Stopped

    def _wait_for_enough(self, roster: Roster) -> None:
        """In node 0: wait until the minimal number of machines is present."""
        before, deadline = self._start.nodes, time.monotonic() + GATHER_TIMEOUT
        if few := roster.few(before):
            print_note(f"{few}: waiting up to {GATHER_TIMEOUT:g} s for others")
            self._wait(lambda: not roster.few(before) or time.monotonic() > deadline)
            if few := roster.few(before):
                self._heard.lost = self.lost or f"{few}: no other came within {GATHER_TIMEOUT:g} s"

    def _gather(self) -> None:
        """In node 0: wait until all other launchers, or enough of them, have called; then tell all the sizes."""
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
        """From another node: find node 0's launcher."""
        size, patience = self.sizes[0], GATHER_TIMEOUT
        line, self.sizes = call(self._options, size, self._token, patience, self._pause)
        self._lines.add(0, line)
