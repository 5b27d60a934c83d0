"""Flags and options of `axonml-jax launch`."""

import argparse
import difflib
import importlib.machinery
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonml_jax.config.config import ConfigError, nearest_file, not_a_file
from axonml_jax.mesh.join import check_host

# --------------------------------------------------------------------------------------------------
# The command line of `axonml-jax launch`: torchrun's flags, with hyphens or underscores; unknown ones named.
# --------------------------------------------------------------------------------------------------

DEFAULT_PORT = 29500
"""The master port of several machines if none is given, as torchrun's."""

ATTEMPT_PORTS = 16
"""How many ports after the master port the workers' coordinator takes in turn, one for each attempt."""

MOST_NODES = 2**14
"""The most machines of a job: node 0 keeps a connection to each, and sends each the sizes of all."""

LAST_CALL = 30.0
"""Seconds to wait for more machines once there are enough, as torchrun does."""

_OF_A_RUN = ("train", "eval", "generate")
"""Commands of `axonml-jax` that several processes run together."""

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
    """The parser of `axonml-jax launch`; every flag is accepted with underscores too."""
    parser = argparse.ArgumentParser(
        prog="axonml-jax launch",
        usage="axonml-jax launch [flags] SCRIPT [arguments of the script]",
        description="Start the processes of a job on this machine, watch them, and stop all when one fails. Each finds its "
        "place in the environment; ax.init() reads it.",
        epilog="axonml-jax launch --write KIND --help: what a cluster's engine is given to run a configuration.",
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
        "--master-port",
        type=int,
        metavar="PORT",
        help=f"port there (for one machine a free one, as is 0; else {DEFAULT_PORT})",
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
        help="seconds after a start at which as many standby processes begin: they import, and take over at a restart",
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
    """Refuse unknown flags before argparse, which would take their values for the script.

    Raises:
      ConfigError: with the nearest known flag, or why a flag of torchrun's is not needed here.
    """
    actions = parser._option_string_actions
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if not word.startswith("-") or word == "--":
            return
        if (action := actions.get(name)) is None and not (word[:2] in actions and word[1] != "-"):
            if name == "--write":
                raise ConfigError("launch: --write comes first: axonml-jax launch --write KIND --nnodes N train CONFIG")
            if name in _NOT_NEEDED:
                raise ConfigError(f"launch: {name} has no work here: {_NOT_NEEDED[name]}; leave it out")
            near = difflib.get_close_matches(name, [known for known in actions if "_" not in known], n=1)
            raise ConfigError(
                f"launch: unknown flag {word}" + (f": did you mean {near[0]}?" if near else "; see --help")
            )
        if action is not None and action.nargs is None and not equals:
            next(words, None)


# --------------------------------------------------------------------------------------------------
# The options of `axonml-jax launch` as one frozen value; everything that cannot work is refused at once.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The options of `axonml-jax launch`.

    Attributes:
      nproc_per_node: a number, `auto`, `cpu` or `gpu`.
      nnodes: number of machines; the largest, where they may come and go.
      min_nodes: the smallest number of them.
      node_unit: how many of them come and go together.
      last_call: seconds to wait for more of them, once there are enough, since the last has come.
      node_rank: which of them this is.
      master_addr: host of node 0.
      master_port: port there; None, with one machine only: a free one.
      max_restarts: how often all workers are started again after a failure.
      standby: seconds after which processes are started that stand by for a restart; None: none are.
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
    min_nodes: int
    node_unit: int
    last_call: float
    node_rank: int
    master_addr: str
    master_port: int | None
    max_restarts: int
    standby: float | None
    shutdown_timeout: float
    log_dir: Path | None
    tee: Mapping[int, int] | int
    redirects: Mapping[int, int] | int
    module: bool
    target: str
    arguments: tuple[str, ...]

    @property
    def elastic(self) -> bool:
        """Whether machines may come and go."""
        return self.min_nodes < self.nnodes

    @property
    def command(self) -> list[str]:
        """The command line of a worker."""
        return [sys.executable, *(["-m"] if self.module else []), self.target, *self.arguments]


def read_options(argv: Sequence[str], environ: Mapping[str, str]) -> LaunchOptions:
    """Parse the flags before the script, the script, and its arguments.

    Args:
      argv: what follows `axonml-jax launch`.
      environ: `PET_<FLAG>` variables are defaults, as for torchrun (Kubernetes' training operator sets them).

    Raises:
      ConfigError: for an unknown flag (with the nearest known one, or why torchrun's is not needed), values that
        contradict each other, or a script or module that is not there.
      SystemExit: after `--help`, or argparse's usage error.
    """
    parser = launch_parser(environ)
    refuse_unknown_flags(argv, parser)
    given = parser.parse_args(argv)
    if given.target is None:
        raise ConfigError("launch: give a script after the flags: axonml-jax launch --nproc-per-node 2 train.py")
    problems = [*_contradictions(given), *_missing_program(given)]
    if problems:
        raise ConfigError("\n".join(f"launch: {problem}" for problem in problems))
    host, port = _endpoint(given)
    smallest, _, largest = given.nnodes.rpartition(":")
    return LaunchOptions(
        nproc_per_node=given.nproc_per_node,
        nnodes=int(largest),
        min_nodes=int(smallest or largest),
        node_unit=given.node_unit,
        last_call=LAST_CALL if given.last_call is None else given.last_call,
        node_rank=given.node_rank or 0,
        master_addr=host or "127.0.0.1",
        master_port=port or None,  # 0: a free one, as torchrun has it
        max_restarts=given.max_restarts,
        standby=given.standby,
        shutdown_timeout=given.shutdown_timeout,
        log_dir=given.log_dir,
        tee=given.tee if given.tee is not None else 3 if given.log_dir else 0,
        redirects=given.redirects,
        module=given.module,
        target=given.target,
        arguments=tuple(given.arguments),
    )


def streams_of(which: Mapping[int, int] | int, local_rank: int) -> int:
    """The streams of one worker that `--tee` or `--redirects` selects."""
    return which if isinstance(which, int) else which.get(local_rank, 0)


def _contradictions(given: argparse.Namespace) -> list[str]:
    problems = _bad_range(given)
    if not problems and (largest := int(given.nnodes.rpartition(":")[2])) > 1:
        problems += _unplaced(given, largest)
    elif not problems and given.node_rank:
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
    if given.standby is not None and given.max_restarts == 0 and not _is_range(given.nnodes):
        problems.append(
            f"--standby {given.standby:g} with --max-restarts 0: nothing is started again; give --max-restarts too"
        )
    limits = {"--max-restarts": given.max_restarts, "--shutdown-timeout": given.shutdown_timeout}
    limits |= {"--standby": given.standby or 0.0, "--last-call": given.last_call or 0.0}
    problems += [f"{name} {value}: must not be negative" for name, value in limits.items() if value < 0]
    return problems + _bad_ports(given)


def _bad_range(given: argparse.Namespace) -> list[str]:
    smallest, colon, largest = given.nnodes.rpartition(":")
    low, unit = smallest or largest, given.node_unit
    if not (low.isdecimal() and largest.isdecimal() and 0 < int(low) <= int(largest) and (smallest or not colon)):
        return [f"--nnodes {given.nnodes}: must be a positive number, or MIN:MAX where machines may come and go"]
    if int(largest) > MOST_NODES:
        return [f"--nnodes {given.nnodes}: node 0 keeps a connection to every machine, to {MOST_NODES} at most"]
    idle = {"--node-unit": unit if unit != 1 else None, "--last-call": given.last_call}
    if not _is_range(given.nnodes) and (
        said := [f"{name} {value}" for name, value in idle.items() if value is not None]
    ):
        has = "has" if len(said) == 1 else "have"
        return [f"{' and '.join(said)} {has} no effect while --nnodes {given.nnodes} is no range: give MIN:MAX"]
    if unit < 1 or int(low) % unit or int(largest) % unit:
        return [f"--node-unit {unit}: must be a positive number that divides both of --nnodes {given.nnodes}"]
    return []


def _is_range(nnodes: str) -> bool:
    smallest, _, largest = nnodes.rpartition(":")
    return smallest not in ("", largest)


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
    if (host := _endpoint(given)[0]) is not None:
        try:
            check_host(host.strip("[]"), f"host {host}")
        except ValueError as error:
            return [str(error)]
    alone = given.nnodes in ("1", "1:1")
    if port == 0 and not alone:
        why = "0 means any free one, and the machines must know it before"
        return [f"port 0 with --nnodes {given.nnodes}: {why}: leave it out for {DEFAULT_PORT}, or give all the same"]
    largest = 65535 if alone else 65535 - ATTEMPT_PORTS
    after = f", as several machines use the {ATTEMPT_PORTS} ports after it too" * (not alone)
    return [] if port is None or 0 <= port <= largest else [f"port {port}: must be 1 to {largest}{after}"]


def _endpoint(given: argparse.Namespace) -> tuple[str | None, int | None]:
    """The given host and port; a missing port gets a default if several machines must agree on it."""
    default = None if given.nnodes in ("1", "1:1") else DEFAULT_PORT
    if given.rdzv_endpoint is None:
        return given.master_addr, default if given.master_port is None else given.master_port
    host, _, port = given.rdzv_endpoint.rpartition(":")
    return (host, int(port)) if host else (port, default)


def _missing_program(given: argparse.Namespace) -> list[str]:
    if given.module:
        # The first part only: importing a package to find its submodules would run its code here.
        top = given.target.split(".")[0]
        here = importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path])
        # Editable installs may have a finder of their own.
        found = here or any(finder.find_spec(top, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        return [] if found else [f"no module named {top!r} (looked in {os.getcwd()} and this Python's packages)"]
    path = Path(given.target)
    if path.suffix in (".yaml", ".yml"):
        return [f"{path} is no script: say --module axonml_jax train {path}"]
    if given.target in _OF_A_RUN and not path.exists():
        return [f"{path} is no script: say --module axonml_jax {path} {next(iter(given.arguments), 'CONFIG')}"]
    if (kind := not_a_file(path)) and not path.is_dir():
        return [f"{path} is {kind}, which every process would read: give a script"]
    if path.exists():
        return []
    near = nearest_file(path)
    hint = f"; did you mean {near}?" if near else f" in {os.getcwd()}" * (not path.is_absolute())
    looks_like_module = "; --module starts a module" * (path.suffix != ".py" and not near)
    return [f"no such script: {given.target}{hint}{looks_like_module}"]
