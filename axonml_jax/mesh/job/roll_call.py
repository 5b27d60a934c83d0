"""A roll call over plain TCP before JAX's own rendezvous, which aborts the process without saying who is missing."""

import itertools
import socket
import time
from collections.abc import Collection
from contextlib import closing

from axonml_jax.mesh.job.callers import Callers, readable
from axonml_jax.mesh.job.coordinator import listen, split_address, unresolved
from axonml_jax.mesh.job.sealed import Talk, greet, is_count, job_token

_SUBJECT = "roll call"
_LATE = "never arrived"
_GRACE = 5.0
_TICK = 1.0
_LONGEST = 2**16
_BACKLOG = 2**12
_SHOWN = 8


def roll_call(coordinator: str, num_processes: int, process_id: int, timeout: float, named: str | None = None) -> None:
    """Return once every process of the job has called. Process 0 listens at the coordinator's address, then frees it.

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
    """Process 0: hear everyone, decide, tell everyone."""
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
    """Those of so many who are not there, the first of them by number: a mistyped count must not fill the memory.

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
    """Another process: find process 0, say who we are, hear what it decided."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((host, port), timeout=_GRACE) as server:
                talk = greet(server, token, _SUBJECT)
                server.sendall(talk.sealed({"process": process_id, "count": num_processes}))
                server.settimeout(max(deadline - time.monotonic(), 0) + _GRACE)
                with server.makefile("rb") as lines:
                    answer = talk.opened(lines.readline(_LONGEST))
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
