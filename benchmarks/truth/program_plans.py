"""The 40 plans whose steps `programs.py` records: every strategy, stage, schedule, layer kind and option, on small models."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import axonml_jax as ax
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer

WIDTH, CLASSES, VOCABULARY, LENGTH = 16, 6, 24, 8


@dataclass(frozen=True)
class Recorded:
    """One row: a model, its loss and batch, and how it is spread. `make` gives the trainer; `rows` is the global batch."""

    make: Callable[[], Any]
    batch: Callable[[int], Any]
    rows: int = 32
    notes: dict[str, Any] = field(default_factory=dict)


class Blocks(nnx.Module):
    """Residual blocks of one odd-sized and many equal layers, a scalar, an unused parameter."""

    def __init__(self, rngs):
        self.first = nnx.Linear(5, WIDTH, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])
        self.last = nnx.Linear(WIDTH, 3, rngs=rngs)
        self.scale, self.unused = nnx.Param(jnp.array(1.5)), nnx.Param(jnp.ones((3,)))

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + nnx.relu(block(x))
        return self.last(x) * self.scale[...]


class Images(nnx.Module):
    """Convolutions, BatchNorm and dropout."""

    def __init__(self, rngs):
        self.conv, self.norm = nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout, self.last = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.conv(x))).mean((1, 2))))


class Scanned(nnx.Module):
    """Stacked blocks under `lax.scan`."""

    def __init__(self, rngs):
        self.stack = nnx.Param(jax.random.normal(rngs.params(), (4, WIDTH, WIDTH)) / 4)
        self.first, self.last = nnx.Linear(5, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), self.first(x), self.stack[...])
        return self.last(x)


class Tied(nnx.Module):
    """A vocabulary that is also the head, around repeated blocks."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return self.embed.attend(x)


class LinenNet(linen.Module):
    """A Linen model with BatchNorm and dropout."""

    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=False, momentum=0.9)(linen.Dense(WIDTH)(x))
        x = linen.Dropout(0.2, deterministic=False)(jnp.tanh(x))
        return linen.Dense(3)(x + jnp.tanh(linen.Dense(WIDTH)(x)))


class Cube(nnx.Module):
    """AxoNN's layers, alternately transposed."""

    def __init__(self, rngs):
        self.up, self.down = ax.ParallelLinear(8, 16, rngs=rngs), ax.ParallelLinear(16, 8, transpose=True, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.down(jnp.tanh(self.up(jnp.pad(x, ((0, 0), (0, 3))))))))


def numbers(rows):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(rows, 5)).astype("f"), "y": rng.normal(size=(rows, 3)).astype("f")}


def images(rows):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(rows, 6, 6, 3)).astype("f"), "y": rng.integers(0, CLASSES, rows)}


def tokens(rows):
    rng = np.random.default_rng(0)
    draw = lambda: rng.integers(0, VOCABULARY, (rows, LENGTH)).astype(np.int32)
    return {"x": draw(), "y": draw(), "keep": rng.random((rows, LENGTH)) < 0.7}


def squares(model, batch):
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


def labels(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def kept_tokens(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    kept = batch["keep"].astype(losses.dtype)
    return ax.WeightedMean(jnp.sum(losses * kept), jnp.sum(kept)), {"tokens": jnp.sum(kept)}


def words(model, batch):
    return jnp.mean(ax.vocab_parallel_cross_entropy(model(batch["x"]), batch["y"]))


def words_over_columns(model, batch):
    return jnp.mean(ax.vocab_parallel_cross_entropy(model(batch["x"]), batch["y"], axis="col"))


def gpt(**options):
    """The reference transformer, small."""
    sizes = {"vocab_size": VOCABULARY, "num_layers": 4, "hidden_size": WIDTH, "num_heads": 4, "max_length": LENGTH}
    config = TransformerConfig(**sizes | {"mlp_hidden_size": 32, "attention": "xla"} | options)
    return lambda: Transformer(config, rngs=nnx.Rngs(0))


def nnx_model(kind):
    return lambda: kind(nnx.Rngs(0))


def swapped(mesh):
    """A plain model whose layers `auto_parallelize` swaps."""
    with ax.auto_parallelize(mesh):
        return Blocks(nnx.Rngs(0))


NETS = {
    "blocks": (nnx_model(Blocks), squares, numbers),
    "images": (nnx_model(Images), labels, images),
    "scanned": (nnx_model(Scanned), squares, numbers),
    "tied": (nnx_model(Tied), kept_tokens, tokens),
    "linen": (LinenNet, squares, numbers),
    "cube": (nnx_model(Cube), squares, numbers),
    "gpt": (gpt(), words, tokens),
    "gpt sequence": (gpt(sequence_parallel=True), words, tokens),
    "gpt ring": (gpt(sequence_parallel=True, ring=True), words, tokens),
    "gpt grid": (gpt(split="grid", prefetch=True, norm="layernorm", activation="gelu"), words_over_columns, tokens),
    "gpt scan": (gpt(scan_layers=True, num_kv_heads=2), words, tokens),
    "gpt dropout": (gpt(dropout=0.1, position="learned", tie_embeddings=True), words, tokens),
}
"""Name -> a model, its loss, its batch of so many rows."""


def row(net, degrees, *, tx=None, trainer=None, trainable=None, rows=32, **plan):
    """A row under `ax.Plan(**plan)` on a mesh of the given degrees."""
    model, loss, batch = NETS[net]

    def make():
        built = model()
        params = (
            built.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch(2)["x"])
            if net == "linen"
            else None
        )
        mesh = ax.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])
        parallel = ax.parallelize(built, mesh, ax.Plan(**plan), params=params, trainable=trainable)
        return parallel.trainer(tx or optax.adamw(1e-2), loss, **trainer or {})

    return Recorded(make, batch, rows)


