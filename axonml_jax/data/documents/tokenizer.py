"""Tokenizers: bytes, or what a `tokenizer.json` of Hugging Face says."""

import contextlib
import functools
import json
import os
import zlib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from axonml_jax.logging import logger

BYTES = "bytes"
"""The name of the tokenizer whose tokens are the bytes of UTF-8."""


_STORED = ("truncation", "padding")
_IDS = 2**31

Special = bool | Literal["before"]
"""Which of the tokens that a tokenizer's rules add around a text are added: all, none, or, as more follows, those before it."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """All ids are below it."""
        ...

    @property
    def fingerprint(self) -> str:
        """What tells it from another."""
        ...

    def encode(self, texts: Sequence[str], *, special: Special = True) -> list[np.ndarray]:
        """Token ids of every text, int32 [n]; with the tokens that its rules add around a text, or without."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special ones left out."""
        ...

    def id_of(self, token: str) -> int:
        """The id of a token; a ValueError where there is none."""
        ...


class ByteTokenizer:
    """Tokens are the bytes of UTF-8; there are no special ones.

    >>> ids = ByteTokenizer().encode(["né"])[0]
    >>> ids.tolist(), ByteTokenizer().decode(ids)
    ([110, 195, 169], 'né')
    """

    vocab_size = 256
    fingerprint = BYTES

    def encode(self, texts: Sequence[str], *, special: Special = True) -> list[np.ndarray]:
        """Bytes of every text, int32 [n]."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of bytes; what is no UTF-8 becomes U+FFFD."""
        return bytes(np.asarray(ids).astype(np.uint8)).decode(errors="replace")

    def id_of(self, token: str) -> int:
        """Of a character that is one byte."""
        if len(found := token.encode()) != 1:
            raise ValueError(f"bytes have no token {token!r}: give a tokenizer.json, or no special tokens")
        return found[0]


class FileTokenizer:
    """A tokenizer of Hugging Face's `tokenizers` library (Rust), by its `tokenizer.json`.

    Args:
      path: the file, or a folder that holds it.

    Raises:
      ImportError: the library is not installed.
      ValueError: there is no such file, or it is none of a tokenizer.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = tokenizer_file(path)

    @functools.cached_property
    def _rules(self) -> Any:
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(
                f"{self.path} needs the library tokenizers: pip install 'axonml-jax[tokenizers]'"
            ) from error
        try:
            rules = tokenizers.Tokenizer.from_file(str(self.path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{self.path} is no tokenizer.json: {error}") from error
        if stored := [name for name in _STORED if getattr(rules, name) is not None]:
            _say_left_out(str(self.path), " and ".join(stored))
        rules.no_truncation()
        rules.no_padding()
        return rules

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, special tokens included.

        Raises:
          ValueError: there are none, or some that no int32 holds.
        """
        return self._size

    @functools.cached_property
    def _size(self) -> int:
        words = self._rules.get_vocab(with_added_tokens=True)
        if not words:
            raise ValueError(f"{self.path} has no tokens: its vocabulary is empty")
        word = max(words, key=words.__getitem__)
        if words[word] >= _IDS:
            raise ValueError(
                f"{self.path}: the token {word!r} has the id {words[word]}, and token ids are int32, below {_IDS}: number its "
                "tokens from 0"
            )
        return words[word] + 1

    @property
    def fingerprint(self) -> str:
        """The CRC-32 of its rules."""
        return self._checksum

    @functools.cached_property
    def _checksum(self) -> str:
        said = json.loads(self.path.read_bytes())
        said |= dict.fromkeys(said.keys() & set(_STORED))  # they change no token
        return f"{zlib.crc32(json.dumps(said, sort_keys=True).encode()):08x}"

    def encode(self, texts: Sequence[str], *, special: Special = True) -> list[np.ndarray]:
        """Token ids of every text, int32 [n], whole whatever the file says of truncation and padding; on all cores.

        Raises:
          ValueError: a text has a word that the tokenizer does not know, and it has no token for unknown ones.
        """
        try:
            found = self._rules.encode_batch(list(texts), add_special_tokens=bool(special))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(
                f"{self.path} cannot encode {self._first_refused(texts)!r:.80}: {error}. Give it a token for unknown words "
                "(unk_token or unk_id of its model, with an id in the vocabulary), or texts of words that it knows"
            ) from error
        if special != "before":
            return [np.asarray(each.ids, np.int32) for each in found]
        ends = [_behind(each.special_tokens_mask) for each in found]
        return [
            np.asarray(each.ids[: self._before if end is None else end], np.int32)
            for each, end in zip(found, ends, strict=True)
        ]

    def _first_refused(self, texts: Sequence[str]) -> str:
        for text in texts:
            try:
                self._rules.encode(text)
            except Exception:
                return text
        return ""

    @functools.cached_property
    def _before(self) -> int:
        """How many tokens the rules add before a text; of an empty one nobody can tell them from those behind it."""
        for text in ("a", *self._rules.get_vocab(with_added_tokens=True)):
            with contextlib.suppress(Exception):  # the library raises bare Exception, of unknown words here
                return self._rules.encode(text).special_tokens_mask.index(0)
        return 0

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special ones left out."""
        return self._rules.decode([int(i) for i in ids])

    def id_of(self, token: str) -> int:
        """The id of a token.

        Raises:
          ValueError: there is none.
        """
        if (found := self._rules.token_to_id(token)) is not None:
            return found
        near = get_close_matches(token, self._rules.get_vocab(with_added_tokens=True), n=1)
        raise ValueError(f"{self.path} has no token {token!r}" + (f": did you mean {near[0]!r}?" if near else ""))


def load_tokenizer(name: str | os.PathLike = BYTES) -> Tokenizer:
    """A tokenizer by name.

    Args:
      name: "bytes", or the path of a `tokenizer.json` of Hugging Face's `tokenizers`, or of a folder that holds it. Nothing is
        downloaded.

    Raises:
      ImportError: the library is not installed.
      ValueError: there is no such file, or it is none of a tokenizer.

    >>> load_tokenizer().vocab_size
    256
    """
    if name == BYTES:
        return ByteTokenizer()
    tokenizer = FileTokenizer(name)
    _ = tokenizer.vocab_size  # refuse now what would fail in the middle of a run
    return tokenizer


def vocabulary_offenders(tokenizer: Tokenizer, vocab_size: int, what: str = "vocab_size") -> list[str]:
    """What is wrong with a model's vocabulary for a tokenizer, for the caller's error message."""
    if vocab_size >= tokenizer.vocab_size:
        return []
    return [f"{what}={vocab_size}: the tokenizer has {tokenizer.vocab_size} token ids; set it to at least that"]


@functools.cache
def _say_left_out(path: str, stored: str) -> None:
    logger.warning(
        "%s stores %s, as it was last used for batches of equal length: left out, so that documents are whole and nothing is "
        "learned of padding",
        path,
        stored,
    )


def _behind(mask: Sequence[int]) -> int | None:
    """Where the tokens begin that are added behind a text; None: it has no tokens of its own."""
    return max((i + 1 for i, added in enumerate(mask) if not added), default=None)


def tokenizer_file(path: str | os.PathLike) -> Path:
    """The `tokenizer.json` that a path names, itself or the folder that holds it.

    Raises:
      ValueError: there is none.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"no tokenizer at {str(path)!r}: give {BYTES!r}, the path of a tokenizer.json, or of a folder that holds one"
        )
    return file
