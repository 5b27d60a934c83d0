"""How the processes of a job meet and part: coordinator, roll call, authenticated messages, orderly exit."""

import atexit
import base64
import errno
import hashlib
import hmac
import itertools
import json
import logging
import os
import re
import resource
import secrets
import selectors
import socket
import stat
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from axonml_jax.base import INTERRUPTED, TERMINATED
from axonml_jax.compat.processes import coordinator_client, let_gloo_listen_on, lost_processes, when_exiting

# --------------------------------------------------------------------------------------------------
# What the processes of a job say to each other: one JSON object per line, sealed with the job's token where there is
# one.
#
# The token itself is never sent: a line carries an HMAC of its message (RFC 2104), compared in constant time. A seal
# says that the sender belongs to the job, and that it says this here and now; it hides nothing.
# --------------------------------------------------------------------------------------------------

TOKEN = "AXONML_JAX_TOKEN"
"""The secret that all launchers and processes of a job share."""

TOKEN_FILE = "AXONML_JAX_TOKEN_FILE"
"""The variable with the path of a file that holds the secret, instead of `TOKEN`."""

_GREETING = re.compile(rb"axonml-jax ([0-9a-f]{32})\n?")
_GREETING_BYTES = 44
_TOKEN_BYTES = 2**12


def job_token(environ: Mapping[str, str] = os.environ) -> bytes:
    """The job's secret token; empty if there is none.

    Raises:
      ValueError: for a file that cannot be read, is empty, or that others may read or write, or for both variables at once.
        No message shows the token.
    """
    given, path = environ.get(TOKEN, ""), environ.get(TOKEN_FILE, "")
    if given and path:
        raise ValueError(f"{TOKEN} and {TOKEN_FILE} both name the job's token: give one of them")
    if not path:
        return given.encode()
    try:
        token = _own_file(Path(path)).strip()
    except OSError as error:
        raise ValueError(f"{TOKEN_FILE}={path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{TOKEN_FILE}={path}: {error}") from error
    if not token:
        raise ValueError(f"{TOKEN_FILE}={path}: the file is empty; write a token into it, or leave the variable out")
    return token


class Talk:
    """One end of an authenticated conversation over a connection.

    Both sides begin with a greeting: a random number. Every line after that carries an HMAC of its message, of the side that
    says it and of how many lines that side has said, under a key made of the token, the subject and both numbers. So a line
    counts once, in its place: recorded, it means nothing in another conversation, later in this one, or to its sender.

    Args:
      token: the job's; an empty one seals nothing off, as everybody knows it.
      subject: what is talked about; lines about another one do not count.
      calls: whether this side has called, and the other listens.
    """

    def __init__(self, token: bytes, subject: str, *, calls: bool):
        self._token, self._subject, self._calls = token, subject, calls
        self._number = secrets.token_hex(16).encode()
        self._key = b""
        self._said = self._heard = 0

    @property
    def greeting(self) -> bytes:
        """The first line that this side sends."""
        return b"axonml-jax " + self._number + b"\n"

    def greeted(self, line: bytes) -> bool:
        """Process the other side's greeting; False if it is not one."""
        found = _GREETING.fullmatch(line)
        if found is None or found[1] == self._number:  # our own, sent back
            return False
        numbers = (found[1], self._number) if self._calls else (self._number, found[1])
        self._key = _hmac(self._token, b" ".join([b"axonml-jax", self._subject.encode(), *numbers])).digest()
        return True

    def sealed(self, message: dict) -> bytes:
        """The next line that this side sends, with its seal.

        >>> one, other = Talk(b"secret", "weather", calls=True), Talk(b"secret", "weather", calls=False)
        >>> one.greeted(other.greeting), other.greeted(one.greeting)
        (True, True)
        >>> line = one.sealed({"sun": 1})
        >>> other.opened(line), other.opened(line)
        ({'sun': 1}, None)
        """
        body = json.dumps(message).encode()
        self._said += 1
        return self._seal(self._calls, self._said, body) + b" " + body + b"\n"

    def opened(self, line: bytes) -> dict | None:
        """The message in the other side's next line; None if its seal is wrong, or it is not a JSON object."""
        seal, _, body = line.removesuffix(b"\n").partition(b" ")
        self._heard += 1
        if not self._key or not hmac.compare_digest(seal, self._seal(not self._calls, self._heard, body)):
            return None
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):  # no JSON, no UTF-8, or nested without end
            return None
        return message if isinstance(message, dict) else None

    def _seal(self, caller: bool, count: int, body: bytes) -> bytes:
        return _hmac(self._key, b"%s %d " % (b"caller" if caller else b"listener", count) + body).hexdigest().encode()


