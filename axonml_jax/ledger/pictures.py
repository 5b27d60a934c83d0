"""Pictures (the `plots` extra): predictions, memory against recomputation, estimates of memory side by side.

Of a `Prediction` (`predict.py`, which imports this) its memory, traffic, curve and headline are drawn.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from axonml_jax.base import size_in_words
from axonml_jax.ledger.memory import MIB, FSDPMemoryStats


class Kept(NamedTuple):
    """A point of the curve of memory against recomputation.

    Attributes:
      memory: peak bytes of a device.
      again: recomputed work: of a prediction FLOPs over those of forward and backward, of a trace seconds.
      words: what is kept; "": the point has no label.
    """

    memory: int
    again: float
    words: str = ""


_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
_WORK = {
    "forward": ("forward", "#7fb0e3"), "backward": ("backward", "#2f6fb2"), "": ("once at the end", "#6b6b6b"),
}  # fmt: skip
_FAR = 8  # a budget of more than this many times the need is not drawn to scale: it would flatten the bar


def draw(prediction: Any, path: str | Path, *, model: str = "", budget: float | None = None) -> None:
    """Draws memory by kind, traffic by axis, forward and backward apart, and memory against recomputation.

    Args:
      prediction: a `Prediction`.
      path: where; the suffix chooses the format (.svg, .png, .pdf).
      model: its name, for the title.
      budget: bytes that a device may use, drawn as a line.

    Raises:
      ModuleNotFoundError: without matplotlib, which the `plots` extra installs.
    """
    figure = new_figure(9, height(prediction))
    put_title(figure, prediction, model)
    panels(figure, prediction, budget)
    save(figure, path)


def save(figure: Any, path: str | Path) -> None:
    """Write a figure; an SVG without its date, so that equal pictures are equal files."""
    figure.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def new_figure(width: float, height: float) -> Any:
    """An empty figure of this size in inches.

    Raises:
      ModuleNotFoundError: without matplotlib, which the `plots` extra installs.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'axonml-jax[plots]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def put_title(figure: Any, prediction: Any, model: str) -> None:
    """Name the model and the plan above a figure."""
    words = f"{model}: {prediction.headline}" if model else prediction.headline
    figure.suptitle("\n".join(textwrap.wrap(words, 110)), fontsize="medium")


def height(prediction: Any) -> float:
    """The height in inches that the panels need."""
    return 4.2 + 3.2 * (len(prediction.curve) > 1)


def panels(figure: Any, prediction: Any, budget: float | None = None) -> None:
    """Draws memory and traffic (if any) side by side, and below them memory against recomputation, if there is a curve.

    Args:
      figure: to draw on, or a part of one.
      prediction: a `Prediction`.
      budget: bytes that a device may use, drawn as a line.
    """
    if len(prediction.curve) > 1:
        figure, below = figure.subfigures(2, 1, height_ratios=(4.2, 3.2))
        points = [point._replace(again=100 * point.again) for point in prediction.curve]
        here = Kept(prediction.memory.total, 100 * prediction.again, "this plan")
        draw_curve(below.subplots(), points, here, "% of a step's FLOPs", budget)
    if not sent_by_axes(prediction):
        _memory(figure.subplots(), prediction, budget)
        return
    memory, traffic = figure.subplots(1, 2, width_ratios=(1, 2))
    _memory(memory, prediction, budget)
    _traffic(traffic, prediction)


def sent_by_axes(prediction: Any) -> dict[str, dict[str, float]]:
    """Bytes sent: mesh axes -> the pass in which they are sent ("forward", "backward", "") -> bytes."""
    found: dict[str, dict[str, float]] = {}
    for flow in prediction.traffic:
        sent = found.setdefault(",".join(flow.axes), {})
        sent[flow.work] = sent.get(flow.work, 0.0) + float(flow.wire_bytes)
    return found


def _memory(axes: Any, prediction: Any, budget: float | None) -> None:
    """Draws a bar of memory by kind and a line at the peak, which is less where kinds peak at different times."""
    held = prediction.memory
    kinds = {name: size for name, size in held.by_kind().items() if size and name not in ("host", "kept_on_host")}
    top = max(sum(kinds.values()), held.total)
    unit, size_of = _unit(top)
    bottom = 0.0
    for name, size in kinds.items():
        axes.bar([0], [size / size_of], bottom=bottom, label=f"{name} {size_in_words(size)}", width=0.6)
        bottom += size / size_of
    axes.axhline(
        held.total / size_of, color="black", linestyle="--", label=f"at the fullest moment {size_in_words(held.total)}"
    )
    axes.set(title="memory per device", ylabel=unit, xticks=[], xlim=(-0.5, 0.5))
    axes.set_ylim(0, 1.08 * max(top, budget if budget is not None and budget < _FAR * top else 0) / size_of)
    if budget is not None:
        above = "" if budget < _FAR * top else " (far above)"
        axes.axhline(
            min(budget, 2 * _FAR * top) / size_of, color="#c0392b", label=f"may be used {size_in_words(budget)}{above}"
        )
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _traffic(axes: Any, prediction: Any) -> None:
    """Draws the bytes sent by axis, stacked by pass, with each axis's total in words."""
    found = sent_by_axes(prediction)
    names, totals = list(found), [sum(sent.values()) for sent in found.values()]
    unit, size_of = _unit(max(totals))
    starts = [0.0] * len(names)
    for work, (title, colour) in _WORK.items():
        sizes = [sent.get(work, 0.0) / size_of for sent in found.values()]
        if any(sizes):
            axes.barh(names, sizes, 0.6, left=starts, label=title, color=colour)
            starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    for row, (start, total) in enumerate(zip(starts, totals, strict=True)):
        axes.annotate(f" {size_in_words(total)}", (start, row), va="center", fontsize="small")
    axes.set(title="sent per rank and step, by mesh axis", xlabel=unit, xlim=(0, 1.3 * max(starts)))
    axes.set_ylim(len(names) - 0.5 + (len(names) == 1), -0.5 - (len(names) == 1))
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3, frameon=False)


