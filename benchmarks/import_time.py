"""What `import axonml_jax` costs beside `import jax, flax.nnx, optax`, in fresh processes that take turns.

Run: python benchmarks/import_time.py --pairs 20
Shows: the median seconds of both imports (interpreter start not counted) and their ratio with its 95% interval; bar 1.2.
"""

import argparse
import subprocess
import sys

import numpy as np
from paired import machine, ratio, verdict

IMPORTS = {"import axonml_jax": "axonml_jax", "import jax, flax.nnx, optax": "jax, flax.nnx, optax"}
BAR = 1.2


def seconds(modules: str) -> float:
    code = f"import time; start = time.perf_counter(); import {modules}; print(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="number of fresh processes of each kind")
    pairs = parser.parse_args().pairs
    times: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for round_ in range(-1, pairs):  # the first round fills the page cache and is not counted
        for name in list(IMPORTS)[:: 1 if round_ % 2 else -1]:
            spent = seconds(IMPORTS[name])
            if round_ >= 0:
                times[name].append(spent)
    print(machine("jax", "flax", "optax"))
    for name, values in times.items():
        print(f"{name}: median {np.median(values):.2f} s, fastest {min(values):.2f} s")
    ours, theirs = times.values()
    print(f"ratio of medians: {verdict(ratio(ours, theirs), BAR)}")


if __name__ == "__main__":
    main()
