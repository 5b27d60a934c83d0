"""Text from a parallel model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from axonml_jax.collectives.primitives import bound, gather_whole
from axonml_jax.compat.order import no_mesh_around
from axonml_jax.facade.trainer import ParallelModel
from axonml_jax.model.view import Variables
from axonml_jax.models import generate as models
from axonml_jax.models.generate import Sampling, checked_prompts, vocabulary
from axonml_jax.models.transformer import VOCABULARY_AXES
from axonml_jax.parallel.placement import reading
from axonml_jax.sharding.layout import place
from axonml_jax.training.compile import Compiled
from axonml_jax.training.step import forward_mode


@no_mesh_around()
def generate(
    model: Any,
    tokens: Any,
    length: int,
    key: jax.Array,
    *,
    mask: Any = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    window: int | None = None,
    after_token: models.AfterToken | None = None,
) -> np.ndarray:
    """Continue prompts token by token: a parallel model's tokens are those of one device.

    The reference transformer keeps keys and values, each rank those of its own heads, so that a token costs one position.
    Nothing but the variables is needed: no trainer, no optimizer state.

    Args:
      model: a causal NNX module, a `ParallelModel` (any facade) of the reference transformer or of another causal model whose
        calls map tokens [b, w] to logits [b, w, v], or a function that does.
      tokens: integer [b, p], the prompts, or a list of prompts of any lengths, p that of the longest; the same in every
        process.
      length: number of new tokens.
      key: random key.
      mask: [b, p], true or 1 where a token is of its prompt: the `attention_mask` of a tokenizer that pads on the left or on
        the right. Every prompt is continued as it would be alone. None: all tokens are.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: draw among so many of the most likely tokens (Fan et al. 2018); None: among all.
      top_p: draw among the fewest most likely tokens with this probability together (Holtzman et al. 2020); None: among all.
      window: positions the model sees at most; None: p + length. Give the model's longest sequence for longer texts.
      after_token: called with the text so far [b, p + n] after every token, in every process; a true result ends it.

    Returns:
      int32 [b, p + length], prompts included, all of which end in column p - 1, so that what is new is `[:, p:]`: what is
      before a shorter one is its padding, zeros where a list was given. Fewer columns where `after_token` has ended it.

    Raises:
      ValueError: for prompts or options that cannot work, such as tokens outside the vocabulary, or more positions at once than
        the model's `max_length`.
      TypeError: for a model that returns something else than logits.
    """
    if not isinstance(model, ParallelModel):
        drawn: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        return models.generate(model, tokens, length, key, mask=mask, window=window, after_token=after_token, **drawn)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    text, starts = checked_prompts(tokens, mask, length, sampling, window, model._functional.abstract_module)
    width = window or text.shape[1] + length
    with follow(model, width, starts) as after:
        return models.continued(after, text, length, key, sampling, after_token)


@contextmanager
def follow(
    model: ParallelModel, width: int, starts: np.ndarray | None = None, *, in_pieces: bool = False
) -> Iterator[models.Cached | models.Windowed]:
    """Yield an object that computes the logits [b, v] after a growing text [b, s] in eval mode, of at most `width` positions.

    Args:
      model: a parallel model of a causal language model.
      width: the most positions of the text.
      starts, in_pieces: see `Cached`.
    """
    if models.keeps_caches(model._functional.abstract_module) and model._placement.stages is None:
        yield models.Cached(_Extend(model, width), width, starts, in_pieces=in_pieces)
        return
    with evaluating(model):
        yield models.Windowed(even_logits(model), width, starts)


@contextmanager
def evaluating(model: ParallelModel) -> Iterator[None]:
    """Puts the model into evaluation mode for the block, and back into its former mode afterwards."""
    before, model._mode = model._mode, False
    try:
        yield
    finally:
        model._mode = before


def even_logits(model: ParallelModel) -> Callable[[np.ndarray], jax.Array]:
    """Wrap the model's call for any number of prompts: it is padded to a multiple of the batch axes, and the padding dropped.

    Where an axis splits positions, prompts are padded behind to a length that divides; a causal model does not see the padding.
    """
    layout = model._placement.batch_layout

    def logits(tokens: np.ndarray) -> jax.Array:
        more, longer = -len(tokens) % layout.row_degree, -tokens.shape[1] % layout.position_parts
        return models.logits_in(model(np.pad(tokens, ((0, more), (0, longer)), mode="edge")))[: len(tokens)]

    return logits


class _Extend:
    """The `Extend` of a parallel transformer: one program for prompts and one for each further token."""

    def __init__(self, model: ParallelModel, room: int):
        self.model, self.room = model, room
        self.compiled = model._program(("extend", room), lambda: Compiled(self._whole, model.mesh))

    def __call__(self, tokens: np.ndarray, caches: Any, starts: np.ndarray | None) -> tuple[jax.Array, Any]:
        model, rows = self.model, self._rows(tokens.shape[0])
        given = place(np.asarray(tokens, np.int32), rows, model.mesh)
        begins = None if starts is None else place(starts, rows, model.mesh)
        return self.compiled(model.values, given, caches, begins)

    def _rows(self, count: int) -> PartitionSpec:
        """Prompts are split over the batch axes where they divide, else every rank continues all."""
        layout = self.model._placement.batch_layout
        return PartitionSpec(layout.rows) if count % layout.row_degree == 0 else PartitionSpec()

    def _whole(self, variables: Variables, tokens: jax.Array, caches: Any, starts: Any) -> tuple[jax.Array, Any]:
        placement, rest, view = self.model._placement, self.model._rest, self.model._functional
        rows, specs = self._rows(tokens.shape[0]), rest.specs(variables)
        heads = next((axis for axis in ("tensor", "row") if placement.degrees.get(axis, 1) > 1), None)
        padded = starts is not None or (caches is not None and caches[0].starts is not None)
        held = view.abstract_module.cache_specs(*(rows or (None,)), heads, *((True,) if padded else ()))
        mode, words = forward_mode(placement, training=False), vocabulary(view.abstract_module)

        def extend(read: Variables, tokens: jax.Array, caches: Any, starts: Any):
            with placement.inside(whole=placement.axes.positions):
                bound_model = view.bind(read, jax.random.key(0), mode)
                logits, caches = models.extended(bound_model, tokens, caches, self.room, starts)
            axes = bound(VOCABULARY_AXES)
            logits = gather_whole(logits, axes, -1, invarying=True) if axes else logits
            # The vocabulary's padding is behind its words.
            return (logits if words in (None, logits.shape[-1]) else logits[..., :words]), caches

        def local(variables: Variables, tokens: jax.Array, caches: Any, starts: Any):
            call = reading(extend, view, placement, mode.precision, rewrites=False)
            return rest.read(call, view, rest.enter(variables), tokens, caches, starts)

        return jax.shard_map(
            local,
            mesh=self.model.mesh,
            in_specs=(specs, rows, None if caches is None else held, None if starts is None else rows),
            out_specs=(rows, held),
            axis_names=placement.axes.manual,
            check_vma=False,
        )(variables, tokens, caches, starts)
