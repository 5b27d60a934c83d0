"""A bar picture of memory by kind and strategy (needs the `plots` extra)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axonml_jax.facade.device_memory import MIB, FSDPMemoryStats

_COLORS = {"parameters": "#4c72b0", "gradients": "#dd8452", "optimizer": "#55a868", "gathered for use": "#b7b7b7"}


def plot_memory(
    stats: Mapping[str, FSDPMemoryStats], path: str | Path, *, title: str | None = None, budget: float | None = None
) -> None:
    """Draw estimates side by side, a bar for each: what a device holds by kind, and what rests on the host below zero.

    Args:
      stats: estimates (`fsdp.memory_estimate()`) by name, such as that of the strategy.
      path: of the picture; its ending decides the format (svg, png, pdf).
      title: above the bars, such as the model's name and the mesh; None: how many parameters the models have.
      budget: bytes that a device has, drawn as a line.

    Raises:
      ImportError: without matplotlib; names the extra.
      ValueError: without anything to draw.
    """
    if not stats:
        raise ValueError("plot_memory draws estimates by name, but none was given")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot_memory needs matplotlib: pip install 'axonml-jax[plots]'") from error
    figure = Figure(figsize=(1.5 + 1.25 * len(stats), 4.2), layout="constrained")
    axes = figure.subplots()
    _draw(axes, stats, budget)
    sizes = sorted({each.total_params for each in stats.values()})
    figure.suptitle(" and ".join(f"{size:,}" for size in sizes) + " parameters" if title is None else title)
    figure.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


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
