"""Long sequences compiled for TPU chips that are not there: what a ring hides, and what Llama 3 8B holds and moves.

    pip install '.[tpu]'
    python benchmarks/speed/context_tpu.py --layers 2 --topology v5e:2x4 --context 8 --length 32768 --methods ring \
        --attention blocks
    python benchmarks/speed/context_tpu.py --topology v5p:4x4x4 --fsdp 8 --context 8 --length 131072 --batch 8
    python benchmarks/speed/context_tpu.py --topology v5p:4x4x4 --context 64 --length 1048576 --methods gather 8-gather 8-ring

The training step (bf16, AdamW, layers in one loop, full recomputation, logits of 21,376 words at a time), parameters sharded
over fsdp and context together. For every method: bytes per chip, planned and predicted; what the schedule moves and how much
of it with products between its start and its end; and the collectives by whether they are asynchronous.
"""

import argparse
import math
import time
from collections import Counter
from dataclasses import replace

import numpy as np
from jax.sharding import AxisType, Mesh

import axonml_jax as ax
from axonml_jax.ledger.compiled import collectives_in_compiled, device_peak, moved, moved_table
from axonml_jax.models.config import preset
from axonml_jax.planner.verify import abstract_step, topology_devices


def report(given: argparse.Namespace, method: str) -> None:
    """Compile one method's step and print what the compiler made of it."""
    devices = topology_devices(given.topology)
    degrees = {"data": 1, "fsdp": given.fsdp, "context": given.context}
    assert math.prod(degrees.values()) == len(devices), f"{given.topology} has {len(devices)} chips"
    config = replace(preset("llama3-8b"), max_length=given.length, scan_layers=True, loss_chunk=21376)
    config = replace(config, attention=given.attention)
    if given.layers:
        config = replace(config, num_layers=given.layers)
    among, _, rest = method.rpartition("-")
    chosen = (int(among), rest) if among else method
    plan = ax.Plan(
        mesh=ax.MeshShape(**degrees), context=ax.Context(method=chosen, shard=True), precision="bf16", remat="full"
    )
    axis_types = (AxisType.Auto,) * len(degrees)
    mesh = Mesh(np.array(devices).reshape(tuple(degrees.values())), tuple(degrees), axis_types=axis_types)
    started = time.perf_counter()
    step, state, batch = abstract_step(plan, config, mesh, given.batch, given.length)
    compiled = step.trace(state, batch).lower().compile()
    planned, found = (
        compiled.memory_analysis(),
        ax.explain(plan, model=config, global_batch=given.batch, length=given.length, platform="tpu", torus=3),
    )
    print(
        f"\n{method}: {given.topology}, {degrees}, {given.batch} x {given.length:,}, {time.perf_counter() - started:.0f} s"
    )
    for name, told, size in (
        ("arguments", found.memory.arguments, planned.argument_size_in_bytes),
        ("temporaries", found.memory.temporaries, planned.temp_size_in_bytes),
        ("peak", found.memory.total, device_peak(compiled)),
    ):
        print(f"{name:<12} planned {size / 1e9:8.2f} GB, predicted {told / 1e9:8.2f} GB")
    print(f"predicted to send {float(found.total_bytes) / 1e9:.1f} GB\n{moved_table(moved(compiled))}")
    kinds = Counter((each.kind, each.asynchronous) for each in collectives_in_compiled(compiled))
    for (kind, later), count in sorted(kinds.items()):
        print(f"{count:4} {kind} {'asynchronous' if later else 'synchronous'}")
    if given.dump:
        with open(f"{given.dump}_{method}.txt", "w", encoding="utf-8") as file:
            file.write(compiled.as_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5p:4x4x4")
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=0, help="instead of the model's own")
    parser.add_argument("--methods", nargs="+", default=["gather", "ulysses", "ring"], help="U-ring is (U, 'ring')")
    parser.add_argument("--attention", default="auto", help="blocks: what XLA computes, instead of splash attention")
    parser.add_argument("--dump", help="write the programs' texts under this prefix")
    given = parser.parse_args()
    for method in given.methods:
        report(given, method)


if __name__ == "__main__":
    main()
