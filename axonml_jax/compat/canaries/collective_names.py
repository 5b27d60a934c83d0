"""Canaries about collectives: what they are called in a traced program, their gradients, and how they are lowered."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from axonml_jax.compat.canaries.canary import Canary, expect
from axonml_jax.compat.canaries.on_two import AXIS, SPLIT, body_of, floats, names, on_two
from axonml_jax.compat.reductions import reduce_without_constraints
from axonml_jax.compat.stablehlo import parsed

KNOWN: dict[str, tuple[frozenset[str], Callable[[Any], Any]]] = {
    "a sum": (frozenset({"psum", "psum_invariant"}), lambda x: x + jax.lax.psum(x, AXIS)),
    "a maximum": (frozenset({"pmax"}), lambda x: x + jax.lax.pmax(x, AXIS)),
    "a minimum": (frozenset({"pmin"}), lambda x: x + jax.lax.pmin(x, AXIS)),
    "a gather": (frozenset({"all_gather"}), lambda x: jax.lax.all_gather(x, AXIS, tiled=True)),
    "a summed scatter": (frozenset({"reduce_scatter"}), lambda x: jax.lax.psum_scatter(x, AXIS, tiled=True)),
    "an exchange": (frozenset({"all_to_all"}), lambda x: jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True)),
    "a permute": (frozenset({"ppermute"}), lambda x: jax.lax.ppermute(x, AXIS, [(0, 1)])),
}
"""Names of the primitives that each collective may trace to, and how to trace one."""


def _named() -> None:
    for check_vma in (True, False):
        for what, (known, call) in KNOWN.items():
            found = body_of(on_two(call, SPLIT, check_vma=check_vma), floats(4))
            ours = [operation for operation in found if operation.name in known]
            expect(
                len(ours) == 1,
                f"with check_vma={check_vma} {what} traces to {names(found)}, not to one of {sorted(known)}",
            )
            expect(
                ours[0].mesh_axes == (AXIS,), f"{what} names the axes {ours[0].mesh_axes} in {sorted(ours[0].options)}"
            )


def _transposed() -> None:
    for check_vma in (True, False):
        grad = jax.grad(lambda w: jnp.sum(jnp.sin(jax.lax.all_gather(w, AXIS, tiled=True))))
        found = set(names(body_of(on_two(grad, SPLIT, check_vma=check_vma), floats(4)))) & {
            "reduce_scatter",
            *KNOWN["a sum"][0],
        }
        expect(found == {"reduce_scatter"}, f"with check_vma={check_vma} the gradient of a gather is a {sorted(found)}")


def _positions() -> None:
    mesh = AbstractMesh((2, 3), ("slow", "fast"), axis_types=(AxisType.Auto,) * 2)
    axes, spec = ("slow", "fast"), PartitionSpec(("slow", "fast"))
    mapped = jax.shard_map(lambda x: jax.lax.ppermute(x, axes, [(1, 3)]), mesh=mesh, in_specs=spec, out_specs=spec)
    text = jax.jit(mapped).trace(floats(6)).lower(lowering_platforms=("cpu",)).as_text()
    pairs = next((line for line in text.splitlines() if "collective_permute" in line), "no permute")
    expect("[[1, 3]]" in pairs, f"a permute from position 1 to 3 over two axes lowers to {pairs.strip()}")


def _lowered() -> None:
    mapped = on_two(lambda x: x + jax.lax.psum(x, AXIS), SPLIT, check_vma=False)
    module = parsed(jax.jit(mapped).trace(floats(4)).lower(lowering_platforms=("cpu",)).as_text())
    found: list[str] = []

    def walk(op: Any) -> None:
        found.append(op.name)
        if op.name == "stablehlo.all_reduce":
            groups = str(op.attributes["replica_groups"])
            expect(AXIS in groups or "x2x" in groups, f"a sum over two ranks is lowered with the groups {groups}")
        for region in op.regions:
            for block in region:
                for inner in block:
                    walk(inner.operation)

    walk(module.operation)
    expect("stablehlo.all_reduce" in found, f"a lowered sum over the ranks reads as {found}")


def _beside_the_partitioner() -> None:
    reduce_without_constraints()
    calls = {what: KNOWN[what][1] for what in ("a sum", "a maximum", "a minimum", "a summed scatter")}
    calls["an untiled scatter"] = lambda x: jax.lax.psum_scatter(x, AXIS)
    for what, call in calls.items():
        for check_vma in (True, False):
            left, written = (_constraints(call, platform, check_vma) for platform in ("cpu", "tpu"))
            expect(not left, f"{what} of bfloat16 beside an axis of the partitioner has {left} constraints on scalars")
            expect(
                bool(written), f"JAX lowers {what} without constraints now: compat/reductions.py is no longer needed"
            )


def _constraints(call: Callable[[Any], Any], platform: str, check_vma: bool) -> int:
    """How many sharding constraints on scalars a reduction beside an axis of the partitioner is lowered with."""
    mesh = AbstractMesh((2, 2), (AXIS, "other"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(call, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, axis_names={AXIS}, check_vma=check_vma)
    traced = jax.jit(mapped).trace(jax.ShapeDtypeStruct((4, 2), jnp.bfloat16))
    lines = traced.lower(lowering_platforms=(platform,)).as_text().splitlines()
    return sum("harding" in line and line.endswith(" tensor<bf16>") for line in lines)


def _loop_error() -> None:
    loop = lambda x: jax.lax.scan(lambda c, each: (c + each, None), jnp.zeros(()), x)[0][None]
    try:
        jax.make_jaxpr(on_two(loop, SPLIT, check_vma=True))(floats(4))
    except TypeError as error:
        said = {word for word in ("carry", "varying") if word in str(error)}
        expect(len(said) == 2, f"JAX's refusal says nothing of carry or varying: {error}")
    else:
        expect(False, "JAX no longer refuses a loop that starts from plain zeros and carries what varies")


CANARIES = (
    Canary(
        "names of collectives",
        "Collectives trace to primitives of known names that say their axes as axes or axis_name, in both modes.",
        "The ledger and the plans built on it do not see what is sent.",
        _named,
    ),
    Canary(
        "the gradient of a gather",
        "all_gather transposes to a reduce-scatter, with check_vma on and off.",
        "Whole gradients are reduced on every rank: right results, and ZeRO-2's memory and half its traffic lost.",
        _transposed,
    ),
    Canary(
        "positions over two axes",
        "ppermute over several axes counts positions in the mesh's order, the first axis slowest.",
        "Rings send to the wrong rank.",
        _positions,
    ),
    Canary(
        "lowered collectives",
        "StableHLO can be parsed by jax.interpreters.mlir, and names collectives and their groups.",
        "Holding the ledger against the lowered program finds nothing to compare.",
        _lowered,
    ),
    Canary(
        "words of a refused loop",
        "JAX's TypeError about a loop whose carry changes its varying type says carry and varying.",
        "Users see JAX's own error instead of the loop's line and the remedy.",
        _loop_error,
    ),
    Canary(
        "reductions beside the partitioner",
        "JAX constrains the sharding of the two scalars that are reduced beside axes that XLA partitions; it can be taken out.",
        "XLA:CPU ends the process at sums of bfloat16, or JAX's rules are replaced for nothing.",
        _beside_the_partitioner,
    ),
)
