"""What a pipeline's actions cost: times per stage of F, I, W and of sending."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Times = float | Sequence[float]


@dataclass(frozen=True)
class StageCosts:
    """Times in any one unit; a number stands for every stage, a sequence holds one per stage.

    Attributes:
      forward: F.
      input_gradient: I, the gradient of the stage's input alone.
      weight_gradient: W, the gradient of its weights; a whole backward is B = I + W.
      communication: from the end of an action to its result on the neighbouring rank. A classic order hides it behind
        other work; a row of a timetable ends with it, once for both directions.
    """

    forward: Times = 1.0
    input_gradient: Times = 1.0
    weight_gradient: Times = 1.0
    communication: float = 0.0

    def __post_init__(self):
        problems = []
        for name in ("forward", "input_gradient", "weight_gradient", "communication"):
            value = getattr(self, name)
            if isinstance(value, Sequence):
                object.__setattr__(self, name, tuple(value))
            if not all(0 <= time < math.inf for time in (value if isinstance(value, Sequence) else [value])):
                problems.append(f"{name}={value!r}: a time is a finite number, 0 or more")
        if len({len(times) for times in self._sequences()}) > 1:
            given = {name: len(times) for name, times in vars(self).items() if isinstance(times, tuple)}
            problems.append(f"{given} must have one time per stage each")
        if problems:
            raise ValueError(f"StageCosts: {'; '.join(problems)}")

    def tables(self, num_stages: int) -> dict[str, Sequence[float]]:
        """The time of every kind of work, F, B, I and W, per stage.

        Raises:
          ValueError: for sequences of another length.
        """
        forward, given, weight = (
            list(times) if isinstance(times, Sequence) else [times] * num_stages
            for times in (self.forward, self.input_gradient, self.weight_gradient)
        )
        if any(len(times) != num_stages for times in (forward, given, weight)):
            raise ValueError(
                f"StageCosts has times for {len(self._sequences()[0])} stages, the pipeline has {num_stages}"
            )
        whole = [one + other for one, other in zip(given, weight, strict=True)]
        return {"F": forward, "B": whole, "I": given, "W": weight}

    def merged(self, num_stages: int, neighbours: int) -> "StageCosts":
        """The costs of a pipeline whose stages are `neighbours` successive stages of this one.

        Raises:
          ValueError: for sequences of another length than `num_stages`.
        """
        tables = self.tables(num_stages)
        forward, given, weight = (
            tuple(sum(tables[work][at : at + neighbours]) for at in range(0, num_stages, neighbours)) for work in "FIW"
        )
        return StageCosts(forward, given, weight, self.communication)

    def _sequences(self) -> list[Sequence[float]]:
        fields = (self.forward, self.input_gradient, self.weight_gradient)
        return [times for times in fields if isinstance(times, Sequence)]
