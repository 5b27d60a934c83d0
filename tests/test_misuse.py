"""What is easily done wrong is answered by a sentence that helps, and by the line of the caller's own code."""

import copy
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from meshes import mesh_of
from plan_models import BatchNormNet, linear, mean_loss, regression

import axonml_jax as ax

BATCH = regression(8)


@pytest.fixture(scope="module")
def mesh():
    return ax.make_mesh(data=2, devices=jax.devices()[:2])


@pytest.fixture(scope="module")
def trainer(mesh):
    return ax.DDP(BatchNormNet(nnx.Rngs(0)), mesh).trainer(optax.sgd(0.1), mean_loss)


TRACED = {
    "a step": lambda t: jax.jit(t.step)(BATCH),
    "a step of a batch from outside": lambda t: jax.jit(lambda: t.step(BATCH)["loss"])(),
    "a scan of steps": lambda t: jax.lax.scan(lambda _, b: (0, t.step(b)["loss"]), 0, {"x": np.ones((2, 8, 5))}),
    "an evaluation": lambda t: jax.jit(t.evaluate)(BATCH),
    "a forward pass": lambda t: jax.jit(t.model)(BATCH["x"]),
    "gradients": lambda t: jax.jit(lambda: t.model.value_and_grad(mean_loss)(BATCH))(),
    "a gradient of a call": lambda t: jax.grad(lambda x: t.model(x).sum())(BATCH["x"]),
}


@pytest.mark.parametrize("what", TRACED)
def test_calls_inside_functions_that_jax_traces_are_refused_and_break_nothing(trainer, what):
    before = trainer.model.state_dict()
    with pytest.raises(
        TypeError, match=r"inside a function that JAX transforms.*call trainer\.step\(batch\) in a Python loop"
    ):
        TRACED[what](trainer)
    assert all(np.array_equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def loader(mesh):
    return ax.create_dataloader(np.ones((16, 5)), 8, mesh)


def test_a_loader_in_the_place_of_a_batch_is_named(trainer, mesh):
    for given, kind in (
        (loader(mesh), "DataLoader"),
        (iter([BATCH]), "list_iterator"),
        ((b for b in [BATCH]), "generator"),
    ):
        for call in (trainer.step, trainer.evaluate, trainer.trace):
            with pytest.raises(TypeError, match=f"a {kind} was given in the place of a batch: .*`for batch in loader"):
                call(given)
    with pytest.raises(TypeError, match=r"takes batches.*trainer\.evaluate takes one"):
        trainer.validate(BATCH)
    with pytest.raises(TypeError, match="takes batches"):
        trainer.validate(np.ones((8, 5)))


SHAPES = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCH)


def test_shapes_in_the_place_of_arrays_are_named_where_values_are_wanted(trainer):
    for call in (trainer.step, trainer.evaluate, trainer.model.value_and_grad(mean_loss)):
        with pytest.raises(
            TypeError, match=r"shapes without values .*: scale, w, x, y\. Steps.*; trainer\.trace\(batch\)"
        ):
            call(SHAPES)
    with pytest.raises(TypeError, match=r"shapes without values .*: x\. Steps"):
        trainer.step(BATCH | {"x": SHAPES["x"]})
    assert trainer.trace(SHAPES).jaxpr


def notes_of(error):
    """Ours; JAX adds one about its own frames."""
    return [note for note in getattr(error, "__notes__", []) if "batches" in note]


def test_batches_in_the_place_of_one_are_noted_where_the_loss_fails_on_them(trainer):
    for given in ([BATCH, BATCH], (BATCH, BATCH), [BATCH["x"]] * 2):
        with pytest.raises(TypeError) as caught:
            trainer.step(given)
        [note] = notes_of(caught.value)
        kind = type(given).__name__
        assert note.startswith(
            f"the loss was given a {kind} of 2 parts of the same shapes. If these are batches: a step takes one"
        )
    for given in ((BATCH["x"], BATCH["y"]), (BATCH["x"], BATCH["x"]), [BATCH["x"], BATCH["y"]]):  # inputs and labels
        with pytest.raises(TypeError) as caught:
            trainer.step(given)
        assert not notes_of(caught.value)


