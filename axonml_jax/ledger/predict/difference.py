"""Hold a prediction against the program it predicts: traffic by what is moved, memory as the compiler planned it."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from axonml_jax.cost.wire import Amount, exact
from axonml_jax.ledger.entry import Collective
from axonml_jax.ledger.label import SCALARS
from axonml_jax.ledger.predict.prediction import Prediction


@dataclass(frozen=True, slots=True, order=True)
class Disagreement:
    """Collectives of one kind that prediction and program count differently.

    Attributes:
      label, kind, axes, dtype: which.
      predicted: (launches, elements, bytes per rank) of one step.
      found: the same in the program.
    """

    label: str
    kind: str
    axes: tuple[str, ...]
    dtype: str
    predicted: tuple[int, int, Amount]
    found: tuple[int, int, Amount]

    def __str__(self) -> str:
        what = f"{self.label or 'layers'}: {self.kind} of {self.dtype} over {','.join(self.axes)}"
        show = lambda counts: f"{counts[0]:,} launches, {counts[1]:,} elements, {float(counts[2]):,.0f} bytes"
        return f"{what}: predicted {show(self.predicted)}; found {show(self.found)}"


def difference(prediction: Prediction, collectives: Iterable[Collective]) -> list[Disagreement]:
    """What a prediction and a program say differently about traffic; empty when they agree.

    Args:
      prediction: of the plan.
      collectives: of the step, traced (`collectives_in`, or a report's). Over one rank nothing is sent and nothing compared.

    Returns:
      A sorted list.
    """
    ours: dict[tuple, tuple] = {}
    for flow in prediction.traffic:
        key = (flow.label, flow.kind, tuple(sorted(flow.axes)), flow.dtype)
        ours[key] = _add(ours.get(key), (flow.count, flow.elements * flow.times, flow.wire_bytes))
    theirs: dict[tuple, tuple] = {}
    for entry in collectives:
        if entry.counted and entry.group_size != 1:
            label = "" if entry.label == SCALARS else entry.label
            key = (label, entry.kind, tuple(sorted(entry.axes)), entry.dtype)
            more = (entry.executions * entry.leaves, entry.executions * entry.elements, entry.step_wire_bytes)
            theirs[key] = _add(theirs.get(key), more)
    nothing = (0, 0, 0)
    return sorted(
        Disagreement(*key, predicted=ours.get(key, nothing), found=theirs.get(key, nothing))
        for key in ours.keys() | theirs.keys()
        if ours.get(key, nothing) != theirs.get(key, nothing)
    )


def _add(a: tuple | None, b: tuple) -> tuple:
    return b if a is None else (a[0] + b[0], a[1] + b[1], exact(Fraction(a[2]) + b[2]))


@dataclass(frozen=True, slots=True)
class MemoryDifference:
    """Predicted and planned bytes of one device.

    Attributes:
      arguments: (predicted, planned) bytes that rest.
      temporaries: (predicted, planned) bytes that the step needs more.
    """

    arguments: tuple[int, int]
    temporaries: tuple[int, int]

    @property
    def ratios(self) -> tuple[float, float]:
        """Planned over predicted, of arguments and of temporaries."""
        return tuple(found / told if told else float("inf") for told, found in (self.arguments, self.temporaries))  # pyright: ignore[reportReturnType]

    def __str__(self) -> str:
        rows = zip(("arguments", "temporaries"), (self.arguments, self.temporaries), self.ratios, strict=True)
        return "\n".join(
            f"{name:<12} predicted {told / 2**20:,.1f} MiB, planned {found / 2**20:,.1f} MiB, ratio {ratio:.3f}"
            for name, (told, found), ratio in rows
        )


def memory_difference(prediction: Prediction, compiled: Any) -> MemoryDifference:
    """Predicted memory beside what a compiled step plans.

    Args:
      prediction: of the plan.
      compiled: anything with `memory_analysis()`, such as `step.lower(state, batch).compile()`.
    """
    planned, memory = compiled.memory_analysis(), prediction.memory
    resting = planned.argument_size_in_bytes + getattr(planned, "host_argument_size_in_bytes", 0)
    return MemoryDifference((memory.arguments, resting), (memory.temporaries, planned.temp_size_in_bytes))
