"""A line of output that is written over, on terminals and in notebooks."""

import shutil
from typing import TextIO


def rewrites(file: TextIO) -> bool:
    """Whether a carriage return takes a stream back to the start of its line: on a terminal and in a notebook's cell."""
    notebook = any(kind.__module__.split(".")[0] == "ipykernel" for kind in type(file).__mro__)
    return notebook or file.isatty()


class OneLine:
    """Texts of which the last is seen, and those that stay above it.

    Args:
      file: a stream that `rewrites`.
    """

    def __init__(self, file: TextIO):
        self._file, self._shown = file, ""

    def show(self, text: str) -> None:
        """Write a text over the one that is seen. A terminal gets one line of it at most: going back reaches no second line."""
        if self._file.isatty():
            text = text[: max(shutil.get_terminal_size().columns - 1, 0)]
        self._write("\r" + text + " " * (len(self._shown) - len(text)))
        self._shown = text

    def keep(self, text: str) -> None:
        """Put a text above the one that is seen."""
        shown, above = self._shown, text + " " * (len(self._shown) - len(text))
        self._write(f"\r{above}\n{shown}" if shown else f"{text}\n")

    def end(self) -> None:
        """Leave what is seen, and begin a line below it."""
        if self._shown:
            self._write("\n")
        self._shown = ""

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()
