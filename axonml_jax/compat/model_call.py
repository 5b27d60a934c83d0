"""A primitive that stands for a call of the model in a traced loss; only the shapes of its results are known."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

PRIMITIVE = "model_call"
"""The name of the primitive in traced programs."""


class Transformed(Exception):
    """Raised where a loss does something to the model that shapes alone do not describe; the message follows "the loss"."""


def model_call(number: int, arrays: Sequence[Any], made: Sequence[Any]) -> list[jax.Array]:
    """Binds the primitive, and returns stand-ins for the results of a call.

    Args:
      number: the number of the call, different for every call of a trace.
      arrays: its operands.
      made: the abstract values of its results, whose varying types are dropped.

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
