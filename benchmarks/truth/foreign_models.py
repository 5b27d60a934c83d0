"""Models that others publish, unmodified, each under every plan, held to plain `jax.jit` on one device.

    pip install 'axonml-jax[foreign]'
    python benchmarks/truth/foreign_models.py --done done.jsonl [--only BERT ...] [--plans FSDP ...] [--seconds 600]
        [--out FILE.md]

Three AdamW steps from random weights; losses, gradient norms, all parameters and buffers are compared. A cell is "equal", or
"refused" by the library with its reason. `--done` keeps what has been run, so that the table can be run in pieces: cells that
the file holds are not run again (`--again` runs those anew that were neither equal nor refused). The exit status is 1 when a
cell differs or crashes. The table is docs/maintainers/foreign-models.md.
"""

import argparse
import collections
import json
import os
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

PYTHON = ".".join(map(str, sys.version_info[:2]))


def start():
    """Simulated devices, float64 allowed, programs compiled without LLVM's optimizations as the tests do.

    By default XLA leaves out roundings to bf16, and in other places of one program than of another, so that near ties, such as
    between two experts, fall differently. Here it rounds wherever a program says so, on one device and on four.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false"
    warnings.simplefilter("ignore")
    import axonml_jax as ax

    ax.fake_devices(4)
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_traceback_filtering", "off")  # a crash inside JAX is no refusal of the library


def remembered(file):
    """What earlier runs found, per Python: by (family, plan, variant)."""
    known = collections.defaultdict(dict)
    if file is not None and file.exists():
        for line in map(json.loads, file.read_text("utf-8").splitlines()):
            known[line["python"]][line["family"], line["plan"], line["variant"]] = line
    return known


def run_family(family, todo, file, deadline, cells):
    """Runs cells of one family, writing each down; yields what was found."""
    cache = {}
    for plan, variant in todo:
        begun = time.time()
        if begun > deadline:
            return
        result, why = cells.run(family, plan, variant, cache)
        line = {"family": family.name, "plan": plan, "variant": variant, "result": result, "why": why}
        line |= {"seconds": round(time.time() - begun, 1), "python": PYTHON}
        if file is not None:
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
        print(f"{family.name} | {plan} | {variant}: {result} {why} ({line['seconds']} s)", flush=True)
        yield line


def main():
    start()
    from foreign import FAMILIES, cells, table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[family.name for family in FAMILIES], help="families")
    parser.add_argument("--plans", nargs="*", default=cells.PLANS, choices=cells.PLANS)
    parser.add_argument("--variants", nargs="*", default=cells.VARIANTS, choices=cells.VARIANTS)
    parser.add_argument("--done", type=Path, help="a JSON line per cell: read first, added to")
    parser.add_argument("--again", action="store_true", help="run again what differed or crashed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no cell after this long")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    args = parser.parse_args()
    by_name = {family.name: family for family in FAMILIES}
    families = [by_name[name] for name in args.only or by_name]
    found, deadline = remembered(args.done), time.time() + args.seconds
    known = found[PYTHON]
    settled = ("equal", "refused") if args.again else ("equal", "refused", "differs", "crash")
    for family in families:
        cells_of = [(plan, variant) for plan in args.plans for variant in args.variants]
        todo = [(p, v) for p, v in cells_of if known.get((family.name, p, v), {}).get("result") not in settled]
        for line in run_family(family, todo, args.done, deadline, cells):
            known[line["family"], line["plan"], line["variant"]] = line
    text = table.markdown(FAMILIES, found)
    print(text)
    if args.out:
        args.out.write_text(text, "utf-8")
    sys.exit(any(line["result"] in ("differs", "crash") for line in known.values()))


if __name__ == "__main__":
    main()
