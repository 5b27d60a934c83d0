"""Seeded mutants of the package: small faults written into its code, and whether the tests that CI takes see them.

    python benchmarks/truth/mutants.py record                 # which tests enter which functions: one run of CI's newest end
    python benchmarks/truth/mutants.py try --seed 1 --count 60 # draws, breaks a copy of the tree, runs the tests that get there

A mutant changes one place in one function: a comparison, an operator, a constant, a condition, an argument, a call that is
left out. Functions are drawn by their lines of code, places within them evenly; texts of messages, types and docstrings are
left alone. For every mutant the tests that enter its function are run, cheap ones first, until one fails. Prints a line per
mutant and appends it to `--records`; the exit status is the number of survivors. One is undecided where the seconds ended
first. Some mutants change nothing that anybody can see (a bound that no value reaches, an order of equals): they are survivors
too, and are judged by reading.

Python 3.12 or newer; needs what the tests need.
"""

import argparse
import ast
import collections
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REACHED = ROOT / "runs" / "reached.tsv"
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef
COMPARED = dict([
    *((ast.Lt, ast.LtE), (ast.LtE, ast.Lt), (ast.Gt, ast.GtE), (ast.GtE, ast.Gt), (ast.Eq, ast.NotEq), (ast.NotEq, ast.Eq)),
    *((ast.In, ast.NotIn), (ast.NotIn, ast.In), (ast.Is, ast.IsNot), (ast.IsNot, ast.Is)),
])  # fmt: skip
COMPUTED = dict([
    *((ast.Add, ast.Sub), (ast.Sub, ast.Add), (ast.Mult, ast.Div), (ast.Div, ast.Mult), (ast.FloorDiv, ast.Mult)),
    *((ast.Mod, ast.FloorDiv), (ast.BitOr, ast.BitAnd), (ast.BitAnd, ast.BitOr)),
])  # fmt: skip
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "sum": "max"}
QUIET = {"debug", "info", "warning", "warn", "log", "print", "note", "add_note", "error"}
"""Calls that tell somebody something: what they say is no fault that a test has to see."""


def places(function: ast.AST):
    """Places of a function that can be changed: (kind, node), those within messages, types and docstrings left out."""
    pending: list[ast.AST] = list(getattr(function, "body", ()))
    while pending:
        node = pending.pop()
        if isinstance(
            node, ast.Raise | ast.Assert | DEFINITIONS | ast.ClassDef | ast.JoinedStr | ast.Import | ast.ImportFrom
        ):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in QUIET:
            continue
        yield from ((kind, node) for kind in kinds(node))
        skipped = ("annotation", "returns")
        pending += [each for name, value in ast.iter_fields(node) if name not in skipped for each in nodes(value)]


def nodes(value) -> list[ast.AST]:
    """The nodes in a field of a node."""
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST)]


def kinds(node: ast.AST):
    """What can be changed at a node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        yield "comparison"
    if isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and not is_text(node.left) and not is_text(node.right):
        yield "operator"
    if isinstance(node, ast.BoolOp):
        yield "and, or"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "not, minus"
    if isinstance(node, ast.If | ast.IfExp):
        yield "condition"
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        yield "constant"
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in CALLED:
        yield "call"
    if isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg not in (None, "strict"):
        yield "argument"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call left out"


def is_text(node: ast.AST) -> bool:
    """Whether an operand is a text, so that `+` joins."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def changed(kind: str, node: ast.AST) -> ast.AST:
    """What stands in the place of a node."""
    if kind == "comparison":
        node.ops[0] = COMPARED[type(node.ops[0])]()
    elif kind == "operator":
        node.op = COMPUTED[type(node.op)]()
    elif kind == "and, or":
        node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    elif kind == "not, minus":
        return node.operand
    elif kind == "condition":
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif kind == "constant":
        node.value = (not node.value) if isinstance(node.value, bool) else node.value + 1
    elif kind == "call":
        node.func.id = CALLED[node.func.id]
    elif kind == "argument":
        node.keywords.pop()
    elif kind == "call left out":
        return ast.Pass()
    return node


def functions() -> list[tuple[str, str, ast.AST, ast.Module, str]]:
    """(file, qualified name, function, its module, text) of every function of the package."""
    found = []

    def inside(node, names, path, tree, text):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, DEFINITIONS | ast.ClassDef):
                qualified = [*names, child.name]
                if isinstance(child, DEFINITIONS):
                    found.append((path, ".".join(qualified), child, tree, text))
                inside(
                    child, [*qualified, "<locals>"] if isinstance(child, DEFINITIONS) else qualified, path, tree, text
                )
            else:
                inside(child, names, path, tree, text)

    for path in sorted((ROOT / "axonml_jax").rglob("*.py")):
        text = path.read_text("utf-8")
        inside(tree := ast.parse(text), [], path.relative_to(ROOT).as_posix(), tree, text)
    return found


