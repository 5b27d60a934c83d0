"""What an FSDP step sends and holds: counted by the ledger and read off the compiled program, never on faith."""

import itertools
from fractions import Fraction
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from meshes import mesh_of
from pipeline_models import Language
from plan_models import CASES, tokens

import axonml_jax as ax
from axonml_jax.ledger.compiled import agreement, collectives_in_lowered
from axonml_jax.ledger.count import collectives_in
from axonml_jax.model.view import Mode, functionalize
from axonml_jax.parallel.placement import bind_plan
from axonml_jax.strategies.strategy import Fabric
from axonml_jax.training.evaluate import Forward
from axonml_jax.training.run_state import abstract_state
from axonml_jax.training.step import TrainStep

pytestmark = pytest.mark.usefixtures("compiled_for_users")

WIDTH, BLOCKS, RANKS = 128, 8, 8


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.relu(self.up(x)))


class MLP(nnx.Module):
    """Blocks after an input layer, whose gradient needs no weights: so every block's are gathered twice."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def mse(model, batch):
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


def lower(rows=64, tx=None, **plan):
    """The step of the MLP on shapes alone: (step, its lowered program, P)."""
    view, shapes = functionalize(lambda: MLP())
    placement = bind_plan(ax.Plan(**plan), shapes, mesh_of(fsdp=RANKS))
    step = TrainStep(view, placement, mesh_of(fsdp=RANKS), mse, tx or optax.adam(1e-3))
    state = abstract_state(shapes, tx or optax.adam(1e-3), placement)
    batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32))
    return step, state, batch, sum(leaf.size for leaf in jax.tree.leaves(shapes.params))


def traffic(step, state, batch):
    return ax.explain(step, state, batch).bytes_by_label


@pytest.mark.parametrize(("stage", "accumulate"), list(itertools.product([1, 2, 3], [1, 3])))
def test_traffic_is_the_papers(stage, accumulate):
    step, state, batch, count = lower(fsdp=ax.Shard(stage=stage), accumulate=accumulate, rows=72)
    unit = Fraction(4 * count * (RANKS - 1), RANKS)
    sent = traffic(step, state, batch)
    assert sent["gradients"] == unit * (accumulate if stage > 1 else 1)
    gathers = 2 * accumulate if stage == 3 else 1
    assert step.minimum_traffic() == sent["gradients"] + gathers * unit
    # What the backward does not read is not gathered again: biases, and the first layer's weights.
    biases = BLOCKS * 5 * WIDTH + WIDTH
    skipped = Fraction(4 * (WIDTH * WIDTH + biases) * (RANKS - 1), RANKS) * accumulate if stage == 3 else 0
    assert sent["parameters"] == gathers * unit - skipped


def test_hybrid_splits_as_theory_says():
    case = CASES["tied"]
    model = ax.FSDP(case.model(), mesh_of(data=2, fsdp=4), sharding_strategy="hybrid_shard")
    trainer = model.trainer(optax.adam(1e-3), case.loss)
    report = ax.explain(trainer, case.batch(16))
    (inside, across) = (
        [c for c in report.collectives if c.axes == (axis,) and c.label in ("gradients", "parameters")]
        for axis in ("fsdp", "data")
    )
    assert {c.kind for c in inside} == {"all_gather", "reduce_scatter"} and {c.kind for c in across} == {"all_reduce"}
    stored = sum(leaf.size for leaf in jax.tree.leaves(model.variables.params))
    assert sum(c.wire_bytes for c in across) == Fraction(2 * 8 * stored, 4 * 2)  # 2 (N-1)/N of a rank's part


def test_two_hops_send_the_bytes_of_one():
    """Among neighbours and across, as on a torus of three dims, where it is decided by the chips' coordinates."""
    places = [(x, y, z) for x in range(2) for y in range(4) for z in range(8)]
    chips, others = (
        [SimpleNamespace(platform=name, coords=place, process_index=0) for place in places] for name in ("tpu", "gpu")
    )
    assert [Fabric.of(devices).torus for devices in (chips, chips[:32], others, jax.devices())] == [3, 2, 0, 0]
    decided = ax.Shard().decided(Fabric(devices=64, torus=3), 64)
    assert (decided.gather_hop, decided.scatter_hop) == (8, 8)
    with pytest.raises(ValueError, match=r"\{'gather_hop': 3\}: the number of ranks of a hop must divide the 8 ranks"):
        lower(fsdp=ax.Shard(gather_hop=3))
    sent = [
        ax.explain(*lower(fsdp=ax.Shard(**hops))[:3]).collectives for hops in ({}, {"gather_hop": 2, "scatter_hop": 4})
    ]
    large = [[c for c in each if c.label in ("gradients", "parameters") and c.group_size > 1] for each in sent]
    assert sum(c.step_wire_bytes for c in large[0]) == sum(c.step_wire_bytes for c in large[1])
    assert {(c.kind, c.group_size) for c in large[0]} == {("all_gather", 8), ("reduce_scatter", 8)}
    assert {(c.kind, c.group_size) for c in large[1]} == {
        (k, n) for k in ("all_gather", "reduce_scatter") for n in (2, 4)
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_gathers_and_reduces_half_the_bytes_and_may_reduce_in_float32(stage):
    full, wide, *halves = (
        traffic(*lower(fsdp=ax.Shard(stage=stage), precision=policy)[:3])
        for policy in ("float32", "bf16-reduce-float32", "bf16", "bf16-reduce")
    )
    assert full["gradients"] == wide["gradients"] and full["parameters"] == 2 * wide["parameters"]
    assert all(half[kind] * 2 == full[kind] for half in halves for kind in ("parameters", "gradients"))


@pytest.mark.parametrize(("name", "stage"), [("scanned", 3), ("tied", 3), ("scanned", 2)])
@pytest.mark.parametrize("check_vma", [False, True])
def test_the_ledger_agrees_with_the_lowered_program(name, stage, check_vma):
    case = CASES[name]
    plan = ax.Plan(fsdp=ax.Shard(stage=stage), accumulate=2, check_vma=check_vma)
    trainer = ax.parallelize(case.model(), mesh_of(data=2, fsdp=3), plan).trainer(optax.adam(1e-2), case.loss)
    traced = trainer.trace(case.batch(24))
    assert agreement(collectives_in(traced.jaxpr), collectives_in_lowered(traced.lower())) == []


def test_a_scans_weights_are_gathered_slice_by_slice_in_its_loops():
    case = CASES["scanned"]
    trainer = ax.FSDP(case.model(), mesh_of(fsdp=3)).trainer(optax.adam(1e-2), case.loss)
    report = ax.explain(trainer, case.batch(12))
    loops = [c for c in report.collectives if c.path and c.path[0].trips == 4]
    assert sorted((c.kind, c.elements) for c in loops) == [
        ("all_gather", 42),
        ("all_gather", 42),  # backward: redoing what is elementwise reads the bias again
        ("reduce_scatter", 42),
    ]


def compiled(**plan):
    step, state, batch, count = lower(**plan)
    return step.lower(state, batch).compile(), 4 * count


def residuals(rows):
    """Bytes that plain autodiff of one rank's rows keeps, without the weights."""
    view, shapes = functionalize(lambda: MLP())
    weights = jax.tree.leaves(shapes.params)

    def loss(leaves, x):
        params = jax.tree.unflatten(jax.tree.structure(shapes.params), leaves)
        model = view.bind(type(shapes)(params, {}, {}), jax.random.key(0), Mode())
        return jnp.mean(jnp.square(model(x) - x))

    kept = jax.eval_shape(
        lambda w, x: jax.vjp(loss, w, x)[1], weights, jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    )
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept)) - sum(4 * w.size for w in weights)


