"""A cell of the table: one family under one plan and variant, held to one device."""

import math
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import axonml_jax as ax
from axonml_jax.testing.equality import FLOAT32, FLOAT64, LOW_PRECISION

from . import plain
from .family import Family, Made

PLANS = ("DDP", "FSDP", "HYBRID", "Pipeline", "tensor, automatic", "tensor, by rules", "context")
VARIANTS = ("plain", "remat", "accumulate", "bf16")
STEPS = 3
DEVICES = 4
MICROBATCHES = 2
"""Of a pipeline, and of accumulation."""


def degrees(plan: str) -> dict[str, int]:
    """The mesh of a plan."""
    meshes = {
        "DDP": {"data": 4},
        "FSDP": {"fsdp": 4},
        "HYBRID": {"data": 2, "fsdp": 2},
        "Pipeline": {"data": 2, "pipe": 2},
        "context": {"data": 2, "context": 2},
    }
    return meshes.get(plan, {"data": 2, "tensor": 2})


def batch_ranks(plan: str) -> int:
    """Over how many ranks the rows of a batch are split."""
    return degrees(plan).get("data", 1) * degrees(plan).get("fsdp", 1)


def parallel(made: Made, plan: str, variant: str) -> tuple[Any, str]:
    """The model under a plan as a user writes it, and what the plan says of itself."""
    mesh = ax.make_mesh(**degrees(plan), devices=jax.devices()[:DEVICES])
    options = {"params": made.params, "remat": "full" if variant == "remat" else None}
    options["precision"] = "bf16" if variant == "bf16" else None
    model = made.model if made.params is not None else nnx.clone(made.model)
    if plan == "DDP":
        return ax.DDP(model, mesh, **options), ""
    if plan in ("FSDP", "HYBRID"):
        strategy = "full_shard" if plan == "FSDP" else "hybrid_shard"
        return ax.FSDP(model, mesh, sharding_strategy=strategy, **options), ""
    if plan == "Pipeline":
        return ax.Pipeline(model, mesh, num_microbatches=MICROBATCHES, **options), ""
    if plan == "context":
        return ax.ContextParallel(model, mesh, allow_communication=True, **options), ""
    if plan == "tensor, by rules":
        return ax.TensorParallel(model, mesh, rules=made.rules, **options), ""
    report = ax.auto_parallelize(model, mesh, example=made.example)
    found = f"{len(report.swapped)} of {len(report.swapped) + len(report.left)} layers split"
    return ax.DDP(model, mesh, **options), found


def cut(made: Made, plan: str, variant: str) -> tuple[int, int]:
    """(shards, microbatches) as far as the model's numbers depend on them."""
    microbatches = (MICROBATCHES if plan == "Pipeline" else 1) * (2 if variant == "accumulate" else 1)
    if made.draws:
        return batch_ranks(plan), microbatches
    return 1, microbatches if _has_buffers(made) else 1


def _has_buffers(made: Made) -> bool:
    return made.params is not None and len(made.params) > 1


