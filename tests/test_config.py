"""Configurations: the keys are frozen, every key has help, and whatever is wrong is named with its remedy."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import axonml_jax as ax
from axonml_jax.base import SAME_KEYS
from axonml_jax.config import config as nearest_file_module
from axonml_jax.config.config import (
    ConfigError,
    RunConfig,
    as_dict,
    attribute_docs,
    changed_settings,
    config_parser,
    read_config,
    settings,
)

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
MODEL = {"vocab_size": 256, "num_layers": 1, "hidden_size": 16, "num_heads": 2, "max_length": 128}

KEYS = (Path(__file__).parent / "config_keys.txt").read_text().split()


@pytest.fixture
def write(tmp_path):
    def write(content, model=MODEL):
        path = tmp_path / "config.yaml"
        text = content if isinstance(content, str) else yaml.safe_dump({"model": model, **content})
        path.write_text(text)
        return str(path)

    return write


def refusal(*argv):
    with pytest.raises(ConfigError) as caught:
        read_config("train", argv)
    return str(caught.value)


def test_the_configuration_keys_are_frozen():
    assert [key for key, *_ in settings()] == KEYS


def test_the_section_experts_is_the_models(write):
    path = write({"mesh": {"data": 1, "expert": 4}, "experts": {"num_experts": 8, "top_k": 2, "inner_size": 12}})
    config = read_config("train", [path])
    assert config.model.experts == config.experts and config.degrees == {"data": 1, "expert": 4}
    assert config.model.num_params > config.model.active_params
    again = as_dict(config)
    assert "experts" not in again["model"] and again["experts"]["num_experts"] == 8
    assert read_config("train", [write(again)]) == config


def test_the_section_rope_scaling_is_the_models(write):
    path = write({"rope_scaling": {"kind": "llama3", "factor": 8.0, "original_length": 64}})
    config = read_config("train", [path])
    assert config.model.rope_scaling == config.rope_scaling and config.rope_scaling.factor == 8
    again = as_dict(config)
    assert "rope_scaling" not in again["model"] and read_config("train", [write(again)]) == config
    assert "factor=2.0: without effect for kind=none" in refusal(write({}), "--rope_scaling.factor", "2")


def test_experts_that_do_not_go_with_the_rest_are_refused(write):
    dense = write({"mesh": {"data": 1, "expert": 4}})
    assert "mesh.expert=4 splits experts, and the model has none: set experts.num_experts" in refusal(dense)
    uneven = write({"mesh": {"data": 1, "expert": 4}, "experts": {"num_experts": 6}})
    said = refusal(uneven)
    assert "6 experts do not divide over expert=4" in said and "experts.num_experts" in said
    for flags, said in (
        (("--experts.top_k", "3"), "top_k=3: without effect while num_experts=0"),
        (("--experts.num_experts", "4", "--experts.top_k", "5"), "top_k=5: there are num_experts=4"),
        (("--experts.num_experts", "4", "--experts.groups", "2"), "groups=2: belong to router='sigmoid'"),
        (("--experts.num_experts", "4", "--experts.bias_rate", "0.1"), "bias_rate=0.1: belong to router='sigmoid'"),
        (
            ("--experts.num_experts", "4", "--experts.capacity_factor", "1", "--experts.dispatch", "gather"),
            "dispatch=gather: is for layers that drop no token",
        ),
        (
            ("--experts.num_experts", "4", "--experts.router", "sigmoid", "--experts.groups", "3"),
            "groups=3: do not divide num_experts=4",
        ),
        (("--experts.num_experts", "4", "--experts.capacity_factor", "-1"), "capacity_factor=-1.0: must be positive"),
        (("--experts.num_experts", "4", "--model.split", "grid"), "experts are split over expert and tensor"),
        (("--experts.num_experts", "4", "--experts.every", "2"), "none of the 1 blocks has any"),
    ):
        assert said in refusal(write({}), *flags), flags


def test_axes_that_the_models_layers_do_not_split_are_named_with_the_remedy(write):
    message = refusal(
        write({"mesh": {"data": 1, "row": 2, "tensor": 2}, "data": {"length": 127}}, MODEL | {"split": "grid"})
    )
    assert "mesh.tensor=2 splits nothing while model.split=grid: set model.split=tensor" in message
    message = refusal(
        write({"mesh": {"row": 2, "tensor": 2}, "data": {"length": 127}}, MODEL | {"sequence_parallel": True})
    )
    assert "mesh.row=2 splits nothing while model.split=tensor: set model.split=grid" in message
    assert "127 positions do not divide over tensor=2" in message


def test_every_key_has_help_that_says_what_it_is():
    text = " ".join(config_parser("train").format_help().split())
    for key, _, _, words in settings():
        assert re.search(rf"--{re.escape(key)}[ ,]", text) and len(words) > 8, key


def test_every_section_is_documented():
    documented = {field.name for field in dataclasses.fields(RunConfig)}
    assert set(attribute_docs(RunConfig)) == {"name", "profile", "resume", "callbacks", "model"} <= documented


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configurations_that_come_along_are_read(path):
    assert read_config("train", [str(path)]).devices.simulated in (4, 8)


def test_flags_win_over_the_file_and_the_file_over_defaults(write):
    path = write({"train": {"steps": 7, "log_every": 3}})
    config = read_config("train", [path, "--train.steps", "9", "--optim.betas", "[0.8, 0.9]", "--data.path=null"])
    assert (config.train.steps, config.train.log_every, config.train.seed) == (9, 3, 0)
    assert config.optim.betas == (0.8, 0.9) and config.data.path is None


def test_numbers_are_read_as_people_write_them(write):
    config = read_config(
        "train", [write("optim: {learning_rate: 3e-4}\nmodel: " + str(MODEL)), "--data.max_bytes", "1_000"]
    )
    assert config.optim.learning_rate == 3e-4 and config.data.max_bytes == 1000


@pytest.mark.parametrize(
    "given, found",
    [
        ("FULL", "full"),
        ("null", None),
        ('["attn_out", "mlp/up/kernel"]', ("attn_out", "mlp/up/kernel")),
        ("[host:input]", ("host:input",)),
        ("{blocks/0: [attn_out], head: everything}", {"blocks/0": ("attn_out",), "head": "everything"}),
    ],
)
def test_what_is_recomputed_is_said_by_a_word_by_names_or_unit_by_unit(given, found, write):
    in_file = read_config("train", [write({"plan": {"remat": yaml.safe_load(given)}})])
    by_flag = read_config("train", [write({}), f"--plan.remat={given}"])
    again = read_config("train", [write(as_dict(in_file))])
    assert in_file.plan.remat == by_flag.plan.remat == again.plan.remat == found


@pytest.mark.parametrize("given", ["foo", "[1]", "{blocks: 3}", "{blocks: {a: b}}", "3"])
def test_what_is_recomputed_is_nothing_else(given, write):
    assert "must be one of full, selective, or a list such as [text], or a mapping such as" in refusal(
        write({}), f"--plan.remat={given}"
    )


def test_a_yes_or_no_flag_alone_means_yes(write):
    config = read_config("train", [write({}), "--profile", "--output.plot", "false", "--plan.check_vma"])
    assert config.profile and config.plan.check_vma and not config.output.plot


def test_a_configuration_written_down_reads_back_as_the_same(write):
    config = read_config("train", [write({"optim": {"betas": [0.5, 0.6]}, "plan": {"precision": "bf16"}})])
    assert read_config("train", [write(yaml.safe_dump(as_dict(config)))]) == config


def test_every_unknown_key_and_flag_is_named_with_the_nearest_known_one(write):
    path = write({"train": {"step": 3}, "data": {"lenght": 5}, "optm": {"name": "adamw"}})
    message = refusal(path, "--plan.precison", "bf16", "--learning_rte=3", "--zebra", "1")
    assert "unknown key 'train.step'" in message and "did you mean train.steps?" in message
    assert "unknown key 'data.lenght'" in message and "did you mean data.length?" in message
    assert "unknown key 'optm'" in message and "did you mean optim?" in message
    assert "unknown flag --plan.precison: did you mean --plan.precision?" in message
    assert "unknown flag --learning_rte: did you mean --optim.learning_rate?" in message
    assert "unknown flag --zebra; --help lists all" in message


WRONG_TYPES = {
    "train.steps=many: must be a whole number": ("--train.steps", "many"),
    "train.steps=2.5: must be a whole number": ("--train.steps", "2.5"),
    "train.eval_every=x: must be a whole number, or null": ("--train.eval_every", "x"),
    "optim.name=adam: must be one of adamw, lion; any other optimizer goes under optim.class_path, such as optax.adafactor": (
        "--optim.name",
        "adam",
    ),
    "optim.chain=3: must be a list of mappings, or null": ("--optim.chain", "3"),
    "optim.class_path=mine.Net: imports the package 'mine', which runs its code; if you trust it, add --allow-imports mine": (
        "--optim.class_path",
        "mine.Net",
    ),
    "optim.learning_rate=x: must be a number, or a mapping such as {key: value}": ("--optim.learning_rate", "x"),
    "optim.betas=3: must be a list such as [0.9, 0.9]": ("--optim.betas", "3"),
    "plan.precision=bf17: must be one of float32, bf16, bf16-reduce, bf16-reduce-float32, fp16, fp8, or null": (
        "--plan.precision",
        "bf17",
    ),
    "output.plot=maybe: must be true or false": ("--output.plot", "maybe"),
}


@pytest.mark.parametrize("message", WRONG_TYPES)
def test_a_wrong_type_is_refused_by_key_on_the_command_line_and_in_the_file(message, write):
    flag, value = WRONG_TYPES[message]
    assert refusal(write({}), flag, value) == message
    section, name = flag[2:].split(".")
    assert refusal(write({section: {name: yaml.safe_load(value)}})) == message


def test_a_list_with_one_entry_of_another_kind_is_refused(write):
    for path, *flags in (
        (write({}), "--optim.groups", "[{paths: [a]}, 3]"),
        (write({"optim": {"groups": [{"paths": ["a"]}, 3]}}),),
    ):
        assert refusal(path, *flags).endswith("3]: must be a list of mappings, or null")


def test_all_values_out_of_range_are_reported_together(write):
    path = write({"train": {"steps": 0, "seed": -1}, "data": {"length": 0}, "plan": {"comm_dtype": "int32"}})
    message = refusal(path, "--optim.learning_rate", "0", "--model.num_heads", "3", "--sample.prompt", "")
    for part in (
        "train.steps=0: must be at least 1",
        "train.seed=-1: must be at least 0",
        "data.length=0: must be at least 1",
        "plan: comm_dtype=",
        "learning_rate=0.0: must be positive",
        "does not divide into num_heads=3",
        "sample.prompt is empty",
    ):
        assert part in message


UNUSABLE = {
    ("optim.learning_rate", ".inf"): "inf: must be a finite number",
    ("optim.learning_rate", ".nan"): "nan: must be a finite number",
    ("optim.betas", "[0.9, .inf]"): "inf: must be a finite number",
    ("plan.bucket_size_mb", ".inf"): "inf: must be a finite number",
    ("sample.temperature", ".nan"): "nan: must be a finite number",
    ("train.stuck_timeout", ".inf"): "inf: must be a finite number",
    ("train.steps", "1" + 23 * "0"): f"{10**23}: must be at most 2,147,483,647, as it is counted in 32 bits",
    ("mesh.data", str(2**31)): f"{2**31}: must be at most 2,147,483,647",
    ("train.seed", str(2**63)): f"{2**63}: must be at most 9,223,372,036,854,775,807, as it is counted in 64 bits",
    ("data.max_bytes", str(2**63)): f"{2**63}: must be at most 9,223,372,036,854,775,807, as it is counted in 64 bits",
}


@pytest.mark.parametrize("key, value", UNUSABLE)
def test_numbers_that_nothing_can_count_or_reach_are_refused_by_key(key, value, write):
    section, name = key.split(".")
    message = f"{key}={UNUSABLE[key, value]}"
    for command, *argv in (
        ("train", write({}), f"--{key}={value}"),
        ("explain", write({section: {name: yaml.safe_load(value)}})),
        ("plan", write({section: {name: yaml.safe_load(value)}})),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            read_config(command, argv)


def test_the_largest_numbers_that_can_be_counted_are_taken(write):
    config = read_config("train", [write({}), f"--train.steps={2**31 - 1}", f"--data.max_bytes={2**40}"])
    assert (config.train.steps, config.data.max_bytes) == (2**31 - 1, 2**40)


def test_sections_that_contradict_each_other_are_refused(write):
    message = refusal(write({"data": {"length": 200}, "name": "a/b"}, MODEL | {"vocab_size": 100}))
    assert "model.vocab_size=100: bytes need at least 256" in message
    assert "data.length=200 is above model.max_length=128" in message
    assert "name='a/b': must be the name of a folder" in message


SHARDING = {
    "a strategy without an axis": ({"plan": {"sharding_strategy": "full_shard"}}, "no effect while mesh.fsdp=1"),
    "prefetch without an axis": ({"plan": {"prefetch": 1}}, "plan.prefetch=1 has no effect while mesh.fsdp=1"),
    "packed gradients without an axis": (
        {"plan": {"reduce_wire": "int8"}},
        "plan.reduce_wire=int8 has no effect while mesh.fsdp=1",
    ),
    "prefetch without units": (
        {"mesh": {"fsdp": 2}, "plan": {"sharding_strategy": "shard_grad_op", "prefetch": 1}},
        "prefetch=1 acts with stage=3; with 2 all is gathered",
    ),
    "a loss scale per rank": ({"plan": {"sync_strategy": "no_sync", "precision": "fp16"}}, "use bf16"),
    "a negative prefetch": ({"mesh": {"fsdp": 2}, "plan": {"prefetch": -1}}, "plan: prefetch=-1 must be"),
}


@pytest.mark.parametrize("case", SHARDING)
def test_sharding_settings_without_effect_or_against_each_other_are_refused(case, write):
    content, message = SHARDING[case]
    assert message in refusal(write(content))


FOR_MANY = {
    "mesh": {"pipe": 2, "fsdp": 2, "context": 2},
    "plan": {"sharding_strategy": "full_shard", "prefetch": 1},
    "context": {"order": "striped", "allow_communication": True},
    "pipeline": {"num_microbatches": 2},
}


def test_what_a_file_says_of_many_devices_is_left_out_by_the_flags_that_its_refusal_names(write):
    """A run's own file, whose checkpoint is evaluated or gone on with on one device."""
    one = [f"--mesh.{axis}=1" for axis in FOR_MANY["mesh"]]
    said = refusal(write(FOR_MANY), *one)
    assert "set mesh.pipe, or leave it out, as a flag --pipeline.num_microbatches 8" in said
    flags = re.findall(r"--([a-z_.]+) ([a-z0-9]+)", said)
    assert len(flags) == 5
    config = read_config("train", [write(FOR_MANY), *one, *(f"--{name}={value}" for name, value in flags)])
    assert config.plan.sharding_strategy is None and config.context.order == "auto"


