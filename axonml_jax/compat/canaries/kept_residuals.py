"""Canaries about `residuals.py`: ZeRO-3 and pipelines keep no weight between forward and backward."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.compat.canaries.canary import Canary, expect
from axonml_jax.compat.canaries.on_two import AXIS, SPLIT, WHOLE, floats, on_two
from axonml_jax.compat.residuals import vjp_without
from axonml_jax.compat.varying_types import cast_to_varying

_SIZE = 4
_WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "a product": lambda w, x: x @ w,
    "an elementwise function": lambda w, x: jnp.tanh(w * x),
    "a product inside jit": lambda w, x: jax.jit(lambda w, x: jnp.sin(x @ w))(w, x),
    "a product under jax.checkpoint": lambda w, x: jax.checkpoint(lambda w, x: jnp.sin(x @ w))(w, x),
    "a product whose result a policy saves": lambda w, x: jax.checkpoint(
        lambda w, x: jnp.sin(x @ w), policy=jax.checkpoint_policies.everything_saveable
    )(w, x),
    "a product in a scan": lambda w, x: jax.lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, length=2)[0],
}


def _identical() -> None:
    lost: list[str] = []

    def run(way: str, mode: str, w: Any, x: Any) -> Any:
        w = cast_to_varying(w, (AXIS,)) if mode == "check_vma=True" else w
        out, _, saved = vjp_without(lambda w, x: (_WAYS[way](w, x), ()), (w, x), [w])
        if (True, 0) not in saved.places:
            lost.append(f"{way} ({mode})")
        return saved.restore([w])(out)[1]

    square, rows = floats(_SIZE, _SIZE), floats(2 * _SIZE, _SIZE)
    for way in _WAYS:
        jax.make_jaxpr(functools.partial(run, way, "no mesh"))(square, square)
        for check_vma in (True, False):
            rank = functools.partial(run, way, f"check_vma={check_vma}")
            jax.make_jaxpr(on_two(rank, WHOLE, SPLIT, check_vma=check_vma))(square, rows)
    expect(not lost, f"among the residuals the weights are other objects than the arguments in {', '.join(lost)}")


def _restored() -> None:
    x, w, other = (jnp.arange(4.0).reshape(2, 2) + k for k in range(3))
    out, _, saved = vjp_without(lambda w, x: (x @ w, ()), (w, x), [w])
    expect(len(saved.places) >= 2, f"the vjp of a product of two arrays is a pytree of {len(saved.places)} leaves")
    ones = jnp.ones_like(out)
    of_w, of_x = saved.restore([other])(ones)
    right = np.array_equal(of_w, x.T @ ones) and np.array_equal(of_x, ones @ other.T)
    expect(right, f"with other weights put in their place the gradients of x @ w are {of_w.tolist()}, {of_x.tolist()}")


CANARIES = (
    Canary(
        "residuals are the arguments",
        "Among the leaves of what jax.vjp returns, weights are the very objects that went in (with check_vma=True, once cast).",
        "Every weight is kept whole from forward to backward: right results, and ZeRO-3's and the pipeline's memory lost.",
        _identical,
    ),
    Canary(
        "a vjp is a pytree",
        "What jax.vjp returns can be flattened, and called after other arrays were put in the place of its leaves.",
        "The backward computes with the weights of another unit, or keeps them in a closure.",
        _restored,
    ),
)
