"""`Weight`: the parameters of one name and shape, how many of them there are, and how a step reads them."""

import math
from dataclasses import dataclass, replace
from typing import Literal

Place = Literal["first", "block", "dense block", "expert block", "last", "both ends"]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Parameters that are alike: one of each block, or one alone.

    Attributes:
      name: path in the model, without the number of the block.
      shape: of the whole array.
      count: how many there are.
      dtype: as the model makes it.
      unit: ZeRO-3 gathers the weights of one unit together; one that is in no unit is gathered alone.
      splits: (mesh axes, dim) pairs: how the model's own layers split it.
      again: whether the backward reads it.
      rebuilds: whether recomputing activations reads it.
      redone: whether redoing elementwise work, as the backward of a scan does, reads it.
      place: where in a pipeline it is; what is of blocks, of all or of one kind, is spread over all stages.
      trained: whether it gets gradients.
      summed: mesh axes of the model's layers over which they sum its gradient themselves.
      layers: of a stack of layers in one array, along dim 0, how many.
      stack_dims: how many first dims number layers or experts.
    """

    name: str
    shape: tuple[int, ...]
    count: int = 1
    dtype: str = "float32"
    unit: str = ""
    splits: tuple[tuple[tuple[str, ...], int], ...] = ()
    again: bool = True
    rebuilds: bool = True
    redone: bool = True
    place: Place = "block"
    trained: bool = True
    summed: tuple[str, ...] = ()
    layers: int = 1
    stack_dims: int = 0

    def stacked(self) -> "Weight":
        """All of them in one array, as a model that scans its layers holds them."""
        splits = tuple((axes, dim + 1) for axes, dim in self.splits)
        return replace(
            self,
            shape=(self.count, *self.shape),
            count=1,
            splits=splits,
            layers=self.count,
            stack_dims=self.stack_dims + 1,
        )

    @property
    def size(self) -> int:
        """Elements of all of them."""
        return self.count * math.prod(self.shape)
