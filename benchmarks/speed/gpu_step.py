"""On one GPU: the DDP facade's step against the same step in plain `jax.jit`, GPT-2 small in bfloat16, tokens/s and MFU.

Run: PYTHONPATH=. python benchmarks/speed/gpu_step.py --rows 16 (from the repository; needs jax with CUDA, flax and optax only)
Shows: whether the optimized programs are the same after stripping metadata, and the paired ratio of medians of groups of
steps (dispatched ahead, waited for once per group) with its 95% interval; tokens per second, MFU, memory. Bar: 1.02.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import jax
import numpy as np
from hlo import by_opcode, differences, stripped
from jax.sharding import Mesh
from paired import alternate, machine, ratio, table, verdict
from small_gpt import Stepping, config, hand_written, loss_fn, make_batch, make_model, optimizer

from axonml_jax.facade.facades import DDP
from axonml_jax.models.config import preset

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16 FLOP/s
BAR = 1.02


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16, help="sequences per step")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=10, help="steps per group")
    parser.add_argument("--rounds", type=int, default=20, help="groups of each side")
    parser.add_argument("--tiny", action="store_true", help="a very small model, to try the script anywhere")
    return parser.parse_args()


def sides(options):
    shape = replace(
        config(2, 64) if options.tiny else preset("gpt2-small"), max_length=options.length, dtype="bfloat16"
    )
    device = jax.devices()[0]
    batch = jax.device_put(make_batch(options.rows, shape), device)
    ddp = DDP(make_model(shape), Mesh(np.array([device]), ("data",)))
    assert shape.num_params == sum(x.size for x in jax.tree.leaves(ddp.parameters())), "GPT-2's parameters, all of them"
    trainer = ddp.trainer(optimizer(), loss_fn)
    state, step = hand_written(make_model(shape), None)
    runs = {
        "facade": Stepping(trainer.state, trainer.train_step, batch, options.steps),
        "hand-written": Stepping(state, step, batch, options.steps),
    }
    # Lowered from shapes: the first calls below then compile, or take from the cache, exactly these programs.
    programs = [trainer.train_step.lower(trainer.state, batch).compile(), step.lower(state, batch).compile()]
    return shape, runs, programs


def compare(programs):
    ours, theirs = (program.as_text() for program in programs)
    only = differences(ours, theirs)
    print(f"HLO: {'the same' if stripped(ours) == stripped(theirs) else 'not the same text'} after stripping")
    print(f"  only in the facade's: {by_opcode(only[0])}\n  only in the hand-written: {by_opcode(only[1])}")
    for name, program in zip(("facade", "hand-written"), programs, strict=True):
        print(f"  {name}: {program.memory_analysis().temp_size_in_bytes / 2**30:.2f} GiB of temporaries")


def main():
    options = parse()
    shape, runs, programs = sides(options)
    kind = jax.devices()[0].device_kind
    print(
        f"{machine('jax', 'flax', 'optax')}, {kind}, {shape.num_params} parameters, {options.rows} x {options.length}"
    )
    compare(programs)
    alternate(runs, 2)
    losses = [float(run.metrics["loss"]) for run in runs.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=2e-2)  # bfloat16
    times = alternate(runs, options.rounds)
    print(table(times, "hand-written"))
    peak = next((value for name, value in PEAKS.items() if name in kind), None)
    for name, seconds in times.items():
        rate = options.steps * options.rows * options.length / float(np.median(seconds))
        mfu = f", MFU {rate * shape.flops_per_token(options.length) / peak:.1%}" if peak else ""
        print(f"{name}: {rate:,.0f} tokens/s{mfu}")
    print(f"facade / hand-written: {verdict(ratio(times['facade'], times['hand-written']), BAR)}")


if __name__ == "__main__":
    main()
