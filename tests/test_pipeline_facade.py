"""`Pipeline` as users meet it: what it shows, what it refuses, where parameters rest, what its program communicates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from meshes import mesh_of
from pipeline_models import Head, Hidden, Language, chain
from plan_models import F64, DropoutMLP, linear, mean_loss, regression, token_loss, tokens

import axonml_jax as ax
from axonml_jax.cli.tasks import loss_fn as text_loss
from axonml_jax.ledger.count import collectives_in
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.pipeline.assign import LinenChain
from axonml_jax.testing.equality import assert_equals_single_device, assert_trees_close
from axonml_jax.training.run_state import abstract_state


@pytest.fixture(scope="module")
def pipe():
    return ax.Pipeline(Language(4, nnx.Rngs(0)), mesh_of(data=2, pipe=2), num_microbatches=4)


@pytest.fixture(scope="module")
def ddp():
    return ax.DDP(Language(4, nnx.Rngs(0)), mesh_of(data=2))


@pytest.mark.slow
def test_forward_loss_gradients_and_evaluation_are_those_of_data_parallelism(pipe, ddp):
    batch = tokens(16)
    np.testing.assert_allclose(pipe(batch["x"]), ddp(batch["x"]), atol=1e-12)
    loss = lambda model, batch: token_loss(model, batch)[0]
    got, wanted = pipe.value_and_grad(loss)(batch), ddp.value_and_grad(loss)(batch)
    assert_trees_close(got, wanted, "loss and gradients")
    assert pipe.trainer(optax.sgd(0.1), loss).evaluate(batch)["loss"] == pytest.approx(float(wanted[0]), abs=1e-12)
    for norm_type in (2.0, float("inf")):
        clipped, norm = pipe.clip_grad_norm(got[1], 0.01, norm_type)
        same, as_much = ddp.clip_grad_norm(wanted[1], 0.01, norm_type)
        assert float(norm) == pytest.approx(float(as_much), abs=1e-12)
        assert_trees_close(clipped, same, "clipped")


def test_users_see_the_models_tree_and_may_replace_it(pipe, ddp):
    assert_trees_close(pipe.parameters(), ddp.parameters(), "parameters")
    before = pipe.state_dict()
    assert list(before) == list(ddp.state_dict())
    pipe.set_parameters(jax.tree.map(lambda x: x + 1, pipe.parameters()))
    assert float(pipe.module.scale[...]) == 2.5
    assert pipe.load_state_dict(before) == ([], [])
    assert_trees_close(pipe.parameters(), ddp.parameters(), "parameters")


def test_it_says_what_runs_where(pipe):
    assert (pipe.num_stages, pipe.schedule) == (2, ax.PipelineSchedule.ONE_F_ONE_B)
    assert pipe.timetable.num_microbatches == 4 and "0F0" in str(pipe.timetable)
    where = pipe.stage_of
    assert where["embed/embedding"] == where["blocks/1/kernel"] == 0
    assert where["blocks/2/bias"] == where["norm/scale"] == 1


def test_a_device_holds_its_own_stages_and_padding(pipe):
    layers = nnx.List([linear(64, 64, nnx.Rngs(0)) for _ in range(8)])
    trainer = ax.Pipeline.from_modules(list(layers), mesh_of(pipe=8)).trainer(optax.adam(1e-3), mean_loss)
    held = [x for x in jax.tree.leaves(trainer.state) if x.size > 64]
    own = [x.addressable_shards[0].data.size for x in held]
    assert own == 3 * [64 * 65]  # one stage's parameters, and two moments of them
    sizes = dict.fromkeys(range(2), 0)
    for name, leaf in pipe.state_dict().items():
        sizes[pipe.stage_of[name]] += leaf.size
    (resting,) = jax.tree.leaves(pipe.variables.params)
    assert resting.addressable_shards[0].data.size == max(sizes.values())
    held = pipe.memory_estimate()
    assert (held.param_bytes, held.grad_bytes, held.optim_bytes) == tuple(
        8 * n * max(sizes.values()) for n in (1, 1, 2)
    )
    assert pipe.peak_activations.allocated == 3 and pipe.peak_activations.classic == (2, 1)
    for leaf in jax.tree.leaves(pipe.parameters()):  # nor is any array whole on a device where it can be split
        assert leaf.size < 16 or leaf.addressable_shards[0].data.size < leaf.size


def test_two_shifts_per_tick_and_data_once_per_step(pipe):
    trainer = pipe.trainer(optax.adam(1e-2), token_loss, max_grad_norm=1.0)
    found = collectives_in(trainer.train_step, trainer.state, tokens(16))
    per_tick = [entry for entry in found if entry.in_loop]
    assert {entry.kind for entry in per_tick} == {"permute"} and len(per_tick) == 2
    assert {entry.count for entry in per_tick} == {pipe.timetable.num_ticks}
    gradients = [entry for entry in found if "data" in entry.axes and entry.label == "gradients"]
    assert len(gradients) == 1 and not gradients[0].in_loop


def test_the_first_state_has_the_shapes_that_are_known_beforehand():
    pipe = ax.Pipeline(Language(2, nnx.Rngs(0)), mesh_of(pipe=2), precision="bf16", cpu_offload="full")
    state = pipe.trainer(tx := optax.adam(1e-2), token_loss).state
    resting = jax.tree.leaves((state.params, state.opt_state["stages"]))
    assert {leaf.sharding.memory_kind for leaf in resting} == {"pinned_host"}
    known = abstract_state(pipe._functional.shapes, tx, pipe._placement)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), known) == jax.tree.map(lambda x: (x.shape, x.dtype), state)


@pytest.mark.slow
def test_modules_one_by_one_in_either_kind_and_stages_on_devices():
    rngs = nnx.Rngs(1)
    modules = [Hidden(5, 7, rngs), Hidden(7, 4, rngs), Head(4, rngs)]
    pipe = ax.Pipeline.from_modules(modules, mesh_of(pipe=3), num_microbatches=2)
    batch = regression(8)
    trainer = pipe.trainer(optax.adam(1e-2), mean_loss)
    losses = [float(trainer.step(batch)["loss"]) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert set(pipe.state_dict()) >= {"stages/0/layer/kernel", "stages/2/norm/mean"}
    joined = [ax.PipelineStage(module, device) for module, device in zip(modules, (0, 0, 1), strict=True)]
    assert ax.Pipeline(joined, mesh_of(pipe=2)).num_stages == 2
    dense = [linen.Dense(4), linen.Dense(3)]
    x = np.ones((4, 5), np.float32)
    variables = [dense[0].init(jax.random.key(0), x), dense[1].init(jax.random.key(1), x[:, :4])]
    pipe = ax.Pipeline(dense, mesh_of(pipe=2), num_microbatches=2, params=variables)
    wanted = dense[1].apply(variables[1], dense[0].apply(variables[0], x))
    np.testing.assert_allclose(pipe(x), wanted, rtol=1e-5)


def test_a_model_made_on_its_devices_equals_one_that_is_given():
    made = ax.Pipeline(lambda: Language(4, nnx.Rngs(0)), mesh_of(pipe=4))
    given = ax.Pipeline(Language(4, nnx.Rngs(0)), mesh_of(pipe=4))
    assert_trees_close(made.parameters(), given.parameters(), "parameters")
    assert made.stage_of == given.stage_of


def twice(model, batch):
    """Calls the model twice, once inside a transformation, and reads parameters."""
    decay = sum(jnp.sum(block.kernel[...] ** 2) for block in model.blocks)
    both = token_loss(model, batch)[0], token_loss(model, batch | {"x": batch["x"][:, ::-1]})[0]
    return both[0].value + jax.checkpoint(lambda w: both[1].value * w)(0.5) + 0.01 * decay


def language_model(degrees, check_vma=False, **options):
    """The reference transformer, tied, whose layers split over more axes."""
    sizes = {
        "vocab_size": 16,
        "num_layers": 2,
        "hidden_size": 8,
        "num_heads": 2,
        "mlp_hidden_size": 16,
        "max_length": 4,
    }
    config = TransformerConfig(**sizes, tie_embeddings=True, param_dtype="float64", **options)
    ids = np.random.default_rng(0).integers(0, 16, (16, 5)).astype(np.int32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    plan = ax.Plan(pipe=PIPE, check_vma=check_vma)
    return Transformer(config, rngs=nnx.Rngs(0)), text_loss, batch, plan, {"mesh": mesh_of(**degrees)}


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


PIPE = ax.Pipelined(num_microbatches=2)
EQUAL = {
    "twice": lambda: (Language(2, nnx.Rngs(0)), twice, tokens(8) | {"keep": np.ones((8, 4))}, ax.Plan(pipe=PIPE), {}),
    "masked": lambda: (
        chain(2),
        mean_loss,
        regression(8),
        ax.Plan(pipe=PIPE),
        {
            "tx": optax.chain(optax.masked(optax.add_decayed_weights(0.1), matrices), optax.adam(1e-2)),
            "trainable": ["stages/0", "stages/1/last"],
        },
    ),
    "whole": lambda: (
        chain(2),
        mean_loss,
        regression(8),
        ax.Plan(pipe=PIPE, update="whole"),
        {"tx": optax.chain(optax.clip_by_global_norm(0.1), optax.adafactor(0.01, min_dim_size_to_factor=2))},
    ),
    "tensor": lambda: language_model({"data": 2, "pipe": 2, "tensor": 2}, check_vma=True),
    "grid": lambda: language_model({"pipe": 2, "depth": 2, "row": 2}, split="grid"),
    "bf16": lambda: (
        chain(2),
        mean_loss,
        regression(8),
        ax.Plan(pipe=PIPE, precision="bf16", offload="full"),
        {"max_grad_norm": 0.3},
    ),
}


@pytest.mark.parametrize("case", EQUAL)
def test_losses_optimizers_and_precisions_of_every_kind_equal_one_device(case):
    model, loss_fn, batch, plan, options = EQUAL[case]()
    assert_equals_single_device(model, loss_fn, batch, plan, **{"mesh": mesh_of(pipe=2), "steps": 2, **options})


def test_optimizers_that_mix_elements_are_refused_where_a_stage_is_sharded_and_named_with_the_pipelines_own_remedy():
    pipe, tx = ax.Pipeline(chain(2), mesh_of(pipe=2, fsdp=2)), optax.adafactor(0.01, min_dim_size_to_factor=2)
    words = r"scale_by_factored_rms \(of optax.adafactor\) .* not act element by element.* ax.Pipeline\(..., update=\"whole\"\)"
    with pytest.raises(ValueError, match=words):
        pipe.trainer(tx, mean_loss)


REFUSED = {
    "one rank": (
        lambda: ax.Pipeline(chain(2), mesh_of(pipe=1), schedule="interleaved", chunks=2),
        "on a mesh with pipe=1: INTERLEAVED_ONE_F_ONE_B: num_ranks=1 must be at least 2; .* take GPIPE",
    ),
    "no pipe axis": (lambda: ax.Pipeline(chain(2), mesh_of(data=2)), "lacks: use ax.make_mesh"),
    "no policy": (lambda: ax.parallelize(chain(2), mesh_of(pipe=2)), "but the plan has no pipe="),
    "no axis": (lambda: ax.parallelize(chain(2), mesh_of(data=2), ax.Plan(pipe=ax.Pipelined())), "no axis 'pipe'"),
    "too few blocks": (lambda: ax.Pipeline(Language(3, nnx.Rngs(0)), mesh_of(pipe=4)), "3 repeated blocks .* 4 stages"),
    "no blocks": (lambda: ax.Pipeline(DropoutMLP(nnx.Rngs(0)), mesh_of(pipe=2)), "no repeated blocks .* split="),
    "split": (
        lambda: ax.Pipeline(DropoutMLP(nnx.Rngs(0)), mesh_of(pipe=2), split=("middle",)),
        "split='middle' names no module with parameters",
    ),
    "modules": (lambda: ax.Pipeline.from_modules([Head(4, nnx.Rngs(0))] * 3, mesh_of(pipe=2)), "3 stages were given"),
    "kinds": (lambda: ax.Pipeline([Head(4, nnx.Rngs(0)), linen.Dense(3)], mesh_of(pipe=2)), "NNX modules, or Linen"),
    "variables": (lambda: ax.Pipeline([linen.Dense(3)] * 2, mesh_of(pipe=2)), "2 Linen modules hold no arrays"),
    "devices": (
        lambda: ax.Pipeline([ax.PipelineStage(chain(2), d) for d in (1, 0)], mesh_of(pipe=2)),
        r"devices \[1, 0\]: stages go round",
    ),
    "schedule": (lambda: ax.Pipeline(chain(2), mesh_of(pipe=2), schedule="2f2b"), "schedule='2f2b' is none of"),
    "chunks": (lambda: ax.Pipeline(chain(4), mesh_of(pipe=2)), "num_chunks=2 must be 1"),
    "microbatches": (
        lambda: ax.Pipelined(num_microbatches=0, chunks=-1, gather="x"),
        "num_microb.*=0.*chunks=-1.*gath",
    ),
    "plan": (
        lambda: ax.Plan(pipe=ax.Pipelined(), data=ax.Replicate(sync_strategy="no_sync")),
        "NO_SYNC lets every rank train a model of its own",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_the_remedy(case):
    make, words = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_uneven_microbatches_and_no_sync_are_refused(pipe):
    with pytest.raises(ValueError, match=r"4 microbatches = 8 parts(.|\n)*use 8 or 16 rows"):
        pipe.trainer(optax.sgd(0.1), token_loss).step(tokens(12))
    with pipe.no_sync(), pytest.raises(ValueError, match="the ranks of a pipeline each hold a part of one model"):
        pipe.value_and_grad(token_loss)(tokens(16))


class Echo(nnx.Module):
    """Reads in its first block what its last one changes."""

    def __init__(self, rngs):
        self.blocks = nnx.List([linear(5, 5, rngs) for _ in range(2)])
        self.echo = nnx.BatchStat(jnp.zeros((), F64))

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x)) + self.echo[...]
        self.echo[...] = x.mean()
        return x[:, :3]


def test_state_that_two_stages_need_is_refused_by_name():
    pipe = ax.Pipeline(Echo(nnx.Rngs(0)), mesh_of(pipe=2), num_microbatches=2)
    with pytest.raises(ValueError, match=r"one stage changes these states of the model and another reads them.*echo"):
        pipe.trainer(optax.sgd(0.1), mean_loss).step(regression(4))


def test_a_chain_outside_a_mesh_is_the_plain_model():
    model = LinenChain((linen.Dense(4), linen.Dense(3)), (1, 1))
    variables = model.init(jax.random.key(0), np.ones((2, 5)))
    assert model.apply(variables, np.ones((2, 5))).shape == (2, 3)
    assert chain(3)(np.ones((2, 5))).shape == (2, 3)
