"""DiLoCo equals a loop over replicas on one device with an outer optimizer of optax, under every plan inside a replica."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from diloco_runs import INNER, Net, batches, by_hand, loss_fn, model_of, reference
from jax.sharding import PartitionSpec
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.ledger.compiled import collectives_in_lowered
from axonml_jax.ledger.count import collectives_in
from axonml_jax.sharding.layout import Layout, to_host
from axonml_jax.strategies.shard import BLOCK
from axonml_jax.testing.equality import assert_trees_close


def assert_is(trainer, losses, wanted):
    rounds = trainer.state.rounds
    own = jax.tree.map(lambda a, b: a[tuple(map(slice, b.shape))], rounds.own, wanted[2])  # without padding
    got = trainer.model.parameters(), trainer.model._rest.outside(rounds.kept, trainer.model.mesh), own
    for what, a, b in zip(("outer", "momentum", "own"), got, wanted, strict=False):
        assert_trees_close(to_host(a), to_host(b), what)
    np.testing.assert_allclose(np.array(losses), wanted[3], rtol=1e-9)


# kind, steps of a round, check_vma, degrees, plan options, trainer options
ROWS = [
    ("nnx", 1, False, {"data": 4}, {}, {}),
    ("nnx", 2, True, {"data": 4}, {}, {}),
    ("nnx", 3, False, {"data": 4}, {}, {"max_grad_norm": 0.5}),
    ("linen", 1, True, {"data": 4}, {}, {}),
    ("linen", 2, False, {"data": 2}, {"accumulate": 2}, {}),
    ("linen", 3, True, {"data": 4}, {}, {"max_nonfinite": 3}),
    ("nnx", 3, True, {"data": 2, "fsdp": 2}, {}, {"max_grad_norm": 0.5}),
    ("linen", 2, False, {"data": 2, "fsdp": 4}, {"fsdp": ax.Shard(stage=1), "accumulate": 2}, {}),
    ("linen", 2, False, {"data": 2, "fsdp": 2, "context": 1}, {"update": "whole"}, {}),
    ("nnx", 2, True, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": ax.Shard(stage=2)}, {}),
]


@pytest.mark.parametrize(
    "kind, every, check_vma, degrees, plan, options",
    ROWS,
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else str(x),
)
def test_training_equals_a_loop_over_replicas(kind, every, check_vma, degrees, plan, options):
    strategy = ax.DiLoCo(every=every)
    model = model_of(kind, degrees, data=strategy, check_vma=check_vma, **plan)
    given = batches()
    if "max_nonfinite" in options:
        given[4]["x"][4:8] = np.inf  # the second replica's: it makes no step, the others do
    wanted = reference(model.parameters(), given, strategy, degrees["data"], max_norm=options.get("max_grad_norm"))
    trainer = model.trainer(INNER, loss_fn, **options)
    metrics = [to_host(trainer.step(batch)) for batch in given]
    assert_is(trainer, [each["loss"] for each in metrics], wanted)
    if "max_nonfinite" in options:
        assert metrics[4]["skipped"].tolist() == [0, 1, 0, 0] and metrics[4]["skipped_in_a_row"].tolist() == [
            0,
            1,
            0,
            0,
        ]
    loss = by_hand(wanted[0], given[0])  # the outer parameters are the model
    np.testing.assert_allclose(trainer.evaluate(given[0])["loss"], loss, rtol=1e-9)


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
def test_rounds_of_one_step_of_sgd_are_data_parallelism(adapted):
    found = []
    for data in (ax.DiLoCo(every=1, lr=1.0, momentum=0.0), ax.Replicate()):
        net = ax.lora(Net(), rank=2, targets="kernel") if adapted else Net()
        trainer = ax.parallelize(net, mesh_of(data=4), ax.Plan(data=data)).trainer(optax.sgd(0.1), loss_fn)
        for batch in batches(3):
            trainer.step(batch)
        found.append(to_host((trainer.model.parameters(), trainer.model.state_dict())))
    for ours, theirs in zip(*found, strict=True):
        assert_trees_close(ours, theirs, "parameters")


def sent_as_int8(x, parts):
    """What is read of x, [n], cut into so many parts that are packed in blocks, rounded half to even."""
    read = []
    for part in x.reshape(parts, -1):
        blocks = -(-len(part) // BLOCK)
        flat = np.pad(part, (0, -len(part) % blocks)).reshape(blocks, -1)
        scales = np.maximum(np.abs(flat).max(1) * np.float32(1 / 127), np.finfo(np.float32).tiny)[:, None]
        read.append((np.rint(flat / scales) * scales).ravel()[: len(part)])
    return np.concatenate(read)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_what_travels_in_few_bits_is_rounded_as_stated(wire, check_vma):
    rng, mesh, strategy = np.random.default_rng(1), mesh_of(data=2), ax.DiLoCo(every=1, wire=wire)
    shapes = [(40, 30), (7,)]  # the second one, a bias, travels as float32 beside int8
    outer = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    own = [np.stack([x + 0.01 * rng.normal(size=x.shape).astype(np.float32) for _ in range(2)]) for x in outer]
    layouts, spec = [Layout.replicated(x) for x in outer], PartitionSpec
    kept = [0.02 * x for x in outer]

    def end(outer, own, kept):
        return strategy.end_round(outer, [x[0] for x in own], kept, layouts, "data")

    run = jax.shard_map(end, mesh=mesh, in_specs=(spec(), spec("data"), spec()), out_specs=spec(), check_vma=check_vma)
    new, momenta = jax.device_get(jax.jit(run)(outer, own, kept))
    for i, x in enumerate(outer):
        changes = x - own[i]
        if wire == "bf16":
            low = changes.astype(jnp.bfloat16)
            total = (low[0] + low[1]).astype(np.float32)
        elif x.ndim > 1:
            read = sum(sent_as_int8(change.ravel(), 2) for change in changes)
            total = sent_as_int8(read, 2).reshape(x.shape)
            assert 0 < np.abs(total - changes.sum(0)).max() < 2 * np.abs(changes).max() / 127
        else:
            total = changes.sum(0)
        momentum = 0.9 * kept[i] + total / 2
        np.testing.assert_allclose(momenta[i], momentum, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(new[i], x - 0.7 * (total / 2 + 0.9 * momentum), rtol=1e-6, atol=1e-7)


def test_a_step_sends_nothing_along_the_replicas_but_at_the_end_of_a_round():
    model = model_of("nnx", {"data": 4, "fsdp": 2}, data=ax.DiLoCo(every=10))
    trainer, batch = model.trainer(INNER, loss_fn, max_grad_norm=1.0), batches(1)[0]
    sent = [each for each in collectives_in(trainer.train_step, trainer.state, batch) if each.group_size > 1]
    along = [each for each in sent if "data" in each.axes]
    assert along and all(each.every == 10 and each.where == "every 10 steps" and each.path for each in along)
    assert len(along) < len(sent) and all(each.every == 1 for each in sent if each not in along)
    lowered = trainer.train_step.lower(trainer.state, batch)
    read = [each for each in collectives_in_lowered(lowered) if each.group_size == 4]
    assert read and all(each.path for each in read)  # in a branch of a conditional
    held = sum(x.size for x in jax.tree.leaves(model.parameters())) // 2  # by a rank of fsdp
    report = ax.explain(trainer, batch)
    assert float(report.bytes_by_axes["data",]) == 2 * 8 * held * 3 / 4 / 10  # 2P/H
    assert "every 10 steps" in str(report) and "their bytes are the mean over them" in str(report)
