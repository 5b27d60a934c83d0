"""Plans that `random_plans.py` draws as plain values, without asking whether they can work, and what is built of them."""

import math
import random
from typing import Any

from drawn_models import drawn_transformer, some

REPLICATE: dict[str, list] = {
    "sync_strategy": ["synchronous", "synchronous", "no_sync"],
    "bucket_size_mb": [0.0003, 1e-9],
    "gradient_as_bucket_view": [True, False],
    "comm_dtype": ["bfloat16", "float64"],
    "comm_hook": ["all_reduce_sum"],
}
SHARD: dict[str, list] = {
    "stage": [1, 2],
    "wrap": ["all", "none"],
    "prefetch": [1, 2],
    "flat": [True, False],
    "gather_hop": [1, 2],
    "scatter_hop": [1, 2],
    "wire": ["int8"],
    "reduce_wire": ["bf16", "int8"],
}
CONTEXT: dict[str, list] = {
    "method": ["gather", "ulysses", "ring", [2, "ring"], [2, "gather"]],
    "order": ["contiguous", "zigzag", "striped"],
    "shard": [True],
    "sees": ["own", "whole"],
    "allow_communication": [True],
}
PIPELINED: dict[str, list] = {
    "schedule": ["gpipe", "1f1b", "interleaved", "zero-bubble"],
    "num_microbatches": [1, 2, 3, 4],
    "gather": ["step", "chunk", "tick"],
}
PLAN: dict[str, list] = {
    "accumulate": [2, 3],
    "update": ["whole"],
    "offload": ["params", "optimizer_states", "full"],
    "remat": ["full", "selective"],
    "batch_stats": ["local"],
    "broadcast_buffers": [False],
    "check_vma": [True],
    "precision": ["bf16", "bf16-reduce", "float32"],
}
TRAINER: dict[str, list] = {"max_grad_norm": [0.3], "max_nonfinite": [2]}
AXES = {
    "table": ("data", "data", "fsdp", "fsdp", "island", "context", "pipe"),
    "stages": ("data", "fsdp"),
    "transformer": ("data", "fsdp", "context", "tensor", "tensor", "pipe", "row", "col", "depth", "expert"),
    "experts": ("data", "fsdp", "context", "tensor"),
    "layers": ("data", "fsdp", "tensor"),
    "plain": ("data", "fsdp"),
    "diloco": ("fsdp", "fsdp", "fsdp", "tensor", "tensor", "tensor", "pipe", "context"),
}
"""By family the axes that are drawn besides those that it needs."""
CASES = (
    "dropout", "weighted", "batch_norm", "masked_batch_norm", "tied", "recurrent", "scanned", "linen_batch_norm",
    "linen_masked", "linen_dropout",
)  # fmt: skip
RULES = {
    "nnx": {"up/kernel": [None, "tensor"], "(up|norm)/(bias|scale)": ["tensor"], "down/kernel": ["tensor"], ".*": []},
    "linen": {"Dense_0/kernel": [None, "tensor"], "Dense_0/bias": ["tensor"], "Dense_1/kernel": ["tensor"], ".*": []},
}
KINDS = {"fsdp": "Shard", "context": "Context", "pipe": "Pipelined"}
MOST = 8


