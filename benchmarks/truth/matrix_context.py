"""Split sequences in `full_matrix.py`: attention by itself, and models that train under `ax.Context`.

`attention` is the product of the table in `tests/test_context_attention.py`; its rows of one oracle and one method, which
differ in the order, the block and typed mode, are one program, whose results and gradients are held to the oracle row by row.
Nothing of the product is left out, though some of it is the same program twice: with 2 ranks "2 x ring" and "2 x gather" are
Ulysses, and a zigzag's chunks, 2 positions of a rank, are one tile with blocks of 3 and of 512.
`context` is that of methods, orders, models and meshes of at most 8 devices whose `context` is 2, 3, 4 or 8: the library's
transformer in five forms, its last rank with nothing but padding, and models that were not written for split sequences, whose
attention is recognised. What is recomputed, accumulated, offloaded and scanned, the precision, typed mode, the ZeRO stage and
whether parameters rest over `fsdp` and `context` together are drawn per row.
"""

import math

import jax
import numpy as np
import test_context_attention
import test_context_traced as traced
import test_context_transformer as transformer
from flax import linen as nn
from matrix_tables import drawn
from plan_tables import product

import axonml_jax as ax
from axonml_jax.testing.equality import assert_equals_single_device

MODELS = {
    "llama": transformer.LLAMA,
    "gpt2": transformer.GPT2,
    "windows and sinks": transformer.GPT_OSS,
    "capped scores": transformer.GEMMA,
    "latents": transformer.LATENT,
}
OTHERS = {
    "flax, shifted loss": (traced.Flax, traced.shifted),
    "written, window": (traced.Written, traced.shifted),
    "linen, pooled loss": (traced.Padded, traced.pooled),
}
METHODS = {
    "gather": "gather",
    "ulysses": "ulysses",
    "ring": "ring",
    "2 x ring": (2, "ring"),
    "2 x gather": (2, "gather"),
}
OPTIONS = {
    "remat": [None, "full", "selective"],
    "accumulate": [1, 2],
    "offload": ["none", "none", "full"],
    "precision": [None, None, None, "bf16"],
    "stage": [1, 2, 3],
    "shard": [False, True],
    "scan": [False, True],
    "check_vma": [False, True],
}


def _meshes() -> list[dict[str, int]]:
    axes = ("data", "fsdp", "tensor", "pipe")
    pairs = [{a: 2, b: 2} for i, a in enumerate(axes) for b in axes[i + 1 :]]
    beside = [{}, *({axis: 2} for axis in axes), {"data": 4}, {"fsdp": 4}, *pairs]
    return [{"context": n, **more} for n in (2, 3, 4, 8) for more in beside if n * math.prod(more.values()) <= 8]


def _rows(seed: int) -> list[dict]:
    kinds = product(
        {"model": [*MODELS, *OTHERS], "method": list(METHODS), "order": ["contiguous", "zigzag", "striped"]}
    )
    rows = [kind | degrees for kind in kinds for degrees in _meshes()]
    return drawn([row for row in rows if _sensible(row)], OPTIONS, _fits, seed)


def _sensible(row: dict) -> bool:
    """Heads divide over the ranks that split them; models that see whole sequences have them in their own order."""
    ranks, others = row["context"], row["model"] in OTHERS
    among = {"ulysses": ranks, "2 x ring": 2, "2 x gather": 2}.get(row["method"], 1)
    heads = 2 if row["model"] == "linen, pooled loss" else 4
    if others and (row["order"] != "contiguous" or "tensor" in row or "pipe" in row or 16 % ranks):
        return False
    return ranks % among == 0 and heads // row.get("tensor", 1) % among == 0


def _fits(row: dict) -> bool:
    """Whether what is drawn goes with the row, each option having an effect."""
    sharded = "fsdp" in row or row["shard"] or row["stage"] == 3
    cut = not row["scan"] or "pipe" not in row
    if row["model"] in OTHERS:
        return sharded and not row["shard"] and not row["scan"] and not row["check_vma"] and row["precision"] is None
    alike = not row["scan"] or row["model"] in ("llama", "gpt2")
    return sharded and cut and alike


def _check(row: dict) -> None:
    degrees = {"fsdp": 1} if row["shard"] else {}
    degrees |= {axis: row[axis] for axis in ("data", "fsdp", "context", "tensor", "pipe") if axis in row}
    mesh = ax.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])
    plan = ax.Plan(
        fsdp=ax.Shard(stage=row["stage"]),
        context=ax.Context(method=METHODS[row["method"]], order=row["order"], shard=row["shard"]),
        pipe=ax.Pipelined(num_microbatches=2) if "pipe" in row else None,
        accumulate=row["accumulate"], remat=row["remat"], offload=row["offload"], check_vma=row["check_vma"],
        precision=row["precision"] or ax.Precision(),
    )  # fmt: skip
    if row["model"] in OTHERS:
        make, loss = OTHERS[row["model"]]
        model, batches = make(), [np.tile(traced.batch_of(seed), (4, 1)) for seed in range(2)]
        params = model.init(jax.random.key(0), batches[0]) if isinstance(model, nn.Module) else None
        assert_equals_single_device(model, loss, batches, plan, mesh=mesh, params=params, max_grad_norm=0.5)
        return
    # A key's bias changes nothing behind softmax: its gradient is rounding, of which bfloat16 has much.
    trainable = "^(?!.*key/bias)" if row["precision"] else None
    own = {"num_layers": 2} if row["scan"] or "pipe" in row else {}
    model = transformer.model_of(param_dtype="float64", **(MODELS[row["model"]] | own), scan_layers=row["scan"])
    length = 24 if row["context"] == 3 else 16
    batches = [transformer.batch_of(seed, length) for seed in range(2)]
    options = {"mesh": mesh, "trainable": trainable, "max_grad_norm": 0.5}
    assert_equals_single_device(model, transformer.loss, batches, plan, **options)


def _attention_rows(seed: int) -> list[dict]:
    del seed
    return [row for row in product(test_context_attention.TABLE) if test_context_attention.possible(row)]


def _oracle(row: dict) -> tuple:
    parts = math.prod(row.get(axis, 1) for axis in ("data", "fsdp")), row["accumulate"] * (1 + ("pipe" in row))
    return row["model"], *parts, row["precision"], row["scan"], "pipe" in row, row["context"] == 3


attention = (
    _attention_rows,
    lambda row: test_context_attention.check([row]),
    lambda row: (row["rule"], row["heads"], row["ranks"], row["extra"], row["method"]),
    test_context_attention.check,
)
context = (_rows, _check, _oracle)
