"""A roll call over plain TCP before JAX's own rendezvous, which aborts the process without saying who is missing."""

import json
import socket
import time

from axonml_jax.mesh.coordinator import listen

_GRACE = 5.0


def roll_call(coordinator: str, num_processes: int, process_id: int, timeout: float) -> None:
    """Return once every process of the job has called. Process 0 listens at the coordinator's address, then frees it.

    Args:
      coordinator: `host:port` of process 0.
      num_processes: number of processes.
      process_id: which this is.
      timeout: seconds to wait for the others.

    Raises:
      TimeoutError: in every process that came, naming those that did not.
      ValueError: in every process, when two have the same id or they disagree on their number.
      OSError: in process 0, when the port is taken or the address is not its machine's.
    """
    host, _, port = coordinator.rpartition(":")
    if process_id == 0:
        fault = _collect(host.strip("[]"), int(port), num_processes, timeout)
    else:
        fault = _answer(host.strip("[]"), int(port), num_processes, process_id, timeout)
    if fault:
        kind = TimeoutError if "never arrived" in fault else ValueError
        raise kind(
            f"init: process {process_id} of {num_processes} at {coordinator}: {fault}. Ranks and WORLD_SIZE count "
            "processes: start each id from 0 once, all with the same coordinator and number"
        )


def _collect(host, port, num_processes, timeout):
    """Process 0: hear everyone, decide, tell everyone."""
    deadline = time.monotonic() + timeout
    present, callers, fault = {0}, [], ""
    with listen(host, port, num_processes) as server:
        while len(present) < num_processes and not fault and (left := deadline - time.monotonic()) > 0:
            heard = _hear(server, left)
            if heard is None:
                continue
            caller, process, count = heard
            callers.append(caller)
            if process in present:
                fault = f"two processes have id {process}"
            elif count != num_processes or not 0 <= process < num_processes:
                fault = f"process {process} says there are {count} processes, process 0 says {num_processes}"
            present.add(process)
        if not fault and len(present) < num_processes:
            missing = sorted(set(range(num_processes)) - present)
            fault = f"process(es) {missing} never arrived within {timeout:g} s"
        for caller in callers:
            _tell(caller, fault)
    return fault


def _hear(server, seconds):
    """The next process that calls, or None: the time is up, or it was a stranger."""
    server.settimeout(seconds)
    try:
        caller, _ = server.accept()
    except OSError:
        return None
    try:
        caller.settimeout(_GRACE)
        with caller.makefile() as lines:
            said = json.loads(lines.readline())
        return caller, int(said["process"]), int(said["count"])
    except (OSError, ValueError, KeyError, TypeError):
        caller.close()
        return None


def _answer(host, port, num_processes, process_id, timeout):
    """Another process: find process 0, say who we are, hear what it decided."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((host, port), timeout=_GRACE) as server:
                server.sendall(json.dumps({"process": process_id, "count": num_processes}).encode() + b"\n")
                server.settimeout(timeout + _GRACE)
                with server.makefile() as lines:
                    return json.loads(lines.readline())["fault"]
        except (OSError, ValueError):
            if time.monotonic() > deadline:
                return f"process(es) [0] never arrived within {timeout:g} s"
            time.sleep(0.1)


def _tell(caller, fault):
    try:
        caller.sendall(json.dumps({"fault": fault}).encode() + b"\n")
        caller.recv(1)  # the caller closes first, so that the port is free of lingering connections
    except OSError:
        pass  # it has gone; JAX's own rendezvous will notice
    finally:
        caller.close()
