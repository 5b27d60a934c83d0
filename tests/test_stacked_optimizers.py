"""Optimizers on layers that lie along a first dim and on experts: what each layer alone gets, from configurations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx
from meshes import mesh_of
from plan_models import unstacked

import axonml_jax as ax
from axonml_jax.base import named_leaves
from axonml_jax.cli.run import set_up_run
from axonml_jax.cli.train import _trainer
from axonml_jax.config.config import read_config
from axonml_jax.config.objects import make_optimizer
from axonml_jax.config.sections import OptimConfig
from axonml_jax.model.view import functionalize
from axonml_jax.models.config import ExpertsConfig, TransformerConfig
from axonml_jax.models.transformer import Stack, Transformer, stacked

SIZES = {"vocab_size": 16, "num_layers": 2, "hidden_size": 8, "num_heads": 2, "mlp_hidden_size": 12, "max_length": 8}
DECAYS = {"class_path": "optax.add_decayed_weights", "init_args": {"weight_decay": 0.5, "mask": {"matrices": True}}}
OPTIMIZERS = {
    "adamw": {"weight_decay": 0.5},
    "a chain": {"chain": [DECAYS, {"class_path": "optax.scale_by_learning_rate"}]},
    "muon": {"class_path": "optax.contrib.muon", "init_args": {"weight_decay": 0.1}},
    "muon of a group": {"groups": [{"paths": ["mlp"], "class_path": "optax.contrib.muon"}]},
}


def view_of(scan):
    config = TransformerConfig(**SIZES, scan_layers=scan, experts=ExpertsConfig(num_experts=3), use_bias=True)
    return functionalize(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))[0]


def trained(tx, values):
    """The parameters after three updates by gradients that differ from layer to layer."""
    update = jax.jit(lambda grads, state, params: tx.update(grads, state, params))
    params, state = values, tx.init(values)
    for step in range(3):
        grads = {name: jnp.sin(7.0 * value + step) for name, value in params.items()}
        change, state = update(grads, state, params)
        params = optax.apply_updates(params, change)
    return params


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_stack_is_updated_as_its_layers_are(optimizer):
    settings = OptimConfig(**OPTIMIZERS[optimizer], learning_rate=0.1, schedule="constant")
    plain, scan = view_of(False), view_of(True)
    rng = np.random.default_rng(0)
    values = {
        name: rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in named_leaves(plain.shapes.params).items()
    }
    expected = trained(make_optimizer(settings, 3, plain.stacked_dims), values)
    found = trained(make_optimizer(settings, 3, scan.stacked_dims), stacked(values, 2))
    assert found.keys() == named_leaves(scan.shapes.params).keys()
    for name, value in unstacked(found).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)


def test_experts_and_layers_are_treated_one_by_one():
    view, rate = view_of(True), 0.1
    config = OptimConfig(weight_decay=0.5, learning_rate=rate, schedule="constant")
    params = {name: np.ones(leaf.shape, np.float32) for name, leaf in named_leaves(view.shapes.params).items()}
    tx = make_optimizer(config, 3, view.stacked_dims)
    change, _ = tx.update(jax.tree.map(np.zeros_like, params), tx.init(params), params)
    decayed = {name for name, leaf in change.items() if np.any(leaf != 0)}
    assert decayed == {name for name in params if name.endswith(("kernel", "embedding", "/up", "/down", "/gate"))}
    assert params["blocks/layer/mlp/up_bias"].ndim == 3 and params["blocks/layer/mlp/up"].ndim == 4


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.scale, self.kernel = nnx.Param(jnp.ones(8, jnp.float32)), nnx.Linear(8, 8, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.kernel(x * self.scale[...])), None


class Net(nnx.Module):
    """Two layers, as a stack or one after the other."""

    def __init__(self, scan, rngs):
        self.blocks = Stack(Layer, 2, rngs=rngs) if scan else nnx.List([Layer(rngs) for _ in range(2)])

    def __call__(self, x):
        if isinstance(self.blocks, Stack):
            return self.blocks(x)[0]
        for block in self.blocks:
            x = block(x)[0]
        return x


def test_muon_on_a_split_stack_is_that_of_its_layers_on_one_device():
    batch = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    config = OptimConfig(class_path="optax.contrib.muon", learning_rate=0.1, schedule="constant")

    def run(scan, values=None, **degrees):
        model = ax.parallelize(Net(scan, nnx.Rngs(0)), mesh_of(**degrees))
        model.load_state_dict(values or model.state_dict())
        first, tx = model.state_dict(), make_optimizer(config, 3, model.stacked_dims)
        trainer = model.trainer(tx, lambda model, batch: jnp.mean((model(batch) - 1.0) ** 2))
        for _ in range(3):
            trainer.step(batch)
        return first, model.state_dict()

    first, expected = run(False, data=1)
    _, found = run(True, stacked(first, 2), fsdp=4)
    for name, value in unstacked(found).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)


def test_a_run_treats_its_models_stacks_so(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 60)
    content = {
        "devices": {"simulated": 8}, "mesh": {"data": 8}, "model": SIZES | {"vocab_size": 256, "scan_layers": True},
        "data": {"path": str(tmp_path / "a.txt"), "length": 8}, "train": {"steps": 2, "global_batch_size": 8},
        "optim": {"class_path": "optax.contrib.muon"}, "output": {"dir": str(tmp_path / "runs")},
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    config = read_config("train", [str(path)])
    trainer = _trainer(config, set_up_run(config), (), new=True)
    names = [*named_leaves(optax.tree.get(trainer.opt_state.inner_states["muon"], "mu"))]
    assert len(names) == 9 and not any("norm" in name for name in names)
