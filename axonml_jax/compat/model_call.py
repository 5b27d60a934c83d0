"""A call of the model as one equation of a traced loss, of which only the shapes are known: it is run in another way."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

PRIMITIVE = "model_call"
"""The name of its equations."""


class Transformed(Exception):
    """What a loss does with a model of which shapes alone do not tell what it is, as words behind "the loss"."""


def model_call(number: int, arrays: Sequence[Any], made: Sequence[Any]) -> list[jax.Array]:
    """The results of a call, in a trace.

    Args:
      number: tells it from the trace's other calls.
      arrays: its operands.
      made: the abstract values of its results; varying types are left out.

    Raises:
      Transformed: under `jax.grad`, `jax.vmap` and the like, inside of the trace.
    """
    untyped = tuple(ShapedArray(aval.shape, aval.dtype) for aval in made)
    return _call.bind(*arrays, number=number, made=untyped)


def _refuse(*args: Any, **options: Any) -> Any:
    raise Transformed("differentiates or maps the model")


_call = Primitive(PRIMITIVE)
_call.multiple_results = True
_call.def_impl(_refuse)
_call.def_abstract_eval(lambda *avals, number, made: list(made))
ad.primitive_jvps[_call] = _refuse
batching.primitive_batchers[_call] = _refuse
