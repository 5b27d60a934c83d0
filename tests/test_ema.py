"""The moving average of the parameters: one device's under every plan, split as they are, saved, evaluated, exported."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx
from own_parts import LinenNet, Net, Squares, columns, squares

import axonml_jax as ax
from axonml_jax.__main__ import main
from axonml_jax.cli.plan import kept_values
from axonml_jax.config.config import read_config
from axonml_jax.testing.equality import assert_trees_close
from axonml_jax.training.optimizer import with_ema

BATCH = {name: jnp.asarray(array) for name, array in columns(16).items()}
DECAY, STEPS = 0.7, 3
PLANS = {
    "ddp": ({"data": 8}, {}),
    "fsdp": ({"data": 2, "fsdp": 4}, {}),
    "zero1": ({"fsdp": 8}, {"fsdp": ax.ShardingStrategy.SHARD_OPTIMIZER.on_axis()}),
    "pipeline": ({"data": 4, "pipe": 2}, {"pipe": ax.Pipelined(num_microbatches=2)}),
    "accumulate": ({"data": 2, "fsdp": 4}, {"accumulate": 2}),
    "bf16": ({"fsdp": 8}, {"precision": ax.Precision.of("bf16")}),
}


def trainer(plan="fsdp", linen=False, **options):
    degrees, given = PLANS[plan]
    module = LinenNet(8) if linen else Net(8, rngs=nnx.Rngs(0))
    variables = module.init(jax.random.key(0), BATCH["x"], True) if linen else None
    model = ax.parallelize(module, ax.make_mesh(**degrees), ax.Plan(**given), params=variables)
    return model.trainer(optax.adam(0.05), Squares(1.0) if linen else squares, **{"ema": DECAY, **options})


def averages(of):
    with of.averaged() as model:
        return model.state_dict()


@pytest.mark.parametrize("linen", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_it_is_the_average_of_the_parameters_after_every_step(plan, linen):
    if linen and plan in ("pipeline", "zero1", "accumulate"):
        pytest.skip("the optimizer's state is the same for both kinds of model")
    training = trainer(plan, linen)
    expected = training.model.state_dict()
    for _ in range(STEPS):
        training.step(BATCH)
        now = training.model.state_dict()
        expected = {name: DECAY * expected[name] + (1 - DECAY) * now[name] for name in now}
    found = averages(training)
    assert_trees_close(found, expected, "the average")
    assert_trees_close(training.model.state_dict(), now, "the model's own parameters, afterwards")
    assert all(leaf.dtype == np.float32 for leaf in found.values())
    assert max(float(np.abs(found[name] - now[name]).max()) for name in now) > 1e-3
    valid = training.validate([BATCH])
    with training.averaged():
        np.testing.assert_allclose(valid["ema_loss"], float(training.evaluate(BATCH)["loss"]), rtol=1e-6)
        assert training.validate([BATCH]) == {"loss": valid["ema_loss"]}
    assert valid["ema_loss"] != valid["loss"]


@pytest.mark.parametrize("plan", ["fsdp", "pipeline"])
def test_it_rests_split_as_the_parameters_do(plan):
    with_it, without = (trainer(plan, ema=ema) for ema in (DECAY, None))
    held = lambda state: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    more = held(with_it.state.opt_state) - held(without.state.opt_state)
    assert more == held(with_it.state.variables.params)


@pytest.mark.slow
def test_a_run_that_is_restored_under_another_plan_goes_on_with_it(tmp_path):
    first, whole = trainer(), trainer()
    for _ in range(2):
        first.step(BATCH)
    ax.save(tmp_path / "saved", first)
    again, piped = trainer(), trainer("pipeline")
    ax.restore(tmp_path / "saved", again)
    ax.restore(tmp_path / "saved", piped)
    for each in (first, again, piped):
        each.step(BATCH)
    for _ in range(3):
        whole.step(BATCH)
    for found in (averages(first), averages(again)):  # to the bit
        jax.tree.map(np.testing.assert_array_equal, averages(whole), found)
    assert_trees_close(averages(piped), averages(whole), "the average under a pipeline")


def moments(of):
    """The optimizer's own state, by the names that checkpoints have."""
    leaves = of.checkpoint_leaves().items()
    return {name: np.asarray(leaf.whole()) for name, leaf in leaves if name.startswith("optimizer/")}