def by_rules():
    mesh = ax.make_mesh(data=2, tensor=4)
    rules = {r"(first|last)/kernel": P(), r"blocks/./kernel": P(None, "tensor"), ".*": P()}
    return ax.TensorParallel(Blocks(nnx.Rngs(0)), mesh, rules=rules).trainer(optax.adamw(1e-2), squares)


def by_swapping():
    mesh = ax.make_mesh(data=2, tensor=4)
    return ax.parallelize(swapped(mesh), mesh).trainer(optax.adamw(1e-2), squares)


def pipe(schedule="1f1b", count=4, **options):
    return ax.Pipelined(schedule=schedule, num_microbatches=count, **options)


CLIP = {"max_grad_norm": 0.5}
PLANS = {
    "ddp overlapped": row("blocks", {"data": 8}, trainer=CLIP, data=ax.Replicate(bucket_size_mb=0.001)),
    "ddp synchronous": row("blocks", {"data": 8}, data=ax.Replicate(sync_strategy="synchronous")),
    "ddp no_sync": row("blocks", {"data": 4}, data=ax.Replicate(sync_strategy="no_sync")),
    "ddp accumulate batch_norm": row("images", {"data": 4}, accumulate=2),
    "ddp local batch_norm": row("images", {"data": 4}, batch_stats="local", broadcast_buffers=False),
    "ddp flat buckets bf16 wire": row(
        "tied", {"data": 8}, data=ax.Replicate(comm_dtype="bfloat16", gradient_as_bucket_view=False)
    ),
    "ddp linen typed": row("linen", {"data": 4}, check_vma=True),
    "ddp bf16 remat": row("gpt", {"data": 4}, precision="bf16", remat="full"),
    "ddp fp16 loss scale": row("blocks", {"data": 4}, precision="fp16", trainer={"max_nonfinite": 3}),
    "ddp offload": row("blocks", {"data": 4}, offload="optimizer_states"),
    "ddp frozen": row("blocks", {"data": 4}, trainable="blocks/.*"),
    "zero1": row("blocks", {"fsdp": 8}, fsdp=ax.Shard(stage=1), trainer=CLIP),
    "zero2 accumulate": row("tied", {"fsdp": 4}, fsdp=ax.Shard(stage=2), accumulate=2),
    "zero3": row("blocks", {"fsdp": 8}, trainer=CLIP),
    "zero3 typed prefetch": row("blocks", {"fsdp": 4}, fsdp=ax.Shard(prefetch=2), check_vma=True),
    "zero3 scanned": row("scanned", {"fsdp": 8}, trainer=CLIP),
    "zero3 gpt scan bf16 remat": row("gpt scan", {"fsdp": 4}, precision="bf16", remat="selective"),
    "zero3 linen": row("linen", {"fsdp": 3}, rows=12),
    "zero3 hops": row("blocks", {"fsdp": 8}, fsdp=ax.Shard(gather_hop=2, scatter_hop=4), precision="bf16-reduce"),
    "zero3 offload all": row("blocks", {"fsdp": 4}, offload="full", trainer=CLIP),
    "zero3 whole update": row("blocks", {"fsdp": 4}, update="whole", tx=optax.adafactor(1e-2)),
    "hybrid": row("tied", {"data": 2, "fsdp": 4}, trainer=CLIP),
    "hybrid accumulate dropout": row("gpt dropout", {"data": 2, "fsdp": 2}, accumulate=2),
    "no_shard": row("blocks", {"fsdp": 4}, fsdp=ax.Replicate()),
    "tensor": row("gpt", {"data": 2, "tensor": 4}, trainer=CLIP),
    "tensor sequence parallel": row("gpt sequence", {"fsdp": 2, "tensor": 2}),
    "tensor ring": row("gpt ring", {"data": 2, "tensor": 4}, check_vma=True),
    "tensor 3d": row("cube", {"row": 2, "col": 2, "depth": 2}, trainer=CLIP),
    "tensor 3d gpt": row("gpt grid", {"data": 2, "row": 2, "col": 2}, remat="full"),
    "tensor by rules": Recorded(by_rules, numbers),
    "tensor by swapping": Recorded(by_swapping, numbers),
    "pipe gpipe": row("blocks", {"pipe": 4}, pipe=pipe("gpipe")),
    "pipe 1f1b data": row("blocks", {"data": 2, "pipe": 4}, pipe=pipe(), trainer=CLIP),
    "pipe 1f1b fsdp tick": row("tied", {"fsdp": 2, "pipe": 2}, pipe=pipe(gather="tick"), accumulate=2),
    "pipe interleaved": row("tied", {"data": 2, "pipe": 2}, pipe=pipe("interleaved", chunks=2)),
    "pipe zero-bubble typed": row("tied", {"pipe": 4}, pipe=pipe("zero-bubble", 6), check_vma=True, rows=24),
    "pipe gpipe chunks": row("tied", {"fsdp": 2, "pipe": 2}, pipe=pipe("gpipe", chunks=2, gather="chunk")),
    "pipe tensor": row("gpt", {"data": 2, "pipe": 2, "tensor": 2}, pipe=pipe(), trainer=CLIP),
    "pipe bf16 remat offload": row(
        "gpt", {"pipe": 2, "fsdp": 2}, pipe=pipe(), precision="bf16", remat="full", offload="optimizer_states"
    ),
    "pipe batch_norm linen": row("linen", {"data": 2, "pipe": 2}, pipe=pipe()),
}