MODULE = linen.Dense(3, param_dtype=jnp.float64)
VARIABLES = {"params": {"kernel": np.ones((5, 3)), "bias": np.zeros(3)}}
APPLIED = {
    "its apply": (
        lambda model, x: model.apply(VARIABLES, x),
        AttributeError,
        r"\(Dense with.* no `apply`: call it, model\(x\)",
    ),
    "as variables": (
        lambda model, x: MODULE.apply(model, x),
        TypeError,
        r"no mapping of variables: call it, model\(x\)",
    ),
    "as params": (
        lambda model, x: MODULE.apply({"params": model}, x),
        TypeError,
        r"something other than variables.*call model\(x\)",
    ),
    "an entry": (
        lambda model, x: MODULE.apply(model["params"], x),
        TypeError,
        r"no mapping.*'params': call it, model\(x\)",
    ),
    "streams": (lambda model, x: model(x, rngs={"dropout": 0}), TypeError, r"leave rngs= out of model\(\.\.\.\)"),
    "collections": (lambda model, x: model(x, mutable=["a"]), TypeError, r"leave mutable= out of model\(\.\.\.\)"),
}


@pytest.mark.parametrize("how", APPLIED)
def test_a_linen_loss_that_applies_a_module_is_told_to_call_the_model(mesh, how):
    call, kind, words = APPLIED[how]
    loss = lambda model, batch: mean_loss(lambda x: call(model, x), batch)
    trainer = ax.DDP(MODULE, mesh, params=VARIABLES).trainer(optax.sgd(0.1), loss)
    with pytest.raises(kind, match=words) as caught:
        trainer.step(BATCH)
    assert "<lambda>" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_forgotten_simulated_devices_are_asked_after(monkeypatch):
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one)
    for degrees, needed in (({"data": 8}, 8), ({"fsdp": 4, "data": -1}, 4)):
        with pytest.raises(ValueError, match=rf"does not fit 1 devices.*Did you forget ax.fake_devices\({needed}\)"):
            ax.make_mesh(**degrees)
    for options in ({"data": 8, "devices": one}, {"data": 1, "fsdp": 0}):
        with pytest.raises(ValueError) as caught:
            ax.make_mesh(**options)
        assert "fake_devices" not in str(caught.value)


UNREAD = {
    "a module from outside": lambda model, batch: mean_loss(Two(), batch),
    "variables from outside": lambda model, batch: mean_loss(lambda x: MODULE.apply(VARIABLES, x), batch),
    "a stopped gradient": lambda model, batch: mean_loss(lambda x: jax.lax.stop_gradient(model(x)), batch),
}
UNREAD_UNDER = {
    "one device": ({"data": 1}, ax.Plan()),
    "one device, accumulated": ({"data": 1}, ax.Plan(accumulate=2)),
    "ddp": ({"data": 2}, ax.Plan()),
    "no_sync": ({"data": 2}, ax.Plan(data=ax.Replicate(sync_strategy="no_sync"))),
    "fsdp, typed, accumulated": ({"fsdp": 2}, ax.Plan(fsdp=ax.Shard(stage=3), check_vma=True, accumulate=2)),
    "pipeline": ({"pipe": 2}, ax.Plan(pipe=ax.Pipelined(num_microbatches=2))),
}


@pytest.mark.parametrize("plan", UNREAD_UNDER)
@pytest.mark.parametrize("loss", UNREAD)
def test_a_loss_that_nothing_trained_reaches_is_an_error_at_the_first_step(plan, loss, caplog):
    degrees, settings = UNREAD_UNDER[plan]
    trainer = ax.parallelize(Blocks(), mesh_of(degrees), settings).trainer(optax.sgd(0.1), UNREAD[loss])
    with pytest.raises(
        ValueError, match=r"no trained parameter reaches the loss.*must call the model that it is given"
    ):
        trainer.step(BATCH)
    assert trainer.state.step == 0  # before the first update


def test_a_trainer_is_not_copied_with_its_arrays(trainer):
    trainer.step(BATCH)
    with pytest.raises(TypeError, match=r"not copied with all .*again\.state = jax\.tree\.map\(jnp\.copy"):
        copy.deepcopy(trainer)


def test_an_unknown_option_of_a_trainer_is_refused_with_the_nearest_one(mesh):
    model = ax.DDP(Two(), mesh)
    with pytest.raises(TypeError, match=r"argument 'max_norm', did you mean 'max_grad_norm'\?"):
        model.trainer(optax.sgd(0.1), mean_loss, max_norm=1.0)
    with pytest.raises(TypeError, match=r"argument 'zzz': tx, loss_fn, accumulate, .* are known"):
        model.trainer(optax.sgd(0.1), mean_loss, zzz=1.0)


