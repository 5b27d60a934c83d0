"""What `auto_parallelize` did with every layer, as a value that prints."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One layer.

    Attributes:
      path: where it is in the model.
      kind: its Flax type.
      became: the layer it is now; None: left as it was.
      why: how it communicates, or why it was left.
    """

    path: str
    kind: str
    became: str | None
    why: str


@dataclass
class AutoReport:
    """What became of every layer with parameters.

    Attributes:
      axes: the mesh axes that split layers, with their degrees.
      entries: one per layer, in the model's order.
    """

    axes: dict[str, int]
    entries: list[Entry] = field(default_factory=list)

    @property
    def swapped(self) -> dict[str, str]:
        """The layers that became parallel ones: path to the name of the new layer."""
        return {entry.path: entry.became for entry in self.entries if entry.became is not None}

    @property
    def left(self) -> dict[str, str]:
        """The layers that every rank still computes whole: path to the reason."""
        return {entry.path: entry.why for entry in self.entries if entry.became is None}

    def __str__(self) -> str:
        rows = [("layer", "was", "is now", "how, or why not")]
        rows += [(each.path, each.kind, each.became or "as it was", each.why) for each in self.entries]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        lines.insert(1, "  ".join("-" * width for width in [*widths, max(len(row[3]) for row in rows)]))
        split = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        return "\n".join([f"auto_parallelize over {split}: {len(self.swapped)} of {len(self.entries)} layers", *lines])
