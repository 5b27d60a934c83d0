"""The mesh axes of which the planner tries every degree. Nothing here imports JAX."""

from axonml_jax.mesh.axes import AXES

FAMILIES: tuple[tuple[str, ...], ...] = (
    ("data", "pipe", "fsdp", "tensor"),
    ("data", "pipe", "fsdp", "depth", "row", "col"),
)
"""Mesh axes that go together: layers are split Megatron's way or AxoNN's."""

SEARCHED = tuple(axis for axis in AXES if any(axis in family for family in FAMILIES))
"""The mesh axes of which legal plans are enumerated."""
