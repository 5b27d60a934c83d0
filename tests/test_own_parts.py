"""`axonml-jax` on a model, a loss and data of one's own: every plan trains as one device does, commands know them, errors."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx
from own_parts import Net, Notes, columns, squares

import axonml_jax as ax
from axonml_jax.__main__ import main
from axonml_jax.checkpoint.format import Manifest
from axonml_jax.cli.plan import _placed, check_own
from axonml_jax.cli.records import about
from axonml_jax.cli.run import set_up_run
from axonml_jax.cli.tasks import load_data, logits_loss, read_own, valid_batches
from axonml_jax.config.config import ConfigError, as_dict, read_config

NNX = {"class_path": "own_parts.Net", "init_args": {"width": 8}}
LINEN = {"class_path": "own_parts.LinenNet", "init_args": {"width": 8}}
SQUARES = {"class_path": "own_parts.squares", "init_args": {"scale": 2.0}}
OBJECT = {"class_path": "own_parts.Squares", "init_args": {"scale": 2.0}}
COLUMNS = {
    "class_path": "own_parts.columns",
    "init_args": {"n": 48},
    "valid": {"class_path": "own_parts.columns", "init_args": {"n": 29, "seed": 1}},
}
STREAM = {"class_path": "own_parts.rows"}
ALLOWED = ("--allow-imports", "own_parts")


@pytest.fixture
def write(tmp_path):
    """Writes a configuration; what is None is left out."""

    def write(**changes):
        content = {
            "devices": {"simulated": 8}, "model": NNX, "loss": SQUARES, "data": COLUMNS, "mesh": {"data": 8},
            "optim": {"class_path": "optax.sgd", "learning_rate": 0.05, "schedule": "constant"},
            "train": {"steps": 4, "global_batch_size": 16, "log_every": 1, "eval_every": 2}, "checkpoint": {"every": 2},
            "output": {"dir": str(tmp_path / "runs"), "plot": False}, **changes,
        }  # fmt: skip
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
        return str(path)

    return write


def recorded(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def one_device(steps=4):
    """The run's training and validation losses by hand; validation has 13 rows more than a batch."""
    loader = ax.create_dataloader(columns(48), 16, ax.make_mesh(devices=jax.devices()[:1], data=1), seed=0)
    graph, params = nnx.split(Net(8, rngs=nnx.Rngs(0)))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05))
    state, losses, valid = tx.init(params), [], []
    loss = jax.jit(jax.value_and_grad(lambda params, batch: squares(nnx.merge(graph, params), batch, 2.0)))
    for step, batch in zip(range(1, steps + 1), loader, strict=False):
        value, grads = loss(params, batch)
        change, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, change)
        losses.append(float(value))
        if step % 2 == 0:
            valid.append(float(loss(params, columns(29, 1))[0]))
    return losses, valid


@pytest.fixture(scope="module")
def expected():
    return one_device()


@pytest.mark.slow
def test_a_stack_of_layers_is_refused_by_what_rests_alone(write, capsys):
    """A step gathers it a slice at a time: 16 layers of 256 KiB, of which each of 8 devices keeps an eighth, thrice over."""
    stacked = {"class_path": "own_parts.Stacked", "init_args": {"width": 256, "depth": 16}}
    fits = write(model=stacked, mesh={"fsdp": 8}, optim={"name": "adamw"}, train={"steps": 1, "global_batch_size": 16})
    assert main(["explain", fits, *ALLOWED]) == 0
    assert "memory     at most 10." in capsys.readouterr().out
    assert main(["train", fits, *ALLOWED, "--max-memory", "3MiB"]) == 0, capsys.readouterr().err
    assert main(["train", fits, *ALLOWED, "--max-memory", "2MiB", "--name", "refused"]) == 2
    assert "MiB on each device without activations, and there are 2.0" in capsys.readouterr().err


