"""Optimizers as people write them x DDP, FSDP and pipelines: parameters after three steps against one device.

    python benchmarks/truth/optax_setups.py [--plans DDP FSDP ...] [--only WORDS ...] [--done FILE] [--write]

Takes the setups, the model (odd shapes, scalar parameters, one called like a hyperparameter) and the plans of
tests/optax_setups.py, in float64 and with the library's tolerances. Every cell is equal, or refused with the reason; where one
is refused for shards of parameters, `update="whole"` is held to one device in its place. `--write` puts the table into
docs/maintainers/optimizers.md; `--done` keeps cells, so that it can be run in pieces. Exits with 1 if any cell is neither equal
nor refused. On one core about ten minutes.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "maintainers" / "optimizers.md"
SAID = 160  # characters of a refusal on the page
BEGIN, END = "<!-- the table begins -->\n", "<!-- the table ends -->\n"


def start():
    """Simulated devices, float64, compiling without LLVM's optimizations as the tests do."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(ROOT / "tests"))
    from axonml_jax.mesh.simulate import fake_devices

    fake_devices(8)
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)


def compared(wanted, plan, make, **options):
    """ "equal", "DIFFERENT", or why a plan does not take an optimizer."""
    from optax_setups import under

    from axonml_jax.testing.equality import assert_trees_close

    try:
        assert_trees_close(under(plan, make, **options), wanted, "parameters")
    except AssertionError as error:
        return f"DIFFERENT: {error}"
    except (TypeError, ValueError) as error:
        return f"refused: {error}"
    except Exception as error:  # what this table is there to find
        return f"CRASH: {type(error).__name__}: {error}"
    return "equal"


def cell(wanted, plan, make):
    """A cell of the table, and the reason if the plan refuses."""
    said = compared(wanted, plan, make)
    if not said.startswith("refused: ") or "does not act element by element" not in said:
        return said.split(":")[0] if said.startswith("refused") else said, said
    whole = compared(wanted, plan, make, update="whole")
    return ("refused; equal with `whole`" if whole == "equal" else whole), said


def table(plans, names, done):
    """For every setup its cells, (text, all of what was said) by plan; `done` is called after each."""
    from optax_setups import SETUPS, on_one_device

    for name in names:
        if set(plans) <= set(done.get(name, ())):
            continue
        begin = time.perf_counter()
        try:
            wanted = on_one_device(SETUPS[name])
        except Exception:  # L-BFGS and lookahead want more than gradients: nothing to compare with
            wanted = None
        cells = {plan: cell(wanted, plan, SETUPS[name]) for plan in plans}
        done[name] = done.get(name, {}) | cells
        print(row(name, cells), f" {time.perf_counter() - begin:.0f} s", flush=True)
        print(*(f"    {said}" for text, said in cells.values() if text != "equal"), sep="\n", flush=True)
        yield name


def row(name, cells):
    return f"| {name} | " + " | ".join(text for text, _ in cells.values()) + " |"


def page(plans, names, done):
    """The page of the documentation with this table in it."""
    head = [f"| setup | {' | '.join(plans)} |", "|---|" + "---|" * len(plans)]
    alike = [name for name in names if all(done[name][plan][0] == "equal" for plan in plans)]
    rows = [row(name, {plan: done[name][plan] for plan in plans}) for name in names if name not in alike]
    why = []
    for name in names:
        said = [said.removeprefix("refused: ") for text, said in done[name].values() if text.startswith("refused")]
        why += (
            [f"- **{name}**: {' '.join(said[0].split())[:SAID].replace('<', '&lt;').replace('|', '&#124;')} ..."]
            if said
            else []
        )
    equal = [f"Equal under all of {'; '.join(plans)}: {'; '.join(alike)}.", ""]
    body = "\n".join([*equal, *head, *rows, "", "How refusals begin (the first of each row):", "", *why, ""])
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + "\n" + body + "\n" + END + rest.split(END)[1]


def main():
    start()
    from optax_setups import PLANS, SETUPS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="*", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--only", nargs="*", help="setups whose names hold one of these words")
    parser.add_argument("--done", type=Path, help="a file that keeps cells; those it holds are not run again")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    names = [name for name in SETUPS if not given.only or any(word in name for word in given.only)]
    done = json.loads(given.done.read_text()) if given.done and given.done.exists() else {}
    for _ in table(given.plans, names, done):
        if given.done:
            given.done.write_text(json.dumps(done, indent=1))
    if given.write:
        PAGE.write_text(page(given.plans, names, done))
    texts = [done[name][plan][0] for name in names for plan in given.plans]
    sys.exit(0 if all(text == "equal" or text.startswith("refused") for text in texts) else 1)


if __name__ == "__main__":
    main()
