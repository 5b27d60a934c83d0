"""What of a configuration does not go with the degrees of its mesh."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from axonml_jax.launch.config import RunConfig

_SPLIT_BY = {"tensor": ("tensor",), "grid": ("row", "col", "depth")}
"""The mesh axes over which a model's layers split, by `model.split`."""


def against_mesh(config: "RunConfig") -> Iterator[str]:
    """Every setting that has no effect on the mesh, or cannot run on it."""
    plan, fsdp = config.plan, config.mesh.fsdp
    if fsdp == 1:
        unused = {"sharding_strategy": plan.sharding_strategy, "prefetch": plan.prefetch}
        for name, value in unused.items():
            if value:
                yield f"plan.{name}={value} has no effect while mesh.fsdp=1 splits nothing: set mesh.fsdp"
    elif plan.sync_strategy == "no_sync":
        yield f"plan.sync_strategy=no_sync trains a model per rank, but mesh.fsdp={fsdp} splits one model"
    if config.model.scan_layers and config.mesh.pipe > 1:
        yield f"mesh.pipe={config.mesh.pipe} cuts between blocks, and model.scan_layers makes one loop of them: set it to false"
    yield from _against_split(config)
    if plan.sync_strategy == "no_sync" and plan.precision == "fp16":
        yield "plan.precision=fp16 with sync_strategy=no_sync would need a loss scale per rank: use bf16"


def _against_split(config: "RunConfig") -> Iterator[str]:
    degrees, split = config.mesh.degrees, config.model.split
    for other, axes in _SPLIT_BY.items():
        for axis in axes:
            if other != split and degrees.get(axis, 1) > 1:
                yield f"mesh.{axis}={degrees[axis]} splits nothing while model.split={split}: set model.split={other}"
    if config.model.sequence_parallel and (parts := degrees.get("tensor", 1)) > 1 and config.data.length % parts:
        yield f"data.length={config.data.length} does not divide over mesh.tensor={parts}, as model.sequence_parallel asks"
