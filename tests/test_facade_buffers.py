"""BatchNorm under DDP: joint statistics, or each rank's own with and without the broadcast of the first rank's buffers."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from plan_models import CASES, BatchNormNet, mean_loss, regression

import axonml_jax as ax
from axonml_jax.model.buffers import synchronize_linen, synchronize_nnx
from axonml_jax.training.single_device import LOW_PRECISION

RANKS, ROWS = 2, 8
OLD, NEW = 0.9, 0.1  # how much of the running averages stays, how much of a batch's statistics joins


@pytest.fixture(scope="module")
def mesh():
    return ax.make_mesh(data=RANKS, devices=jax.devices()[:RANKS])


def wrap(linen, mesh, **options):
    case = CASES["linen_batch_norm" if linen else "batch_norm"]
    return ax.DDP(case.model(), mesh, params=case.params(), **options)


def averages(ddp):
    """The running means and variances, {"mean": ..., "var": ...}, as they rest on the mesh."""
    state = ddp.variables.state
    return state["batch_stats"]["BatchNorm_0"] if "batch_stats" in state else state["norm"]


def expected(ddp, rows):
    """Running averages after one forward of `rows` on one device, in NumPy."""
    params = jax.tree.map(np.asarray, ddp.parameters())
    kernel = params["Dense_0"]["kernel"] if "Dense_0" in params else params["first"]["kernel"]
    h = rows @ (kernel[0] if kernel.ndim == 3 else kernel)
    return {"mean": NEW * h.mean(0), "var": OLD + NEW * h.var(0)}


def each_ranks(ddp, name):
    return [np.squeeze(np.asarray(shard.data)) for shard in averages(ddp)[name].addressable_shards]


def check(ddp, wanted):
    for name in ("mean", "var"):
        for got, want in zip(each_ranks(ddp, name), wanted, strict=True):
            np.testing.assert_allclose(got, want[name], rtol=1e-9, atol=1e-12)


WAYS = {
    "step": lambda ddp, batch: ddp.trainer(optax.sgd(0.1), mean_loss).step(batch),
    "value_and_grad": lambda ddp, batch: ddp.value_and_grad(mean_loss)(batch),
    "forward": lambda ddp, batch: ddp(batch["x"]),
}


PAIRS = pytest.mark.parametrize(
    "way, linen", [("step", False), ("step", True), ("value_and_grad", False), ("forward", True)]
)


@PAIRS
def test_global_statistics_are_those_of_one_device(mesh, way, linen):
    ddp, batch = wrap(linen, mesh), regression(ROWS)
    wanted = expected(ddp, batch["x"])
    WAYS[way](ddp, batch)
    check(ddp, [wanted] * RANKS)


@PAIRS
def test_local_statistics_become_the_first_ranks_everywhere(mesh, way, linen):
    ddp, batch = wrap(linen, mesh, batch_stats="local"), regression(ROWS)
    wanted = expected(ddp, batch["x"][: ROWS // RANKS])
    WAYS[way](ddp, batch)
    check(ddp, [wanted] * RANKS)
    assert len({shard.tobytes() for shard in each_ranks(ddp, "mean")}) == 1


@PAIRS
def test_local_statistics_stay_local_without_the_broadcast(mesh, way, linen):
    ddp, batch = wrap(linen, mesh, batch_stats="local", broadcast_buffers=False), regression(ROWS)
    wanted = [expected(ddp, rows) for rows in np.split(batch["x"], RANKS)]
    WAYS[way](ddp, batch)
    check(ddp, wanted)
    name = next(n for n in ddp.state_dict() if n.endswith("mean"))
    np.testing.assert_allclose(ddp.state_dict()[name], wanted[0]["mean"], rtol=1e-9)
    ddp.sync_parameters()
    check(ddp, [wanted[0]] * RANKS)


def test_accumulation_updates_the_averages_once_per_microbatch(mesh):
    ddp, batch = wrap(False, mesh), regression(ROWS)
    rows = np.split(batch["x"], 2 * RANKS)
    first, second = np.concatenate(rows[0::2]), np.concatenate(rows[1::2])  # of both ranks
    a, b = expected(ddp, first), expected(ddp, second)
    ddp.trainer(optax.sgd(0.1), mean_loss, accumulate=2).step(batch)
    check(ddp, [{"mean": OLD * a["mean"] + b["mean"], "var": OLD * a["var"] + b["var"] - OLD}] * RANKS)


class ComplexMean(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.mean = nnx.BatchStat(jnp.zeros(4, jnp.complex64))

    def __call__(self, x):
        self.mean[...] = (1 + 1j) * jnp.mean(x, axis=0)
        return self.linear(x)


class Doubling(nnx.Module):
    def __init__(self):
        self.linear, self.total = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.BatchStat(jnp.ones(4))

    def __call__(self, x):
        return self.linear(x)

    def after_update(self):  # a loop from zeros, which are the same on every rank
        self.total[...] = jax.lax.fori_loop(0, 2, lambda i, total: total + self.total[...], jnp.zeros(4))


def test_hooks_run_outside_of_a_step_as_in_it(mesh):
    ddp = ax.DDP(Doubling(), mesh, batch_stats="local", broadcast_buffers=False)
    ddp.trainer(optax.sgd(0.1), lambda model, x: jnp.mean(model(x) ** 2)).step(np.ones((ROWS, 4), np.float32))
    ddp.after_update()
    np.testing.assert_array_equal(ddp.state_dict()["total"], np.full(4, 4.0))


def test_complex_statistics_are_those_of_one_device(mesh):
    ddp, x = ax.DDP(ComplexMean(), mesh), np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    ddp.trainer(optax.sgd(0.1), lambda model, x: jnp.mean(model(x) ** 2)).step(x)
    np.testing.assert_allclose(ddp.state_dict()["mean"], (1 + 1j) * x.mean(0), rtol=1e-5, atol=1e-6)


def test_every_rank_of_independent_models_has_statistics_of_its_own(mesh):
    ddp, batch = wrap(False, mesh, sync_strategy="no_sync"), regression(ROWS)
    wanted = [expected(ddp, rows) for rows in np.split(batch["x"], RANKS)]
    WAYS["step"](ddp, batch)
    check(ddp, wanted)


def test_a_flag_without_effect_warns_once_with_the_remedy(mesh):
    with pytest.warns(UserWarning, match=r'broadcast_buffers=False has no effect with batch_stats="global".*"local"'):
        wrap(False, mesh, broadcast_buffers=False)
    wrap(False, mesh, batch_stats="local", broadcast_buffers=False)  # warnings are errors here


def test_a_batch_norm_that_names_its_own_axis_is_left_alone(mesh):
    model = BatchNormNet(nnx.Rngs(0))
    model.norm.axis_name = "data"
    ddp, batch = ax.DDP(model, mesh, batch_stats="local", broadcast_buffers=False), regression(ROWS)
    wanted = expected(ddp, batch["x"])
    WAYS["step"](ddp, batch)
    check(ddp, [wanted] * RANKS)


class LinenRows(linen.Module):
    """A BatchNorm that is called for every row and joins the rows, as `vmap` names them."""

    masked: bool = False

    @linen.compact
    def __call__(self, x):
        call = lambda norm, x: norm(x, mask=x > 0.5 if self.masked else None)
        shared = {"params": None, "batch_stats": None}
        rows = linen.vmap(call, variable_axes=shared, split_rngs={"params": False}, axis_name="rows")
        h = linen.Dense(6, use_bias=False, param_dtype=jnp.float64)(x)
        exact = {"param_dtype": jnp.float64, "force_float32_reductions": False}
        norm = linen.BatchNorm(use_running_average=False, momentum=OLD, axis_name="rows", **exact)
        return linen.Dense(3, param_dtype=jnp.float64)(rows(norm, h))


class Rows(BatchNormNet):
    def __init__(self, masked=False):
        super().__init__(nnx.Rngs(0))
        self.norm.axis_name, self.masked = "rows", masked

    def __call__(self, x):
        call = lambda norm, x: norm(x, mask=x > 0.5 if self.masked else None)
        return self.last(nnx.vmap(call, in_axes=(None, 0), axis_name="rows")(self.norm, self.first(x)[:, None])[:, 0])


@pytest.mark.parametrize("kind", [Rows, LinenRows])
def test_a_batch_norm_that_joins_the_rows_of_a_vmap_joins_those_of_all_ranks(mesh, kind):
    batch = regression(ROWS)
    params = LinenRows().init(jax.random.key(0), batch["x"]) if kind is LinenRows else None
    ddp = ax.DDP(kind(), mesh, params=params)
    wanted, trainer = expected(ddp, batch["x"]), ddp.trainer(optax.sgd(0.1), mean_loss)
    assert trainer.check(batch).equal
    trainer.step(batch)
    check(ddp, [wanted] * RANKS)
    with pytest.raises(
        ValueError, match=r"BatchNorm with mask= and an axis_name of a vmap would average over rows, data.*local"
    ):
        ax.DDP(kind(masked=True), mesh, params=params).trainer(optax.sgd(0.1), mean_loss).step(batch)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_masked_batch_norm_keeps_as_much_of_its_averages_as_momentum_says(kind):
    rng = np.random.default_rng(0)
    x, mask = rng.normal(2, 3, (6, 3)).astype(np.float32), rng.random((6, 1)) > 0.4
    counted, alone = x[mask[:, 0]], lambda total, axes: total  # of one rank
    if kind == "nnx":
        norm = nnx.BatchNorm(3, momentum=0.7, rngs=nnx.Rngs(0))
        norm.mean[...], norm.var[...] = jnp.full(3, 5, jnp.float32), jnp.full(3, 7, jnp.float32)
        synchronize_nnx(norm, ("data",), alone)
        norm(jnp.asarray(x), mask=mask)
        found = {"mean": norm.mean[...], "var": norm.var[...]}
    else:
        norm = linen.BatchNorm(use_running_average=False, momentum=0.7)
        variables = norm.init(jax.random.key(0), x)
        stats = {"mean": jnp.full(3, 5, jnp.float32), "var": jnp.full(3, 7, jnp.float32)}
        with synchronize_linen(("data",), alone):
            _, new = norm.apply({**variables, "batch_stats": stats}, x, mask=mask, mutable=["batch_stats"])
        found = new["batch_stats"]
    np.testing.assert_allclose(found["mean"], 0.7 * 5 + 0.3 * counted.mean(0), rtol=1e-5)
    np.testing.assert_allclose(found["var"], 0.7 * 7 + 0.3 * counted.var(0), rtol=1e-5)


@pytest.mark.parametrize("spelled", [{}, {"use_running_average": None}])
def test_a_masked_batch_norm_of_linen_that_is_made_for_evaluation_evaluates(spelled):
    x, mask = np.arange(6.0, dtype=np.float32).reshape(3, 2), np.array([[True], [True], [False]])
    norm = linen.BatchNorm(use_running_average=True)
    variables = norm.init(jax.random.key(0), x)
    with synchronize_linen(("data",), lambda total, axes: total):
        found, new = norm.apply(variables, x, mask=mask, mutable=["batch_stats"], **spelled)
    np.testing.assert_array_equal(found, norm.apply(variables, x, mask=mask, **spelled))
    jax.tree.map(np.testing.assert_array_equal, new["batch_stats"], variables["batch_stats"])


class Counted(nnx.Module):
    """State of two kinds: a number of calls, which all ranks have alike, and a mean, which each has of its own rows."""

    def __init__(self):
        self.calls, self.mean = nnx.BatchStat(jnp.zeros(())), nnx.BatchStat(jnp.zeros(5))
        self.dense = nnx.Linear(5, 3, rngs=nnx.Rngs(0), param_dtype=jnp.float64)

    def __call__(self, x):
        self.calls[...] += 1
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * x.mean(0)
        return self.dense(x)


def test_state_that_all_ranks_have_alike_goes_through_microbatches_beside_state_of_ranks(mesh):
    ddp, batch = ax.DDP(Counted(), mesh, batch_stats="local", check_vma=True), regression(ROWS)
    ddp.trainer(optax.sgd(0.1), mean_loss, accumulate=2).step(batch)
    first, second = np.split(batch["x"][: ROWS // RANKS], 2)
    assert float(ddp.variables.state["calls"]) == 1  # as on one device, where a step calls the model once
    np.testing.assert_allclose(ddp.variables.state["mean"], 0.25 * first.mean(0) + 0.5 * second.mean(0), rtol=1e-6)


class Remembers(nnx.Module):
    """The rows of the last call."""

    def __init__(self):
        self.last, self.dense = nnx.BatchStat(jnp.zeros((ROWS, 5))), nnx.Linear(5, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        self.last.set_value(x)
        return self.dense(x)


def test_state_with_rows_of_the_batch_is_refused(mesh):
    trainer = ax.DDP(Remembers(), mesh).trainer(optax.sgd(0.1), mean_loss)
    with pytest.raises(ValueError, match=r"last: \(\d+, 5\), now \(\d+, 5\)\nA model's state may not have rows"):
        trainer.step(regression(ROWS))


class Sowing(linen.Module):
    @linen.compact
    def __call__(self, x):
        h = linen.Dense(4, param_dtype=jnp.float64)(x)
        self.sow("intermediates", "h", h)
        self.sow("losses", "size", (h**2).mean())
        return linen.Dense(3, param_dtype=jnp.float64)(h)


def sowing_loss(model, batch):
    variables = {"params": model.params, **model.state}
    out, sown = Sowing().apply(variables, batch["x"], mutable=["intermediates", "losses"])
    return jnp.mean((out - batch["y"]) ** 2) + sown["losses"]["size"][-1] + sown["intermediates"]["h"][0].mean()


def test_what_a_linen_model_sows_is_no_state_and_is_read_in_the_loss(mesh):
    batch = regression(ROWS)
    variables = Sowing().init(jax.random.key(0), batch["x"])
    with pytest.raises(
        ValueError, match=r"Sowing adds losses/size/1 to its state.*Leave losses out.*mutable=\['losses'\]"
    ):
        ax.DDP(Sowing(), mesh, params=variables).trainer(optax.sgd(0.1), mean_loss).step(batch)
    del variables["losses"]
    ddp = ax.DDP(Sowing(), mesh, params=variables)  # with the intermediates
    assert not jax.tree.leaves(ddp.variables.state)
    for loss in (mean_loss, sowing_loss):
        assert ddp.trainer(optax.sgd(0.1), loss).check(batch).equal


def test_scales_that_gradients_overwrite_are_refused_by_name_before_anything_is_made(mesh):
    module = linen.Dense(4, dot_general_cls=linen.Fp8DotGeneral)
    init = lambda: module.init(jax.random.key(0), jnp.zeros((2, 16)))
    for params in (init, init()):
        with pytest.raises(ValueError, match=r"Dense has a collection '_overwrite_with_gradient'.*precision=\"fp8\""):
            ax.DDP(module, mesh, params=params)


class Normed(linen.Module):
    @linen.compact
    def __call__(self, x, train=True):
        x = linen.BatchNorm(use_running_average=not train, param_dtype=jnp.float64)(x)
        return linen.Dense(3, param_dtype=jnp.float64)(x)


WITHIN = {
    "jit": lambda call, x: jax.jit(call)(x),
    "checkpoint": lambda call, x: jax.checkpoint(call)(x),
    "grad": lambda call, x: call(x) * (jax.grad(lambda x: call(x).sum())(x) ** 2).sum(),
    "cond": lambda call, x: jax.lax.cond(x.sum() > 0, call, lambda x: 2 * call(x), x),
    "scan": lambda call, x: jax.lax.scan(lambda carry, x: (carry + call(x).mean(), None), 0.0, jnp.stack([x, x]))[0],
}


@pytest.mark.parametrize("name", WITHIN)
def test_a_call_within_a_function_of_jax_may_not_change_state(mesh, name):
    batch = regression(ROWS)
    variables = Normed().init(jax.random.key(0), batch["x"])
    of = lambda train: lambda model, b: jnp.mean((WITHIN[name](lambda x: model(x, train=train), b["x"]) - b["y"]) ** 2)
    trainer = lambda train: ax.DDP(Normed(), mesh, params=variables).trainer(optax.sgd(0.1), of(train))
    with pytest.raises(
        ValueError, match=r"(?s)change of its state there would be lost.*BatchNorm_0.*call it outside.*nn\.jit"
    ):
        trainer(True).step(batch)
    plain = of(False)(lambda x, train: Normed().apply(variables, x, train=train), batch)
    np.testing.assert_allclose(trainer(False).step(batch)["loss"], plain, rtol=1e-6)


class RematNormed(linen.Module):
    """Its statistics are handed through a lifted module, which makes new values of them though none changes."""

    @linen.compact
    def __call__(self, x):
        norm = linen.remat(linen.BatchNorm)(use_running_average=True, param_dtype=jnp.float64)
        return linen.Dense(3, param_dtype=jnp.float64)(norm(x))


@pytest.mark.parametrize("within", [jax.jit, jax.checkpoint, jax.vmap])
def test_statistics_that_stay_may_be_read_within_a_function_of_jax(mesh, within):
    batch = regression(ROWS)
    variables = RematNormed().init(jax.random.key(0), batch["x"])
    loss = lambda model, b: jnp.mean((within(lambda x: model(x))(b["x"]) - b["y"]) ** 2)
    trainer = ax.DDP(RematNormed(), mesh, params=variables).trainer(optax.sgd(0.1), loss)
    plain = loss(lambda x: RematNormed().apply(variables, x), batch)
    np.testing.assert_allclose(trainer.evaluate(batch)["loss"], plain, rtol=1e-6)
    np.testing.assert_allclose(trainer.step(batch)["loss"], plain, rtol=1e-6)


class PlainNumbers(nnx.Module):
    """A parameter and state that begin as numbers of Python."""

    def __init__(self, rngs):
        self.layer, self.scale = nnx.Linear(4, 4, rngs=rngs), nnx.Param(1.0)
        self.aux, self.calls = nnx.data(0.0), nnx.data(0)

    def __call__(self, x):
        y = self.layer(x) * self.scale
        self.aux, self.calls = jnp.mean(y**2), self.calls + 1
        return y


@pytest.mark.parametrize("face", [ax.DDP, ax.FSDP])
def test_numbers_of_python_are_parameters_and_state(mesh, face, tmp_path):
    def loss_fn(model, x):
        return jnp.mean((model(x) - 1) ** 2) + 0.1 * model.aux

    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    plain = PlainNumbers(nnx.Rngs(0))
    optimizer = nnx.Optimizer(plain, optax.sgd(0.1), wrt=nnx.Param)
    trainer = face(PlainNumbers(nnx.Rngs(0))).trainer(optax.sgd(0.1), loss_fn)
    for _ in range(2):
        loss, grads = nnx.value_and_grad(loss_fn)(plain, x)
        optimizer.update(plain, grads)
        np.testing.assert_allclose(trainer.step(x)["loss"], loss, rtol=1e-5)
    made = trainer.model.module
    assert int(made.calls) == 2
    np.testing.assert_allclose([made.aux, made.scale.get_value()], [plain.aux, plain.scale.get_value()], rtol=1e-5)
    made.calls = jnp.int32(made.calls)  # as it is without jax_enable_x64
    ax.save(tmp_path / "run", made)
    ax.restore(tmp_path / "run", again := PlainNumbers(nnx.Rngs(1)))
    assert again.calls == 2 and again.aux == made.aux


class PlainLinenNumbers(linen.Module):
    """A parameter and a variable that begin as numbers of Python."""

    @linen.compact
    def __call__(self, x):
        calls = self.variable("calls", "n", lambda: 0)
        if not self.is_initializing():
            calls.value = calls.value + 1
        return linen.Dense(4, param_dtype=jnp.float64)(x) * self.param("scale", lambda key: 1.5)


@pytest.mark.parametrize("face", [ax.DDP, ax.FSDP, ax.parallelize])
def test_numbers_of_python_are_variables_of_linen(face):
    def loss_fn(model, x):
        return jnp.mean((model(x) - 1) ** 2)

    x, module = regression(ROWS)["x"], PlainLinenNumbers()
    variables = module.init(jax.random.key(0), x)
    assert type(variables["params"]["scale"]) is float and type(variables["calls"]["n"]) is int
    trainer = face(module, params=variables).trainer(optax.sgd(0.1), loss_fn)
    apply = lambda params, x: module.apply({"params": params, "calls": {"n": 0}}, x, mutable="calls")[0]
    params = variables["params"]
    for _ in range(2):
        loss, grads = jax.value_and_grad(lambda p: loss_fn(lambda x: apply(p, x), x))(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        np.testing.assert_allclose(trainer.step(x)["loss"], loss, rtol=1e-6)
    held = trainer.model.module.variables
    np.testing.assert_allclose(held["params"]["scale"], params["scale"], rtol=1e-6)
    assert int(held["calls"]["n"]) == 2


@pytest.mark.parametrize("face", [ax.parallelize, ax.place])
def test_numbers_of_python_are_read_for_annotations(mesh, face):
    placed = face(PlainNumbers(nnx.Rngs(0)), mesh)
    assert placed(np.ones((2, 4), np.float32)).shape == (2, 4)


class Tempered(nnx.Module):
    """In 16 bits, with a scale that takes the dtype of what it meets, until an update gives it one."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(5, 3, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs)
        self.scale = nnx.Param(jnp.full(3, 1.5))

    def __call__(self, x):
        return self.layer(x) * self.scale


