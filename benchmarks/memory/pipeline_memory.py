"""Memory and compile time of a pipeline's training step: flat in the number of microbatches, and as predicted for TPU.

Run: python benchmarks/memory/pipeline_memory.py [--pairs 3]; --topology v5e:4x4 compiles for TPU chips that need not be there
(pip install '.[tpu]'). Shows, for the trainer's step with AdamW at pipe 4 x data 2 on 8 simulated devices: temporaries
by schedule and number of microbatches of one size, beside the slots of its loop and two gradients of a stage; what a device
rests with, beside its largest stage; seconds to compile 64 and 8 microbatches. For a topology: bytes per chip at
pipe 4 x data 4, predicted and planned. Nothing is allocated.
"""

import argparse
import time
from typing import NamedTuple

import jax

jax.config.update("jax_platforms", "cpu")

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import numpy as np
from paired import machine, ratio
from small_gpt import config

import axonml_jax as ax
from axonml_jax.ledger import predict
from axonml_jax.models.config import TransformerConfig
from axonml_jax.planner.verify import abstract_step, verify_plan
from axonml_jax.program.program import Program, read_program

MIB = 2**20
RANKS = 4
ROWS = (("1f1b", 8), ("1f1b", 16), ("1f1b", 64), ("gpipe", 8), ("gpipe", 16), ("gpipe", 64))


class Loop(NamedTuple):
    """Bytes that the loop over ticks carries.

    Attributes:
      slots: of activations, their gradients and residuals, trash slots included.
      gradients: of a rank's stages.
    """

    slots: int
    gradients: int


def plan_of(schedule: str, microbatches: int, data: int, **options) -> ax.Plan:
    """A pipeline of four ranks."""
    pipe = ax.Pipelined(schedule=schedule, num_microbatches=microbatches)
    return ax.Plan(mesh=ax.MeshShape(data=data, pipe=RANKS), pipe=pipe, **options)


def traced(shape: TransformerConfig, schedule: str, microbatches: int, rows: int):
    """(the step, it traced) with `rows` rows per microbatch and batch shard, on 8 simulated devices."""
    plan, mesh = plan_of(schedule, microbatches, 2), ax.make_mesh(data=2, pipe=RANKS)
    step, state, batch = abstract_step(plan, shape, mesh, 2 * rows * microbatches, shape.max_length)
    return step, step.trace(state, batch)


def loop(program: Program) -> Loop | None:
    """What the outermost scan of a program carries."""
    for equation in program.equations:
        if equation.op.scan is not None:
            avals = equation.op.made  # the loop returns its carry and nothing else
            slots, flat = ([a.size * a.dtype.itemsize for a in avals if a.ndim == dims] for dims in (2, 1))
            return Loop(sum(slots), sum(flat))
        for body in equation.bodies:
            if found := loop(body):
                return found
    return None


def simulated(shape: TransformerConfig, rows: int, pairs: int):
    """Print both tables for simulated devices."""
    ax.fake_devices(8)
    print(
        f"{machine('jax', 'flax')}; {shape.num_params:,} parameters, {rows} x {shape.max_length} tokens per microbatch"
    )
    print("| schedule | M | temporaries | / (slots + 2 gradients) | slots and trash | a stage's gradients |")
    print("| --- | --- | --- | --- | --- | --- |")
    for schedule, microbatches in ROWS:
        step, program = traced(shape, schedule, microbatches, rows)
        carried, planned = loop(read_program(program.jaxpr)), program.lower().compile().memory_analysis()
        temporaries = planned.temp_size_in_bytes
        beside = temporaries / (carried.slots + 2 * carried.gradients)
        sizes = [mb(temporaries), f"{beside:.3f}", mb(carried.slots), mb(carried.gradients)]
        print(f"| {schedule} | {microbatches} | {' | '.join(sizes)} |", flush=True)
    stages = step.placement.stages
    largest = max(
        sum(layout.size for layout, p in zip(stages.layouts, stages.stages, strict=True) if p == stage)
        for stage in range(stages.num_stages)
    )
    held = sum(stages.params.buffers.sizes.values())
    print(f"parameters on a device {held:,}, of the largest stage {largest:,}, of the model {shape.num_params:,}")
    compile_times(shape, rows, pairs)


def compile_times(shape: TransformerConfig, rows: int, pairs: int):
    """Print seconds of processor time to lower and compile, in pairs."""
    times: dict[int, list[float]] = {8: [], 64: []}
    for _ in range(pairs):
        for microbatches, spent in times.items():
            _, program = traced(shape, "1f1b", microbatches, rows)
            start = time.process_time()
            program.lower().compile()
            spent.append(time.process_time() - start)
    if pairs:
        print(f"compile M=64 / M=8: {ratio(times[64], times[8])}; medians {np.median(times[8]):.1f} s at M=8")


def topology(name: str, shape: TransformerConfig, rows: int, microbatches: int):
    """Print what a chip is predicted to hold, and what XLA:TPU plans."""
    print(f"{machine('jax', 'flax')}; {name}; {shape.num_params:,} parameters, {rows} x {shape.max_length} tokens")
    print("| pipe 4 x data 4 | arguments, predicted / planned | temporaries | peak | planned / predicted |")
    print("| --- | --- | --- | --- | --- |")
    for schedule, remat in (("1f1b", None), ("1f1b", "full"), ("gpipe", None)):
        plan = plan_of(schedule, microbatches, 4, precision="bf16", remat=remat)
        batch = 4 * rows * microbatches
        degrees = {"data": 4, "pipe": RANKS}
        told = predict(plan, shape, degrees, global_batch=batch, length=shape.max_length, platform="tpu")
        found = verify_plan(plan, shape, told, name, batch, shape.max_length)
        both = lambda pair: f"{mb(pair[0])} / {mb(pair[1])}"
        peaks = (found.predicted_peak, found.peak)
        cells = [
            both(found.memory.arguments),
            both(found.memory.temporaries),
            both(peaks),
            f"{peaks[1] / peaks[0]:.3f}",
        ]
        print(f"| {schedule}{', remat' if remat else ''} | {' | '.join(cells)} |", flush=True)
        print(*found.traffic, sep="\n", end="\n" if found.traffic else "")


def mb(size: float) -> str:
    """Bytes as MB of 2**20."""
    return f"{size / MIB:,.2f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rows", type=int, default=4, help="of one microbatch and batch shard")
    parser.add_argument("--microbatches", type=int, default=8, help="for a topology")
    parser.add_argument("--pairs", type=int, default=3, help="rounds of compiling M=8 and M=64")
    parser.add_argument("--topology", help="compile for these TPU chips instead of simulated devices")
    options = parser.parse_args()
    shape = config(options.layers, options.width, options.length)
    if options.topology:
        topology(options.topology, shape, options.rows, options.microbatches)
    else:
        simulated(shape, options.rows, options.pairs)


if __name__ == "__main__":
    main()
