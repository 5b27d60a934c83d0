"""The three questions of lm-evaluation-harness, answered by a parallel model and a tokenizer."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from axonml_jax.data.documents.tokenizer import Tokenizer
from axonml_jax.facade.harness.asked_generation import Asked, Continuation
from axonml_jax.facade.harness.token_scores import Row, score_rows, windows
from axonml_jax.facade.parallel_generate import follow
from axonml_jax.facade.parallel_model import ParallelModel
from axonml_jax.models.generation.generate import continued
from axonml_jax.models.generation.prompts import longest


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
        if (most is not None and length > most) or batch_size < 1:
            raise ValueError(
                f"max_length={length} must be at most the model's {most}, batch_size={batch_size} at least 1"
            )
        self.model, self.tokens_of, self.max_length, self.batch_size = model, tokenizer, length, batch_size
        self.max_gen_toks, self._key = max_gen_toks, jax.random.key(seed)
        self._prefix = _prefix(tokenizer) if prefix is None else tokenizer.id_of(prefix)
        self._end = None if end is None else tokenizer.id_of(end)

    @property
    def tokenizer_name(self) -> str:
        """What tells the tokenizer from another, for caches of requests."""
        return self.tokens_of.fingerprint

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """For every (context, continuation): the continuation's log-likelihood, and whether greedy decoding would write it.

        Of a context that is too long the end is taken. Both are encoded together, and apart where the continuation would have
        no token of its own.

        Raises:
          ValueError: for a continuation that is longer than the model's positions, or that the tokenizer makes no token of.
        """
        return self._scored([self._row(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """The log-likelihood of every text, of any length: each token once, given as many before it as the model sees."""
        texts = [self._ids(text, special=False) for (text,) in (request.args for request in requests)]
        rows = [list(windows(ids, self._prefix, self.max_length)) for ids in texts]
        scores = iter(self._scored([row for each in rows for row in each]))
        return [sum(next(scores)[0] for _ in each) for each in rows]

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
                for number, text in zip(batch, self._written([prompts[n] for n in batch], asked), strict=True):
                    texts[number] = text
        return texts

    def _written(self, prompts: Sequence[Sequence[int]], asked: Asked) -> Iterator[str]:
        """What follows prompts of one length."""
        texts = [Continuation(self.tokens_of, prompt, asked.until, self._end) for prompt in prompts]

        def after_token(tokens: np.ndarray) -> bool:
            for text, token in zip(texts, tokens[:, -1].tolist(), strict=False):
                text.add(token)
            return all(text.ended for text in texts)

        rows = np.asarray([*prompts, *[prompts[-1]] * (self.batch_size - len(prompts))], np.int32)
        with follow(self.model, self.max_length, in_pieces=True) as after:
            continued(after, rows, asked.length, self._key, asked.sampling, after_token)
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
                f"{context!r}, and nothing would be the likeliest answer of all: leave it out of the task, or give it a text"
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
            "this tokenizer puts no token before a text, and the first token of one has to be given something: "
            "give prefix='<|endoftext|>', or whatever stood between documents in training (of bytes: prefix='\\n')"
        )
    return int(tokenizer.encode([text], special="before")[0][0])
