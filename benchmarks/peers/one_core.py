"""Processor time of a training step of one rank on one core: ours, ours without kept memory, and PyTorch's.

Run: python benchmarks/peers/one_core.py --torch-python PATH (a Python with torch and numpy; without it our sides alone)
Shows: user and system seconds per step, medians of fresh processes that take turns, so that other work on the machine
matters little; the losses agree.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import numpy as np
from paired import machine, table
from ranks import run_ranks
from small_gpt import LEARNING_RATE

from axonml_jax.mesh.simulate import SWITCH

HERE = Path(__file__).parent


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", help="the Python that has torch")
    parser.add_argument("--core", type=int, default=0, help="the core that all sides run on")
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes of every side")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per process, after 4 more")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    shape = list(map(str, (options.layers, options.width, options.rows)))
    ours = [sys.executable, str(HERE / "ddp_rank.py"), *shape]
    times, losses = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "weights.npz")
        run_ranks([*ours, "0", "0", "--write", file], 1)
        timed = [*ours, "4", str(options.steps)]
        sides = {
            "ours": lambda: run_ranks(timed, 1),
            "ours, memory not kept": lambda: run_ranks(timed, 1, **{SWITCH: "0"}),
        }
        if options.torch_python:
            command = [options.torch_python, str(HERE / "torch_rank.py"), file, "4", str(options.steps), "ddp", "1"]
            settings = {"OMP_NUM_THREADS": "1", "LEARNING_RATE": str(LEARNING_RATE)}
            sides = {"torch": lambda: run_ranks(command, 1, **settings), **sides}
        for round_ in range(options.rounds):
            for name in list(sides)[:: 1 if round_ % 2 else -1]:
                measured = sides[name]()
                times.setdefault(name, []).append(float(np.median(measured["processor"])))
                losses[name] = measured["losses"]
                print(f"round {round_}, {name}: {times[name][-1] * 1e3:.0f} ms", file=sys.stderr)
    first = next(iter(sides))
    for name, values in losses.items():
        np.testing.assert_allclose(values, losses[first], rtol=1e-3, err_msg=name)
    print(f"{machine('jax')}, one core\n{table({name: times[name] for name in sides}, first)}")


if __name__ == "__main__":
    main()