@pytest.mark.slow
def test_memory_of_every_stage_is_what_it_promises():
    programs = {stage: compiled(fsdp=ax.Shard(stage=stage))[0].memory_analysis() for stage in (1, 2, 3)}
    replicated, size = compiled(fsdp=ax.Replicate())
    batch = 2 * 64 * WIDTH * 4 // RANKS
    for stage, memory in programs.items():
        assert abs(memory.argument_size_in_bytes - batch - 3 * size / RANKS) < 0.02 * 3 * size / RANKS, stage
    assert abs(replicated.memory_analysis().argument_size_in_bytes - batch - 3 * size) < 0.02 * 3 * size
    unit = 4 * (8 * WIDTH * WIDTH + 5 * WIDTH)
    assert programs[3].temp_size_in_bytes < residuals(64 // RANKS) + size / RANKS + 2.5 * unit
    assert programs[1].temp_size_in_bytes > size and programs[2].temp_size_in_bytes > size


def test_a_forward_holds_one_unit_after_the_other():
    """Without the options of a step XLA:CPU of jax 0.10 gathers all units before the first is used."""
    model, programs = ax.FSDP(MLP(), mesh_of(fsdp=RANKS)), []
    forward = Forward(model._functional, model._placement, model.mesh, False, accept=programs.append)
    forward(model.variables, jax.random.key(0), (jnp.zeros((64, WIDTH)),), {})
    unit = 4 * (8 * WIDTH * WIDTH + 5 * WIDTH)
    assert programs[0].memory_analysis().temp_size_in_bytes < 3 * unit < BLOCKS * unit


@pytest.mark.slow
def test_replay_costs_no_more_work_than_plain_autodiff_and_recomputation_does():
    flops = lambda **plan: compiled(**plan)[0].cost_analysis()["flops"]
    plain, replayed = flops(fsdp=ax.Shard(stage=1)), flops(fsdp=ax.Shard(stage=3))
    assert abs(replayed / plain - 1) < 0.002
    assert flops(fsdp=ax.Shard(stage=3), remat="full") > 1.1 * plain
    assert flops(fsdp=ax.Shard(stage=3), remat="selective") < 1.02 * plain


@pytest.mark.slow
def test_recomputation_lowers_memory():
    temp = lambda **plan: compiled(fsdp=ax.Shard(stage=3), rows=1024, **plan)[0].memory_analysis().temp_size_in_bytes
    full, selective, none = temp(remat="full"), temp(remat="selective"), temp()
    assert full < 0.6 * none and full < selective < none


@pytest.mark.slow
def test_a_model_made_by_a_function_is_never_whole_on_any_device():
    model = ax.FSDP(lambda: MLP(), mesh_of(fsdp=RANKS))
    whole = MLP()
    for (path, leaf), made in zip(
        jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(whole, nnx.Param))),
        jax.tree.leaves(model.variables.params),
        strict=True,
    ):
        assert jnp.array_equal(leaf, made), path
        assert made.addressable_shards[0].data.size == leaf.size // RANKS


def test_a_single_number_among_sharded_parameters_is_explained():
    model = ax.FSDP(Language(2, nnx.Rngs(0)), mesh_of(fsdp=2))
    trainer = model.trainer(optax.sgd(0.1), lambda model, batch: jnp.mean(model(batch["x"])))
    assert "all_gather" in str(ax.explain(trainer, tokens(8)))