def _unit(size: float) -> tuple[str, int]:
    return next((unit for unit in _UNITS if size >= unit[1]), _UNITS[-1])


def draw_curve(axes: Any, points: Sequence[Kept], here: Kept, unit: str, budget: float | None = None) -> None:
    """Draws recomputation against the bytes of a device, for each choice of what is kept.

    Args:
      axes: of matplotlib.
      points: of the curve; those with words are labelled.
      here: the point of the plan itself.
      unit: the unit of `again`.
      budget: bytes that a device may use, drawn as a line where it is not far away.
    """
    most = max(here.memory, *(point.memory for point in points))
    name, size_of = _unit(most)
    memory, again = [point.memory / size_of for point in points], [point.again for point in points]
    axes.plot(memory, again, marker="o", markersize=3, color=_WORK["backward"][1])
    for point, x in zip(points, memory, strict=True):
        if point.words:
            axes.annotate(f" {point.words}", (x, point.again), fontsize="small", va="bottom", rotation=20)
    said = f"{here.words}: {size_in_words(here.memory)}, {here.again:.3g} {unit} twice"
    axes.plot([here.memory / size_of], [here.again], "o", color="black", label=said)
    if budget is not None and budget < _FAR * most:
        axes.axvline(budget / size_of, color="#c0392b", label=f"may be used {size_in_words(budget)}")
    axes.set(
        title="what may be kept: memory against work done twice", xlabel=f"{name} of a device", ylabel=f"twice, {unit}"
    )
    axes.margins(x=0.08, y=0.2)
    axes.legend(fontsize="small", loc="best")


# --------------------------------------------------------------------------------------------------
# A bar picture of memory by kind and strategy (needs the `plots` extra).
# --------------------------------------------------------------------------------------------------

_COLORS = {"parameters": "#4c72b0", "gradients": "#dd8452", "optimizer": "#55a868", "gathered for use": "#b7b7b7"}


def plot_memory(
    stats: Mapping[str, FSDPMemoryStats], path: str | Path, *, title: str | None = None, budget: float | None = None
) -> None:
    """Draw estimates side by side, one bar each: a device's memory by kind, with host memory below zero.

    Args:
      stats: estimates (`fsdp.memory_estimate()`) by name, such as that of the strategy.
      path: of the picture; its ending decides the format (svg, png, pdf).
      title: above the bars, such as the model's name and the mesh; None: how many parameters the models have.
      budget: bytes that a device has, drawn as a line.

    Raises:
      ModuleNotFoundError: without matplotlib, which the `plots` extra installs.
      ValueError: without anything to draw.
    """
    if not stats:
        raise ValueError("plot_memory draws estimates by name, but none was given")
    figure = new_figure(1.5 + 1.25 * len(stats), 4.2)
    axes = figure.subplots()
    _draw(axes, stats, budget)
    sizes = sorted({each.total_params for each in stats.values()})
    figure.suptitle(" and ".join(f"{size:,}" for size in sizes) + " parameters" if title is None else title)
    save(figure, path)


def _draw(axes: Any, stats: Mapping[str, FSDPMemoryStats], budget: float | None) -> None:
    names = list(stats)
    bottoms = [0.0] * len(names)
    for kind, color in _COLORS.items():
        heights = [_on_device(each)[kind] / MIB for each in stats.values()]
        if not any(heights):
            continue
        axes.bar(names, heights, 0.65, bottom=bottoms, color=color, label=kind)
        bottoms = [low + more for low, more in zip(bottoms, heights, strict=True)]
    hosts = [-each.host_bytes / MIB for each in stats.values()]
    if any(hosts):
        axes.bar(names, hosts, 0.65, color="white", edgecolor="#777777", hatch="///", label="on the host")
        axes.axhline(0, color="black", linewidth=0.8)
    if budget is not None:
        axes.axhline(budget / MIB, color="#c0392b", label=f"a device has {budget / MIB:,.0f}")
    for name, height in zip(names, bottoms, strict=True):
        axes.annotate(f"{height:,.0f}" if height >= 10 else f"{height:.2g}", (name, height), ha="center", va="bottom")
    axes.margins(y=0.08)
    axes.set_ylabel("MB per device")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", labelrotation=20)
    axes.legend(frameon=False, fontsize="small")


def _on_device(stats: FSDPMemoryStats) -> dict[str, int]:
    away = stats.offload
    return {
        "parameters": 0 if away.params else stats.param_bytes,
        "gradients": 0 if away.gradients else stats.grad_bytes,
        "optimizer": 0 if away.optimizer else stats.optim_bytes,
        "gathered for use": stats.gathered_bytes,
    }
