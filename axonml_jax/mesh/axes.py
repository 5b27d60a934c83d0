"""The library's mesh axes, outermost (slowest link) first; a plan may give strategies to axes of the user's own."""

from collections.abc import Iterable, Sequence

AXES: tuple[str, ...] = ("data", "pipe", "fsdp", "expert", "context", "depth", "row", "col", "tensor")
"""Every axis a library mesh may have, in canonical order. A new one is a field of `MeshShape`, `Plan` and `MeshConfig` too."""

BATCH_AXES: tuple[str, ...] = ("data", "fsdp", "expert", "depth")
"""The axes over which the rows of the global batch are split; `context` splits their positions."""

LAYER_AXES: tuple[str, ...] = ("expert", "depth", "row", "col", "tensor")
"""The axes along which parallel layers split their parameters themselves."""

PARTITIONED: tuple[str, ...] = ("tensor", "expert")
"""The axes along which XLA's partitioner may split any model's parameters by rules; along `expert` rows are split too."""

STAGES = "pipe"
"""The axis along which the stages of a pipeline lie."""

AxisNames = str | Sequence[str]
"""One axis name or several."""


def as_axes(axes: AxisNames) -> tuple[str, ...]:
    """Normalise one axis name or several to a tuple.

    >>> as_axes("data"), as_axes(["data", "fsdp"])
    (('data',), ('data', 'fsdp'))
    """
    return (axes,) if isinstance(axes, str) else tuple(axes)


def flat_axes(axes: Iterable[AxisNames]) -> tuple[str, ...]:
    """Flatten axis names and tuples of axis names into one tuple of names.

    >>> flat_axes(["data", ("fsdp", "context")])
    ('data', 'fsdp', 'context')
    """
    return tuple(name for axis in axes for name in as_axes(axis))


def batch_axes(axis_names: Iterable[str]) -> tuple[str, ...]:
    """The axes among `axis_names` that split rows of the batch, in canonical order.

    >>> batch_axes(("tensor", "fsdp", "data"))
    ('data', 'fsdp')
    """
    present = set(axis_names)
    return tuple(axis for axis in BATCH_AXES if axis in present)
