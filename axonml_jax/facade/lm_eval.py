"""A model of any plan as lm-evaluation-harness wants it."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.compat.order import no_mesh_around
from axonml_jax.data.documents import TextSoFar, Tokenizer
from axonml_jax.facade.generate import evaluating, even_logits, follow
from axonml_jax.facade.trainer import ParallelModel
from axonml_jax.models.generate import Sampling, continued, foreign_words, longest
from axonml_jax.sharding.layout import to_host

# --------------------------------------------------------------------------------------------------
# What a task asks of a generation, and the text of one prompt as its tokens come.
# --------------------------------------------------------------------------------------------------

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What tasks call the number of new tokens; the first that is given counts."""


@dataclass(frozen=True)
class Asked:
    """The options of a generation request: where the text stops, how long it may be and how tokens are drawn.

    Attributes:
      until: words that end it, and are no part of it.
      length: most new tokens.
      sampling: how tokens are drawn.
    """

    until: tuple[str, ...]
    length: int
    sampling: Sampling

    @classmethod
    def of(cls, options: Mapping[str, Any], default_length: int) -> "Asked":
        """Parse a request's options; without `do_sample` the most likely token is taken.

        >>> Asked.of({"until": "END", "max_gen_toks": 5, "temperature": 0.7}, 256)
        Asked(until=('END',), length=5, sampling=Sampling(temperature=0.0, top_k=None, top_p=None))

        Raises:
          ValueError: for options that nothing here reads, or that cannot be.
        """
        given = dict(options)
        until = given.pop("until", None) or ()
        until = (until,) if isinstance(until, str) else tuple(until)
        length = next((given[name] for name in LENGTHS if given.get(name) is not None), default_length)
        draws, temperature = given.pop("do_sample", False), given.pop("temperature", None)
        sampling = Sampling(
            temperature=float(1.0 if temperature is None else temperature) if draws else 0.0,
            top_k=given.pop("top_k", None),
            top_p=given.pop("top_p", None),
        )
        unknown = sorted(set(given) - set(LENGTHS))
        problems = [f"{name}={given[name]!r} has no effect here: leave it out" for name in unknown]
        problems += [f"{length=} is below 1"] if length < 1 else []
        if problems := problems + sampling.problems():
            raise ValueError(f"generate_until: {'; '.join(problems)}")
        return cls(tuple(word for word in until if word), int(length), sampling)


class Continuation:
    """The text after a prompt, until a stop word or the end token.

    Args:
      tokenizer: tokens to text.
      prompt: its tokens, which the text leaves out: decoders write a text's first word without the space before it.
      until: stop words.
      end: the token that ends a document; None: there is none.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], until: Sequence[str], end: int | None):
        self._text, self._until, self._end = TextSoFar(tokenizer), until, end
        self._text.add(prompt)
        self._so_far = ""
        self.ended = False

    def add(self, token: int) -> None:
        """Take the next token, unless the text has ended."""
        if self.ended:
            return
        self._so_far += "" if (over := token == self._end) else self._text.add([token])
        self.ended = over or any(word in self._so_far for word in self._until)

    def finish(self) -> str:
        """The whole text; what was held back as the beginning of a character is part of it."""
        text = self._so_far if self.ended else self._so_far + self._text.add([], final=True)
        return text[: min((at for word in self._until if (at := text.find(word)) >= 0), default=len(text))]


# --------------------------------------------------------------------------------------------------
# Log-likelihoods of tokens under a parallel model, many rows at a time, in few shapes.
# --------------------------------------------------------------------------------------------------

SHORTEST = 32
"""Rows are padded to this length, or the next power of two, so that few shapes are compiled."""


class Row(NamedTuple):
    """Tokens, of which the last `scored` are scored: each given all tokens before it."""

    tokens: Sequence[int]
    scored: int


class Score(NamedTuple):
    """The total log-likelihood of a row's scored tokens, and whether each was the most likely one."""

    loglikelihood: float
    greedy: bool


def score_rows(model: ParallelModel, rows: Sequence[Row], *, batch_size: int, longest: int) -> list[Score]:
    """The scores of rows, in their order; every process must call it with the same rows.

    Args:
      model: maps tokens [b, w] to logits [b, w, v].
      rows: of at least two tokens and at most `longest + 1`, of which at most all but the first are scored.
      batch_size: rows at a time.
      longest: positions that the model sees at most.

    Raises:
      ValueError: for tokens beyond the model's vocabulary.
    """
    scores: list[Score | None] = [None] * len(rows)
    with evaluating(model):
        logits_of = even_logits(model)
        for numbers in _batches(rows, batch_size):
            tokens, targets, counted = _arrays([rows[n] for n in numbers], batch_size, longest)
            logits = logits_of(tokens)
            if wrong := foreign_words((rows[n].tokens for n in numbers), logits.shape[-1]):
                raise ValueError(f"scores: {wrong[0]}")
            sums, greedy = to_host(_scores(logits, targets, counted))
            for n, total, best in zip(numbers, sums.tolist(), greedy.tolist(), strict=False):
                scores[n] = Score(total, best)
    return [score for score in scores if score is not None]


