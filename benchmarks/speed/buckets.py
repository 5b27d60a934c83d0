"""Which way of reducing gradients is fastest: bucket views or flat buffers, and how large the buckets.

Run: python benchmarks/speed/buckets.py --devices 2 (simulated devices; also 8)
     python benchmarks/speed/buckets.py --processes 2 (real processes over gloo)
Shows: the time of a DDP step for each choice, in turns within the same processes, and its ratio to what
`gradient_as_bucket_view=None, bucket_size_mb=25` chooses there, which should be among the fastest.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import numpy as np
from paired import alternate, machine, table
from ranks import run_ranks
from small_gpt import Stepping, config, loss_fn, make_batch, make_model, optimizer

import axonml_jax as ax

SIZES = (1, 4, 25)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="number of simulated devices in one process")
    parser.add_argument("--processes", type=int, default=1, help="number of real processes with one device each")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each choice that are timed")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks")
    parser.add_argument("--width", type=int, default=256, help="width of the residual stream")
    parser.add_argument(
        "--rows", type=int, default=4, help="sequences in the global batch: few, so that reducing shows"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def choices() -> dict[str, dict]:
    """The arguments of DDP for every side."""
    named = {
        f"{'view' if view else 'flat'}, {size} MiB": {"gradient_as_bucket_view": view, "bucket_size_mb": size}
        for view in (True, False)
        for size in SIZES
    }
    late = {"sync_strategy": "synchronous", "gradient_as_bucket_view": False}
    return {"default": {}, **named, "flat, 25 MiB, after the backward": late}


def sides(options, mesh) -> dict[str, Stepping]:
    shape = config(options.layers, options.width)
    batch = make_batch(options.rows, shape)

    def stepping(arguments: dict) -> Stepping:
        trainer = ax.DDP(make_model(shape), mesh, **arguments).trainer(optimizer(), loss_fn)
        return Stepping(trainer.state, trainer.train_step, batch)

    return {name: stepping(arguments) for name, arguments in choices().items()}


def measure(options, mesh) -> dict[str, list[float]]:
    runs = sides(options, mesh)
    for run in runs.values():  # one after another: gloo gives up when ranks compile at different times for too long
        run()
    alternate(runs, 3)
    losses = [float(run.metrics["loss"]) for run in runs.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-4)
    return alternate(runs, options.rounds)


def main():
    options = parse()
    if options.worker:
        mesh = ax.init().mesh
        times = measure(options, mesh)
        print(json.dumps(times))
        ax.shutdown()
        return
    where = f"{options.devices} simulated devices"
    if options.processes > 1:
        where = f"{options.processes} processes over gloo"
        times = run_ranks([sys.executable, *sys.argv, "--worker"], options.processes)
    else:
        ax.fake_devices(options.devices)
        times = measure(options, ax.make_mesh(data=-1))
    shape = config(options.layers, options.width)
    print(f"{machine('jax')}, {where}, {shape.num_params / 1e6:.1f} M parameters, {options.rows} sequences")
    print(table(times, "default"))


if __name__ == "__main__":
    main()