def equal(found, expected):
    """To the bit."""
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("plan", ["fsdp", "pipeline"])
def test_a_resume_may_switch_it_on_and_off(plan, tmp_path, caplog):
    without, with_it = trainer(ema=None), trainer(plan)
    for _ in range(2):
        without.step(BATCH)
    ax.save(tmp_path / "without", without)
    ax.restore(tmp_path / "without", with_it)
    assert "holds no moving average of 8 parameters: it starts from their restored values" in caplog.text
    equal(with_it.model.state_dict(), without.model.state_dict())
    equal(averages(with_it), without.model.state_dict())
    equal(moments(with_it), moments(without))
    with_it.step(BATCH)
    without.step(BATCH)
    ax.save(tmp_path / "with", with_it)
    again = trainer(ema=None)
    ax.restore(tmp_path / "with", again)
    assert "holds a moving average of the parameters, which is ignored: this run keeps none" in caplog.text
    equal(again.model.state_dict(), with_it.model.state_dict())
    equal(moments(again), moments(with_it))
    assert again.step_number == 3 and with_it.step_number == 3


def test_it_begins_anew_with_parameters_that_are_loaded_into_the_model(tmp_path, caplog):
    training, other = trainer(), ax.DDP(Net(8, rngs=nnx.Rngs(1)), ax.make_mesh(data=8))
    training.step(BATCH)
    ax.save(tmp_path / "other", other)
    ax.restore(tmp_path / "other", training.model)
    equal(averages(training), other.state_dict())
    assert "the moving average restarts from them" in caplog.text
    training.step(BATCH)
    now = training.model.state_dict()
    expected = {name: DECAY * value + (1 - DECAY) * now[name] for name, value in other.state_dict().items()}
    assert_trees_close(averages(training), expected, "the average after a step")
    kept = averages(training)
    with training.averaged() as averaged:
        averaged.load_state_dict(other.state_dict())  # gone with the context
    equal(averages(training), kept)
    training.model.load_state_dict(other.state_dict())
    equal(averages(training), other.state_dict())


def test_of_a_model_with_adapters_it_is_that_of_the_adapters(tmp_path):
    def adapted(**degrees):
        given = ax.lora(Net(8, rngs=nnx.Rngs(0)), rank=2, targets="blocks/.*kernel")
        return ax.parallelize(given, ax.make_mesh(**degrees)).trainer(optax.adam(0.05), squares, ema=DECAY)

    training = adapted(data=2, fsdp=4)
    expected = first = training.model.state_dict()
    for _ in range(STEPS):
        training.step(BATCH)
        now = training.model.state_dict()
        expected = {name: DECAY * value + (1 - DECAY) * now[name] for name, value in expected.items()}
    kept = {name.removeprefix("ema/") for name in training.checkpoint_leaves() if name.startswith("ema/")}
    assert kept == {name for name in first if "_lora_" in name} and len(kept) == 4
    found = averages(training)
    assert_trees_close(found, expected, "the average")
    equal({name: found[name] for name in first.keys() - kept}, {name: first[name] for name in first.keys() - kept})
    valid = training.validate([BATCH])
    with training.averaged() as model:
        np.testing.assert_allclose(float(squares(model.module, BATCH)), valid["ema_loss"], rtol=1e-5)
    ax.save(tmp_path / "saved", training)
    ax.restore(tmp_path / "saved", again := adapted(data=8))
    equal(averages(again), found)


