"""What the compiled pipeline costs: memory that 1F1B keeps flat, a program that does not grow, two shifts per tick."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from axonml_jax.collectives.gradients import copy_to, reduce_from
from axonml_jax.collectives.primitives import gather_whole, scatter_sum, sum_over, vary
from axonml_jax.compat.versions import BRANCHES_WRITE_IN_PLACE
from axonml_jax.executor.cut import Inputs, Stage, StageOutput, TracedForward, TracedStage, trace_stage
from axonml_jax.executor.run import run_pipeline
from axonml_jax.ledger.compiled import collectives_in_compiled
from axonml_jax.ledger.count import collectives_in
from axonml_jax.parallel.units import transform_of
from axonml_jax.pipeline.pack import StageBuffers, Stored
from axonml_jax.pipeline.schedules import make_schedule, make_timetable

pytestmark = pytest.mark.usefixtures("compiled_for_users")

RANKS = 4


class Shape(NamedTuple):
    """A pipeline of square layers."""

    schedule: str = "1f1b"
    microbatches: int = 8
    rows: int = 4
    width: int = 8
    layers: int = 2
    chunks: int = 1
    remat: str | None = None


def stage(number: int, count: int, weights, x, batch, key, state):
    h = batch["x"] if x is None else x
    for w in weights:
        h = jnp.sin(h @ w)
    return StageOutput(None, jnp.mean((h - batch["y"]) ** 2)) if number == count - 1 else StageOutput(h)


def step_of(shape: Shape, mesh, data: int = 1):
    """(step, abstract arguments): gradients reduced over `data` once."""
    count = RANKS * shape.chunks
    stages = [Stage(functools.partial(stage, p, count)) for p in range(count)]
    layout = StageBuffers.of([[Stored((shape.width, shape.width), "float32")] * shape.layers] * count, RANKS)
    timetable = make_timetable(make_schedule(shape.schedule, RANKS, shape.microbatches, shape.chunks))

    def local(weights, batch):
        mine = {group: vary(x[0], "data") for group, x in weights.items()}
        result = run_pipeline(stages, timetable, layout, mine, batch, remat=shape.remat)
        grads = {group: sum_over(x, "data")[None] / data for group, x in result.grads.items()}
        return sum_over(result.loss, "data") / data, grads

    specs = (P("pipe"), P(None, "data"))
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), P("pipe")), check_vma=False))
    weights = {group: jax.ShapeDtypeStruct((RANKS, size), group.dtype) for group, size in layout.sizes.items()}
    rows = jax.ShapeDtypeStruct((shape.microbatches, data * shape.rows, shape.width), "float32")
    return step, (weights, {"x": rows, "y": rows})


def abstract_mesh(data: int) -> AbstractMesh:
    return AbstractMesh((data, RANKS), ("data", "pipe"), axis_types=(AxisType.Auto,) * 2)


@functools.cache
def compiled(shape: Shape):
    mesh = Mesh(np.array(jax.devices()[:RANKS]).reshape(1, RANKS), ("data", "pipe"))
    step, arguments = step_of(shape, mesh)
    return step.lower(*arguments).compile()


def temporaries(shape: Shape) -> int:
    return compiled(shape).memory_analysis().temp_size_in_bytes


WIDE = Shape(rows=512)  # activations weigh more than anything else


@pytest.mark.parametrize("remat", [None, "full"])
def test_memory_of_1f1b_is_flat_in_microbatches_and_below_gpipes(remat):
    shape = WIDE._replace(remat=remat)
    few, many = (temporaries(shape._replace(microbatches=m)) for m in (8, 64))
    assert abs(many / few - 1) < 0.05
    assert many < temporaries(shape._replace(schedule="gpipe", microbatches=16))


def test_recomputing_keeps_the_inputs_alone():
    assert temporaries(WIDE._replace(remat="full")) < 0.6 * temporaries(WIDE)


def test_temporaries_are_the_slots_two_gradients_and_one_tick():
    """A slot holds one stage's residuals; a tick makes as much again, and before jax 0.11 a slot of its own and the trash."""
    shape = WIDE._replace(layers=4)
    activation, layer = 4 * shape.rows * shape.width, 4 * shape.width**2
    kept = (shape.layers + 1) * activation  # the product of every layer, and the stage's input
    received = 2 * 2 * activation  # a slot and the trash, of activations and of their gradients
    slots = 2 * RANKS - 1
    allowed = (
        (slots + (1 if BRANCHES_WRITE_IN_PLACE else 3)) * (kept + activation) + received + 2 * shape.layers * layer
    )
    assert temporaries(shape) <= 1.1 * allowed


