"""What threads of XLA:CPU's pool cost simulated devices (docs/adr/0003): one step, with `NPROC` of several values.

Run: python benchmarks/speed/pool_threads.py --threads 16 8 5 3 cores [--plan pipeline] [--devices 4] (jax 0.12 and later)
Shows: of a process for each number of threads, which take turns step by step: wall and processor time, context
switches, and the ratio of wall times to the first's. "cores" leaves `NPROC` alone. Before jax 0.12 too few threads hang.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import jax
import numpy as np
from paired import machine, ratio
from small_gpt import config, loss_fn, make_batch, make_model, optimizer

import axonml_jax as ax

AXES = {"ddp": "data", "fsdp": "fsdp", "tensor": "tensor", "pipeline": "pipe"}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", nargs="+", default=["16", "cores"], help="values of NPROC, or cores")
    parser.add_argument("--plan", choices=AXES, default="ddp")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks")
    parser.add_argument("--width", type=int, default=256, help="width of the residual stream")
    parser.add_argument("--rounds", type=int, default=12, help="steps that are timed")
    parser.add_argument("--worker", help="one of the processes, which this script starts itself: its value")
    return parser.parse_args()


def work(options):
    """Three steps, and then one for every line that comes: its seconds, processor seconds and context switches."""
    ax.fake_devices(options.devices)
    os.environ.pop("NPROC", None)
    if options.worker != "cores":
        os.environ["NPROC"] = options.worker
    shape = config(options.layers, options.width, tied=False)
    plan = ax.Plan(pipe=ax.Pipelined(num_microbatches=8)) if options.plan == "pipeline" else ax.Plan()
    mesh = ax.make_mesh(**{AXES[options.plan]: options.devices})
    trainer = ax.parallelize(make_model(shape), mesh, plan).trainer(optimizer(), loss_fn)
    batch = make_batch(16, shape)
    for _ in range(3):
        jax.block_until_ready(trainer.step(batch))
    print("ready", flush=True)
    for _ in sys.stdin:
        before = time.perf_counter(), time.process_time(), switches()
        jax.block_until_ready(trainer.step(batch))
        after = time.perf_counter(), time.process_time(), switches()
        print(*(new - old for old, new in zip(before, after, strict=True)), flush=True)


def switches() -> int:
    """Context switches of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_nvcsw + used.ru_nivcsw


def main():
    options = parse()
    if options.worker:
        work(options)
        return
    command, pipe = [sys.executable, *sys.argv], subprocess.PIPE
    workers = {
        value: subprocess.Popen([*command, "--worker", value], stdin=pipe, stdout=pipe, text=True, bufsize=1)
        for value in options.threads
    }
    found, rng = {value: [] for value in workers}, np.random.default_rng(0)
    try:
        for worker in workers.values():
            assert worker.stdout.readline() == "ready\n"
        for _ in range(options.rounds):
            for value in rng.permutation(options.threads):
                workers[value].stdin.write("step\n")
                found[value].append([float(word) for word in workers[value].stdout.readline().split()])
    finally:
        for worker in workers.values():
            worker.stdin.close()
            worker.wait()
    print(f"{machine('jax')}; {vars(options)}")
    first = [one[0] for one in found[options.threads[0]]]
    for value, measured in found.items():
        wall, processor, switched = np.median(measured, axis=0)
        print(
            f"NPROC {value}: {1e3 * wall:.0f} ms, {1e3 * processor:.0f} ms of processors, {switched:,.0f} switches; "
            f"{ratio([one[0] for one in measured], first)}"
        )


if __name__ == "__main__":
    main()
