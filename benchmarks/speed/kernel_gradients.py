"""What gradients of kernels from a transposed operand bring on CPU (docs/adr/0023), in processor time.

Run: taskset -c 0 python benchmarks/speed/kernel_gradients.py [--plan pipeline] [--microbatches 8] [--width 128]
Shows: the step of one GPT as it is traced and as it runs, in one process and in turns: medians, the ratio with its 95%
interval, temporaries, and the processor time of tracing, compiling and the first step.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import jax
import numpy as np
from paired import machine, ratio
from small_gpt import config, loss_fn, make_batch, make_model, optimizer

import axonml_jax as ax
from axonml_jax.program import on_cpu

DEVICES = {"ddp": ("data", 1), "fsdp": ("fsdp", 2), "pipeline": ("pipe", 4)}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=DEVICES, default="ddp")
    parser.add_argument(
        "--microbatches", type=int, default=1, help="in which the batch is accumulated or passes stages"
    )
    parser.add_argument("--layers", type=int, default=8, help="transformer blocks")
    parser.add_argument("--width", type=int, default=256, help="width of the residual stream")
    parser.add_argument("--rows", type=int, default=16, help="sequences in the global batch, of 128 tokens each")
    parser.add_argument("--rounds", type=int, default=12, help="steps of each side that are timed")
    return parser.parse_args()


def trainer_of(options, change):
    """A trainer whose programs are changed so, after two steps; its batch, megabytes of temporaries and seconds to build."""
    on_cpu.with_transposed_operands = change
    shape = config(options.layers, options.width, tied=False)
    model, batch, number = make_model(shape), make_batch(options.rows, shape), options.microbatches
    axis, devices = DEVICES[options.plan]
    plan = ax.Plan(pipe=ax.Pipelined(num_microbatches=number)) if axis == "pipe" else ax.Plan(accumulate=number)
    trainer = ax.parallelize(model, ax.make_mesh(**{axis: devices}), plan).trainer(optimizer(), loss_fn)
    start = time.process_time()
    jax.block_until_ready(trainer.step(batch))
    built = time.process_time() - start
    jax.block_until_ready(trainer.step(batch))
    memory = trainer.train_step.lower(trainer.state, batch).compile().memory_analysis()
    return trainer, batch, memory.temp_size_in_bytes / 2**20, built


def main():
    options = parse()
    ax.fake_devices(DEVICES[options.plan][1])
    ours = on_cpu.with_transposed_operands
    sides = {"as traced": trainer_of(options, lambda jaxpr: jaxpr), "as it runs": trainer_of(options, ours)}
    times, rng = {name: [] for name in sides}, np.random.default_rng(0)
    for _ in range(options.rounds):
        for name in rng.permutation(list(sides)):
            trainer, batch, *_ = sides[name]
            start = time.process_time()
            jax.block_until_ready(trainer.step(batch))
            times[name].append(time.process_time() - start)
    print(f"{machine('jax')}; {vars(options)}")
    for name, (_, _, memory, built) in sides.items():
        print(
            f"{name}: {1e3 * np.median(times[name]):.0f} ms a step, {memory:.1f} MiB of temporaries, built in {built:.1f} s"
        )
    print(f"as it runs / as traced: {ratio(times['as it runs'], times['as traced'])}")


if __name__ == "__main__":
    main()
