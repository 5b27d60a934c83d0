"""Losses whose operations treat every row by itself, such as factorizations: in microbatches, and without gathering rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import mesh_of
from plan_models import F64, linear

import axonml_jax as ax
from axonml_jax.testing.equality import assert_trees_close


def matrices(rows):
    """[n, 9] -> [n, 3, 3], positive definite."""
    own = rows.reshape(-1, 3, 3)
    return own @ own.transpose(0, 2, 1) + jnp.eye(3)


def placed(row, how):
    places = getattr(jnp.zeros(4, F64).at[jnp.argsort(row)[:6] % 4], how)
    return places(row[:6])


LOSSES = {
    "fft of real rows": lambda rows: jnp.abs(jnp.fft.rfft(rows)).mean() ** 2,
    "fft of a middle dim": lambda rows: jnp.abs(jnp.fft.fft(rows.reshape(-1, 3, 3), axis=1)).mean(),
    "fft of two dims": lambda rows: jnp.abs(jnp.fft.fft2(rows.reshape(-1, 3, 3))).mean(),
    "cholesky": lambda rows: jnp.log(jnp.linalg.cholesky(matrices(rows))[:, 0, 0]).mean(),
    "eigh": lambda rows: jnp.log(jnp.linalg.eigh(matrices(rows))[0]).mean(),
    "svd": lambda rows: jnp.linalg.svd(matrices(rows), compute_uv=False).mean(),
    "qr": lambda rows: jnp.abs(jnp.linalg.qr(matrices(rows))[1]).mean(),
    "triangular": lambda rows: jax.scipy.linalg.solve_triangular(
        jnp.linalg.cholesky(matrices(rows)), jnp.ones((len(rows), 3, 2)), lower=True
    ).mean(),
    "scatter-add under vmap": lambda rows: jnp.square(jax.vmap(lambda row: placed(row, "add"))(rows)).mean(),
    "scatter under vmap": lambda rows: jnp.square(jax.vmap(lambda row: placed(row[:1], "set"))(rows)).mean(),
    "own entries": lambda rows: jnp.square(rows[jnp.arange(len(rows)), jnp.argsort(rows)[:, 1]]).mean(),
    "own entries by NumPy": lambda rows: jnp.square(rows[np.arange(len(rows)), jnp.arange(len(rows)) % 9]).mean(),
    "several own entries": lambda rows: jnp.square(
        rows[jnp.arange(len(rows))[:, None], jnp.argsort(rows)[:, :2]]
    ).mean(),
    "own slices": lambda rows: jnp.square(
        rows.reshape(-1, 3, 3)[jnp.arange(len(rows)), jnp.argsort(rows)[:, 0] % 3]
    ).mean(),
    "own entries of two dims": lambda rows: jnp.square(
        rows.reshape(-1, 3, 3)[jnp.arange(len(rows))[:, None], jnp.arange(3), jnp.argsort(rows)[:, :3] % 3]
    ).mean(),
    "own entries that may lie outside": lambda rows: jnp.square(
        rows.at[jnp.arange(len(rows)), jnp.argsort(rows)[:, 0] + 3].get(mode="fill", fill_value=2.0)
    ).mean(),
    "own entries set": lambda rows: jnp.square(
        rows.at[jnp.arange(len(rows)), jnp.argsort(rows)[:, 0]].set(jnp.arange(len(rows)) % 3)
    ).mean(),
    "own entries added to": lambda rows: jnp.square(
        rows.at[jnp.arange(len(rows))[:, None], jnp.argsort(rows)[:, :2]].add(rows[:, :2])
    ).mean(),
    "own entries, the largest": lambda rows: jnp.square(
        rows.reshape(-1, 3, 3).at[jnp.arange(len(rows)), 1].max(rows[:, :3])
    ).mean(),
    "repeated features": lambda rows: jnp.square(jnp.tile(rows, (1, 2)) + 1).mean(),
    "segments of every row": lambda rows: jnp.square(
        jax.vmap(lambda row: jax.ops.segment_sum(row, jnp.arange(9) % 4, 4))(rows)
    ).mean(),
}
PLANS = {
    "ddp": ({"data": 4}, ax.Plan()),
    "accumulate": ({"data": 2}, ax.Plan(accumulate=4)),
    "zero-3": ({"fsdp": 4}, ax.Plan(accumulate=2, check_vma=True)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_operations_on_each_row_keep_rows_apart(name):
    make, loss = lambda: linear(5, 9, nnx.Rngs(0)), lambda model, x: LOSSES[name](model(x))
    x = np.random.default_rng(0).normal(size=(16, 5))
    value, grads = nnx.value_and_grad(loss)(make(), x)
    for degrees, plan in PLANS.values():
        model = ax.parallelize(make(), mesh_of(**degrees), plan)
        got, made = model.value_and_grad(loss)(x)
        np.testing.assert_allclose(got, value, rtol=1e-9)
        assert_trees_close(made, nnx.to_pure_dict(grads), "gradients")
    report = ax.explain(ax.DDP(make(), mesh_of(data=4)).trainer(optax.sgd(0.1), loss), x)
    assert not [each for each in report.collectives if "gather" in each.kind], report
