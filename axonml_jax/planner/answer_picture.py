"""A priced plan as a picture: its memory and traffic, and its step on a line of time."""

from pathlib import Path
from typing import Any

from axonml_jax.ledger.predict.picture import new_figure, panels, put_title, save
from axonml_jax.ledger.predict.prediction import Prediction
from axonml_jax.planner.timeline import Timeline

COLOURS: dict[str, str] = {
    "forward": "#7fb0e3",
    "backward": "#2f6fb2",
    "update": "#6b6b6b",
    "host": "#a0a0a0",
    "parameters": "#eebb66",
    "gradients": "#c0632d",
    "layers": "#85c788",
    "activations": "#86cdb6",
    "cotangents": "#247660",
}
"""Of a lane's parts, by name: compute in blues, what is sent in warm and green colours."""

OTHER = "#c9a9d6"
"""Of a part with any other name."""


def draw(
    prediction: Prediction, timeline: Timeline, path: str | Path, *, model: str = "", budget: float | None = None
) -> None:
    """Draw memory and traffic, and below them a lane for every line of the timeline.

    Args:
      prediction: what the plan holds and sends.
      timeline: its step.
      path: where; the suffix chooses the format (.svg, .png, .pdf).
      model: its name, for the title.
      budget: bytes that a device may use, drawn as a line.

    Raises:
      ModuleNotFoundError: without matplotlib, which the `plots` extra installs.
    """
    lanes = 1.1 + 0.28 * len(timeline.lanes)
    figure = new_figure(9, 4.2 + lanes)
    put_title(figure, prediction, model)
    above, below = figure.subfigures(2, 1, height_ratios=(4, lanes))
    panels(above, prediction, budget)
    _lanes(below.subplots(), timeline)
    save(figure, path)


def _lanes(axes: Any, timeline: Timeline) -> None:
    seen, shortest = set(), timeline.seconds / 700  # about a pixel: what is shorter stays visible
    for row, lane in enumerate(timeline.lanes):
        for name in dict.fromkeys(span.name for span in lane.spans):
            mine = [span for span in lane.spans if span.name == name]
            spans = [(1e3 * span.start, 1e3 * max(span.end - span.start, shortest)) for span in mine]
            label = None if name in seen else name
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=COLOURS.get(name, OTHER), linewidth=0, label=label)
            seen.add(name)
    axes.set(
        title="one step, as the cost model has it", xlabel="ms", xlim=(0, 1e3 * timeline.seconds),
        yticks=range(len(timeline.lanes)), yticklabels=[lane.name for lane in timeline.lanes],
    )  # fmt: skip
    axes.invert_yaxis()
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
