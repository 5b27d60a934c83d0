"""The sections `mesh` and `context` of a configuration."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from axonml_jax.parallel.strategies.context import Context

_INNER_AXES = ("pipe", "fsdp", "expert", "context", "depth", "row", "col", "tensor")
"""Mesh axes that are left out where their degree is 1."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The degree of every mesh axis; their product is the number of devices.

    Attributes:
      data: groups of devices that hold whole copies of the parameters; -1 takes all devices.
      pipe: devices along which the model's layers lie as stages (see the section pipeline).
      fsdp: ways in which parameters, gradients and optimizer state are split; 1 splits nothing, -1 takes all devices.
      expert: ways in which the experts of mixture-of-experts layers, and the batch, are split.
      context: ways in which the positions of sequences are split (see the section context).
      tensor: ways in which heads, inner widths and the vocabulary are split (Megatron); wants model.split tensor.
      row: ways in which output features of every layer are split (AxoNN); wants model.split grid, as col and depth do.
      col: ways in which input features of every layer are split.
      depth: ways in which the batch, and every matrix once more, is split.
    """

    data: int = -1
    pipe: int = 1
    fsdp: int = 1
    expert: int = 1
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


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """How the positions of sequences are split along mesh.context (see `ax.Context`).

    Attributes:
      method: how attention reads keys and values of other ranks: auto, gather, ulysses, ring, or [2, ring] or [2, gather] for
        Ulysses among so many ranks and the other among the rest.
      order: in which order ranks hold positions: contiguous, zigzag or striped; auto is zigzag.
      shard: parameters rest sharded over mesh.fsdp and mesh.context together, as plan.sharding_strategy says.
      allow_communication: what the code of a model of one's own that sees whole sequences may send across positions besides
        attention and sums: false, as much as its attention sends; true, anything; or bytes per rank and step.
    """

    method: tuple[int, str] | str = "auto"
    order: Literal["auto", "contiguous", "zigzag", "striped"] = "auto"
    shard: bool = False
    allow_communication: bool | int = False

    def __post_init__(self):
        if isinstance(self.method, list):
            object.__setattr__(self, "method", tuple(self.method))
        try:
            self.build()
        except ValueError as error:
            raise ValueError(f"context: {error}") from error

    def build(self) -> "Context":
        """The plan's part."""
        from axonml_jax.parallel.strategies.context import Context

        own: dict[str, Any] = {"shard": self.shard, "allow_communication": self.allow_communication}
        return Context(method=self.method, order=self.order, **own)  # pyright: ignore[reportArgumentType]

    def problems(self, mesh: MeshConfig, length: int | None) -> Iterator[str]:
        """What of it does not go with the mesh, or with sequences of a length, where it and their order are known."""
        if mesh.context == 1 and self != ContextConfig():
            yield "the section context has no effect while mesh.context=1: set mesh.context"
        if mesh.context > 1:
            yield from self._against_degree(mesh, length)

    def _against_degree(self, mesh: MeshConfig, length: int | None) -> Iterator[str]:
        from axonml_jax.sharding.sequence_order import order_parts

        strategy = self.build()
        parts = order_parts(strategy.position_order, mesh.context)
        if length is not None and length % parts:
            near = " or ".join(
                str(count) for count in (length // parts * parts, (length // parts + 1) * parts) if count
            )
            yield (
                f"data.length={length} does not divide into the {parts} parts of context.order={strategy.position_order} over "
                f"mesh.context={mesh.context}: use {near}"
            )
        if not isinstance(self.method, str) and mesh.context % self.method[0]:
            yield f"context.method={list(self.method)}: {self.method[0]} must divide mesh.context={mesh.context}"
