"""Arrays by name in `safetensors` files: what may be given to be written, and names mapped on the way."""

import sys

import jax
import numpy as np
import pytest
from flax import linen, nnx
from flax.core import freeze

import axonml_jax as ax

pytest.importorskip("safetensors")


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    assert all(got[name].dtype == x.dtype and np.array_equal(got[name], x) for name, x in wanted.items())


def test_names_are_mapped_on_the_way(tmp_path):
    file = tmp_path / "it.safetensors"
    ax.save_safetensors(file, {"a/w": np.ones(2), "b/w": np.zeros((), np.float32)}, rename=[("/", ".")])
    assert sorted(ax.load_safetensors(file)) == ["a.w", "b.w"]
    assert sorted(ax.load_safetensors(file, rename=lambda name: name if name[0] == "a" else None)) == ["a.w"]
    with pytest.raises(ValueError, match=r"several arrays the same name: b.w -> a.w"):
        ax.load_safetensors(file, rename={"b.w": "a.w"})
    with pytest.raises(FileNotFoundError, match="no safetensors file at"):
        ax.load_safetensors(tmp_path / "none")


class Mixed(nnx.Module):
    """Parameters, a list, running averages, a random stream and a tied parameter."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, use_bias=False, rngs=rngs)])
        self.norm, self.dropout = nnx.BatchNorm(2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.tied = self.layers[1]


def test_a_module_a_nested_state_and_a_flat_mapping_are_written_alike(tmp_path):
    model, file = Mixed(nnx.Rngs(0)), tmp_path / "it.safetensors"
    wanted = ax.DDP(model, ax.make_mesh(data=1, devices=jax.devices()[:1])).state_dict()
    assert {"layers/1/kernel", "norm/mean"} <= set(wanted)
    state = nnx.state(model)
    for given in (model, state, nnx.to_pure_dict(nnx.filter_state(state, nnx.Not(nnx.RngState))), wanted):
        ax.save_safetensors(file, given)
        assert_same(ax.load_safetensors(file), wanted)


def test_linen_variables_are_written_under_the_names_of_their_state_dict(tmp_path):
    module, file = linen.Dense(3), tmp_path / "it.safetensors"
    variables = module.init(jax.random.key(0), np.ones((1, 2)))
    wanted = ax.DDP(module, ax.make_mesh(data=1, devices=jax.devices()[:1]), params=variables).state_dict()
    for given in (variables, freeze(variables)):
        ax.save_safetensors(file, given)
        assert_same(ax.load_safetensors(file), wanted)
    sown = {**variables, "batch_stats": {"mean": np.ones(2)}}
    ax.save_safetensors(file, sown)
    assert set(ax.load_safetensors(file)) == {*wanted, "batch_stats/mean"}


def test_what_holds_no_arrays_is_refused_with_what_to_give(tmp_path):
    mesh = ax.make_mesh(data=1, devices=jax.devices()[:1])
    for given, said in (
        (linen.Dense(3), "the Linen module Dense, which holds no arrays: give its variables"),
        (ax.DDP(Mixed(nnx.Rngs(0)), mesh), r"a DDP: call its state_dict\(\) in every process"),
        (nnx.eval_shape(lambda: Mixed(nnx.Rngs(0))), "no arrays: layers/0/bias: a ShapeDtypeStruct; layers/0/kernel"),
        (np.ones(3), "arrays by name, not a ndarray"),
        ({"a": {"b": None}, "c": "text", "d": object()}, "no arrays: a/b: a NoneType; c: a str; d: a object"),
    ):
        with pytest.raises(TypeError, match=f"save_safetensors: .*{said}"):
            ax.save_safetensors(tmp_path / "it.safetensors", given)
    with pytest.raises(ValueError, match="several values have the same path: a/b"):
        ax.save_safetensors(tmp_path / "it.safetensors", {"a": {"b": np.ones(1)}, "a/b": np.ones(2)})
    assert not list(tmp_path.iterdir())


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for work in (lambda: ax.save_safetensors(tmp_path / "x", {}), lambda: ax.load_safetensors(tmp_path / "x")):
        with pytest.raises(
            ImportError, match=r"needs the library safetensors: pip install 'axonml-jax\[safetensors\]'"
        ):
            work()
