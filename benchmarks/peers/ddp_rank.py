"""Our side of `torch_ddp.py` and its like: the training of `torch_rank.py`, as one rank of many or on simulated devices.

Started by them. Prints the seconds of every step and the first losses as JSON.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import jax
import numpy as np
from small_gpt import config, loss_fn, make_batch, make_model, optimizer
from turn import wait_for_turn

import axonml_jax as ax


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", type=int)
    parser.add_argument("width", type=int)
    parser.add_argument("rows", type=int)
    parser.add_argument("warmup", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--devices", type=int, help="simulated devices in this process, instead of one rank of many")
    parser.add_argument("--strategy", choices=("ddp", "fsdp", "pipeline"), default="ddp")
    parser.add_argument("--microbatches", type=int, default=8, help="of a pipeline")
    parser.add_argument("--write", metavar="FILE", help="write weights and batch for torch_rank.py, and stop")
    options = parser.parse_args()
    shape = config(options.layers, options.width, tied=options.strategy != "pipeline")
    batch = make_batch(options.rows, shape)
    if options.write:
        weights = ax.DDP(make_model(shape)).state_dict()
        sizes = {"layers": shape.num_layers, "width": shape.hidden_size, "heads": shape.num_heads}
        np.savez(options.write, x=batch["tokens"], y=batch["targets"], **sizes, **weights)
        print(json.dumps(shape.num_params))
        return
    if options.devices:
        ax.fake_devices(options.devices)
    world, facade = ax.init(), {"ddp": ax.DDP, "fsdp": ax.FSDP, "pipeline": ax.Pipeline}[options.strategy]
    own = {"num_microbatches": options.microbatches} if options.strategy == "pipeline" else {}
    trainer = facade(make_model(shape), world, **own).trainer(optimizer(), loss_fn)
    losses, times, processor = [], [], []
    for step in range(options.warmup + options.steps):
        if step >= options.warmup:
            wait_for_turn()
        start, began = time.perf_counter(), time.process_time()
        metrics = trainer.step(batch)
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(trainer.state)
        times.append(time.perf_counter() - start)
        processor.append(time.process_time() - began)
    timed = {"times": times[options.warmup :], "processor": processor[options.warmup :]}
    print(json.dumps({"losses": losses[:5], **timed, "version": jax.__version__}))
    ax.shutdown()


if __name__ == "__main__":
    main()
