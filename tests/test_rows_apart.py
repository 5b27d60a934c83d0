"""Losses whose operations treat every row by itself, such as factorizations: in microbatches, and without gathering rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.ode import odeint
from meshes import mesh_of
from plan_models import F64, linear

import axonml_jax as ax
from axonml_jax.testing.equality import assert_equals_single_device, assert_trees_close


def matrices(rows):
    """[n, 9] -> [n, 3, 3], positive definite."""
    own = rows.reshape(-1, 3, 3)
    return own @ own.transpose(0, 2, 1) + jnp.eye(3)


def flown(matrix, start):
    """Where a linear flow has come; its solver closes over the matrix, and has a derivative of its own."""
    return odeint(lambda y, t: -matrix @ y, start, jnp.linspace(0, 1, 3))


MATRIX = np.random.default_rng(2).normal(size=(9, 9)) + 4 * np.eye(9)


@jax.custom_vjp
def weighed(row):
    """Closes over an array: JAX does not differentiate by it."""
    return jnp.sin(row) * WEIGHTS


WEIGHTS = jnp.linspace(0.5, 1, 9)
weighed.defvjp(lambda row: (weighed(row), row), lambda row, g: (g * jnp.cos(row) * WEIGHTS,))


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
    "slogdet": lambda rows: jnp.linalg.slogdet(matrices(rows) + rows[:, :3, None])[1].mean(),
    "inverse": lambda rows: jnp.square(jnp.linalg.inv(matrices(rows) + rows[:, :3, None])).mean(),
    "solved": lambda rows: jnp.square(jax.vmap(jnp.linalg.solve)(matrices(rows), rows[:, :3])).mean(),
    "solved with one matrix": lambda rows: jnp.square(jnp.linalg.solve(MATRIX, rows[..., None])).mean(),
    "solved by conjugate gradients": lambda rows: jnp.square(
        jax.vmap(lambda a, b: jax.scipy.sparse.linalg.cg(lambda v: a @ v, b, maxiter=3)[0])(matrices(rows), rows[:, :3])
    ).mean(),
    "permuted by pivots": lambda rows: jnp.abs(
        jax.vmap(jax.scipy.linalg.lu)(rows.reshape(-1, 3, 3))[0] @ rows[:, :3, None]
    ).mean(),
    "expm": lambda rows: jax.vmap(jax.scipy.linalg.expm)(matrices(rows) / 4).mean(),
    "polynomials": lambda rows: jnp.square(jax.vmap(jnp.polyval)(rows[:, :4], rows[:, 4:])).mean(),
    "found among each row's": lambda rows: jnp.square(
        jax.vmap(lambda row: row[jnp.searchsorted(jnp.sort(row), 0.1 * row) % 9])(rows)
    ).mean(),
    "between knots": lambda rows: jnp.square(jnp.interp(rows, jnp.linspace(-2, 2, 7), jnp.arange(7.0) ** 2)).mean(),
    "an ordinary differential equation": lambda rows: jnp.square(
        jax.vmap(flown)(matrices(rows) / 8, rows[:, :3])
    ).mean(),
    "one that is given what it reads": lambda rows: jnp.square(
        jax.vmap(lambda a, y: odeint(lambda y, t, a: -a @ y, y, jnp.linspace(0, 1, 3), a))(
            matrices(rows) / 8, rows[:, :3]
        )
    ).mean(),
    "a derivative of one's own beside constants": lambda rows: jnp.square(weighed(rows)).mean(),
    "such a one traced and mapped": lambda rows: jnp.square(jax.vmap(jax.jit(weighed))(rows)).mean(),
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


# Loops that end row by row, as `jax.vmap` makes them of a loop, and loops of the batch alone


def times(count, start=0.0, step=lambda total: 0.5 * total + 1):
    """How far a loop of so many trips comes, for one row."""
    return jax.lax.while_loop(lambda c: c[0] < count, lambda c: (c[0] + 1, step(c[1])), (0, start))[1]


def cube_root(x):
    """By Newton's method, as long as it takes."""
    return jax.lax.while_loop(lambda r: jnp.abs(r**3 - x) > 1e-9, lambda r: r - (r**3 - x) / (3 * r**2), 1.0 + x)


