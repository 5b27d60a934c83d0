"""Text of tokens as they come, piece by piece."""

from collections.abc import Sequence

from axonml_jax.data.documents.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"


class TextSoFar:
    """Gives the text that tokens add, and holds back what may be the beginning of a character.

    >>> from axonml_jax.data.documents.tokenizer import ByteTokenizer
    >>> text = TextSoFar(ByteTokenizer())
    >>> [text.add([110]), text.add([195]), text.add([169]), text.add([], final=True)]
    ['n', '', 'é', '']

    Args:
      tokenizer: tokens to text.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = 0

    def add(self, ids: Sequence[int], *, final: bool = False) -> str:
        """What these tokens add; `final`: and what was held back."""
        self._ids += [int(i) for i in ids]
        text = self._tokenizer.decode(self._ids)
        whole = text if final else text.rstrip(_INCOMPLETE)
        piece, self._given = whole[self._given :], max(self._given, len(whole))
        return piece
