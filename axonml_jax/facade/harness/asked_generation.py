"""What a task asks of a generation, and the text of one prompt as its tokens come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from axonml_jax.data.documents.text_so_far import TextSoFar
from axonml_jax.data.documents.tokenizer import Tokenizer
from axonml_jax.models.generation.sampling import Sampling

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What tasks call the number of new tokens; the first that is given counts."""


@dataclass(frozen=True)
class Asked:
    """How a text shall go on.

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
        """What a request's options mean; without `do_sample` the most likely token is taken.

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
        problems = [f"{name}={given[name]!r} is read by nothing here: leave it out" for name in unknown]
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
