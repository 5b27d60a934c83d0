"""Blocks whose parameters are stacked for one loop, in pipelines: what is divided, what is refused, what users see."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import mesh_of
from pipeline_models import Stacked
from plan_models import F64, linear, tokens
from predicted_steps import LLAMA, config

import axonml_jax as ax
from axonml_jax.models.transformer import Transformer
from axonml_jax.pipeline.assign import Stack, assign
from axonml_jax.testing.equality import assert_trees_close


def loss_of(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


class Loops(nnx.Module):
    """Stacked blocks without a loop of Flax's: `loop` runs them."""

    def __init__(self, loop, num_blocks=4):
        rngs = nnx.Rngs(0)
        self.loop, self.embed = loop, nnx.Embed(11, 6, param_dtype=F64, rngs=rngs)
        make = nnx.vmap(lambda rngs: linear(6, 6, rngs), in_axes=(0,), out_axes=0)
        self.blocks = nnx.split_rngs(splits=num_blocks)(make)(rngs)
        self.head = linear(6, 11, rngs)

    def __call__(self, tokens):
        return self.head(self.loop(nnx.split(self.blocks), self.embed(tokens)))


def block_of(graph, row):
    return lambda x: x + jnp.tanh(nnx.merge(graph, row)(x))


def by_number(split, x):
    graph, stack = split
    for i in range(4):
        x = block_of(graph, jax.tree.map(lambda w, i=i: w[i], stack))(x)
    return x


def by_scan(split, x):
    graph, stack = split
    return jax.lax.scan(lambda x, row: (block_of(graph, row)(x), None), x, stack)[0]


def by_parts(split, x):
    graph, stack = split
    for start in (0, 2):
        part = jax.tree.map(lambda w, start=start: w[start : start + 2], stack)
        x = jax.lax.scan(lambda x, row: (block_of(graph, row)(x), None), x, part)[0]
    return x


def backwards(split, x):
    """The last row first, each with a number of its own; what the loop returns is read after it."""
    graph, stack = split
    step = lambda x, own: ((y := own[1] * block_of(graph, own[0])(x)), jnp.mean(y, -1))
    numbers = jnp.arange(1.0, 5.0, dtype=x.dtype)
    x, means = jax.lax.scan(step, x, (stack, numbers), reverse=True)
    return x + jnp.einsum("lbt,l->bt", means, numbers)[..., None]


def in_half(split, x):
    """Cast before the loop, as a policy of one's own does."""
    graph, stack = split
    stack = jax.tree.map(lambda w: (w * 2).astype(jnp.float32), stack)
    step = lambda x, row: (x + jnp.tanh(nnx.merge(graph, row)(x)).astype(x.dtype), None)
    return jax.jit(lambda x, stack: jax.lax.scan(step, x, stack)[0])(x, stack)


def in_one(split, x):
    """Nothing reads a row alone."""
    graph, stack = split
    return x + jnp.tanh(nnx.merge(graph, jax.tree.map(lambda w: w.mean(0), stack))(x))


LOOPS = [by_number, by_parts, backwards, in_half]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_any_loop_over_rows_is_divided_and_equals_plain_autodiff(loop):
    model, batch = Loops(loop), tokens(8)
    value, grads = nnx.value_and_grad(loss_of)(Loops(loop), batch)
    pipe = ax.Pipeline(model, mesh_of(pipe=2), num_microbatches=2)
    got, made = pipe.value_and_grad(loss_of)(batch)
    assert float(got) == pytest.approx(float(value), abs=1e-12 if loop is not in_half else 1e-6)
    tolerance = {} if loop is not in_half else {"low_precision": True}
    assert_trees_close(made, nnx.to_pure_dict(grads), "gradients", **tolerance)
    assert [pipe.stage_of[f"blocks/{row}/kernel"] for row in range(4)] == ([0, 0, 1, 1])
    assert pipe.stage_of["embed/embedding"] == 0 and pipe.stage_of["head/kernel"] == 1


def test_a_stack_that_no_loop_reads_is_refused_by_name():
    pipe = ax.Pipeline(Loops(in_one), mesh_of(pipe=2), num_microbatches=2)
    with pytest.raises(
        ValueError, match=r"'blocks' look like a stack of 4 blocks.* alone; .* reduce_sum \(line .*split="
    ):
        pipe.value_and_grad(loss_of)(tokens(8))


