"""`Prediction`: what a plan will hold, send and compute, as a value that prints as tables, compares and goes to JSON."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from axonml_jax.cost.flow import LATER, Flow
from axonml_jax.cost.held import Memory
from axonml_jax.cost.wire import Amount, exact
from axonml_jax.ledger.label import PADDING
from axonml_jax.ledger.table import PrintedTable, axes_table, number
from axonml_jax.markup import lines, section
from axonml_jax.parallel.pipeline.estimates.costs import StageCosts
from axonml_jax.parallel.pipeline.schedules.timetable import Timetable


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The ledger of a plan from shapes alone.

    Attributes:
      degrees: of the mesh.
      plan: how the step runs, in words.
      memory: bytes per device.
      traffic: collectives by what they move, the heaviest first. Of a dispatch's rounds after the first, which even loads do
        not need, one is among them, as in a traced step; sums leave it out.
      minimum: bytes per rank and step that theory allows, by label: gradients+parameters (ZeRO), activations+cotangents
        (pipeline), layers (Megatron, Korthikanti et al., AxoNN), experts (every token to its k experts and back).
      bubble: idle time of a pipeline's ranks over useful time.
      ticks: rows of the pipeline's timetable; 0 without one.
      microbatches: of one update, on one batch shard.
      params: parameters of the whole model.
      tokens: of one update, over all devices.
      layers: blocks of the model.
      flops_per_token: of forward and backward, recomputation left out.
      recomputed_flops_per_token: what recomputation adds.
      causal_balance: what the rank that computes most of causal attention computes of it, over the mean.
      masked_flops_per_token: of flops_per_token, those that attention leaves out, as a mask hides the tiles they are of.
      attention_again: how often attention's forward is computed again.
      blockwise_flops_per_token: of flops_per_token, those of attention in blocks that no kernel computes.
      expert_flops_per_token: of all these FLOPs, those of the experts that a token is sent to.
      expert_padding: rows that a rank's experts multiply, over those of its share of tokens; 0: as many as others send.
      notes: what the numbers leave open.
      timetable: what the pipeline runs when; None without one.
      stage_costs: multiplications per token of the timetable's stages.
    """

    degrees: Mapping[str, int]
    plan: str
    memory: Memory
    traffic: tuple[Flow, ...]
    minimum: Mapping[str, Amount]
    bubble: float
    ticks: int
    microbatches: int
    params: int
    tokens: int
    layers: int
    flops_per_token: int
    recomputed_flops_per_token: int
    causal_balance: float = 1.0
    masked_flops_per_token: float = 0.0
    attention_again: int = 0
    blockwise_flops_per_token: float = 0.0
    expert_flops_per_token: float = 0.0
    expert_padding: float = 0.0
    notes: tuple[str, ...] = ()
    timetable: Timetable | None = field(default=None, repr=False)
    stage_costs: StageCosts | None = field(default=None, repr=False)

    @property
    def pipelined(self) -> bool:
        """Whether stages lie along a pipeline."""
        return self.timetable is not None

    @property
    def total_bytes(self) -> Amount:
        """Bytes that one rank sends in one step, where experts get equal loads."""
        return exact(sum(flow.wire_bytes for flow in self._even))

    @property
    def _even(self) -> list[Flow]:
        return [flow for flow in self.traffic if flow.where != LATER]

    @property
    def bytes_by_axes(self) -> dict[tuple[str, ...], Amount]:
        """The total by mesh axes."""
        totals: dict[tuple[str, ...], Amount] = {}
        for flow in self._even:
            totals[flow.axes] = exact(totals.get(flow.axes, 0) + flow.wire_bytes)
        return totals

    @property
    def ratios(self) -> dict[str, tuple[Amount, Amount, float | None]]:
        """(sent, minimum, their ratio) of every label that theory knows."""
        found = {}
        for name, least in self.minimum.items():
            labels = {"layers": ("layers",)}.get(name, name.split("+"))
            sent = exact(sum(flow.wire_bytes for flow in self._even if (flow.label or "layers") in labels))
            found[name] = (sent, least, float(sent / least) if least else None)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "mesh": dict(self.degrees),
            "plan": self.plan,
            "memory": {
                **self.memory.by_kind(),
                "arguments": self.memory.arguments,
                "temporaries": self.memory.temporaries,
                "total": self.memory.total,
            },
            "traffic": [
                {**asdict(flow), "axes": list(flow.axes), "wire_bytes": float(flow.wire_bytes)} for flow in self.traffic
            ],
            "total_bytes": float(self.total_bytes),
            "against_theory": {
                name: {"sent": float(sent), "minimum": float(least), "ratio": ratio}
                for name, (sent, least, ratio) in self.ratios.items()
            },
            "bubble": self.bubble,
            "ticks": self.ticks,
            "microbatches": self.microbatches,
            "params": self.params,
            "tokens": self.tokens,
            "layers": self.layers,
            "flops_per_token": self.flops_per_token,
            "recomputed_flops_per_token": self.recomputed_flops_per_token,
            "masked_flops_per_token": float(self.masked_flops_per_token),
            "causal_balance": self.causal_balance,
            "expert_flops_per_token": self.expert_flops_per_token,
            "notes": list(self.notes),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def save_picture(self, path: Any, *, model: str = "", budget: float | None = None) -> None:
        """Draw memory by kind and traffic by axis; needs the `plots` extra.

        Args:
          path: of the file; its suffix chooses the format.
          model: its name, for the title.
          budget: bytes that a device may use, drawn as a line.
        """
        from axonml_jax.ledger.predict.picture import draw

        draw(self, path, model=model, budget=budget)

    @property
    def headline(self) -> str:
        """The size of the model, the mesh and the plan in words."""
        mesh = " x ".join(f"{axis} {ranks}" for axis, ranks in self.degrees.items()) or "one device"
        return f"{self.params:,} parameters on {mesh}; {self.plan}"

    def __str__(self) -> str:
        return "\n\n".join([self.headline, *map(str, self._tables), *self._said])

    def _repr_html_(self) -> str:
        pictures = [] if self.timetable is None else [self.timetable._repr_html_()]
        tables = [table._repr_html_() for table in self._tables]
        return section(self.headline, *tables, *map(lines, self._said), *pictures)

    @property
    def _tables(self) -> list[PrintedTable]:
        sent = [self._traffic_table(), self._axes_table()] if self.traffic else []
        known = [self._theory_table()] if any(self.minimum.values()) else []
        return [self._memory_table(), *sent, *known]

    @property
    def _said(self) -> list[str]:
        return [self._work(), *(f"note: {note}" for note in self.notes)]

    def _memory_table(self) -> PrintedTable:
        kinds, total = self.memory.by_kind(), self.memory.total
        rows = [[name, f"{size / 2**20:,.1f}"] for name, size in kinds.items()]
        rows += [["at the fullest moment", f"{total / 2**20:,.1f}"]]
        shares = [size / max(total, *kinds.values(), 1) for size in (*kinds.values(), total)]
        return PrintedTable(["memory per device", "MiB"], rows, left=1, shares=shares)

    def _traffic_table(self) -> PrintedTable:
        header = ["label", "collective", "axes", "dtype", "where", "launches", "elements", "bytes/rank"]
        rows = [row for flow in self.traffic for row in _rows(flow)]
        return PrintedTable(header, rows, left=5)

    def _axes_table(self) -> PrintedTable:
        return axes_table({",".join(axes): sent for axes, sent in self.bytes_by_axes.items()}, self.total_bytes)

    def _theory_table(self) -> PrintedTable:
        rows = [
            [name, number(sent), number(least), "-" if ratio is None else f"{ratio:.4f}"]
            for name, (sent, least, ratio) in self.ratios.items()
            if least
        ]
        return PrintedTable(["against theory", "bytes/rank", "minimum", "ratio"], rows, left=1)

    def _work(self) -> str:
        more = [f"and {self.recomputed_flops_per_token:,} again"] if self.recomputed_flops_per_token else []
        more += [f"but {self.masked_flops_per_token:,.0f} that masks hide"] if self.masked_flops_per_token else []
        again = f" ({', '.join(more)})" if more else ""
        lines = [f"{self.tokens:,} tokens per update, {self.flops_per_token:,} FLOPs per token{again}"]
        if self.causal_balance > 1:
            lines.append(f"causal attention: the busiest rank computes {self.causal_balance:.2f} times the mean")
        if self.ticks:
            lines.append(f"pipeline: {self.ticks} ticks, bubble {self.bubble:.1%} of the useful time")
        return "\n".join(lines)


def _rows(flow: Flow) -> Iterator[list[str]]:
    """A flow in a table: one row, or two where a part of it is padding, which has no launch of its own."""
    place = flow.where if flow.times == 1 else f"{flow.where} ({flow.times})"
    ranks = f"{','.join(flow.axes)} ({flow.group_size})"
    parts = [(flow.label or "layers", flow.count, flow.elements - flow.padding, flow.wire_bytes - flow.padding_bytes)]
    parts += [(PADDING, 0, flow.padding, flow.padding_bytes)] if flow.padding else []
    for label, count, elements, sent in parts:
        counts = (number(count), number(elements * flow.times), number(exact(sent)))
        yield [label, flow.kind, ranks, flow.dtype, place, *counts]
