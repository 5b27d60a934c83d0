"""Context parallelism by its facade, in configurations, on paper and in the ledger."""

import jax
import numpy as np
import optax
import pytest
import yaml
from position_models import Words, batch_of
from predicted_steps import GPT, LENGTH, LLAMA, config, step_of
from test_context_axis import LENGTH as POSITIONS
from test_context_axis import Sequences, by_position

import axonml_jax as ax
from axonml_jax.config.config import ConfigError, read_config
from axonml_jax.ledger import predict
from axonml_jax.ledger.count import collectives_in
from axonml_jax.ledger.predict import difference

MODEL = {"vocab_size": 256, "num_layers": 1, "hidden_size": 16, "num_heads": 2, "max_length": 128}
ZERO = {"stage1": {"fsdp": ax.Shard(stage=1)}, "stage2": {"fsdp": ax.Shard(stage=2), "accumulate": 2}, "stage3": {}}


def test_the_facade_splits_sequences_over_all_devices_or_over_the_meshs_axis():
    model, batch = Sequences(), batch_of(0, POSITIONS)
    mesh = ax.make_mesh(data=2, context=2, devices=jax.devices()[:4])
    parallel = ax.ContextParallel(model, mesh, method=(2, "gather"), order="striped", bucket_size_mb=1)
    assert parallel.plan.context.method == (2, "gather") and parallel.plan.data.bucket_size_mb == 1
    got = parallel.trainer(optax.sgd(0.1), by_position).step(batch)["loss"]
    np.testing.assert_allclose(got, by_position(model, batch)[0].value, rtol=1e-5)
    world = ax.ProcessGroup(ax.make_mesh(data=3, devices=jax.devices()[:3]))
    assert dict(ax.ContextParallel(model, world).mesh.shape) == {"data": 1, "context": 3}
    shares = ax.ContextParallel(model, world, shard=True)
    assert dict(shares.mesh.shape) == {"data": 1, "fsdp": 1, "context": 3}
    assert shares.parameters()["head"]["kernel"].sharding.spec != ()
    with pytest.raises(ValueError, match=r"splits sequences over the mesh axis 'context', which .* lacks"):
        ax.ContextParallel(model, ax.make_mesh(data=2, devices=jax.devices()[:2]))
    with pytest.raises(ValueError, match="no module of the model declares"):
        ax.ContextParallel(Words(), mesh, sees="own")


@pytest.fixture
def written(tmp_path):
    def write(*flags, **content):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"model": MODEL, "data": {"length": 64}, **content}))
        return read_config("train", [str(path), *flags])

    return write


def test_a_configuration_makes_the_plan_and_the_mesh(written):
    made = written("--context.method", "[2, ring]", mesh={"data": 2, "context": 4}, context={"order": "striped"})
    assert made.build_plan().context == ax.Context(method=(2, "ring"), order="striped")
    assert made.mesh.degrees == {"data": 2, "context": 4} == made.degrees
    flags = ["--context.shard", "--plan.sharding_strategy", "zero2", "--mesh.cp", "4", "--context.method=gather"]
    flags = [flag.replace("mesh.cp", "mesh.context") for flag in flags]
    made = written(*flags)
    assert made.degrees == {"data": -1, "fsdp": 1, "context": 4}
    plan = made.build_plan()
    assert plan.context == plan.fsdp == plan.axes["fsdp", "context"]
    assert plan.fsdp.stage == 2 and plan.context.method == "gather"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"context": {"order": "striped"}}, "the section context has no effect while mesh.context=1: set mesh.context"),
        (
            {"mesh": {"context": 2}, "context": {"allow_communication": True}},
            "context.allow_communication has no effect on the transformer",
        ),
        ({"mesh": {"context": 2}, "context": {"method": "rings"}}, "context: method='rings' must be one of auto"),
        ({"mesh": {"context": 2}, "context": {"order": "dual"}}, "context.order=dual: must be one of auto, contiguous"),
        ({"mesh": {"context": 2}, "context": {"method": [3, "ring"]}}, "3 must divide mesh.context=2"),
        (
            {"mesh": {"context": 4}, "data": {"length": 60}},
            "data.length=60 does not divide into the 8 parts of context.order=zigzag over mesh.context=4: use 56 or 64",
        ),
        (
            {"mesh": {"context": 2}, "context": {"shard": True}, "plan": {"sharding_strategy": "no_shard"}},
            "which is no_shard: use another, or context.shard=false",
        ),
        (
            {"mesh": {"context": 2}, "plan": {"sharding_strategy": "zero2"}},
            "no effect while mesh.fsdp=1 splits nothing",
        ),
    ],
)
def test_what_a_configuration_cannot_mean_is_said(written, content, words):
    with pytest.raises(ConfigError) as caught:
        written(**content)
    assert words in str(caught.value)


