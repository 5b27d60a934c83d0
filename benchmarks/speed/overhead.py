"""What the facade's fused step costs over the same step written by hand, and over `jax.jit` alone.

Run: python benchmarks/speed/overhead.py --devices 2 (and 8); --rounds 200 for the published figures, --show for the HLO
Shows: whether the optimized programs are the same once names and metadata are stripped, what differs, and the paired
ratios of medians with 95% intervals. Bars: 1.02 against the hand-written step, 1.05 against auto-sharding.
"""

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import jax
import numpy as np
from hlo import by_opcode, differences, stripped
from jax.sharding import NamedSharding, PartitionSpec
from paired import alternate, machine, ratio, table, verdict
from small_gpt import Stepping, config, hand_written, loss_fn, make_batch, make_model, optimizer

import axonml_jax as ax

BARS = {"hand-written": 1.02, "auto-sharded": 1.05}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="number of simulated devices")
    parser.add_argument("--rounds", type=int, default=60, help="steps of each side that are timed")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--width", type=int, default=128, help="width of the residual stream")
    parser.add_argument("--rows", type=int, default=16, help="sequences in the global batch")
    parser.add_argument("--show", metavar="FOLDER", help="write the stripped programs and their differences there")
    return parser.parse_args()


def facade_step(trainer, batch):
    metrics = trainer.step(batch)
    return trainer.state, metrics


def sides(options):
    shape = config(options.layers, options.width)
    mesh = ax.make_mesh(data=-1)
    batch = jax.device_put(make_batch(options.rows, shape), NamedSharding(mesh, PartitionSpec("data")))
    trainer = ax.DDP(make_model(shape), mesh).trainer(optimizer(), loss_fn)
    state, step = hand_written(make_model(shape), mesh)
    auto_state, auto_step = hand_written(make_model(shape), mesh, auto=True)
    runs = {
        "facade": Stepping(None, lambda _, batch: facade_step(trainer, batch), batch),
        "hand-written": Stepping(state, step, batch),
        "auto-sharded": Stepping(auto_state, auto_step, batch),
    }
    lowered = {
        "facade": trainer.train_step._compiled._plain.lower(trainer.state, batch),
        "facade, kernels' gradients written anew": trainer.train_step.lower(trainer.state, batch),
        "hand-written": step.lower(state, batch),
        "auto-sharded": auto_step.lower(auto_state, batch),
    }
    return runs, {name: low.compile() for name, low in lowered.items()}, trainer


def compare_programs(programs, folder):
    """The facade's step as it is traced, against the others and against what it runs on CPU (docs/adr/0023)."""
    texts = {name: program.as_text() for name, program in programs.items()}
    for name in list(programs)[1:]:
        same = stripped(texts["facade"]) == stripped(texts[name])
        ours, theirs = differences(texts["facade"], texts[name])
        memory = [programs[side].memory_analysis().temp_size_in_bytes for side in ("facade", name)]
        print(f"\nHLO, facade against {name}: {'the same' if same else 'not the same text'} after stripping")
        print(f"  only in the facade's: {by_opcode(ours)}\n  only in the {name}: {by_opcode(theirs)}")
        print(f"  temporaries: {memory[0] / 2**20:.2f} and {memory[1] / 2**20:.2f} MiB")
    for name, text in texts.items() if folder else ():
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"{name}.hlo"), "w") as file:
            file.write(stripped(text))


def python_overhead(trainer, batch, calls: int = 300) -> float:
    """Seconds per call that `Trainer.step` spends around the compiled program."""
    train_step, real = trainer.train_step, trainer.train_step._compiled
    train_step._compiled = lambda state, batch: (state, {})
    start = time.perf_counter()
    for _ in range(calls):
        trainer.step(batch)
    spent = (time.perf_counter() - start) / calls
    train_step._compiled = real
    return spent


def main():
    options = parse()
    warnings.simplefilter(
        "error"
    )  # "some donated buffers were not usable" would make a side slower than it needs to be
    ax.fake_devices(options.devices)
    runs, programs, trainer = sides(options)
    print(machine("jax", "flax", "optax") + f", {options.devices} simulated devices")
    compare_programs(programs, options.show)
    alternate(runs, 5)
    losses = [float(run.metrics["loss"]) for run in runs.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-4)  # the sides train the same model
    times = alternate(runs, options.rounds)
    print("\n" + table(times, "hand-written"))
    for name, bar in BARS.items():
        print(f"facade / {name}: {verdict(ratio(times['facade'], times[name]), bar)}")
    spent = python_overhead(trainer, runs["facade"].batch)
    print(f"Python around the compiled program in Trainer.step: {spent * 1e6:.0f} us per step")


if __name__ == "__main__":
    main()
