"""Which models may run on the positions that one rank has: all others would compute something else without a word."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
from flax import linen, nnx

from axonml_jax.model.functional import Functional
from axonml_jax.parallel.context.context_split import current_split
from axonml_jax.parallel.tensor.dropout import ParallelDropout
from axonml_jax.parallel.tensor.latent.latent_attention import LatentAttention
from axonml_jax.parallel.tensor.megatron.attention import TensorParallelAttention

DECLARED = "splits_positions"
"""The class attribute by which a module says that its code is written for a rank's own positions."""


def problems_of(model: Functional, axis: str, ranks: int) -> Iterator[str]:
    """Why a model cannot run where the ranks of an axis have positions of their own, with the remedies."""
    if not model.declares(DECLARED):
        yield (
            f"{axis}={ranks} splits sequences over ranks, and no module of the model says that its code, which then sees the "
            f"positions of one rank only, is written for that: attention, positions and shifts would silently be those of a "
            f"part. If every position is worked on alone, or what goes across positions is ax.context_attention with "
            f"ax.context_positions, say so by the class attribute {DECLARED} = True; else use a mesh without {axis}"
        )
    if found := dict(_plain_dropouts(model.abstract_module)):
        yield (
            f"plain dropout would draw the same masks for the positions of every rank along {axis}: {found} (rates); use "
            "ax.ParallelDropout(..., dim=-2, positions=True), which draws them by global positions, or a rate of 0"
        )


def _plain_dropouts(module: nnx.Module | None) -> Iterator[tuple[str, float]]:
    """Dropout of a rate whose masks do not follow positions; that of attention's weights does without being told."""
    modules = {} if module is None else dict(nnx.iter_graph(module))
    for path, each in modules.items():
        if not isinstance(each, nnx.Dropout) or not each.rate or getattr(type(each), DECLARED, False):
            continue
        of_weights = isinstance(modules.get(path[:-1]), (TensorParallelAttention, LatentAttention))
        if not (isinstance(each, ParallelDropout) and (each.holds_positions or of_weights)):
            yield "/".join(map(str, path)), each.rate


def refusing_linen_dropout(axis: str) -> AbstractContextManager:
    """Within it a Linen module's plain dropout is refused where it is called with positions split over an axis.

    The modules of a Linen model are known only in its calls.
    """

    def refuse(call: Any, args: tuple, kwargs: dict, context: Any) -> jax.Array:
        module = context.module
        plain = isinstance(module, linen.Dropout) and not getattr(type(module), DECLARED, False)
        if plain and context.method_name == "__call__" and module.rate and current_split(axis) is not None:
            given = kwargs.get("deterministic", args[1] if len(args) > 1 else None)
            if not (module.deterministic if given is None else given):
                raise ValueError(
                    f"{'/'.join(module.path)}: linen.Dropout of rate {module.rate} would draw the same masks for the positions "
                    f"of every rank along {axis}: use a rate of 0, or a model without it"
                )
        return call(*args, **kwargs)

    return linen.intercept_methods(refuse)
