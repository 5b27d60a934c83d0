"""Scripts as users of JAX and Flax have them: idioms x plans, each equal to the user's own loop on one device, or refused.

    python benchmarks/truth/idioms.py [--idioms WORDS ...] [--plans WORDS ...] [--write] [--page]

Takes idioms and plans of tests/user_scripts.py. `--write` keeps the cells of this JAX in benchmarks/records/idioms.jsonl (all
others stay, so that it can be run in pieces, on both ends of the range); `--page` puts the record into
docs/maintainers/idioms.md and runs nothing. Exits with 1 if any cell is neither equal nor refused. On one core eight minutes.
"""

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "records" / "idioms.jsonl"
PAGE = ROOT / "docs" / "maintainers" / "idioms.md"
BEGIN, END = "<!-- the table begins -->\n", "<!-- the table ends -->\n"


def start():
    """Simulated devices, compiling without LLVM's optimizations as the tests do."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(ROOT / "tests"))
    warnings.simplefilter("ignore")
    from axonml_jax.mesh.simulate import fake_devices

    fake_devices(8)
    import jax

    jax.config.update("jax_disable_most_optimizations", True)


def cell(idiom, plan):
    """ "equal", "refused: why", or what went wrong."""
    from user_scripts import compared

    try:
        return compared(idiom, plan)
    except Exception as error:
        return f"WRONG: {type(error).__name__}: {error}"


def recorded():
    """(jax, idiom, plan) -> what became of it."""
    lines = RECORD.read_text("utf-8").splitlines() if RECORD.exists() else []
    return {(row["jax"], row["idiom"], row["plan"]): row["result"] for row in map(json.loads, lines)}


def table(cells):
    """Markdown: a row for every idiom, a column for every plan; a cell says what each JAX made of it."""
    versions, plans = sorted({key[0] for key in cells}), list(dict.fromkeys(key[2] for key in cells))
    said = lambda text: (
        {"equal": text, None: "not tried"}.get(text) or ("refused" if text.startswith("refused") else "WRONG")
    )
    head = (
        f"Each cell: jax {' / '.join(versions)}.\n\n| idiom | "
        + " | ".join(plans)
        + " |\n"
        + "| --- " * (len(plans) + 1)
    )
    rows, why = [], {}
    for idiom in dict.fromkeys(key[1] for key in cells):
        found = [[cells.get((version, idiom, plan)) for version in versions] for plan in plans]
        rows.append(f"| {idiom} | " + " | ".join(_joined(list(map(said, each))) for each in found) + " |")
        texts = [text for each in found for text in each if text and text != "equal"]
        why |= {" ".join(text.split()).replace("|", "\\|")[:230]: idiom for text in texts}
    notes = "".join(f"- {idiom}: {text}\n" for text, idiom in why.items())
    return f"{head}|\n" + "\n".join(rows) + "\n\nWhat is said where a cell is refused:\n\n" + (notes or "- nothing\n")


def _joined(said):
    return said[0] if len(set(said)) == 1 else " / ".join(said)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--idioms", nargs="+", default=[""])
    parser.add_argument("--plans", nargs="+", default=[""])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    if args.page:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + table(recorded()) + END + rest.partition(END)[2], "utf-8")
        return 0
    start()
    import jax
    from user_scripts import IDIOMS, PLANS

    wrong = 0
    for idiom in (name for name in IDIOMS if any(word in name for word in args.idioms)):
        for plan in (name for name in PLANS if any(word in name for word in args.plans)):
            result = cell(idiom, plan)
            wrong += result.startswith("WRONG")
            print(f"{idiom} | {plan} | {result[:200]}", flush=True)
            if args.write:  # beside others that write
                cells = recorded() | {(jax.__version__, idiom, plan): result}
                rows = [{"jax": key[0], "idiom": key[1], "plan": key[2], "result": text} for key, text in cells.items()]
                RECORD.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
