"""The loss curve as a picture."""

from collections.abc import Sequence
from pathlib import Path

from axonml_jax.launch.job.fit import Record


def plot_losses(records: Sequence[Record], path: Path, *, title: str, baseline: float | None = None) -> str | None:
    """Draw training and validation loss against the step.

    Args:
      records: what a run recorded.
      path: the PNG to write.
      title: above the curves.
      baseline: a loss to compare with, drawn as a line.

    Returns:
      None, or why there is no picture.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return "no loss curve: matplotlib is not installed (pip install 'axonml-jax[plots]')"
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*_series(records, "loss"), color="#9db8d9", linewidth=1.2, label="training batch")
    axes.plot(*_series(records, "valid_loss"), "o-", color="#1f4e8c", markersize=4, label="validation")
    if baseline is not None:
        axes.axhline(baseline, color="#b5482a", linestyle="--", linewidth=1, label=f"bigram model ({baseline:.2f})")
    axes.set(title=title, xlabel="step", ylabel="loss (nats per byte)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    return None


def _series(records: Sequence[Record], name: str) -> tuple[list[int], list[float]]:
    found = [(record.step, record.metrics[name]) for record in records if name in record.metrics]
    return [step for step, _ in found], [value for _, value in found]
