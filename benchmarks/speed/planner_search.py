"""How long the planner searches, and whether it misses anything.

Run: python benchmarks/speed/planner_search.py [--devices 256 1024 4096]. Shows CPU seconds by number of devices, for Llama 3
70B on TPU v5p. The bar is 10 s for 4,096.

`--exhaustive` prices every legal plan of a small model exactly instead (minutes), and shows for limits of memory, from what the
leanest plan needs to plenty, how much slower than the best of all the planner's choice is. Starts no devices.
"""

import argparse
import time
from dataclasses import replace

import numpy as np

import axonml_jax as ax
from axonml_jax.models.config import TransformerConfig, preset
from axonml_jax.planner.hardware import Hardware, hardware
from axonml_jax.planner.search import candidates, exactly, plan

SMALL = TransformerConfig(vocab_size=32000, num_layers=8, hidden_size=1024, num_heads=8, max_length=1024)


def exhaustive(kind: Hardware, num_devices: int, batch: int) -> None:
    """The planner's choices beside the best of all plans."""
    given = {"num_devices": num_devices, "hardware": kind, "global_batch": batch}
    asked, found, start = plan(SMALL, **given).asked, [], time.perf_counter()
    for each in candidates(SMALL, num_devices, global_batch=batch, length=SMALL.max_length):
        try:
            found.append(exactly(asked, each))
        except ValueError:
            continue  # a schedule that refuses these sizes
    times, held = (np.array([getattr(one.price, name) for one in found]) for name in ("time", "memory"))
    print(f"\n{kind.name}: {len(found):,} plans priced in {time.perf_counter() - start:.0f} s")
    print("| GiB | plans that fit | best ms | chosen / best | chosen |\n| --- | --- | --- | --- | --- |")
    for share in (0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1):
        limit = int(np.quantile(held, share))
        best = times[held <= limit].min()
        chosen = plan(SMALL, max_memory=limit, **given).best
        print(
            f"| {limit / 2**30:.2f} | {(held <= limit).sum():,} | {1e3 * best:.1f} | {chosen.price.time / best:.2f} | "
            f"{chosen.candidate} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--exhaustive", action="store_true")
    chosen = parser.parse_args()
    if chosen.exhaustive:
        exhaustive(hardware("v5e"), 8, 32)
        # Nodes of four joined slowly, where pipelines and grids are among the best.
        exhaustive(replace(hardware("a100"), name="a100, nodes of 4, slow between them", island=4, cross=2e9), 16, 32)
        return
    for count in chosen.devices:
        start = time.process_time()
        answer = ax.plan(preset("llama3-70b"), num_devices=count, hardware="v5p", global_batch=count)
        print(f"{count:>6} devices  {time.process_time() - start:5.1f} s  {answer.best.candidate}")


if __name__ == "__main__":
    main()
