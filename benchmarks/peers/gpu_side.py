"""Our side of `gpu_speed.py`, in a process of its own: GPT-2 small, or a slice of Llama 3 8B, training on one device.

Started by it, one configuration per process. Prints what was measured as JSON, last.
"""

import argparse
import collections
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import jax
import numpy as np
from flax import nnx
from small_gpt import FlaxGPT, Stepping, config, flax_loss, hand_written, make_batch, make_model, optimizer

import axonml_jax as ax
from axonml_jax.models.config import preset
from axonml_jax.models.transformer import Transformer

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bfloat16 FLOP/s; a chip that is not here has no MFU
WARMUP = 3


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=("facade", "hand-written", "flax"), default="facade")
    parser.add_argument("--layers", type=int, help="train the first so many layers of Llama 3 8B instead of GPT-2")
    parser.add_argument("--rows", type=int, default=16, help="sequences in a batch")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--attention", default="cudnn", help="as TransformerConfig's")
    parser.add_argument("--loss-chunk", type=int, default=0, help="words whose logits are held at once; 0: all")
    parser.add_argument("--kernels", choices=("auto", "xla", "interpret"), default="auto", help="as ax.Plan's")
    parser.add_argument("--precision", default="bf16", help="as ax.Plan's, of the slice of Llama")
    parser.add_argument("--remat", choices=("full", "selective"), default="selective", help="of the slice of Llama")
    parser.add_argument("--profile", metavar="FILE", help="write the times of kernels there, and the program beside it")
    parser.add_argument("--steps", type=int, default=10, help="steps of a group, dispatched ahead, waited for once")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="a very small model, to try the script anywhere")
    parser.add_argument("--write", metavar="FILE", help="write weights and batch for torch_gpu.py, and stop")
    return parser.parse_args()


def shape_of(options):
    """GPT-2 small with its vocabulary padded to a multiple of 128, or a slice of Llama 3 8B."""
    own = {"max_length": options.length, "dtype": "bfloat16", "attention": options.attention}
    if options.layers is not None:
        return replace(preset("llama3-8b"), num_layers=options.layers, **own)
    if options.tiny:
        return replace(config(2, 64), loss_chunk=options.loss_chunk, **own)
    return replace(preset("gpt2-small"), vocab_size=50_304, loss_chunk=options.loss_chunk, **own)


def loss_fn(model, batch):
    """The mean cross entropy; logits of `loss_chunk` words at a time."""
    total, weight = model.loss(batch["tokens"], batch["targets"])
    return total / weight


def stepping(options, shape, batch) -> Stepping:
    """The training as a call that runs a group of steps and waits."""
    if options.layers is not None:  # parameters are made where they rest, and activations are recomputed
        make = lambda: Transformer(shape, rngs=nnx.Rngs(0))
        own = {"precision": options.precision, "remat": options.remat, "kernels": options.kernels}
        model = ax.FSDP(make, ax.make_mesh(fsdp=1), **own)
    elif options.way == "hand-written":
        return Stepping(*hand_written(make_model(shape), None), batch, options.steps)
    else:
        own = FlaxGPT(shape, nnx.Rngs(0)) if options.way == "flax" else make_model(shape)
        model = ax.DDP(own, ax.make_mesh(data=1), kernels=options.kernels)
    trainer = model.trainer(optimizer(), flax_loss if options.way == "flax" else loss_fn)
    return Stepping(trainer.state, trainer.train_step, batch, options.steps)


def profiled(run: Stepping, file: str) -> float:
    """Write milliseconds a step, launches and names of the kernels, and the optimized program; returns their sum."""
    times: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        for found in Path(folder).rglob("*.xplane.pb"):
            planes = [each for each in jax.profiler.ProfileData.from_file(str(found)).planes if "GPU" in each.name]
            for event in (e for plane in planes for line in plane.lines if "Stream" in line.name for e in line.events):
                times[event.name] += event.duration_ns / 1e6 / run.steps
                counts[event.name] += 1
    rows = [f"{ms:.4f}\t{counts[name] / run.steps:.1f}\t{name}\n" for name, ms in times.most_common()]
    Path(file).write_text("".join(rows))
    program = run.step.lower(run.state, run.batch).compile().as_text()
    Path(file).with_suffix(".hlo.txt").write_text(program)
    return sum(times.values())


def main():
    options = parse()
    shape, device = shape_of(options), jax.devices()[0]
    rows = make_batch(options.rows, shape)
    if options.write:
        weights = ax.DDP(make_model(shape), ax.make_mesh(data=1)).state_dict()
        sizes = {"layers": shape.num_layers, "width": shape.hidden_size, "heads": shape.num_heads}
        np.savez(options.write, x=rows["tokens"], y=rows["targets"], **sizes, **weights)
        print(json.dumps({"parameters": shape.num_params}))
        return
    run = stepping(options, shape, jax.device_put(rows, device))
    losses, ends = [], [time.perf_counter()]
    for _ in range(WARMUP):
        run.state, metrics = run.step(run.state, run.batch)
        losses.append(float(metrics["loss"]))
        ends.append(time.perf_counter())
    seconds = []
    for _ in range(options.groups):
        began = time.perf_counter()
        run()
        seconds.append((time.perf_counter() - began) / options.steps)
    rate = options.rows * options.length / float(np.median(seconds))
    peak = next((value for name, value in PEAKS.items() if name in device.device_kind), None)
    memory = device.memory_stats() or {}
    found = {
        "device": device.device_kind,
        "version": f"jax {jax.__version__}",
        "parameters": shape.num_params,
        "flops_per_token": shape.flops_per_token(options.length),
        "first_step_s": ends[1] - ends[0],
        "step_s": seconds,
        "tokens_per_s": rate,
        "mfu": rate * shape.flops_per_token(options.length) / peak if peak else None,
        "peak_bytes": memory.get("peak_bytes_in_use"),
        "limit_bytes": memory.get("bytes_limit"),
        "losses": losses,
    }
    if options.profile:
        found["kernels_ms"] = profiled(run, options.profile)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
