"""PyTorch's side of `torch_ddp.py` and `torch_fsdp.py`: one rank over gloo, on weights and a batch read from a file.

Started by them with torchrun's launch variables; needs torch and numpy only. Prints the seconds of every step
and the first losses as JSON.
"""

import json
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        b, s, h = x.shape
        split = [layer(x).view(b, s, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        return self.out(F.scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).reshape(b, s, h))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), FeedForward(width)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """The same architecture as `axonml_jax.models.Transformer` with GPT-2's options."""

    def __init__(self, layers, width, heads, vocabulary, length):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T


def load(model: nn.Module, arrays) -> None:
    """Copy Flax's parameters by path name: kernels are transposed, scales and embeddings are called weight here."""
    own = dict(model.named_parameters())
    for name, value in arrays.items():
        path, last = name.replace("/", ".").rsplit(".", 1)
        value = torch.from_numpy(value.T.copy() if last == "kernel" else value)
        target = own.pop(f"{path}.{'bias' if last == 'bias' else 'weight'}")
        target.data.copy_(value)
    assert not own, f"parameters without a counterpart: {list(own)}"


def wrapped(model: nn.Module, strategy: str) -> nn.Module:
    """DDP, or FSDP2 with a unit per block and the rest in the root."""
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(path: str, warmup: int, steps: int):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with np.load(path) as file:
        data = dict(file)
    layers, width, heads = (int(data.pop(name)) for name in ("layers", "width", "heads"))
    tokens, targets = (torch.from_numpy(np.array_split(data.pop(name), ranks)[rank]).long() for name in ("x", "y"))
    model = Transformer(layers, width, heads, len(data["embed/embedding"]), tokens.shape[1])
    load(model, data)
    parallel = wrapped(model, sys.argv[4])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=float(os.environ["LEARNING_RATE"]), weight_decay=0.01, fused=True
    )
    losses, times = [], []
    for _ in range(warmup + steps):
        start = time.perf_counter()
        loss = F.cross_entropy(parallel(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(
            model.parameters(), float("inf")
        )  # the gradient norm, which the other side reports
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
        times.append(time.perf_counter() - start)
    if rank == 0:
        print(json.dumps({"losses": losses[:5], "times": times[warmup:], "version": torch.__version__}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
