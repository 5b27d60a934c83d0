"""Pipelines of models as people write them: compact and called without arguments, outputs of any structure, and factories."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, struct
from meshes import mesh_of
from pipeline_models import Language
from plan_models import F64, linear, regression, token_loss, tokens

import axonml_jax as ax
from axonml_jax.testing.equality import assert_equals_single_device


class Compact(linen.Module):
    """All in one compact call, whose first argument alone has no default."""

    @linen.compact
    def __call__(self, x, train=True):
        for _ in range(4):
            x = x + linen.Dropout(0.3)(jnp.tanh(linen.Dense(5, param_dtype=F64)(x)), deterministic=not train)
        return linen.Dense(3, param_dtype=F64)(x)


@struct.dataclass
class Output:
    """What Hugging Face calls a ModelOutput: fields that may be missing."""

    logits: jax.Array
    hidden: tuple | None = None
    facts: dict | None = None


class Block(linen.Module):
    @linen.compact
    def __call__(self, x, deterministic=True):
        return x + linen.Dropout(0.3)(jnp.tanh(linen.Dense(5, param_dtype=F64)(x)), deterministic=deterministic)


class Defaults(linen.Module):
    """Every argument has a default, as in Hugging Face's modules; the result is a dataclass."""

    def setup(self):
        self.blocks, self.head = [Block() for _ in range(4)], linen.Dense(3, param_dtype=F64)

    def __call__(self, x=None, scale=1.0, *, deterministic=True, hidden=False):
        seen = []
        for block in self.blocks:
            seen.append(x := block(x, deterministic=deterministic))
        return Output(self.head(x) * scale, tuple(seen) if hidden else None, {"mean": x.mean(), "blocks": 4})


def compact_loss(model, batch):
    return jnp.mean((model(batch["x"], train=True) - batch["y"]) ** 2)


def defaults_loss(model, batch):
    out = model(x=batch["x"], deterministic=False, hidden=True)
    loss = jnp.mean((out.logits - batch["y"]) ** 2) + sum(jnp.mean(h**2) for h in out.hidden)
    return loss, {"mean": out.facts["mean"]}


def variables_of(module):
    return module.init(jax.random.key(0), np.zeros((1, 5)))


@pytest.fixture(scope="module")
def mesh():
    return ax.make_mesh(data=2, pipe=2, devices=jax.devices()[:4])


@pytest.mark.parametrize(
    ("module", "loss_fn", "schedule"),
    [
        (Compact(), compact_loss, "1f1b"),
        (Compact(), compact_loss, "interleaved"),
        (Defaults(), defaults_loss, "gpipe"),
        (Defaults(), defaults_loss, "zero-bubble"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_linen_module_is_no_factory_whatever_arguments_it_takes(module, loss_fn, schedule, mesh):
    chunks = 2 if schedule == "interleaved" else 1
    plan = ax.Plan(pipe=ax.Pipelined(schedule=schedule, num_microbatches=2, chunks=chunks))
    options = {"mesh": mesh, "params": variables_of(module), "steps": 2}
    assert_equals_single_device(module, loss_fn, regression(8), plan, **options)


def test_a_call_takes_keywords_and_returns_the_modules_own_structure(mesh):
    module, x = Defaults(), regression(8)["x"]
    pipe = ax.Pipeline(module, mesh, params=lambda: variables_of(module), num_microbatches=2)
    out, wanted = pipe(x=x, scale=0.5, hidden=True), module.apply(variables_of(module), x, 0.5, hidden=True)
    assert jax.tree.structure(out) == jax.tree.structure(wanted)
    assert out.facts["blocks"] == 4
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-12), out, wanted)


class Idle(nnx.Module):
    """An NNX module that can be called without arguments."""

    def __init__(self, rngs):
        self.blocks = nnx.List([linear(5, 5, rngs) for _ in range(2)])
        self.after = linear(5, 3, rngs)

    def __call__(self, x=None):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.after(x)


def language(num_blocks):
    return Language(num_blocks, nnx.Rngs(0))


class Maker:
    """An object that is called to make a model, and a method that is."""

    def __call__(self):
        return language(2)

    def make(self):
        return self()


FACTORIES = {
    "function": lambda: language(2),
    "partial": functools.partial(language, 2),
    "object": Maker(),
    "method": Maker().make,
    "module": language(2),
}


def test_whatever_makes_a_module_is_taken_and_divided_as_the_module_itself(mesh):
    pipes = {name: ax.Pipeline(model, mesh, num_microbatches=2) for name, model in FACTORIES.items()}
    assert len({tuple(pipe.stage_of.items()) for pipe in pipes.values()}) == 1
    losses = {
        name: pipe.trainer(optax.sgd(0.1), token_loss).evaluate(tokens(4))["loss"] for name, pipe in pipes.items()
    }
    assert len(set(map(float, losses.values()))) == 1
    idle = ax.Pipeline(
        Idle(nnx.Rngs(0)), mesh, num_microbatches=2
    )  # the order in which it was written, not of the alphabet
    assert idle.stage_of["after/kernel"] == 1 and idle(regression(4)["x"]).shape == (4, 3)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (Language, {}, "the class Language was given"),
        (lambda x: x, {}, "cannot be called so"),
        (lambda: Compact(), {}, "made a Compact: it must return a flax.nnx.Module"),
        (FACTORIES["function"], {"params": {}}, "makes its arrays too: leave params= out"),
        (Compact(), {}, "is a Linen module and holds no arrays"),
    ],
)
def test_what_is_neither_a_module_nor_makes_one_is_refused(model, options, words, mesh):
    with pytest.raises((TypeError, ValueError), match=words):
        ax.Pipeline(model, mesh, **options)


class Flat(linen.Module):
    """No block around what belongs together; in the alphabet all norms come first."""

    @linen.compact
    def __call__(self, x):
        for _ in range(4):
            x = linen.BatchNorm(use_running_average=False)(linen.Conv(4, (1,))(x))
        return linen.Dense(3)(x)


def flat_init():
    return Flat().init(jax.random.key(0), np.ones((2, 3, 4), np.float32))


@pytest.mark.parametrize(
    "params",
    [lambda: flat_init, flat_init, lambda: jax.jit(lambda: flat_init())],
    ids=["made", "arrays", "made under jit"],
)
def test_stages_of_a_flat_linen_model_follow_the_call(params):
    params = params()
    pipe = ax.Pipeline(Flat(), mesh_of(pipe=4), params=params, num_microbatches=2)
    called = [f"{kind}_{i}" for i in range(4) for kind in ("Conv", "BatchNorm")] + ["Dense_0"]
    place = lambda name: called.index(name.split("/")[0])
    stages = [stage for _, stage in sorted(pipe.stage_of.items(), key=lambda item: place(item[0]))]
    assert stages == sorted(stages) and set(stages) == {0, 1, 2, 3}


def test_parameters_that_were_sorted_are_said_to_tell_no_order():
    mesh = mesh_of(pipe=2)
    with pytest.warns(UserWarning, match=r"follow the names of BatchNorm_\*, Conv_\*: .*params=lambda: module\.init"):
        ax.Pipeline(Flat(), mesh, params=jax.jit(flat_init)(), num_microbatches=2)
    ax.Pipeline(Flat(), mesh, params=jax.jit(flat_init)(), split=("Conv_2",), num_microbatches=2)  # nothing to guess
