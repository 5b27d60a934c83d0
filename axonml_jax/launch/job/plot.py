"""The loss curve, and the loads of experts, as pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axonml_jax.launch.job.fit import Record


def plot_losses(
    records: Sequence[Record],
    path: Path,
    *,
    title: str,
    unit: str = "loss (nats per byte)",
    baseline: float | None = None,
) -> str | None:
    """Draw training and validation loss against the step.

    Args:
      records: what a run recorded.
      path: the PNG to write.
      title: above the curves.
      unit: what the loss is called.
      baseline: a loss to compare with, drawn as a line.

    Returns:
      None, or why there is no picture.
    """
    if (figure := _figure()) is None:
        return f"no loss curve: {_MISSING}"
    axes = figure.add_subplot()
    axes.plot(*_series(records, "loss"), color="#9db8d9", linewidth=1.2, label="training batch")
    axes.plot(*_series(records, "valid_loss"), "o-", color="#1f4e8c", markersize=4, label="validation")
    if baseline is not None:
        axes.axhline(baseline, color="#b5482a", linestyle="--", linewidth=1, label=f"bigram model ({baseline:.2f})")
    axes.set(title=title, xlabel="step", ylabel=unit)
    _finish(figure, axes, path)
    return None


def plot_expert_loads(records: Sequence[Record], path: Path, *, title: str) -> str | None:
    """Draw each expert's share of all choices against the step.

    Args:
      records: what a run recorded.
      path: the PNG to write.
      title: above the curves.

    Returns:
      None, or why there is no picture.
    """
    names = [name for name in (records[0].metrics if records else ()) if name.startswith("experts/load/")]
    if not names:
        return "no picture of the experts' loads: of so many they are not recorded one by one"
    if (figure := _figure()) is None:
        return f"no picture of the experts' loads: {_MISSING}"
    axes = figure.add_subplot()
    for name in names:
        axes.plot(*_series(records, name), linewidth=1, label=name.rpartition("/")[2])
    axes.axhline(1 / len(names), color="#444444", linestyle="--", linewidth=1, label="even")
    axes.set(title=title, xlabel="step", ylabel="share of all choices", ylim=(0, None))
    _finish(figure, axes, path, columns=-(-len(names) // 16) + 1)
    return None


def plot_runs(runs: Mapping[str, Sequence[Record]], path: Path, *, metric: str) -> str | None:
    """Draw a metric of several runs against the step.

    Args:
      runs: what each recorded, by its name.
      path: the picture to write; its suffix chooses the format.
      metric: its name.

    Returns:
      None, or why there is no picture.
    """
    if (figure := _figure()) is None:
        return _MISSING
    axes = figure.add_subplot()
    for name, records in runs.items():
        steps, values = _series(records, metric)
        if steps:
            axes.plot(steps, values, "o-" if len(steps) < 50 else "-", markersize=3, linewidth=1.2, label=name)
    axes.set(xlabel="step", ylabel=metric)
    _finish(figure, axes, path)
    return None


_MISSING = "matplotlib is not installed (pip install 'axonml-jax[plots]')"


def _figure() -> Any:
    """An empty figure, or None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _finish(figure: Any, axes: Any, path: Path, columns: int = 1) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, ncols=columns)
    figure.savefig(path, dpi=150)


def _series(records: Sequence[Record], name: str) -> tuple[list[int], list[float]]:
    found = [(record.step, record.metrics[name]) for record in records if name in record.metrics]
    return [step for step, _ in found], [value for _, value in found]