def matched(rows, b):
    """Every row's outputs beside its targets, as set prediction matches them (DETR, Carion et al. 2020)."""
    cost = jnp.square(rows[:, :4, None] - b["x"][:, None, :3])
    i, j = jax.vmap(optax.assignment.hungarian_algorithm)(jax.lax.stop_gradient(cost))
    return cost[jnp.arange(len(rows))[:, None], i, j].sum(-1)


LOOPS = {
    "trips of each row": lambda rows, b: rows[:, 0] * jax.vmap(times)(b["n"]),
    "trips beside whole values": lambda rows, b: rows[:, 0] * jax.vmap(times)(b["n"], jnp.arange(16.0)),
    "trips over features": lambda rows, b: (
        rows[:, 0] * jax.vmap(lambda n, x: times(n, x, jnp.sin))(b["n"], b["x"]).sum(-1)
    ),
    "two dims of trips": lambda rows, b: (
        rows[:, :3] * jax.vmap(jax.vmap(times))(b["n"][:, None] + jnp.arange(3), jnp.ones((16, 3)))
    ),
    "trips of columns": lambda rows, b: (
        rows[:, :3] * jax.vmap(times, in_axes=(0, 1), out_axes=1)(jnp.arange(3), b["x"][:, :3])
    ),
    "a counted loop": lambda rows, b: (
        rows[:, 0] * jax.vmap(lambda n: jax.lax.fori_loop(0, n, lambda i, total: total + i, 0))(b["n"])
    ),
    "until it converges": lambda rows, b: (
        rows[:, 0] * jax.vmap(cube_root)(1 + jnp.abs(jax.lax.stop_gradient(rows[:, 1])))
    ),
    "matching": matched,
    "draws of each row": lambda rows, b: (
        rows[:, 0] * jax.vmap(lambda key: jax.random.poisson(key, 3.0))(jax.random.split(jax.random.key(3), len(rows)))
    ),
    "one after the other": lambda rows, b: jax.lax.map(lambda each: jnp.sin(each[0]) * each[1][0], (rows, b["x"])),
    "one after the other, beside whole values": lambda rows, b: jax.lax.map(
        lambda each: each[0] * each[1] + b["n"].max(), (rows, jnp.arange(16.0))
    ),
    "one after the other, beside a mean of all": lambda rows, b: jax.lax.map(lambda row: row * b["x"].mean(), rows),
    "as many trips as the largest of the batch": lambda rows, b: rows[:, 0] * times(b["n"].max()),
    "trips that look at all rows of the batch": lambda rows, b: (
        rows[:, 0] * jax.vmap(lambda n: times(n, 0.0, lambda total: total / 2 + b["n"].max()))(b["n"])
    ),
}
LOOP_BATCH = {"x": np.random.default_rng(0).normal(size=(16, 5)), "n": np.random.default_rng(1).integers(0, 5, 16)}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", LOOPS)
def test_loops_that_end_row_by_row_are_those_of_one_device(name, plan):
    loss = lambda model, b: jnp.square(LOOPS[name](model(b["x"]), b)).mean()
    degrees, plan = PLANS[plan]
    model = linear(5, 9, nnx.Rngs(0))
    assert_equals_single_device(model, loss, LOOP_BATCH, plan, mesh=mesh_of(**degrees), steps=2)


class Looping(nnx.Module):
    """Its rows end its loop one by one, and it mixes rows besides, so that its code runs as part of the loss."""

    def __init__(self, mixes):
        self.layer, self.mixes = linear(5, 9, nnx.Rngs(0)), mixes

    def __call__(self, x, n):
        h = self.layer(x) * jax.vmap(times)(n)[:, None]
        return h - h.mean(0) if self.mixes else h


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("plan", [({"data": 4}, ax.Plan()), ({"fsdp": 4}, ax.Plan(fsdp=ax.Shard(), remat="full"))])
def test_loops_that_end_row_by_row_work_inside_a_model(plan, mixes):
    degrees, settings = plan
    loss = lambda model, b: jnp.square(model(b["x"], b["n"])).mean()
    assert_equals_single_device(Looping(mixes), loss, LOOP_BATCH, settings, mesh=mesh_of(**degrees), steps=2)


def test_a_loop_that_ends_by_all_rows_of_the_model_is_refused_in_microbatches_with_its_line():
    loss = lambda model, b: jnp.square(model(b["x"]) * times(jax.lax.stop_gradient(model(b["x"])).max())).mean()
    trainer = ax.DDP(linear(5, 9, nnx.Rngs(0)), mesh_of(data=2)).trainer(optax.sgd(0.1), loss, accumulate=2)
    with pytest.raises(
        ValueError, match=r"the model's results of other microbatches: \w+ \(line \d+ of test_rows_apart.py"
    ):
        trainer.step(LOOP_BATCH)


