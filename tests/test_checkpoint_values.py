"""What a checkpoint may be told: steps, metrics and words as numbers of Python, NumPy or JAX; all else is refused at once."""

import dataclasses
import importlib.metadata
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import axonml_jax as ax
from axonml_jax.__main__ import main
from axonml_jax.checkpoint import manager as store
from axonml_jax.checkpoint.format import Manifest
from axonml_jax.cli.loop import Saves
from axonml_jax.config.config import read_config


class Weights(nnx.Module):
    """A few numbers, cheap to save."""

    def __init__(self, value=0.0):
        self.w = nnx.Param(jnp.full((4, 4), value, jnp.float32))


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int32, jnp.int32])
def test_steps_and_what_is_said_about_them_may_be_numbers_of_numpy_and_jax(tmp_path, kind):
    """They were taken, and the save failed behind the training's back."""
    said = {"loss": np.float32(0.5), "sizes": (np.int64(3), jnp.arange(2)), "deep": {"bf16": jnp.bfloat16(2)}}
    with ax.CheckpointManager(tmp_path, every=2) as manager:
        assert manager.save(kind(4), Weights(1), about=said, metrics={"loss": jnp.float32(0.25)})
        assert not manager.save(4, Weights(2), force=True)
        manager.wait()
        found = manager.restore(Weights(), step=kind(4))
    assert type(found.step) is int and found.step == 4 and found.metrics == {"loss": 0.25}
    about = {name: found.about[name] for name in said}
    assert about == {"loss": 0.5, "sizes": [3, [0, 1]], "deep": {"bf16": 2.0}}