@pytest.mark.parametrize("face", [ax.DDP, ax.FSDP])
def test_arrays_without_a_dtype_of_their_own_train_in_16_bits(face):
    def loss_fn(model, x):
        losses = jax.nn.logsumexp(model(x), axis=-1)
        return (losses * (x[:, 0] > 0)).sum() / (x[:, 0] > 0).sum()

    x = regression(ROWS)["x"]
    plain = Tempered(nnx.Rngs(0))
    assert plain.scale.get_value().weak_type
    optimizer = nnx.Optimizer(plain, optax.sgd(0.1), wrt=nnx.Param)
    trainer = face(Tempered(nnx.Rngs(0))).trainer(optax.sgd(0.1), loss_fn)
    for _ in range(2):
        loss, grads = nnx.value_and_grad(loss_fn)(plain, x)
        optimizer.update(plain, grads)
        np.testing.assert_allclose(trainer.step(x)["loss"], loss, rtol=LOW_PRECISION)


class CenteredNorm(nnx.BatchNorm):
    pass


class ScaledNorm(nnx.BatchNorm):
    def __call__(self, x, **kwargs):
        return 3 * super().__call__(x, **kwargs)


@pytest.mark.parametrize("kind", [nnx.BatchNorm, CenteredNorm, ScaledNorm])
def test_a_users_own_batch_norm_takes_unequal_masks_as_one_device_does(mesh, kind):
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(2, 3, (ROWS, 4)).astype(np.float32), "mask": np.arange(ROWS)[:, None] < 5}

    class Net(nnx.Module):
        def __init__(self):
            self.norm = kind(4, rngs=nnx.Rngs(0))

        def __call__(self, x, mask):
            return self.norm(x, mask=mask)

    loss = lambda model, batch: jnp.mean(model(batch["x"], batch["mask"]) ** 4)
    alone, ddp = Net(), ax.DDP(Net(), mesh)
    wanted = loss(alone, batch)
    np.testing.assert_allclose(ddp.trainer(optax.sgd(0.1), loss).step(batch)["loss"], wanted, rtol=1e-5)
    for name in ("mean", "var"):
        np.testing.assert_allclose(ddp.state_dict()[f"norm/{name}"], getattr(alone.norm, name)[...], rtol=1e-5)


