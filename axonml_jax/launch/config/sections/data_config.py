"""The section `data`: what is trained on, and how it becomes examples."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from axonml_jax.data.text import TEXT_SUFFIXES
from axonml_jax.launch.config.lowest import at_least

BYTES = "bytes"
_OF_OWN = ("class_path", "init_args", "valid", "valid_fraction", "num_workers")
_DOCUMENT_FILES = (".jsonl", ".ndjson", ".parquet")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on: text as one stream of bytes or tokens, or documents as tokens.

    Attributes:
      path: a folder, or a file; null takes the source of the standard library of the running Python.
      format: of documents: text (every file is one), jsonl or parquet; null goes by the names.
      fields: of documents: the fields of a sample that are its text.
      prompt_field: the field that is given and not learned; with completion_field, in place of fields.
      completion_field: the field that is learned.
      mixture: paths of documents and their shares of the examples, in place of path.
      tokenizer: bytes, or the path of a tokenizer.json.
      end: a token to add after every document, by name.
      pack: windows cuts text, as one stream of bytes or of a tokenizer's tokens; documents lets documents share examples, none
        of which sees another; alone gives each document its own; null is documents where anything says that there are some (a
        tokenizer does of a folder), else windows.
      length: tokens per training example.
      max_bytes: read no more than this; null reads everything.
      valid_fraction: share kept for validation, of the bytes or of the documents.
      num_workers: processes that load batches ahead; 0 loads in this one.
      class_path: data of one's own, in place of text and documents: a dataset, a dict of arrays or something to iterate over,
        by the path of the class or function that makes it.
      init_args: its arguments.
      valid: what to validate on, a class_path with init_args; null takes valid_fraction of data with a length.
    """

    path: str | None = None
    format: Literal["text", "jsonl", "parquet"] | None = None
    fields: tuple[str, ...] = ("text",)
    prompt_field: str | None = None
    completion_field: str | None = None
    mixture: dict[str, float] | None = None
    tokenizer: str = BYTES
    end: str | None = None
    pack: Literal["windows", "documents", "alone"] | None = None
    length: int = 128
    max_bytes: int | None = 8_000_000
    valid_fraction: float = 0.1
    num_workers: int = 0
    class_path: str | None = None
    init_args: dict[str, Any] | None = None
    valid: dict[str, Any] | None = None

    def __post_init__(self):
        problems = self._problems() if self.class_path is None else self._problems_of_own()
        at_least("data", self, list(problems), length=1, num_workers=0)

    @property
    def documents(self) -> bool:
        """Whether examples are made of documents, which the model keeps apart."""
        if self.class_path is not None:
            return False
        if self.pack:
            return self.pack != "windows"
        one_text = (self.path or "").endswith(TEXT_SUFFIXES)
        return bool(self._of_documents()) or (self.tokenizer != BYTES and not one_text)

    def _of_documents(self) -> list[str]:
        """The settings that only documents have."""
        found = [
            name for name in ("format", "prompt_field", "completion_field", "mixture", "end") if getattr(self, name)
        ]
        found += ["fields"] * (self.fields != ("text",))
        return found + ["path"] * (self.path or "").endswith(_DOCUMENT_FILES)

    def _problems_of_own(self) -> Iterator[str]:
        defaults = {field.name: field.default for field in fields(self)}
        for name, default in defaults.items():
            if name not in _OF_OWN and getattr(self, name) != default:
                yield f"{name} has no effect beside class_path, whose data has its own examples: leave it out"
        if self.valid is not None and self.valid_fraction != defaults["valid_fraction"]:
            yield "valid_fraction has no effect beside valid: give one"
        if not 0 < self.valid_fraction < 1:
            yield f"valid_fraction={self.valid_fraction}: must be between 0 and 1"

    def _problems(self) -> Iterator[str]:
        for name in ("init_args", "valid"):
            if getattr(self, name) is not None:
                yield f"{name} has no effect without class_path"
        if self.pack == "windows" and (found := self._of_documents()):
            yield f"pack=windows cuts text as one stream, without {', '.join(found)}: leave pack out, or those"
        if (self.prompt_field is None) != (self.completion_field is None):
            yield f"prompt_field={self.prompt_field} and completion_field={self.completion_field}: give both or none"
        if self.prompt_field and self.fields != ("text",):
            yield "fields has no effect beside prompt_field and completion_field: leave it out"
        if not self.fields:
            yield "fields is empty: name the fields of a sample that are its text"
        if self.mixture is not None and self.path is not None:
            yield "path and mixture both say what to read: give one"
        for path, share in (self.mixture or {}).items():
            if not 0 < share < math.inf:
                yield f"mixture: the share of {path} is {share}: must be positive and finite"
        if self.documents and self.path is None and not self.mixture:
            tokens = ["tokenizer"] * (self.tokenizer != BYTES and not self.pack)
            asks = ", ".join(self._of_documents() + tokens) or f"pack={self.pack}"
            yield (
                f"path: documents, which {asks} asks for, are read from a path or a mixture; without them only pack=windows "
                "has a text of its own"
            )
