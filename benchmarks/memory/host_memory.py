"""Steps that keep values in the host's memory, compiled for TPU chips that need not be there: bytes of a chip and of its host.

Nothing runs (pip install '.[tpu]'). A row per kind of recomputation: temporaries and the peak of a chip as the compiler plans
them, what it plans in host memory, and what was chosen.

    python benchmarks/memory/host_memory.py                           # 8 Llama blocks of 1,024 under FSDP on 8 chips of a v5e
    python benchmarks/memory/host_memory.py --memory 0.6GiB 0.5GiB    # what is chosen within so many bytes
    python benchmarks/memory/host_memory.py --long                    # Qwen3-8B, 1 x 1,048,576 positions on 8 chips of a v5p
"""

import argparse
import math
import time
from dataclasses import replace

import jax

jax.config.update("jax_platforms", "cpu")

from jax.sharding import AxisType, Mesh

import axonml_jax as ax
from axonml_jax.ledger.compiled import device_peak
from axonml_jax.mesh.shape import order_devices
from axonml_jax.models.config import PRESETS, TransformerConfig
from axonml_jax.planner.verify import abstract_step, topology_devices

MIB = 2**20
LLAMA = TransformerConfig(
    vocab_size=256, num_layers=8, hidden_size=1024, num_heads=8, num_kv_heads=4, mlp_hidden_size=2816, max_length=512,
    scan_layers=True,
)  # fmt: skip
LONG = replace(PRESETS["qwen3-8b"], max_length=2**20, scan_layers=True, loss_chunk=4096)
WORDS = {"none": None}


def compiled(config: TransformerConfig, mesh: Mesh, global_batch: int, length: int, **plan) -> tuple:
    """(the compiled step, what was chosen, seconds) of a plan."""
    begun = time.perf_counter()
    step, state, batch = abstract_step(ax.Plan(precision="bf16", **plan), config, mesh, global_batch, length)
    found = step.lower(state, batch).compile()
    return found, step.recompute, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", help="of chips: v5e:2x4, with --long v5p:2x2x2")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, help="sequences of all chips together")
    parser.add_argument("--length", type=int)
    parser.add_argument("--method", default="auto", help="of attention over context: ring, gather, ulysses")
    parser.add_argument("--remat", nargs="*", default=None, help="none, selective, full, or labels divided by commas")
    parser.add_argument("--memory", nargs="*", default=[])
    given = parser.parse_args()
    config, axes = (LONG, ("fsdp", "context")) if given.long else (LLAMA, ("data", "fsdp"))
    config = replace(config, num_layers=given.layers or config.num_layers)
    devices = topology_devices(given.topology or ("v5p:2x2x2" if given.long else "v5e:2x4"))
    mesh = Mesh(order_devices((1, len(devices)), devices), axes, axis_types=(AxisType.Auto,) * 2)
    length = given.length or config.max_length
    rows = given.rows or (1 if given.long else 16 * len(devices))
    own = {"context": ax.Context(method=given.method, shard=True)} if given.long else {}
    remats = ["full", "host:input"] if given.long else ["none", "selective", "full", "host:.*kernel"]
    remats = given.remat if given.remat is not None else [] if given.memory else remats
    tried = [{"remat": WORDS.get(each, tuple(each.split(",")) if ":" in each else each)} for each in remats]
    tried += [{"memory": each} for each in given.memory]
    print(f"jax {jax.__version__}, {devices[0].device_kind}, {rows} x {length:,}, {config.num_layers} blocks; MiB")
    for plan in tried:
        found, chosen, seconds = compiled(config, mesh, rows, length, **own, **plan)
        planned = found.memory_analysis()
        sizes = (planned.argument_size_in_bytes, planned.temp_size_in_bytes, device_peak(found))
        words = ", ".join(f"{size / MIB:,.0f}" for size in (*sizes, planned.host_temp_size_in_bytes))
        print(f"{plan}: arguments, temporaries, peak, host: {words}; compiled in {seconds:.0f} s", flush=True)
        if "memory" in plan:
            print(f"{chosen}\npredicted live: {(chosen.live or math.nan) / MIB:,.0f}", flush=True)


if __name__ == "__main__":
    main()
