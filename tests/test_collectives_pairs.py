"""The pairs of one training step: a replicated value feeds one loss, whatever `check_vma` says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from axonml_jax.collectives.gradients import copy_to, gather_from, reduce_from, split_to, zeros_like_varying
from axonml_jax.collectives.primitives import types_are_checked, vary, vary_like
from axonml_jax.compat.varying_types import varying_axes

MODES = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
WHOLE, SPLIT = PartitionSpec(), PartitionSpec("tensor")


def on_mesh(fn, in_specs, out_specs, check_vma):
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",))
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma))


def in_a_checkpointed_scan(f):
    return lambda *args: jax.lax.scan(jax.checkpoint(lambda c, _: (c, f(*args))), None, length=2)[1][1]


@MODES
@pytest.mark.parametrize("wrap", [lambda f: f, in_a_checkpointed_scan], ids=["plain", "scan"])
def test_a_megatron_block_has_the_gradients_of_the_whole_matrices(wrap, check_vma):
    """y = tanh(x A) B with A split by columns, B by rows: copy_to in front, reduce_from behind."""
    random = np.random.default_rng(0)
    x, a, b = random.normal(size=(3, 5)), random.normal(size=(5, 8)), random.normal(size=(8, 2))

    def block(x, a_shard, b_shard):
        return reduce_from(jnp.tanh(copy_to(x, "tensor") @ a_shard) @ b_shard, "tensor")

    def per_rank(x, a_shard, b_shard):
        return jax.value_and_grad(lambda *args: (wrap(block)(*args) ** 2).sum(), (0, 1, 2))(x, a_shard, b_shard)

    specs = (WHOLE, PartitionSpec(None, "tensor"), SPLIT)
    loss, grads = on_mesh(per_rank, specs, (WHOLE, specs), check_vma)(x, a, b)
    expected, whole_grads = jax.value_and_grad(lambda x, a, b: ((jnp.tanh(x @ a) @ b) ** 2).sum(), (0, 1, 2))(x, a, b)
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    for grad, whole in zip(grads, whole_grads, strict=True):
        np.testing.assert_allclose(grad, whole, rtol=1e-9, atol=1e-12)


@MODES
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_from_and_split_to_undo_each_other_with_the_gradients_of_one_loss(dim, check_vma):
    x = np.random.default_rng(1).normal(size=(4, 8))
    spec = SPLIT if dim == 0 else PartitionSpec(None, "tensor")
    weights = np.arange(32.0).reshape(4, 8)

    def gathered(x_shard):
        return jax.value_and_grad(lambda shard: (gather_from(shard, "tensor", dim) ** 2 * weights).sum())(x_shard)

    loss, grad = on_mesh(gathered, (spec,), (WHOLE, spec), check_vma)(x)
    np.testing.assert_allclose(loss, (x**2 * weights).sum())
    np.testing.assert_allclose(grad, 2 * x * weights)

    def split(x):
        return jax.value_and_grad(lambda x: reduce_from((split_to(x, "tensor", dim) ** 2).sum(), "tensor"))(x)

    loss, grad = on_mesh(split, (WHOLE,), (WHOLE, WHOLE), check_vma)(x)
    np.testing.assert_allclose(loss, (x**2).sum())
    np.testing.assert_allclose(grad, 2 * x)


def test_split_to_refuses_a_dim_that_does_not_divide():
    with pytest.raises(ValueError, match=r"split.*\(6, 2\).*4 ranks.*pad it to 8"):
        on_mesh(lambda x: split_to(x, "tensor", 0), (WHOLE,), SPLIT, True)(jnp.zeros((6, 2)))


def test_varying_types_are_seen_and_cast_where_they_are_checked():
    seen = {}

    def per_rank(x, y):
        checked = types_are_checked("tensor")
        seen[checked] = [varying_axes(v) for v in (x, y, vary(y, "tensor"), vary_like(y, x), zeros_like_varying(x))]
        return x

    for check_vma in (True, False):
        on_mesh(per_rank, (SPLIT, WHOLE), SPLIT, check_vma)(jnp.zeros(4), jnp.zeros(4))
    there, nowhere = frozenset({"tensor"}), frozenset()
    assert seen == {True: [there, nowhere, there, there, there], False: [nowhere] * 5}
    assert varying_axes(jnp.zeros(1)) == nowhere
