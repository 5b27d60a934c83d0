"""What a collective is for, read from the name scopes around it (`jax.named_scope("axonml.gradients")`)."""

import re

from axonml_jax.cost.flow import GRADIENTS as GRADIENTS
from axonml_jax.cost.flow import PARAMETERS as PARAMETERS

_LABEL = re.compile(r"axonml\.([A-Za-z_]\w*)(?:\.pad(\d+))?")
_EVERY = re.compile(r"axonml\.[A-Za-z_]\w*\.every(\d+)")

SCALARS = "scalars"
PADDING = "padding"


def label_of(scope: str, kind: str) -> tuple[str, int]:
    """The innermost `axonml.<label>` of a name stack, and how many elements under it are padding.

    A scope around one flat buffer may say so: `axonml.gradients.pad12` ends in twelve zeros.

    Transformations wrap scopes, as in `transpose(jvp(axonml.parameters))`. A reduction found under the transpose of a
    parameter's gather sums that parameter's gradient, so it is labelled `gradients`; a gather there re-gathers weights.

    Args:
      scope: a name stack as text.
      kind: the collective's kind (`wire.KINDS`).

    Returns:
      (label, padding): an empty label and no padding where no scope says anything.

    >>> label_of("jit(step)/transpose(jvp(axonml.norm))/psum", "all_reduce")
    ('norm', 0)
    >>> label_of("transpose(jvp(axonml.parameters))", "reduce_scatter")
    ('gradients', 0)
    >>> label_of("axonml.gradients.pad12", "all_reduce")
    ('gradients', 12)
    """
    found = list(_LABEL.finditer(scope))
    if not found:
        return "", 0
    label = found[-1].group(1)
    transposed = "transpose(" in scope[: found[-1].start()]
    reduces = kind in ("all_reduce", "reduce_scatter")
    padding = int(found[-1].group(2) or 0)
    return (GRADIENTS if label == PARAMETERS and transposed and reduces else label), padding


def period_of(scope: str) -> int:
    """In how many steps what a name stack is around runs once: `axonml.gradients.every10` says that the last of ten runs it.

    >>> period_of("jit(step)/axonml.gradients.every10/psum"), period_of("axonml.norm")
    (10, 1)
    """
    found = _EVERY.findall(scope)
    return int(found[-1]) if found else 1
