"""The mesh axes that `auto_parallelize` splits layers over."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SplitAxes:
    """How layers are split on a mesh.

    Attributes:
      axis: the axis that splits output features: `tensor`, or `row` where there is no `tensor`.
      ranks: its degree.
      into: into how many parts input features are split besides: col x depth.
      is_grid: whether they are: then layers are AxoNN's 3-D ones.
    """

    axis: str
    ranks: int
    into: int
    is_grid: bool

    @property
    def axes(self) -> tuple[str, str, str]:
        """What a 3-D layer calls row, col and depth."""
        return self.axis, "col", "depth"

    @staticmethod
    def of(mesh: Any) -> "SplitAxes":
        """That of a mesh.

        Raises:
          ValueError: when no axis of the mesh splits layers.
        """
        degrees: Mapping[str, int] = dict(mesh.shape)
        axis = "tensor" if degrees.get("tensor", 1) > 1 else "row"
        into = degrees.get("col", 1) * degrees.get("depth", 1)
        if degrees.get("tensor", 1) > 1 and degrees.get("row", 1) > 1:
            raise ValueError(
                f"the mesh {dict(degrees)} has both tensor and row: auto_parallelize splits output features over one of them"
            )
        if degrees.get(axis, 1) == 1 and into == 1:
            raise ValueError(
                f"the mesh {dict(degrees)} has no axis that splits layers: give it tensor (Megatron's layers), or row, col and "
                "depth (AxoNN's)"
            )
        return SplitAxes(axis, degrees.get(axis, 1), into, into > 1)
