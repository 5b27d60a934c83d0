"""`ParallelDropout`: dropout whose masks do not depend on how a dim is split over ranks."""

import jax
import jax.numpy as jnp
from flax import nnx

from axonml_jax.collectives.primitives import axis_index
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.parallel.tensor.bound_axes import bound


class ParallelDropout(nnx.Dropout):
    """`nnx.Dropout` with a key for every index of one dim, such as every head or every position of the sequence.

    Each rank draws the masks of its own indices, and any number of ranks draws the same masks.

    Args:
      rate: the probability of being dropped.
      dim: the dim, counted from the end, of which a rank may hold a part.
      axis: the mesh axes that split that dim; none: it is whole.
      rngs: stream `dropout`; None: without random state, for a rate of 0.
    """

    def __init__(self, rate: float, *, dim: int, axis: AxisNames = (), rngs: nnx.Rngs | None):
        super().__init__(rate, rngs=rngs)
        self.dim, self.axis = dim, axis

    def __call__(self, inputs: jax.Array, *, deterministic: bool | None = None, rngs=None) -> jax.Array:
        """Arguments as `nnx.Dropout` takes them."""
        off = self.deterministic if deterministic is None else deterministic
        if self.rate in (0.0, 1.0) or off:
            return super().__call__(inputs, deterministic=off, rngs=rngs)
        key = self._key(self.rngs if rngs is None else rngs)
        dim = self.dim % inputs.ndim
        own = jnp.arange(inputs.shape[dim])
        if axes := bound(self.axis):
            own = own + axis_index(axes) * inputs.shape[dim]
        others = [size for i, size in enumerate(inputs.shape) if i != dim]
        draw = lambda index: jax.random.bernoulli(jax.random.fold_in(key, index), 1 - self.rate, others)
        kept = jax.vmap(draw, out_axes=dim)(own)
        return jnp.where(kept, inputs / (1 - self.rate), jnp.zeros_like(inputs))

    def _key(self, source) -> jax.Array:
        if isinstance(source, nnx.Rngs):
            return source[self.rng_collection]()
        return source() if isinstance(source, nnx.RngStream) else source
