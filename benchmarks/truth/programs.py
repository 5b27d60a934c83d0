"""Records what 40 plans compile to, and compares the code of today with a record: the net under changes of the engine.

    python benchmarks/truth/programs.py --write FILE [--plans PATTERN]     # add or replace rows of a record
    python benchmarks/truth/programs.py --compare FILE [--plans PATTERN]   # exit status 1 where layouts or collectives differ

Per plan of `program_plans.py`: how every argument of the step rests (shape, dtype, sharding, memory kind, donated); the
multiset of collectives (kind, bytes, groups of ranks, loops); FLOPs and temporaries as XLA:CPU counts them; the structural hash
and the operations of the lowered step (`program_reading.py`); and the bits of loss and parameters after two float32 steps,
which are compared where the record was taken on a processor of this kind. Rows that a record holds already are not taken again
by `--write` without `--again`, so that a record can be made in pieces.
"""

import argparse
import hashlib
import json
import platform
import re
import sys
import time
from pathlib import Path

import axonml_jax as ax

ax.fake_devices(8)

import jax
import numpy as np
from program_plans import PLANS
from program_reading import differences, read_program


def record(plan):
    """Everything that is recorded of one plan."""
    trainer, batch = plan.make(), plan.batch(plan.rows)
    lowered = trainer.trace(batch).lower()
    compiled = lowered.compile()
    analysis = compiled.cost_analysis()
    analysis = analysis if isinstance(analysis, dict) else analysis[0]
    taken = {
        "arguments": arguments(lowered, compiled),
        **read_program(lowered),
        "flops": int(analysis.get("flops", 0)),
        "temporaries": int(compiled.memory_analysis().temp_size_in_bytes),
    }
    losses = [np.asarray(trainer.step(batch)["loss"]) for _ in range(2)]
    return taken | {"bits": bits({"losses": losses, **trainer.model.state_dict()}), "processor": processor()}


def arguments(lowered, compiled):
    """Argument path -> how it rests."""
    by_path = lambda tree: {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    places = by_path(compiled.input_shardings)
    return {
        path: f"{info._aval.str_short()} "
        + (f"{spec(places[path])} {places[path].memory_kind}" if path in places else "unused")
        + (" donated" if info.donated else "")
        for path, info in by_path(lowered.args_info).items()
    }


def spec(place):
    """The axes of degree above 1 that split each dim."""
    sizes = place.mesh.shape
    split = [
        tuple(a for a in ((entry,) if isinstance(entry, str) else entry or ()) if sizes[a] > 1) for entry in place.spec
    ]
    while split and not split[-1]:
        split.pop()
    return "(" + " ".join("*".join(axes) or "-" for axes in split) + ")"


def processor():
    """The kind of this machine's processor: XLA:CPU chooses instructions and blocks by it, and so the order of sums."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text("utf-8").split("\n\n")[0].splitlines() if file.exists() else [platform.processor()]
    fixed = [line for line in lines if re.match("vendor_id|cpu family|model|stepping|flags|cache size", line)]
    return hashlib.blake2b("\n".join(fixed or lines).encode(), digest_size=6).hexdigest()


def bits(tree):
    """A hash of every bit of a tree's leaves, by path."""
    digest = hashlib.blake2b(digest_size=12)
    for path, leaf in sorted(
        (jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ):
        array = np.asarray(leaf)
        digest.update(f"{path} {array.shape} {array.dtype}".encode() + array.tobytes())
    return digest.hexdigest()


STRICT = ("arguments", "collectives")
"""What must stay; other differences are for the commit that makes them to explain."""


def compare(name, before, after):
    """Lines about one plan, and whether what must stay stayed."""
    lines = []
    for key in ("arguments", "collectives", "operations"):
        found = differences(before[key], after[key])
        lines += [f"  {key}: {what}: {old} -> {new}" for what, (old, new) in found.items()]
    alike = before.get("processor") == after["processor"]
    for key in ("flops", "temporaries", "hash", *["bits"] * alike):
        if before[key] != after[key]:
            lines.append(f"  {key}: {before[key]} -> {after[key]}")
    print(f"{name}: {'the same' if not lines else 'differs'}", *lines, sep="\n", flush=True)
    return all(before[key] == after[key] for key in STRICT)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path)
    action.add_argument("--compare", type=Path)
    parser.add_argument("--plans", default="", help="a regular expression: only plans whose names it finds")
    parser.add_argument("--again", action="store_true", help="with --write: take rows anew that the record holds")
    args = parser.parse_args()
    file = args.write or args.compare
    held = (
        json.loads(file.read_text("utf-8")) if args.compare or file.exists() else {"jax": jax.__version__, "plans": {}}
    )
    if held["jax"] != jax.__version__:
        sys.exit(
            f"{file} was recorded with jax {held['jax']}, and this is jax {jax.__version__}: programs of two versions differ"
        )
    same = True
    for name, plan in PLANS.items():
        known = name in held["plans"]
        if not re.search(args.plans, name) or (args.write and known and not args.again):
            continue
        begun = time.process_time()
        taken = record(plan)
        if args.write:
            held["plans"][name] = taken
            ordered = held | {"plans": {each: held["plans"][each] for each in PLANS if each in held["plans"]}}
            file.write_text(json.dumps(ordered, indent=0, separators=(",", ":")) + "\n", "utf-8")
            print(f"{name}: {time.process_time() - begun:.1f} s", flush=True)
        elif known:
            same &= compare(name, held["plans"][name], taken)
        else:
            print(f"{name}: not in the record")
    sys.exit(not same)


if __name__ == "__main__":
    main()