def test_a_solver_whose_function_calls_the_model_is_of_the_whole_batch():
    """An adaptive step is that of all rows; the solver's derivative knows no parameters but those that its function reads."""
    make = lambda: linear(5, 5, nnx.Rngs(0))
    loss = lambda model, x: jnp.square(odeint(lambda y, t: jnp.tanh(model(y)), x, jnp.linspace(0, 1, 3))).mean()
    x = np.random.default_rng(0).normal(size=(16, 5))
    value, grads = nnx.value_and_grad(loss)(make(), x)
    for degrees in ({"data": 4}, {"fsdp": 4}):
        for plan in (ax.Plan(), ax.Plan(check_vma=True)):
            got, made = ax.parallelize(make(), mesh_of(**degrees), plan).value_and_grad(loss)(x)
            np.testing.assert_allclose(got, value, rtol=1e-9)
            assert_trees_close(made, nnx.to_pure_dict(grads), "gradients")
    trainer = ax.DDP(make(), mesh_of(data=2)).trainer(optax.sgd(0.1), loss, accumulate=2)
    with pytest.raises(
        ValueError, match=r"calls the model in a function with a derivative of its own .line .* of test_rows"
    ):
        trainer.step(x)


class Weighing(nnx.Module):
    """Has a derivative of its own in it, which closes over an array."""

    def __init__(self):
        self.layer = linear(5, 9, nnx.Rngs(0))

    def __call__(self, x):
        return jax.vmap(jax.jit(weighed))(self.layer(x))


@jax.custom_vjp
def scaled(rows, weights):
    """A derivative of one's own by weights, [9], too."""
    return jnp.sin(rows) * weights


scaled.defvjp(
    lambda rows, weights: (scaled(rows, weights), (rows, weights)),
    lambda kept, g: (g * jnp.cos(kept[0]) * kept[1], (g * jnp.sin(kept[0])).sum(0)),
)


def summed_beside(rows):
    """A linear solve that returns more than its solution."""
    solve = lambda _, b: (b / 2, (b**2).sum())
    return jax.lax.custom_linear_solve(lambda v: 2 * v, rows, solve, solve, symmetric=True, has_aux=True)


WHOLE = {
    "conjugate gradients of all rows": lambda model, x: jax.scipy.sparse.linalg.cg(lambda v: v * WEIGHTS, model(x))[0],
    "a solve with more results": lambda model, x: summed_beside(model(x))[0],
    "such ones of each row": lambda model, x: jax.vmap(summed_beside)(model(x))[0],
    "a derivative by a constant": lambda model, x: scaled(model(x), WEIGHTS),
    "a solver that calls the model": lambda model, x: jax.scipy.sparse.linalg.cg(
        lambda v: v + 0.1 * model(v @ DOWN) - 0.1 * model(0 * v @ DOWN), x @ DOWN.T, maxiter=3
    )[0],
}
DOWN = np.random.default_rng(3).normal(size=(9, 5)) / 5


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("name", WHOLE)
def test_solvers_and_derivatives_beside_whole_values_are_those_of_one_device(name, typed):
    make, loss = lambda: linear(5, 9, nnx.Rngs(0)), lambda model, x: jnp.square(WHOLE[name](model, x)).mean()
    x = np.random.default_rng(0).normal(size=(16, 5))
    value, grads = nnx.value_and_grad(loss)(make(), x)
    for degrees in ({"data": 4}, {"fsdp": 4}):
        got, made = ax.parallelize(make(), mesh_of(**degrees), ax.Plan(check_vma=typed)).value_and_grad(loss)(x)
        np.testing.assert_allclose(got, value, rtol=1e-9)
        assert_trees_close(made, nnx.to_pure_dict(grads), "gradients")


def test_a_derivative_of_a_models_own_that_closes_over_constants_is_followed():
    x, loss = np.random.default_rng(0).normal(size=(16, 5)), lambda model, x: jnp.square(model(x)).mean()
    for degrees, plan in PLANS.values():
        assert_equals_single_device(Weighing(), loss, x, plan, mesh=mesh_of(**degrees), steps=2)
