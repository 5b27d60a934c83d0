"""The command line of `axonml-jax launch`: torchrun's flags, with hyphens or underscores; unknown ones named."""

import argparse
import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from axonml_jax.launch.config.run_config import ConfigError

DEFAULT_PORT = 29500
"""torchrun's, where several machines must know it and nobody says another."""

ATTEMPT_PORTS = 16
"""How many ports after that one the workers' coordinator takes in turn, each attempt another."""

MOST_NODES = 2**14
"""Of how many machines node 0 keeps a connection at most; every one of them hears the sizes of all."""

LAST_CALL = 30.0
"""torchrun's seconds to wait for more machines once there are enough."""

_NO_RENDEZVOUS = "the launcher of node 0 is the only rendezvous, found by --master-addr and --master-port"
_NOT_NEEDED: dict[str, str] = {
    "--rdzv-backend": _NO_RENDEZVOUS,
    "--rdzv-id": _NO_RENDEZVOUS,
    "--rdzv-conf": _NO_RENDEZVOUS,
    "--local-addr": _NO_RENDEZVOUS,
    "--no-python": "every worker is a Python program",
    "--start-method": "every worker is a program of its own",
    "--run-path": "every worker is a program of its own",
    "--role": "there is one kind of worker",
    "--monitor-interval": "a worker's end is noticed at once",
    "--use-env": "LOCAL_RANK is always in the environment",
}


def launch_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """The parser; every flag with underscores too."""
    parser = argparse.ArgumentParser(
        prog="axonml-jax launch",
        usage="axonml-jax launch [flags] SCRIPT [arguments of the script]",
        description="Start the processes of a job on this machine, watch them, and stop all when one fails. Each finds its "
        "place in the environment; ax.init() reads it.",
        allow_abbrev=False,
    )

    def flag(name: str, *short: str, **how: Any):
        default = environ.get(f"PET_{name[2:].replace('-', '_').upper()}")
        names = dict.fromkeys([name, name[:2] + name[2:].replace("-", "_")])
        how |= {} if default is None else {"default": default}
        parser.add_argument(*short, *names, **how)

    _place_flags(flag, parser)
    _supervision_flags(flag)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("target", nargs="?", metavar="SCRIPT", help="what every process runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parser


def _place_flags(flag: Callable, parser: argparse.ArgumentParser) -> None:
    flag("--nproc-per-node", default="1", metavar="N", help="processes on this machine: a number, auto, cpu or gpu")
    flag("--nnodes", default="1", metavar="N", help="machines of the job; MIN:MAX: they may come and go")
    flag(
        "--node-unit", type=int, default=1, metavar="N", help="with MIN:MAX, machines come and go in groups of so many"
    )
    flag(
        "--last-call",
        type=float,
        metavar="SECONDS",
        help=f"with MIN:MAX, how long to wait for more machines once there are enough, from the last that came ({LAST_CALL:g})",
    )
    flag("--node-rank", type=int, metavar="I", help="which of them this is, from 0")
    flag("--master-addr", metavar="HOST", help="address of machine 0, where process 0 listens (127.0.0.1 for one)")
    flag(
        "--master-port", type=int, metavar="PORT", help=f"port there (a free one for one machine, else {DEFAULT_PORT})"
    )
    flag("--rdzv-endpoint", metavar="HOST:PORT", help="both in one")
    parser.add_argument(
        "--standalone", action="store_true", help="one machine, free port: what is done without flags too"
    )


def _supervision_flags(flag: Callable) -> None:
    flag("--max-restarts", type=int, default=0, metavar="N", help="start all processes again after a failure, N times")
    flag(
        "--standby",
        type=float,
        metavar="SECONDS",
        help="so long after a start, start as many processes again, which import and wait to take over at a restart",
    )
    flag("--shutdown-timeout", type=float, default=30.0, metavar="SECONDS", help="from Ctrl-C or SIGTERM to SIGKILL")
    flag("--log-dir", type=Path, metavar="DIR", help="keep every process's output under DIR/RUN/attempt_I/RANK")
    spec = {"type": _streams, "metavar": "WHICH"}
    flag("--tee", "-t", help="what is kept: 1 stdout, 2 stderr, 3 both (default), 0:1,1:3 by local rank", **spec)
    flag("--redirects", "-r", default=0, help="what is kept and not shown; written like --tee", **spec)


def _streams(text: str) -> Mapping[int, int] | int:
    if text in ("0", "1", "2", "3"):
        return int(text)
    parts = [part.split(":") for part in text.split(",")]
    if not all(len(part) == 2 and part[0].isdecimal() and part[1] in ("0", "1", "2", "3") for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: give 0, 1, 2 or 3, or LOCAL_RANK:0..3 pairs such as 0:3,1:2")
    return {int(rank): int(which) for rank, which in parts}


def refuse_unknown_flags(argv: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Look at the flags before argparse does, which would take an unknown flag's value for the script.

    Raises:
      ConfigError: with the nearest known flag, or why torchrun's flag has no work here.
    """
    actions = parser._option_string_actions
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if not word.startswith("-") or word == "--":
            return
        if (action := actions.get(name)) is None and not (word[:2] in actions and word[1] != "-"):
            if name in _NOT_NEEDED:
                raise ConfigError(f"launch: {name} has no work here: {_NOT_NEEDED[name]}; leave it out")
            near = difflib.get_close_matches(name, [known for known in actions if "_" not in known], n=1)
            raise ConfigError(
                f"launch: unknown flag {word}" + (f": did you mean {near[0]}?" if near else "; see --help")
            )
        if action is not None and action.nargs is None and not equals:
            next(words, None)
