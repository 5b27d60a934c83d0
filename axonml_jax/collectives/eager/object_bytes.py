"""A Python object as bytes: JSON where that holds all of it, else a pickle, unless pickles are forbidden here."""

import json
import os
import pickle
from collections.abc import Mapping
from typing import Any

NO_PICKLE = "AXONML_JAX_NO_PICKLE"
"""Set to 1, no process unpickles what another one sends: `*_object` collectives carry JSON values alone."""

_JSON, _PICKLE = b"J", b"P"
_SWITCH = {"": False, "0": False, "1": True}


class OnlyPickled(ValueError):
    """An object that only a pickle can carry, where pickles are forbidden."""


def encoded(obj: Any, environ: Mapping[str, str] = os.environ) -> bytes:
    """The bytes of an object.

    Args:
      obj: None, a boolean, number or text, or lists and dicts (with text as keys) of these; anything else is pickled.
      environ: where `NO_PICKLE` may stand.

    Raises:
      OnlyPickled: naming what of it is none of these, when pickles are forbidden.

    >>> encoded({"step": 1}), decoded(encoded({"step": (1, 2)}))
    (b'J{"step": 1}', {'step': (1, 2)})
    """
    try:
        strange = _strange(obj)
        if strange is None:
            return _JSON + json.dumps(obj).encode()
    except (RecursionError, ValueError):  # holds itself, is nested without end, or has a number of thousands of digits
        strange = "the object is nested too deep or has too long a number"
    if pickles_forbidden(environ):
        raise OnlyPickled(strange)
    return _PICKLE + pickle.dumps(obj)


def decoded(data: bytes, environ: Mapping[str, str] = os.environ) -> Any:
    """The object of some bytes. A pickle may run code while it is read.

    Raises:
      OnlyPickled: for a pickle, when these are forbidden.
    """
    if data[:1] == _JSON:
        return json.loads(data[1:])
    if pickles_forbidden(environ):
        raise OnlyPickled("a pickle came, from a process in which they are not forbidden")
    return pickle.loads(data[1:])


def pickles_forbidden(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `NO_PICKLE` is set.

    Raises:
      ValueError: when it is set to something else than 0 or 1.

    >>> pickles_forbidden({}), pickles_forbidden({"AXONML_JAX_NO_PICKLE": "1"})
    (False, True)
    """
    given = environ.get(NO_PICKLE, "")
    if given not in _SWITCH:
        raise ValueError(f"{NO_PICKLE}={given!r}: must be 1 (no pickles), or 0")
    return _SWITCH[given]


def _strange(value: Any, place: str = "") -> str | None:
    """What of a value JSON does not give back as it was; None when there is nothing."""
    kind = type(value)
    if value is None or kind in (bool, int, float):
        return None
    if kind is str:
        return None if _is_unicode(value) else f"{place or 'it'} is text with half a character"
    if kind is list:
        parts = ((f"{place}[{number}]", each) for number, each in enumerate(value))
    elif kind is dict:
        if keys := [key for key in value if type(key) is not str or not _is_unicode(key)]:
            return f"{place or 'it'} has the key {keys[0]!r:.60}"
        parts = ((f"{place}[{key!r}]", each) for key, each in value.items())
    else:
        return f"{place or 'it'} is a {kind.__name__}"
    return next((found for at, each in parts if (found := _strange(each, at))), None)


def _is_unicode(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False
