"""The flags of `axonml-jax launch`: torchrun's, with hyphens or underscores, as one frozen value."""

import argparse
import difflib
import importlib.machinery
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from axonml_jax.launch.config import ConfigError

DEFAULT_PORT = 29500
"""torchrun's, where several machines must know it and nobody says another."""

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


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What `axonml-jax launch` was asked for.

    Attributes:
      nproc_per_node: a number, `auto`, `cpu` or `gpu`.
      nnodes: number of machines.
      node_rank: which of them this is.
      master_addr: host of node 0.
      master_port: port there; None: a free one.
      max_restarts: how often all workers are started again after a failure.
      shutdown_timeout: seconds between Ctrl-C or SIGTERM and SIGKILL.
      log_dir: folder for the workers' output; None: console only.
      tee: per local rank, which streams go to files as well as to the console (1 stdout, 2 stderr, 3 both).
      redirects: per local rank, which streams go to files instead.
      module: whether `target` is a module's name.
      target: the script or module.
      arguments: what follows it.
    """

    nproc_per_node: str
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int | None
    max_restarts: int
    shutdown_timeout: float
    log_dir: Path | None
    tee: Mapping[int, int] | int
    redirects: Mapping[int, int] | int
    module: bool
    target: str
    arguments: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """A worker's command line."""
        return [sys.executable, *(["-m"] if self.module else []), self.target, *self.arguments]


def read_options(argv: Sequence[str], environ: Mapping[str, str]) -> LaunchOptions:
    """The flags before the script, the script, and its arguments.

    Args:
      argv: what follows `axonml-jax launch`.
      environ: `PET_<FLAG>` variables are defaults, as for torchrun (Kubernetes' training operator sets them).

    Raises:
      ConfigError: for an unknown flag (with the nearest known one, or why torchrun's has no work here), values that
        contradict each other, or a script or module that is not there.
      SystemExit: after `--help`, or argparse's usage error.
    """
    parser = launch_parser(environ)
    _refuse_unknown_flags(argv, parser)
    given = parser.parse_args(argv)
    if given.target is None:
        raise ConfigError("launch: give a script after the flags: axonml-jax launch --nproc-per-node 2 train.py")
    problems = [*_contradictions(given), *_missing_program(given)]
    if problems:
        raise ConfigError("\n".join(f"launch: {problem}" for problem in problems))
    host, port = _endpoint(given)
    return LaunchOptions(
        nproc_per_node=given.nproc_per_node,
        nnodes=int(given.nnodes.rpartition(":")[2]),
        node_rank=given.node_rank or 0,
        master_addr=host or "127.0.0.1",
        master_port=port,
        max_restarts=given.max_restarts,
        shutdown_timeout=given.shutdown_timeout,
        log_dir=given.log_dir,
        tee=given.tee if given.tee is not None else 3 if given.log_dir else 0,
        redirects=given.redirects,
        module=given.module,
        target=given.target,
        arguments=tuple(given.arguments),
    )


