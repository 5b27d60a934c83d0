"""Random models, plans and bad inputs: each trains as on one device, or is refused by an error of the library that names it.

    python benchmarks/truth/random_plans.py --cases 2000 --seconds 480 [--only table option] [--first N] [--again wrong unclear]

A case is drawn by its number alone. Every second one is a model (NNX or Linen: the tests' small ones, and the library's
transformer), a mesh of simulated devices and a plan with its options, drawn without asking whether they go together; the others
would work but for one bad input. *Equal*: loss, metrics, gradients, parameters and state of two updates are those of one device
(`testing/equality.py`). *Refused*: a `ValueError` or `TypeError` raised by the library's own code that names what was given.
Anything else is a fault: another result, or another error. Records go to benchmarks/records/random_plans.jsonl, one line a
case; running again continues. Prints a line per fault and the table; --write puts it into docs/reliability.md.
"""

import argparse
import collections
import json
import random
import signal
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "benchmarks"), str(ROOT / "tests")]  # what all folders share

from drawn_mistakes import MISTAKES, mistaken
from drawn_plans import FAMILIES, drawn
from held_plans import hold, hold_diloco, words_of
from written_table import written

RECORDS = ROOT / "benchmarks" / "records" / "random_plans.jsonl"
TURNS = (
    "table", "option", "transformer", "key", "stages", "size", "transformer", "option", "diloco", "mesh", "experts", "key",
    "plain", "batch", "table", "loss", "transformer", "option", "layers", "state",
)  # fmt: skip
"""The families of cases, in turn."""
LIMIT = 120


class Slow(BaseException):
    """A case that takes longer than `LIMIT` seconds."""


def case_of(number: int, seed: int) -> dict[str, Any]:
    """What is tried: plain values."""
    family, draw = TURNS[number % len(TURNS)], random.Random(f"{seed}:{number}")
    return mistaken(family, draw) if family in MISTAKES else drawn(family, draw)


def start() -> Any:
    """Simulated devices, float64, compiling without LLVM's optimizations and once what is alike, as the tests do."""
    from axonml_jax.mesh.simulate import fake_devices

    fake_devices(8)
    import jax
    from shared_programs import share_programs

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_traceback_filtering", "off")
    warnings.simplefilter("ignore")
    return share_programs()


def attempt(case: dict[str, Any]) -> tuple[str, str]:
    """What came of it (equal, read, refused, late, wrong, unclear), and what was said."""
    reached = ["options"]
    try:
        signal.alarm(LIMIT)
        if case["family"] == "key":
            read(case)
            return "read", ""
        (hold_diloco if case["family"] == "diloco" else hold)(case, reached)
        return "equal", ""
    except AssertionError as error:
        ours = "differs from" in str(error) or "Not equal" in str(error)
        return ("wrong" if ours else "unclear"), _said(error)
    except (ValueError, TypeError) as error:
        return _judged(case, error, reached[-1]), _said(error)
    except (Exception, Slow) as error:
        return "unclear", _said(error)
    finally:
        signal.alarm(0)


def _judged(case: dict[str, Any], error: Exception, reached: str) -> str:
    """Whether an error is a refusal by name."""
    raised = traceback.extract_tb(error.__traceback__)[-1].filename
    words = case.get("says") or [*words_of(case)]
    named = any(str(word) in str(error) for word in words)
    if "axonml_jax/" not in raised or "/testing/" in raised or not named:
        return "unclear"
    return "late" if reached == "step" and "junk" not in case else "refused"


def _said(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"{type(error).__name__} at {at}: {str(error).replace(f'{ROOT}/', '')[:700]}"


def read(case: dict[str, Any]) -> None:
    """Read a configuration in which one key has this value."""
    from axonml_jax.config.config import read_config

    value = case["value"]
    text = value if isinstance(value, str) else json.dumps(value)
    read_config("train", [str(ROOT / "configs" / "quickstart.yaml"), f"--{case['junk'][1]}={text}"])


def known(path: Path, seed: int) -> dict[int, dict[str, Any]]:
    """The last record of every case."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {line["case"]: line for line in lines if line["seed"] == seed}


def table(records: dict[int, dict[str, Any]]) -> str:
    """What came of all cases, by family."""
    outcomes = ("equal", "refused", "late", "read", "wrong", "unclear")
    counts = collections.Counter((TURNS[number % len(TURNS)], line["outcome"]) for number, line in records.items())
    lines = ["| Family | " + " | ".join(outcomes) + " |", "| --- " * (len(outcomes) + 1) + "|"]
    for family in dict.fromkeys(TURNS):
        lines.append(f"| {family} | " + " | ".join(str(counts[family, each] or "") for each in outcomes) + " |")
    totals = collections.Counter(line["outcome"] for line in records.values())
    lines.append(f"| all {totals.total()} | " + " | ".join(f"{totals[each]}" for each in outcomes) + " |")
    return "\n".join(lines)


def main() -> int:
    """Go on with the cases that have no record yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so long")
    parser.add_argument("--only", nargs="*", choices=[*FAMILIES, *MISTAKES])
    parser.add_argument("--again", nargs="*", default=(), help="try cases of these outcomes again")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--show", action="store_true", help="print every case")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reliability.md, and try nothing")
    options = parser.parse_args()
    if options.write:
        written(ROOT / "docs" / "reliability.md", "random plans", table(known(options.records, options.seed)))
        return 0
    before, begun = known(options.records, options.seed), time.monotonic()
    numbers = [
        n for n in range(options.first, options.cases) if not options.only or TURNS[n % len(TURNS)] in options.only
    ]
    todo = [n for n in numbers if n not in before or before[n]["outcome"] in options.again]
    shared = start()
    signal.signal(signal.SIGALRM, partial(_too_slow))
    for number in todo:
        if time.monotonic() > begun + options.seconds:
            break
        case, at = case_of(number, options.seed), time.monotonic()
        beside = {"seed": options.seed, "case": number, "family": TURNS[number % len(TURNS)]}
        with options.records.open("a") as out:  # a case that ends the process has this line alone
            out.write(json.dumps(beside | {"outcome": "unclear", "said": "it ended the process", "given": case}) + "\n")
        end = options.records.stat().st_size
        outcome, said = attempt(case)
        line = beside | {
            "outcome": outcome,
            "said": said[:300],
            "given": case,
            "seconds": round(time.monotonic() - at, 1),
        }
        _replace_last(options.records, end, json.dumps(line))
        if options.show or outcome in ("wrong", "unclear"):
            print(f"{number} {outcome} {json.dumps(case)}\n      {said}", flush=True)
        shared.make_room()
    records = known(options.records, options.seed)
    print(table(records))
    return min(99, sum(line["outcome"] in ("wrong", "unclear") for line in records.values()))


def _replace_last(path: Path, end: int, line: str) -> None:
    """The last line of a file, which ends there, becomes another."""
    text = path.read_bytes()[:end]
    path.write_bytes(text[: text.rstrip(b"\n").rfind(b"\n") + 1] + line.encode() + b"\n")


def _too_slow(*_):
    raise Slow(f"it took over {LIMIT} s")


if __name__ == "__main__":
    sys.exit(main())
