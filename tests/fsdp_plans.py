"""Plans of FSDP, and how a row of a table of them is held to the single-device run."""

import optax
from meshes import mesh_of
from plan_models import CASES

import axonml_jax as ax
from axonml_jax.testing.equality import assert_equals_single_device

FSDP = {
    "case": list(CASES),
    "stage": [1, 2, 3],
    "fsdp": [2, 3, 8],
    "data": [1, 2],
    "accumulate": [1, 3],
    "wrap": [None, "all", "none"],
    "prefetch": [0, 2],
    "remat": [None, "full", "selective"],
    "flat": [False, True],
    "hops": [False, True],
    "sync_strategy": ["overlapped", "synchronous"],
    "max_grad_norm": [None, 0.3],
    "check_vma": [False, True],
}
WRAPS = {"all": lambda path: True, "none": lambda path: path in ("last", "embed", "Dense_0"), None: None}


def possible(row):
    """Whether there are devices for it and its model passes typed mode."""
    return row["fsdp"] * row["data"] <= 8 and (CASES[row["case"]].typed or not row["check_vma"])


def plan_of(row):
    """The plan of a row."""
    prefetch = row["prefetch"] if row["stage"] == 3 else 0  # refused elsewhere
    hops = {"gather_hop": 2, "scatter_hop": 4} if row["hops"] and row["fsdp"] == 8 else {}
    shard = ax.Shard(stage=row["stage"], wrap=WRAPS[row["wrap"]], prefetch=prefetch, flat=row["flat"], **hops)
    return ax.Plan(
        data=ax.Replicate(sync_strategy=row["sync_strategy"], bucket_size_mb=0.0003),
        fsdp=shard,
        accumulate=row["accumulate"],
        remat=row["remat"],
        check_vma=row["check_vma"],
    )


def check(row, tx=None, steps=2):
    """Hold one row to the oracle."""
    case = CASES[row["case"]]
    rows = 4 * row["fsdp"] * row["data"] * row["accumulate"]
    assert_equals_single_device(
        case.model(),
        case.loss,
        [case.batch(rows, seed) for seed in range(steps)],
        plan_of(row),
        mesh=mesh_of(data=row["data"], fsdp=row["fsdp"]),
        params=case.params(),
        tx=tx or optax.adamw(1e-2),
        max_grad_norm=row["max_grad_norm"],
    )
