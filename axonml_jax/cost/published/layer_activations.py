"""Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models": bytes kept by one layer."""

from fractions import Fraction

from axonml_jax.cost.wire import Amount, exact


def layer_bytes(
    length: int,
    batch: int,
    hidden: int,
    heads: int,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    selective: bool = False,
) -> Amount:
    """Bytes that one GPT layer with 16-bit activations keeps of one microbatch for its backward.

    s length, b batch, h hidden, a heads, t tensor ranks: sbh(34 + 5as/h); over t ranks sbh(10 + 24/t + 5as/(ht)); with
    sequence parallelism all of it over t. Selective recomputation drops the attention term 5as/h, which leaves 34sbh/t with
    sequence parallelism.

    >>> layer_bytes(2048, 1, 12288, 96) == 2048 * 12288 * (34 + 5 * 96 * 2048 // 12288)
    True
    """
    attention = Fraction(0 if selective else 5 * heads * length, hidden)
    outside = Fraction(10, tensor if sequence_parallel else 1)
    return exact(length * batch * hidden * (outside + (24 + attention) / tensor))
