"""What `import axonml_jax` costs after `import jax, flax.nnx, optax`, in fresh processes that take turns.

Run: python benchmarks/speed/import_time.py --pairs 20
Shows: the median seconds of the imports (interpreter start not counted) and their ratios with 95% intervals, bar 1.2; the
same with the first use of `ax.DDP`, as names are imported when they are first used.
"""

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import numpy as np
from paired import machine, ratio, verdict

IMPORTS = {
    "import jax, flax.nnx, optax": "import jax, flax.nnx, optax",
    "and axonml_jax": "import jax, flax.nnx, optax, axonml_jax",
    "and its DDP": "import jax, flax.nnx, optax, axonml_jax; axonml_jax.DDP",
}
BAR = 1.2


def seconds(statements: str) -> float:
    code = f"import time; start = time.perf_counter(); {statements}; print(time.perf_counter() - start)"
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
    bare, package, used = times.values()
    print(f"ratio of medians: {verdict(ratio(package, bare), BAR)}; with its DDP: {ratio(used, bare)}")


if __name__ == "__main__":
    main()