def launch_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """The parser; every flag with underscores too."""
    parser = argparse.ArgumentParser(
        prog="axonml-jax launch",
        usage="axonml-jax launch [flags] SCRIPT [arguments of the script]",
        description="Start the processes of a job on this machine, watch them, and stop all when one fails. Each finds its "
        "place in the environment; ax.init() reads it.",
        allow_abbrev=False,
    )

    def flag(name, *short, **how):
        default = environ.get(f"PET_{name[2:].replace('-', '_').upper()}")
        names = dict.fromkeys([name, name[:2] + name[2:].replace("-", "_")])
        parser.add_argument(*short, *names, **how | ({"default": default} if default is not None else {}))

    flag("--nproc-per-node", default="1", metavar="N", help="processes on this machine: a number, auto, cpu or gpu")
    flag("--nnodes", default="1", metavar="N", help="machines of the job")
    flag("--node-rank", type=int, metavar="I", help="which of them this is, from 0")
    flag("--master-addr", metavar="HOST", help="address of machine 0, where process 0 listens (127.0.0.1 for one)")
    flag(
        "--master-port", type=int, metavar="PORT", help=f"port there (a free one for one machine, else {DEFAULT_PORT})"
    )
    flag("--rdzv-endpoint", metavar="HOST:PORT", help="both in one")
    parser.add_argument(
        "--standalone", action="store_true", help="one machine, free port: what is done without flags too"
    )
    flag("--max-restarts", type=int, default=0, metavar="N", help="start all processes again after a failure, N times")
    flag("--shutdown-timeout", type=float, default=30.0, metavar="SECONDS", help="from Ctrl-C or SIGTERM to SIGKILL")
    flag("--log-dir", type=Path, metavar="DIR", help="keep every process's output under DIR/RUN/attempt_I/RANK")
    spec = {"type": _streams, "metavar": "WHICH"}
    flag("--tee", "-t", help="what is kept: 1 stdout, 2 stderr, 3 both (default), 0:1,1:3 by local rank", **spec)
    flag("--redirects", "-r", default=0, help="what is kept and not shown; written like --tee", **spec)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("target", nargs="?", metavar="SCRIPT", help="what every process runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parser


def _streams(text: str) -> Mapping[int, int] | int:
    if text in ("0", "1", "2", "3"):
        return int(text)
    parts = [part.split(":") for part in text.split(",")]
    if not all(len(part) == 2 and part[0].isdecimal() and part[1] in ("0", "1", "2", "3") for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: give 0, 1, 2 or 3, or LOCAL_RANK:0..3 pairs such as 0:3,1:2")
    return {int(rank): int(which) for rank, which in parts}


def streams_of(which: Mapping[int, int] | int, local_rank: int) -> int:
    """The streams that `--tee` or `--redirects` mean for one worker."""
    return which if isinstance(which, int) else which.get(local_rank, 0)


def _refuse_unknown_flags(argv: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """argparse would take an unknown flag's value for the script."""
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
            near = difflib.get_close_matches(name, actions, n=1)
            raise ConfigError(
                f"launch: unknown flag {word}" + (f": did you mean {near[0]}?" if near else "; see --help")
            )
        if action is not None and action.nargs is None and not equals:
            next(words, None)


def _contradictions(given: argparse.Namespace) -> list[str]:
    problems = []
    smallest, _, largest = given.nnodes.rpartition(":")
    if not (given.nnodes.replace(":", "", 1).isdecimal() and int(largest) > 0 and smallest in ("", largest)):
        problems.append(
            f"--nnodes {given.nnodes}: must be a positive number; a compiled program has a fixed number of devices, so "
            "ranges such as 1:4 are not offered"
        )
    elif int(largest) > 1:
        problems += _unplaced(given, int(largest))
    elif given.node_rank:
        problems.append(f"--node-rank {given.node_rank} with --nnodes 1: give the number of machines as --nnodes")
    where = {
        name: value
        for name in ("--master-addr", "--master-port", "--rdzv-endpoint")
        if (value := getattr(given, name[2:].replace("-", "_"))) is not None
    }
    if given.standalone and (where or given.nnodes not in ("1", "1:1")):
        said = " ".join([*where, *(["--nnodes"] if given.nnodes not in ("1", "1:1") else [])])
        problems.append(
            f"--standalone means one machine and a free port, so {said} contradicts it; give one or the other"
        )
    if given.rdzv_endpoint is not None and len(where) > 1:
        problems.append(f"--rdzv-endpoint says what {' and '.join(list(where)[:-1])} say; give one or the other")
    limits = {"--max-restarts": given.max_restarts, "--shutdown-timeout": given.shutdown_timeout}
    problems += [f"{name} {value}: must not be negative" for name, value in limits.items() if value < 0]
    return problems + _bad_ports(given)


def _unplaced(given: argparse.Namespace, nnodes: int) -> list[str]:
    problems = []
    if given.node_rank is None:
        problems.append(f"--nnodes {nnodes} needs --node-rank: 0 on one machine, up to {nnodes - 1} on the others")
    elif not 0 <= given.node_rank < nnodes:
        problems.append(f"--node-rank {given.node_rank} with --nnodes {nnodes}: must be 0 to {nnodes - 1}")
    if given.master_addr is None and given.rdzv_endpoint is None:
        problems.append(f"--nnodes {nnodes} needs --master-addr: the address of machine 0, the same on all")
    return problems


def _bad_ports(given: argparse.Namespace) -> list[str]:
    try:
        _, port = _endpoint(given)
    except ValueError:
        return [f"--rdzv-endpoint {given.rdzv_endpoint}: must be HOST or HOST:PORT"]
    return [] if port is None or 0 < port < 65536 else [f"port {port}: must be 1 to 65535"]


def _endpoint(given: argparse.Namespace) -> tuple[str | None, int | None]:
    """Host and port as given; several machines must agree on a port, so there a missing one has a default."""
    default = None if given.nnodes in ("1", "1:1") else DEFAULT_PORT
    if given.rdzv_endpoint is None:
        return given.master_addr, given.master_port or default
    host, _, port = given.rdzv_endpoint.rpartition(":")
    return (host, int(port)) if host else (port, default)


def _missing_program(given: argparse.Namespace) -> list[str]:
    if given.module:
        # The first part only: importing a package to find its submodules would run its code here.
        top = given.target.split(".")[0]
        found = top in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(
            top, [os.getcwd(), *sys.path]
        )
        return [] if found else [f"no module named {top!r} (looked in {os.getcwd()} and this Python's packages)"]
    path = Path(given.target)
    if path.exists():
        return []
    folder = path.parent
    near = difflib.get_close_matches(path.name, os.listdir(folder) if folder.is_dir() else [], n=1)
    hint = f"; did you mean {folder / near[0]}?" if near else f" in {os.getcwd()}" * (not path.is_absolute())
    looks_like_module = "; --module starts a module" * (path.suffix != ".py" and not near)
    return [f"no such script: {given.target}{hint}{looks_like_module}"]
