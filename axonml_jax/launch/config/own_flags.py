"""Flags of `train` and `explain` that are no keys of a configuration: taken out before it is read, and told of in its help."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonml_jax.launch.config.memory_size import memory_size
from axonml_jax.planner.hardware import HARDWARE, Hardware
from axonml_jax.synonyms import meant


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a step may cost.

    Attributes:
      check: a baseline that memory and traffic may not exceed.
      tolerance: by which share they may.
      max_memory: bytes of a device.
      write_baseline: where to write a baseline.
      force: train even what cannot fit.
    """

    check: Path | None = None
    tolerance: float = 0.0
    max_memory: float | None = None
    write_baseline: Path | None = None
    force: bool = False


def budget_parser(command: str) -> argparse.ArgumentParser:
    """The budget's flags of `train` or `explain`."""
    parser = argparse.ArgumentParser(prog=f"axonml-jax {command}", add_help=False, allow_abbrev=False)
    of_device = "bytes that a device may hold, as in 16GiB"
    if command == "train":
        parser.add_argument(
            "--max-memory", type=memory_size, metavar="SIZE", help=f"{of_device}: refuse what needs more"
        )
        parser.add_argument("--force", action="store_true", help="train even what does not fit")
        return parser
    parser.add_argument("--max-memory", type=memory_size, metavar="SIZE", help=f"{of_device}: exit with 4 beyond it")
    parser.add_argument("--check", type=Path, metavar="FILE", help="a baseline: exit with 4 when a step costs more")
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="X", help="by which share it may (default: 0)")
    parser.add_argument("--write-baseline", type=Path, metavar="FILE", help="write what a step costs as a baseline")
    return parser


def imports_parser(command: str) -> argparse.ArgumentParser:
    """The flag that says what a configuration may import."""
    parser = argparse.ArgumentParser(prog=f"axonml-jax {command}", add_help=False, allow_abbrev=False)
    add_imports(parser)
    return parser


def add_imports(parser: argparse.ArgumentParser) -> None:
    """`--allow-imports` among a parser's flags."""
    parser.add_argument(
        "--allow-imports",
        type=lambda words: words.split(","),
        action="extend",  # each refusal names a flag to add
        default=[],
        metavar="PACKAGES",
        help="packages, with commas, that the configuration's class_paths may import: their code is run",
    )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What to say of a step beside its ledger.

    Attributes:
      hardware: a name of the planner's table: price the step on it.
      picture: where to draw memory and traffic, and with hardware the timeline.
    """

    hardware: str | None = None
    picture: Path | None = None

    @property
    def kind(self) -> Hardware | None:
        """The hardware that was asked for."""
        return None if self.hardware is None else HARDWARE[self.hardware]


def _hardware(name: str) -> str:
    return meant("hardware", name, HARDWARE)


def estimate_parser() -> argparse.ArgumentParser:
    """The flags of `explain`."""
    parser = argparse.ArgumentParser(prog="axonml-jax explain", add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--hardware",
        choices=list(HARDWARE),
        type=_hardware,
        help=f"price a step on one of {', '.join(HARDWARE)}, with its timeline",
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw memory, traffic and, with hardware, the timeline"
    )
    return parser


def split_flags(
    parsers: Sequence[argparse.ArgumentParser], argv: Sequence[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The values of every parser's flags, and the arguments that are left for the configuration."""
    found, rest = [], list(argv)
    for parser in parsers:
        values, rest = parser.parse_known_args(rest)
        found.append(vars(values))
    return found, rest


def help_of(parsers: Sequence[argparse.ArgumentParser]) -> str:
    """One sentence that names the flags and says what they do."""
    actions = [action for parser in parsers for action in parser._actions]
    return f"Beside the keys there are {'; '.join(map(_told, actions))}."


def _told(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {action.metavar or 'NAME'}"
    return f"{action.option_strings[0]}{value}: {action.help}"
