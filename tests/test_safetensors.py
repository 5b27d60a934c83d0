"""Arrays by name in `safetensors` files: what may be given to be written, and names mapped on the way."""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.core import freeze

import axonml_jax as ax
from axonml_jax.model.safetensors import Pending, StoredArrays, write_shards
from axonml_jax.model.view import named_arrays

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


def test_of_several_indices_in_a_folder_the_usual_one_is_read_and_none_is_chosen_by_chance(tmp_path):
    for stem, value in (("model.fp16", 1.0), ("model", 2.0)):
        ax.save_safetensors(tmp_path / f"{stem}-1.safetensors", {"w": np.full(3, value, np.float32)})
        index = tmp_path / f"{stem}.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"w": f"{stem}-1.safetensors"}}))
    assert_same(ax.load_safetensors(tmp_path), {"w": np.full(3, 2.0, np.float32)})
    index.rename(tmp_path / "model.bf16.safetensors.index.json")
    with pytest.raises(ValueError, match=r"has several indices: give one of model\.bf16\.\S+, model\.fp16\."):
        ax.load_safetensors(tmp_path)


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
        (nnx.eval_shape(lambda: Mixed(nnx.Rngs(0))), "not arrays: layers/0/bias: a ShapeDtypeStruct; layers/0/kernel"),
        (np.ones(3), "arrays by name, not a ndarray"),
        ({"a": {"b": None}, "c": "text", "d": object()}, "not arrays: a/b: a NoneType; c: a str; d: a object"),
    ):
        with pytest.raises(TypeError, match=f"save_safetensors: .*{said}"):
            ax.save_safetensors(tmp_path / "it.safetensors", given)
    with pytest.raises(ValueError, match="several values have the same path: a/b"):
        ax.save_safetensors(tmp_path / "it.safetensors", {"a": {"b": np.ones(1)}, "a/b": np.ones(2)})
    assert not list(tmp_path.iterdir())


class Keyed(nnx.Module):
    """A random key that is no stream's, in a variable."""

    def __init__(self):
        self.layer, self.key = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Variable(jax.random.key(1))


def test_random_keys_are_named_and_may_be_left_out_or_written_as_words(tmp_path):
    file, model = tmp_path / "it.safetensors", Keyed()
    with pytest.raises(
        TypeError, match=r"save_safetensors: .* random keys: key: key<fry>\[\]. .*random.key_data.*rename="
    ):
        ax.save_safetensors(file, model)
    assert not list(tmp_path.iterdir())
    ax.save_safetensors(file, model, rename=lambda name: None if name in ["key"] else name)
    assert set(ax.load_safetensors(file)) == {"layer/kernel", "layer/bias"}
    ax.save_safetensors(file, {"key": jax.random.key_data(model.key[...])})
    assert set(ax.load_safetensors(file)) == {"key"}


def test_a_model_given_to_load_is_refused_with_the_way_into_it(tmp_path):
    module = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    ax.save_safetensors(tmp_path / "x", module)
    with pytest.raises(TypeError, match=r"was given a Linear too: .*load_state_dict\(ax\.load_safetensors\(path\)\)"):
        ax.load_safetensors(tmp_path / "x", module)
    model = ax.DDP(nnx.Linear(2, 3, rngs=nnx.Rngs(1)))  # as it says
    model.load_state_dict(ax.load_safetensors(tmp_path / "x"))
    np.testing.assert_array_equal(model.module.kernel[...], module.kernel[...])


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for work in (lambda: ax.save_safetensors(tmp_path / "x", {}), lambda: ax.load_safetensors(tmp_path / "x")):
        with pytest.raises(
            ImportError, match=r"needs the library safetensors: pip install 'axonml-jax\[safetensors\]'"
        ):
            work()


def shards(folder, value, fails=False):
    """Two files and their index, by the writer of exports."""

    def make():
        if fails:
            raise OSError("the disk is full")
        return np.full(4, value, np.float32)

    write_shards(folder, [Pending(name, (4,), "float32", make) for name in "ab"], most=16, metadata={})