def windows(tokens: Sequence[int], prefix: int, longest: int) -> Iterator[Row]:
    """Split a text of any length into rows in which every token is scored once, given as many tokens before it as fit.

    The first row begins with the prefix, and the last one is full where the text is long enough.

    >>> [(row.tokens, row.scored) for row in windows([1, 2, 3, 4, 5], 0, 3)]
    [([0, 1, 2, 3], 3), ([2, 3, 4, 5], 2)]
    """
    whole, done = [prefix, *tokens], 0
    while done < len(tokens):
        end = min(done + longest, len(tokens))
        yield Row(whole[max(end - longest, 0) : end + 1], end - done)
        done = end


def _batches(rows: Sequence[Row], size: int) -> list[list[int]]:
    """Split row numbers into batches, the longest rows first, so that memory runs out at once or never."""
    order = sorted(range(len(rows)), key=lambda n: -len(rows[n].tokens))
    return [order[start : start + size] for start in range(0, len(order), size)]


def _arrays(rows: Sequence[Row], size: int, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets and which of these count, [size, w]; a causal model does not see what is padded on the right."""
    most = max(len(row.tokens) for row in rows) - 1
    width = max(min(longest, max(SHORTEST, 1 << (most - 1).bit_length())), most)
    tokens, targets = np.zeros((2, size, width), np.int32)
    counted = np.zeros((size, width), bool)
    for place, row in enumerate(rows):
        length = len(row.tokens) - 1
        tokens[place, :length], targets[place, :length] = row.tokens[:-1], row.tokens[1:]
        counted[place, length - row.scored : length] = True
    return tokens, targets, counted


@jax.jit
def _scores(logits: jax.Array, targets: jax.Array, counted: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    chosen = jnp.take_along_axis(wide, targets[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(wide, axis=-1)
    best = (jnp.argmax(wide, axis=-1) == targets) | ~counted
    return jnp.sum(jnp.where(counted, chosen, 0), axis=-1), jnp.all(best, axis=-1)


# --------------------------------------------------------------------------------------------------
# The three questions of lm-evaluation-harness, answered by a parallel model and a tokenizer.
# --------------------------------------------------------------------------------------------------


class EvaluatedModel:
    """`loglikelihood`, `loglikelihood_rolling` and `generate_until` as the harness documents them, under any plan.

    It knows nothing of the harness: a request is anything with `args`. See `lm_eval_model` for the arguments.
    """

    def __init__(
        self,
        model: ParallelModel,
        tokenizer: Tokenizer,
        *,
        prefix: str | None = None,
        end: str | None = None,
        max_length: int | None = None,
        batch_size: int = 8,
        max_gen_toks: int = 256,
        seed: int = 0,
    ):
        super().__init__()
        if not isinstance(model, ParallelModel):
            raise TypeError(
                f"model={type(model).__name__} must be a parallel model, such as ax.parallelize(model) makes"
            )
        most = longest(model._functional.abstract_module)
        length = most if max_length is None else max_length
        if length is None:
            raise ValueError("the model does not say how many positions it sees: give max_length=")
        if length < 1 or (most is not None and length > most) or batch_size < 1:
            limit = "at least 1" if most is None else f"at most the model's {most} and at least 1"
            raise ValueError(f"max_length={length} must be {limit}, batch_size={batch_size} at least 1")
        self.model, self.tokens_of, self.max_length, self.batch_size = model, tokenizer, length, batch_size
        self.max_gen_toks, self._key = max_gen_toks, jax.random.key(seed)
        self._prefix = _prefix(tokenizer) if prefix is None else tokenizer.id_of(prefix)
        self._end = None if end is None else tokenizer.id_of(end)

    @property
    def tokenizer_name(self) -> str:
        """The fingerprint that identifies the tokenizer in caches of requests."""
        return self.tokens_of.fingerprint

    @no_mesh_around()
    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """For every (context, continuation): the continuation's log-likelihood, and whether greedy decoding would write it.

        Of a context that is too long the end is taken. Both are encoded together, and apart where the continuation would have
        no token of its own.

        Raises:
          ValueError: for a continuation that is longer than the model's positions, or that the tokenizer makes no token of.
        """
        return self._scored([self._row(*request.args) for request in requests])

    @no_mesh_around()
    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """The log-likelihood of every text, of any length: each token once, given as many before it as the model sees."""
        texts = [self._ids(text, special=False) for (text,) in (request.args for request in requests)]
        rows = [list(windows(ids, self._prefix, self.max_length)) for ids in texts]
        scores = iter(self._scored([row for each in rows for row in each]))
        return [sum(next(scores)[0] for _ in each) for each in rows]

    @no_mesh_around()
    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """For every (context, options): the text that follows, up to a stop word, the end token or a number of tokens.

        Raises:
          ValueError: for options that nothing reads, or more new tokens than the model has positions.
        """
        groups: dict[tuple[Asked, int], list[int]] = {}
        prompts: list[list[int]] = []
        for number, (context, options) in enumerate(request.args for request in requests):
            asked = Asked.of(options, self.max_gen_toks)
            if asked.length >= self.max_length:
                raise ValueError(
                    f"generate_until: {asked.length} new tokens leave no room in max_length={self.max_length}"
                )
            tokens = (self._ids(context) if context else []) or [self._prefix]
            prompts.append(tokens[-(self.max_length - asked.length) :])
            groups.setdefault((asked, len(prompts[-1])), []).append(number)
        texts = [""] * len(prompts)
        for (asked, _), numbers in groups.items():
            for start in range(0, len(numbers), self.batch_size):
                batch = numbers[start : start + self.batch_size]
                key = jax.random.fold_in(self._key, batch[0])  # a repeated request draws anew
                written = self._written([prompts[n] for n in batch], asked, key)
                for number, text in zip(batch, written, strict=True):
                    texts[number] = text
        return texts

    def _written(self, prompts: Sequence[Sequence[int]], asked: Asked, key: jax.Array) -> Iterator[str]:
        """Generate the texts that follow prompts of one length."""
        texts = [Continuation(self.tokens_of, prompt, asked.until, self._end) for prompt in prompts]

        def after_token(tokens: np.ndarray) -> bool:
            for text, token in zip(texts, tokens[:, -1].tolist(), strict=False):
                text.add(token)
            return all(text.ended for text in texts)

        rows = np.asarray([*prompts, *[prompts[-1]] * (self.batch_size - len(prompts))], np.int32)
        with follow(self.model, self.max_length, in_pieces=True) as after:
            continued(after, rows, asked.length, key, asked.sampling, after_token)
        return (text.finish() for text in texts)

    def _scored(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        found = score_rows(self.model, rows, batch_size=self.batch_size, longest=self.max_length)
        return [(score.loglikelihood, score.greedy) for score in found]

    def _row(self, context: str, continuation: str) -> Row:
        head = context.rstrip()  # spaces at its end belong to the next word's token
        before = self._ids(head) if head else []
        whole = self._ids(context + continuation, special="before" if head else False)
        if len(whole) <= len(before):  # the continuation has merged into the context's tokens: encode it apart
            whole = before + self._ids(context[len(head) :] + continuation, special=False)
        scored = len(whole) - len(before)
        if scored == 0 or not continuation:
            raise ValueError(
                f"loglikelihood: the tokenizer makes no token of the continuation {continuation!r} after the context "
                f"{context!r}, and an empty continuation would always be the likeliest: leave it out of the task, or give "
                "it a text"
            )
        if not before:  # the first token is given something too
            starts = scored > 1 and whole[0] == self._prefix
            whole, scored = (whole, scored - 1) if starts else ([self._prefix, *whole], scored)
        if scored > self.max_length:
            raise ValueError(
                f"loglikelihood: a continuation of {scored} tokens is longer than max_length={self.max_length}"
            )
        return Row(whole[-(self.max_length + 1) :], scored)

    def _ids(self, text: str, *, special: Any = "before") -> list[int]:
        return self.tokens_of.encode([text], special=special)[0].tolist()


def _prefix(tokenizer: Tokenizer) -> int:
    """The token that a tokenizer's rules put before a text.

    Raises:
      ValueError: when they put none.
    """
    text = "a"
    added = len(tokenizer.encode([text], special="before")[0]) - len(tokenizer.encode([text], special=False)[0])
    if added < 1:
        raise ValueError(
            "this tokenizer puts no token before a text, so a text's first token would be predicted from nothing: "
            "give prefix='<|endoftext|>', or what separated documents in training (for bytes: prefix='\\n')"
        )
    return int(tokenizer.encode([text], special="before")[0][0])


# --------------------------------------------------------------------------------------------------
# `lm_eval_model`: a parallel model as a model of lm-evaluation-harness.
# --------------------------------------------------------------------------------------------------


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
    """Wrap a model for `lm_eval.simple_evaluate(model=..., tasks=[...])`, evaluated under the plan that it is placed by.

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
