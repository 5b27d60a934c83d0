"""What a checkpoint may be told: steps, metrics and words as numbers of Python, NumPy or JAX; all else is refused at once."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import axonml_jax as ax


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
    "a metric of text": ({"metrics": {"loss": "low"}}, TypeError, r"metrics\['loss'\] is a str, and must be a number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_checkpoint_cannot_keep_is_refused_before_anything_starts(tmp_path, case):
    options, kind, said = REFUSED[case]
    with ax.CheckpointManager(tmp_path / "run", every=1) as manager:
        with pytest.raises(kind, match=said):
            manager.save(**{"step": 1, "state": Weights(), **options})
        assert not (tmp_path / "run").exists()
