"""PyTorch's side of `gpu_speed.py`: the same GPT-2, weights and batch, compiled with its loss under bfloat16 autocast.

Started by it; needs torch and numpy only. Prints what was measured as JSON, last.
"""

import argparse
import json
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch_rank import Transformer, load

WARMUP = 3


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="weights and batch, as gpu_side.py --write makes it")
    parser.add_argument("--mode", default="default", help="of torch.compile")
    parser.add_argument("--rate", type=float, required=True, help="learning rate of AdamW")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--groups", type=int, default=4)
    return parser.parse_args()


def main():
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    torch.set_float32_matmul_precision("high")
    with np.load(options.file) as file:
        data = dict(file)
    layers, width, heads = (int(data.pop(name)) for name in ("layers", "width", "heads"))
    tokens, targets = (torch.from_numpy(data.pop(name)).long().to(device) for name in ("x", "y"))
    model = Transformer(layers, width, heads, len(data["embed/embedding"]), tokens.shape[1])
    load(model, data)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.01, fused=True)

    def loss_of(tokens, targets):  # compiled with the model, as nanoGPT does
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    compiled = torch.compile(loss_of, mode=options.mode)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = compiled(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))  # the norm that the other side reports
        optimizer.step()
        return loss

    losses, ends = [], [time.perf_counter()]
    for _ in range(WARMUP):
        losses.append(float(step().detach()))
        ends.append(time.perf_counter())
    seconds = []
    for _ in range(options.groups):
        wait()
        began = time.perf_counter()
        for _ in range(options.steps):
            step()
        wait()
        seconds.append((time.perf_counter() - began) / options.steps)
    found = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "version": f"torch {torch.__version__}",
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_step_s": ends[1] - ends[0],
        "step_s": seconds,
        "tokens_per_s": tokens.numel() / float(np.median(seconds)),
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "losses": losses,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
