"""The flags of `axonml-jax eval`, `generate` and `runs`."""

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path

from axonml_jax.launch.config.own_flags import add_imports
from axonml_jax.launch.config.run_config import ConfigError

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
    """Name the flag of a command that was meant, before what is left is taken for keys of a configuration.

    Raises:
      ConfigError: for a flag without a section that is nearly one of the command's.
    """
    own = [flag for action in parser._actions for flag in action.option_strings]
    for given in (
        word.partition("=")[0] for word in rest if word.startswith("--") and "." not in word.partition("=")[0]
    ):
        if near := difflib.get_close_matches(given, own, n=1, cutoff=0.8):
            raise ConfigError(f"unknown flag {given}: did you mean {near[0]}?")


def runs_parser() -> argparse.ArgumentParser:
    """The parser of `runs`."""
    parser = argparse.ArgumentParser(
        prog="axonml-jax runs", description="List runs, or compare some: their steps, losses, speeds and settings."
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="folders of runs, or folders that hold some (default: runs)"
    )
    parser.add_argument(
        "--metric", default="valid_loss", metavar="NAME", help="drawn and sorted by (default: valid_loss)"
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