PLANS = {
    "ddp": {"mesh": {"data": 8}},
    "fsdp": {"mesh": {"data": 2, "fsdp": 4}},
    "pipeline": {"mesh": {"data": 4, "pipe": 2}, "pipeline": {"microbatches": 2}},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.slow
def test_a_run_of_ones_own_parts_is_one_devices(plan, write, tmp_path, expected, capsys):
    path = write(**PLANS[plan])
    assert main(["train", path, *ALLOWED]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "185 parameters: own_parts.Net\n" in said and "own_parts.Net (" in said
    assert "own_parts.squares with {'scale': 2.0}" in said
    found = recorded(tmp_path / "runs" / "run")
    np.testing.assert_allclose([line["loss"] for line in found], expected[0], rtol=2e-5)
    np.testing.assert_allclose([line["valid_loss"] for line in found if "valid_loss" in line], expected[1], rtol=2e-5)
    assert found[-1]["examples"] == 64 and "tokens" not in found[-1]
    if plan == "fsdp":
        run = str(tmp_path / "runs" / "run")
        assert main(["eval", run, *ALLOWED, "--json", "--mesh.data", "8", "--mesh.fsdp", "1"]) == 0
        said = json.loads(capsys.readouterr().out)
        np.testing.assert_allclose(said["loss"], expected[1][-1], rtol=2e-5)
        assert (said["examples"], said["batches"]) == (29, 2) and "perplexity" not in said
        assert main(["train", path, *ALLOWED, "--resume", run, "--train.steps", "5"]) == 0
        assert (
            "resumed after step 4" in capsys.readouterr().out and recorded(tmp_path / "runs" / "run")[-1]["step"] == 5
        )
        refuses_what_it_cannot_serve(run, path, tmp_path, capsys)


@pytest.mark.parametrize(("eval_batches", "used"), [(None, 29), (1, 16), (2, 29), (5, 29)])
def test_what_fills_no_batch_is_validated_on_in_parts_that_are_no_larger(write, eval_batches, used):
    train = {"steps": 2, "global_batch_size": 16, "eval_batches": eval_batches}
    config = read_config("train", [write(train=train)], imports=["own_parts"])
    ground = set_up_run(config)
    data = load_data(config, ground.own, ground.mesh)
    batches = list(valid_batches(data))
    rows = np.concatenate([np.asarray(batch["x"]) for batch in batches])
    np.testing.assert_array_equal(rows, columns(29, 1)["x"][:used])
    # 8 of the 13 that are left divide over 8 ranks; of the others every rank takes all, two at a time as of a batch
    assert [len(batch["x"]) for batch in batches[1:]] == ([8, 2, 2, 1] if used > 16 else [])
    assert data.valid_used == used and ("of which 16 are used" in about(config, data)) == (used == 16)


def test_of_models_of_every_ranks_own_only_what_divides_is_validated_on_which_is_told(write):
    config = read_config("train", [write(plan={"sync_strategy": "no_sync"})], imports=["own_parts"])
    ground = set_up_run(config)
    data = load_data(config, ground.own, ground.mesh)
    assert [len(batch["x"]) for batch in valid_batches(data)] == [16, 8]
    assert "29 samples to validate on, of which 24" in about(config, data)


def test_the_stages_that_are_told_are_those_that_run(write):
    config = read_config("train", [write(**PLANS["pipeline"])], imports=["own_parts"])
    ground = set_up_run(config)
    _, _, told = _placed(config, ground)
    ran = ax.parallelize(Net(8, rngs=nnx.Rngs(0)), ground.mesh, ground.plan)._placement
    assert told.stages == ran.stages


def refuses_what_it_cannot_serve(run, path, tmp_path, capsys):
    for argv in (
        ["generate", run, "--prompt", "a"],
        ["export", run, str(tmp_path / "out")],
        ["plan", path, "--devices", "8"],
    ):
        assert main([*argv, *ALLOWED]) == 2
        assert f"{argv[0]} supports only the library's transformer" in capsys.readouterr().err


@pytest.mark.slow
def test_a_linen_module_gets_its_variables_from_the_loss(write, tmp_path, capsys):
    path = write(model=LINEN, loss=OBJECT, mesh={"data": 2, "fsdp": 4})
    assert main(["train", path, *ALLOWED]) == 0, capsys.readouterr().err
    found = recorded(tmp_path / "runs" / "run")
    again = write(model=LINEN, loss=OBJECT, name="other")
    assert main(["train", again, *ALLOWED]) == 0
    other = recorded(tmp_path / "runs" / "other")
    np.testing.assert_allclose([each["loss"] for each in found], [each["loss"] for each in other], rtol=2e-5)
    assert found[3]["valid_loss"] < found[1]["valid_loss"]


def test_a_generator_is_data_and_has_nothing_to_validate_on(write, tmp_path, capsys):
    data = {"class_path": "own_parts.rows"}
    path = write(data=data, train={"steps": 3, "global_batch_size": 16, "log_every": 1})
    assert main(["train", path, *ALLOWED]) == 0, capsys.readouterr().err
    assert "unknown to train on, nothing to validate on" in capsys.readouterr().out
    assert "valid_loss" not in recorded(tmp_path / "runs" / "run")[-1]
    assert main(["train", write(data=data), *ALLOWED]) == 2
    assert "there is no validation data" in capsys.readouterr().err


def test_a_stream_is_validated_on_and_the_run_is_kept_when_the_last_validation_fails(write, tmp_path, capsys):
    stream = {"class_path": "own_parts.rows", "init_args": {"n": 40}}
    fails = [{"class_path": "own_parts.Notes", "init_args": {"fail": "on_eval"}}]
    train = {"steps": 2, "global_batch_size": 16, "eval_batches": 3}
    path = write(data=stream | {"valid": stream}, train=train, callbacks=fails, checkpoint={"every": 3})
    assert main(["train", path, *ALLOWED]) == 2
    assert "callback Notes.on_eval failed after step 2: ValueError: enough" in capsys.readouterr().err
    run = tmp_path / "runs" / "run"
    assert [each.name for each in (run / "checkpoints").glob("step_*")] == ["step_00000002"]
    assert main(["eval", str(run), *ALLOWED, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 32
    Notes.heard.clear()


@pytest.mark.slow
def test_a_model_of_ones_own_on_text_takes_the_cross_entropy_of_its_logits(write, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 60)
    data = {"path": str(tmp_path / "a.txt"), "length": 8, "valid_fraction": 0.2}
    path = write(model={"class_path": "own_parts.Words"}, loss=None, data=data)
    assert main(["train", path, *ALLOWED]) == 0, capsys.readouterr().err
    found = recorded(tmp_path / "runs" / "run")
    last = found[-1]
    assert last["tokens"] == 4 * 16 * 8 and last["valid_loss"] < 6 and "mfu" not in last
    positions = ["--mesh.data", "4", "--mesh.context", "2"]
    assert main(["train", path, *ALLOWED, *positions]) == 2
    said = capsys.readouterr().err
    assert (
        "across positions, more than the 0 that are allowed" in said
        and "in a configuration context.allow_communication" in said
    )
    allowed = ["--context.allow_communication", "1000", "--output.dir", str(tmp_path / "other")]
    assert main(["train", path, *ALLOWED, *positions, *allowed]) == 0, capsys.readouterr().err
    again = [line["loss"] for line in recorded(tmp_path / "other" / "run")]
    np.testing.assert_allclose(again, [line["loss"] for line in found], rtol=2e-5)


def test_negative_targets_of_ones_own_data_are_ignored_and_ids_beyond_the_vocabulary_are_refused(write):
    batch = {"tokens": np.arange(6).reshape(1, 6), "targets": np.array([[1, -100, 2, -1, 0, 3]])}
    logits = np.random.default_rng(0).normal(size=(1, 6, 4))
    loss = logits_loss(lambda tokens: jnp.asarray(logits), batch)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(
        loss.total, -sum(log_p[0, i, t] for i, t in enumerate(batch["targets"][0]) if t >= 0), rtol=1e-6
    )
    assert loss.weight == 4
    model = {"vocab_size": 32, "num_layers": 1, "hidden_size": 8, "num_heads": 1, "max_length": 8}
    for beyond in (0, 32):
        data = {"class_path": "own_parts.ids", "init_args": {"n": 32, "beyond": beyond}, "valid": COLUMNS["valid"]}
        config = read_config("train", [write(model=model, loss=None, data=data)], imports=["own_parts"])
        ground = set_up_run(config)
        batches = iter(load_data(config, ground.own, ground.mesh).train)
        if not beyond:
            assert next(batches)["targets"].shape == (16, 8)
            continue
        with pytest.raises(ValueError, match=r"targets: up to \d+, but model.vocab_size=32: ids must be below it"):
            [next(batches) for _ in range(2)]


def test_a_model_of_ones_own_is_asked_for_its_order_of_positions_before_lengths_are_checked(write, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 60)
    data = {"path": str(tmp_path / "a.txt"), "length": 12, "valid_fraction": 0.2}
    given = {"loss": None, "data": data, "mesh": {"data": 2, "context": 4}}
    path = write(model={"class_path": "own_parts.Words"}, **given)
    assert main(["explain", path, *ALLOWED, "--context.order", "zigzag"]) == 2
    said = capsys.readouterr().err
    assert "no module of the model declares" in said and "split evenly" not in said
    config = read_config("train", [path], imports=["own_parts"])
    check_own(config, set_up_run(config))  # whole sequences lie contiguously: 12 positions over 4 ranks
    path = write(model={"class_path": "own_parts.WordByWord"}, **given)
    assert main(["explain", path, *ALLOWED]) == 2
    assert "data.length=12: these positions do not split evenly" in (said := capsys.readouterr().err)
    assert "order 'zigzag'): 8 or 16 do" in said


@pytest.mark.slow
def test_layers_that_split_do_so_in_a_model_of_ones_own(write, tmp_path, capsys):
    losses = []
    for degrees in ({"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}):
        folder = tmp_path / f"{len(losses)}"
        model = {"class_path": "own_parts.Split", "init_args": {"width": 8}}
        path = write(model=model, mesh=degrees, output={"dir": str(folder), "plot": False})
        assert main(["train", path, *ALLOWED]) == 0, capsys.readouterr().err
        losses.append([line["loss"] for line in recorded(folder / "run")])
    np.testing.assert_allclose(*losses, rtol=2e-5)


def test_a_configuration_says_what_the_dims_of_kernels_with_adapters_are(write, tmp_path, capsys):
    given = {"rank": 1, "targets": ["kernel"]}
    changes = {"model": {"class_path": "own_parts.Heads"}, "mesh": {"fsdp": 8}, "checkpoint": {"every": 4}}
    assert main(["train", write(finetune={"lora": given}, **changes), *ALLOWED]) == 2
    assert "says which are its input and output, as in dims={'query/kernel': 'in out out'}" in capsys.readouterr().err
    dims = {"query/kernel": "in out out", "out/kernel": "in in out"}
    assert main(["train", write(finetune={"lora": given | {"dims": dims}}, **changes), *ALLOWED]) == 0, (
        capsys.readouterr().err
    )
    entries = Manifest.read(tmp_path / "runs" / "run" / "checkpoints" / "step_00000004").entries
    adapters = {name.split("params/")[-1]: entry.shape for name, entry in entries.items() if "_lora_" in name}
    assert adapters == {
        "query/kernel_lora_a": (3, 1), "query/kernel_lora_b": (1, 2, 4),
        "out/kernel_lora_a": (2, 4, 1), "out/kernel_lora_b": (1, 1),
    }  # fmt: skip


def test_data_with_a_length_is_divided_alike_everywhere(write):
    config = read_config("train", [write(data={"class_path": "own_parts.columns"})], imports=["own_parts"])
    first, again = (read_own(config.data, 16) for _ in range(2))
    assert (len(first.train), len(first.valid)) == (58, 6)
    assert {float(first.train[i]["y"]) for i in range(58)}.isdisjoint(float(first.valid[i]["y"]) for i in range(6))
    assert float(first.valid[3]["y"]) == float(again.valid[3]["y"]) == float(first.valid.__getitems__([3])[0]["y"])


def test_a_configuration_of_ones_own_is_read_again_as_it_was_written(write, tmp_path):
    config = read_config("train", [write()], imports=["own_parts"])
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(as_dict(config)))
    assert read_config("train", [str(tmp_path / "again.yaml")], imports=["own_parts"]) == config


REFUSED = {
    "own_parts has no 'Nett': did you mean Net?": {"model": {"class_path": "own_parts.Nett"}},
    "model.init_args.widht: own_parts.Net takes no such argument; did you mean width? It takes width": {
        "model": {"class_path": "own_parts.Net", "init_args": {"widht": 8}}},
    "model.init_args: own_parts.Net needs width too": {"model": {"class_path": "own_parts.Net"}},
    "model.init_args.depth: own_parts.LinenNet takes no such argument; did you mean width? It takes width": {
        "model": {"class_path": "own_parts.LinenNet", "init_args": {"width": 8, "depth": 8}}},
    "makes a int, which is no Flax model": {"model": {"class_path": "own_parts.nothing"}},
    "model.num_layers: the transformer's, without effect beside model.class_path": {"model": NNX | {"num_layers": 2}},
    "the section sample has no effect beside model.class_path": {"sample": {"count": 1}},
    "train.weights is for the library's transformer": {"train": {"weights": "folder"}},
    "needs a loss, a function (model, batch)": {"loss": None},
    "loss.class_path=own_parts.nothing: must be a function (model, batch)": {"loss": {"class_path": "own_parts.nothing"}},
    "loss.init_args: own_parts.Squares needs scale too": {"loss": {"class_path": "own_parts.Squares"}},
    "loss.init_args has no effect without loss.class_path": {"loss": {"init_args": {}}, "data": {"path": "."}},
    "data.length has no effect beside class_path": {"data": COLUMNS | {"length": 8}},
    "data.valid_fraction has no effect beside valid": {"data": COLUMNS | {"valid_fraction": 0.2}},
    "data.init_args has no effect without class_path": {"data": {"init_args": {}}},
    "data.class_path=own_parts.texts: JAX arrays cannot hold these leaves": {"data": {"class_path": "own_parts.texts"}},
    "data.class_path=own_parts.mixture: makes a Mixture, whose own order of samples": {
        "data": {"class_path": "own_parts.mixture"}},
    "makes an iterator, which gives its samples once": {"data": {"class_path": "own_parts.once"}},
    "data.valid.class_path=own_parts.once: makes an iterator": {"data": STREAM | {"valid": {"class_path": "own_parts.once"}}},
    "data.valid can only be iterated over, and may be endless: give train.eval_batches": {"data": STREAM | {"valid": STREAM}},
    "data.valid: its 5 samples fill no batch of train.global_batch_size=16: give more of them, or a smaller batch": {
        "data": STREAM | {"valid": STREAM | {"init_args": {"n": 5}}},
        "train": {"steps": 2, "global_batch_size": 16, "eval_batches": 2}},
    "mesh axes {'tensor': 2} have no strategy in the plan": {"mesh": {"data": 4, "tensor": 2}},
    "data.class_path=own_parts.nothing: a dataset needs __len__": {"data": {"class_path": "own_parts.nothing"}},
    "model.class_path=flax.nnx.Linear: imports the package 'flax'": {"model": {"class_path": "flax.nnx.Linear"}},
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_allocated(said, write, tmp_path, capsys):
    assert main(["train", write(**REFUSED[said]), *ALLOWED]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_init_args_alone_are_no_model(write):
    transformer = {"vocab_size": 256, "num_layers": 1, "hidden_size": 8, "num_heads": 1, "max_length": 128}
    path = write(model=transformer | {"init_args": {}}, data=None, loss=None)
    with pytest.raises(ConfigError, match=r"model.init_args has no effect without model.class_path"):
        read_config("train", [path])
