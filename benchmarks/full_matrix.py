"""Every plan of a table in tests/ x every model, each held to the single-device run.

    python benchmarks/full_matrix.py [--table ddp|fsdp|pipeline] [--jobs 2] [--every 1] [--done FILE] [--out FILE]

CI runs a pairwise cover of the same tables, of pipelines a dozen rows; this runs the whole product of DDP's, of FSDP's options
the product of those that its guide names, with the others drawn per plan, and of pipelines a pairwise cover (drawn by --seed).
It writes how many plans of each value were equal. `--done` keeps what has been run, so that a product of hours can be run in
pieces: plans that the file holds are not run again and count.
"""

import argparse
import collections
import json
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
ORACLE = ("case", "model", "schedule", "ranks", "microbatches", "mesh", "data", "fsdp", "accumulate", "max_grad_norm")
"""What the single-device run depends on: plans that agree in these share one."""
DRAWN = ("prefetch", "remat", "flat", "hops", "sync_strategy")
"""Options of FSDP whose product with the others would take days."""


def rows(table, seed):
    """The plans of a table, without typed mode for models whose scans start from plain zeros."""
    from fsdp_plans import FSDP, possible
    from plan_models import CASES
    from plan_tables import DDP, pairwise, product

    if table == "pipeline":
        from test_pipeline_training import TABLE
        from test_pipeline_training import possible as fits

        return [row for row in pairwise(TABLE, seed) if fits(row)]
    if table == "ddp":
        plans = product(DDP | {"case": list(CASES)})
        return [row for row in plans if CASES[row["case"]].typed or not row["check_vma"]]
    rng = random.Random(seed)
    plans = product({name: values for name, values in FSDP.items() if name not in DRAWN})
    return [row | {name: rng.choice(FSDP[name]) for name in DRAWN} for row in plans if possible(row)]


def oracle_key(row):
    return tuple(str(row.get(name)) for name in ORACLE)


def start():
    """One worker: simulated devices, float64, compiling without LLVM's optimizations as the tests do."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(TESTS))
    from axonml_jax.mesh.fake_devices import fake_devices

    fake_devices(8)
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)


def remember_runs():
    """Plans with one oracle run it once: Oracle.run returns what it returned to the plan before."""
    from axonml_jax.testing import equality
    from axonml_jax.testing.oracle import Oracle

    known = {}

    class Remembering(Oracle):
        def run(self, variables, batches, key, first_shard=0):
            which = (self.parts, len(batches), first_shard)
            if which not in known:
                known[which] = super().run(variables, batches, key, first_shard)
            return known[which]

    equality.Oracle = Remembering


def check_group(group):
    """Per plan of those with one oracle: None where it equals one device, else the first lines of what differs."""
    from fsdp_plans import check as check_fsdp
    from test_ddp_equality import check as check_ddp
    from test_pipeline_training import check as check_pipeline

    remember_runs()
    found = []
    for row in group:
        try:
            (check_fsdp if "stage" in row else check_pipeline if "schedule" in row else check_ddp)(row)
            found.append((row, None))
        except Exception as error:
            found.append((row, f"{type(error).__name__}: {str(error)[:300]}"))
    return found


def remembered(file, table):
    """What earlier runs found out about a table's plans."""
    if file is None or not file.exists():
        return []
    lines = map(json.loads, file.read_text("utf-8").splitlines())
    return [(line["plan"], line["error"]) for line in lines if line["table"] == table]


def remember(file, table, found):
    if file is not None:
        with file.open("a", encoding="utf-8") as out:
            out.writelines(as_text({"table": table, "plan": row, "error": error}) + "\n" for row, error in found)


def as_text(row):
    return json.dumps(row, default=str)


def summary(table, results, seconds):
    """A Markdown table: per option value how many plans were run and how many equal one device."""
    import jax

    bad = [(row, error) for row, error in results if error]
    equal = len(results) - len(bad)
    lines = [
        f"{table}: {len(results)} plans, {equal} equal the single-device run (jax {jax.__version__}, {seconds:.0f} s at last)."
    ]
    lines += ["", "| option | value | plans | equal |", "| --- | --- | --- | --- |"]
    counts = collections.Counter((name, str(value)) for row, _ in results for name, value in row.items())
    wrong = collections.Counter((name, str(value)) for row, _ in bad for name, value in row.items())
    lines += [f"| {name} | {value} | {n} | {n - wrong[name, value]} |" for (name, value), n in sorted(counts.items())]
    return "\n".join(lines + [f"\n- {row}: {error}" for row, error in bad])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=["ddp", "fsdp", "pipeline"], default="ddp")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="take every n-th oracle and the plans held to it")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn, and of the order")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--done", type=Path, help="a JSON line per plan: read first, added to")
    parser.add_argument("--out", type=Path, help="append the table to this file")
    args = parser.parse_args()
    start()
    groups = collections.defaultdict(list)
    for row in rows(args.table, args.seed):
        groups[oracle_key(row)].append(row)
    todo = list(groups.values())
    random.Random(args.seed).shuffle(todo)  # so that a part of it is a fair sample
    todo, begun = todo[:: args.every], time.time()
    total, results = sum(map(len, todo)), remembered(args.done, args.table)
    known = {as_text(row) for row, _ in results}
    todo = [left for group in todo if (left := [row for row in group if as_text(row) not in known])]
    print(f"{total} plans, {len(results)} of them known, {len(todo)} single-device runs", flush=True)
    with multiprocessing.get_context("spawn").Pool(args.jobs, start, maxtasksperchild=4) as pool:
        for found in pool.imap_unordered(check_group, todo):
            results += found
            remember(args.done, args.table, found)
            print(f"{len(results)}/{total}, {time.time() - begun:.0f} s", flush=True)
            for row, error in found:
                if error:
                    print(row, error, flush=True)
            if time.time() - begun > args.seconds:
                break
    text = summary(args.table, results, time.time() - begun)
    print(text)
    if args.out:
        with args.out.open("a") as file:
            file.write(text + "\n\n")
    sys.exit(any(error for _, error in results))


if __name__ == "__main__":
    main()
