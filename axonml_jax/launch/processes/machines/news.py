"""What launchers may say to each other, checked when it is received: types, ranges, and the nodes of the job."""

from collections.abc import Callable
from dataclasses import fields

from axonml_jax.launch.processes.worker import Failure
from axonml_jax.mesh.job.sealed import is_count

_PORTS = (1, 65536)
_STATUS = (0, 256)
_LONGEST = 300


def is_hello(message: dict) -> bool:
    """Whether a launcher presents itself: a node other than 0 of its own number of nodes, with workers."""
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
    """Whether node 0 says how the gathering went: the sizes of all nodes (0: missing), and what was wrong."""
    sizes, fault = message.get("sizes"), message.get("fault")
    if not isinstance(fault, str) or not isinstance(sizes, list):
        return False
    return bool(fault) or (len(sizes) == nnodes and all(is_count(size) for size in sizes))


def is_news(message: dict, nnodes: int) -> bool:
    """Whether it is something that launchers tell each other while the workers run."""
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
    """Whether it is a short text that a message may show."""
    return isinstance(given, str) and len(given) <= _LONGEST and given.isprintable()


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
