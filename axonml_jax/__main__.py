"""The command line, `axonml-jax COMMAND` or `python -m axonml_jax COMMAND`: `COMMANDS` has them all.

Every command reads its arguments before it imports what it needs: help and refusals do not wait for JAX.
"""

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from axonml_jax.base import CLOSED_PIPE, INTERRUPTED, TERMINATED, USAGE_ERROR, Lossy
from axonml_jax.cli.flags import TRACEBACK, importable, in_flags, refusal, traceback_wanted
from axonml_jax.mesh.join import in_a_job, leave_now
from axonml_jax.mesh.launchers import ray_context

COMMANDS = ("train", "eval", "generate", "runs", "explain", "plan", "launch", "schedule", "devices", "import", "export")
OTHERS = {
    "run": "train",
    "fit": "train",
    "torchrun": "launch",
    "info": "devices",
    "check": "explain",
    "evaluate": "eval",
    "test": "eval",
    "sample": "generate",
    "predict": "generate",
    "compare": "runs",
    "list": "runs",
    "ledger": "explain",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
      argv: the arguments; None: those of this process.

    Returns:
      The exit status: 0; 2 for anything wrong with the arguments or the configuration, with one message on stderr (see
      cli/flags.py); 130 after Ctrl-C; 143 after SIGTERM (a training run is saved after either); 141 when the reader of
      its output is gone; else the command's own: 3 and 5 of `train`, 4 of `explain` and `plan`, the failed worker's of
      `launch`.

    Raises:
      Exception: in a worker of Ray Train every error is raised, so that its text reaches the driver; elsewhere only bugs.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if ray_context() is not None:  # if this process ended, Ray would not learn why
        if status := _dispatch(arguments):
            raise RuntimeError(
                f"axonml-jax {' '.join(arguments)} has ended with status {status}: see what it has printed"
            )
        return status
    if argv is None and arguments[:1] in (["train"], ["launch"]):  # lines that cannot be written must not end a run
        sys.stdout, sys.stderr = (_lossy(each, arguments[0] == "train") for each in (sys.stdout, sys.stderr))
    status = _status(arguments)
    if status not in (0, TERMINATED, INTERRUPTED) and in_a_job():
        leave_now(status)  # the other processes may be waiting for this one
    return status


def _lossy(stream: Any, asks: bool) -> Any:
    """Returns a standard stream whose failed writes lose lines instead of raising; one that was replaced stays as it is."""
    if stream is None or not any(stream is own for own in (sys.__stdout__, sys.__stderr__)):
        return stream
    stream.flush()
    raw: Any = Lossy(stream.fileno(), "w", closefd=False)
    raw.asks = asks
    buffer = raw if stream.write_through else io.BufferedWriter(raw)  # as `python -u` has it
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, None, stream.line_buffering, stream.write_through)


def _status(arguments: Sequence[str]) -> int:
    try:
        status = _dispatch(arguments)
        if arguments[:1] != ["train"]:
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output has enough, as in `axonml-jax plan ... | head`
        if arguments[:1] in (["train"], ["launch"]):
            raise  # it may be another pipe's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more is written to it at the exit
        return CLOSED_PIPE
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        if in_a_job():
            leave_now(INTERRUPTED)
        return INTERRUPTED
    except SystemExit as stop:  # argparse's, after --help and --version or a usage error that it has printed
        return stop.code if isinstance(stop.code, int) else USAGE_ERROR
    except Exception as error:
        if (said := refusal(error)) is None:
            raise
        if traceback_wanted():
            traceback.print_exception(error)
        print(f"axonml-jax: error: {in_flags(said)}", file=sys.stderr)
        return USAGE_ERROR