# State that a check compares with one device's


class Keeps(nnx.Module):
    """State of all kinds; no mean over rows are `rows`, `positive` and `largest`."""

    def __init__(self):
        rngs, zero = nnx.Rngs(0), lambda: nnx.Variable(jnp.zeros((), jnp.int32))
        self.dense, self.drop = nnx.Linear(5, 3, rngs=rngs, param_dtype=jnp.float64), nnx.Dropout(0.5, rngs=rngs)
        self.rows, self.positive, self.calls = zero(), zero(), zero()
        self.largest, self.mean = nnx.Variable(jnp.zeros(())), nnx.Variable(jnp.zeros(5))
        self.key = nnx.Variable(jax.random.key(0))

    def __call__(self, x):
        self.rows[...] += jnp.int32(x.shape[0])
        self.positive[...] += (x > 0).sum(dtype=jnp.int32)
        self.largest[...] = jnp.maximum(self.largest[...], x.max())
        self.calls[...] += jnp.int32(1)
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * x.mean(0)
        self.key.set_value(jax.random.split(self.key.get_value())[0])
        return self.drop(self.dense(x))


class Declares(Keeps):
    state_joins: ClassVar = {"rows": "sum", "positive": "sum", "largest": "max"}


class DeclaresFirst(Declares):
    state_joins: ClassVar = {"rows": "first", "positive": "sum", "largest": "max"}


