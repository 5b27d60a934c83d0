"""Every plan of a table in tests/ x every model, each held to the single-device run.

    python benchmarks/truth/full_matrix.py [--table ddp] [--jobs 2] [--every 1] [--done FILE] [--out FILE] [--write PAGE.md]

CI runs a pairwise cover of the same tables, of pipelines a dozen rows; this runs the whole product of DDP's, of FSDP's options
the product of those that its guide names, with the others drawn per plan, and of pipelines a pairwise cover (drawn by --seed).
Of experts (`matrix_experts.py`) it is the product of routers, ways to travel and all meshes of up to 8 devices with an axis
`expert`, with other options drawn per plan; "auxiliary" holds the gradients of the routers' own losses alone. Of sequences that
are split (`matrix_context.py`) "attention" is the product of the table in `tests/test_context_attention.py`, and "context" that
of methods, orders, models and meshes. It writes how many plans of each value were equal. `--done` keeps what has been run, so
that a product of hours can be run in pieces: plans that the file holds are not run again and count. `--write` puts the table in
its place in docs/maintainers/full-matrix.md; with `--seconds 0` of what the file holds alone.

What a plan costs is XLA's compiler, which asks a price per kernel. So programs that are alike are compiled once in a worker
(`tests/shared_programs.py`), plans of one model share its oracle, and rows of "attention" that compute one thing are one
program, in which XLA compiles a kernel once however often it stands there. What is compared, and how closely, is the same.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share


TESTS = Path(__file__).resolve().parents[2] / "tests"
SHARED = None
"""The worker's programs (`tests/shared_programs.py`)."""


def start():
    """One worker: simulated devices, float64, compiling as the tests do: alike programs once, without LLVM's optimizations."""
    global SHARED
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Where XLA leaves out roundings to bf16 it does so in other places of another program, and near ties fall differently.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false"
    sys.path[:0] = [str(TESTS), str(Path(__file__).parent)]
    from axonml_jax.mesh.simulate import fake_devices

    fake_devices(8)
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    from shared_programs import share_programs

    SHARED = share_programs()


def remember_runs():
    """Plans with one oracle run it once: Oracle.run returns what it returned to the plan before."""
    from axonml_jax.testing import equality
    from axonml_jax.testing.equality import Oracle

    known = {}

    class Remembering(Oracle):
        def run(self, variables, batches, key, first_shard=0):
            which = (self.parts, len(batches), first_shard)
            if which not in known:
                known[which] = super().run(variables, batches, key, first_shard)
            return known[which]

    equality.Oracle = Remembering


def check_group(given):
    """Per plan of those with one oracle: None where it equals one device, else the first lines of what differs."""
    import jax
    from matrix_tables import table

    name, group = given
    remember_runs()
    found = checked(table(name), group)
    jax.clear_caches()
    if SHARED is not None:
        SHARED.make_room()
    return found


def checked(chosen, group):
    """In one program where the table has one for plans of one oracle; what fails there, and all else, plan by plan."""
    together = None
    if chosen.together is not None:
        try:
            chosen.together(group)
            return [(row, None) for row in group]
        except Exception as error:
            together = f"only in one program: {said(error)}"
    found = []
    for row in group:
        try:
            chosen.check(row)
            found.append((row, None))
        except Exception as error:
            found.append((row, said(error)))
    alone = any(error for _, error in found)
    return found if alone else [(row, together) for row in group]


def said(error):
    return f"{type(error).__name__}: {str(error)[:300]}"


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


def summary(total, results):
    """How many plans were run and how many equal one device, over which options, and of which values some do not."""
    bad = [(row, error) for row, error in results if error]
    ran = "have been run, in a drawn order" if len(results) < total else "have been run"
    lines = [f"Of {total:,} plans {len(results):,} {ran}; {len(results) - len(bad):,} equal."]
    said = []
    options = sorted({name for row, _ in results for name in row})
    for name in options:
        ran = collections.Counter(str(row.get(name, 1)) for row, _ in results)
        wrong = collections.Counter(str(row.get(name, 1)) for row, _ in bad)
        values = [f"{value}: {n - wrong[value]} of {n}" for value, n in sorted(ran.items()) if wrong[value]]
        said.append(f"{name} ({', '.join(values)})" if values else name)
    lines += ["", f"Over {', '.join(said)}."]
    return "\n".join(lines + [f"\n- {row}: {error}" for row, error in bad])


def arguments():
    from matrix_tables import TABLES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=TABLES, default="ddp")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="take every n-th oracle and the plans held to it")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="of what is left the I-th of N parts")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn, and of the order")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; 0: run none")
    parser.add_argument("--done", type=Path, help="a JSON line per plan: read first, added to")
    parser.add_argument("--out", type=Path, help="append the table to this file")
    parser.add_argument("--write", type=Path, help="put the table between its marks in this page")
    return parser.parse_args()


def main():
    from matrix_tables import table
    from written_table import written

    args = arguments()
    start()
    groups, chosen = collections.defaultdict(list), table(args.table)
    for row in chosen.rows(args.seed):
        groups[str(chosen.oracle(row))].append(row)
    todo = list(groups.values())
    random.Random(args.seed).shuffle(todo)  # so that a part of it is a fair sample
    todo, begun = todo[:: args.every], time.time()
    total, results = sum(map(len, todo)), remembered(args.done, args.table)
    known = {as_text(row) for row, _ in results}
    todo = [left for group in todo if (left := [row for row in group if as_text(row) not in known])]
    part, parts = map(int, args.part.split("/"))
    todo = todo[part - 1 :: parts] if args.seconds > 0 else []
    print(f"{total} plans, {len(results)} of them known, {len(todo)} single-device runs", flush=True)
    with multiprocessing.get_context("spawn").Pool(args.jobs, start, maxtasksperchild=40) as pool:
        for found in pool.imap_unordered(check_group, [(args.table, group) for group in todo]):
            results += found
            remember(args.done, args.table, found)
            print(f"{len(results)}/{total}, {time.time() - begun:.0f} s", flush=True)
            for row, error in found:
                if error:
                    print(row, error, flush=True)
            if time.time() - begun > args.seconds:
                break
    text = summary(total, results)
    print(text)
    if args.write:
        written(args.write, args.table, text)
    if args.out:
        with args.out.open("a") as file:
            file.write(f"{args.table}: {text}\n\n")
    sys.exit(any(error for _, error in results))


if __name__ == "__main__":
    main()
