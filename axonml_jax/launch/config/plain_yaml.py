"""YAML text as plain values: what would unfold without end, or of which a parser would silently take half, is refused."""

from pathlib import Path
from typing import Any

import yaml

from axonml_jax.launch.config.nearest_file import not_a_file

MOST_BYTES = 2**18
"""Longest text, of which PyYAML reads about 200 kB a second."""

_MOST_VALUES = 20_000
_DEEPEST = 50
_LONGEST_NUMBER = 400
_TOO_LONG = f"it is longer than {MOST_BYTES:,} bytes"


class NotYaml(ValueError):
    """Text that is no YAML, or none that a configuration needs."""


def plain_yaml(text: str) -> Any:
    """The value of a YAML document.

    Args:
      text: the document.

    Raises:
      NotYaml: when it is none; for a key that stands twice in a mapping, an anchor that holds itself, too long a number, and
        for more values (counted as often as aliases repeat them) or a deeper nest than any configuration has.

    >>> plain_yaml("train: {steps: 10}")
    {'train': {'steps': 10}}
    """
    if len(text.encode(errors="replace")) > MOST_BYTES:
        raise NotYaml(_TOO_LONG)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _size(root, {}, ())
        return loader.construct_document(root)
    except RecursionError as error:
        raise NotYaml(f"it is nested deeper than {_DEEPEST} levels") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a date or a number that is none
        raise NotYaml(" ".join(str(error).split())) from error


def yaml_in(path: Path) -> Any:
    """The value of a YAML file, of which no more is read than a configuration has.

    Raises:
      NotYaml: as by `plain_yaml`; when it is a FIFO, or something else that is no file.
      UnicodeDecodeError: when it is no text.
      OSError: when it cannot be read.
    """
    if kind := not_a_file(path):
        raise NotYaml(f"it is {kind}, not a file")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise NotYaml(_TOO_LONG)
    return plain_yaml(content.decode("utf-8"))


def _size(node: yaml.Node, sizes: dict[int, int], above: tuple[int, ...]) -> int:
    """How many values a node is, with those that its aliases repeat."""
    line = f"line {node.start_mark.line + 1}"
    if id(node) in above:
        raise NotYaml(f"{line}: an anchor that holds itself")
    if len(above) >= _DEEPEST:
        raise NotYaml(f"{line}: it is nested deeper than {_DEEPEST} levels")
    if id(node) not in sizes:
        inside, inner = (*above, id(node)), node.value
        if isinstance(node, yaml.MappingNode):
            _refuse_twins(node)
            inner = [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.ScalarNode):
            inner = ()
            if node.tag.endswith((":int", ":float")) and len(node.value) > _LONGEST_NUMBER:
                raise NotYaml(f"{line}: a number of {len(node.value)} digits")
        sizes[id(node)] = 1 + sum(_size(each, sizes, inside) for each in inner)
    if sizes[id(node)] > _MOST_VALUES:
        raise NotYaml(f"{line}: it holds more than {_MOST_VALUES:,} values, aliases unfolded")
    return sizes[id(node)]


def _refuse_twins(mapping: yaml.MappingNode) -> None:
    """YAML forbids a key that stands twice; PyYAML takes the last."""
    seen = set()
    for key, _ in mapping.value:
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in seen:
                raise NotYaml(f"line {key.start_mark.line + 1}: the key {key.value!r:.60} stands twice")
            seen.add((key.tag, key.value))
