"""Canaries about varying types (`varying_types.py`), with which collectives and pipelines decide what to sum and to pack."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from axonml_jax.compat.around import manual_axes
from axonml_jax.compat.canaries.canary import Canary, expect
from axonml_jax.compat.canaries.on_two import AXIS, SPLIT, WHOLE, body_of, floats, names, on_two
from axonml_jax.compat.varying_types import CASTS, cast_to_varying, varying_axes


def _seen(check_vma: bool) -> dict[str, frozenset[str]]:
    """What is said of values inside `shard_map`."""
    seen: dict[str, frozenset[str]] = {}

    def look(x: Any, w: Any) -> Any:
        seen["a rank's part"], seen["a whole array"] = varying_axes(x), varying_axes(w)
        seen["a sum over the ranks"] = varying_axes(jax.lax.psum(x, AXIS))
        seen["a rank's index"] = varying_axes(jax.lax.axis_index(AXIS))
        seen["their product"] = varying_axes(x * w)
        return x

    jax.make_jaxpr(on_two(look, SPLIT, WHOLE, check_vma=check_vma))(floats(2), floats(1))
    return seen


def _typed() -> None:
    seen = _seen(check_vma=True)
    varying = {name for name, axes in seen.items() if axes == {AXIS}}
    whole = {name for name, axes in seen.items() if not axes}
    expect(
        varying == {"a rank's part", "a rank's index", "their product"} and len(varying | whole) == len(seen),
        f"with check_vma=True these vary: {seen}",
    )


def _untyped() -> None:
    seen = _seen(check_vma=False)
    expect(not any(seen.values()), f"with check_vma=False these vary: {seen}")


def _casts() -> None:
    def pull(w: Any, x: Any) -> Any:
        cast = cast_to_varying(w, (AXIS,))
        expect(varying_axes(cast) == {AXIS}, f"a value cast to varying varies over {set(varying_axes(cast))}")
        inside = jax.grad(lambda cast: jnp.sum(cast * x))(cast)  # this rank's own
        outside = jax.grad(lambda w: jnp.sum(cast_to_varying(w, (AXIS,)) * x))(w)  # the sum over the ranks
        expect(varying_axes(inside) == {AXIS}, "the gradient of a cast value is the same on every rank")
        expect(not varying_axes(outside), "the gradient of what was cast differs from rank to rank")
        return inside + outside

    found = names(body_of(on_two(pull, WHOLE, SPLIT, check_vma=True), floats(1), floats(2)))
    expect(bool(CASTS & set(found)), f"a cast is none of {sorted(CASTS)}: {found}")
    sums = [name for name in found if name.startswith("psum")]
    expect(len(sums) == 1, f"one cast inside a gradient makes {len(sums)} sums over the ranks: {found}")


def _manual() -> None:
    mesh, seen = AbstractMesh((2, 2), (AXIS, "other"), axis_types=(AxisType.Auto,) * 2), []

    def look(x: Any) -> Any:
        seen.append(manual_axes())
        jax.vmap(lambda x: seen.append(manual_axes()) or x, axis_name="mapped")(x)
        return x

    partly = jax.shard_map(look, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, axis_names={AXIS}, check_vma=False)
    jax.make_jaxpr(jax.jit(partly))(floats(2))
    expect(
        set(seen) == {frozenset({AXIS})}, f"inside shard_map over {AXIS} alone, and vmap, the manual axes are {seen}"
    )
    expect(not manual_axes(), f"outside they are {set(manual_axes())}")


TYPED = Canary(
    "varying types are told",
    "With check_vma=True an abstract value says over which mesh axes it varies: a rank's part does, a sum does not.",
    "Everything reads as the same on every rank: gradients are summed twice or never, pipelines join what must stay apart.",
    _typed,
)
UNTYPED = Canary(
    "without check_vma nothing varies",
    "With check_vma=False no value has a varying type.",
    "Casts and sums are added where the user's gradients are right without them.",
    _untyped,
)
CANARIES = (
    TYPED,
    UNTYPED,
    Canary(
        "casts to varying",
        "A cast to varying changes the type and moves nothing; the gradient of what was cast is summed over the axes once.",
        "Gradients are summed in every microbatch, twice, or not at all.",
        _casts,
    ),
    Canary(
        "manual axes",
        "The mesh around traced code says which of its axes shard_map has made manual, without those of vmap.",
        "Layers compute as if they were not split, or look for ranks that are not there.",
        _manual,
    ),
)


def require_types(check_vma: bool) -> None:
    """Try the canary of a mode once per process, before types are relied on; it takes some thousandths of a second.

    Where a mesh surrounds this code it waits for a call where none does: JAX takes no second mesh there.

    Raises:
      CanaryError: when the JAX that is installed tells varying types in another way.
    """
    if jax.sharding.get_abstract_mesh().empty:
        _once(check_vma)


@functools.cache
def _once(check_vma: bool) -> None:
    (TYPED if check_vma else UNTYPED).check()