def drawn(seed: int, number: int) -> dict:
    """The mutant of a number: its place, kind, the line before and after, and the changed text of its file."""
    draw, every = random.Random(f"{seed}/{number}"), functions()
    weights = [each[2].end_lineno - each[2].lineno for each in every]
    while True:
        path, name, function, _, text = draw.choices(every, weights)[0]
        if not (at := list(places(function))):
            continue
        kind, node = draw.choice(at)
        before = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
        was, new = (
            ast.unparse(node),
            ast.unparse(ast.fix_missing_locations(ast.copy_location(changed(kind, node), node))),
        )
        if was == new:
            continue
        source = replaced(text, before, f"({new})" if isinstance(node, ast.expr) else new)
        what = {"file": path, "function": name, "line": before[0], "kind": kind, "was": was[:160], "now": new[:160]}
        return {"seed": seed, "number": number, **what, "text": source}


def replaced(text: str, where: tuple[int, int, int, int], new: str) -> str:
    """The text with something else from one place to another; columns count bytes, as `ast` does."""
    first, last, start, stop = where
    lines = text.encode().splitlines(keepends=True)
    indent = b"\n" + b" " * start
    middle = lines[first - 1][:start] + new.encode().replace(b"\n", indent) + lines[last - 1][stop:]
    return b"".join([*lines[: first - 1], middle, *lines[last:]]).decode()


def reaching(mutant: dict, reached: Path) -> dict[str, float]:
    """Tests that enter a mutant's function, and the seconds that each took, those that cost least first."""
    seconds = dict(
        line.rsplit("\t", 1) for line in reached.with_name(reached.name + ".seconds").read_text().splitlines()
    )
    outer = mutant["function"].split(".<locals>")[0]
    tests = set()
    with open(reached, encoding="utf-8") as lines:
        for line in lines:
            test, path, function, _ = line.split("\t")
            if path == mutant["file"] and function.split(".<locals>")[0] == outer and test in seconds:
                tests.add(test)
    return {test: float(seconds[test]) for test in sorted(tests, key=lambda test: float(seconds[test]))}


def tried(mutant: dict, reached: Path, limit: float) -> dict:
    """The mutant with what became of it: the test that failed, "time" where they hang, or None; how many were left untried."""
    taken, start = reaching(mutant, reached), time.monotonic()
    tests = list(taken)
    record = {name: value for name, value in mutant.items() if name != "text"} | {
        "reached_by": len(tests),
        "killed_by": None,
    }
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", "site"))
        (copy / mutant["file"]).write_text(mutant["text"], "utf-8")
        size = 12
        while tests and time.monotonic() - start < limit:
            some, rest, size = tests[:size], tests[size:], size * 2
            failed = failing(some, copy, HANGS * sum(taken[test] for test in some) + STARTS)
            tests = rest
            if failed is not None:
                record["killed_by"] = failed
                break
        record["left"] = len(tests)
    return record | {"seconds": round(time.monotonic() - start, 1)}


HANGS, STARTS = 6, 120.0
"""Tests hang that take so many times as long as they did, and seconds to start."""


def failing(tests: list[str], copy: Path, seconds: float) -> str | None:
    """The first of the tests that fails on a copy of the tree, or "time" for one that does not end within so many seconds."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--no-header", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return "time"
    if process.returncode in (0, 5):
        return None
    lines = [line for line in out.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0][:200] if lines else f"status {process.returncode}: {out[-200:]}"


def record(reached: Path, more: list[str]) -> int:
    """Runs what CI takes on its newest end and writes which functions every test enters."""
    reached.parent.mkdir(parents=True, exist_ok=True)
    reached.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as start:
        # Not as a module: pytest imports it after itself, with its hook.
        reads = f"import runpy\nrunpy.run_path({str(Path(__file__).with_name('reached.py'))!r})\n"
        (Path(start) / "sitecustomize.py").write_text(reads)
        paths = os.pathsep.join([start, str(Path(__file__).parent), str(ROOT)])
        environment = {"AXONML_ROWS": "1", **os.environ, "AXONML_REACHED": str(reached), "PYTHONPATH": paths}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "reached"]
        return subprocess.run([*command, *more], cwd=ROOT, env=environment).returncode


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "try", "show"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=600.0, help="of tests for one mutant")
    parser.add_argument("--reached", type=Path, default=REACHED)
    parser.add_argument("--records", type=Path, default=ROOT / "runs" / "mutants.jsonl")
    options, more = parser.parse_known_args()
    if more and options.what != "record":
        parser.error(f"{more}: only a record passes more on to pytest")
    if options.what == "record":
        sys.exit(record(options.reached, more))
    fates: collections.Counter[str] = collections.Counter()
    for number in range(options.first, options.first + options.count):
        mutant = drawn(options.seed, number)
        label = "{number}: {file}:{line} {function}, {kind}: {was} -> {now}".format(**mutant)
        if options.what == "show":
            print(label)
            continue
        done = tried(mutant, options.reached, options.seconds)
        fate = "killed" if done["killed_by"] else "UNDECIDED" if done["left"] else "SURVIVED"
        fates[fate] += 1
        print(f"{fate} {label} ({done['reached_by']} tests, {done['seconds']} s)", flush=True)
        with open(options.records, "a", encoding="utf-8") as file:
            file.write(json.dumps(done) + "\n")
    if options.what == "try":
        print(f"{fates['killed']} of {fates.total()} killed, {fates['UNDECIDED']} undecided")
    sys.exit(fates["SURVIVED"])


if __name__ == "__main__":
    main()
