"""`Answer`: the plan that was chosen, those that come next, and why the others were dropped."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from axonml_jax.ledger.predict.prediction import Prediction
from axonml_jax.ledger.table import aligned
from axonml_jax.models.config import TransformerConfig
from axonml_jax.parallel.plan import Plan
from axonml_jax.planner.answer_picture import draw
from axonml_jax.planner.assumptions import Assumptions
from axonml_jax.planner.candidate import Candidate, Question
from axonml_jax.planner.goodput.save_advice import SaveAdvice, SaveAssumptions, advise
from axonml_jax.planner.price import Price
from axonml_jax.planner.timeline import Timeline, timeline


@dataclass(frozen=True)
class Priced:
    """A candidate with its prediction and its price."""

    candidate: Candidate
    prediction: Prediction
    price: Price


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the planner found.

    Attributes:
      asked: the question.
      best: the fastest that fits.
      runners_up: the next ones, fastest first.
      illegal: how many meshes were refused, by reason.
      dropped: how many ways were dropped, by reason.
      sensitivity: for every assumption that may be wrong (how much longer the best step then takes, what would then be best).
    """

    asked: Question
    best: Priced
    runners_up: tuple[Priced, ...]
    illegal: Mapping[str, int]
    dropped: Mapping[str, int]
    sensitivity: Mapping[str, tuple[float, str]]

    @property
    def plan(self) -> Plan:
        """The best plan; it has its mesh's degrees."""
        return self.best.candidate.plan(self.asked.precision)

    @property
    def model(self) -> TransformerConfig:
        """The model with its layers split as the best plan needs."""
        return self.best.candidate.model(self.asked.model)

    @property
    def prediction(self) -> Prediction:
        """What the best plan holds and sends."""
        return self.best.prediction

    @property
    def timeline(self) -> Timeline:
        """The best plan's step on a line of time."""
        return timeline(self.prediction, self.asked.hardware, self.asked.assumptions)

    @property
    def saving(self) -> SaveAdvice:
        """How often the best plan's job should save, and the goodput that it may then expect."""
        asked = self.asked
        return saving_of(self.prediction, self.best.price, asked.num_devices, asked.assumptions, asked.saves)

    def save_picture(self, path: Any, *, model: str = "") -> None:
        """Draw the best plan's memory, traffic and timeline; needs the `plots` extra.

        Args:
          path: of the file; its suffix chooses the format (.svg, .png, .pdf).
          model: its name, for the title.

        Raises:
          ModuleNotFoundError: without matplotlib.
        """
        draw(self.prediction, self.timeline, path, model=model, budget=self.asked.memory)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "devices": self.asked.num_devices,
            "hardware": self.asked.hardware.name,
            "best": _plain(self.best) | {"timeline": self.timeline.to_dict(), "saving": self.saving.to_dict()},
            "runners_up": [_plain(one) for one in self.runners_up],
            "illegal": dict(self.illegal),
            "dropped": dict(self.dropped),
            "sensitivity": {name: {"time": ratio, "best": best} for name, (ratio, best) in self.sensitivity.items()},
        }

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        asked, best = self.asked, self.best.price
        head = (
            f"{asked.model.num_params:,} parameters, {asked.global_batch:,} sequences of {asked.length:,} on "
            f"{asked.num_devices:,} x {asked.hardware.name} ({asked.memory / 2**30:.1f} GiB each may be filled)"
        )
        rows = [_row(one) for one in (self.best, *self.runners_up)]
        table = aligned(["plan", "ms/step", "MFU", "GiB", "exposed ms", "bubble ms"], rows, left=1)
        parts = {"compute": best.compute, "bubble": best.bubble, "network not hidden": best.exposed}
        parts |= {"update": best.update, "host": best.host}
        times = "; ".join(f"{name} {1e3 * seconds:,.1f} ms" for name, seconds in parts.items() if seconds)
        why = [
            f"  {name}: {ratio:.2f} times as long; best then: {then}"
            for name, (ratio, then) in self.sensitivity.items()
        ]
        reasons = [f"  {count:,} x {reason}" for reason, count in {**self.illegal, **self.dropped}.items() if count]
        chosen = f"best: {self.best.candidate}\n{times}; {best.tokens_per_second:,.0f} tokens per second"
        return "\n\n".join(
            [head, chosen, str(self.saving), table]
            + ["if\n" + "\n".join(why)] * bool(why)
            + ["dropped\n" + "\n".join(reasons)] * bool(reasons)
        )


def saving_of(
    found: Prediction, price: Price, num_devices: int, given: Assumptions, saves: SaveAssumptions
) -> SaveAdvice:
    """How often the job of a priced prediction should save: with all that a device rests with, after steps of that price."""
    size: Any = found.memory.parameters + found.memory.optimizer
    seconds: Any = price.time
    return advise(size, seconds, num_devices, given.host_bandwidth, saves)


def _row(one: Priced) -> list[str]:
    price = one.price
    return [
        str(one.candidate),
        f"{1e3 * price.time:,.1f}",
        f"{price.mfu:.1%}",
        f"{price.memory / 2**30:.1f}",
        f"{1e3 * price.exposed:,.1f}",
        f"{1e3 * price.bubble:,.1f}",
    ]


def _plain(one: Priced) -> dict[str, Any]:
    price = one.price
    return {
        "plan": str(one.candidate),
        "mesh": one.candidate.mesh,
        "seconds": price.time,
        "compute": price.compute,
        "bubble": price.bubble,
        "exposed": price.exposed,
        "update": price.update,
        "host": price.host,
        "network": dict(price.network),
        "mfu": price.mfu,
        "memory": price.memory,
    }
