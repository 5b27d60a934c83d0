"""What `auto_parallelize` did with every layer, as a value that prints."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SwappedLayer:
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
    entries: list[SwappedLayer] = field(default_factory=list)

    def nothing_swapped(self) -> str | None:
        """What to warn of when the call had no effect; None: it had one."""
        if self.swapped:
            return None
        why = [f"  {path}: {entry.why}" for path, entry in self._folded()]
        split = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        found = "there was no layer" if not why else "it left every layer:\n" + "\n".join(why[:10])
        return f"auto_parallelize over {split} has no effect: {found}" + (
            f"\n  and {len(why) - 10} more" if why[10:] else ""
        )

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
        rows += [(path, each.kind, each.became or "as it was", each.why) for path, each in self._folded()]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        lines.insert(1, "  ".join("-" * width for width in [*widths, max(len(row[3]) for row in rows)]))
        split = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        return "\n".join([f"auto_parallelize over {split}: {len(self.swapped)} of {len(self.entries)} layers", *lines])

    def _folded(self) -> list[tuple[str, SwappedLayer]]:
        """One row for layers of repeated blocks to which the same happened: a path in which numbers that differ are `*`."""
        alike: dict[tuple, list[SwappedLayer]] = {}
        for each in self.entries:
            name = "/".join("*" if part.isdigit() else part for part in each.path.split("/"))
            alike.setdefault((name, each.kind, each.became, each.why), []).append(each)
        return [(_common(group), group[0]) for group in alike.values()]


def _common(group: list[SwappedLayer]) -> str:
    paths = zip(*(each.path.split("/") for each in group), strict=True)
    name = "/".join(parts[0] if len(set(parts)) == 1 else "*" for parts in paths)
    return name if len(group) == 1 else f"{name} ({len(group)} times)"
