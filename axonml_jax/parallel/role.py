"""What a mesh axis does to the batch and to parameters, as the axis's strategy states it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Role:
    """The role of a mesh axis. Nothing else says it: whoever needs to know asks the strategy.

    A layer that splits its own parameters returns complete gradients along its axes; all other gradients are summed over every
    axis that splits the batch.

    Attributes:
      batch: what of the batch the axis splits: "rows"; or None, where layers split parameters: its ranks share rows.
      parameters: how they rest: "whole" on every rank; "sharded", and gathered to be read; or as the model's own "layers"
        split them.
      reads: when a step reads them: at its "start", unit by unit at their "use" in forward and backward, or inside the
        "layers".
      reduces: when their gradients are reduced: once a "step", after every "microbatch", inside the "layers", or "never":
        every rank then trains a model of its own.

    Raises:
      ValueError: for a name that there is not, or a combination that would be wrong; says why.
    """

    batch: Literal["rows"] | None = "rows"
    parameters: Literal["whole", "sharded", "layers"] = "whole"
    reads: Literal["start", "use", "layers"] = "start"
    reduces: Literal["step", "microbatch", "layers", "never"] = "step"

    def __post_init__(self):
        problems = [
            f"{name}={getattr(self, name)!r} must be one of {choices}"
            for name, choices in _CHOICES.items()
            if getattr(self, name) not in choices
        ]
        layers, sharded = self.parameters == "layers", self.parameters == "sharded"
        rules = {
            "layers that split parameters read them and reduce their gradients themselves: give all three or none": (
                len({layers, self.reads == "layers", self.reduces == "layers"}) > 1
            ),
            "ranks that work on the same rows have the same gradients, whose sum would be too large: batch='rows'": (
                self.batch is None and not layers
            ),
            "what is read at its use, or reduced after every microbatch, rests sharded: parameters='sharded'": (
                not sharded and (self.reads == "use" or self.reduces == "microbatch")
            ),
            "what is read at its use is reduced after every microbatch: reduces='microbatch'": (
                self.reads == "use" and self.reduces != "microbatch"
            ),
            "ranks that train models of their own hold them whole: reduces='never' goes with parameters='whole'": (
                sharded and self.reduces == "never"
            ),
        }
        problems += [rule for rule, broken in rules.items() if broken and not problems]
        if problems:
            raise ValueError(f"{self}: {'; '.join(problems)}")


_CHOICES = {
    "batch": ("rows", None),
    "parameters": ("whole", "sharded", "layers"),
    "reads": ("start", "use", "layers"),
    "reduces": ("step", "microbatch", "layers", "never"),
}
