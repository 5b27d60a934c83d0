"""Which worker failed first, and what to tell the user about it."""

import re
from collections.abc import Sequence

from axonml_jax.launch.processes.worker import Failure

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_SHOWN = 60
_SHOWN_WITHOUT_TRACEBACK = 20

# What JAX, gloo, NCCL and this library say in a process that is well itself but has lost another.
_LOST_ANOTHER = re.compile(
    r"closed by peer|Connection reset|Connection refused|Socket closed|[Hh]eartbeat|coordination service|"
    r"CoordinationService|never arrived|their processes are gone|did not call it within|remote process exited|"
    r"ended or were lost|did not come to|Broken pipe|Read timeout|tasks? (?:has|have) (?:disconnected|failed)"
)

_FLIGHT = re.compile(r"axonml_jax: flight record: (.+)")

_HINTS = {
    -9: "SIGKILL comes from outside: most often the out-of-memory killer (see `dmesg`) or a batch system's limit",
    -11: "a crash in native code: set PYTHONFAULTHANDLER=1 to see where",
    -7: "a bus error: often a full /dev/shm",
}


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that explains the others: the first, unless it only complains of a lost connection and another does not.

    Args:
      failures: in the order in which they were seen; at least one.
    """
    return next((failure for failure in failures if not looks_like_a_consequence(failure)), failures[0])


def looks_like_a_consequence(failure: Failure) -> bool:
    """Whether the last thing a worker said is that it has lost another one."""
    said = [line for line in failure.lines if line.strip()][-_SHOWN_WITHOUT_TRACEBACK:]
    return failure.returncode not in _HINTS and any(_LOST_ANOTHER.search(line) for line in said)


def report(cause: Failure) -> str:
    """Rank, exit code or signal, and the traceback: what a user should read last."""
    head = (
        f"rank {cause.rank} failed first: {cause.how} after {cause.seconds:.1f} s (process {cause.pid} on {cause.host})"
    )
    if hint := _HINTS.get(cause.returncode):
        head += f"; {hint}"
    lines = traceback_of(cause.lines)
    if not lines:
        return f"{head}; it wrote nothing to its standard error"
    return "\n".join([f"{head}; the end of its standard error:", *(f"    {line}" for line in lines)])


def flight_records(lines: Sequence[str]) -> list[str]:
    """The files in which a dying process has said that it left its record.

    >>> flight_records(["axonml_jax: flight record: runs/a/flight-rank1.json", "Traceback ..."])
    ['runs/a/flight-rank1.json']
    """
    return [found[1] for line in lines if (found := _FLIGHT.match(line))]


def traceback_of(lines: Sequence[str]) -> list[str]:
    """The last traceback with those it is chained to, or else the last lines.

    >>> traceback_of(["epoch 1", "Traceback (most recent call last):", "  ...", "ValueError: x"])
    ['Traceback (most recent call last):', '  ...', 'ValueError: x']
    """
    starts = [number for number, line in enumerate(lines) if line.strip() == _TRACEBACK]
    if not starts:
        return list(lines[-_SHOWN_WITHOUT_TRACEBACK:])
    first = starts.pop()
    while starts and any(line.strip().startswith(_CHAINED) for line in lines[starts[-1] : first]):
        first = starts.pop()
    found = list(lines[first:])
    if len(found) > _SHOWN:
        found = [*found[: _SHOWN // 3], "  ...", *found[-_SHOWN * 2 // 3 :]]
    return found
