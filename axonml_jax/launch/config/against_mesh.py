"""What of a configuration does not go with the degrees of its mesh."""

import re
from collections.abc import Iterator
from typing import Any

from axonml_jax.launch.config.sections.mesh_config import MeshConfig
from axonml_jax.launch.config.sections.plan_config import PlanConfig
from axonml_jax.models.config import TransformerConfig

_SPLIT_BY = {"tensor": ("tensor",), "grid": ("row", "col", "depth")}
"""The mesh axes over which a model's layers split, by `model.split`."""

_SIZES = {
    "query heads": "model.num_heads",
    "key and value heads": "model.num_kv_heads",
    "features": "model.hidden_size",
    "inner features": "model.mlp_hidden_size",
    "words": "model.vocab_size",
    "experts": "experts.num_experts",
    "positions": "data.length",
}
"""The settings of the sizes that must divide."""


def against_mesh(
    mesh: MeshConfig, plan: PlanConfig, over_context: bool, model: TransformerConfig | None, length: int | None
) -> Iterator[str]:
    """Every setting that has no effect on the mesh, or cannot run on it.

    Args:
      mesh, plan, model: the sections; no model: one's own, of which nothing is known.
      over_context: whether parameters rest sharded over `context` too.
      length: of a training example; None: of data of one's own, it is not known.
    """
    if over_context and mesh.context > 1 and plan.sharding_strategy == "no_shard":
        yield "context.shard=true shards as plan.sharding_strategy says, which is no_shard: use another, or context.shard=false"
    if mesh.fsdp == 1 and not (over_context and mesh.context != 1):
        unused = {"sharding_strategy": plan.sharding_strategy, "prefetch": plan.prefetch}
        unused |= {"gather": plan.gather, "reduce": plan.reduce}
        for name, value in unused.items():
            if value:
                yield f"plan.{name}={value} has no effect while mesh.fsdp=1 splits nothing: set mesh.fsdp"
    if model is not None:
        if model.scan_layers and mesh.pipe > 1:
            yield f"mesh.pipe={mesh.pipe} cuts between blocks, and model.scan_layers makes one loop of them: set it to false"
        yield from against_split(mesh, model, length)
    if plan.sync_strategy == "no_sync" and plan.precision == "fp16":
        yield "plan.precision=fp16 with sync_strategy=no_sync would need a loss scale per rank: use bf16"


def against_split(mesh: MeshConfig, model: TransformerConfig, length: int | None) -> Iterator[str]:
    """Every degree that splits nothing of the model, and every size of the model that they do not divide.

    Args:
      mesh, model: the sections; a degree of -1 is not looked at.
      length: of a training example; None: not known.
    """
    degrees, split = mesh.degrees, model.split
    for other, axes in _SPLIT_BY.items():
        for axis in axes:
            if other != split and degrees.get(axis, 1) > 1:
                yield f"mesh.{axis}={degrees[axis]} splits nothing while model.split={split}: set model.split={other}"
    if mesh.expert != 1 and model.experts is None:
        yield f"mesh.expert={mesh.expert} splits experts, and the model has none: set experts.num_experts"
    axes = (*_SPLIT_BY[split], "expert") if model.experts is not None else _SPLIT_BY[split]
    own = {axis: ranks for axis in axes if (ranks := degrees.get(axis, 1)) > 1}
    if own:
        yield from _indivisible(model, (length or model.max_length) // max(mesh.context, 1), own)


def _indivisible(model: Any, length: int, own: dict[str, int]) -> Iterator[str]:
    """The sizes of the model that the axes it splits over do not divide, and the degrees that they may have."""
    from axonml_jax.cost.decoder.configuration import problems

    over = lambda degrees: problems(model, degrees, length)
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
