"""`explain --hardware` and `--picture`: how long a step would take on a kind of hardware, printed and drawn."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from axonml_jax.launch.config import ConfigError
from axonml_jax.ledger.predict.prediction import Prediction
from axonml_jax.planner.hardware import HARDWARE, Hardware
from axonml_jax.planner.picture import draw
from axonml_jax.planner.price import price
from axonml_jax.planner.timeline import Timeline, timeline


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


def estimate_parser() -> argparse.ArgumentParser:
    """The flags of `explain`."""
    parser = argparse.ArgumentParser(prog="axonml-jax explain", add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--hardware", choices=list(HARDWARE), help=f"price a step on one of {', '.join(HARDWARE)}, with its timeline"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw memory, traffic and, with hardware, the timeline"
    )
    return parser


def show(found: Prediction, asked: Estimate) -> str:
    """Time and timeline in words; draws the picture.

    Raises:
      ConfigError: for a picture that cannot be drawn.
    """
    kind, lines = asked.kind, []
    line = None if kind is None else timeline(found, kind)
    if kind is not None:
        cost = price(found, kind)
        lines += [f"{1e3 * cost.time:,.1f} ms/step, MFU {cost.mfu:.1%} on {kind.name}", str(line)]
    if asked.picture is not None:
        lines.append(drawn(found, line, asked.picture))
    return "\n\n".join(lines)


def drawn(found: Prediction, line: Timeline | None, path: Path) -> str:
    """Draw a prediction, with its timeline where there is one, and say where.

    Raises:
      ConfigError: for a picture that cannot be drawn.
    """
    try:
        if line is None:
            found.save_picture(path)
        else:
            draw(found, line, path)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        raise ConfigError(f"--picture {path}: {error}") from error
    return f"picture   {path}"
