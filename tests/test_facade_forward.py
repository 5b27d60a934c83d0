"""`facade(x)`: the model's outputs on the global batch, whatever they look like; train and eval."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from plan_models import CASES, F64, BatchNormNet, DropoutMLP, linear, mean_loss, regression

import axonml_jax as ax
from axonml_jax.testing.equality import assert_trees_close

BATCH = regression(8)
X, Y = BATCH["x"], BATCH["y"]


@pytest.fixture(scope="module")
def mesh():
    return ax.make_mesh(data=4, devices=jax.devices()[:4])


class Shaped(nnx.Module):
    """A layer whose outputs a function shapes."""

    def __init__(self, shape):
        self.layer, self.shape = linear(5, 3, nnx.Rngs(0)), shape

    def __call__(self, x, *args, **kwargs):
        return self.shape(self.layer(x), *args, **kwargs)


def everything(y, other, name, scale=1.0, flag=False, nest=None):
    return {
        "rows": y,
        "columns": (y.T, jnp.stack([y, y + 1], 1).transpose(2, 1, 0)),
        "labels": jnp.argmax(y, -1),
        "mean": y.mean(),
        "per_column": (y * scale).mean(0),
        "flat": jnp.repeat(y, 2, axis=0),
        "other": other * (2 if flag else 1) + nest["more"][0],
        "number": 0.5,
        "name": len(name),
        "none": None,
    }


def test_outputs_of_any_structure_equal_the_single_model(mesh):
    model = Shaped(everything)
    options = {"scale": np.float64(1.5), "flag": True, "nest": {"more": [Y]}}
    got = ax.DDP(model, mesh)(X, Y, "name", **options)
    wanted = model(X, Y, "name", **options)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    assert_trees_close(got, wanted, "outputs")
    assert got["rows"].sharding.spec == jax.sharding.PartitionSpec(("data",))
    assert got["columns"][1].sharding.spec == jax.sharding.PartitionSpec(None, None, ("data",))


REFUSED = {
    "whole number without a batch dim": (
        lambda y: (y > 0).sum(),
        r"shape \(\) and dtype int.*without a batch dim.*float",
    ),
    "pairs of examples": (lambda y: y @ y.T, r"several batch dims \(shape \(2, 2\)\)"),
    "rows inside of another dim": (
        lambda y: {"out": jnp.stack([y, y + 1]).reshape(-1, y.shape[1])},
        r"rows merged with other dims: \{'out': 'dim 0 of \(4, 3\) on a rank'\}.*dims of their own",
    ),
    "two copies of all rows": (lambda y: jnp.concatenate([y, y + 1]), "rows merged with other dims"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_outputs_that_mean_nothing_for_a_global_batch_are_refused(mesh, name):
    shape, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        ax.DDP(Shaped(shape), mesh)(X)


def test_a_batch_that_does_not_divide_is_refused(mesh):
    ddp = ax.DDP(Shaped(everything), mesh)
    with pytest.raises(ValueError, match=r"4 batch shards.*\n  x: shape \(7, 5\)\n.*multiple of 4: use 4 or 8 rows"):
        ddp(X[:7])
    with pytest.raises(ValueError, match=r"differ in the size of dim 0(.|\n)*1: shape \(4, 3\)\n  x: shape \(8, 5\)"):
        ddp(X, Y[:4], "name")
    with pytest.raises(ValueError, match="no array with a batch dim"):
        ddp()


def test_train_and_eval_switch_dropout(mesh):
    model = DropoutMLP(nnx.Rngs(0))
    ddp = ax.DDP(model, mesh)
    assert ddp.is_training and ddp.eval() is ddp and not ddp.is_training
    assert ddp.train(False) is ddp and not ddp.is_training
    whole = DropoutMLP(nnx.Rngs(0))
    whole.eval()
    for _ in range(2):
        assert_trees_close(ddp(X), whole(X), "outputs in evaluation")
    assert ddp.train() is ddp and ddp.is_training
    first, second = np.asarray(ddp(X)), np.asarray(ddp(X))
    assert not np.allclose(first, second), "dropout draws anew in every call"
    same = np.asarray(ddp(np.repeat(X[:1], 8, 0)))
    assert len({same[i].tobytes() for i in range(0, 8, 2)}) > 1, "shards draw masks of their own"
    assert not model.dropout.deterministic, "the user's own model keeps its mode"


def test_evaluation_reads_the_running_averages_and_training_moves_them(mesh):
    ddp, one = ax.DDP(BatchNormNet(nnx.Rngs(0)), mesh), BatchNormNet(nnx.Rngs(0))
    assert_trees_close(ddp(X), one(X), "outputs in training")
    ddp.eval(), one.eval()
    before = ddp.state_dict()
    assert_trees_close(ddp(X), one(X), "outputs in evaluation")
    assert_trees_close(ddp.value_and_grad(mean_loss)(BATCH)[0][0], mean_loss(one, BATCH)[0], "loss in evaluation")
    assert_trees_close(ddp.state_dict(), before, "variables")


class Switched(linen.Module):
    """A Linen model whose caller says whether it trains."""

    def setup(self):
        self.first, self.last = linen.Dense(6, param_dtype=F64), linen.Dense(3, param_dtype=F64)
        # In float64 throughout: how a float32 rsqrt is rounded depends on the processor and on how it is compiled.
        self.norm = linen.BatchNorm(param_dtype=F64, force_float32_reductions=False)
        self.dropout = linen.Dropout(0.5)

    def __call__(self, x, train):
        x = self.norm(self.first(x), use_running_average=not train)
        return self.last(self.dropout(jnp.tanh(x), deterministic=not train))

    def encode(self, x):
        return self.first(x)


def test_a_linen_model_is_called_like_an_nnx_one(mesh):
    model = Switched()
    variables = model.init(jax.random.key(0), X, train=False)
    ddp = ax.DDP(model, mesh, params=variables)
    assert_trees_close(ddp(X, train=False), model.apply(variables, X, train=False), "outputs")
    assert_trees_close(ddp(X, method="encode"), model.apply(variables, X, method="encode"), "one method's outputs")
    assert not np.allclose(ddp(X, train=True), ddp(X, train=True))

    def loss_fn(model, batch):
        return mean_loss(lambda x: model(x, train=model.is_training), batch)

    now = ddp.module.variables
    wanted = mean_loss(lambda x: model.apply(now, x, train=False), BATCH)[0]
    assert_trees_close(ddp.eval().value_and_grad(loss_fn)(BATCH)[0][0], wanted, "loss in evaluation")


def test_typed_mode_names_the_loop_of_a_forward_too(mesh):
    ddp = ax.DDP(CASES["recurrent"].model(), mesh, check_vma=True)
    with pytest.raises(ValueError, match=r"check_vma=True: the loop at .*plan_models.py:\d+ \(in __call__\)"):
        ddp(X)


def test_typed_mode_gives_the_same_outputs(mesh):
    model = Shaped(lambda y: (y, y.mean(), y.T))
    assert_trees_close(ax.DDP(model, mesh, check_vma=True)(X), model(X), "outputs")