def drawn(family: str, draw: random.Random) -> dict[str, Any]:
    """A model, a mesh, a plan and a trainer's options."""
    model = FAMILIES[family](draw)
    needed = {"stages": "pipe", "experts": "expert", "plain": "tensor", "diloco": "data"}.get(family)
    usual = [axis for axis in AXES[family] if family != "transformer" or draw.random() < 0.05 or _splits(model, axis)]
    axes = list(dict.fromkeys([needed] * bool(needed) + draw.choices(usual, k=draw.choice([1, 1, 2, 2, 3]))))
    if family == "layers" and model["split"] == "grid":
        axes = list(dict.fromkeys([*draw.sample(["depth", "row", "col"], 2), *axes[:1]]))
    mesh = {axis: draw.choice([2, 2, 2, 4, 3, 1, 8]) for axis in axes}
    while math.prod(mesh.values()) > MOST:
        largest = max(mesh, key=lambda axis: mesh[axis])
        mesh[largest] = max(1, mesh[largest] // 2)
    chance = draw.choice([0.03, 0.1, 0.25])
    plan: dict[str, Any] = some(draw, PLAN, chance)
    for axis, options in (("data", REPLICATE), ("fsdp", SHARD), ("context", CONTEXT)):
        if axis in mesh and (taken := some(draw, options, chance)):
            plan[axis] = taken
    if "island" in mesh:
        joint = "fsdp,island" if "fsdp" in mesh and draw.random() < 0.7 else "island"
        kind = draw.choice(["Replicate", "Shard"])
        plan["axes"] = {joint: {"kind": kind, **some(draw, SHARD if kind == "Shard" else REPLICATE, chance)}}
        plan["axes"][joint].pop("sync_strategy", None)  # the oracle takes independent ranks on the outermost axis alone
        if joint != "island":
            plan.pop("fsdp", None)
    if "pipe" in mesh and draw.random() < 0.95:
        plan["pipe"] = {"num_microbatches": draw.choice([2, 4])} | some(draw, PIPELINED, 0.4)
        if (plan["pipe"].get("schedule") == "interleaved") != (draw.random() < 0.1):
            plan["pipe"]["chunks"] = 2
        if family == "transformer":
            model["num_layers"] = mesh["pipe"] * plan["pipe"].get("chunks", 1)
        if family == "stages":
            model["stages"] = max(2, mesh["pipe"] * plan["pipe"].get("chunks", 1))
    if "context" in mesh:  # ranks drop tokens of their own positions, one device those of whole rows
        for options in (model, model.get("experts", {})):
            options.pop("capacity_factor", None)
    case = {"family": family, "model": model, "mesh": mesh, "plan": plan}
    if family == "diloco":
        plan["data"] = {"every": draw.choice([1, 2, 3])} | some(
            draw, {"lr": [1.0, 0.3], "momentum": [0.0, 0.5], "wire": ["bf16", "int8"]}, 0.3
        )
    if family == "plain" and "rules" not in model and draw.random() < 0.4:
        mesh.pop("tensor", None)
        case["mesh"] = mesh = {**dict.fromkeys(draw.sample(["row", "col", "depth"], 2), 2), **mesh}
        while math.prod(mesh.values()) > MOST:
            mesh.popitem()
    wide = family not in ("transformer", "layers")  # attention's key bias has a gradient of rounding noise
    optimizers = ["adamw", "momentum", "lamb", "clipped", "adafactor"] if wide else ["momentum", "momentum", "clipped"]
    case["optimizer"] = draw.choice(optimizers)
    case["trainer"] = some(draw, TRAINER, chance)
    case["rows"] = draw.choice([3, 4])  # of two rows BatchNorm makes the same whatever they are
    if draw.random() < chance / 3:
        case["trainer"]["trainable"] = "kernel"
    return case


def _splits(model: dict[str, Any], axis: str) -> bool:
    """Whether a transformer's layers split over an axis of layers; of other axes no question."""
    if axis in ("row", "col", "depth", "tensor"):
        return (model.get("split") == "grid") == (axis != "tensor")
    return axis != "expert" or "experts" in model


FAMILIES = {
    "table": lambda draw: {"case": draw.choice(CASES)},
    "stages": lambda draw: {"case": draw.choice(["chain", "linen", "language"]), "stages": 2},
    "transformer": drawn_transformer,
    "experts": lambda draw: (
        {"router": draw.choice(["softmax", "switch", "sigmoid", "all"])}
        | some(draw, {"dispatch": ["rounds", "gather"], "layers": [1], "shared_size": [6], "capacity_factor": [1.0]}, 0.2)
    ),
    "layers": lambda draw: {"split": draw.choice(["tensor", "tensor", "grid"]), "sequence_parallel": draw.random() < 0.4},
    "plain": lambda draw: (
        {"kind": draw.choice(["nnx", "linen"])} | ({"rules": True} if draw.random() < 0.5 else {"paired": draw.random() < 0.5})
    ),
    "diloco": lambda draw: {"kind": draw.choice(["nnx", "linen"])},
}  # fmt: skip


def mesh_of(case: dict[str, Any]) -> Any:
    """The mesh, with an axis of one's own inside `data` and `fsdp`."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    import axonml_jax as ax

    if case.get("junk", [""])[0] == "mesh":
        return ax.make_mesh(**case["mesh"])
    mesh, devices = case["mesh"], jax.devices()[: math.prod(case["mesh"].values())]
    if "island" not in mesh:
        return ax.make_mesh(devices=devices, **mesh)
    order = sorted(mesh, key=lambda axis: ("data", "pipe", "fsdp", "island", "context").index(axis))
    return Mesh(np.array(devices).reshape([mesh[axis] for axis in order]), tuple(order))


def plan_of(case: dict[str, Any]) -> Any:
    """The `ax.Plan`."""
    from fsdp_plans import WRAPS
    from jax.sharding import PartitionSpec

    import axonml_jax as ax
    from axonml_jax.parallel.plan import Partition

    def strategy(kind, options):
        options = {name: value for name, value in options.items() if name != "kind"}
        if isinstance(options.get("wrap"), str) and options["wrap"] in WRAPS:
            options["wrap"] = WRAPS[options["wrap"]]
        if isinstance(hook := options.get("comm_hook"), str) and hook == "all_reduce_sum":
            options["comm_hook"] = ax.all_reduce_sum
        return getattr(ax, kind)(**options)

    kinds = {"data": "DiLoCo" if case["family"] == "diloco" else "Replicate"} | KINDS
    given, where = dict(case["plan"]), case.get("junk", ("", ""))
    junk = where[1] if where[0] == "plan" else ""
    for name, kind in kinds.items():
        if name != junk and isinstance(given.get(name), dict):
            given[name] = strategy(kind, given[name])
    if "axes" in given and junk != "axes":
        keys = {key: tuple(key.split(",")) if "," in key else key for key in given["axes"]}
        given["axes"] = {keys[key]: strategy(options["kind"], options) for key, options in given["axes"].items()}
    if case["model"].get("rules"):
        rules = RULES[case["model"]["kind"]]
        given["partition"] = Partition.of({name: PartitionSpec(*spec) for name, spec in rules.items()})
    return ax.Plan(**given)


def rows_of(case: dict[str, Any]) -> int:
    """Rows of a global batch: some for every part that the axes and microbatches make."""
    splits = ("data", "fsdp", "depth", "expert", "island")
    plan = case["plan"]
    parts = math.prod(size for axis, size in case["mesh"].items() if axis in splits)
    return case["rows"] * parts * plan.get("accumulate", 1) * (plan.get("pipe") or {}).get("num_microbatches", 1)
