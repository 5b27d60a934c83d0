"""A step is composed of what its plan, its trainer and its model ask for; all else is neither called nor imported."""

import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from int8_strategy import Int8Shard

import axonml_jax as ax
from axonml_jax.training.nonfinite import NonFinite
from axonml_jax.training.state import EXTRAS, TrainState

ASKED = {
    "nothing": ({"data": 2}, {}, {}, "Norm JoinedBuffers", ""),
    "all that a trainer can": (
        {"data": 2},
        {},
        {"max_grad_norm": 1.0, "max_nonfinite": 2, "layer_norms": True},
        "LayerNorms Norm SkipNonFinite JoinedBuffers ClipByNorm",
        "guard",
    ),
    "float16 and a limit": (
        {"data": 2},
        {"precision": "fp16"},
        {"max_nonfinite": 2},
        "Norm SkipNonFinite JoinedBuffers",
        "loss_scale guard",
    ),
    "offload": (
        {"fsdp": 2},
        {"offload": "full"},
        {"max_grad_norm": 1.0, "max_nonfinite": 2},
        "Norm Streamed SkipNonFinite JoinedBuffers ClipByNorm",
        "guard",
    ),
    "feedback": (
        {"fsdp": 2},
        {"fsdp": ax.Shard(stage=1, reduce_wire="int8-feedback")},
        {"max_nonfinite": 2},
        "Norm SkipNonFinite FedBack JoinedBuffers",
        "guard left_out",
    ),
    "a strategy with a state": (
        {"fsdp": 2},
        {"fsdp": Int8Shard()},
        {"max_nonfinite": 2},
        "Norm SkipNonFinite BetweenSteps JoinedBuffers",
        "guard strategies",
    ),
    "rounds": (
        {"data": 2},
        {"data": ax.DiLoCo(every=2)},
        {"max_nonfinite": 2, "layer_norms": True},
        "Rounds LayerNorms Norm SkipNonFinite JoinedBuffers",
        "guard rounds",
    ),
}


class Net(nnx.Module):
    """A layer."""

    def __init__(self):
        self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(x)


def loss_fn(model, batch):
    return jnp.mean(model(batch) ** 2)


def trainer_of(degrees, plan, options):
    mesh = ax.make_mesh(devices=jax.devices()[:2], **degrees)
    return ax.parallelize(Net(), mesh, ax.Plan(**plan)).trainer(optax.adam(1e-3), loss_fn, **options)


@pytest.mark.parametrize("asked", ASKED)
def test_a_step_has_the_transforms_that_are_asked_for_in_order_and_a_state_what_they_keep(asked):
    *given, transforms, kept = ASKED[asked]
    trainer = trainer_of(*given)
    assert " ".join(type(each).__name__ for each in trainer.train_step.transforms) == transforms
    before = trainer.state
    assert [name for name in EXTRAS if getattr(before, name) is not None] == kept.split()
    paths = [jax.tree_util.keystr(path[:1]) for path, _ in jax.tree_util.tree_leaves_with_path(before)]
    order = [f".{name}" for name in ("step", "variables", "opt_state", "key", *kept.split())]
    assert list(dict.fromkeys(paths)) == order
    specs = trainer.train_step.state_specs(before)
    assert jax.tree.map(lambda leaf: leaf.sharding.spec, before) == specs
    trainer.step(np.ones((4, 8), np.float32))
    assert jax.tree.structure(trainer.state) == jax.tree.structure(before)


def test_a_state_has_the_names_that_steps_keep_and_no_others_and_goes_through_pickle():
    state = TrainState(jnp.int32(7), None, None, None).keeping(guard=NonFinite.first())
    again = pickle.loads(pickle.dumps(state))
    assert int(again.step) == 7 and int(again.guard.skipped) == 0 and again.rounds is None
    assert state.keeping(guard=None).extras == {}
    for asked in ("gaurd", "__deepcopy__", "tree"):
        with pytest.raises(AttributeError, match=asked):
            getattr(state, asked)
    with pytest.raises(ValueError, match="not gaurd"):
        state.keeping(gaurd=1)


ALONE = """
import sys
import axonml_jax as ax
ax.fake_devices(2)
import jax.numpy as jnp, numpy as np, optax
from flax import nnx
model = ax.DDP(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), ax.make_mesh(data=2))
trainer = model.trainer(optax.adam(1e-3), lambda model, batch: jnp.mean(model(batch) ** 2), max_grad_norm=1.0)
trainer.step(np.ones((4, 8), np.float32))
print(*(name.removeprefix("axonml_jax.") for name in sys.modules if name.startswith("axonml_jax.")))
"""
IDLE = {f"training.{room}" for room in ("between_steps", "nonfinite", "rounds", "streamed")} | {"layers.float8"}


@pytest.mark.slow  # the same on both ends
def test_a_plain_step_imports_nothing_of_what_nobody_asked_for():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "training.transforms" in imported and not imported & IDLE
