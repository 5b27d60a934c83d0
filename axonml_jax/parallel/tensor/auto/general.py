"""Flax's `LinearGeneral`, `Einsum` and `MultiHeadAttention` with their weights split over one mesh axis."""

import jax
from flax import nnx

from axonml_jax.collectives.pairs import copy_to, gather_from, own_slice, reduce_from
from axonml_jax.parallel.tensor.axes import bound, degree
from axonml_jax.parallel.tensor.substitute import substitute


class SplitLinearGeneral(nnx.LinearGeneral):
    """`nnx.LinearGeneral` whose first output dim ("column") or first input dim ("row") is split; made by `auto_parallelize`.

    Attributes:
      mesh_axis: the mesh axis.
      part: "column" or "row"; a row takes this rank's part of its input and returns the whole.
      gather_output: whether a column returns the whole.

    Communicates: a column an all-reduce of x backward and, gathering, an all-gather of y; a row an all-reduce of y.
    """

    mesh_axis: str
    part: str
    gather_output: bool

    def __call__(self, inputs: jax.Array, out_sharding=None) -> jax.Array:
        """Arguments as `nnx.LinearGeneral` takes them."""
        axes = bound(self.mesh_axis)
        if not axes:
            return super().__call__(inputs, out_sharding)
        count = degree(axes)
        if self.part == "row":
            ours = (self.in_features[0] // count, *self.in_features[1:])
            y = nnx.LinearGeneral.__call__(substitute(self, in_features=ours, bias=None), inputs)
            y = reduce_from(y, axes)
            return y if self.bias is None else y + self.bias[...].astype(y.dtype)
        ours = (self.out_features[0] // count, *self.out_features[1:])
        y = nnx.LinearGeneral.__call__(substitute(self, out_features=ours), copy_to(inputs, axes))
        return gather_from(y, axes, -len(ours)) if self.gather_output else y


class SplitEinsum(nnx.Einsum):
    """`nnx.Einsum` with one of the kernel's output letters split; it returns the whole. Made by `auto_parallelize`.

    Attributes:
      mesh_axis: the mesh axis.
      letter: the letter.

    Communicates: an all-gather of y forward, an all-reduce of x backward.
    """

    mesh_axis: str
    letter: str

    def __call__(self, inputs: jax.Array, einsum_str: str | None = None, out_sharding=None) -> jax.Array:
        """Arguments as `nnx.Einsum` takes them."""
        axes = bound(self.mesh_axis)
        if not axes:
            return super().__call__(inputs, einsum_str, out_sharding)
        if self.einsum_str is None:
            raise ValueError(f"SplitEinsum was split by the letter {self.letter!r} of its own equation, which is gone")
        x, kernel = copy_to(inputs, axes), self.kernel[...]
        y = nnx.Einsum.__call__(substitute(self, kernel_shape=kernel.shape), x, einsum_str)
        return gather_from(y, axes, result_dim(self.einsum_str, self.letter))


class SplitHeadsAttention(nnx.MultiHeadAttention):
    """`nnx.MultiHeadAttention` whose projections are split by heads; made by `auto_parallelize`.

    Attributes:
      mesh_axis: the mesh axis.

    Communicates: an all-reduce of its output forward and of its inputs backward.
    """

    mesh_axis: str

    def __call__(self, inputs_q, inputs_k=None, inputs_v=None, *, mask=None, **options):
        """Arguments as `nnx.MultiHeadAttention` takes them; a mask may differ from head to head."""
        axes = bound(self.mesh_axis)
        if axes and mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
            mask = own_slice(mask, axes, mask.ndim - 3)
        return super().__call__(inputs_q, inputs_k, inputs_v, mask=mask, **options)


def result_dim(equation: str, letter: str) -> int:
    """The dim of an einsum's result that a letter names, counted from the end that has no ellipsis between.

    >>> result_dim("...a,ab->...b", "b"), result_dim("ab,bc->c...", "c")
    (-1, 0)
    """
    result = equation.replace(" ", "").partition("->")[2]
    before, dots, after = result.partition("...")
    if dots and letter in before:
        return before.index(letter)
    tail = after if dots else result
    return tail.index(letter) - len(tail)