ROWS = [
    (GPT, {}, {"data": 2, "context": 2}, {"accumulate": 2}),
    (LLAMA, {}, {"data": 2, "context": 4}, {"data": ax.Replicate(sync_strategy="synchronous"), "remat": "full"}),
    *((GPT, {}, {"data": 1, "fsdp": 2, "context": 2}, options) for options in ZERO.values()),
    *(
        (LLAMA, {}, {"data": 2, "fsdp": 2, "context": 2}, {"context": ax.Context(shard=True), **options})
        for options in ZERO.values()
    ),
    (LLAMA, {"num_layers": 4}, {"data": 1, "pipe": 2, "context": 2}, {"pipe": ax.Pipelined(num_microbatches=4)}),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join([*map(str, row[2].items()), *row[3]]))
def test_predicted_gradients_and_parameters_are_those_of_the_traced_step(row):
    style, options, degrees, plan_options = row
    model, plan = config(style, **options), ax.Plan(**plan_options)
    step, state, rows = step_of(model, plan, degrees, batch := plan.microbatches * 8)
    found = predict(plan, model, degrees, global_batch=batch, length=LENGTH)
    others = [each for each in difference(found, collectives_in(step, state, rows)) if each.label]
    # Of a pipeline the trace counts every tick's attention; elsewhere it is as predicted (test_ledger_difference.py).
    assert [each for each in others if "pipe" not in degrees or each.label != "attention"] == []
    assert found.minimum["gradients+parameters"] == step.minimum_traffic()


def test_a_prediction_says_the_order_and_refuses_lengths_and_the_planner_an_axis():
    model, degrees = config(GPT), {"data": 2, "context": 4}
    found = predict(ax.Plan(context=ax.Context(method="ring")), model, degrees, global_batch=8, length=16)
    assert "sequences over context (zigzag, ring)" in str(found) and found.causal_balance == 1
    whole = predict(ax.Plan(), model, {"data": 2}, global_batch=8, length=16)
    assert found.memory.activations * 3 < whole.memory.activations
    with pytest.raises(ValueError, match="12 positions do not divide into 8 parts over 4 ranks"):
        predict(ax.Plan(), model, degrees, global_batch=8, length=12)
    with pytest.raises(
        ValueError, match="'stage' is none of the axes that are searched, 'data', 'pipe', 'fsdp', 'expert'"
    ):
        ax.plan(model, num_devices=8, global_batch=8, axes=("data", "stage"))


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_another_split_and_gradients_are_those_of_one_device(tmp_path):
    first, batch = batch_of(0, POSITIONS), batch_of(1, POSITIONS)
    meshes = [{"data": 1, "fsdp": 2, "context": 2}, {"data": 1, "context": 3}, {"data": 1}]
    plans = [ax.Plan(context=ax.Context(shard=True, order="striped")), ax.Plan(), ax.Plan()]
    losses, grads = [], []
    for degrees, plan in zip(meshes, plans, strict=True):
        mesh = ax.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])
        trainer = ax.parallelize(Sequences(), mesh, plan).trainer(optax.adam(1e-2), by_position)
        grads.append(jax.device_get(trainer.model.value_and_grad(by_position)(first)[1]))
        if "fsdp" in degrees:
            trainer.step(first)
            ax.save(tmp_path / "run", trainer)
        ax.restore(tmp_path / "run", trainer)
        losses.append(trainer.step(batch)["loss"])
    np.testing.assert_allclose(losses, losses[-1:] * 3, rtol=1e-6)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(lambda *same: [close(each, same[-1]) for each in same], *grads)


def test_what_is_scattered_is_scattered_before_context_sums_it():
    step, state, rows = step_of(config(GPT), ax.Plan(**ZERO["stage1"]), {"data": 1, "fsdp": 2, "context": 2}, 8)
    sent = {row.axes: row.elements for row in ax.explain(step, state, rows).traffic if row.label == "gradients"}
    assert sent["context",] * 2 == sent["fsdp",]


def test_the_ledger_counts_the_all_reduce_over_context_as_the_trainers_report_says():
    mesh = ax.make_mesh(data=2, context=2, devices=jax.devices()[:4])
    trainer = ax.ContextParallel(Sequences(), mesh).trainer(optax.sgd(0.1), by_position)
    report = ax.explain(trainer, batch_of(0, POSITIONS))
    along = {row.axes: row.elements for row in report.traffic if row.label == "gradients"}
    total = sum(x.size for x in jax.tree.leaves(trainer.model.parameters()))
    assert along == {("context",): total, ("data",): total} and "all_gather" not in str(report)
