"""Running a module of tensor-parallel layers on a mesh and on one device: outputs and every gradient of one scalar loss."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from axonml_jax.collectives.gradients import reduce_from
from axonml_jax.collectives.primitives import sum_over, vary
from axonml_jax.layers.whole import tensor_specs
from axonml_jax.mesh.axes import BATCH_AXES, as_axes
from axonml_jax.testing.equality import assert_trees_close

P = PartitionSpec
WHOLE = P()
is_spec = lambda x: isinstance(x, PartitionSpec)


class Result(NamedTuple):
    """What a run gives: outputs, gradients of the parameters, gradient of the input."""

    outputs: object
    params: object
    x: object


def axes_of(spec):
    return {axis for entry in spec for axis in as_axes(entry or ())}


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def drawn(key, shape, dtype):
    """An initializer that compiles nothing: JAX compiles its own for every shape."""
    seed = np.asarray(jax.random.key_data(key)).tolist()
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / 2, dtype)


EMBED = {"param_dtype": jnp.float64, "embedding_init": drawn}
LINEAR = {"param_dtype": jnp.float64, "kernel_init": drawn, "bias_init": drawn}


def make_mesh(**sizes):
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))])
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


def like(tree, spec):
    """One spec for a whole tree, or a tree of specs as it is."""
    return jax.tree.map(lambda _: spec, tree) if is_spec(spec) else spec


def on_one_device(model, x):
    """The module outside any mesh."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    params = nnx.to_pure_dict(params)

    def loss(params, x):
        outputs = nnx.merge(graphdef, params, rest, copy=True)(x)
        return sum((w * y).sum() for w, y in zip(weights(outputs), jax.tree.leaves(outputs), strict=True)), outputs

    grads, outputs = jax.jit(jax.grad(loss, (0, 1), has_aux=True, allow_int=True))(params, x)
    return Result(outputs, *grads)


def weights(outputs):
    """What each output is multiplied with in the loss, so that every element has a gradient of its own."""
    return [normal(*y.shape, seed=i) for i, y in enumerate(jax.tree.leaves(outputs))]


def step_on_mesh(model, sizes, outputs, *, x_spec=WHOLE, y_spec=WHOLE, check_vma=False, mesh=None):
    """The same inside `shard_map`, as a function of (parameters, x, weights of the loss).

    Parameters follow the law of a training step: cast to varying over the batch axes that do not split them, and their
    gradients summed over these axes.

    Args:
      model: the module.
      sizes: axis name to size.
      outputs: what the module returns on one device.
      x_spec: how the input is split.
      y_spec: how the outputs are split: one spec, or a tree of them.
      check_vma: the mode of `shard_map`.
      mesh: one without devices, to trace only.
    """
    graphdef, _, rest = nnx.split(model, nnx.Param, ...)
    specs, y_specs = tensor_specs(model, sizes), like(outputs, y_spec)
    batch = [axis for axis in BATCH_AXES if axis in sizes]
    y_axes = [tuple(sorted(axes_of(s) - set(BATCH_AXES))) for s in jax.tree.leaves(y_specs, is_leaf=is_spec)]
    others = lambda spec: tuple(axis for axis in batch if axis not in axes_of(spec))

    def per_rank(params, x, weights):
        def loss(params, x):
            outputs = nnx.merge(graphdef, params, rest, copy=True)(x)
            sums = [(w * y).sum() for w, y in zip(weights, jax.tree.leaves(outputs), strict=True)]
            return sum(reduce_from(s, axes) if axes else s for s, axes in zip(sums, y_axes, strict=True)), outputs

        params = jax.tree.map(lambda spec, leaf: vary(leaf, others(spec)), specs, params, is_leaf=is_spec)
        (grads, x_grad), outputs = jax.grad(loss, (0, 1), has_aux=True, allow_int=True)(params, x)
        grads = jax.tree.map(
            lambda spec, g: sum_over(g, others(spec)) if others(spec) else g, specs, grads, is_leaf=is_spec
        )
        return outputs, grads, (jnp.zeros(x.shape) if jnp.issubdtype(x.dtype, jnp.integer) else x_grad)

    w_specs = jax.tree.leaves(y_specs, is_leaf=is_spec)
    return jax.jit(
        jax.shard_map(
            per_rank,
            mesh=mesh or make_mesh(**sizes),
            in_specs=(specs, x_spec, w_specs),
            out_specs=(y_specs, specs, x_spec),
            check_vma=check_vma,
        )
    )


def assert_equals_one_device(model, x, sizes, **options):
    """Outputs and all gradients on a mesh equal those of the module outside any mesh, in float64 to 1e-9."""
    wanted = on_one_device(model, x)
    step = step_on_mesh(model, sizes, wanted.outputs, **options)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    got = Result(*step(params, x, weights(wanted.outputs)))
    assert jax.tree.leaves(wanted.params)[0].dtype == jnp.float64
    assert_trees_close(got.outputs, wanted.outputs, "outputs")
    assert_trees_close(got.params, wanted.params, "parameter gradients")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        assert_trees_close(got.x, wanted.x, "input gradient")
