"""A pipeline's measured step against the simulator's, which is given the times of a stage.

Run: python benchmarks/speed/pipeline_time.py [--rounds 7]
Shows, for a small GPT on two simulated devices (as many as cores, so that ranks really work side by side): 1F1B with 4 and with
16 microbatches and the forwards alone of both give F, B and what a step costs beside its ticks; from these the simulator
predicts every other schedule and number of microbatches, printed beside what was measured in rounds that take turns.
"""

import argparse

import axonml_jax as ax

ax.fake_devices(2)

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import numpy as np
from paired import alternate, machine
from small_gpt import config, loss_fn, make_batch, make_model, optimizer

from axonml_jax.pipeline.simulate import simulate
from axonml_jax.pipeline.timetable import StageCosts

ROWS = 2
FEW, MANY = 4, 16
OTHERS = (
    ("1f1b", 8, 1),
    ("gpipe", 4, 1),
    ("gpipe", 16, 1),
    ("interleaved", 4, 2),
    ("interleaved", 16, 2),
    ("zero-bubble", 16, 1),
)


def trainer_of(shape, schedule: str, microbatches: int, chunks: int = 1):
    """(the trainer, its batch) of two ranks."""
    mesh = ax.make_mesh(pipe=2)
    pipe = ax.Pipeline(make_model(shape), mesh, schedule=schedule, num_microbatches=microbatches, chunks=chunks)
    return pipe, pipe.trainer(optimizer(), loss_fn), make_batch(ROWS * microbatches, shape)


def costs_of(forward: float, backward: float, chunks: int, split: bool) -> StageCosts:
    """Of a stage when ranks hold several; a separate W makes the gradients inside its stage again."""
    half = backward / 2
    return StageCosts(forward / chunks, half / chunks, (half + half * split) / chunks)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    shape, sides, tables = config(options.layers, options.width, tied=False), {}, {}
    for schedule, microbatches, chunks in (("1f1b", FEW, 1), ("1f1b", MANY, 1), *OTHERS):
        pipe, trainer, batch = trainer_of(shape, schedule, microbatches, chunks)
        name = f"{schedule}, M={microbatches}"
        tables[name] = (pipe.timetable, chunks, schedule == "zero-bubble")
        sides[name] = lambda trainer=trainer, batch=batch: float(trainer.step(batch)["loss"])
        if schedule == "1f1b" and microbatches in (FEW, MANY):
            sides[f"forward, M={microbatches}"] = lambda t=trainer, b=batch: float(t.evaluate(b)["loss"])
    for run in sides.values():  # compiles
        run()
    taken = {name: float(np.median(spent)) for name, spent in alternate(sides, options.rounds).items()}
    more = MANY - FEW
    forward = (taken[f"forward, M={MANY}"] - taken[f"forward, M={FEW}"]) / more
    tick = (taken[f"1f1b, M={MANY}"] - taken[f"1f1b, M={FEW}"]) / more
    beside = taken[f"1f1b, M={FEW}"] - (FEW + 1) * tick
    print(f"{machine('jax')}; {shape.num_params:,} parameters, {ROWS} x {shape.max_length} tokens per microbatch")
    print(f"F {forward * 1e3:.1f} ms, B {(tick - forward) * 1e3:.1f} ms, beside the ticks {beside * 1e3:.1f} ms")
    print("| schedule | bubble | predicted ms | measured ms | measured / predicted |\n| --- | --- | --- | --- | --- |")
    for name, (timetable, chunks, split) in tables.items():
        paper = simulate(timetable, costs_of(forward, tick - forward, chunks, split))
        told, bubble = paper.makespan + beside, f"{paper.bubble_fraction:.0%}"
        print(f"| {name} | {bubble} | {told * 1e3:.1f} | {taken[name] * 1e3:.1f} | {taken[name] / told:.3f} |")


if __name__ == "__main__":
    main()
