"""Objects that a configuration names: optimizers, chains, schedules, masks, groups; what may be imported, what is refused."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import axonml_jax as ax
from axonml_jax.config.config import import_problems, named_paths
from axonml_jax.config.objects import find, made_by, make, make_optimizer, moments, require_members
from axonml_jax.config.sections import OptimConfig

PARAMS = {"up": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}, "embed": jnp.ones((8, 3))}
DECAY = {
    "class_path": "optax.add_decayed_weights",
    "init_args": {"weight_decay": 0.1, "mask": {"not_paths": ["bias$"]}},
}
CHAIN = [{"class_path": "optax.scale_by_adam"}, DECAY, {"class_path": "optax.scale_by_learning_rate"}]


def updates(steps=10, **settings):
    """Two updates of parameters that are ones by gradients that are ones."""
    tx = make_optimizer(OptimConfig(schedule="constant", **settings), steps)
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(2):
        change, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        params = optax.apply_updates(params, change)
    return params


def same(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), left, right)


def test_an_optimizer_by_its_path_is_that_optimizer():
    tx = optax.sgd(0.5, momentum=0.9)
    state, expected = tx.init(PARAMS), PARAMS
    for _ in range(2):
        change, state = tx.update(jax.tree.map(jnp.ones_like, expected), state, expected)
        expected = optax.apply_updates(expected, change)
    same(updates(class_path="optax.sgd", init_args={"momentum": 0.9}, learning_rate=0.5), expected)


def test_a_chain_with_a_mask_by_path_is_adamw_with_that_mask():
    mask = {"up": {"kernel": True, "bias": False}, "embed": True}
    tx = optax.adamw(0.5, weight_decay=0.1, mask=mask)
    state, expected = tx.init(PARAMS), PARAMS
    for _ in range(2):
        change, state = tx.update(jax.tree.map(jnp.ones_like, expected), state, expected)
        expected = optax.apply_updates(expected, change)
    same(updates(chain=CHAIN, learning_rate=0.5), expected)


def test_groups_have_keys_of_their_own_and_the_first_that_fits_counts():
    groups = [
        {"paths": ["embed"], "learning_rate": 0.25},
        {"paths": ["e"], "class_path": "optax.sgd", "learning_rate": 2.0},
    ]
    found = updates(groups=groups, learning_rate=0.5, weight_decay=0.0)
    alone = updates(learning_rate=0.25, weight_decay=0.0)["embed"]
    np.testing.assert_allclose(found["embed"], alone, rtol=1e-6)
    np.testing.assert_allclose(found["up"]["kernel"], 1.0 - 2 * 2.0, rtol=1e-6)  # sgd
    np.testing.assert_allclose(
        found["up"]["bias"], updates(learning_rate=0.5, weight_decay=0.0)["up"]["bias"], rtol=1e-6
    )


def test_a_schedule_of_ones_own():
    schedule = {
        "class_path": "optax.linear_schedule",
        "init_args": {"init_value": 1.0, "end_value": 3.0, "transition_steps": 1},
    }
    found = updates_of(OptimConfig(class_path="optax.sgd", learning_rate=schedule))
    np.testing.assert_allclose(found["embed"], 1.0 - 1.0 - 3.0)


def test_a_groups_own_schedule_takes_the_place_of_the_sections_warmup():
    schedule = {"class_path": "optax.constant_schedule", "init_args": {"value": 2.0}}
    groups = [{"paths": ["embed"], "learning_rate": schedule, "class_path": "optax.sgd"}]
    assert float(updates_of(OptimConfig(warmup_steps=100, groups=groups))["embed"][0, 0]) == 1.0 - 2 * 2.0


def updates_of(config):
    tx = make_optimizer(config, 10)
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(2):
        change, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        params = optax.apply_updates(params, change)
    return params


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, 2),
        ({"name": "lion"}, 1),
        ({"class_path": "optax.sgd"}, 0),
        ({"class_path": "optax.adam"}, 2),
        ({"chain": CHAIN}, 2),
    ],
)
def test_the_values_kept_per_parameter_are_counted(settings, kept):
    assert moments(OptimConfig(**settings), 10, PARAMS) == kept


REFUSED = {
    "optim.class_path=optax.adafacto: optax has no 'adafacto': did you mean adafactor?": {"class_path": "optax.adafacto"},
    "optim.init_args.momentun: optax.sgd takes no such argument; did you mean momentum?": {
        "class_path": "optax.sgd", "init_args": {"momentun": 1}},
    "optim.chain[0].init_args: optax.multi_transform needs transforms, param_labels too": {
        "chain": [{"class_path": "optax.multi_transform"}, {"class_path": "optax.sgd"}]},
    "none of optax.scale_by_adam takes a learning_rate": {"class_path": "optax.scale_by_adam"},
    "optim.chain[0]: each must be a class_path": {"chain": [{"momentum": 1}]},
    "init_args hold a learning_rate": {"class_path": "optax.sgd", "init_args": {"learning_rate": 1.0}},
    "optim.groups[0].paths=None: must be a list": {"groups": [{"learning_rate": 1.0}]},
    "optim.groups[0].paths: no regular expression: '('": {"groups": [{"paths": ["("]}]},
    "optim.groups[0]: pats: a group has paths and may have": {"groups": [{"paths": ["x"], "pats": ["x"]}]},
    "optim.groups[0]: optim.betas=[0.9]: must be two numbers": {"groups": [{"paths": ["x"], "betas": 0.9}]},
    "optim.groups[0]: optim.betas=[0.9, 0.9, 0.9]: must be two": {"groups": [{"paths": ["x"], "betas": [0.9, 0.9, 0.9]}]},
    "optim.groups[0]: optim.name=sgd: must be one of adamw, lion": {"groups": [{"paths": ["x"], "name": "sgd"}]},
    "optim.groups[0]: optim.schedule=linear: must be one of": {"groups": [{"paths": ["x"], "schedule": "linear"}]},
    "optim.groups[0]: optim.learning_rate=None: must be a number": {"groups": [{"paths": ["x"], "learning_rate": None}]},
    "optim.init_args.momentum.class_path=None: must be a dotted path": {
        "class_path": "optax.sgd", "init_args": {"momentum": {"class_path": None}}},
    "optim.class_path=optax._src.base.os.system": {"class_path": "optax._src.base.os.system"},
    "optim.class_path=optax.contrib: is no class or function": {"class_path": "optax.contrib"},
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_made_is_refused(said):
    with pytest.raises(ValueError) as caught:
        make_optimizer(OptimConfig(**REFUSED[said]), 10)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"class_path": "optax.sgd", "chain": []}, "class_path beside chain"),
        ({"init_args": {}}, "init_args without class_path have no effect"),
        ({"class_path": "optax.sgd", "weight_decay": 0.2}, "weight_decay has no effect beside class_path"),
        ({"learning_rate": {"class_path": "optax.constant_schedule"}, "warmup_steps": 3}, "warmup_steps has no effect"),
    ],
)
def test_keys_without_effect_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        OptimConfig(**settings)


def test_groups_to_which_nothing_belongs_are_refused():
    config = OptimConfig(groups=[{"paths": ["kernel$"]}, {"paths": ["up/kernel"]}, {"paths": ["bias"]}])
    with pytest.raises(ValueError, match=r"optim.groups\[1\]: no parameter is left .* up/kernel"):
        require_members(config, PARAMS)


def test_nothing_is_imported_that_the_user_has_not_named(tmp_path, monkeypatch):
    (tmp_path / "mine_of_test.py").write_text("import optax\ndef half(learning_rate):\n    return optax.sgd(0.5)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {"optim": {"chain": [{"class_path": "mine_of_test.half"}, {"class_path": "optax.sgd"}]}}
    assert [*named_paths(config)] == [
        ("optim.chain[0].class_path", "mine_of_test.half"),
        ("optim.chain[1].class_path", "optax.sgd"),
    ]
    [problem] = import_problems(config, ())
    assert "--allow-imports mine_of_test" in problem and "mine_of_test" not in sys.modules
    assert not import_problems(config, ("mine_of_test",))
    assert make({"class_path": "mine_of_test.half"}, "x", {"learning_rate": 1.0}) is not None
    assert import_problems({"class_path": "os"}, ()) == [
        "class_path=os: must be the dotted path of a class or function, such as optax.adafactor"
    ]


@pytest.mark.parametrize("value", [{"paths": ["a.txt"]}, {"not_paths": ["b"]}, {"matrices": 3}])
def test_a_mask_is_one_on_the_optimizers_path_alone(value, tmp_path, monkeypatch):
    (tmp_path / "kept_by_test.py").write_text("def keep(given):\n    return given\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    described = {"class_path": "kept_by_test.keep", "init_args": {"given": value}}
    assert make(described, "callbacks[0]") == made_by(described, "data")() == value
    assert make({"class_path": "kept_by_test.keep", "init_args": {"given": [value]}}, "callbacks[0]") == [value]


@pytest.mark.parametrize(
    "path",
    [
        "optax._src.base.jnp.load",
        "optax._src.base.jax.profiler.save_device_memory_profile",
        "optax._src.base.jax.os.system",
        "optax.nope.sgd",
        "nowhere_at_all.sgd",
    ],
)
def test_a_path_leads_to_an_object_of_its_own_package(path):
    with pytest.raises(ValueError, match=path):
        find(path, "optim.class_path")


def test_a_missing_import_of_ones_own_module_keeps_its_name(tmp_path, monkeypatch):
    (tmp_path / "broken_of_test.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        find("broken_of_test.half", "optim.class_path")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + nnx.tanh(layer(x))
        return x


@pytest.mark.parametrize("facade", ["ddp", "fsdp", "pipeline"])
def test_chains_and_groups_train_as_on_one_device(facade):
    groups = [
        {
            "paths": ["layers/[01]/kernel"],
            "learning_rate": 0.2,
            "class_path": "optax.sgd",
            "init_args": {"momentum": 0.9},
        }
    ]
    tx = make_optimizer(OptimConfig(chain=CHAIN, groups=groups, learning_rate=0.05, schedule="constant"), 10)
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 6)), "y": rng.normal(size=(8, 6))}
    loss = lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean()

    def trained(wrapped):
        trainer = wrapped.trainer(tx, loss)
        losses = [float(trainer.step(batch)["loss"]) for _ in range(3)]
        return losses, trainer.model.state_dict()

    devices = jax.devices()
    make_model = lambda: Net(nnx.Rngs(0))
    alone = trained(ax.DDP(make_model(), ax.make_mesh(data=1, devices=devices[:1])))
    split = {
        "ddp": lambda: ax.DDP(make_model(), ax.make_mesh(data=4, devices=devices[:4])),
        "fsdp": lambda: ax.FSDP(make_model(), ax.make_mesh(fsdp=4, devices=devices[:4])),
        "pipeline": lambda: ax.Pipeline(make_model(), ax.make_mesh(pipe=2, devices=devices[:2]), num_microbatches=2),
    }
    found = trained(split[facade]())
    np.testing.assert_allclose(found[0], alone[0], rtol=1e-5)
    for name, value in alone[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-4, atol=1e-6, err_msg=name)