def test_gradients_are_accumulated_in_one_buffer_and_one_copy_at_most():
    shape = Shape(rows=1, width=128, layers=4)
    stage_bytes = 4 * shape.layers * shape.width**2
    for m in (16,):
        assert temporaries(shape._replace(microbatches=m)) <= 1.1 * 2 * stage_bytes + 4 * shape.width**2


@pytest.mark.skipif(
    not BRANCHES_WRITE_IN_PLACE, reason="before jax 0.11 XLA:CPU drops the barrier that keeps reading and writing apart"
)
def test_no_fusion_reads_the_buffer_that_it_writes_a_part_of():
    """XLA:CPU would write all of it: a whole copy of a stage's gradients per weight and tick, half of a step's time."""
    writes = 0
    for computation in compiled(Shape(rows=1, width=128, layers=4)).as_text().split("\n\n"):
        root = re.search(r"ROOT \S+ = \S+ (?:bitcast\()?dynamic-update-slice\((%[\w.]+),", computation)
        if root:
            writes += 1
            used = len(re.findall(re.escape(root[1]) + r"[,)]", computation))
            assert used == 1, computation
    assert writes


def equations(jaxpr) -> int:
    inner = [value for eqn in jaxpr.eqns for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr)]
    return len(jaxpr.eqns) + sum(equations(getattr(value, "jaxpr", value)) for value in inner if is_jaxpr(value))


def is_jaxpr(value) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def test_stages_that_do_the_same_are_traced_once_and_what_a_forward_keeps_of_32_bits_is_not_rounded(monkeypatch):
    traced, forward = [], TracedStage.forward
    monkeypatch.setattr(TracedStage, "forward", lambda *args: traced.append(args[0]) or forward(*args))
    step, arguments = step_of(Shape(), abstract_mesh(1))
    program = str(step.trace(*arguments).jaxpr)
    assert len(traced) == 3  # the first, the last, and one for all between
    assert "reduce_precision" not in program and "scatter" not in program


def test_what_is_kept_of_16_bits_is_rounded():
    rows, weights = jnp.ones((2, 4), "bfloat16"), [jnp.ones((4, 4), "bfloat16")] * 2
    two = Stage(lambda weights, x, batch, key, state: StageOutput(jnp.sin(jnp.sin(batch @ weights[0]) @ weights[1])))
    inputs = Inputs(weights, [rows], [], [])
    unflatten = lambda leaves: (leaves.weights, None, leaves.given[0], None, None)
    traced = trace_stage(two, inputs, unflatten, [True, True], [])
    made = TracedForward.of(traced, inputs, transform_of(None, apart=True))
    program = str(jax.make_jaxpr(lambda rows: made.apply(inputs._replace(given=[rows])))(rows))
    assert program.count(" reduce_precision") == len(made.residuals) > 0


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)])
def test_the_program_does_not_grow_with_microbatches(schedule, chunks):
    sizes = []
    for m in (8, 64):
        step, arguments = step_of(Shape(schedule, m, chunks=chunks), abstract_mesh(1))
        sizes.append(equations(step.trace(*arguments).jaxpr.jaxpr))
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1)])
def test_a_tick_has_two_shifts_and_nothing_else(schedule, chunks):
    shape = Shape(schedule, 8, chunks=chunks)
    step, arguments = step_of(shape, abstract_mesh(2), data=2)
    found = collectives_in(step, *arguments)
    in_loop = [entry for entry in found if entry.in_loop]
    assert [(entry.kind, entry.axes, entry.label) for entry in in_loop] == [
        ("permute", ("pipe",), "activations"),
        ("permute", ("pipe",), "cotangents"),
    ]
    timetable = make_timetable(make_schedule(schedule, RANKS, 8, chunks))
    for entry in in_loop:
        assert entry.executions == timetable.num_ticks and entry.elements == shape.rows * shape.width
        assert not any("branch" in str(step) for step in entry.path)
    once = [(entry.kind, entry.axes) for entry in found if not entry.in_loop and entry.elements > 1]
    assert once == [("all_reduce", ("data",))]


