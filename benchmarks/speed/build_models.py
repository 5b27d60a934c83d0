"""Models whose steps `build_time.py` builds: an MLP, a GPT written out and as a scan, a convnet with BatchNorm, and a U-Net.

Imported by the benchmark; every entry of `MODELS` makes (model, its variables or None, loss, batch of n rows).
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import axonml_jax as ax
from axonml_jax.layers.losses import vocab_parallel_cross_entropy
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import MLP, Transformer


class ConvBlock(nnx.Module):
    """Convolution, BatchNorm, residual."""

    def __init__(self, width, rngs):
        self.conv = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)

    def __call__(self, x):
        return x + nnx.relu(self.norm(self.conv(x)))


class ConvNet(nnx.Module):
    """A stem, equal blocks, a head."""

    def __init__(self, depth, width, rngs):
        self.stem = nnx.Conv(3, width, (3, 3), rngs=rngs)
        self.blocks = nnx.List([ConvBlock(width, rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class ResBlock(nnx.Module):
    """GroupNorm, SiLU and convolution, twice, with the time between them: the block of diffusion models."""

    def __init__(self, fan_in, fan_out, time, rngs):
        self.norm1, self.conv1 = nnx.GroupNorm(fan_in, 4, rngs=rngs), nnx.Conv(fan_in, fan_out, (3, 3), rngs=rngs)
        self.time = nnx.Linear(time, fan_out, rngs=rngs)
        self.norm2, self.conv2 = nnx.GroupNorm(fan_out, 4, rngs=rngs), nnx.Conv(fan_out, fan_out, (3, 3), rngs=rngs)
        self.skip = nnx.Conv(fan_in, fan_out, (1, 1), rngs=rngs)

    def __call__(self, x, t):
        h = self.conv1(nnx.silu(self.norm1(x))) + self.time(nnx.silu(t))[:, None, None]
        return self.conv2(nnx.silu(self.norm2(h))) + self.skip(x)


class UNet(nnx.Module):
    """Down, middle, up; every block on the way up reads what the one opposite made on the way down."""

    def __init__(self, widths, depth, rngs):
        time, first = 4 * widths[0], widths[0]
        self.embed, self.stem = nnx.Linear(first, time, rngs=rngs), nnx.Conv(3, first, (3, 3), rngs=rngs)
        made, down, up, pools = [first], [], [], []
        for level, width in enumerate(widths):
            for _ in range(depth):
                down.append(ResBlock(made[-1], width, time, rngs))
                made.append(width)
            pools.append(nnx.Conv(width, width, (3, 3), strides=2, rngs=rngs) if level < len(widths) - 1 else None)
        self.down, self.pools = nnx.List(down), nnx.List([pool for pool in pools if pool is not None])
        self.middle = ResBlock(made[-1], made[-1], time, rngs)
        before = made[-1]
        for width in reversed(made[1:]):
            up.append(ResBlock(before + width, width, time, rngs))
            before = width
        self.up, self.depth, self.num_levels = nnx.List(up), depth, len(widths)
        self.head = nnx.Conv(before, 3, (3, 3), rngs=rngs)

    def __call__(self, x, t):
        x, t, skips = self.stem(x), self.embed(_waves(t, self.embed.in_features)), []
        for i, block in enumerate(self.down):
            skips.append(x := block(x, t))
            if (i + 1) % self.depth == 0 and i + 1 < len(self.down):
                x = self.pools[i // self.depth](x)
        x = self.middle(x, t)
        for i, block in enumerate(self.up):
            skip = skips.pop()
            if i and i % self.depth == 0:
                x = jax.image.resize(x, (*skip.shape[:3], x.shape[-1]), "nearest")
            x = block(jnp.concatenate([x, skip], -1), t)
        return self.head(x)


class LinenResBlock(linen.Module):
    """`ResBlock` in Linen."""

    width: int

    @linen.compact
    def __call__(self, x, t):
        h = linen.Conv(self.width, (3, 3))(linen.silu(linen.GroupNorm(4)(x)))
        h = h + linen.Dense(self.width)(linen.silu(t))[:, None, None]
        return linen.Conv(self.width, (3, 3))(linen.silu(linen.GroupNorm(4)(h))) + linen.Conv(self.width, (1, 1))(x)


class LinenUNet(linen.Module):
    """`UNet` in Linen, in one compact call."""

    widths: tuple[int, ...]
    depth: int

    @linen.compact
    def __call__(self, x, t):
        first, skips = self.widths[0], []
        x, t = linen.Conv(first, (3, 3))(x), linen.Dense(4 * first)(_waves(t, first))
        for level, width in enumerate(self.widths):
            x = linen.Conv(width, (3, 3), strides=2, name=f"pool_{level}")(x) if level else x
            for i in range(self.depth):
                skips.append(x := LinenResBlock(width, name=f"down_{level * self.depth + i}")(x, t))
        x = LinenResBlock(self.widths[-1], name="middle")(x, t)
        for i in range(len(skips)):
            skip = skips.pop()
            x = jax.image.resize(x, (*skip.shape[:3], x.shape[-1]), "nearest") if skip.shape[1] != x.shape[1] else x
            x = LinenResBlock(skip.shape[-1], name=f"up_{i}")(jnp.concatenate([x, skip], -1), t)
        return linen.Conv(3, (3, 3))(x)


def _waves(t, width):
    angles = t[:, None] * jnp.exp(-jnp.arange(width // 2) / 2.0)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def _numbers(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _gpt(layers, **options):
    sizes = {"num_layers": layers, "hidden_size": 64, "num_heads": 2, "max_length": 32}
    config = TransformerConfig(
        vocab_size=256, norm="layernorm", activation="gelu", position="learned", **sizes, **options
    )
    ids = lambda rows: np.random.default_rng(0).integers(0, 256, (rows, 33), dtype=np.int32)
    batch = lambda rows: {"tokens": ids(rows)[:, :-1], "targets": ids(rows)[:, 1:]}
    return Transformer(config, rngs=nnx.Rngs(0)), None, _next_token, batch


def _next_token(model, batch):
    return vocab_parallel_cross_entropy(model(batch["tokens"]), batch["targets"]).mean()


def _squares(model, batch):
    given = (batch["x"], batch["t"]) if "t" in batch else (batch["x"],)
    return jnp.mean((model(*given) - batch["y"]) ** 2)


def _images(rows):
    return {"x": _numbers(rows, 16, 16, 3), "t": _numbers(rows), "y": _numbers(rows, 16, 16, 3)}


def _linen_unet():
    model, batch = LinenUNet((16, 32, 32), 2), _images(1)
    return model, jax.jit(model.init)(jax.random.key(0), batch["x"], batch["t"]), _squares, _images


MODELS = {
    "MLP, 8 layers": lambda: (
        MLP([64] * 9, rngs=nnx.Rngs(0)),
        None,
        _squares,
        lambda rows: {"x": _numbers(rows, 64), "y": _numbers(rows, 64)},
    ),
    "GPT, 8 blocks": lambda: _gpt(8),
    "GPT, 8 blocks, scanned": lambda: _gpt(8, scan_layers=True),
    "convnet, 8 blocks": lambda: (
        ConvNet(8, 16, nnx.Rngs(0)),
        None,
        _squares,
        lambda rows: {"x": _numbers(rows, 8, 8, 3), "y": _numbers(rows, 10)},
    ),
    "U-Net, 13 blocks": lambda: (UNet((16, 32, 32), 2, nnx.Rngs(0)), None, _squares, _images),
    "U-Net in Linen": _linen_unet,
}
"""By name."""

WAYS = {
    "DDP": lambda model, params: ax.DDP(model, ax.make_mesh(data=4), params=params),
    "FSDP": lambda model, params: ax.FSDP(model, ax.make_mesh(fsdp=4), params=params),
    "Pipeline": lambda model, params: ax.Pipeline(model, ax.make_mesh(pipe=4), params=params, num_microbatches=8),
}
"""How each is made parallel over four devices."""
