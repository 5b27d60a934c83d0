"""Experts in `full_matrix.py`: routers x ways to travel x meshes, and the gradients of the routers' own losses alone.

`experts` is the product of four routers, three ways (rounds, gather, and rounds of a capacity that drops tokens) and every mesh
of at most 8 devices whose `expert` is 2, 4 or 8 and whose other axes are data, fsdp, tensor, context and pipe; whether layers
are one scan, what is recomputed, accumulated and offloaded, the precision, the ZeRO stage and typed mode are drawn per row. A
part of every batch is padding, the first row nothing else. `auxiliary` takes `load_balance` or `z`, times 1,000, as the whole
loss, on all meshes of 8 over data, expert, tensor and context, and where experts are a middle stage of a pipeline alone.
"""

import itertools
import math

import jax
import jax.numpy as jnp
from expert_models import F64, IN, LENGTH, ROUTERS, WIDTH, Net, batch_of, loss_fn, make_moe
from flax import nnx
from matrix_tables import drawn
from plan_tables import product

import axonml_jax as ax
from axonml_jax.models.transformer import Stack
from axonml_jax.testing.equality import assert_equals_single_device

OTHERS = ("data", "fsdp", "tensor", "context", "pipe")
WAYS = {"rounds": {"dispatch": "rounds"}, "gather": {"dispatch": "gather"}, "capacity": {"capacity_factor": 0.8}}
OPTIONS = {
    "layers": ["one by one", "one scan"],
    "remat": [None, "full", "selective"],
    "accumulate": [1, 2],
    "offload": ["none", "none", "optimizer_states", "full"],
    "precision": [None, None, None, "bf16"],
    "stage": [1, 2, 3],
    "check_vma": [False, True],
}
NO_ROWS = ("tensor", "context", "pipe")


def _meshes(expert: int) -> list[dict[str, int]]:
    """Of at most 8 devices, so many of them along `expert`."""
    rest = [degrees for degrees in itertools.product((1, 2, 4), repeat=len(OTHERS)) if math.prod(degrees) * expert <= 8]
    own = [{axis: size for axis, size in zip(OTHERS, degrees, strict=True) if size > 1} for degrees in rest]
    return [{"expert": expert, **degrees} for degrees in own]


def _of_eight() -> list[dict[str, int]]:
    axes = ("data", "expert", "tensor", "context")
    shapes = [shape for shape in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(shape) == 8]
    return [{axis: size for axis, size in zip(axes, shape, strict=True) if size > 1} for shape in shapes]


class _Layer(nnx.Module):
    def __init__(self, rngs, router, **options):
        self.experts = make_moe(rngs, router, **options)

    def __call__(self, x, mask):
        y, router = self.experts(jnp.tanh(x), mask)
        return x + y, router


class _StackedNet(nnx.Module):
    """`Net`, its layers as one scan."""

    splits_positions = True

    def __init__(self, router, layers, **options):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(IN, WIDTH, param_dtype=F64, rngs=rngs)
        self.layers = Stack(lambda rngs: _Layer(rngs, router, **options), layers, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 3, param_dtype=F64, rngs=rngs)

    def __call__(self, x, mask=None):
        x, routers = self.layers(self.first(x), mask=mask)
        return self.last(x), [jax.tree.map(lambda leaf, i=i: leaf[i], routers) for i in range(len(self.layers))]


class _Block(nnx.Module):
    def __init__(self, rngs, router=None):
        self.dense = nnx.Linear(WIDTH, WIDTH, param_dtype=F64, rngs=rngs)
        self.experts = None if router is None else make_moe(rngs, router)

    def __call__(self, x, mask):
        x = x + jnp.tanh(self.dense(x))
        if self.experts is None:
            return x, []
        y, router = self.experts(x, mask)
        return x + y, [router]


class _Middle(nnx.Module):
    """Four blocks, of which the second alone has experts."""

    def __init__(self, router):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(IN, WIDTH, param_dtype=F64, rngs=rngs)
        self.blocks = nnx.List([_Block(rngs, router if i == 1 else None) for i in range(4)])
        self.last = nnx.Linear(WIDTH, 3, param_dtype=F64, rngs=rngs)

    splits_positions = True

    def __call__(self, x, mask=None):
        x, routers = self.first(x), []
        for block in self.blocks:
            x, more = block(x, mask)
            routers += more
        return self.last(x), routers