def test_compiled_shifts_stay_in_the_loop_and_reductions_outside():
    found = collectives_in_compiled(compiled(WIDE))
    assert sorted(entry.kind for entry in found if entry.in_loop) == ["permute", "permute"]


def tensor_stage(number: int, weights, x, batch, key, state):
    """Column then row parallel: communicates over `tensor` inside the branch."""
    h = batch if x is None else x
    h = reduce_from(jnp.tanh(copy_to(h, "tensor") @ weights["up"]) @ weights["down"], "tensor")
    return StageOutput(None, jnp.mean(h**2)) if number == 1 else StageOutput(h)


@pytest.mark.parametrize("check_vma", [False, True])
def test_stages_may_communicate_over_other_axes_and_gather_in_every_tick(check_vma):
    """pipe 2 x fsdp 2 x tensor 2: weights split over both, gathered over fsdp when a tick reads them."""
    width, hidden, m = 4, 6, 3
    rng = np.random.default_rng(0)
    whole = [{"up": rng.normal(size=(width, hidden)), "down": rng.normal(size=(hidden, width))} for _ in range(2)]
    batch = rng.normal(size=(m, 4, width))
    up, down = (
        Stored((width // 2, hidden // 2), "float64", ("fsdp", "tensor")),
        Stored((hidden // 2, width // 2), "float64", ("fsdp", "tensor")),
    )
    layout = StageBuffers.of([{"up": up, "down": down}] * 2, 2)
    dims = (1, 0)  # in tree order down, up: where fsdp splits each
    read = lambda leaves: [gather_whole(x, "fsdp", d, invarying=False) for x, d in zip(leaves, dims, strict=True)]
    sync = lambda grads: [scatter_sum(g, "fsdp", d) for g, d in zip(grads, dims, strict=True)]
    stages = [Stage(functools.partial(tensor_stage, p), read, sync) for p in range(2)]
    timetable = make_timetable(make_schedule("1f1b", 2, m))

    def local(weights, batch):
        result = run_pipeline(stages, timetable, layout, {g: x[0, 0, 0] for g, x in weights.items()}, batch)
        loss = sum_over(result.loss, "fsdp") / 2
        return loss, {g: x[None, None, None] / 2 for g, x in result.grads.items()}

    def part(tree, f, t):
        cut = lambda x, dim, i: np.split(x, 2, dim)[i]
        return {"up": cut(cut(tree["up"], 0, f), 1, t), "down": cut(cut(tree["down"], 1, f), 0, t)}

    packed = [[[layout.pack_rank(p, [part(whole[p], f, t)]) for t in range(2)] for f in range(2)] for p in range(2)]
    (group,) = layout.sizes
    weights = {group: np.stack([np.stack([np.stack([b[group] for b in row]) for row in rank]) for rank in packed])}
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("pipe", "fsdp", "tensor"))
    spec = P("pipe", "fsdp", "tensor")
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, P(None, "fsdp")), out_specs=(P(), spec), check_vma=check_vma
    )
    loss, grads = jax.jit(mapped)(weights, batch)

    def unsplit(whole):
        h = batch
        for w in whole:
            h = jnp.tanh(h @ w["up"]) @ w["down"]
        return jnp.mean(h**2)

    wanted, of_whole = jax.value_and_grad(unsplit)(whole)
    np.testing.assert_allclose(loss, wanted, rtol=1e-12)
    for p in range(2):
        for f in range(2):
            for t in range(2):
                got = layout.unpack_rank(p, {group: np.asarray(grads[group])[p, f, t]})[0]
                jax.tree.map(
                    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), got, part(of_whole[p], f, t)
                )
    entries = collectives_in(jax.jit(mapped), weights, batch)
    gathers = [entry for entry in entries if entry.kind == "all_gather"]
    assert gathers and all(entry.in_loop and "branch" in entry.where for entry in gathers)
