"""Samples to documents: token ids, and how many of the first are a prompt that nothing is learned from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from axonml_jax.data.documents.tokenizer import Tokenizer
from axonml_jax.data.sources.found_files import kept_fields


class Document(NamedTuple):
    """Tokens of one text.

    Attributes:
      ids: int32 [n].
      prompt: how many of the first are given, so that their prediction counts for nothing.
    """

    ids: np.ndarray
    prompt: int


@dataclass(frozen=True, kw_only=True)
class DocumentEncoder:
    """What makes documents of samples.

    Attributes:
      tokenizer: text to token ids.
      fields: the sample's fields that are the text, one after the other with an empty line between.
      prompt_field, completion_field: instead, what is given and what is learned; both or none.
      end: a token to add after every document, by name; None: none.
    """

    tokenizer: Tokenizer
    fields: Sequence[str] = ("text",)
    prompt_field: str | None = None
    completion_field: str | None = None
    end: str | None = None

    def __post_init__(self):
        if (self.prompt_field is None) != (self.completion_field is None):
            raise ValueError(
                f"prompt_field={self.prompt_field!r}, completion_field={self.completion_field!r}: give both or none"
            )
        if isinstance(self.fields, str) or not self.fields:
            raise ValueError(f"fields={self.fields!r}: give names, such as [text]")
        if self.end is not None:
            self.tokenizer.id_of(self.end)

    @property
    def fingerprint(self) -> str:
        """What tells its documents from those of another."""
        return "/".join(map(str, (self.tokenizer.fingerprint, *self.names, self.end)))

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that are read."""
        if self.prompt_field is not None and self.completion_field is not None:
            return (self.prompt_field, self.completion_field)
        return tuple(self.fields)

    def texts(self, sample: Any) -> list[str]:
        """The texts of the fields that are read; a string is its own.

        Raises:
          ValueError: a field is missing.
          TypeError: a field is no text.
        """
        if isinstance(sample, str):
            sample = {self.names[0]: sample}
        kept = kept_fields(sample, self.names, "the sample")
        if wrong := [f"{name}: {type(value).__name__}" for name, value in kept.items() if not isinstance(value, str)]:
            raise TypeError(f"these fields of a sample are no text: {', '.join(wrong)}")
        return list(kept.values())

    def __call__(self, samples: Sequence[Any]) -> list[Document]:
        """Documents of samples; several at once are tokenized on all cores."""
        texts = [self.texts(sample) for sample in samples]
        end = [] if self.end is None else [np.array([self.tokenizer.id_of(self.end)], np.int32)]
        if self.prompt_field is None:
            found = self.tokenizer.encode(["\n\n".join(each) for each in texts])
            return [Document(np.concatenate([ids, *end]), 0) for ids in found]
        prompts = self.tokenizer.encode([prompt for prompt, _ in texts], special="before")
        completions = self.tokenizer.encode([completion for _, completion in texts], special=False)
        return [
            Document(np.concatenate([prompt, completion, *end]), len(prompt))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