@pytest.mark.parametrize("loss", UNREAD)
def test_a_check_refuses_what_the_step_refuses(loss):
    trainer = ax.DDP(Blocks(), mesh_of({"data": 2})).trainer(optax.sgd(0.1), UNREAD[loss])
    with pytest.raises(ValueError, match="no trained parameter reaches the loss"):
        trainer.check(BATCH)


OUTSIDE = {
    "a part of the module given": lambda net: lambda model, x: net.blocks[1](model.blocks[0](x)),
    "as a teacher": lambda net: lambda model, x: model(x) - net(x),
    "a frozen part": lambda net: lambda model, x: model.blocks[1](net.blocks[0](x)),
    "another module of the same kind": lambda net: lambda model, x: Blocks().blocks[1](model.blocks[0](x)),
}


@pytest.mark.parametrize("plan", UNREAD_UNDER)
def test_parameters_that_a_loss_reads_from_outside_are_named_once(plan, caplog):
    degrees, settings = UNREAD_UNDER[plan]
    if settings.pipe is not None:
        pytest.skip("a loss that calls blocks by itself is no pipeline's")
    net, traced = Blocks(), []
    called = OUTSIDE["a part of the module given"](net)

    def loss(model, batch):
        traced.append(None)
        return mean_loss(lambda x: called(model, x), batch)

    trainer = ax.parallelize(net, mesh_of(degrees), settings).trainer(optax.sgd(0.1), loss)
    trainer.step(BATCH), trainer.step(BATCH)
    said = "the loss reads blocks/1/bias, blocks/1/kernel from a module outside of it"
    assert [said in each for each in caplog.messages] == [True]
    traced.clear()
    trainer.trace(BATCH)
    assert not traced  # what was looked at is the step's own trace


@pytest.mark.parametrize("loss", list(OUTSIDE)[1:])
def test_a_module_from_outside_that_is_meant_is_not_spoken_of(loss, caplog):
    net = Blocks()
    called = OUTSIDE[loss](net)
    frozen = [r"blocks/1"] if loss == "a frozen part" else None
    trainer = ax.DDP(net, mesh_of({"data": 2}), trainable=frozen).trainer(
        optax.sgd(0.1), lambda model, batch: mean_loss(lambda x: called(model, x), batch)
    )
    trainer.step(BATCH)
    assert trainer.check(BATCH).equal and not caplog.messages


def test_the_module_of_the_model_itself_is_outside_of_it_too(caplog):
    model = ax.DDP(Blocks(), mesh_of({"data": 2}))
    net = model.module
    trainer = model.trainer(
        optax.sgd(0.1), lambda model, batch: mean_loss(lambda x: net.blocks[1](model.blocks[0](x)), batch)
    )
    assert trainer.check(BATCH).equal
    assert ["blocks/1/bias, blocks/1/kernel from a module outside of it" in each for each in caplog.messages] == [True]


class Stopping(nnx.Module):
    def __init__(self):
        self.inner = Two()

    def __call__(self, x):
        return jax.lax.stop_gradient(self.inner(x))


def test_a_model_that_stops_its_own_gradients_is_an_error_at_the_first_step():
    for degrees in ({"data": 1}, {"data": 2}):
        trainer = ax.DDP(Stopping(), mesh_of(degrees)).trainer(optax.sgd(0.1), mean_loss)
        with pytest.raises(ValueError, match="no trained parameter reaches the loss"):
            trainer.step(BATCH)


def penalized(model, batch):
    """The model called under transformations, whose equations read no variable by name."""
    each = jax.lax.map(lambda x: jax.checkpoint(lambda x: mean_loss(lambda _: model(x[None]), batch)[0])(x), batch["x"])
    return jax.lax.cond(batch["x"].sum() < 1e9, lambda: each.mean(), lambda: 0.0)


@pytest.mark.parametrize("plan", ["one device", "ddp"])
def test_a_loss_that_calls_the_model_inside_of_loops_and_branches_reads_what_is_trained(plan):
    degrees, settings = UNREAD_UNDER[plan]
    trainer = ax.parallelize(Blocks(), mesh_of(degrees), settings).trainer(optax.sgd(0.1), penalized)
    assert trainer.step(BATCH)["grad_norm"] > 0


