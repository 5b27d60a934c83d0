"""What a mesh axis does to the batch and to parameters, as the axis's strategy states it."""

from dataclasses import dataclass
from typing import Literal

Split = Literal["rows", "positions"] | None


@dataclass(frozen=True, kw_only=True)
class Role:
    """The role of a mesh axis. Nothing else says it: whoever needs to know asks the strategy.

    A layer that splits its own parameters returns complete gradients along its axes; all other gradients are summed over every
    axis that splits the batch.

    Attributes:
      batch: what of the batch the axis splits: "rows"; "positions", the dim of a leaf that the strategy's `position_dim` names;
        or None, where layers split parameters: its ranks share the batch. A strategy that owns several axes may give a tuple,
        one for each.
      parameters: how they rest: "whole" on every rank; "sharded", and gathered to be read; or as the model's own "layers"
        split them.
      reads: when a step reads them: at its "start", unit by unit at their "use" in forward and backward, or inside the
        "layers".
      reduces: when their gradients are reduced: once a "step", after every "microbatch", inside the "layers", or "never":
        every rank then trains a model of its own.
      keys: random keys along axes that split positions: ranks have their "own", so that the masks of a plain dropout
        differ; or they are "alike", for models that draw by global positions. Along axes that split rows they are own.

    Raises:
      ValueError: for a name that there is not, or a combination that would be wrong; says why.
    """

    batch: Split | tuple[Split, ...] = "rows"
    parameters: Literal["whole", "sharded", "layers"] = "whole"
    reads: Literal["start", "use", "layers"] = "start"
    reduces: Literal["step", "microbatch", "layers", "never"] = "step"
    keys: Literal["own", "alike"] = "own"

    def __post_init__(self):
        each = self.batch if isinstance(self.batch, tuple) and self.batch else (self.batch,)
        problems = [
            f"{name}={getattr(self, name)!r} must be one of {choices}"
            for name, choices in _CHOICES.items()
            if name != "batch" and getattr(self, name) not in choices
        ]
        if any(split not in _CHOICES["batch"] for split in each):
            problems.append(f"batch={self.batch!r} must be one of {_CHOICES['batch']}, or a tuple of these")
        layers, sharded = self.parameters == "layers", self.parameters == "sharded"
        rules = {
            "layers that split parameters read them and reduce their gradients themselves: give all three or none": (
                len({layers, self.reads == "layers", self.reduces == "layers"}) > 1
            ),
            "ranks that share the batch have the same gradients, whose sum would be too large: batch='rows' or 'positions'": (
                None in each and not layers
            ),
            "ranks with the same keys draw the same masks for other rows: keys='alike' goes with batch='positions'": (
                self.keys == "alike" and "positions" not in each
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

    def splits(self, axes: tuple[str, ...]) -> dict[str, Split]:
        """What of the batch each of the strategy's axes splits.

        Raises:
          ValueError: when the role names another number of axes.
        """
        if not isinstance(self.batch, tuple):
            return dict.fromkeys(axes, self.batch)
        if len(self.batch) != len(axes):
            raise ValueError(f"{self} says what {len(self.batch)} axes split, but the strategy has {len(axes)}: {axes}")
        return dict(zip(axes, self.batch, strict=True))


_CHOICES = {
    "batch": ("rows", "positions", None),
    "parameters": ("whole", "sharded", "layers"),
    "reads": ("start", "use", "layers"),
    "reduces": ("step", "microbatch", "layers", "never"),
    "keys": ("own", "alike"),
}
