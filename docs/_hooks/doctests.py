"""Griffe extension: examples in docstrings are shown as code; as plain Markdown they would be quotations and links."""

import re

import griffe

EXAMPLE = re.compile(r"(?:^>>>.*\n?(?:^[^\n]+\n?)*)+", re.MULTILINE)


class Fenced(griffe.Extension):
    """Puts a fence around every doctest."""

    def on_instance(self, *, obj, **_):
        """Called with every object that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text):
    """Markdown with a fence around every block of lines that begins with `>>>`, up to the next empty line."""
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)