def test_a_loss_that_calls_the_model_inside_of_a_loop_over_rows_is_refused_in_microbatches():
    model = ax.parallelize(Blocks(), mesh_of({"data": 2}), ax.Plan(accumulate=2))
    trainer = model.trainer(optax.sgd(0.1), penalized)
    with pytest.raises(ValueError, match=r"the model's results of other microbatches: scan \(line \d+ of test_misuse"):
        trainer.step(BATCH)


@pytest.mark.parametrize("plan", UNREAD_UNDER)
def test_gradients_that_are_zero_of_this_batch_are_told_and_are_no_error(plan, caplog):
    degrees, settings = UNREAD_UNDER[plan]
    nothing = lambda model, batch: ax.WeightedMean(0.0 * mean_loss(model, batch)[0], 0.0)
    trainer = ax.parallelize(Blocks(), mesh_of(degrees), settings).trainer(optax.sgd(0.1), nothing)
    trainer.step(BATCH), trainer.step(BATCH)
    assert [each for each in caplog.messages if "zero everywhere, though parameters reach" in each] == caplog.messages
    assert len(caplog.messages) == 1


def test_gradients_are_looked_at_in_the_first_step_only(trainer, caplog, monkeypatch):
    asked = []
    monkeypatch.setattr("axonml_jax.facade.trainer._look_at", lambda trainer, norm, batch: asked.append(norm))
    fresh = trainer.model.trainer(optax.sgd(0.1), mean_loss)
    norm = fresh.step(BATCH)["grad_norm"]
    fresh.step(BATCH)
    assert len(asked) == 1 and asked[0] is norm and not caplog.messages