SHAPES = {
    "embed/embedding": (11, 6), "layers/attention/bias": (6, 8), "layers/attention/kernel": (6, 8, 8), "layers/scale": (6,),
    "norm/scale": (8,),
}  # fmt: skip


def shapes_of(shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def test_the_largest_stack_is_divided_where_there_are_too_few_blocks():
    found = assign(shapes_of(SHAPES), 3)
    assert found.stack == Stack("layers", 6) and found.stages == (0, None, None, None, 2)
    # Of the same modules in another order: what is read before the loop is on the first stage.
    order = {"norm/scale": (0,), "embed/embedding": (1,)} | {name: (2,) for name in SHAPES if "layers" in name}
    assert assign(shapes_of(SHAPES), 3, order=order).stages == (0, None, None, None, 0)
    assert assign(shapes_of(SHAPES), 1).stack is None
    listed = {f"blocks/{i}/kernel": (4, 3, 3) for i in range(4)}
    assert assign(shapes_of(listed), 4).stages == (0, 1, 2, 3)
    assert assign(shapes_of(listed), 2, split="blocks/1").stack == Stack("blocks/1", 4)
    nested = {f"net/{name}": shape for name, shape in listed.items()}
    assert assign(shapes_of(nested), 4).stages == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("shapes", "stages", "path"),
    [
        ({f"decoder/layers/{i}/{w}": (6, 2, 3) for i in range(4) for w in "qk"} | {"decoder/scale": (6,)}, 2, None),
        ({f"blocks/{i}/experts/{w}": (4, 3, 3) for i in (0, 1) for w in "ab"} | {"norm/scale": (4,)}, 2, None),
        ({"blocks/fc1/kernel": (4, 6, 8), "blocks/fc2/kernel": (4, 8, 6), "blocks/norm/scale": (4, 6)}, 2, "blocks"),
        ({"ScanRow_0/Dense_0/kernel": (4, 6, 6), "ScanRow_0/Dense_1/kernel": (4, 6, 6)}, 2, "ScanRow_0"),
        ({"Dense_0/w": (5, 6), "ScanRow_0/Dense_0/w": (8, 6, 6), "Dense_1/w": (6, 3)}, 2, "ScanRow_0"),
        ({"head1/w": (6, 3), "head2/w": (6, 3), "layers/w": (8, 6, 6)}, 2, "layers"),
        ({"stem1/w": (60, 60), "stem2/w": (60, 60), "layers/w": (8, 6, 6)}, 2, None),
    ],
    ids=[
        "a list of modules as wide",
        "experts in a list",
        "numbered layers in rows",
        "a Linen loop",
        "small layers around",
        "heads",
        "larger layers before",
    ],
)
def test_what_is_a_list_is_no_stack_and_what_is_small_beside_a_stack_is_no_list(shapes, stages, path):
    found = assign(shapes_of(shapes), stages).stack
    assert (None if found is None else found.path) == path


