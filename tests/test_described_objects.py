"""Objects that a configuration describes, wherever they stand: nothing is imported unasked, all is read as it is written."""

import sys

import jax.numpy as jnp
import pytest
import yaml

from axonml_jax.__main__ import main
from axonml_jax.config.config import ConfigError, Structure, as_dict, is_structure, read_config, settings
from axonml_jax.config.objects import make_optimizer

MODEL = {"vocab_size": 256, "num_layers": 1, "hidden_size": 8, "num_heads": 1, "max_length": 128}
STRANGE = {"class_path": "strange_package.Thing", "init_args": {}}
FALLING = {
    "class_path": "optax.linear_schedule",
    "init_args": {"init_value": 0.5, "end_value": 0.0, "transition_steps": 10},
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a configuration, beside a package that nobody has allowed."""
    (tmp_path / "strange_package.py").write_text("class Thing:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)

    def write(**sections):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"model": MODEL, **sections}))
        return str(path)

    yield write
    sys.modules.pop("strange_package", None)


# Where a description stands, and what else that key needs.
PLACES = {
    "optim.init_args.momentum": {"optim": {"class_path": "optax.sgd", "init_args": {"momentum": STRANGE}}},
    "optim.init_args.masks[1].inner": {"optim": {"class_path": "optax.sgd", "init_args": {"masks": [1, {"inner": STRANGE}]}}},
    "optim.learning_rate": {"optim": {"learning_rate": STRANGE}},
    "optim.chain[0]": {"optim": {"chain": [STRANGE]}},
    "optim.chain[0].init_args.step_size_fn": {
        "optim": {"chain": [{"class_path": "optax.scale_by_schedule", "init_args": {"step_size_fn": STRANGE}}]}},
    "optim.groups[0].learning_rate": {"optim": {"groups": [{"paths": ["a"], "learning_rate": STRANGE}]}},
    "model.init_args.width": {"model": {"class_path": "optax.Net", "init_args": {"width": STRANGE}}},
    "loss.init_args.scale": {"loss": {"class_path": "optax.loss", "init_args": {"scale": STRANGE}}},
    "data.init_args.n": {"data": {"class_path": "optax.data", "init_args": {"n": STRANGE}}},
    "data.valid.init_args.n": {
        "data": {"class_path": "optax.data", "valid": {"class_path": "optax.data", "init_args": {"n": STRANGE}}}},
    "callbacks[0].init_args.file": {"callbacks": [{"class_path": "optax.Notes", "init_args": {"file": STRANGE}}]},
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_description_is_refused_wherever_it_stands_and_nothing_is_imported(place, write):
    with pytest.raises(ConfigError) as refused:
        read_config("train", [write(**PLACES[place])])
    assert f"{place}.class_path=strange_package.Thing: imports the package 'strange_package'" in str(refused.value)
    assert "strange_package" not in sys.modules


def test_a_flags_description_is_refused_and_one_that_a_flag_replaces_is_not(write):
    inside = '{"momentum": {"class_path": "strange_package.Thing"}}'
    for flags in (["--optim.init_args", inside], [f"--optim.init_args={inside}"], ["--callbacks", f"[{inside}]"]):
        with pytest.raises(ConfigError, match="imports the package 'strange_package'"):
            read_config("train", [write(optim={"class_path": "optax.sgd"}), *flags])
    with pytest.raises(ConfigError, match="imports the package 'strange_package'"):
        read_config("train", [write(optim={"class_path": "optax.sgd", "init_args": inside})])
    path = write(optim={"class_path": "optax.sgd", "init_args": {"momentum": STRANGE}})
    config = read_config("train", [path, "--optim.init_args", "{momentum: 1e-1, nesterov: true}"])
    assert config.optim.init_args == {"momentum": 0.1, "nesterov": True}
    assert "strange_package" not in sys.modules


def test_the_flag_may_be_given_again_as_each_refusal_says(write, capsys):
    path = write(**PLACES["optim.learning_rate"])
    flags = ["--allow-imports", "strange_package", "--allow-imports", "own_parts,fsdp_plans"]
    assert main(["explain", path, *flags]) == 2
    assert "--allow-imports" not in (said := capsys.readouterr().err) and "optim.learning_rate" in said


def test_every_command_asks_before_it_imports(write, capsys):
    path = write(**PLACES["optim.init_args.momentum"])
    folder = path.removesuffix("/config.yaml")
    of_run = [["eval", folder], ["generate", folder, "--prompt", "a"]]
    for argv in (["explain", path], ["train", path], ["plan", path, "--devices", "8"], *of_run):
        assert main(argv) == 2, argv
        assert "add --allow-imports strange_package" in capsys.readouterr().err, argv
    assert "strange_package" not in sys.modules


def test_the_parser_is_never_given_a_type_that_may_hold_a_description():
    open_ended = [key for key, kind, *_ in settings() if is_structure(kind)]
    assert {"model.init_args", "loss.init_args", "data.init_args", "data.valid", "callbacks"} <= {*open_ended}
    assert {f"optim.{name}" for name in ("init_args", "chain", "groups", "learning_rate")} <= {*open_ended}
    assert repr(Structure(dict[str, int], "a mapping")) == "a mapping"


# The section, and whether its optimizer can be made of two parameters.
NESTED = {
    "a group's schedule": {"groups": [{"paths": ["up"], "learning_rate": FALLING}]},
    "an optimizer's optimizer": {
        "class_path": "optax.contrib.schedule_free",
        "init_args": {"base_optimizer": {"class_path": "optax.sgd", "init_args": {"learning_rate": 0.1}}, "b1": 0.9},
    },
    "a chain's schedule": {
        "chain": [
            {"class_path": "optax.scale_by_adam"},
            {"class_path": "optax.add_decayed_weights", "init_args": {"weight_decay": FALLING}},
            {"class_path": "optax.scale_by_learning_rate"},
        ]
    },
}


@pytest.mark.parametrize("name", NESTED)
def test_descriptions_among_arguments_are_read_saved_and_made(name, write, tmp_path):
    config = read_config("train", [write(optim=NESTED[name])])
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(as_dict(config)))
    assert read_config("train", [str(tmp_path / "again.yaml")]) == config
    params = {"up": jnp.ones(2), "down": jnp.ones(2)}
    tx = make_optimizer(config.optim, 10)
    updates, _ = tx.update(params, tx.init(params), params)
    assert all((update < 0).all() for update in updates.values())


def test_keys_that_are_numbers_stay_numbers(write, tmp_path):
    given = {"class_path": "optax.piecewise_constant_schedule"}
    given["init_args"] = {"init_value": 1.0, "boundaries_and_scales": {10: 0.5, 20: 0.1}}
    config = read_config("train", [write(optim={"learning_rate": given})])
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(as_dict(config)))
    again = read_config("train", [str(tmp_path / "again.yaml")])
    assert again == config and again.optim.learning_rate == given