def rows_in_order(batches: list, made: Made, plan: str, variant: str) -> list:
    """Batches whose rows stand microbatch by microbatch over all shards, where BatchNorm joins the shards of each."""
    _, microbatches = cut(made, plan, variant)
    if made.draws or microbatches == 1:
        return batches
    ranks = batch_ranks(plan)
    swap = lambda x: x.reshape(ranks, microbatches, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
    return [jax.tree.map(swap, batch) for batch in batches]


def run(family: Family, plan: str, variant: str, cache: dict) -> tuple[str, str]:
    """("equal" | "refused" | "differs" | "crash", why) of a cell; `cache` holds models and oracles of the family."""
    dtype = jnp.bfloat16 if variant == "bf16" else jnp.float64
    if dtype not in cache:
        cache[dtype] = family.made(dtype)
    made, generator = cache[dtype], np.random.default_rng(3)
    batches = [made.batch(generator) for _ in range(STEPS)]
    if variant != "bf16":
        batches = plain.cast(batches, np.float64)
    try:
        got, said = trained(made, plan, variant, batches)
    except Exception as error:  # a crash is a cell of the table, and ends the script with status 1
        refused = isinstance(error, TypeError | ValueError) and ours(error)
        return ("refused" if refused else "crash"), describe(error).replace(type(made.model).__name__, "MODEL")
    wanted = on_one_device(made, plan, variant, batches, cache)
    problems = in_bf16(got, wanted) if variant == "bf16" else to_the_digit(got, wanted, made.double)
    return ("differs", "; ".join(problems)[:600]) if problems else ("equal", said)


def trained(made: Made, plan: str, variant: str, batches: list) -> tuple[dict, str]:
    """What the model became under the plan, and what the plan says of itself."""
    model, said = parallel(made, plan, variant)
    tx = plain.adamw(jnp.bfloat16 if variant == "bf16" else None)
    trainer = model.trainer(tx, made.loss_fn, accumulate=2 if variant == "accumulate" else None)
    metrics = [trainer.step(batch) for batch in batches]
    numbers = {"losses": [float(m["loss"]) for m in metrics], "norms": [float(m["grad_norm"]) for m in metrics]}
    return {**numbers, "after": model.state_dict()}, said


def on_one_device(made: Made, plan: str, variant: str, batches: list, cache: dict) -> dict:
    """The oracle's run, shared by all cells whose numbers depend on the same parts."""
    shards, microbatches = cut(made, plan, variant)
    dtype = jnp.bfloat16 if variant == "bf16" else None
    ordered = rows_in_order(batches, made, plan, variant)
    key = (dtype, shards, microbatches, batch_ranks(plan) if ordered is not batches else 0)
    if key not in cache:
        cache[key] = plain.train(made, ordered, shards, microbatches, dtype)
    return cache[key]


def to_the_digit(got: dict, wanted: dict, double: bool) -> list[str]:
    """Losses, norms, and every parameter and buffer: max|a-b| <= FLOAT64 max(1, max|b|), or FLOAT32 max|b|."""
    pairs = {name: (got["after"].get(name), value) for name, value in wanted["after"].items()}
    pairs |= {name: (np.asarray(got[name]), np.asarray(wanted[name])) for name in ("losses", "norms")}
    problems = [f"{name}: not in the model" for name in got["after"] if name not in wanted["after"]]
    for name, (a, b) in pairs.items():
        if a is None:
            problems.append(f"{name}: missing")
            continue
        scale = np.max(np.abs(b), initial=0)
        worst = np.max(np.abs(np.asarray(a, np.float64) - b), initial=0)
        allowed = FLOAT64 * max(1.0, scale) if double else FLOAT32 * scale
        if not worst <= allowed:
            problems.append(f"{name}: {worst:.2g} > {allowed:.2g}")
    return problems


def in_bf16(got: dict, wanted: dict) -> list[str]:
    """Losses, norms and each parameter within LOW_PRECISION; all updates together point the same way (cosine)."""
    problems = [
        f"{name}: {got[name]}, wanted {wanted[name]}"
        for name in ("losses", "norms")
        if not np.allclose(got[name], wanted[name], rtol=LOW_PRECISION, atol=0)
    ]
    moved, should = [], []
    for name, b in wanted["after"].items():
        a, first = np.asarray(got["after"][name], np.float64), wanted["before"][name]
        if not np.max(np.abs(a - b), initial=0) <= LOW_PRECISION * np.max(np.abs(b), initial=0):
            problems.append(f"{name}: {np.max(np.abs(a - b)):.2g} of {np.max(np.abs(b)):.2g}")
        moved.append((a - first).ravel())
        should.append((b - first).ravel())
    a, b = np.concatenate(moved), np.concatenate(should)
    cosine = float(a @ b / math.sqrt((a @ a) * (b @ b)))
    return [*problems, *([f"cosine of updates {cosine:.4f}"] if not cosine >= 1 - LOW_PRECISION else [])]


def ours(error: Exception) -> bool:
    """Whether the library raised it: its last frame is in the library."""
    return "/axonml_jax/" in traceback.extract_tb(error.__traceback__)[-1].filename.replace("\\", "/")


def describe(error: Exception) -> str:
    """What the error says, and for a crash where."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {str(error)[:1500]}"
    return text if ours(error) else f"{text} [{last.filename.rsplit('/', 1)[-1]}:{last.lineno}]"
