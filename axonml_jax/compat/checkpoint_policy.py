"""Which results `jax.checkpoint` keeps, decided by a function that is asked about every operation.

JAX documents policies that go by names and is retiring callables, whose protocol is `policy(prim, *avals, **params)`. They are
the only way to what lies inside custom gradients, where no name can be given. Under `jax_remat3` JAX asks about products and
little else, and recomputes all the rest, collectives too: a canary sings.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax


def require_policies() -> None:
    """Refuse a policy of this kind where JAX does not ask it about every operation.

    Raises:
      ValueError: with the remedy.
    """
    if jax.config.jax_remat3:
        raise ValueError(
            "jax_remat3 is on: jax.checkpoint then asks its policy about products alone and recomputes all the rest, so that a "
            "scan or a pipeline would send twice and do most work twice. Set JAX_REMAT3=0, or "
            "jax.config.update('jax_remat3', False)"
        )


class Saveable(NamedTuple):
    """A result that may be saved for the backward: the operation under `jax.checkpoint` that makes it.

    Attributes:
      primitive: its primitive's name.
      operands: abstract values (shape, dtype), one per operand.
      params: its static parameters by JAX's names.
    """

    primitive: str
    operands: tuple[Any, ...]
    params: Mapping[str, Any]

    @property
    def given_name(self) -> str | None:
        """The name that `checkpoint_name` gave to its operand; None for every other operation."""
        return self.params["name"] if self.primitive == "name" else None

    @property
    def fft_type(self) -> jax.lax.FftType | None:
        """Of a Fourier transform; None for every other operation."""
        return self.params["fft_type"] if self.primitive == "fft" else None


@dataclass(frozen=True)
class SaveWhere:
    """A policy for `jax.checkpoint(policy=...)`: a result is kept for the backward where `saves(result)`, else made again.

    Equal ones compare equal, so that equal calls share a trace.

    Args:
      saves: a function of a `Saveable`.
    """

    saves: Callable[[Saveable], bool]

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> bool:
        """JAX's protocol."""
        return self.saves(Saveable(prim.name, avals, params))
