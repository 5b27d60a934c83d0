"""`ParallelDropout`: dropout whose masks do not depend on how a dim is split over ranks."""

import jax
import jax.numpy as jnp
from flax import nnx

from axonml_jax.collectives.primitives import axis_index
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.parallel.context.context_split import context_positions, current_split
from axonml_jax.parallel.tensor.bound_axes import bound, degree


class ParallelDropout(nnx.Dropout):
    """`nnx.Dropout` with a key for every index of one dim, such as every head or every position of the sequence.

    Each rank draws the masks of its own indices, and any number of ranks draws the same masks.

    Args:
      rate: the probability of being dropped.
      dim: the dim, counted from the end, of which a rank may hold a part.
      axis: the mesh axes that split that dim; none: it is whole.
      positions: whether the dim holds positions, which `ax.Context` splits before those axes do.
      rngs: stream `dropout`; None: without random state, for a rate of 0.
    """

    def __init__(self, rate: float, *, dim: int, axis: AxisNames = (), positions: bool = False, rngs: nnx.Rngs | None):
        super().__init__(rate, rngs=rngs)
        self.dim, self.axis, self.holds_positions = dim, axis, positions

    def __call__(self, inputs: jax.Array, *, deterministic: bool | None = None, rngs=None) -> jax.Array:
        """Arguments as `nnx.Dropout` takes them."""
        off = self.deterministic if deterministic is None else deterministic
        if self.rate in (0.0, 1.0) or off:
            return super().__call__(inputs, deterministic=off, rngs=rngs)
        dim = self.dim % inputs.ndim
        others = [size for i, size in enumerate(inputs.shape) if i != dim]
        draw = lambda key: jax.random.bernoulli(key, 1 - self.rate, others)
        kept = jax.vmap(draw, out_axes=dim)(self.keys(inputs.shape[dim], rngs=rngs))
        return jnp.where(kept, inputs / (1 - self.rate), jnp.zeros_like(inputs))

    def keys(self, count: int, *, rngs=None) -> jax.Array:
        """The keys of the next mask for this rank's `count` indices of the dim."""
        key = self._key(self.rngs if rngs is None else rngs)
        axes = bound(self.axis)
        if self.holds_positions and current_split() is not None:
            own = context_positions(count * degree(axes))
            own = jax.lax.dynamic_slice_in_dim(own, axis_index(axes) * count if axes else 0, count)
        else:
            own = jnp.arange(count)
            own = own + axis_index(axes) * count if axes else own
        return jax.vmap(lambda index: jax.random.fold_in(key, index))(own)

    def _key(self, source) -> jax.Array:
        if isinstance(source, nnx.Rngs):
            return source[self.rng_collection]()
        return source() if isinstance(source, nnx.RngStream) else source