def greet(connection: socket.socket, token: bytes, subject: str) -> Talk:
    """Exchange greetings with the listener at the other end, reading not a byte beyond its greeting.

    Args:
      connection: connected, with a timeout.
      token, subject: see `Talk`.

    Raises:
      OSError: when the other end does not answer in time, or as a listener of ours does.
    """
    talk, heard = Talk(token, subject, calls=True), b""
    connection.sendall(talk.greeting)
    while len(heard) < _GREETING_BYTES and (part := connection.recv(_GREETING_BYTES - len(heard))):
        heard += part
    if not talk.greeted(heard):
        raise ConnectionError("something else answers there")
    return talk


def is_count(value: object, low: int = 0, high: int = 2**31) -> bool:
    """Whether a received value is an int (not a bool) in a range."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < high


def _hmac(key: bytes, message: bytes) -> hmac.HMAC:
    return hmac.new(key, message, hashlib.sha256)


def _own_file(path: Path) -> bytes:
    """Read a file that only its owner may read (root's also its group, as PostgreSQL's rule for keys has it)."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait for a writer
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("is no ordinary file")
        if about.st_mode & (0o037 if about.st_uid == 0 else 0o077):
            mode = f"mode {stat.S_IMODE(about.st_mode):04o}"
            raise ValueError(f"others may read or write it ({mode}); chmod 600 it (Kubernetes: defaultMode: 0400)")
        if len(content := file.read(_TOKEN_BYTES + 1)) > _TOKEN_BYTES:
            raise ValueError(f"is longer than {_TOKEN_BYTES} bytes, which is no token")
        return content


# --------------------------------------------------------------------------------------------------
# Which of this machine's addresses gloo (CPU processes) uses: the one on the way to the coordinator.
#
# Left alone, it takes the address of the machine's own name, which on Debian is 127.0.1.1 or 127.0.0.1: processes of
# other machines cannot reach that, and the first collective fails with "Connection refused".
# --------------------------------------------------------------------------------------------------

INTERFACE = "GLOO_SOCKET_IFNAME"
"""PyTorch's variable for the network interface, which is used where it is set."""


def use_route_to(host: str, port: int) -> None:
    """Make gloo listen on the address from which this process reaches the coordinator. Call it before JAX's devices start."""
    interface = os.environ.get(INTERFACE)
    if interface:
        let_gloo_listen_on(interface=interface)
    else:
        let_gloo_listen_on(hostname=address_towards(host, port))


def address_towards(host: str, port: int) -> str:
    """This machine's address on the route to a host; sends nothing.

    Raises:
      OSError: when the host does not resolve or there is no route.

    >>> address_towards("127.0.0.1", 1)
    '127.0.0.1'
    """
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


# --------------------------------------------------------------------------------------------------
# Leaving a job: at once because of an error, so that the others and the launcher learn of it; else not without a word.
#
# JAX's own way out waits at a barrier for every process, up to five minutes; a process that fails while the others wait
# for it in a collective would hang there with them.
# --------------------------------------------------------------------------------------------------

_LEFT = "axonml_jax/left/"
_QUIET = 20.0
_POLL = 0.2
_installed = threading.Event()


