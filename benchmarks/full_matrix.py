"""Every DDP plan of the tables in tests/plan_tables.py x every model, each held to the single-device run.

    python benchmarks/full_matrix.py [--jobs 2] [--every 1] [--out docs/full_matrix.md]

CI runs a pairwise cover of the same tables; this runs the whole product and writes the count per option value.
"""

import argparse
import collections
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"


def rows():
    """The whole product, without typed mode for models whose scans start from plain zeros."""
    from plan_models import CASES
    from plan_tables import DDP, product

    table = product(DDP | {"case": list(CASES)})
    return [row for row in table if CASES[row["case"]].typed or not row["check_vma"]]


def start():
    """One worker: simulated devices, float64, one thread for compiling."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(TESTS))
    from axonml_jax.mesh.fake_devices import fake_devices

    fake_devices(8)
    import jax

    jax.config.update("jax_enable_x64", True)


def check_row(row):
    """None when the plan equals one device, else the first lines of what differs."""
    from test_ddp_equality import check

    try:
        check(row)
        return row, None
    except Exception as error:
        return row, f"{type(error).__name__}: {str(error)[:300]}"


def summary(results, seconds):
    """A Markdown table: per option value how many plans were run and how many equal one device."""
    import jax

    bad = [(row, error) for row, error in results if error]
    equal = len(results) - len(bad)
    lines = [f"{len(results)} plans, {equal} equal the single-device run (jax {jax.__version__}, {seconds:.0f} s)."]
    lines += ["", "| option | value | plans | equal |", "| --- | --- | --- | --- |"]
    counts = collections.Counter((name, str(value)) for row, _ in results for name, value in row.items())
    wrong = collections.Counter((name, str(value)) for row, _ in bad for name, value in row.items())
    lines += [f"| {name} | {value} | {n} | {n - wrong[name, value]} |" for (name, value), n in counts.items()]
    return "\n".join(lines + [f"\n- {row}: {error}" for row, error in bad])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="take every n-th plan")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    start()
    todo = rows()
    random.Random(0).shuffle(todo)  # so that a part of it is a fair sample
    todo, begun, results = todo[:: args.every], time.time(), []
    with multiprocessing.get_context("spawn").Pool(args.jobs, start, maxtasksperchild=60) as pool:
        for result in pool.imap_unordered(check_row, todo):
            results.append(result)
            if result[1] or len(results) % 50 == 0:
                print(f"{len(results)}/{len(todo)}", result[0] if result[1] else "", result[1] or "", flush=True)
            if time.time() - begun > args.seconds:
                break
    text = summary(results, time.time() - begun)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    sys.exit(any(error for _, error in results))


if __name__ == "__main__":
    main()