STAGES = {"full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2, "shard_optimizer": 1}


@pytest.mark.parametrize("name", [*STAGES, "no_shard"])
def test_every_sharding_strategy_becomes_its_plan(name, write):
    config = read_config(
        "train", [write({"mesh": {"fsdp": 4}, "plan": {"sharding_strategy": name, "offload": "full"}})]
    )
    plan = config.plan.build()
    assert getattr(plan.fsdp, "stage", None) == STAGES.get(name) and plan.offload is ax.CPUOffload.FULL
    assert config.mesh.degrees == {"data": -1, "fsdp": 4}


def test_one_switch_decides_about_flat_copies_on_both_axes(write):
    plan = read_config("train", [write({"plan": {"gradient_as_bucket_view": False}})]).plan.build()
    assert plan.data.gradient_as_bucket_view is False and plan.fsdp.flat is True


def test_files_that_are_none_are_refused(write, tmp_path):
    assert refusal(str(tmp_path / "none.yaml")).startswith("no such configuration file")
    assert "is not YAML" in refusal(write("model: [1"))
    assert "holds no keys" in refusal(write("just words"))
    assert "model is a section" in refusal(write("model: 3"))
    assert "configuration file first" in refusal("--train.steps", "3")
    missing = refusal(write("model: {vocab_size: 256}"))
    assert "model.num_layers" in missing and "model.max_length" in missing


@pytest.mark.parametrize(
    "name", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml", "plans/llama3_8b_v5p_512"]
)
def test_configurations_of_the_package_are_found_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = CONFIGS / (name.removeprefix("configs/").removesuffix(".yaml") + ".yaml")
    assert read_config("train", [name]) == read_config("train", [str(file)])
    (tmp_path / "quickstart.yaml").write_text(yaml.safe_dump({"name": "mine", "model": MODEL}))
    if name == "quickstart.yaml":  # a file that is there wins
        assert read_config("train", [name]).name == "mine"
    for none in ("../configs/quickstart.yaml", "quick", str(tmp_path / "quickstart")):
        with pytest.raises(ConfigError, match="no such configuration file"):
            read_config("train", [none])


def test_configurations_are_part_of_the_wheel():
    project = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {"configs": "axonml_jax/configs"}
    assert nearest_file_module._PACKAGE.name == "axonml_jax"


def test_options_have_one_name_and_the_others_are_taken(tmp_path):
    path = tmp_path / "run.yaml"
    model = yaml.safe_dump({"model": MODEL | {"num_layers": 4}})
    path.write_text(
        model + "mesh: {pipe: 2, fsdp: 2}\npipeline: {microbatches: 4}\nplan: {mixed_precision: bf16, gather: int8}\n"
    )
    config = read_config("train", [str(path), "--pipeline.microbatches=2", "--plan.cpu_offload", "optimizer_states"])
    assert config.pipeline.num_microbatches == 2 and read_config("train", [str(path)]).pipeline.num_microbatches == 4
    assert (config.plan.precision, config.plan.wire, config.plan.offload) == ("bf16", "int8", "optimizer_states")
    path.write_text(model + "plan.mixed_precision: bf16\n")
    assert read_config("train", [str(path)]).plan.precision == "bf16"
    path.write_text(model + "plan: {precision: fp8}\nplan.precision: bf16\n")
    with pytest.raises(ConfigError, match=r"gives plan.precision in its section and with a dot: give it once"):
        read_config("train", [str(path)])
    before = as_dict(config)  # as an earlier version wrote it
    before["plan"]["gather"] = before["plan"].pop("wire")
    assert changed_settings(before, config) == []
    path.write_text(model + "pipeline: {microbatches: 4, num_microbatches: 4}\n")
    with pytest.raises(ConfigError, match=r"gives pipeline.microbatches and pipeline.num_microbatches, which are one"):
        read_config("train", [str(path)])
    known = {key for key, *_ in settings()}
    assert all(ours in known and other not in known for other, ours in SAME_KEYS.items())


def test_blocks_of_one_loop_that_do_not_divide_over_the_stages_are_refused(write):
    model = MODEL | {"scan_layers": True, "num_layers": 3}
    said = refusal(write({"model": model, "mesh": {"data": 1, "pipe": 2}}))
    assert (
        "2 stages, which do not divide the model.num_layers=3 blocks of one loop: set model.scan_layers=false" in said
    )
