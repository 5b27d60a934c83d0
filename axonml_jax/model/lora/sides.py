"""Which dims of a parameter number matrices, and which are the two sides of the matrix that a product multiplies by.

A kernel [h, n, d] that attention multiplies x [..., h] by is the matrix [h, n * d], not a stack of h matrices [n, d].
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx

STACKED = "stacked_dims"
"""Metadata of a parameter: so many of its first dims number matrices, as layers of a stack or experts do."""

WORDS = {"stack": "s", "in": "i", "out": "o"}
"""What a dim may be called: it numbers matrices, is summed over by the product, or is one of its results."""


@dataclass(frozen=True)
class Sides:
    """The dims of a parameter, of which the first ones may number matrices.

    Attributes:
      stacked: so many first dims number matrices.
      roles: of each of the others "i" where the product sums over it, "o" where its result has it.
    """

    stacked: int = 0
    roles: str = "io"

    def dims(self, role: str, behind: int | None = None) -> tuple[int, ...]:
        """The dims of that role in the parameter, or among those behind the first `behind` ones in the place of the stack's."""
        first = self.stacked if behind is None else behind
        return tuple(first + k for k, each in enumerate(self.roles) if each == role)

    def sizes(self, role: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The sizes of the dims of that role."""
        return tuple(shape[dim] for dim in self.dims(role))

    def words(self) -> str:
        """As `dims` of `ax.lora` says it.

        >>> Sides(1, "ioo").words()
        'stack in out out'
        """
        return " ".join(["stack"] * self.stacked + ["in" if role == "i" else "out" for role in self.roles])

    def joined(self, a: Any, b: Any) -> Any:
        """A B [*stack, ...] as the parameter lies, of A [*stack, *in, r] and B [*stack, r, *out]."""
        if self.roles == "io":
            return a @ b
        stack, rank, inputs, outputs = (
            a.shape[: self.stacked],
            a.shape[-1],
            a.shape[self.stacked : -1],
            b.shape[self.stacked + 1 :],
        )
        flat = a.reshape(*stack, math.prod(inputs), rank) @ b.reshape(*stack, rank, math.prod(outputs))
        made, places = flat.reshape(*stack, *inputs, *outputs), [*self.dims("i"), *self.dims("o")]
        return jnp.transpose(
            made, [*range(self.stacked), *(self.stacked + places.index(d) for d in range(self.stacked, made.ndim))]
        )


def said_sides(words: str) -> Sides | str:
    """The sides that a text such as "in out out" says, or what is wrong with it.

    >>> said_sides("stack in out"), said_sides("in in")
    (Sides(stacked=1, roles='io'), "'in in' needs at least one in and one out, and stack only in front")
    """
    roles = "".join(WORDS.get(word, "?") for word in str(words).split())
    own = roles.lstrip("s")
    if "?" in roles:
        return f"{words!r} must be made of the words {', '.join(WORDS)}, one for every dim"
    if set(own) != {"i", "o"}:
        return f"{words!r} needs at least one in and one out, and stack only in front"
    return Sides(len(roles) - len(own), own)


def layer_sides(model: nnx.Module) -> dict[str, Sides]:
    """The sides of kernels whose layers say how they multiply: `nnx.LinearGeneral`, and layers with an `einsum_str`.

    What a stack of such layers has besides, its first dims, is not counted.
    """
    found: dict[str, Sides] = {}
    for path, module in nnx.iter_graph(model):
        if not isinstance(module, nnx.Module):
            continue
        sides = None
        if isinstance(module, nnx.LinearGeneral):
            sides = Sides(len(module.batch_axis), "i" * len(module.in_features) + "o" * len(module.out_features))
        elif isinstance(text := getattr(module, "einsum_str", None), str):
            sides = _of_einsum(text)
        if sides is not None and (name := _kernel(module, sides)) is not None:
            found["/".join(map(str, (*path, name)))] = sides
    return found


def bias_sides(shapes: Mapping[str, Any], name: str) -> Sides | None:
    """The sides of a Linen kernel whose bias has the dims of its results; None where it has none, or where they leave a doubt.

    >>> import numpy as np
    >>> bias_sides({"q/kernel": np.ones((8, 2, 4)), "q/bias": np.ones((2, 4))}, "q/kernel")
    Sides(stacked=0, roles='ioo')
    """
    bias = shapes.get(name.removesuffix("kernel") + "bias") if name.endswith("/kernel") else None
    if bias is None:
        return None
    shape, own = tuple(shapes[name].shape), tuple(bias.shape)
    fits = [
        Sides(stacked, "i" * (len(shape) - len(own)) + "o" * (len(own) - stacked))
        for stacked in range(len(own))
        if 0 < len(own) < len(shape) and own == (*shape[:stacked], *shape[len(shape) - len(own) + stacked :])
    ]
    return fits[0] if len(fits) == 1 else None


def _kernel(module: nnx.Module, sides: Sides) -> str | None:
    """The name of the parameter that a layer multiplies by."""
    least = sides.stacked + len(sides.roles)
    params = {name: each for name, each in vars(module).items() if isinstance(each, nnx.Param)}
    fitting = [name for name, each in params.items() if name != "bias" and len(each.shape) >= least]
    return "kernel" if "kernel" in fitting else fitting[0] if len(fitting) == 1 else None


def _of_einsum(text: str) -> Sides | None:
    """Of the second operand; None where it is no product of a value with a matrix.

    >>> _of_einsum("BSD,CKDH->CBSKH"), _of_einsum("BTNH,NHD->BTD"), _of_einsum("...d,df->...f")
    (Sides(stacked=0, roles='ooio'), Sides(stacked=0, roles='iio'), Sides(stacked=0, roles='io'))
    """
    operands, arrow, made = text.replace(" ", "").partition("->")
    value, comma, kernel = operands.partition(",")
    if not arrow or not comma or not kernel.isalpha() or len(set(kernel)) < len(kernel):
        return None
    roles = "".join(
        ("s" if each in made else "i") if each in value else "o" if each in made else "?" for each in kernel
    )
    own = roles.lstrip("s")
    return Sides(len(roles) - len(own), own) if set(own) == {"i", "o"} else None
