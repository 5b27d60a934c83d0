"""The mesh axes of which the planner tries every degree. Nothing here imports JAX."""

from axonml_jax.mesh.axes import AXES

FAMILIES: tuple[tuple[str, ...], ...] = (
    ("data", "pipe", "fsdp", "expert", "context", "tensor"),
    ("data", "pipe", "fsdp", "depth", "row", "col"),
)
"""Mesh axes that go together: layers are split Megatron's way or AxoNN's. Experts go with the former."""

SHORTEST = 1024
"""Positions of a rank of `context` at least: shorter parts are not tried."""

SEARCHED = tuple(axis for axis in AXES if any(axis in family for family in FAMILIES))
"""The mesh axes of which legal plans are enumerated."""