class Spectral(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=False, param_dtype=jnp.float64, use_bias=False)(x)
        return linen.SpectralNorm(linen.Dense(3, param_dtype=jnp.float64))(x, update_stats=True)


CHECKED = {
    "rows": {"draws": "rows"},
    "typed": {"draws": "rows", "check_vma": True},
    "local": {"draws": "rows", "batch_stats": "local"},
    "local, apart": {"draws": "rows", "batch_stats": "local", "broadcast_buffers": False},
}


@pytest.mark.filterwarnings("ignore:the model's own state depends on the batch's rows")
@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("kind", [Keeps, Declares, DeclaresFirst])
def test_a_check_tells_of_state_that_is_another_on_one_device(mesh, kind, name):
    trainer = ax.parallelize(kind(), mesh, ax.Plan(**CHECKED[name])).trainer(optax.sgd(0.1), mean_loss)
    found = trainer.check(regression(ROWS))
    no_means = {"state/rows", "state/positive", "state/largest"} if kind is Keeps else set()
    local = CHECKED[name].get("batch_stats") == "local"
    assert set(found.differs) == (set() if local else no_means), str(found)
    first = {"state/rows"} if kind is DeclaresFirst else set()
    assert set(found.left_out) == first | (no_means | {"state/mean"} if local else set()), str(found)
    assert ("state_joins = {" in str(found)) is bool(found.differs) and "sort along" not in str(found)


@pytest.mark.parametrize("plan", [{"accumulate": 2}, {"accumulate": 2, "check_vma": True}, {}])
def test_a_check_takes_a_plans_microbatches_one_after_another(mesh, plan):
    model = Declares()
    model.drop = nnx.Dropout(0.0, rngs=nnx.Rngs(0))
    trainer = ax.parallelize(model, mesh, ax.Plan(**plan)).trainer(optax.sgd(0.1), mean_loss)
    found = trainer.check(regression(ROWS))
    assert found.equal and not found.left_out and found.compared >= 1 + 2 + 6, str(found)


def test_a_check_finds_norms_with_statistics_equal(mesh):
    batch = regression(ROWS)
    ddp = ax.DDP(Spectral(), mesh, params=Spectral().init(jax.random.key(0), batch["x"]))
    assert ddp.trainer(optax.sgd(0.1), mean_loss).check(batch).equal
