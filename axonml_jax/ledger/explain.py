"""`explain`: from a step to its report, without running it."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from axonml_jax.ledger.report import MODEL, Report
from axonml_jax.ledger.traced import collectives_in
from axonml_jax.ledger.wire import Amount, exact

Minimum = Amount | float | Mapping[str, Amount | float]
"""Bytes per rank and step that theory allows: one number, or one for each label (or labels joined by `+`)."""


def explain(step: Callable[..., Any], *args: Any, minimum: Minimum | None = None, **kwargs: Any) -> Report:
    """Count what a step communicates.

    Args:
      step: a jitted callable, anything with a `trace` method, or a plain function. Nothing runs and nothing is donated.
      *args: its arguments: arrays or `jax.ShapeDtypeStruct`s. With an `AbstractMesh` no device is needed.
      minimum: theoretical minima to print beside. One number stands for what grows with the parameters
        (`gradients+parameters`), say 2P(N-1)/N times the itemsize for data parallelism. None: what the step itself
        says, where it has a `minimum_traffic()` as trainers and training steps do.
      **kwargs: its keyword arguments.

    Returns:
      A `Report`; `print` it for the table.

    Raises:
      ValueError: for a minimum that is negative or not finite.
    """
    if minimum is None and hasattr(step, "minimum_traffic"):
        minimum = step.minimum_traffic()  # pyright: ignore[reportFunctionMemberAccess]
    return Report(collectives_in(step, *args, **kwargs), _targets(minimum))


def _targets(minimum: Minimum | None) -> tuple[tuple[str, Amount], ...]:
    if minimum is None:
        return ()
    named = minimum if isinstance(minimum, Mapping) else {MODEL: minimum}
    wrong = {name: amount for name, amount in named.items() if not 0 <= amount < float("inf")}
    if wrong:
        raise ValueError(f"minimum {wrong}: bytes must be finite and not negative")
    return tuple((name, exact(Fraction(amount))) for name, amount in named.items())
