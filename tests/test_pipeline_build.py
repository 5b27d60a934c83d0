"""What building a pipeline's step costs: traces of the user's model and optimizer, branches, and kernels of XLA:CPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plan_models import linear, mean_loss, regression

import axonml_jax as ax
from axonml_jax.compat.jaxpr import trace
from axonml_jax.executor.cut import TracedStage
from axonml_jax.pipeline.assign import assign
from axonml_jax.pipeline.branches import alike, one_of
from axonml_jax.program.program import Program, no_calls, read_program
from axonml_jax.sharding.layout import Layout
from axonml_jax.training.on_shards import Mixing, read_update


def counting(tx: optax.GradientTransformation, calls: list) -> optax.GradientTransformation:
    def update(*args, **more):
        calls.append("optimizer")
        return tx.update(*args, **more)

    return optax.GradientTransformation(tx.init, update)


CALLS: list[str] = []


class Counted(nnx.Module):
    """Blocks of one width; notes its calls in `CALLS`."""

    def __init__(self, num_blocks, rngs):
        self.blocks = nnx.List([linear(5, 5, rngs) for _ in range(num_blocks)])
        self.head = linear(5, 3, rngs)

    def __call__(self, x):
        CALLS.append("model")
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return self.head(x)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_optimizer_is_traced_once_and_the_model_for_its_shapes_twice_more_however_many_stages(ranks):
    calls = CALLS
    mesh = ax.make_mesh(pipe=ranks, devices=jax.devices()[:ranks])
    pipe = ax.Pipeline(Counted(4, nnx.Rngs(0)), mesh, num_microbatches=2)
    trainer = pipe.trainer(counting(optax.adamw(1e-2), calls), mean_loss)
    calls.clear()
    trainer.train_step.trace(trainer.state, regression(4))
    assert sorted(calls) == ["model"] * 3 + ["optimizer"]  # the shapes of a microbatch's call and of the whole batch's


def test_on_shards_the_optimizer_is_traced_once_and_the_model_for_its_shapes_twice_more():
    mesh = ax.make_mesh(fsdp=2, devices=jax.devices()[:2])
    calls, loss = CALLS, lambda model, batch: mean_loss(model, batch)[0].astype("float32")
    sharded = ax.FSDP(Counted(2, nnx.Rngs(0)), mesh)
    trainer = sharded.trainer(counting(optax.adamw(1e-2), calls), loss)
    calls.clear()
    trainer.train_step.trace(trainer.state, regression(4))
    assert sorted(calls) == ["model"] * 3 + ["optimizer"]  # the shapes of a rank's call and of the whole batch's


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


@pytest.mark.parametrize(
    "ranks, tx, branches",
    [
        (4, optax.adamw(1e-2), []),  # all of every buffer alike, on all ranks
        (6, optax.adamw(1e-2, mask=matrices), [2]),  # the last rank has the head too
    ],
)
def test_stages_that_do_the_same_are_differentiated_once_and_ranks_that_hold_the_same_update_in_one_branch(
    ranks, tx, branches, monkeypatch
):
    calls: list[str] = []
    for name in ("forward", "backward"):
        once = getattr(TracedStage, name)
        count = lambda *args, name=name, once=once: calls.append(name) or once(*args)
        monkeypatch.setattr(TracedStage, name, count)
    mesh = ax.make_mesh(pipe=ranks, devices=jax.devices()[:ranks])
    pipe = ax.Pipeline(Counted(ranks, nnx.Rngs(0)), mesh, num_microbatches=2)
    trainer = pipe.trainer(tx, mean_loss)
    traced = trainer.train_step.trace(trainer.state, regression(4))
    assert sorted(calls) == ["backward"] * 3 + ["forward"] * 3  # of the first stage, the last, and one between
    updates = [
        len(inner.branches)
        for equation in read_program(traced.jaxpr).equations
        for body in equation.bodies
        for inner in body.equations
        if inner.branches and "axonml.update" in str(inner.op.scopes)
    ]
    assert updates == branches


@pytest.mark.parametrize("precision, branches", [(None, 0), ("bf16", 1)])
def test_gradients_are_not_packed_again_where_parameters_rest_as_they_are_read(precision, branches):
    """In bfloat16 ranks cast what they read, each its own; gradients lie in float32 at the same places."""
    mesh = ax.make_mesh(pipe=4, devices=jax.devices()[:4])
    pipe = ax.Pipeline(Counted(4, nnx.Rngs(0)), mesh, num_microbatches=2, precision=precision)
    trainer = pipe.trainer(optax.adamw(1e-2), lambda model, batch: mean_loss(model, batch)[0])
    program = read_program(trainer.train_step.trace(trainer.state, regression(4)).jaxpr)
    inner = [each for equation in program.equations for body in equation.bodies for each in body.equations]
    update = lambda each: "axonml.update" in str(each.op.scopes)
    made = [each.op.made[0].dtype for each in inner if each.branches and not update(each)]
    assert sum(jnp.issubdtype(dtype, jnp.floating) for dtype in made) == branches


def test_a_rank_runs_what_its_leaves_need_and_nothing_else():
    fun = lambda a, b, count: (a * (count + 1), jnp.sin(b), count + 1)
    leaves = [jax.ShapeDtypeStruct((2,), jnp.float64)] * 2
    args, owners = [*leaves, jax.ShapeDtypeStruct((), jnp.int32)], ((0, 1, None), (0, 1, None))
    layouts = [Layout.replicated(leaf) for leaf in leaves]
    traced = lambda update: read_program(trace(update, *args).jaxpr, no_calls)
    program = read_update(traced(fun), owners, layouts, ("pipe",))

    def own(leaf, count):
        return program.run({2: count}, lambda work: work({0: leaf}), lambda made: made[0])

    given = jnp.ones(2), jnp.ones((), jnp.int32)
    names = {eqn.primitive.name for eqn in jax.make_jaxpr(own)(*given).eqns}
    assert names <= {
        "add",
        "mul",
        "convert_element_type",
        "broadcast_in_dim",
    }  # a number may be spread over the leaf it meets
    first, loose = own(*given)
    np.testing.assert_array_equal(first, [2.0, 2.0])
    assert int(loose[2]) == 2
    with pytest.raises(Mixing, match="several parameters"):
        read_update(traced(lambda a, b, count: (a + b, b, count)), owners, layouts, ("pipe",))


def test_a_norm_behind_a_layer_is_no_table_of_positions():
    names = ("blocks/0/post_norm/w", "blocks/1/post_norm/w", "pos_embed/w", "positions/w")
    assert assign({name: np.ones((4, 4)) for name in names}, 2).stages == (0, 1, 0, 0)


def step_of(num_blocks: int, ranks: int, microbatches: int = 2):
    """The traced step of `Counted`."""
    mesh = ax.make_mesh(pipe=ranks, devices=jax.devices()[:ranks])
    pipe = ax.Pipeline(Counted(num_blocks, nnx.Rngs(0)), mesh, num_microbatches=microbatches)
    trainer = pipe.trainer(optax.sgd(1e-2), mean_loss)
    return trainer.train_step.trace(trainer.state, regression(4))


def branches_in_ticks(program: Program) -> list[int]:
    """The sizes of the conditionals in a program's loops."""
    found = []
    for equation in program.equations:
        inside = equation.body if equation.op.scan is not None else None
        found += [len(inner.branches) for inner in (inside.equations if inside else ()) if inner.branches]
        found += [count for body in equation.bodies for count in branches_in_ticks(body)]
    return found