def test_several_stages_that_begin_in_one_loop_are_warned_of():
    model = Loops(by_scan)
    pipe = ax.Pipeline(model, mesh_of(pipe=2), num_microbatches=2, split=("blocks",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one stage begins there: the others are before and behind it
        pipe.value_and_grad(loss_of)(tokens(8))
    pipe = ax.Pipeline(Loops(by_scan), mesh_of(pipe=4), num_microbatches=2, split=("blocks", "blocks", "head"))
    with pytest.warns(UserWarning, match=r"several stages begin in one loop \(line .*split='path/of/module'"):
        pipe.value_and_grad(loss_of)(tokens(8))


def test_a_row_has_the_types_of_its_modules():
    types = {"layers": nnx.Module, "layers/up": nnx.Linear, "head": nnx.Linear}
    assert Stack("layers", 2).row_types(types) == {
        **types, "layers/0": nnx.Module, "layers/1": nnx.Module, "layers/0/up": nnx.Linear, "layers/1/up": nnx.Linear,
    }  # fmt: skip


def test_of_two_stacks_the_one_with_most_elements_is_divided_or_a_choice_asked_for():
    def of(rows):
        return shapes_of({"a/embed": (9, 4), "b/layers/w": (rows, 4, 4), "c/layers/w": (4, 4, 4), "d/w": (4, 9)})

    assert assign(of(8), 4).stages == (0, None, 3, 3)
    with pytest.raises(
        ValueError, match=r"the 4 rows of .*'b', the 4 rows of .*'c'\. split='b' gives every stage as many"
    ):
        assign(of(4), 4)
    assert assign(of(4), 4, split="c/layers").stages == (0, 3, None, 3)


@pytest.mark.parametrize(
    ("stages", "split", "said"),
    [
        (
            4,
            None,
            r"no repeated blocks .*stack of blocks: the 6 rows of the parameters of 'layers'\..* a multiple of 4$",
        ),
        (4, "layers", r"the 6 rows of the parameters of 'layers' do not divide into 4 stages"),
        (2, "nothing", r"split='nothing' names no module with parameters"),
        (2, "norm/scale", r"names no module"),
        (2, "", r"names no module"),
    ],
)
def test_stacks_that_do_not_divide_are_refused_with_what_there_is(stages, split, said):
    with pytest.raises(ValueError, match=said):
        assign(shapes_of(SHAPES), stages, split=split)


def test_a_module_whose_parameters_have_other_sizes_is_no_stack():
    with pytest.raises(ValueError, match=r"all stacked along dim 0.*layers/other \[5\]"):
        assign(shapes_of({**SHAPES, "layers/other": (5,)}), 2, split="layers")
    with pytest.raises(ValueError, match=r"module paths such as .*stacked, such as 'layers'"):
        ax.Pipelined(split=3)


@pytest.mark.slow
def test_an_optimizer_that_works_on_matrices_updates_gathered_ones():
    pipe = lambda **own: ax.Pipeline(
        Loops(by_number), mesh_of(pipe=2), num_microbatches=2, schedule="interleaved", **own
    )
    with pytest.raises(ValueError, match=r"muon.*update=\"whole\""):
        pipe().trainer(optax.contrib.muon(0.1), loss_of)
    tx = optax.adafactor(0.1, min_dim_size_to_factor=2)
    trainer, model = pipe(update="whole").trainer(tx, loss_of), Loops(by_number)
    plain = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for seed in range(2):
        loss, grads = nnx.value_and_grad(loss_of)(model, tokens(8, seed))
        plain.update(model, grads)
        assert float(trainer.step(tokens(8, seed))["loss"]) == pytest.approx(float(loss), abs=1e-7)


@pytest.mark.slow
def test_checkpoints_go_from_a_stack_in_a_pipeline_to_other_plans_and_back(tmp_path):
    batches = [tokens(8, seed) for seed in range(2)]
    made = {
        "interleaved": lambda: ax.Pipeline(
            Stacked(8, nnx.Rngs(0)), mesh_of(pipe=2, fsdp=2), num_microbatches=2, schedule="interleaved", gather="tick"
        ),
        "four stages": lambda: ax.Pipeline(Stacked(8, nnx.Rngs(0)), mesh_of(pipe=4), num_microbatches=2),
        "fsdp": lambda: ax.parallelize(Stacked(8, nnx.Rngs(0)), mesh_of(fsdp=4), ax.Plan(accumulate=2)),
    }
    train = lambda name: made[name]().trainer(optax.adamw(1e-2), loss_of, ema=0.9)
    folders = {}
    for name in ("interleaved", "fsdp"):
        trainer = train(name)
        for batch in batches:
            trainer.step(batch)
        ax.save(folders.setdefault(name, tmp_path / name), trainer)
    for name, folder in folders.items():
        params = set()
        for other in made:
            trainer = train(other)
            ax.restore(folder, trainer)
            arrays = {path: np.asarray(x) for path, x in trainer.model.state_dict().items() if "rng" not in path}
            params.add(tuple((path, x.tobytes()) for path, x in sorted(arrays.items()) if x.dtype != object))
        assert len(params) == 1, name


@pytest.mark.slow
def test_the_librarys_own_stack_of_layers_runs():
    model = config(LLAMA, num_layers=4, scan_layers=True)
    batch = tokens(8)
    plain, pipe = (
        Transformer(model, rngs=nnx.Rngs(0)),
        ax.Pipeline(Transformer(model, rngs=nnx.Rngs(0)), mesh_of(pipe=2, fsdp=2), num_microbatches=2),
    )
    assert float(pipe.value_and_grad(loss_of)(batch)[0]) == pytest.approx(float(loss_of(plain, batch)), abs=1e-5)
    np.testing.assert_allclose(pipe(batch["x"]), plain(batch["x"]), atol=1e-5)