def _mesh(degrees: dict[str, int]):
    return ax.make_mesh(devices=jax.devices()[: math.prod(degrees.values())], **degrees)


def _batches(degrees: dict[str, int], plan: ax.Plan, steps: int) -> list:
    shards = math.prod(size for axis, size in degrees.items() if axis not in NO_ROWS)
    rows, length = 2 * shards * plan.microbatches, max(LENGTH, 2 * degrees.get("context", 1))
    return [batch_of(rows, seed, length=length, masked=True) for seed in range(steps)]


def _expert_rows(seed: int) -> list[dict]:
    meshes = [degrees for expert in (2, 4, 8) for degrees in _meshes(expert)]
    kinds = [{"router": router, **degrees} for router in ROUTERS for degrees in meshes]
    rows = [{**row, "way": way} for row in drawn(kinds, OPTIONS, _possible, seed) for way in WAYS]
    # Capacity is of a rank's positions: the oracle, whose parts are rows, is another one there (tests/test_experts.py).
    return [row for row in rows if not (row["way"] == "capacity" and "context" in row)]


def _expert_oracle(row: dict) -> tuple:
    parts = (
        math.prod(row.get(axis, 1) for axis in ("data", "fsdp", "expert")),
        row["accumulate"] * (1 + ("pipe" in row)),
    )
    model = row["router"], row["way"] == "capacity", row["layers"], row.get("pipe", 1), row["precision"]
    return *parts, *model, row.get("context", 1) > 2


def _possible(row: dict) -> bool:
    """A stack of layers is not cut into stages; a stage of ZeRO is that of `fsdp`."""
    return not ("pipe" in row and row["layers"] == "one scan") and ("fsdp" in row or row["stage"] == 3)


def _check_experts(row: dict) -> None:
    degrees = {axis: row[axis] for axis in ("expert", *OTHERS) if axis in row}
    pipe = ax.Pipelined(num_microbatches=2) if "pipe" in row else None
    plan = ax.Plan(
        fsdp=ax.Shard(stage=row["stage"]), pipe=pipe, remat=row["remat"], accumulate=row["accumulate"],
        offload=row["offload"], precision=row["precision"] or ax.Precision(), check_vma=row["check_vma"],
    )  # fmt: skip
    make = _StackedNet if row["layers"] == "one scan" else Net
    layers = 2 if row["layers"] == "one scan" else row.get("pipe", 1)
    model = make(row["router"], layers=layers, **WAYS[row["way"]])
    batches = _batches(degrees, plan, 2)
    assert_equals_single_device(model, loss_fn, batches, plan, mesh=_mesh(degrees), max_grad_norm=0.5)


def _auxiliary_rows(seed: int) -> list[dict]:
    del seed
    meshes = [*_of_eight(), *({"pipe": 4, axis: 2} for axis in ("data", "expert", "tensor", "context"))]
    rows = product({"router": ["softmax", "sigmoid"], "loss": ["load_balance", "z"], "mesh": meshes})
    return [{"router": row["router"], "loss": row["loss"], **row["mesh"]} for row in rows]


def _check_auxiliary(row: dict) -> None:
    degrees = {axis: size for axis, size in row.items() if axis not in ("router", "loss")}

    def loss(model, batch):
        _, routers = model(batch["x"], batch["mask"])
        weight = jnp.asarray(batch["mask"].sum(), F64)
        return ax.WeightedMean(weight * 1e3 * sum(getattr(router, row["loss"]) for router in routers), weight)

    plan, model = ax.Plan(), Net(row["router"])
    if "pipe" in degrees:
        stages = tuple(f"blocks/{i}" for i in range(1, degrees["pipe"]))
        plan, model = ax.Plan(pipe=ax.Pipelined(num_microbatches=2, split=stages)), _Middle(row["router"])
    assert_equals_single_device(model, loss, _batches(degrees, plan, 1), plan, mesh=_mesh(degrees))


def _auxiliary_oracle(row: dict) -> tuple:
    shards = math.prod(row.get(axis, 1) for axis in ("data", "expert"))
    return row["router"], row["loss"], shards, "pipe" in row, max(2, row.get("context", 1))


experts = (_expert_rows, _check_experts, _expert_oracle)
auxiliary = (_auxiliary_rows, _check_auxiliary, _auxiliary_oracle)