@pytest.mark.parametrize(("num_blocks", "branches"), [(4, 4), (8, 4), (5, 5)])
def test_stages_that_run_one_program_are_one_branch(num_blocks, branches):
    """The first stage, those between it and the last, the last, and none; of five blocks a stage between has two."""
    assert branches_in_ticks(read_program(step_of(num_blocks, 4).jaxpr)) == [branches, branches]


def kernels(text: str) -> int:
    """How many fused computations of an optimized program differ."""
    found = set()
    for body in re.findall(r"^%fused_computation\S* \([^\n]*\{\n(.*?)^\}", text, re.M | re.S):
        names: dict[str, str] = {}
        plain = re.sub(r", metadata=\{[^}]*\}", "", body)
        found.add(re.sub(r"%[\w.\-]+", lambda match, names=names: names.setdefault(match[0], f"%{len(names)}"), plain))
    return len(found)


def test_more_blocks_of_one_kind_need_no_more_kernels():
    few, many = (kernels(step_of(num_blocks, 2).lower().compile().as_text()) for num_blocks in (6, 12))
    assert many <= few + 2, (few, many)


def test_one_of_several_functions_is_run_and_those_of_one_program_are_compiled_once():
    x, y = jnp.arange(3.0), jnp.ones(3)
    functions = [lambda: x + 1, lambda: x * 2, lambda: x + 1, lambda: y + 1, lambda: x + 2]
    run = jax.jit(lambda i: one_of(i, functions, "aaaaa"))
    for i, function in enumerate(functions):
        np.testing.assert_array_equal(run(i), function())
    (equation,) = [
        each
        for each in read_program(trace(lambda i: one_of(i, functions, "aaaaa"), 0).jaxpr).equations
        if each.branches
    ]
    assert len(equation.branches) == 4


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, h: jnp.sin(h) * 2, x), True),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, h: jnp.cos(h) * 2, x), False),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, h: jnp.sin(h) * 3, x), False),
        (lambda x: jax.lax.fori_loop(0, 4, lambda i, h: jnp.sin(h) * 2, x), False),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, h: jnp.sin(h) * 2, x[::-1]), False),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, h: jnp.sin(h) * np.array([2.0, 2.0, 2.0]), x), False),
    ],
)
def test_programs_are_alike_when_they_compute_the_same_of_the_same(other, same):
    one = lambda x: jax.lax.fori_loop(0, 3, lambda i, h: jnp.sin(h) * 2, x)
    programs = [read_program(trace(fun, jnp.ones(3)).jaxpr) for fun in (one, other)]
    assert alike(*programs) is same


