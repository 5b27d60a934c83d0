"""Canary about `splash.py`: what the kernel makes of positions, tables of blocks, and a log-sum-exp of other pieces."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.compat.canaries.canary import Canary, expect
from axonml_jax.compat.splash import SplashCall, SplashPiece, Visits, splash_backward, splash_forward

_BLOCK, _SIZE = 128, 8


def _pieces() -> None:
    """Queries at 3, 5, 7, ... read keys at 0 to 127 and at 128 to 255, a piece each; the second is more than half hidden."""
    rng = np.random.default_rng(0)
    q, k, v, grad = (rng.normal(size=(1, 1, n * _BLOCK, _SIZE)).astype("float32") for n in (1, 2, 2, 1))
    at = 3 + 2 * np.arange(_BLOCK, dtype="int32")
    seen = np.arange(2 * _BLOCK)[None] <= at[:, None]
    with jax.enable_x64(False):
        wanted = _plain(seen, q, k, v, grad)
        got = jax.jit(_by_pieces)(q, k, v, at, grad)
        for name, own, right in zip(("result", "gradient of q", "of k", "of v"), got, wanted, strict=True):
            expect(bool(np.allclose(own, right, atol=1e-4)), f"the {name} of attention in two pieces is another one")


def _plain(seen: Any, q: Any, k: Any, v: Any, grad: Any) -> tuple[Any, ...]:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.softmax(jnp.where(seen, q @ k.swapaxes(2, 3), -jnp.inf), -1) @ v

    out, undo = jax.vjp(attend, q, k, v)
    return out, *undo(grad)


def _by_pieces(q: Any, k: Any, v: Any, at: Any, grad: Any) -> tuple[Any, ...]:
    call, one = SplashCall(_BLOCK, _BLOCK, after=0, interpret=True), jnp.zeros((1, 1), jnp.int32)
    visits = Visits((one, one == 0), (one, one == 0))
    half = lambda x, i: x[:, :, i * _BLOCK : (i + 1) * _BLOCK]
    pieces = [SplashPiece(q, half(k, i), half(v, i), at - i * _BLOCK, None, visits) for i in range(2)]
    (out, lse), (other, more) = (splash_forward(call, piece) for piece in pieces)
    total = jnp.logaddexp(lse, more)
    out = out * jnp.exp(lse - total)[..., None] + other * jnp.exp(more - total)[..., None]
    parts = [splash_backward(call, piece, total, (out * grad).sum(-1), grad) for piece in pieces]
    (dq, *_), (more, *_) = parts
    return out, dq + more, *(jnp.concatenate([parts[0][i], parts[1][i]], 2) for i in (1, 2))


CANARIES = (
    Canary(
        "splash attention in pieces",
        "The kernel compares keys with the positions given, visits the blocks named, and takes a log-sum-exp from outside.",
        "Attention across ranks on TPUs reads keys that it must not see, or its gradients are those of other weights.",
        _pieces,
    ),
)
