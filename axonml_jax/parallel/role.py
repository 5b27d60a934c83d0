"""What a mesh axis does to the batch and to parameters, as the axis's strategy states it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Role:
    """The role of a mesh axis. Nothing else says it: whoever needs to know asks the strategy.

    A layer that splits its own parameters returns complete gradients along its axes; all other gradients are summed over every
    axis that splits the batch.

    Attributes:
      batch: what of the batch the axis splits: "rows", or None: all its ranks work on the same rows.
      parameters: how they rest: "whole" on every rank; "sharded", and gathered to be read; or as the model's own "layers"
        split them.
      reads: when a step reads them: at its "start", unit by unit at their "use" in forward and backward, or inside the
        "layers".
      reduces: when their gradients are reduced: once a "step", after every "microbatch", inside the "layers", or "never":
        every rank then trains a model of its own.
    """

    batch: Literal["rows"] | None = "rows"
    parameters: Literal["whole", "sharded", "layers"] = "whole"
    reads: Literal["start", "use", "layers"] = "start"
    reduces: Literal["step", "microbatch", "layers", "never"] = "step"