class Mixed(nnx.Module):
    """Blocks of two dtypes."""

    def __init__(self, rngs):
        made = lambda: (
            nnx.Linear(8, 8, use_bias=False, param_dtype="bfloat16", rngs=rngs),
            nnx.LayerNorm(8, rngs=rngs),
        )
        self.blocks = nnx.List([nnx.List(made()) for _ in range(2)])

    def __call__(self, x):
        for product, norm in self.blocks:
            x = x + norm(product(x))
        return x


@pytest.mark.parametrize("options", [{"mu_dtype": "float32"}, {}])
def test_moments_of_two_dtypes_that_lie_in_one_buffer_are_updated_each_by_its_own(options):
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    loss = lambda model, batch: (model(batch["x"]).astype("float32") ** 2).mean()
    own = {} if options else {"ema": 0.9}
    mesh = ax.make_mesh(pipe=2, devices=jax.devices()[:2])
    piped = ax.Pipeline(Mixed(nnx.Rngs(0)), mesh, num_microbatches=2)
    whole = ax.DDP(Mixed(nnx.Rngs(0)), ax.make_mesh(data=1, devices=jax.devices()[:1]))
    ours, one = (each.trainer(optax.adam(1e-2, **options), loss, **own) for each in (piped, whole))
    for _ in range(3):
        np.testing.assert_allclose(ours.step({"x": x})["loss"], one.step({"x": x})["loss"], rtol=1e-3)
