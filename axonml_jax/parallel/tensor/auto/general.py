"""Flax's `LinearGeneral`, `Einsum` and `MultiHeadAttention` with their weights split over one mesh axis."""

import jax
from flax import nnx

from axonml_jax.collectives.gradients.pairs import copy_to, gather_from, own_slice, reduce_from
from axonml_jax.parallel.tensor.bound_axes import bound, degree
from axonml_jax.parallel.tensor.products.substitute import substitute
from axonml_jax.parallel.tensor.whole.whole_reads import left_split, own_part, taken_split


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
            own = {"kernel": own_part(self.kernel), "bias": None}
            y = nnx.LinearGeneral.__call__(
                substitute(self, in_features=ours, **own), taken_split(self, inputs, self.mesh_axis)
            )
            y = reduce_from(y, axes)
            return y if self.bias is None else y + self.bias[...].astype(y.dtype)
        ours = (self.out_features[0] // count, *self.out_features[1:])
        own = {"kernel": own_part(self.kernel), "bias": None if self.bias is None else own_part(self.bias)}
        y = nnx.LinearGeneral.__call__(substitute(self, out_features=ours, **own), copy_to(inputs, axes))
        return gather_from(y, axes, -len(ours)) if self.gather_output else left_split(self, y, self.mesh_axis)


class SplitEinsum(nnx.Einsum):
    """`nnx.Einsum` with one of the kernel's letters split; made by `auto_parallelize`.

    Attributes:
      mesh_axis: the mesh axis.
      letter: the letter.
      part: "column": only the kernel and the result have it; "row": it is summed over, and the input is this rank's part.
      gather_output: whether a column returns the whole.

    Communicates: a column an all-reduce of x backward and, gathering, an all-gather of y; a row an all-reduce of y.
    """

    mesh_axis: str
    letter: str
    part: str
    gather_output: bool

    def __call__(self, inputs: jax.Array, einsum_str: str | None = None, out_sharding=None) -> jax.Array:
        """Arguments as `nnx.Einsum` takes them."""
        axes = bound(self.mesh_axis)
        if not axes:
            return super().__call__(inputs, einsum_str, out_sharding)
        if self.einsum_str is None:
            raise ValueError(f"SplitEinsum was split by the letter {self.letter!r} of its own equation, which is gone")
        kernel = own_part(self.kernel)
        ours = {"kernel": kernel, "kernel_shape": kernel.shape}
        if self.part == "row":
            inputs = taken_split(self, inputs, self.mesh_axis)
            y = nnx.Einsum.__call__(substitute(self, bias=None, **ours), inputs, einsum_str)
            return self._with_bias(reduce_from(y, axes))
        bias = None if self.bias is None else own_part(self.bias)
        y = nnx.Einsum.__call__(substitute(self, bias=bias, **ours), copy_to(inputs, axes), einsum_str)
        if not self.gather_output:
            return left_split(self, y, self.mesh_axis)
        return gather_from(y, axes, result_dim(self.einsum_str, self.letter))

    def _with_bias(self, y: jax.Array) -> jax.Array:
        if self.bias is None or self.einsum_str is None:
            return y
        _, kernel, result = letters_of(self.einsum_str)
        before, _, after = result.partition("...")
        sizes = dict(zip([c for c in before + after if c in kernel], self.bias.shape, strict=True))
        dots = [1] * (y.ndim - len(before) - len(after))
        shape = [*(sizes.get(c, 1) for c in before), *dots, *(sizes.get(c, 1) for c in after)]
        return y + self.bias[...].astype(y.dtype).reshape(shape)


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
    _, _, result = letters_of(equation)
    before, dots, after = result.partition("...")
    if dots and letter in before:
        return before.index(letter)
    tail = after if dots else result
    return tail.index(letter) - len(tail)


def letters_of(equation: str) -> tuple[str, str, str]:
    """The letters of an einsum's input, kernel and result.

    >>> letters_of("bsh, hnd -> bsnd")
    ('bsh', 'hnd', 'bsnd')
    """
    operands, _, result = equation.replace(" ", "").partition("->")
    given, kernel = operands.split(",")
    return given, kernel, result