class Blocks(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([linear(5, 5, nnx.Rngs(0)), linear(5, 3, nnx.Rngs(0))])

    def __call__(self, x):
        return self.blocks[1](jnp.tanh(self.blocks[0](x)))


class Two(nnx.Module):
    def __init__(self):
        self.first, self.last = linear(5, 6, nnx.Rngs(0)), linear(6, 3, nnx.Rngs(0))

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


@pytest.mark.parametrize("facade", [ax.DDP, ax.FSDP])
def test_a_changed_module_that_is_not_the_one_that_trains_is_told(mesh, facade, caplog):
    module, mesh = Two(), ax.make_mesh(**{facade.__name__.lower().replace("ddp", "data"): 2}, devices=jax.devices()[:2])
    model = facade(module, mesh)
    nnx.jit(lambda module: module(BATCH["x"]))(module)  # other arrays of the same values
    trainer = model.trainer(optax.sgd(0.1), mean_loss)
    trainer.step(BATCH)
    assert not caplog.messages
    module.first.kernel[...] = jnp.zeros((5, 6))
    trainer.step(BATCH)
    assert not caplog.messages, "after the first step the two differ by training"
    model = facade(module, mesh)
    module.last.kernel[...] = 2 * module.last.kernel[...]
    model.trainer(optax.sgd(0.1), mean_loss).step(BATCH)
    assert "the Two that was given to the model was changed" in caplog.text and "copies of last/kernel. " in caplog.text
    caplog.clear()
    given = model.module
    model.state_dict()
    given = model.module
    given.first.kernel[...] += 1
    model(BATCH["x"])
    (message,) = caplog.messages
    assert "a module that model.module returned was changed" in message and "copies of first/kernel. " in message


def loss_with_a_fault(model, batch):
    return model(batch["x"]).no_such_thing()


FOLDED = {
    "step": lambda t: t.step(BATCH),
    "evaluate": lambda t: t.evaluate(BATCH),
    "validate": lambda t: t.validate([BATCH]),
    "trace": lambda t: t.trace(BATCH),
    "pure": lambda t: t.train_step(t.state, BATCH),
    "gradients": lambda t: t.model.value_and_grad(loss_with_a_fault)(BATCH),
}


@pytest.mark.parametrize("call", FOLDED)
@pytest.mark.parametrize("filtering", ["auto", "off"])
def test_an_error_in_a_loss_has_no_frames_of_the_library_above_it(mesh, call, filtering):
    trainer = ax.FSDP(Two(), ax.make_mesh(fsdp=2, devices=jax.devices()[:2])).trainer(optax.sgd(0.1), loss_with_a_fault)
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", filtering)
    try:
        with pytest.raises(AttributeError, match="no_such_thing") as caught:
            FOLDED[call](trainer)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    frames = traceback.extract_tb(caught.value.__traceback__)
    own = [frame for frame in frames if "axonml_jax/" in frame.filename and "/tests/" not in frame.filename]
    assert bool(own) is (filtering == "off")
    assert any(frame.name == "loss_with_a_fault" for frame in frames)
    notes = [note for note in getattr(caught.value, "__notes__", ()) if note.startswith("axonml_jax has left")]
    assert len(notes) == (filtering != "off")


def test_an_error_of_the_library_itself_keeps_its_frames(trainer):
    with pytest.raises(ValueError, match="multiple of 2") as caught:
        trainer.step(regression(7))
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "check_batch" and "step" in names


NUMBERS = {
    "item": lambda loss: (loss, {"now": loss.item()}),
    "float": lambda loss: (loss, {"now": float(loss)}),
    "numpy": lambda loss: (loss, {"now": np.log(np.asarray(loss))}),
    "if": lambda loss: loss if loss > 0 else -loss,
}


@pytest.mark.parametrize("how", NUMBERS)
def test_a_loss_that_wants_numbers_while_it_is_traced_is_told_what_to_write(mesh, how):
    loss = lambda model, batch: NUMBERS[how](mean_loss(model, batch)[0])
    trainer = ax.DDP(nnx.Linear(5, 3, rngs=nnx.Rngs(0)), mesh).trainer(optax.sgd(0.1), loss)
    with pytest.raises(jax.errors.JAXTypeError) as caught:
        trainer.step(BATCH)
    assert any("return metrics as arrays" in note for note in caught.value.__notes__)


def test_a_module_of_another_framework_is_refused_by_name(mesh):
    class Foreign:
        def state_dict(self):
            return {}

        def __call__(self, *args):
            raise AssertionError("called")

    with pytest.raises(TypeError, match=r"a model is a flax\.nnx\.Module, .* but a Foreign was given"):
        ax.DDP(Foreign(), mesh)


@pytest.mark.parametrize("strict", [True, False])
def test_values_of_which_no_name_is_the_models_are_refused_with_how_names_are(mesh, strict):
    model = ax.DDP(nnx.Linear(5, 3, rngs=nnx.Rngs(0)), mesh)
    before = model.state_dict()
    for values in ({"weight": np.ones((3, 5))}, {"module.kernel": np.ones((5, 3))}, {"model": before}):
        with pytest.raises(ValueError, match=r"none of the names is a name of the model\. .* paths such as 'bias'"):
            model.load_state_dict(values, strict=strict)
    assert model.load_state_dict({}, strict=False) == (["bias", "kernel"], [])
    assert model.load_state_dict({"kernel": np.ones((5, 3)), "a": 1}, strict=False) == (["bias"], ["a"])


def test_a_step_after_one_that_failed_says_that_its_state_is_lost_and_a_checkpoint_brings_it_back(tmp_path):
    breaks = False

    def number():
        if breaks:
            raise RuntimeError("no more numbers")
        return np.float32(1)

    def loss(model, x):
        return (model(x) ** 2).mean() * jax.pure_callback(number, jax.ShapeDtypeStruct((), jnp.float32))

    x = np.ones((8, 6), np.float32)
    trainer = ax.DDP(nnx.Linear(6, 3, rngs=nnx.Rngs(0)), mesh_of(data=2)).trainer(optax.adam(0.1), loss)
    trainer.step(x)
    ax.save(tmp_path / "kept", trainer)
    wanted = float(trainer.step(x)["loss"])
    breaks = True
    with pytest.raises(RuntimeError, match="no more numbers"):
        jax.block_until_ready(trainer.step(x))
    breaks = False
    with pytest.raises(RuntimeError, match="no more numbers") as said:
        trainer.step(x)
    assert (
        "the state that it was to make is lost: read a checkpoint (ax.restore(path, trainer))"
        in said.value.__notes__[-1]
    )
    ax.restore(tmp_path / "kept", trainer)
    np.testing.assert_allclose(trainer.step(x)["loss"], wanted, rtol=1e-6)
