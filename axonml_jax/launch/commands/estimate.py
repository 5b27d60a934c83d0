"""`explain --hardware` and `--picture`: how long a step would take on a kind of hardware, printed and drawn."""

from pathlib import Path

from axonml_jax.launch.config.own_flags import Estimate
from axonml_jax.launch.config.run_config import ConfigError
from axonml_jax.ledger.predict.prediction import Prediction
from axonml_jax.planner.answer_picture import draw
from axonml_jax.planner.price import price
from axonml_jax.planner.timeline import Timeline, timeline


def show(found: Prediction, asked: Estimate, model: str, budget: float | None) -> str:
    """Time and timeline in words; draws the picture.

    Args:
      found: what the plan holds and sends.
      asked: what to say of it.
      model: its name.
      budget: bytes of a device to use, as far as they were given; else all that the hardware has.

    Raises:
      ConfigError: for a picture that cannot be drawn.
    """
    kind, lines = asked.kind, []
    line = None if kind is None else timeline(found, kind)
    if kind is not None:
        cost = price(found, kind)
        lines += [f"{1e3 * cost.time:,.1f} ms/step, MFU {cost.mfu:.1%} on {kind.name}", str(line)]
    if asked.picture is not None:
        most = kind.memory if budget is None and kind is not None else budget
        lines.append(drawn(found, line, asked.picture, model, most))
    return "\n\n".join(lines)


def drawn(found: Prediction, line: Timeline | None, path: Path, model: str, budget: float | None) -> str:
    """Draw a prediction, with its timeline where there is one, and say where.

    Raises:
      ConfigError: for a picture that cannot be drawn.
    """
    try:
        if line is None:
            found.save_picture(path, model=model, budget=budget)
        else:
            draw(found, line, path, model=model, budget=budget)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        raise ConfigError(f"--picture {path}: {error}") from error
    return f"picture   {path}"
