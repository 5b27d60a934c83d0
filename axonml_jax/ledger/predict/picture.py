"""A prediction as a picture: memory by kind and bytes by axis."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axonml_jax.ledger.predict.prediction import Prediction

GIB = 2**30


def draw(prediction: "Prediction", path: str | Path) -> None:
    """Draw a stack of memory by kind and the traffic of every axis, forward and backward apart.

    Args:
      prediction: what to draw.
      path: where; the suffix chooses the format (.svg, .png, .pdf).

    Raises:
      ModuleNotFoundError: without matplotlib, which the `plots` extra installs.
    """
    figure = new_figure(9, 4)
    panels(figure, prediction)
    figure.savefig(path)


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches.

    Raises:
      ModuleNotFoundError: without matplotlib, which the `plots` extra installs.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'axonml-jax[plots]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def panels(figure: Any, prediction: "Prediction") -> None:
    """Draw memory and traffic side by side on a figure, or on a part of one."""
    memory, traffic = figure.subplots(1, 2, width_ratios=(1, 2))
    _memory(memory, prediction)
    _traffic(traffic, prediction)


def _memory(axes: Any, prediction: "Prediction") -> None:
    """What rests, then what the fullest moment adds."""
    held, bottom = prediction.memory, 0.0
    for name, size in held.by_kind().items():
        if name == "host":
            continue
        axes.bar([0], [size / GIB], bottom=bottom, label=name, width=0.6)
        bottom += size / GIB
    axes.axhline(held.total / GIB, color="black", linestyle="--", label="fullest moment")
    axes.set(title="memory per device", ylabel="GiB", xticks=[])
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _traffic(axes: Any, prediction: "Prediction") -> None:
    """Bytes on the wire by axis, stacked by when they travel."""
    names = list(dict.fromkeys(",".join(flow.axes) for flow in prediction.traffic))
    starts = [0.0] * len(names)
    for work, title in (("forward", "forward"), ("backward", "backward"), ("", "once at the end")):
        sizes = [
            sum(
                float(flow.wire_bytes)
                for flow in prediction.traffic
                if ",".join(flow.axes) == name and flow.work == work
            )
            / GIB
            for name in names
        ]
        if any(sizes):
            axes.barh(names, sizes, left=starts, label=title)
            starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    axes.set(title="sent per rank and step, by mesh axis", xlabel="GiB")
    axes.invert_yaxis()
    if names:
        axes.legend(fontsize="small", loc="lower right")