def test_an_update_that_is_skipped_leaves_it_as_it_was():
    training = trainer(max_nonfinite=3)
    training.step(BATCH)
    before = averages(training)
    training.step(BATCH | {"y": jnp.full(16, jnp.nan, BATCH["y"].dtype)})
    jax.tree.map(np.testing.assert_array_equal, averages(training), before)


def test_parameters_of_bfloat16_are_averaged_in_float32():
    tx = with_ema(optax.sgd(0.1), 0.999)
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    kept = tx.init(params)
    _, kept = tx.update({"w": jnp.ones(3, jnp.bfloat16)}, kept, params)
    assert kept.ema["w"].dtype == jnp.float32 and 0 < 1 - float(kept.ema["w"][0]) < 1e-3


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"ema=1.0: the decay must be a number of at least 0 and below 1"):
        trainer(ema=1.0)
    with (
        pytest.raises(ValueError, match=r"no moving average is kept: make the trainer with ema=0.999"),
        trainer(ema=None).averaged(),
    ):
        pass
    model = ax.parallelize(Net(8, rngs=nnx.Rngs(0)), ax.make_mesh(data=8))
    steps = optax.MultiSteps(optax.sgd(0.1), 2)
    for tx in (steps, steps.gradient_transformation(), optax.chain(optax.clip(1.0), steps.gradient_transformation())):
        with pytest.raises(ValueError, match=r"ema beside optax.MultiSteps would average over steps without an update"):
            model.trainer(tx, squares, ema=0.9)
    with pytest.raises(ValueError, match=r"ema beside optax.apply_if_finite would .* use max_nonfinite="):
        model.trainer(optax.apply_if_finite(optax.sgd(0.1), 3), squares, ema=0.9)
    training = trainer()
    with training.averaged(), pytest.raises(RuntimeError, match="the model holds averaged parameters"):
        training.step(BATCH)


def test_a_metric_by_the_name_of_an_averages_is_refused():
    named = lambda model, batch: (loss := squares(model, batch), {"ema_loss": loss, "ema_x": loss})
    training = trainer(eval_fn=named)
    with pytest.raises(ValueError, match=r"metrics named \['ema_loss'\].* give them other names"):
        training.validate([BATCH])
    with training.averaged():
        assert training.validate([BATCH]).keys() == {"loss", "ema_loss", "ema_x"}


SMALL = {"vocab_size": 256, "num_layers": 1, "hidden_size": 16, "num_heads": 2, "max_length": 8, "mlp_hidden_size": 16}


@pytest.mark.slow
def test_the_command_line_keeps_validates_reads_and_exports_it(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 60)
    content = {
        "devices": {"simulated": 8}, "mesh": {"data": 2, "fsdp": 4}, "model": SMALL, "ema": {"decay": 0.5},
        "data": {"path": str(tmp_path / "a.txt"), "length": 8, "valid_fraction": 0.2}, "sample": {"count": 0},
        "train": {"steps": 2, "global_batch_size": 8}, "checkpoint": {"every": 2}, "optim": {"learning_rate": 0.03},
        "output": {"dir": str(tmp_path / "runs"), "plot": False},
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    assert kept_values(read_config("train", [str(path)])) == 3  # two of Adam's
    assert main(["train", str(path)]) == 0, capsys.readouterr().err
    assert "a moving average of the parameters, decay 0.5" in capsys.readouterr().out
    run = tmp_path / "runs" / "run"
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    losses = []
    for flags in ((), ("--ema",)):
        assert main(["eval", str(run), "--json", *flags]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    np.testing.assert_allclose(losses, [last["valid_loss"], last["valid_ema_loss"]], rtol=1e-5)
    assert last["valid_ema_loss"] != last["valid_loss"]
    for name, flags in (("own", ()), ("average", ("--ema",))):
        assert main(["export", str(run), str(tmp_path / name), *flags]) == 0, capsys.readouterr().err
    own, average = (ax.load_safetensors(tmp_path / name / "model.safetensors") for name in ("own", "average"))
    assert own.keys() == average.keys() and any((own[name] != average[name]).any() for name in own)
