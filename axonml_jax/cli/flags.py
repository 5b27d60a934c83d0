"""Flags that several commands share, and how refusals are printed."""

import argparse
import difflib
import dis
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from axonml_jax.base import AXIS_SYNONYMS, meant
from axonml_jax.config.config import ConfigError, add_imports
from axonml_jax.config.sections import memory_size
from axonml_jax.models.config import PRESETS
from axonml_jax.planner.hardware import FAILURE_RATES, HARDWARE, SEARCHED, Assumptions, SaveAssumptions, failure_rate

# --------------------------------------------------------------------------------------------------
# Refusals and bugs: a refusal is printed as one message, a bug keeps its traceback.
#
# An exception is a refusal if a `raise` statement of this package raised it: that is how the library reports wrong input,
# with the remedy. Its own bugs end in an `assert`, or in a line of somebody else's code.
# --------------------------------------------------------------------------------------------------

TRACEBACK = "AXONML_JAX_TRACEBACK"
"""Set it to 1 to see where a refusal was raised."""

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_KINDS = (ValueError, TypeError, OSError, ImportError, RuntimeError)


def refusal(error: BaseException) -> str | None:
    """Returns the message to print for an exception, or None if it is a bug.

    Args:
      error: the exception, with its traceback.

    Returns:
      The message of an exception that a `raise` statement of this package has raised, or the path and the reason of a file
      operation that the system refused.

    >>> try:
    ...     int("two")
    ... except ValueError as error:
    ...     refusal(error) is None
    True
    """
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if not isinstance(error, _KINDS) or not _raised_here(error):
        return None
    return str(getattr(error, "strerror", None) or error)


_IN_PYTHON = (
    (
        r"\. Did you forget ax\.fake_devices\((\d+)\), before anything of JAX runs\?",
        r", or \1 simulated: --devices.simulated \1",
    ),
    (r"pass devices=jax\.devices\(\)\[:(\d+)\]", r"{fewer}"),
    (r"ax\.Plan\(draws='rows'\)", "--plan.draws rows"),
    (r"accept=\(.*", "give the model and the optimizer that made it, or begin a new run"),
    (r"\boffload=True\b", "--offload"),
    (
        r"\(accumulate=\), or a plan that splits more \(ax\.FSDP,",
        "(plan.accumulate), or a plan that splits more (mesh.fsdp,",
    ),
    (r"give bytes, as memory='16GiB'", "give bytes, as --plan.memory 16GiB"),
)
"""Patterns of remedies in Python, and the same remedies on the command line."""


def in_flags(text: str, fewer: str = "--devices.simulated {}") -> str:
    """Replace Python remedies in a message by the command line's.

    Args:
      text: the message.
      fewer: the flag that takes fewer devices; `{}` becomes their number.

    >>> in_flags("data=3 or pass devices=jax.devices()[:4]", "--devices {}")
    'data=3 or --devices 4'
    """
    for python, flags in _IN_PYTHON:
        text = re.sub(python, flags.replace("{fewer}", fewer.format(r"\1")), text)
    return text


def importable(packages: list[str]) -> list[str]:
    """Add the working directory to the import path if packages may be imported, as `python -m` does; returns them."""
    if packages and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return packages


def traceback_wanted() -> bool:
    """Whether the user asks for tracebacks of refusals (`TRACEBACK`)."""
    return os.environ.get(TRACEBACK, "") not in ("", "0")


