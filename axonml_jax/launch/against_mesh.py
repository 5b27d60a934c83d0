"""What of a configuration does not go with the degrees of its mesh."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axonml_jax.launch.config import RunConfig

_SPLIT_BY = {"tensor": ("tensor",), "grid": ("row", "col", "depth")}
"""The mesh axes over which a model's layers split, by `model.split`."""

_SIZES = {
    "query heads": "model.num_heads",
    "key and value heads": "model.num_kv_heads",
    "features": "model.hidden_size",
    "inner features": "model.mlp_hidden_size",
    "words": "model.vocab_size",
    "positions": "data.length",
}
"""The settings of the sizes that must divide."""


def against_mesh(config: "RunConfig") -> Iterator[str]:
    """Every setting that has no effect on the mesh, or cannot run on it."""
    plan, fsdp = config.plan, config.mesh.fsdp
    if fsdp == 1:
        unused = {"sharding_strategy": plan.sharding_strategy, "prefetch": plan.prefetch}
        for name, value in unused.items():
            if value:
                yield f"plan.{name}={value} has no effect while mesh.fsdp=1 splits nothing: set mesh.fsdp"
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
    own = {axis: ranks for axis in _SPLIT_BY[split] if (ranks := degrees.get(axis, 1)) > 1}
    if own:
        yield from _indivisible(config, own)


def _indivisible(config: "RunConfig", own: dict[str, int]) -> Iterator[str]:
    """The sizes of the model that the axes it splits over do not divide, and the degrees that they may have."""
    from axonml_jax.ledger.predict.decoder import problems

    model: Any = config.model
    over = lambda degrees: problems(model, degrees, config.data.length)
    if not (found := over(own)):
        return
    legal = {
        axis: " or ".join(str(other) for other in range(1, 2 * ranks) if not over({**own, axis: other}))
        for axis, ranks in own.items()
    }
    remedies = [f"mesh.{axis} {degrees}, or" for axis, degrees in legal.items() if degrees]
    sizes = [setting for word, setting in _SIZES.items() if re.search(rf"\d {word} ", "; ".join(found))]
    given = ", ".join(f"mesh.{axis}={ranks}" for axis, ranks in own.items())
    yield f"{given}: {'; '.join(found)}: use {' '.join(remedies)} other values of {' and '.join(sizes)}"
