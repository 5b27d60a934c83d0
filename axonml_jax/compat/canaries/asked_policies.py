"""Canaries about `checkpoint_policy.py`: what a backward does again."""

from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp

from axonml_jax.compat.canaries.canary import Canary, expect
from axonml_jax.compat.canaries.on_two import AXIS, SPLIT, WHOLE, floats, on_two
from axonml_jax.compat.checkpoint_policy import Saveable, SaveWhere

_EXPENSIVE = frozenset(
    ("dot_general", "reduce_sum", "gather", "random_bits", "gt", "slice", "dynamic_slice", "fft", "name", "sin")
)
_SUMS = frozenset(("psum", "psum_invariant"))


def _model(w: Any, x: Any) -> Any:
    y = jax.ad_checkpoint.checkpoint_name(jnp.sin(x @ w), "canary")
    y = jnp.where(y > 0, y, 2 * y) + jax.lax.psum(jnp.sum(y, axis=0), AXIS)
    y = y * jax.random.bits(jax.random.key(0), y.shape).astype(y.dtype) + jnp.abs(jnp.fft.fft(y))
    first = jnp.argmax(y[0])
    return (
        jnp.sum(y[:2] ** 2)
        + jnp.sum(jax.lax.dynamic_slice(y, (0, first), (1, 1)) ** 2)
        + jnp.sum(w[jnp.arange(2)] ** 2)
    )


def _asked() -> dict[str, Saveable]:
    """Everything a policy is asked about, by primitive."""
    asked: dict[str, Saveable] = {}

    def saves(result: Saveable) -> bool:
        return asked.setdefault(result.primitive, result) is not None

    loss = jax.checkpoint(_model, policy=SaveWhere(saves))
    grad = lambda w, x: jax.grad(loss)(w, x)
    jax.make_jaxpr(on_two(grad, WHOLE, SPLIT, check_vma=False, out=WHOLE))(floats(4, 4), floats(8, 4))
    return asked


def _everything() -> None:
    asked = _asked()
    missing = sorted(_EXPENSIVE - set(asked)) + ["psum"] * (not _SUMS & set(asked))
    expect(not missing, f"jax.checkpoint asks its policy about {sorted(asked)} only, and does these again: {missing}")


def _arguments() -> None:
    asked = _asked()
    product = asked["dot_general"].operands
    expect(
        [getattr(each, "shape", None) for each in product] == [(4, 4), (4, 4)] and product[0].dtype == jnp.float32,
        f"of a product a policy is told the operands {product}",
    )
    wanted = {
        "slice": {"start_indices", "limit_indices"},
        "dynamic_slice": {"slice_sizes"},
        "fft": {"fft_type"},
        "dot_general": {"dimension_numbers"},
    }
    missing = sorted((set(wanted) | {"name"}) - set(asked))
    expect(not missing, f"a policy is not asked about {missing}")
    for primitive, params in wanted.items():
        found = asked[primitive].params
        expect(params <= set(found), f"of {primitive} a policy is told {sorted(found)}, not {sorted(params)}")
    expect(asked["name"].given_name == "canary", f"of a name a policy is told {dict(asked['name'].params)}")


def _saved() -> None:
    def residuals(saves: bool) -> int:
        policy = SaveWhere(lambda result: result.primitive == "reduce_sum" and saves)
        fun = jax.checkpoint(lambda x: jnp.sin(jnp.sin(jnp.sum(x, axis=1))), policy=policy)
        counts = []
        jax.make_jaxpr(lambda x: counts.append(jax.tree.leaves(jax.vjp(fun, x)[1])) or x)(floats(5, 3))
        return sum(leaf.shape == (5,) for leaf in counts[0])

    found = residuals(True), residuals(False)
    expect(found == (1, 0), f"of a sum that a policy saves, and one that it does not, residuals: {found}, not (1, 0)")


CANARIES = (
    Canary(
        "policies are asked about everything",
        "A callable policy of jax.checkpoint is asked about every operation, products or not.",
        "Sums, lookups, dropout's bits and collectives are done again in the backward of scans and pipelines.",
        _everything,
    ),
    Canary(
        "what policies are told",
        "A policy gets the primitive, abstract operands and parameters under the names we read, those of checkpoint_name too.",
        "The wrong results are kept: the backward's memory or time grows.",
        _arguments,
    ),
    Canary(
        "policies are obeyed",
        "What a policy saves is a residual, what it does not save is none.",
        "Activations are kept that should be computed again, or computed again although they are kept.",
        _saved,
    ),
)
