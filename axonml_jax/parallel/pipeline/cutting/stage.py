"""A pipeline's stage: any function of its parameters, what the stage before sent, and a microbatch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from axonml_jax._types import PyTree


class StageOutput(NamedTuple):
    """What a stage makes of one microbatch.

    Attributes:
      y: what the next stage receives, of any structure; floating leaves have a gradient, others only travel forward. The
        last stage's comes back, stacked by microbatch.
      loss: its share of the microbatch's loss, a scalar; usually 0 except on the last stage.
      aux: metrics, summed over microbatches; only the last stage's are kept.
      state: its state after this microbatch, of the structure, shapes and dtypes of the one it was given.
    """

    y: PyTree = None
    loss: Any = 0.0
    aux: PyTree = None
    state: PyTree = None


StageFunction = Callable[[PyTree, PyTree, PyTree, Any, PyTree], StageOutput]
"""`stage(weights, x, batch, key, state) -> StageOutput`: x is None on the first stage, which reads the microbatch; key is
the microbatch's, the same on all stages; key and state are None where there are none."""


def _as_it_is(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    return list(leaves)


@dataclass(frozen=True)
class Stage:
    """A stage and how its parameters are read in every tick.

    Attributes:
      apply: the stage. It may communicate over other axes than the pipeline's.
      read: makes of the stored leaves, in tree order, those that `apply` is given, outside the differentiation: a gather
        per tick.
      sync: makes of their gradients those of the stored leaves; the transpose of `read`. It gets None for a frozen leaf.
    """

    apply: StageFunction
    read: Callable[[Sequence[jax.Array]], Sequence[jax.Array]] = _as_it_is
    sync: Callable[[Sequence[Any]], Sequence[Any]] = _as_it_is
