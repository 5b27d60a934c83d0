"""The section `mesh` of a configuration."""

from dataclasses import dataclass

_INNER_AXES = ("pipe", "fsdp", "context", "depth", "row", "col", "tensor")
"""Mesh axes that are left out where their degree is 1."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The degree of every mesh axis; their product is the number of devices.

    Attributes:
      data: groups of devices that hold whole copies of the parameters; -1 takes all devices.
      pipe: devices along which the model's layers lie as stages (see the section pipeline).
      fsdp: ways in which parameters, gradients and optimizer state are split; 1 splits nothing, -1 takes all devices.
      context: ways in which the positions of sequences are split (see the section context).
      tensor: ways in which heads, inner widths and the vocabulary are split (Megatron); wants model.split tensor.
      row: ways in which output features of every layer are split (AxoNN); wants model.split grid, as col and depth do.
      col: ways in which input features of every layer are split.
      depth: ways in which the batch, and every matrix once more, is split.
    """

    data: int = -1
    pipe: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    row: int = 1
    col: int = 1
    depth: int = 1

    @property
    def degrees(self) -> dict[str, int]:
        """The axes of the mesh."""
        inner = {name: size for name in _INNER_AXES if (size := getattr(self, name)) != 1}
        return {"data": self.data} | inner
