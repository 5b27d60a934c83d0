"""A prediction as a picture: memory by kind beside what a device has, and bytes by axis."""

import textwrap
from pathlib import Path
from typing import Any, Protocol

from axonml_jax.cost.flow import Flow
from axonml_jax.cost.held import Memory


class Drawn(Protocol):
    """What a picture shows of a prediction."""

    @property
    def memory(self) -> Memory:
        """By kind."""
        ...

    @property
    def traffic(self) -> tuple[Flow, ...]:
        """Of one step."""
        ...

    @property
    def headline(self) -> str:
        """Model and plan."""
        ...


_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
_WORK = {
    "forward": ("forward", "#7fb0e3"), "backward": ("backward", "#2f6fb2"), "": ("once at the end", "#6b6b6b"),
}  # fmt: skip
_FAR = 8  # a budget so many times the need would flatten the bar


def draw(prediction: Drawn, path: str | Path, *, model: str = "", budget: float | None = None) -> None:
    """Draw a stack of memory by kind and the traffic of every axis, forward and backward apart.

    Args:
      prediction: what to draw.
      path: where; the suffix chooses the format (.svg, .png, .pdf).
      model: its name, for the title.
      budget: bytes that a device may use, drawn as a line.

    Raises:
      ModuleNotFoundError: without matplotlib, which the `plots` extra installs.
    """
    figure = new_figure(9, 4.2)
    put_title(figure, prediction, model)
    panels(figure, prediction, budget)
    save(figure, path)


def save(figure: Any, path: str | Path) -> None:
    """Write a figure; an SVG without the date, so that the same picture is the same file."""
    figure.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


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


def put_title(figure: Any, prediction: Drawn, model: str) -> None:
    """Name the model and the plan above a figure."""
    words = f"{model}: {prediction.headline}" if model else prediction.headline
    figure.suptitle("\n".join(textwrap.wrap(words, 110)), fontsize="medium")


def panels(figure: Any, prediction: Drawn, budget: float | None = None) -> None:
    """Draw memory and, where something is sent, traffic side by side on a figure, or on a part of one."""
    if not sent_by_axes(prediction):
        _memory(figure.subplots(), prediction, budget)
        return
    memory, traffic = figure.subplots(1, 2, width_ratios=(1, 2))
    _memory(memory, prediction, budget)
    _traffic(traffic, prediction)


def sent_by_axes(prediction: Drawn) -> dict[str, dict[str, float]]:
    """Bytes on the wire by mesh axes, then by when they travel."""
    found: dict[str, dict[str, float]] = {}
    for flow in prediction.traffic:
        sent = found.setdefault(",".join(flow.axes), {})
        sent[flow.work] = sent.get(flow.work, 0.0) + float(flow.wire_bytes)
    return found


def _memory(axes: Any, prediction: Drawn, budget: float | None) -> None:
    """What rests, then what the fullest moment adds; kinds may have their largest moments at different times."""
    held = prediction.memory
    kinds = {name: size for name, size in held.by_kind().items() if size and name != "host"}
    top = max(sum(kinds.values()), held.total)
    unit, size_of = _unit(top)
    bottom = 0.0
    for name, size in kinds.items():
        axes.bar([0], [size / size_of], bottom=bottom, label=f"{name} {in_bytes(size)}", width=0.6)
        bottom += size / size_of
    axes.axhline(
        held.total / size_of, color="black", linestyle="--", label=f"at the fullest moment {in_bytes(held.total)}"
    )
    axes.set(title="memory per device", ylabel=unit, xticks=[], xlim=(-0.5, 0.5))
    axes.set_ylim(0, 1.08 * max(top, budget if budget is not None and budget < _FAR * top else 0) / size_of)
    if budget is not None:
        above = "" if budget < _FAR * top else " (far above)"
        axes.axhline(
            min(budget, 2 * _FAR * top) / size_of, color="#c0392b", label=f"may be used {in_bytes(budget)}{above}"
        )
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _traffic(axes: Any, prediction: Drawn) -> None:
    """Bytes on the wire by axis, stacked by when they travel, with each axis's total in words: some are too small to see."""
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
        axes.annotate(f" {in_bytes(total)}", (start, row), va="center", fontsize="small")
    axes.set(title="sent per rank and step, by mesh axis", xlabel=unit, xlim=(0, 1.3 * max(starts)))
    axes.set_ylim(len(names) - 0.5 + (len(names) == 1), -0.5 - (len(names) == 1))
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3, frameon=False)


def in_bytes(size: float) -> str:
    """A size in the unit that fits it.

    >>> in_bytes(3 * 2**29), in_bytes(0.5 * 2**30), in_bytes(900)
    ('1.5 GiB', '512.0 MiB', '900 bytes')
    """
    unit, size_of = _unit(size)
    return f"{size / size_of:,.{0 if size_of == 1 else 1}f} {unit}"


def _unit(size: float) -> tuple[str, int]:
    return next((unit for unit in _UNITS if size >= unit[1]), _UNITS[-1])
