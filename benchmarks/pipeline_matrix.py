"""Pipelines held to the single-device run over a pairwise cover of every option, or the whole product.

    python benchmarks/pipeline_matrix.py [--whole] [--every 1]

CI runs the dozen rows of tests/test_pipeline_training.py, half at each end of the JAX range; this runs every pair of options.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import axonml_jax as ax

ax.fake_devices(8)

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)

from plan_tables import name, pairwise, product
from test_pipeline_training import TABLE, check, possible

parser = argparse.ArgumentParser()
parser.add_argument("--whole", action="store_true")
parser.add_argument("--every", type=int, default=1)
options = parser.parse_args()
rows = [row for row in (product(TABLE) if options.whole else pairwise(TABLE)) if possible(row)][:: options.every]
failed = []
for i, row in enumerate(rows, 1):
    start = time.process_time()
    try:
        check(row)
        said = "equal"
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:200]}"
        failed.append(name(row))
    print(f"{i}/{len(rows)} {name(row)}: {said} ({time.process_time() - start:.0f} s)", flush=True)
print(f"{len(rows) - len(failed)} of {len(rows)} equal one device" + "".join(f"\n  {row}" for row in failed))
assert not failed