REFUSED = {
    "a negative step": ({"step": -1}, ValueError, "step=-1 must be at least 0"),
    "a negative step of NumPy": ({"step": np.int64(-3)}, ValueError, "step=-3 must be at least 0"),
    "half a step": ({"step": 1.5}, TypeError, "step=1.5 must be a whole number"),
    "several steps": ({"step": np.arange(2)}, TypeError, "must be a whole number"),
    "an object": ({"about": {"a": [{"b": object()}]}}, TypeError, r"about\['a'\]\[0\]\['b'\], a object: turn it into"),
    "a path and a set": (
        {"about": {"a": Path("x"), "b": {1}}},
        TypeError,
        r"about\['a'\], a \w*Path, about\['b'\], a set",
    ),
    "a number as key": ({"about": {1: 2}}, TypeError, "the key 1 of about"),
    "a function": ({"about": {"key": jax.random.key}}, TypeError, "a checkpoint keeps plain values"),
    "a number as text": ({"metrics": {"loss": "0.5"}}, TypeError, r"metrics\['loss'\] is a str, and must be a number"),
    "a number as text of NumPy": (
        {"metrics": {"loss": np.array("0.5")}},
        TypeError,
        r"\['loss'\] is a ndarray, and must",
    ),
    "a complex metric": ({"metrics": {"loss": np.complex64(1j)}}, TypeError, r"\['loss'\] is a complex64, and must be"),
    "entries of the library's": (
        {"about": {"saved_at": 0.0, "mesh": {}, "who": "me"}},
        ValueError,
        r"about has 'mesh', 'saved_at', .*: give them other names",
    ),
    "a metric of text": ({"metrics": {"loss": "low"}}, TypeError, r"metrics\['loss'\] is a str, and must be a number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_checkpoint_cannot_keep_is_refused_before_anything_starts(tmp_path, case):
    options, kind, said = REFUSED[case]
    with ax.CheckpointManager(tmp_path / "run", every=1) as manager:
        with pytest.raises(kind, match=said):
            manager.save(**{"step": 1, "state": Weights(), **options})
        assert not (tmp_path / "run").exists()


STATES = {
    "text and functions": (
        {"a": np.ones(2), "b": {"c": "words", "d": jnp.sin}},
        TypeError,
        r"kinds as arrays:\n  b/c: str\d+\n  b/d: object\n.*plain values, such as text, go into about=",
    ),
    "times": ({"a": np.array(["2026-01-01"], "datetime64[D]")}, TypeError, r"a: datetime64\[D\]"),
    "numbers no file can hold": (
        {"a": np.ones(2, jnp.uint4), "b": 2**70},
        TypeError,
        r"a: uint4\n  b: object\n[^$]*uint8",
    ),
    "twins": (
        {"a": {"b": np.ones(2)}, "a/b": np.zeros(2), "c": np.ones(1)},
        ValueError,
        r"the same name and cannot be told apart:\n  a/b: \['a'\]\['b'\] and \['a/b'\]\nrename one",
    ),
    "twins in files": ({"a": np.ones(2), "a/": np.zeros(2)}, ValueError, r"would share one file:\n  'a' and 'a/'"),
    "no text": ({"\udcff": np.ones(2)}, ValueError, r"these are not:\n  '\\udcff'"),
}


@pytest.mark.parametrize("case", STATES)
def test_arrays_that_a_checkpoint_cannot_keep_are_named_before_anything_starts(tmp_path, case):
    state, kind, said = STATES[case]
    with pytest.raises(kind, match=said):
        ax.save(tmp_path / "run", state)
    assert not list(tmp_path.iterdir())


def test_odd_names_of_arrays_and_the_kinds_that_files_hold_are_kept(tmp_path):
    names = ["", ".", "..", "a/0", "a\0b", "b\\c", "%2f ü", "c//"]
    kinds = ["bool", "int4", "uint8", "float16", "bfloat16", "float8_e4m3fn", "complex64", "int64"]
    state = {name: np.arange(6).reshape(2, 3).astype(jnp.dtype(kind)) for name, kind in zip(names, kinds, strict=True)}
    found = ax.restore(ax.save(tmp_path / "run", state), {name: np.zeros_like(each) for name, each in state.items()})
    assert all((found[name] == state[name]).all() and found[name].dtype == state[name].dtype for name in names)


def test_a_state_of_only_empty_arrays_is_kept(tmp_path):
    """Orbax wrote nothing, and its own file was then missing."""
    path = ax.save(tmp_path / "run", {"a": jnp.zeros((0, 3)), "b": np.zeros((2, 0), np.int8)})
    found = ax.restore(path, {"a": jnp.ones((0, 3)), "b": np.ones((2, 0), np.int8)})
    assert found["a"].shape == (0, 3) and found["b"].shape == (2, 0)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_are_restored_into_shapes_and_none_of_them_too(tmp_path, impl):
    key = jax.random.key(3, impl=impl)
    tree = {"one": key, "none": jax.random.split(key, 0), "many": jax.random.split(key, 2)}
    ax.save(tmp_path / "a", tree)
    for like in (tree, jax.eval_shape(lambda: tree)):
        found = ax.restore(tmp_path / "a", like)
        assert {name: leaf.dtype for name, leaf in found.items()} == dict.fromkeys(tree, key.dtype)
        assert all((jax.random.key_data(found[name]) == jax.random.key_data(tree[name])).all() for name in tree)


def test_an_entry_that_the_arrays_lack_is_damage(tmp_path):
    """It was restored as the integer 0."""
    path = ax.save(tmp_path / "run", {"a": np.ones(2)})
    said = Manifest.read(path)
    dataclasses.replace(said, entries={**said.entries, "b": said.entries["a"]}).write(path)
    for like in (np.zeros(2), jnp.zeros(2)):
        with pytest.raises(ax.DamagedCheckpoint, match="the arrays lack b"):
            ax.restore(path, {"a": np.zeros(2), "b": like})


@pytest.fixture
def from_a_source_tree(monkeypatch):
    """No metadata says which version of the package this is."""
    real = importlib.metadata.distribution

    def distribution(name):
        if name == "axonml-jax":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    store._versions.cache_clear()
    yield
    store._versions.cache_clear()


@pytest.mark.usefixtures("from_a_source_tree")
def test_a_version_that_cannot_be_read_is_null_and_spoils_nothing(tmp_path, capsys):
    """A run from a source tree went to its first checkpoint, and died there."""
    versions = Manifest.read(ax.save(tmp_path / "run", Weights())).about["versions"]
    assert versions["axonml-jax"] is None and versions["jax"] == jax.__version__
    assert main(["--version"]) == 0
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    assert (
        capsys.readouterr().out == f"{ax.__version__}\n" and f'\nversion = "{ax.__version__}"\n' in project.read_text()
    )


def test_what_a_run_could_not_save_ends_it_before_the_first_step():
    loader = types.SimpleNamespace(state_dict=lambda: {"at": object()})
    config = read_config("train", [str(Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml")])
    with pytest.raises(TypeError, match=r"the data position\['at'\], a object"):
        Saves(object(), Weights(), loader, config, None, None)


def test_floats_that_are_rounded_on_the_way_are_said_and_wider_ones_are_not(tmp_path, caplog):
    """Parameters and moments saved in float32 became bfloat16 without a word."""
    kinds = ["float32", "bfloat16", "float16", "float32"]
    path = ax.save(
        tmp_path / "run",
        {name: np.full(2, 1.001).astype(jnp.dtype(kind)) for name, kind in zip("abcd", kinds, strict=True)},
    )

    def said(*kinds):
        caplog.clear()
        found = ax.restore(path, {name: jnp.zeros(2, kind) for name, kind in zip("abcd", kinds, strict=True)})
        assert [str(found[name].dtype) for name in "abcd"] == list(kinds)
        return "\n".join(caplog.messages)

    assert not said(*kinds) and not said("float32", "float32", "float32", "float32")
    assert said("bfloat16", "float16", "bfloat16", "bfloat16").endswith(
        "fewer digits or less range than it was saved with: 2 from float32 to bfloat16 (a, d); 1 from bfloat16 to float16 (b); "
        "1 from float16 to bfloat16 (c)"
    )
    assert "1 from float32 to float16 (a)" in said("float16", "bfloat16", "float16", "float32")
    trainers = [trained(kind) for kind in (jnp.float32, jnp.bfloat16)]
    ax.restore(ax.save(tmp_path / "trainer", trainers[0]), trainers[1])
    assert "6 from float32 to bfloat16 (model/bias, model/kernel, optimizer/0/mu/bias, ...)" in caplog.messages[-1]


def trained(kind):
    """A trainer whose parameters and moments are of a dtype."""
    model = ax.DDP(
        nnx.Linear(2, 2, param_dtype=kind, rngs=nnx.Rngs(0)), ax.make_mesh(data=1, devices=jax.devices()[:1])
    )
    return model.trainer(optax.adam(0.1), lambda model, batch: jnp.mean(model(batch) ** 2))