def _raised_here(error: BaseException) -> bool:
    """Whether the exception comes from a `raise` statement of this package, rather than from a call that failed."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    if step is None or not step.tb_frame.f_code.co_filename.startswith(_OURS):
        return False
    return dis.opname[step.tb_frame.f_code.co_code[step.tb_lasti]] == "RAISE_VARARGS"


# --------------------------------------------------------------------------------------------------
# The flags of `axonml-jax import` and `axonml-jax export`.
# --------------------------------------------------------------------------------------------------

DTYPES = ("float32", "bfloat16", "float16")


def import_parser() -> argparse.ArgumentParser:
    """The parser of `import`."""
    parser = argparse.ArgumentParser(
        prog="axonml-jax import",
        description="Make a folder to train from of a model that Hugging Face's save_pretrained wrote. Nothing is downloaded.",
        epilog="axonml-jax import Llama-3.2-1B runs/llama && axonml-jax train runs/llama/config.yaml",
    )
    parser.add_argument("source", type=Path, metavar="HF_FOLDER", help="with config.json and safetensors files")
    parser.add_argument("target", type=Path, metavar="RUN_FOLDER", help="new: gets config.yaml and weights/")
    return parser


def export_parser() -> argparse.ArgumentParser:
    """The parser of `export`."""
    parser = argparse.ArgumentParser(
        prog="axonml-jax export",
        description="Write the model of a checkpoint as Hugging Face's from_pretrained reads it.",
        epilog="axonml-jax export runs/llama-2 Llama-mine --dtype bfloat16",
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="CHECKPOINT",
        help="one of a run of axonml-jax train, or the run's folder: its newest",
    )
    parser.add_argument("target", type=Path, metavar="HF_FOLDER", help="new: gets config.json and safetensors files")
    add_imports(parser)
    parser.add_argument("--ema", action="store_true", help="write the moving average of the parameters (ema.decay)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the arrays (default: the model's)")
    parser.add_argument(
        "--shard-size", type=memory_size, default=5e9, metavar="SIZE", help="of a file at most (default: 5GB)"
    )
    return parser


# --------------------------------------------------------------------------------------------------
# Files and folders that a command will write, checked before it computes anything.
# --------------------------------------------------------------------------------------------------

_PICTURES = (".svg", ".png", ".pdf")


def require_writable(files: Mapping[str, Path | None]) -> None:
    """Refuse output files that cannot be written, and a `--picture` that ends in no picture format.

    Args:
      files: paths by the flag that names them; None: the flag was not given.

    Raises:
      ValueError: with everything that is wrong.
    """
    problems = []
    for flag, path in files.items():
        if path is None:
            continue
        if path.is_dir():
            problems.append(f"{flag} {path}: is a folder; give a file in it")
        elif not path.parent.is_dir():
            problems.append(f"{flag} {path}: there is no folder {path.parent}; make it, or give another place")
        elif not _may_write(path):
            problems.append(f"{flag} {path}: may not be written; give another place")
        elif flag == "--picture" and path.suffix.lower() not in _PICTURES:
            problems.append(f"{flag} {path}: the ending chooses the format; give one of {', '.join(_PICTURES)}")
    if problems:
        raise ValueError("\n".join(problems))


def _may_write(path: Path) -> bool:
    """Tells whether a file may be written over, or else made in its folder."""
    return os.access(path, os.W_OK) if path.exists() else os.access(path.parent, os.W_OK | os.X_OK)


def require_folder(setting: str, folder: Path) -> None:
    """Refuse a folder that can neither be used nor made.

    Args:
      setting: the name of the setting, for the message.
      folder: its value; folders that are missing above it will be made too.

    Raises:
      ValueError: when a file is in its place or above it, or the nearest folder that exists may not be written to.
    """
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        raise ValueError(f"{setting}={folder}: {there} is a file; give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{setting}={folder}: {there} may not be written to; give another folder")


# --------------------------------------------------------------------------------------------------
# The flags of `axonml-jax plan`.
# --------------------------------------------------------------------------------------------------

MEASURE = "measure"
"""The value of `--hardware` that stands for the devices of this machine."""


def plan_parser() -> argparse.ArgumentParser:
    """The parser of `plan`."""
    parser = argparse.ArgumentParser(
        prog="axonml-jax plan",
        description="Find the fastest plan that fits, on paper: no devices are needed.",
        epilog="axonml-jax plan llama3-8b --devices 512 --hardware v5p --batch 1024",
    )
    parser.add_argument("model", help=f"a configuration file, or {', '.join(PRESETS)}")
    parser.add_argument("--devices", type=int, required=True, metavar="N")
    names = ", ".join(HARDWARE)
    parser.add_argument(
        "--hardware", default="v5p", help=f"{names}, or {MEASURE}: this machine's devices (default: v5p)"
    )
    parser.add_argument(
        "--slices", type=int, default=1, metavar="N", help="of TPU chips, that a network joins (default: 1)"
    )
    parser.add_argument("--batch", type=int, metavar="B", help="sequences per update (default: the configuration's)")
    parser.add_argument(
        "--length", type=int, metavar="S", help="of a sequence (default: the configuration's or the longest)"
    )
    precisions = ("float32", "bf16", "bf16-reduce", "bf16-reduce-float32", "fp16")
    parser.add_argument(
        "--precision", choices=precisions, type=lambda name: meant("precision", name, precisions),
        help="dtypes (default: the configuration's, or bf16)",
    )  # fmt: skip
    parser.add_argument("--max-memory", type=memory_size, metavar="SIZE", help="bytes of a device to use, as in 14GiB")
    _add_search(parser)
    _add_assumptions(parser)
    _add_outputs(parser)
    add_imports(parser)
    return parser


def _add_search(parser: argparse.ArgumentParser) -> None:
    named = lambda axis: AXIS_SYNONYMS.get(axis.lower(), axis)
    parser.add_argument(
        "--axes", nargs="+", choices=SEARCHED, type=named, default=SEARCHED, help="mesh axes to take (default: all)"
    )
    parser.add_argument(
        "--remat", nargs="+", choices=["none", "selective", "full"], default=["none", "selective", "full"],
        help="kinds of recomputation to consider (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--as-written", action="store_true", help="take the configuration's own mesh and plan instead of searching"
    )
    parser.add_argument(
        "--offload", action="store_true", help="optimizer states may rest on the host if nothing fits else"
    )


def _add_assumptions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--efficiency",
        type=float,
        metavar="X",
        help=f"of the peak FLOP/s; as measured, or {Assumptions.efficiency}",
    )
    parser.add_argument(
        "--overlap", type=float, default=Assumptions.overlap, metavar="X", help="share of compute that hides traffic"
    )

    saves = SaveAssumptions()
    failing = parser.add_mutually_exclusive_group()
    failing.add_argument(
        "--failures-per-device-hour", type=_failures, default=saves.failures_per_device_hour, metavar="X",
        help=f"interruptions of a job, as a number or as published: {', '.join(FAILURE_RATES)} (default: llama3)",
    )  # fmt: skip
    failing.add_argument("--mtbf", type=float, metavar="HOURS", help="between two failures of the whole job, instead")
    parser.add_argument(
        "--checkpoint-bandwidth", type=memory_size, default=saves.checkpoint_bandwidth, metavar="SIZE",
        help=f"of a checkpoint per second and device (default: {saves.checkpoint_bandwidth / 1e6:.0f}MB)",
    )  # fmt: skip
    parser.add_argument(
        "--restart-seconds", type=float, default=saves.restart_seconds, metavar="S",
        help="from a failure until the job is back, but for reading its checkpoint (default: %(default)s)",
    )  # fmt: skip


def _failures(text: str) -> float:
    try:
        return failure_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--ledger", action="store_true", help="print the best plan's memory, traffic and timeline too")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the best plan's memory, traffic and timeline"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write a configuration that `axonml-jax train` runs")
    parser.add_argument(
        "--verify",
        metavar="TOPOLOGY",
        help="compile the step for TPU chips that need not be here, as v5p:8x8x8 (with --slices of each slice); cpu: for "
        "simulated devices",
    )


# --------------------------------------------------------------------------------------------------
# The flags of `axonml-jax eval`, `generate` and `runs`.
# --------------------------------------------------------------------------------------------------

_KEYS = "Keys of the run's configuration may be given too, such as --mesh.fsdp 4 or --devices.simulated 1."


def generate_parser() -> argparse.ArgumentParser:
    """The parser of `generate`."""
    parser = _of_run("generate", "Continue a prompt with a trained run; without a prompt, what is piped in or typed.")
    parser.add_argument("--prompt", metavar="TEXT", help="how the text begins")
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file that holds the prompt")
    parser.add_argument("--length", type=int, default=200, metavar="N", help="tokens to write at most (default: 200)")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="texts to write (default: 1)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="divides the logits; 0: the most likely (default: 0.8)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K most likely tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw among the most likely tokens that make up P")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be given again")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)")
    return parser


def eval_parser() -> argparse.ArgumentParser:
    """The parser of `eval`."""
    parser = _of_run("eval", "Loss, perplexity and speed of a checkpoint, on the run's validation part or other text.")
    parser.add_argument("--split", choices=("valid", "train"), default="valid", help="of the text (default: valid)")
    parser.add_argument("--batches", type=int, metavar="N", help="take so many batches (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def refuse_misspelt(parser: argparse.ArgumentParser, rest: Sequence[str]) -> None:
    """Refuse a misspelt flag of the command, before the rest is read as configuration keys.

    Raises:
      ConfigError: for a flag without a dot that is nearly one of the command's, which it names.
    """
    own = [flag for action in parser._actions for flag in action.option_strings]
    for given in (
        word.partition("=")[0] for word in rest if word.startswith("--") and "." not in word.partition("=")[0]
    ):
        if near := difflib.get_close_matches(given, own, n=1, cutoff=0.8):
            raise ConfigError(f"unknown flag {given}: did you mean {near[0]}?")


SORTED_BY = "valid_loss"
"""The metric by which `runs` sorts, and that it draws, where no other is asked for."""


def runs_parser() -> argparse.ArgumentParser:
    """The parser of `runs`."""
    parser = argparse.ArgumentParser(
        prog="axonml-jax runs", description="List runs, or compare some: their steps, losses, speeds and settings."
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="folders of runs, or folders that hold some (default: runs)"
    )
    parser.add_argument(
        "--metric", default=SORTED_BY, metavar="NAME", help=f"drawn and sorted by (default: {SORTED_BY})"
    )
    parser.add_argument(
        "--highest", action="store_true", help="the highest value of the metric is the best, not the lowest"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the metric of all runs against the step")
    parser.add_argument("--differences", action="store_true", help="list the settings in which the runs differ")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


def _of_run(command: str, says: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"axonml-jax {command}", description=says, epilog=_KEYS, allow_abbrev=False)
    parser.add_argument(
        "run", metavar="RUN", help="the folder of a run, such as runs/quickstart, or one of its checkpoints"
    )
    parser.add_argument("--step", metavar="STEP", help="a checkpoint's number, last or best (default: last)")
    parser.add_argument("--ema", action="store_true", help="take the moving average of the parameters (ema.decay)")
    add_imports(parser)
    return parser
