"""Canaries: small programs that fail loudly where a change in JAX would otherwise be silent."""

from collections.abc import Callable
from dataclasses import dataclass

import jax


class CanaryError(RuntimeError):
    """JAX no longer does what the library relies on.

    Attributes:
      found: what it does instead.
    """

    def __init__(self, found: str, text: str | None = None):
        super().__init__(text or found)
        self.found = found


@dataclass(frozen=True)
class Canary:
    """One thing that the library relies on, that JAX does not promise, and that nothing else would tell us of.

    Attributes:
      name: in a few words.
      relies: what the library relies on, a sentence.
      otherwise: what would silently go wrong, a sentence.
      probe: tries it; raises `CanaryError` with what was found (`expect`), or fails in another way.
    """

    name: str
    relies: str
    otherwise: str
    probe: Callable[[], None]

    def check(self) -> None:
        """Try it on the JAX that is installed.

        Raises:
          CanaryError: with what was found, what was relied on, and what would go wrong.
        """
        try:
            self.probe()
        except Exception as error:
            found = error.found if isinstance(error, CanaryError) else f"{type(error).__name__}: {error}"
            raise CanaryError(
                found,
                f"jax {jax.__version__}: {self.name}: {found}. The library relies on this: {self.relies} Otherwise: "
                f"{self.otherwise} `python -m axonml_jax.compat` tries everything that it relies on.",
            ) from error


def expect(holds: bool, found: str) -> None:
    """Say what was found unless it is as it should be."""
    if not holds:
        raise CanaryError(found)
