"""Loss curves by how gradients travel, on the quickstart's text: is what a few bits lose more than another seed changes?

    python benchmarks/truth/reduce_curve.py --steps 300 --seeds 0 1 2 --record reduce.jsonl
    python benchmarks/truth/reduce_curve.py --table reduce.jsonl

Every run is `axonml-jax train configs/quickstart.yaml`, of width 128, with FSDP over 8 simulated devices and other keys of the
section plan.
XLA:CPU sums what travels in bfloat16 in float32 and rounds the result. `a ring` stands for devices that round every partial
sum: its reduce-scatter is seven permutes in bfloat16 with an addition after each. `another program` reduces in float32 under
ZeRO-1: the same sums in another order, which shows what rounding alone does to a run. The table has for every row the means
over seeds of the training loss of the last 50 steps and of the validation loss at the end, and by how much the latter is
above that of the row it is held to, seed by seed.
"""

import argparse
import contextlib
import io
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
WIDE = "bf16, reduced in float32"
ROWS = {
    "float32": {"precision": "float32"},
    WIDE: {"precision": "bf16-reduce-float32"},
    "bf16": {"precision": "bf16"},
    "bf16, a ring": {"precision": "bf16"},
    "bf16, another program": {"precision": "bf16-reduce-float32", "sharding_strategy": "shard_optimizer"},
    "bf16, summed in bf16 too": {"precision": "bf16-reduce", "accumulate": 2},
    "fp8": {"precision": "fp8"},
    "int8": {"precision": "float32", "sharding_strategy": "shard_optimizer", "reduce_wire": "int8"},
    "int8, feedback": {"precision": "float32", "sharding_strategy": "shard_optimizer", "reduce_wire": "int8-feedback"},
}
SMALLER = {"model.hidden_size": 128, "model.num_heads": 2, "model.mlp_hidden_size": 384}
HELD_TO = {"int8": "float32", "int8, feedback": "float32", WIDE: "float32"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of every run; a multiple of 50")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--record", type=Path, default=Path("reduce.jsonl"), help="runs are added to it")
    parser.add_argument("--table", type=Path, help="run nothing, show this record")
    options = parser.parse_args()
    if options.table is None:
        for seed in options.seeds:
            for name in options.rows:
                found = {"row": name, "seed": seed, "steps": options.steps, **run(name, options.steps, seed)}
                print(json.dumps(found), flush=True)
                with options.record.open("a") as file:
                    file.write(json.dumps(found) + "\n")
    show([json.loads(line) for line in (options.table or options.record).read_text().splitlines()])


def run(name: str, steps: int, seed: int) -> dict[str, float]:
    """Training loss of the last 50 steps and validation loss at the end."""
    from axonml_jax.cli.records import read_records
    from axonml_jax.cli.train import train
    from axonml_jax.config.config import read_config

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        keys = {"train.seed": seed, "mesh.data": 1, "mesh.fsdp": 8, "train.steps": steps, "train.eval_every": steps}
        keys |= {"output.dir": folder, "sample.count": 0, "output.plot": "false", "train.eval_batches": 50}
        keys |= {"checkpoint.every": "null", "train.log_every": 1, **SMALLER}
        keys |= {f"plan.{key}": value for key, value in ROWS[name].items()}
        flags = [f"--{key}={value}" for key, value in keys.items()]
        config = read_config("train", [str(ROOT / "configs" / "quickstart.yaml"), *flags])
        with ring_of_bf16() if name == "bf16, a ring" else contextlib.nullcontext():
            assert train(config) == 0
        [metrics] = Path(folder).glob("*/metrics.jsonl")
        records = list(read_records(metrics))
    last = [each.metrics["loss"] for each in records if "loss" in each.metrics and each.step > steps - 50]
    [valid] = [each.metrics["valid_loss"] for each in records if "valid_loss" in each.metrics]
    return {"train": statistics.fmean(last), "valid": valid}


@contextlib.contextmanager
def ring_of_bf16() -> Iterator[None]:
    """Reduce-scatters of FSDP as rings that round every partial sum."""
    import jax
    import jax.numpy as jnp

    from axonml_jax.collectives.gradients import parts_along
    from axonml_jax.strategies import shard

    def ring(leaf, axis, dim):
        ranks = jax.lax.axis_size(axis)
        rank, parts = jax.lax.axis_index(axis), parts_along(leaf, dim, ranks)
        part = lambda step: jax.lax.dynamic_index_in_dim(parts, (rank - 1 - step) % ranks, keepdims=False)
        total = part(0)
        for step in range(1, ranks):
            total = jax.lax.ppermute(total, axis, [(i, (i + 1) % ranks) for i in range(ranks)])
            total = (total.astype(jnp.float32) + part(step).astype(jnp.float32)).astype(leaf.dtype)
        return total

    def scatter(leaves, axis, dims, *, flat, among=None):
        whole = lambda leaf: jax.lax.psum(leaf, axis)
        return [whole(x) if dim is None else ring(x, axis, dim) for x, dim in zip(leaves, dims, strict=True)]

    with mock.patch.object(shard, "scatter_sum_leaves", scatter):
        yield


def show(runs: list[dict]) -> None:
    """The table in Markdown; of several runs of a row and seed the last counts."""
    found = {(each["row"], each["seed"]): each for each in runs}
    seeds = sorted({seed for _, seed in found})
    print(f"\nsteps: {sorted({each['steps'] for each in runs})}, seeds: {seeds}\n")
    print("| row | training loss | validation loss | seeds' standard deviation | held to | above it, by seed |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in (each for each in ROWS if (each, seeds[0]) in found):
        own = {seed: found[name, seed] for seed in seeds if (name, seed) in found}
        train, valid = ([each[kind] for each in own.values()] for kind in ("train", "valid"))
        spread = f"{statistics.stdev(valid):.4f}" if len(valid) > 1 else ""
        held = "" if name == "float32" else HELD_TO.get(name, WIDE)
        above = [
            f"{each['valid'] - found[held, seed]['valid']:+.4f}" for seed, each in own.items() if (held, seed) in found
        ]
        mean = statistics.fmean
        print(f"| {name} | {mean(train):.4f} | {mean(valid):.4f} | {spread} | {held} | {', '.join(above)} |")


if __name__ == "__main__":
    main()
