"""Our DDP step against PyTorch's (gloo): same GPT, weights, batch and AdamW, two ranks on the same two cores.

Run: python benchmarks/peers/torch_ddp.py --torch-python PATH (a Python with `pip install torch==2.13.0 numpy`, default: this)
Shows: in processes that take turns step by step, the median step of PyTorch with two processes, and ours on two simulated
devices and as two processes over gloo, as they come and tuned; the losses of all agree. Below 1.0 we are faster.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import numpy as np
from paired import machine, table
from ranks import Ranks, run_in_turns, run_ranks
from small_gpt import LEARNING_RATE

HERE = Path(__file__).parent
RANKS = {"ddp": 2, "fsdp": 2, "pipeline": 4}
ONEDNN = "--xla_cpu_experimental_onednn_custom_call=true"


def parse(words: str | None):
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", default=sys.executable, help="the Python that has torch")
    parser.add_argument("--rounds", type=int, default=2, help="fresh processes of every side")
    parser.add_argument("--steps", type=int, default=20, help="timed steps per process, after 4 more")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks")
    parser.add_argument("--width", type=int, default=256, help="width of the residual stream")
    parser.add_argument("--rows", type=int, default=16, help="sequences in the global batch")
    parser.add_argument("--microbatches", type=int, default=8, help="of a pipeline")
    parser.add_argument(
        "--only", nargs="*", help="names of the sides to run, as the table shows them; torch always runs"
    )
    return parser.parse_args()


def flag_exists(flag: str) -> bool:
    """Whether this jaxlib knows an XLA flag: an unknown one aborts the process."""
    environment = {**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return subprocess.run(command, env=environment, capture_output=True).returncode == 0


def sides(options, file: str, strategy: str) -> dict:
    """Every side as a call that starts fresh processes."""
    ranks, count = RANKS[strategy], str(options.microbatches)
    torch = [options.torch_python, str(HERE / "torch_rank.py"), file, "4", str(options.steps), strategy, count]
    ours = [sys.executable, str(HERE / "ddp_rank.py"), *map(str, (options.layers, options.width, options.rows)), "4"]
    ours = [*ours, str(options.steps), "--strategy", strategy, "--microbatches", count]
    simulated, rate = [*ours, "--devices", str(ranks)], str(LEARNING_RATE)
    cores = sorted(os.sched_getaffinity(0))[:2] * (ranks // 2)
    named = {
        "torch": lambda: Ranks(torch, ranks, OMP_NUM_THREADS="1", LEARNING_RATE=rate),
        "torch, pinned": lambda: Ranks(torch, ranks, cores=cores, OMP_NUM_THREADS="1", LEARNING_RATE=rate),
        "simulated": lambda: Ranks(simulated, 1),
        "processes": lambda: Ranks(ours, ranks),
        "processes, a thread per core": lambda: Ranks(ours, ranks, NPROC=str(len(set(cores)))),
        "processes, pinned": lambda: Ranks(ours, ranks, cores=cores),
    }
    if flag_exists(ONEDNN):
        named |= {
            "simulated, oneDNN": lambda: Ranks(simulated, 1, XLA_FLAGS=ONEDNN),
            "processes, oneDNN": lambda: Ranks(ours, ranks, XLA_FLAGS=ONEDNN),
            "processes, pinned, oneDNN": lambda: Ranks(ours, ranks, cores=cores, XLA_FLAGS=ONEDNN),
        }
    else:
        print(f"this jaxlib does not know {ONEDNN}")
    return {name: run for name, run in named.items() if not options.only or name in ("torch", *options.only)}


def main(strategy: str = "ddp", words: str | None = __doc__):
    options = parse(words)
    times, losses, versions = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "weights.npz")
        shape = list(map(str, (options.layers, options.width, options.rows)))
        write = [sys.executable, str(HERE / "ddp_rank.py"), *shape, "0", "0", "--strategy", strategy, "--write", file]
        parameters = run_ranks(write, 1)
        running = sides(options, file, strategy)
        for round_ in range(options.rounds):
            for name, measured in run_in_turns(running, options.steps, seed=round_).items():
                times.setdefault(name, []).extend(measured["times"])
                losses[name], versions[name.split(",")[0]] = measured["losses"], measured["version"]
                print(f"round {round_}, {name}: {np.median(measured['times']) * 1e3:.0f} ms", file=sys.stderr)
    for name, values in losses.items():  # the same training: weights, batch, gradients and AdamW agree
        np.testing.assert_allclose(values, losses["torch"], rtol=1e-3, err_msg=name)
    size = f"{parameters / 1e6:.1f} M parameters, {options.rows} sequences"
    print(f"{machine()}, {size}, torch {versions.pop('torch')}, jax {next(iter(versions.values()))}")
    print(table({name: times[name] for name in running}, "torch"))


if __name__ == "__main__":
    main()
