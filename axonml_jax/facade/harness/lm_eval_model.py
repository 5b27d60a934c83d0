"""`lm_eval_model`: a parallel model as a model of lm-evaluation-harness."""

import functools
from typing import Any

from axonml_jax.data.documents.tokenizer import Tokenizer
from axonml_jax.facade.harness.evaluated_model import EvaluatedModel
from axonml_jax.facade.parallel_model import ParallelModel


def lm_eval_model(
    model: ParallelModel,
    tokenizer: Tokenizer,
    *,
    prefix: str | None = None,
    end: str | None = None,
    max_length: int | None = None,
    batch_size: int = 8,
    max_gen_toks: int = 256,
    seed: int = 0,
) -> Any:
    """A model for `lm_eval.simple_evaluate(model=..., tasks=[...])`, evaluated under the plan that it rests under.

    Several processes all run the evaluation, each with all requests, and all get its results.

    Args:
      model: a parallel model (any facade) of a causal language model, whose calls map tokens [b, w] to logits [b, w, v].
      tokenizer: what `ax.load_tokenizer` returns.
      prefix: the token that is given before the first one of a text; None: what the tokenizer puts there.
      end: the token that ends a generated text; None: only stop words and the number of tokens do.
      max_length: positions that the model sees at most; None: the model's own.
      batch_size: requests at a time.
      max_gen_toks: new tokens where a task does not say how many.
      seed: of tokens that are drawn, where a task asks for that.

    Returns:
      An `lm_eval.api.model.LM`.

    Raises:
      ModuleNotFoundError: without lm_eval, naming the extra.
      TypeError, ValueError: for a model or a tokenizer that cannot serve.
    """
    return _class()(
        model,
        tokenizer,
        prefix=prefix,
        end=end,
        max_length=max_length,
        batch_size=batch_size,
        max_gen_toks=max_gen_toks,
        seed=seed,
    )


@functools.cache
def _class() -> type:
    try:
        from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("lm_eval_model needs lm_eval: pip install 'axonml-jax[lm-eval]'") from error
    return type("AxonmlModel", (EvaluatedModel, LM), {"__doc__": EvaluatedModel.__doc__})
