"""Seeded changes of valid documents: of their bytes, and of the values that they hold."""

import copy
import json

TOKENS = (
    *(b"\0", b"\xff", b"\xff\xfe", b"{", b"}", b"[", b"]", b'"', b"\\", b":", b",", b"\n", b"-"),
    *(b"&a ", b"*a", b"<<: *a\n", b"!!", b"? "),
    *(b"1e999", b"NaN", b"null", b"true", b"-1", b"../", b"/etc/passwd", b"\\ud800", b"\\u0000", b"9" * 30),
    *(b"[" * 2000, b'{"a":' * 2000, b"9" * 5000, b"0x" + b"f" * 9000, b"a: " * 200),
)  # fmt: skip
"""What is put into the middle of bytes."""

VALUES = (
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**63, 2**70, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "../x", "/etc/passwd", "a/../../x", "\0", "\ud800", "9" * 5000, "x" * 20_000),
    *([], [0], [[]], [None] * 50, {}, {"x": 1}, {"": {}}),
)
"""What is put in the place of a value."""


def deep(levels: int) -> list:
    """A list in a list, and so on."""
    found: list = []
    for _ in range(levels):
        found = [found]
    return found


def of_bytes(data: bytes, draw) -> bytes:
    """The bytes with one to four changes."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at, length = draw.randrange(len(out) + 1), draw.choice((1, 2, 8, 64, 1000))
        kind = draw.choice(("flip", "flip", "cut", "insert", "double", "end", "move", "splice"))
        if kind == "flip" and at < len(out):
            out[at] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del out[at : at + length]
        elif kind == "insert":
            out[at:at] = draw.choice(TOKENS)
        elif kind == "double":
            out[at:at] = out[at : at + length]
        elif kind == "end":
            del out[at:]
        elif kind == "move":
            part = out[at : at + length]
            del out[at : at + length]
            to = draw.randrange(len(out) + 1)
            out[to:to] = part
        elif kind == "splice" and out:
            out[at : at + length] = bytes(draw.randrange(256) for _ in range(draw.choice((1, 4, 16))))
    return bytes(out)


def places(value, path=()):
    """Every place in nested values, the outermost first."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places(each, (*path, key))


def of_values(value, draw, names=()):
    """The values with one to three removed, renamed, doubled, exchanged or replaced.

    Args:
      value: nested dicts and lists.
      draw: a `random.Random`.
      names: what keys may be called by chance.
    """
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 2, 3))):
        try:
            inner = [place for place in places(value) if place]
        except RecursionError:  # nested deep enough
            return value
        if not inner:
            return draw.choice(VALUES)
        *path, last = draw.choice(inner)
        holder = value
        for name in path:
            holder = holder[name]
        kind = draw.choice(("remove", "rename", "double", "replace", "replace", "replace", "exchange", "deep", "many"))
        if kind == "remove":
            del holder[last]
        elif kind == "rename" and isinstance(holder, dict):
            holder[draw.choice(("x", "", "..", "/", "\0", str(last) + "x", *names))] = holder.pop(last)
        elif kind == "double":
            twin = copy.deepcopy(holder[last])
            holder.append(twin) if isinstance(holder, list) else holder.update({f"{last}2": twin})
        elif kind == "exchange" and len(path) < 20:
            holder[last] = copy.deepcopy(_at(value, draw.choice(inner)))
        elif kind == "deep" and len(path) < 20:
            holder[last] = deep(draw.choice((3, 30, 200)))
        elif kind == "many":
            holder[last] = {f"k{i}": i for i in range(draw.choice((10, 3000)))}
        else:
            holder[last] = draw.choice(VALUES)
    return value


def _at(value, path):
    for name in path:
        try:
            value = value[name]
        except (KeyError, IndexError, TypeError):  # an earlier change has taken it away
            return None
    return value


def as_json(value) -> bytes:
    """The text of changed values, whatever they have become."""
    return json.dumps(value).encode()