def alone(folder, value, fails=False):
    """One file, by `save_safetensors`."""
    arrays = {"a": np.full(4, value, np.float32)}
    if not fails:
        return ax.save_safetensors(folder / "model.safetensors", arrays)

    def failing(arrays, path, metadata):
        path.write_bytes(b"half")
        raise OSError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("safetensors.numpy.save_file", failing)
        return ax.save_safetensors(folder / "model.safetensors", arrays)


@pytest.mark.parametrize("write", [alone, shards])
def test_a_file_of_weights_is_on_disk_before_it_takes_the_place_of_another(tmp_path, write, monkeypatch):
    """Written in place, or renamed before it is on disk, a crash leaves neither the old one nor the new one."""
    write(tmp_path, 1)
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    with pytest.raises(OSError, match="the disk is full"):
        write(tmp_path, 2, fails=True)
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before
    assert all((value == 1).all() for value in ax.load_safetensors(tmp_path).values())
    synced, fsync = [], os.fsync

    def noted(handle):
        fsync(handle)
        there = {path.name: path.stat().st_ino for path in tmp_path.iterdir() if not path.name.endswith(".saving")}
        synced.append((os.fstat(handle).st_ino, os.fstat(handle).st_size > 0, there))

    monkeypatch.setattr(os, "fsync", noted)
    write(tmp_path, 2)
    after = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert after.keys() == before.keys() and all((value == 2).all() for value in ax.load_safetensors(tmp_path).values())
    for name, inode in after.items():
        assert any(seen == inode and full and there[name] == before[name] for seen, full, there in synced), name
        assert any(seen == tmp_path.stat().st_ino and there[name] == inode for seen, _, there in synced), name


@pytest.mark.parametrize("write", [alone, shards])
def test_what_a_killed_export_has_left_is_written_again_and_a_link_in_its_place_is_named(tmp_path, write):
    write(tmp_path, 1)
    left = tmp_path / f"{min(path.name for path in tmp_path.iterdir())}.saving"
    left.write_bytes(b"half")
    write(tmp_path, 2)
    assert not left.exists() and all((value == 2).all() for value in ax.load_safetensors(tmp_path).values())
    (tmp_path / "theirs").write_text("mine")
    left.symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match=r"\.saving, where model\S* is written first, is no ordinary file: remove it"):
        write(tmp_path, 3)
    assert (tmp_path / "theirs").read_text() == "mine" and left.is_symlink()


def test_floats_of_8_bits_and_scalars_come_back_as_they_were_and_other_kinds_are_named(tmp_path):
    """NumPy has no float8, so what was written could not be read; a scalar came back as an array of one."""
    kinds = [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, np.complex64, np.uint16]
    arrays = {f"w{i}": np.arange(6).reshape(2, 3).T.astype(kind) for i, kind in enumerate(kinds)}
    arrays |= {
        "scalar": np.float32(3).reshape(()),
        "one": np.ones(1, jnp.float8_e5m2),
        "none": np.ones((0, 2), jnp.float8_e5m2),
    }
    ax.save_safetensors(tmp_path / "a.safetensors", arrays)
    assert_same(found := ax.load_safetensors(tmp_path), arrays)
    assert found["scalar"].shape == () and found["none"].shape == (0, 2)
    with pytest.raises(ValueError, match="the files hold no x: int4, y: uint4: convert"):
        ax.save_safetensors(tmp_path / "b", {"x": np.ones(2, jnp.int4), "y": np.ones(2, jnp.uint4), "z": np.ones(2)})
    with pytest.raises(ValueError, match="there is no array to write"):
        ax.save_safetensors(tmp_path / "b", {})
    with pytest.raises(
        ValueError, match=r"in few bits, .*scales.*: none: F8_E5M2, .*w0: F8_E4M3.*give files of bfloat16"
    ):
        StoredArrays(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_arrays_are_looked_at_without_being_copied_to_the_host():
    mesh = ax.make_mesh(data=2, devices=jax.devices()[:2])
    array = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("data")))
    assert named_arrays({"a": array})["a"] is array
    assert array._npy_value is None  # what NumPy is given once, JAX keeps
