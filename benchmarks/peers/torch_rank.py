"""PyTorch's side of `torch_ddp.py` and its like: one rank over gloo, on weights and a batch read from a file.

Started by them with torchrun's launch variables; needs torch and numpy only. Prints the seconds of every step
and the first losses as JSON.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from turn import wait_for_turn


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
    """The same architecture as `axonml_jax.models.Transformer` with GPT-2's options, or one of several stages of it."""

    def __init__(self, layers, width, heads, vocabulary, length, *, tied=True, stage=0, stages=1):
        super().__init__()
        self.first, self.last, self.tied = stage == 0, stage == stages - 1, tied
        if self.first:
            self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        own = range(stage * layers // stages, (stage + 1) * layers // stages)
        self.blocks = nn.ModuleDict({str(i): Block(width, heads) for i in own})
        if self.last:
            self.norm = nn.LayerNorm(width)
            self.head = None if tied else nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        if self.first:
            x = self.embed(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        if not self.last:
            return x
        return self.norm(x) @ self.embed.weight.T if self.tied else self.head(self.norm(x))


def load(model: nn.Module, arrays) -> None:
    """Copy Flax's parameters by path name: kernels are transposed, scales and embeddings are called weight here.

    Those of other stages are left out.
    """
    own = dict(model.named_parameters())
    for name, value in arrays.items():
        path, last = name.replace("/", ".").rsplit(".", 1)
        target = own.pop(f"{path}.{'bias' if last == 'bias' else 'weight'}", None)
        if target is not None:
            target.data.copy_(torch.from_numpy(value.T.copy() if last == "kernel" else value))
    assert not own, f"parameters without a counterpart: {list(own)}"


def wrapped(model: nn.Module, strategy: str) -> nn.Module:
    """DDP, or FSDP2 with a unit per block and the rest in the root."""
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def data_parallel(model, tokens, targets, strategy: str):
    """`backward() -> loss`, the mean over ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens, targets = (x.chunk(ranks)[rank] for x in (tokens, targets))
    parallel = wrapped(model, strategy)

    def backward():
        loss = F.cross_entropy(parallel(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        # The gradient norm, which the other side reports.
        torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / ranks

    return backward


def pipelined(model, tokens, targets, microbatches: int):
    """`backward() -> loss` of one stage, under 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks = dist.get_rank(), dist.get_world_size()
    loss_of = lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_of)

    def backward():
        losses: list = []
        given = (tokens,) if model.first else ()
        schedule.step(*given, **({"target": targets, "losses": losses} if model.last else {}))
        squares = sum((p.grad.square().sum() for p in model.parameters()), torch.zeros(()))
        mean = torch.stack([x.detach() for x in losses]).mean() if model.last else torch.zeros(())
        both = torch.stack([mean, squares])  # the loss, and the gradient norm, which the other side reports
        dist.all_reduce(both)
        return both[0]

    return backward


def main(path: str, warmup: int, steps: int, strategy: str, microbatches: int):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with np.load(path) as file:
        data = dict(file)
    layers, width, heads = (int(data.pop(name)) for name in ("layers", "width", "heads"))
    tokens, targets = (torch.from_numpy(data.pop(name)).long() for name in ("x", "y"))
    place = {"stage": rank, "stages": ranks} if strategy == "pipeline" else {}
    shape = (layers, width, heads, len(data["embed/embedding"]), tokens.shape[1])
    model = Transformer(*shape, tied="head/kernel" not in data, **place)
    load(model, data)
    if strategy == "pipeline":
        backward = pipelined(model, tokens, targets, microbatches)
    else:
        backward = data_parallel(model, tokens, targets, strategy)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=float(os.environ["LEARNING_RATE"]), weight_decay=0.01, fused=True
    )
    losses, times, processor = [], [], []
    for step in range(warmup + steps):
        if step >= warmup:
            wait_for_turn()
        start, began = time.perf_counter(), time.process_time()
        optimizer.zero_grad(set_to_none=True)
        loss = backward()
        optimizer.step()
        losses.append(float(loss))
        times.append(time.perf_counter() - start)
        processor.append(time.process_time() - began)
    if rank == 0:
        timed = {"times": times[warmup:], "processor": processor[warmup:]}
        print(json.dumps({"losses": losses[:5], **timed, "version": torch.__version__}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