def leave_on_error() -> None:
    """From now on, end the process right after the traceback of an uncaught exception, or on a failing SystemExit."""
    if _installed.is_set():
        return
    _installed.set()
    before = sys.excepthook

    def hook(kind, error, traceback):
        before(kind, error, traceback)
        leave_now(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook
    when_exiting(_leave_with)


def _leave_with(code: Any) -> None:
    """Exit at once with an error's status; an `axonml-jax train` that a signal has stopped ends in order."""
    if code in (None, 0, INTERRUPTED, TERMINATED):
        return
    if not isinstance(code, int):
        print(code, file=sys.stderr)
    leave_now(code & 0xFF if isinstance(code, int) else 1)


def leave_now(status: int) -> NoReturn:
    """End this process without waiting for the others, after flushing its output."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # its reader has gone
    os._exit(status)


def in_a_job() -> bool:
    """Whether this process has joined a job; does not import JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def say_goodbye(client, process_id: int, num_processes: int) -> None:
    """At exit, wait for the other processes, and report it when that takes long: they may be waiting for this one.

    Args:
      client: the connection to JAX's coordinator.
      process_id: which process this is.
      num_processes: of how many.
    """
    # Registered after JAX's own exit function, so it runs before that.
    atexit.register(_wait_for_others, client, process_id, num_processes)


def _wait_for_others(client, process_id: int, num_processes: int) -> None:
    import jax

    if not in_a_job():
        return  # `shutdown` was called: the others have been waited for
    everyone, start = set(range(num_processes)), time.monotonic()
    try:
        client.key_value_set(f"{_LEFT}{process_id}", "")
        while running := everyone - {int(key.rsplit("/", 1)[1]) for key, _ in client.key_value_dir_get(_LEFT)}:
            if time.monotonic() - start > _QUIET:
                print(
                    f"axonml_jax: process {process_id} of {num_processes} has ended its program and waits for process(es) "
                    f"{sorted(running)} to end theirs. If they wait for it in a collective, they wait in vain: every "
                    "process must make the same number of steps",
                    file=sys.stderr,
                    flush=True,
                )
                return
            time.sleep(_POLL)
    except jax.errors.JaxRuntimeError:
        return  # the coordinator has gone; JAX says so


# --------------------------------------------------------------------------------------------------
# Do all processes say the same? What differs is described, with the processes on each side.
# --------------------------------------------------------------------------------------------------

TIMEOUT = 600.0
"""Seconds that a comparison waits for the other processes: one may load much longer than another."""

PROGRAM = "the traced program"
_LONGEST_LINE = 200
_SAME = "axonml_jax/same/"
_meetings: Counter[tuple] = Counter()


def unlike(said: Mapping[str, str], devices: Iterable[Any], what: str, lines: Sequence[str] = ()) -> list[str]:
    """Describe what differs between the values of the devices' processes, the same in all; each must call it equally often.

    Args:
      said: what this process has, by name, the most telling first.
      devices: the devices whose processes compare.
      what: names what is compared, in the error.
      lines: the lines of its program, if it is among `said`.

    Raises:
      TimeoutError: naming the processes that did not come.
    """
    import jax

    processes, me = tuple(sorted({device.process_index for device in devices})), jax.process_index()
    if len(processes) == 1:
        return []
    _meetings[what, processes] += 1
    where = lambda number: f"{what} {processes} {number}"
    number = _meetings[what, processes]
    found = differences(said, lines, where(number), processes, me, what)
    if me == processes[0]:  # all have come here, so all have heard the last one
        coordinator_client().key_value_delete(f"{_SAME}{where(number - 1)}")
    return found


def differences(
    said: Mapping[str, str],
    lines: Sequence[str],
    where: str,
    processes: Sequence[int],
    me: int,
    what: str = "first step",
) -> list[str]:
    """Describe what differs between processes, the same in all.

    Where nothing differs only digests are sent; else one process sends its values for all that have the same ones.

    Args:
      said: what this process has, by name, the most telling first.
      lines: the lines of its program; the first that differs is described.
      where: a name for this comparison, used once.
      processes: the processes that compare.
      me: this one of them.
      what: names what is compared, in the error.

    Raises:
      TimeoutError: naming the processes that did not come.
    """
    heard = exchange(f"{where}/digests/", what, digest_of(json.dumps(said)), processes, me, TIMEOUT)
    speakers = {digest: process for process, digest in sorted(heard.items(), reverse=True)}
    if len(speakers) == 1:
        return []
    speaks = me in speakers.values()
    told = {**said, "lines": [digest_of(line) for line in lines]}
    spoken = exchange(f"{where}/all/", what, _packed(told) if speaks else None, processes, me, TIMEOUT)
    known = {process: _unpacked(text) for process, text in spoken.items()}
    hashes = [each.pop("lines") for _, each in sorted(known.items())]
    place = next((i for i, row in enumerate(itertools.zip_longest(*hashes)) if len(set(row)) > 1), None)
    found = list(_all_differences({process: known[speakers[digest]] for process, digest in heard.items()}))
    if place is not None:
        line = "".join(lines[place : place + 1]).strip()[:_LONGEST_LINE]
        rows = exchange(f"{where}/line/", what, line if speaks else None, processes, me, TIMEOUT)
        said_there = ", ".join(f"`{row}` in process {process}" for process, row in sorted(rows.items()))
        found = [f"{each}, first in {said_there}" if each.startswith(PROGRAM) else each for each in found]
    return found


def first_difference(said: Mapping[int, Mapping[str, Any]]) -> str | None:
    """The first difference, with the processes on each side; None when all agree.

    >>> first_difference({0: {"seed": 1}, 1: {"seed": 2}, 2: {"seed": 1}})
    'seed is 1 in process(es) [0, 2], 2 in process(es) [1]'
    """
    return next(_all_differences(said), None)


def _all_differences(said: Mapping[int, Mapping[str, Any]]):
    for name in dict.fromkeys(key for each in said.values() for key in each):
        sides: dict[str, list[int]] = {}
        for process, each in sorted(said.items()):
            sides.setdefault(str(each.get(name, "not there")), []).append(process)
        if len(sides) > 1:
            yield f"{name} is " + ", ".join(f"{value} in process(es) {who}" for value, who in sides.items())


def exchange(
    folder: str, what: str, said: str | None, processes: Sequence[int], me: int, timeout: float
) -> dict[int, str]:
    """The texts of the processes that sent one, by process, once all have arrived.

    Raises:
      TimeoutError: naming the processes that did not come.
    """
    import jax

    client, folder = coordinator_client(), f"{_SAME}{folder}"
    if said is not None:
        client.key_value_set(f"{folder}{me}", said)
    come = f"{folder[:-1]} come/"
    client.key_value_set(f"{come}{me}", "")
    try:
        client.wait_at_barrier(folder, int(1000 * timeout), list(processes))
    except jax.errors.JaxRuntimeError as error:
        missing = sorted(set(processes) - _heard(client, come).keys())
        lost = lost_processes(error)
        raise TimeoutError(
            f"process(es) {lost or missing} did not come to compare their {what} within {timeout:g} s: they have failed, or "
            "load or compile much longer than the others"
        ) from error
    return _heard(client, folder)


def _heard(client: Any, folder: str) -> dict[int, str]:
    return {int(key.rsplit("/", 1)[1]): text for key, text in client.key_value_dir_get(folder)}


def digest_of(text: str) -> str:
    """A short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _packed(said: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(said).encode())).decode()


def _unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))


# --------------------------------------------------------------------------------------------------
# Whoever calls at a listening socket: those who say one line of this job's are heard, all others ignored and reported.
#
# Nothing here waits: a caller that is silent, sends half a line, or sends without end holds up nobody else.
# --------------------------------------------------------------------------------------------------

PATIENCE = 30.0
"""Seconds that a caller has for its line."""

_LONGEST_CALL = 2**12
_MOST_CALLERS = 256
_TOLD = 5
_logger = logging.getLogger("axonml_jax")


@dataclass
class _Visit:
    """A caller that has not sent its line yet."""

    talk: Talk
    part: bytes = b""
    greeted: bool = False
    since: float = field(default_factory=time.monotonic)


class Callers:
    """The callers of a listening socket; close it when enough were heard.

    Args:
      server: the socket; it becomes non-blocking.
      token: the job's.
      subject: what is talked about.
      expected: whether a message is one of this job's.
    """

    def __init__(self, server: socket.socket, token: bytes, subject: str, expected: Callable[[dict], bool]):
        server.setblocking(False)
        self._server = server
        self._token = token
        self._subject = subject
        self._expected = expected
        self._visits: dict[socket.socket, _Visit] = {}
        self._ignored = 0

    def sources(self) -> list[socket.socket]:
        """The sockets to select on."""
        return [self._server, *self._visits]

    def pump(self) -> list[tuple[socket.socket, Talk, dict]]:
        """Returns each caller whose line has arrived since the last call, its `Talk` and its message; the receiver hangs up."""
        self._accept()
        heard = []
        for caller in readable(self._visits, 0):
            visit = self._visits[caller]
            try:
                chunk = caller.recv(_LONGEST_CALL)
            except BlockingIOError:
                continue
            except OSError:
                chunk = b""
            visit.part += chunk
            if (line := _line(visit)) is not None:
                message = visit.talk.opened(line) if visit.greeted else None
                if message is not None and self._expected(message):
                    del self._visits[caller]
                    heard.append((caller, visit.talk, message))
                    continue
            if line is not None or not chunk or len(visit.part) > _LONGEST_CALL:
                self._ignore(caller)
        for caller in [each for each, visit in self._visits.items() if time.monotonic() - visit.since > PATIENCE]:
            self._ignore(caller)
        return heard

    def close(self) -> None:
        """Hang up on every caller that was not heard."""
        for caller in self._visits:
            caller.close()
        self._visits.clear()

    def _accept(self) -> None:
        most = _room()
        for _ in range(_MOST_CALLERS):  # a flood must not keep this from anything else
            try:
                caller, _ = self._server.accept()
            except OSError as error:  # nobody more, one that has gone already, or this process can open no more files
                # Found out before it is seen whether anybody has called.
                full = error.errno in (errno.EMFILE, errno.ENFILE)
                if full and self._visits and readable([self._server], 0):
                    self._ignore(next(iter(self._visits)))
                    continue
                return
            caller.setblocking(False)
            if len(self._visits) >= most:
                self._ignore(next(iter(self._visits)))
            self._visits[caller] = visit = _Visit(Talk(self._token, self._subject, calls=False))
            try:
                caller.send(visit.talk.greeting)  # a new connection has room for it
            except OSError:
                self._ignore(caller)

    def _ignore(self, caller: socket.socket) -> None:
        visit = self._visits.pop(caller)
        self._ignored += 1
        if self._ignored <= _TOLD:
            why = (
                f"what it said does not carry the seal of {TOKEN}"
                if (visit.part or visit.greeted) and self._token
                else "it is none of this job's"
            )
            _logger.warning("ignored a caller at %s: %s%s", _peer(caller), why, _last(self._ignored))
        caller.close()


def readable(sources: Iterable[Any], timeout: float) -> list[Any]:
    """Wait until sockets have something to read, and return these; works for thousands, unlike `select.select`."""
    with selectors.PollSelector() as selector:  # opens no file, which must work when no more can be opened
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(timeout)]


def _room() -> int:
    """The maximal number of simultaneous callers: a quarter of the files that this process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CALLERS if limit == resource.RLIM_INFINITY else max(1, min(_MOST_CALLERS, limit // 4))


def _line(visit: _Visit) -> bytes | None:
    """A caller's line after its greeting, or instead of it, once it is complete."""
    while b"\n" in visit.part:
        line, _, visit.part = visit.part.partition(b"\n")
        if visit.greeted or not visit.talk.greeted(line):
            return line
        visit.greeted = True
    return None


def _peer(caller: socket.socket) -> str:
    try:
        host, port, *_ = caller.getpeername()
    except OSError:
        return "an address that is gone"
    return f"{host}:{port}"


def _last(ignored: int) -> str:
    return "; further ones are ignored without a word" if ignored == _TOLD else ""


# --------------------------------------------------------------------------------------------------
# Where process 0 listens for the others: on loopback or on the one address that was named, never on all unasked.
# --------------------------------------------------------------------------------------------------

ASKED = "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's own variable; set it (to `0.0.0.0:PORT`, say) where the named address is not this machine's, as behind NAT."""

_LOOPBACK_NAMES = ("localhost", "ip6-localhost")
_ELSEWHERE = ("192.0.2.1", 9)  # RFC 5737: nobody's address; connecting a UDP socket to it sends nothing


def bind_address(coordinator: str, one_host: bool = False) -> tuple[str, int]:
    """The address and port on which process 0 listens.

    Args:
      coordinator: `host:port` as every process knows it.
      one_host: whether all processes run on this machine.

    Returns:
      An IP address of this machine and the port.

    Raises:
      ValueError: for a variable `JAX_COORDINATOR_BIND_ADDRESS` that is no host and port.
      OSError: when the host's name does not resolve and this machine has no network.
    """
    if asked := os.environ.get(ASKED):
        return split_address(asked, ASKED)
    host, port = split_address(coordinator, "the coordinator")
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror:
        # Kubernetes publishes a pod's name only once the pod is ready, and it is not before this.
        if (address := outward_address()) is None:
            raise
    return _as_others_reach(host, address, one_host), port


def reached_at(coordinator: str, one_host: bool = False) -> str:
    """The `host:port` at which a process that is not 0 reaches the coordinator.

    Args:
      coordinator: `host:port` as every process knows it.
      one_host: whether all processes run on one machine.
    """
    host, port = split_address(coordinator, "the coordinator")
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror:
        return coordinator  # it may resolve later
    other = _as_others_reach(host, address, one_host)
    return coordinator if other == address else host_port(other, port)


def _as_others_reach(host: str, address: str, one_host: bool) -> str:
    """A machine's address for the others, where its name resolves to loopback: Debian gives 127.0.1.1."""
    by_name = host not in _LOOPBACK_NAMES and address != host
    return (outward_address() or address) if by_name and not one_host and _is_loopback(address) else address


def split_address(text: str, what: str) -> tuple[str, int]:
    """Split an address into host and port.

    Args:
      text: `host:port`; an IPv6 host stands in brackets.
      what: the address is of, for the error.

    Raises:
      ValueError: when there is no host, when the host cannot be a name, or when the port is none.

    >>> split_address("[::1]:80", "the coordinator"), split_address("node0:29500", "the coordinator")
    (('::1', 80), ('node0', 29500))
    """
    host, _, port = text.rpartition(":")
    rule = f"{what} is {text!r}, which is no address"
    if not host.strip("[]"):
        raise ValueError(f"{rule}: give it as 'host:port'")
    if not (port.isascii() and port.isdecimal() and len(port) < 10 and 0 < int(port) < 2**16):
        raise ValueError(f"{rule}: port {port or repr(port)} must be a number from 1 to 65535")
    check_host(host.strip("[]"), rule)
    return host.strip("[]"), int(port)


def check_host(host: str, rule: str) -> None:
    """Refuse impossible host names, before Python's resolver fails with an error about an encoding.

    Raises:
      ValueError: beginning with `rule`.
    """
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(
            f"{rule}: {host!r} cannot be the name of a machine (a part of it is empty or too long)"
        ) from None


def unresolved(host: str) -> str:
    """Why a host name does not resolve here; empty if it does."""
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        return f"the name {host!r} does not resolve on this machine: {error.strerror}"
    return ""


def outward_address() -> str | None:
    """This machine's address on its default route, or None without one."""
    try:
        return address_towards(*_ELSEWHERE)
    except OSError:
        return None


def listen(address: str, port: int, backlog: int) -> socket.socket:
    """Open a socket that listens on one address.

    Raises:
      OSError: saying what to do, when the port is taken or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=backlog)
    except OSError as error:
        raise OSError(
            error.errno,
            f"process 0 cannot listen on {address}:{port}: {error.strerror}. The coordinator's host must be the machine of "
            f"process 0 and its port free there; where it is reached by another address, set {ASKED}=0.0.0.0:{port}",
        ) from error


def host_port(address: str, port: int) -> str:
    """Join address and port, as in URLs.

    >>> host_port("::1", 80), host_port("10.0.0.1", 80)
    ('[::1]:80', '10.0.0.1:80')
    """
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


# --------------------------------------------------------------------------------------------------
# A roll call over plain TCP before JAX's own rendezvous, which aborts the process without saying who is missing.
# --------------------------------------------------------------------------------------------------

_SUBJECT = "roll call"
_LATE = "never arrived"
_GRACE = 5.0
_TICK = 1.0
_LONGEST_ROLL = 2**16
_BACKLOG = 2**12
_SHOWN = 8


def roll_call(coordinator: str, num_processes: int, process_id: int, timeout: float, named: str | None = None) -> None:
    """Return once every process of the job has called process 0, which listens at the coordinator's address and then frees it.

    Args:
      coordinator: `host:port` of process 0.
      num_processes: number of processes.
      process_id: which this is.
      timeout: seconds to wait for the others.
      named: process 0's address as the others know it; None: `coordinator`.

    Raises:
      TimeoutError: in every process that came, naming those that did not.
      ValueError: in every process, when two have the same id or they disagree on their number.
      OSError: in process 0, when the port is taken or the address is not its machine's.
    """
    (host, port), token = split_address(coordinator, "the coordinator"), job_token()
    if process_id == 0:
        fault = _collect(host, port, num_processes, timeout, token)
        if _LATE in fault and (why := unresolved(split_address(named or coordinator, "the coordinator")[0])):
            fault += f" ({why}; they may not find it by that name either)"
    else:
        fault = _answer(host, port, num_processes, process_id, timeout, token)
    if fault:
        kind = TimeoutError if _LATE in fault else ValueError
        raise kind(
            f"init: process {process_id} of {num_processes} at {coordinator}: {fault}. Ranks and WORLD_SIZE count "
            "processes: start each id from 0 once, all with the same coordinator and number"
        )


def _collect(host, port, num_processes, timeout, token):
    """In process 0: hear from every process, decide, and tell them."""
    deadline = time.monotonic() + timeout
    present, heard, fault = {0}, [], ""
    with (
        listen(host, port, min(num_processes, _BACKLOG)) as server,
        closing(Callers(server, token, _SUBJECT, _is_ours)) as callers,
    ):
        while len(present) < num_processes and not fault and (left := deadline - time.monotonic()) > 0:
            readable(callers.sources(), min(left, _TICK))
            for caller, talk, said in callers.pump():
                heard.append((caller, talk))
                fault = fault or _fault(said["process"], said["count"], present, num_processes)
                present.add(said["process"])
        if not fault and len(present) < num_processes:
            fault = f"process(es) {missing(present, num_processes)} {_LATE} within {timeout:g} s"
        for caller, talk in heard:
            _tell(caller, talk, fault)
    return fault


def missing(present: Collection[int], count: int) -> str:
    """The numbers below `count` that are absent, only the first few listed, so that a mistyped count does not fill the memory.

    >>> missing({0, 2}, 4), missing({0, 2}, 1_000_000_000)
    ('[1, 3]', '[1, 3, 4, 5, 6, 7, 8, 9] and 999999990 more')
    """
    first = list(itertools.islice((each for each in range(count) if each not in present), _SHOWN))
    more = count - len(present) - len(first)
    return f"{first} and {more} more" if more else f"{first}"


def _is_ours(message):
    return is_count(message.get("count"), 1) and is_count(message.get("process"), 1, message["count"])


def _fault(process, count, present, num_processes):
    if process in present:
        return f"two processes have id {process}"
    if count != num_processes:
        return f"process {process} says there are {count} processes, process 0 says {num_processes}"
    return ""


def _answer(host, port, num_processes, process_id, timeout, token):
    """In another process: find process 0, report to it, and hear its decision."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((host, port), timeout=_GRACE) as server:
                talk = greet(server, token, _SUBJECT)
                server.sendall(talk.sealed({"process": process_id, "count": num_processes}))
                server.settimeout(max(deadline - time.monotonic(), 0) + _GRACE)
                with server.makefile("rb") as lines:
                    answer = talk.opened(lines.readline(_LONGEST_ROLL))
            if answer is not None and isinstance(answer.get("fault"), str):
                return answer["fault"]
            raise ConnectionError("that was not process 0")
        except OSError as error:
            if time.monotonic() > deadline:
                why = unresolved(host) or error.strerror or str(error)
                return f"process(es) [0] {_LATE} within {timeout:g} s ({why})"
            time.sleep(0.1)


def _tell(caller: socket.socket, talk: Talk, fault: str) -> None:
    caller.settimeout(_GRACE)
    try:
        caller.sendall(talk.sealed({"fault": fault}))
        caller.recv(1)  # the caller closes first, so that the port is free of lingering connections
    except OSError:
        pass  # it has gone; JAX's own rendezvous will notice
    finally:
        caller.close()
