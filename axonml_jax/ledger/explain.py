"""`explain`: from a step to its report, or from a plan to its prediction, without running anything."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, overload

from axonml_jax.cost.decoder.configuration import is_decoder
from axonml_jax.cost.wire import Amount, exact
from axonml_jax.ledger.predict.predict import predict
from axonml_jax.ledger.predict.prediction import Prediction
from axonml_jax.ledger.report import MODEL, Report
from axonml_jax.ledger.traced import collectives_in
from axonml_jax.parallel.plan import Plan

Minimum = Amount | float | Mapping[str, Amount | float]
"""Bytes per rank and step that theory allows: one number, or one for each label (or labels joined by `+`)."""


@overload
def explain(
    step: Plan,
    *,
    model: Any,
    global_batch: int,
    length: int | None = None,
    mesh: Any = None,
    moments: int = 2,
) -> Prediction: ...
@overload
def explain(step: Callable[..., Any], *args: Any, minimum: Minimum | None = None, **kwargs: Any) -> Report: ...
def explain(step: Any, *args: Any, minimum: Minimum | None = None, **kwargs: Any) -> Report | Prediction:
    """Count what a step communicates, or predict from shapes alone what a plan holds, sends and computes.

    Args:
      step: a jitted callable, anything with a `trace` method, or a plain function: its program is counted. Nothing runs and
        nothing is donated. Or an `ax.Plan`: nothing is traced either.
      *args: the step's arguments: arrays or `jax.ShapeDtypeStruct`s. With an `AbstractMesh` no device is needed.
      minimum: theoretical minima to print beside. One number stands for what grows with the parameters
        (`gradients+parameters`), say 2P(N-1)/N times the itemsize for data parallelism. None: what the step itself
        says, where it has a `minimum_traffic()` as trainers and training steps do.
      **kwargs: the step's keyword arguments. For a plan: `model`, a `TransformerConfig` (`models.presets` has published
        ones); `global_batch`, sequences per update; `length` of a sequence (None: the model's longest); `mesh`, degrees by
        axis, an `ax.MeshShape` or a mesh (None: the plan's own); `moments`, values that the optimizer keeps per parameter
        (2 for Adam); `platform`, "tpu" or "cuda", for kernels that hold no attention scores (None: count on none);
        `torus`, the dims of the torus that TPUs form, for the hops of FSDP's collectives (0: none); `documents`, whether rows
        hold several.

    Returns:
      A `Report` of a step, a `Prediction` of a plan; `print` either for its tables.

    Raises:
      ValueError: for a minimum that is negative or not finite, or a plan that cannot run.
      TypeError: for a plan without a model's configuration.
    """
    if isinstance(step, Plan):
        return _predicted(step, *args, **kwargs)
    if minimum is None and hasattr(step, "minimum_traffic"):
        minimum = step.minimum_traffic()  # pyright: ignore[reportFunctionMemberAccess]
    return Report(collectives_in(step, *args, **kwargs), _targets(minimum))


def _predicted(plan: Plan, *, model: Any, mesh: Any = None, **sizes: Any) -> Prediction:
    if not is_decoder(model):
        raise TypeError(
            f"model={type(model).__name__}: a plan is priced for a models.TransformerConfig (models.presets.preset('llama3-8b')"
            ", say); for any other model trace its step: ax.explain(trainer, batch)"
        )
    return predict(plan, model, _degrees(plan, mesh), **sizes)


def _degrees(plan: Plan, mesh: Any) -> dict[str, int]:
    chosen: Any = plan.mesh if mesh is None else mesh
    degrees: dict[str, int] = dict(getattr(chosen, "degrees", None) or getattr(chosen, "shape", None) or chosen or {})
    wrong = {axis: size for axis, size in degrees.items() if size < 1}
    if wrong or not degrees:
        raise ValueError(
            f"the plan's mesh has degrees {degrees}: give every one, as in mesh={{'data': 2, 'fsdp': 4}} or "
            "ax.MeshShape(data=2, fsdp=4)"
        )
    return degrees


def _targets(minimum: Minimum | None) -> tuple[tuple[str, Amount], ...]:
    if minimum is None:
        return ()
    named = minimum if isinstance(minimum, Mapping) else {MODEL: minimum}
    wrong = {name: amount for name, amount in named.items() if not 0 <= amount < float("inf")}
    if wrong:
        raise ValueError(f"minimum {wrong}: bytes must be finite and not negative")
    return tuple((name, exact(Fraction(amount))) for name, amount in named.items())
