"""PyTorch's side of `recovery_time.py`: one rank of a resumable DDP training over gloo, of which rank 1 is killed once.

Started by torchrun, which starts all processes again; needs torch and numpy only. Prints the time of what happens.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_rank import Transformer

ROWS, LENGTH, EVERY = 16, 64, 10
SHAPE = {"layers": 2, "width": 192, "heads": 3, "vocabulary": 256, "length": LENGTH}
"""As configs/quickstart.yaml, but for a feed-forward part of four widths in place of three."""


def say(what: str) -> None:
    if dist.get_rank() == 0:
        print(f"{what} at={time.time():.3f}", flush=True)


def save(path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0 writes; nobody goes on before the file is in place."""
    if dist.get_rank() == 0:
        torch.save(
            {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path.with_suffix(".new")
        )
        path.with_suffix(".new").rename(path)
    dist.barrier()


def main(folder: Path, killed_after: int, steps: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    model = torch.nn.parallel.DistributedDataParallel(Transformer(**SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    say("described")
    path, start = folder / "checkpoint.pt", 0
    if path.exists():
        found = torch.load(path)
        start = found["step"]
        model.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        say("state back")
    for step in range(start + 1, steps + 1):
        starts = torch.randint(len(text) - LENGTH - 1, (ROWS,), generator=torch.Generator().manual_seed(step))
        rows = torch.stack([text[at : at + LENGTH + 1] for at in starts.tolist()]).chunk(dist.get_world_size())[
            dist.get_rank()
        ]
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        say(f"step={step}")
        if step % EVERY == 0:
            save(path, step, model.module, optimizer)
        if step == killed_after and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
            print(f"killed at={time.time():.3f}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
