"""`ax.explain`: the ledger of a step as a report."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, overload

from axonml_jax.base import PyTree, aligned, lines, named_leaves, priced_platform, section, size_in_words
from axonml_jax.compat.order import no_mesh_around
from axonml_jax.cost.base import GRADIENTS, PARAMETERS
from axonml_jax.cost.decoder import Amount, exact, is_decoder
from axonml_jax.ledger.count import (
    Collective,
    PrintedTable,
    TrafficRow,
    axes_table,
    collectives_in,
    number,
    traffic_rows,
)
from axonml_jax.ledger.predict import Prediction, predict
from axonml_jax.mesh.axes import flat_axes
from axonml_jax.mesh.shape import check_axis_names
from axonml_jax.parallel.plan import Plan

if TYPE_CHECKING:
    from axonml_jax.parallel.recompute import Recompute

# --------------------------------------------------------------------------------------------------
# `Report`: what one step sends, as a value that prints as tables and goes to JSON.
# --------------------------------------------------------------------------------------------------

MODEL = f"{GRADIENTS}+{PARAMETERS}"
"""The part of the traffic that grows with the number of parameters."""


@dataclass(frozen=True, slots=True)
class Target:
    """A theoretical minimum beside what the step sends for it."""

    name: str
    sent: Amount
    minimum: Amount

    @property
    def ratio(self) -> float | None:
        """Sent over minimum; None when the minimum is zero."""
        return float(Fraction(self.sent) / Fraction(self.minimum)) if self.minimum else None


@dataclass(frozen=True, slots=True)
class Report:
    """The collectives of one step, priced.

    Attributes:
      collectives: every collective in program order.
      minimum: (labels joined by `+`, bytes per rank and step) pairs to compare with.
      recompute: what was chosen to be kept for the backward, of a plan with `memory=`; None: nothing was.

    `str(report)` is a table; bytes are those one rank puts on the wire in one step on a ring.
    """

    collectives: tuple[Collective, ...]
    minimum: tuple[tuple[str, Amount], ...] = ()
    recompute: "Recompute | None" = None

    @property
    def traffic(self) -> tuple[TrafficRow, ...]:
        """The rows of the table."""
        return traffic_rows(self.collectives)

    @property
    def total_bytes(self) -> Amount:
        """Bytes one rank sends in one step: the heaviest branch of every conditional, one trip of every while loop."""
        return _sum(self.traffic)

    @property
    def bytes_by_axes(self) -> dict[tuple[str, ...], Amount]:
        """`total_bytes` by the tuple of axes that a collective runs over."""
        return _totals(self.traffic, lambda row: row.axes)

    @property
    def bytes_by_label(self) -> dict[str, Amount]:
        """`total_bytes` by label; unlabelled traffic is under the empty string."""
        return _totals(self.traffic, lambda row: row.label)

    @property
    def targets(self) -> tuple[Target, ...]:
        """Each given minimum beside the bytes sent under its labels.

        `gradients+parameters` means the unlabelled traffic (scalars apart) when the step carries neither label.
        """
        by_label = self.bytes_by_label
        return tuple(Target(name, _sent(name, by_label), minimum) for name, minimum in self.minimum)

    @property
    def _automatic(self) -> list[str]:
        """The mesh axes left to XLA's partitioner, whose collectives no trace shows."""
        return sorted({axis for entry in self.collectives for axis in entry.automatic})

    @property
    def notes(self) -> tuple[str, ...]:
        """What the numbers leave out, in words."""
        automatic = self._automatic
        kinds = {entry.kind for entry in self.collectives}
        found = {
            "no explicit collective: a program partitioned by XLA shows its own only when compiled": not kinds,
            "a while loop's rows are of one trip: its trip count depends on the data": any(
                entry.unbounded for entry in self.collectives
            ),
            "rows in parentheses are in branches that a heavier one outweighs: totals leave them out": not all(
                entry.counted for entry in self.collectives
            ),
            f"axes {automatic} are left to the partitioner: what it sends is in the compiled step alone "
            "(model.tensor_traffic, model.context_traffic); sizes are before its split": bool(automatic),
            "rows of every n steps happen in one of these; their bytes are the mean over them": any(
                entry.every > 1 for entry in self.collectives
            ),
            "ragged_all_to_all rows are upper bounds: the sizes are data": "ragged_all_to_all" in kinds,
        }
        return tuple(note for note, holds in found.items() if holds)

    def to_dict(self) -> dict[str, Any]:
        """Rows, totals, targets and notes as plain values."""
        ratio = lambda target: None if self._automatic else target.ratio  # of a part of what is sent
        return {
            "traffic": [{**asdict(row), "wire_bytes": _plain(row.wire_bytes)} for row in self.traffic],
            "total_bytes": _plain(self.total_bytes),
            "bytes_by_axes": {",".join(axes): _plain(sent) for axes, sent in self.bytes_by_axes.items()},
            "bytes_by_label": {label: _plain(sent) for label, sent in self.bytes_by_label.items()},
            "targets": [
                {"name": t.name, "sent": _plain(t.sent), "minimum": _plain(t.minimum), "ratio": ratio(t)}
                for t in self.targets
            ],
            "notes": list(self.notes),
        } | ({} if self.recompute is None else self._kept)

    @property
    def _kept(self) -> dict[str, Any]:
        assert self.recompute is not None
        curve = [{"live_bytes": memory, "seconds_again": again} for memory, again in self.recompute.curve()]
        return {"recompute": self.recompute.to_dict(), "memory_against_time": curve}

    def save_picture(self, path: Any) -> None:
        """Draws recomputed milliseconds against live bytes for what may be kept, and the choice; needs the `plots` extra.

        Args:
          path: of the file; its suffix chooses the format (.svg, .png, .pdf).

        Raises:
          ValueError: for a plan without `memory=`, of which nothing was chosen.
          ModuleNotFoundError: without matplotlib.
        """
        if self.recompute is None or self.recompute.live is None:
            raise ValueError("nothing was chosen to be kept: give the plan memory='16GiB' or another number of bytes")
        from axonml_jax.ledger.pictures import Kept, draw_curve, new_figure, save

        figure = new_figure(9, 3.6)
        points = [Kept(memory, 1e3 * again) for memory, again in self.recompute.curve()]
        here = Kept(self.recompute.live, 1e3 * self.recompute.seconds, "chosen")
        draw_curve(figure.subplots(), points, here, "ms")
        save(figure, path)

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON; fractions of a byte become floats."""
        return json.dumps(self.to_dict(), indent=indent)

    @property
    def _tables(self) -> list[PrintedTable]:
        without = f" without {','.join(self._automatic)}" * bool(self._automatic)
        by_axes = {",".join(axes) or "-": sent for axes, sent in self.bytes_by_axes.items()}
        sent = [_traffic_table(self.traffic), axes_table(by_axes, self.total_bytes, f"total{without}")]
        curve = () if self.recompute is None else self.recompute.curve()
        theory = [_target_table(self.targets)] * bool(self.minimum and not without)
        return sent * bool(self.traffic) + theory + ([_curve_table(curve)] if curve else [])

    @property
    def _said(self) -> str:
        return "\n".join(f"note: {note}" for note in self.notes)

    def __str__(self) -> str:
        kept = [] if self.recompute is None else [f"kept for the backward\n{self.recompute}"]
        parts = [*map(str, self._tables), *kept, *([self._said] if self.notes else [])]
        return "\n\n".join(parts if self.traffic else [_NOTHING, *parts])

    def _repr_html_(self) -> str:
        title = f"one rank sends {number(self.total_bytes)} bytes in one step" if self.traffic else _NOTHING
        return section(title, *(table._repr_html_() for table in self._tables), lines(self._said))


_NOTHING = "nothing is communicated"


def _totals(rows: Iterable[TrafficRow], key: Callable[[TrafficRow], Any]) -> dict[Any, Amount]:
    totals: dict[Any, Amount] = {}
    for row in rows:
        if row.counted:
            totals[key(row)] = exact(totals.get(key(row), 0) + row.wire_bytes)
    return totals


def _sum(rows: Iterable[TrafficRow]) -> Amount:
    return exact(sum((row.wire_bytes for row in rows if row.counted), start=Fraction(0)))


def _sent(name: str, by_label: dict[str, Amount]) -> Amount:
    labels = [label.strip() for label in name.split("+")]
    if name == MODEL and not any(label in by_label for label in labels):
        labels = [""]
    return exact(sum((by_label.get(label, 0) for label in labels), start=Fraction(0)))


def _plain(amount: Amount) -> int | float:
    return amount if isinstance(amount, int) else float(amount)


def _traffic_table(rows: Iterable[TrafficRow]) -> PrintedTable:
    header = ["label", "collective", "axes", "dtype", "where", "count", "launches", "elements", "bytes/rank"]
    return PrintedTable(header, [_cells(row) for row in rows], left=5, spare=("elements", "launches", "dtype"))


def _cells(row: TrafficRow) -> list[str]:
    axes = f"{','.join(row.axes)} ({row.group_size})" if row.axes else f"({row.group_size})"
    sent = number(row.wire_bytes) if row.counted else f"({number(row.wire_bytes)})"
    counts = [number(row.count), number(row.launches), number(row.elements), sent]
    return [row.label or "-", row.kind, axes, row.dtype, row.where, *counts]


def _target_table(targets: Iterable[Target]) -> PrintedTable:
    rows = [[t.name, number(t.sent), number(t.minimum), "-" if t.ratio is None else f"{t.ratio:.4f}"] for t in targets]
    return PrintedTable(["against published", "bytes/rank", "published", "ratio"], rows, left=1)


def _curve_table(curve: Sequence[tuple[int, float]]) -> PrintedTable:
    rows = [[size_in_words(memory), f"{1e3 * again:.3g}"] for memory, again in curve]
    header, most = ["what may be kept: live bytes", "ms of work twice"], max(1, *(memory for memory, _ in curve))
    return PrintedTable(header, rows, left=0, shares=[memory / most for memory, _ in curve])


# --------------------------------------------------------------------------------------------------
# `explain`: from a step to its report, or from a plan to its prediction, without running anything.
# --------------------------------------------------------------------------------------------------

Minimum = Amount | float | Mapping[str, Amount | float]
"""Bytes per rank and step of the published algorithm: one number, or one for each label (or labels joined by `+`)."""


@overload
def explain(
    step: Plan,
    *,
    model: Any,
    global_batch: int,
    length: int | None = None,
    mesh: Any = None,
    moments: int = 2,
) -> Prediction: ...
@overload
def explain(step: Callable[..., Any], *args: Any, minimum: Minimum | None = None, **kwargs: Any) -> Report: ...
@no_mesh_around()
def explain(step: Any, *args: Any, minimum: Minimum | None = None, **kwargs: Any) -> Report | Prediction:
    """Counts what a step communicates, or predicts from shapes alone what a plan holds, sends and computes.

    Args:
      step: a jitted callable, anything with a `trace` method, or a plain function: its program is counted. Nothing runs and
        nothing is donated. Or an `ax.Plan`: nothing is traced either.
      *args: the step's arguments: arrays or `jax.ShapeDtypeStruct`s. With an `AbstractMesh` no device is needed.
      minimum: theoretical minima to print beside. One number stands for what grows with the parameters
        (`gradients+parameters`), say 2P(N-1)/N times the itemsize for data parallelism. None: what the step itself
        says, where it has a `minimum_traffic()` as trainers and training steps do.
      **kwargs: the step's keyword arguments. For a plan: `model`, a `TransformerConfig` (`models.config.PRESETS` has
        published ones); `global_batch`, sequences per update; `length` of a sequence (None: the model's longest); `mesh`,
        degrees by axis, an `ax.MeshShape` or a mesh (None: the plan's own); `moments`, values that the optimizer keeps per
        parameter (2 for Adam); `platform`, "tpu" or "cuda", for kernels that hold no attention scores (None: count on none);
        `torus`, the dims of the torus that TPUs form, for the hops of FSDP's collectives (0: none); `documents`, whether rows
        hold several.

    Returns:
      A `Report` of a step, a `Prediction` of a plan; `print` either for its tables.

    Raises:
      ValueError: for a minimum that is negative or not finite, a plan that cannot run, an unknown axis or platform.
      TypeError: for a plan without a model's configuration.
    """
    if isinstance(step, Plan):
        return _predicted(step, *args, **kwargs)
    if minimum is None and hasattr(step, "minimum_traffic"):
        minimum = step.minimum_traffic()  # pyright: ignore[reportFunctionMemberAccess]
    collectives = collectives_in(step, *args, **kwargs)
    kept = getattr(step, "recompute", None)
    kept = getattr(kept, "found", kept)  # of what chooses while it is traced
    return Report(collectives, _targets(minimum), kept if getattr(kept, "pieces", ()) else None)


def _predicted(plan: Plan, *, model: Any, mesh: Any = None, platform: str | None = None, **sizes: Any) -> Prediction:
    if not is_decoder(model):
        raise TypeError(
            f"model={type(model).__name__}: a plan is priced for a TransformerConfig of axonml_jax.models.config (or its "
            "preset('llama3-8b'), say); for any other model trace its step: ax.explain(trainer, batch)"
        )
    return predict(plan, model, _degrees(plan, mesh), platform=priced_platform(platform), **sizes)


def _degrees(plan: Plan, mesh: Any) -> dict[str, int]:
    chosen: Any = plan.mesh if mesh is None else mesh
    degrees: dict[str, int] = dict(getattr(chosen, "degrees", None) or getattr(chosen, "shape", None) or chosen or {})
    wrong = {axis: size for axis, size in degrees.items() if size < 1}
    if wrong or not degrees:
        raise ValueError(
            f"the plan's mesh has degrees {degrees}: give every one, as in mesh={{'data': 2, 'fsdp': 4}} or "
            "ax.MeshShape(data=2, fsdp=4)"
        )
    own = [axis for axis in flat_axes(plan.axes) if axis in degrees]
    return check_axis_names({axis: size for axis, size in degrees.items() if axis not in own}) | {
        axis: degrees[axis] for axis in own
    }


def _targets(minimum: Minimum | None) -> tuple[tuple[str, Amount], ...]:
    if minimum is None:
        return ()
    named = minimum if isinstance(minimum, Mapping) else {MODEL: minimum}
    wrong = {name: amount for name, amount in named.items() if not 0 <= amount < float("inf")}
    if wrong:
        raise ValueError(f"minimum {wrong}: bytes must be finite and not negative")
    return tuple((name, exact(Fraction(amount))) for name, amount in named.items())


# --------------------------------------------------------------------------------------------------
# The table of how a model's arrays rest on devices, which `print(model)` shows.
# --------------------------------------------------------------------------------------------------


def resting(layouts: PyTree, *, in_stages: bool = False, most: int = 24) -> str:
    """A table of how arrays rest on devices; arrays that are alike but for numbers in their paths share a row.

    >>> import jax
    >>> from axonml_jax.sharding.layout import Layout
    >>> half = Layout.replicated(jax.ShapeDtypeStruct((8, 3), "float32")).on("fsdp", dim=0, size=2)
    >>> print(resting({"blocks/0": half, "blocks/1": half}))
    48 elements in 2 arrays, of which a device holds 24
    <BLANKLINE>
    array     shape   dtype    spec       of a device  count
    --------  ------  -------  ---------  -----------  -----
    blocks/*  (8, 3)  float32  P('fsdp')  (4, 3)           2

    Args:
      layouts: a pytree of layouts.
      in_stages: whether a device holds its pipeline stages' arrays only.
      most: rows at most; the last one counts all others where there are more.
    """
    rows, leaves = Counter(), named_leaves(layouts)
    for name, each in leaves.items():
        spec = f"P({', '.join(map(repr, each.spec))})" if any(each.spec) else "whole"
        plain = "/".join("*" if part.isdecimal() else part for part in name.split("/"))
        rows[plain, str(each.shape), str(each.dtype), spec, str(each.shard)] += 1
    cells = [[*row, f"{count:,}"] for row, count in rows.items()]
    if len(cells) > most:
        cells[most - 1 :] = [["...", "", "", "", "", f"{len(leaves) - sum(list(rows.values())[: most - 1]):,}"]]
    table = aligned(["array", "shape", "dtype", "spec", "of a device", "count"], cells, left=5, spare=("dtype", "spec"))
    total, held = (sum(map(of, leaves.values())) for of in (lambda each: each.size, lambda each: math.prod(each.shard)))
    holds = "those of its stages" if in_stages else f"{held:,}"
    return f"{total:,} elements in {len(leaves):,} arrays, of which a device holds {holds}\n\n{table}"