def _dispatch(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["launch"] and "".join(arguments[1:2]).startswith("--write"):
        from axonml_jax.cli.manifests import write_manifest

        return write_manifest(arguments[1:])
    if arguments[:1] == ["launch"]:
        from axonml_jax.launch.launcher import launch

        return launch(arguments[1:])
    if arguments[:1] == ["schedule"]:
        from axonml_jax.cli.schedule import schedule

        return schedule(arguments[1:])
    if arguments[:1] == ["plan"]:
        return _plan(arguments[1:])
    if arguments[:1] in (["import"], ["export"]):
        return _weights(*arguments)
    if arguments[:1] in (["train"], ["explain"]):
        return _run(*arguments)
    if arguments[:1] in (["eval"], ["generate"], ["runs"]):
        return _saved(*arguments)
    _refuse_unknown(arguments[:1])
    if not arguments:
        _parser().print_help(sys.stderr)
        return USAGE_ERROR
    chosen = _parser().parse_args(arguments)
    from axonml_jax.cli.run import devices

    return devices(chosen.simulated)


def _refuse_unknown(first: Sequence[str]) -> None:
    """Refuse an unknown command, and suggest the one that was meant: the nearest name, or by a file's ending."""
    if not first or first[0].startswith("-") or first[0] in COMMANDS:
        return
    from axonml_jax.base import nearest
    from axonml_jax.config.config import ConfigError

    by_kind = {".py": "launch", ".yaml": "train", ".yml": "train"}.get(os.path.splitext(first[0])[1])
    near = f"{by_kind} {first[0]}" if by_kind else nearest(first[0], COMMANDS, OTHERS)
    hint = f"did you mean axonml-jax {near}?" if near else f"the commands are {', '.join(COMMANDS)}"
    raise ConfigError(f"unknown command {first[0]!r}: {hint}")


def _plan(arguments: Sequence[str]) -> int:
    from axonml_jax.cli.flags import plan_parser

    chosen = plan_parser().parse_args(arguments)
    importable(chosen.allow_imports)
    from axonml_jax.cli.plan import plan

    return plan(chosen, arguments)


def _weights(command: str, *arguments: str) -> int:
    from axonml_jax.cli.flags import export_parser, import_parser

    chosen = (import_parser if command == "import" else export_parser)().parse_args(arguments)
    if command == "import":
        from axonml_jax.cli.files import import_weights

        return import_weights(chosen)
    from axonml_jax.cli.files import export_weights

    return export_weights(chosen)


def _run(command: str, *arguments: str) -> int:
    # What follows is read by the configuration's own parser, made from the configuration's keys.
    from axonml_jax.config.config import (
        Budget,
        Estimate,
        budget_parser,
        estimate_parser,
        help_of,
        imports_parser,
        read_config,
        split_flags,
    )

    parsers = [imports_parser(command), budget_parser(command), *([estimate_parser()] if command == "explain" else [])]
    [allowed, budget, *estimate], rest = split_flags(parsers, arguments)
    config = read_config(command, rest, help_of(parsers), importable(allowed["allow_imports"]))
    from axonml_jax.cli import train as run

    if command == "train":
        return run.train(config, Budget(**budget))
    return run.explain(config, Budget(**budget), Estimate(**estimate[0]))


def _saved(command: str, *arguments: str) -> int:
    from axonml_jax.cli import flags

    if command == "runs":
        chosen = flags.runs_parser().parse_args(arguments)
        from axonml_jax.cli.saved import runs

        return runs(chosen)
    parser = flags.eval_parser() if command == "eval" else flags.generate_parser()
    chosen, rest = parser.parse_known_args(arguments)
    flags.refuse_misspelt(parser, rest)
    importable(chosen.allow_imports)
    if command == "eval":
        from axonml_jax.cli.saved import eval_run

        return eval_run(chosen, rest)
    from axonml_jax.cli.saved import generate_text

    return generate_text(chosen, rest)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="axonml-jax",
        description="Train any Flax model on many devices.",
        epilog=f"`axonml-jax train --help` lists every key. {TRACEBACK}=1 shows where an error was raised.",
    )
    parser.add_argument("--version", action="version", version=sys.modules["axonml_jax"].__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("train", help="train on text as a configuration file says", add_help=False)
    commands.add_parser("eval", help="loss, perplexity and speed of a run's checkpoint", add_help=False)
    commands.add_parser("generate", help="text from a run's checkpoint", add_help=False)
    commands.add_parser("runs", help="list runs, compare them, draw them together", add_help=False)
    commands.add_parser("explain", help="print plan and ledger of a configuration, without training", add_help=False)
    commands.add_parser("plan", help="find the best plan for a number of devices, without them", add_help=False)
    commands.add_parser("launch", help="start the processes of a job, as torchrun does", add_help=False)
    commands.add_parser("schedule", help="draw a pipeline's timetable, its bubble and memory", add_help=False)
    commands.add_parser("import", help="make a folder to train from of Hugging Face weights", add_help=False)
    commands.add_parser("export", help="write a checkpoint's model as Hugging Face weights", add_help=False)
    devices = commands.add_parser("devices", help="print what JAX sees on this machine")
    devices.add_argument("--simulated", type=int, metavar="N", help="with N simulated CPU devices")
    return parser


if __name__ == "__main__":
    sys.exit(main())
