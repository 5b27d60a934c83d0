"""A model that returns numbers of several rows, such as its own loss: the whole batch's, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from meshes import mesh_of
from plan_models import linear

import axonml_jax as ax

CE = optax.softmax_cross_entropy_with_integer_labels
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(8, 6)).astype("f"),
    "y": RNG.integers(0, 4, 8),
    "m": np.array([1, 1, 1, 1, 1, 0, 1, 0], "f"),
}


def masked(logits, b):
    return (CE(logits, b["y"]) * b["m"]).sum() / b["m"].sum()


def switched(logits, b):
    """A mean, and the load of each class times its mean probability, as routers have it."""
    p = jax.nn.softmax(logits)
    load = jax.nn.one_hot(logits.argmax(-1), 4).mean(0)
    return CE(logits, b["y"]).mean() + (load * p.mean(0)).sum()


INSIDE = {
    "mean": lambda logits, b: CE(logits, b["y"]).mean(),
    "masked mean": masked,
    "sum": lambda logits, b: CE(logits, b["y"]).sum(),
    "root of a mean": lambda logits, b: jnp.sqrt((CE(logits, b["y"]) ** 2).mean()),
    "worst": lambda logits, b: CE(logits, b["y"]).max(),
    "switched": switched,
    "by a number": lambda logits, b: CE(logits, b["y"]).sum() / 8,
}


class Net(nnx.Module):
    def __init__(self, inside, blocks=2, scanned=False):
        rngs = nnx.Rngs(0)
        make = lambda rngs: nnx.Linear(6, 6, rngs=rngs)
        self.scanned, self.inside, self.head = scanned, inside, nnx.Linear(6, 4, rngs=rngs)
        if scanned:
            self.blocks = nnx.vmap(make, in_axes=0)(rngs.split(blocks))
        else:
            self.blocks = nnx.List([make(rngs) for _ in range(blocks)])

    def __call__(self, x):
        if self.scanned:
            step = nnx.scan(lambda x, block: jnp.tanh(block(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return self.head(step(x, self.blocks))
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.head(x)

    def loss(self, b):
        return self.inside(self(b["x"]), b)

    def hits(self, b):
        return (self(b["x"]).argmax(-1) == b["y"]).sum()


class LinenNet(linen.Module):
    inside: object

    def setup(self):
        self.first, self.head = linen.Dense(6), linen.Dense(4)

    def __call__(self, x):
        return self.head(jnp.tanh(self.first(x)))

    def loss(self, b):
        return self.inside(self(b["x"]), b)

    def hits(self, b):
        return (self(b["x"]).argmax(-1) == b["y"]).sum()


def nnx_loss(model, b):
    return model.loss(b), {"hits": model.hits(b)}


def linen_loss(model, b):
    return model(b, method="loss"), {"hits": model(b, method="hits")}


def one_device(kind, inside):
    """Three steps' losses and counts, of the user's functions plainly called."""
    if kind == "linen":
        module = LinenNet(inside)
        params = module.init(jax.random.key(0), BATCH["x"])["params"]
        call = lambda params, name: module.apply({"params": params}, BATCH, method=name)
    else:
        graph, params = nnx.split(Net(inside, scanned=kind == "scanned"))
        call = lambda params, name: getattr(nnx.merge(graph, params), name)(BATCH)
    found = []
    for _ in range(3):
        value, grads = jax.value_and_grad(call)(params, "loss")
        found.append((float(value), int(call(params, "hits"))))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return found


def trainer_of(kind, inside, facade, degrees, **options):
    if kind == "linen":
        module = LinenNet(inside)
        variables = module.init(jax.random.key(0), BATCH["x"])
        return facade(module, mesh_of(**degrees), params=variables, **options), linen_loss
    return facade(Net(inside, scanned=kind == "scanned"), mesh_of(**degrees), **options), nnx_loss


def steps(model, loss, **options):
    trainer = model.trainer(optax.sgd(0.1), loss, **options)
    return [(float(m["loss"]), float(m["hits"])) for m in (trainer.step(BATCH) for _ in range(3))]


CASES = [
    (name, kind, plan, False) for name in INSIDE for kind in ("nnx", "scanned", "linen") for plan in ("ddp", "fsdp")
]
CASES += [(name, kind, "fsdp", True) for name in ("mean", "masked mean") for kind in ("nnx", "linen")]
PLANS = {"ddp": (ax.DDP, {"data": 4}), "fsdp": (ax.FSDP, {"data": 2, "fsdp": 2})}


@pytest.mark.parametrize(("name", "kind", "plan", "check_vma"), CASES)
def test_a_loss_inside_the_model_is_that_of_one_device(name, kind, plan, check_vma):
    facade, degrees = PLANS[plan]
    model, loss = trainer_of(kind, INSIDE[name], facade, degrees, check_vma=check_vma)
    np.testing.assert_allclose(steps(model, loss), one_device(kind, INSIDE[name]), rtol=1e-5)


@pytest.mark.parametrize("name", INSIDE)
def test_in_microbatches_and_beside_split_layers_what_is_no_mean_is_refused(name):
    alone = lambda model, b: model.loss(b)
    layers = {"data": 2, "tensor": 2}
    tensor = Net(INSIDE[name])
    ax.auto_parallelize(tensor, mesh_of(**layers))
    plans = [
        (ax.DDP(Net(INSIDE[name]), mesh_of(data=4)), {"accumulate": 2}),
        (ax.DDP(tensor, mesh_of(**layers)), {}),
    ]
    for model, options in plans:
        trainer = model.trainer(optax.sgd(0.1), alone, **options)
        if name == "mean":
            np.testing.assert_allclose(trainer.step(BATCH)["loss"], one_device("nnx", INSIDE[name])[0][0], rtol=1e-5)
            continue
        with pytest.raises(
            ValueError, match=r"return a number computed from many rows that is not a mean.*Return per-row values"
        ):
            trainer.step(BATCH)


def _penalty(model, b):
    return jnp.sqrt((jax.grad(lambda x: model(x).sum())(b["x"].astype(float)) ** 2).sum())


def _mapped(model, b):
    return masked(jax.vmap(model)(b["x"]), b)


def _changed(model, b):
    model.head.bias = nnx.Variable(model.head.bias[...] * b["m"].sum())
    return masked(model(b["x"]), b)


@pytest.mark.parametrize(
    "loss_fn, does",
    [
        (_penalty, r"differentiates or maps the model at \S+test_model_numbers.py:\d+ \(in <lambda>\)"),
        (_mapped, r"differentiates or maps the model at \S+test_model_numbers.py:\d+ \(in _mapped\)"),
        (_changed, r"changes the model's \S+.* at \S+test_model_numbers.py:\d+ \(in _changed\)"),
    ],
)
def test_in_microbatches_a_loss_is_refused_by_what_it_does_and_its_line(loss_fn, does):
    trainer = ax.DDP(Net(masked), mesh_of(data=4)).trainer(optax.sgd(0.1), loss_fn, accumulate=2)
    with pytest.raises(ValueError, match=f"^the loss {does}: with microbatches"):
        trainer.step(BATCH)


def _by_each_row(model, b):
    """The remedy that the refusal of a gradient penalty names."""
    slopes = jax.vmap(jax.grad(lambda row: model(row[None])[0, 0]))(b["x"].astype(float))
    return ((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2).mean()


def test_a_gradient_penalty_is_refused_in_microbatches_with_a_remedy_that_works():
    whole = lambda model, b: (
        (jnp.linalg.norm(jax.grad(lambda x: model(x).sum())(b["x"].astype(float)), axis=-1) - 1) ** 2
    ).mean()
    critic = lambda: nnx.Sequential(linear(6, 8, nnx.Rngs(0)), jnp.tanh, linear(8, 1, nnx.Rngs(1)))
    step = lambda loss: (
        ax.DDP(critic(), mesh_of(data=2)).trainer(optax.sgd(0.1), loss, accumulate=2).step(BATCH)["loss"]
    )
    with pytest.raises(ValueError, match=r"differentiates by the rows, do so one by one, jax.vmap\(jax.grad\("):
        step(whole)
    np.testing.assert_allclose(step(_by_each_row), whole(critic(), BATCH), rtol=1e-9)


def test_a_proven_mean_stays_one_call_of_the_model():
    of = lambda name: str(
        ax.DDP(Net(INSIDE[name]), mesh_of(data=4)).trainer(optax.sgd(0.1), lambda m, b: m.loss(b)).trace(BATCH).jaxpr
    ).count("psum")
    assert of("mean") < of("masked mean")


class Hidden(Net):
    """Rows beside a mean of hidden ones and a number of the weights, which loops over layers hand out."""

    def __call__(self, x):
        step = lambda h, kernel: ((made := jnp.tanh(h @ kernel)), (kernel, made))
        x, (kernels, hidden) = jax.lax.scan(step, x, jnp.stack([block.kernel[...] for block in self.blocks]))
        return self.head(x), (kernels**2).sum() + hidden.mean()


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_mean_beside_rows_is_known_to_be_one_in_both_modes(check_vma):
    """The suite makes warnings errors: none says that it is not known."""

    def loss(model, b):
        logits, number = model(b["x"])
        return CE(logits, b["y"]).mean() + number

    trainer = ax.DDP(Hidden(None), mesh_of(data=2), check_vma=check_vma).trainer(optax.sgd(0.1), loss, accumulate=2)
    np.testing.assert_allclose(trainer.step(BATCH)["loss"], loss(Hidden(None), BATCH), rtol=1e-5)


class Attends(nnx.Module):
    """A causal mask is whole in place and longer with more rows; a mean that is guarded is a mean."""

    def __init__(self, inside):
        rngs, self.inside = nnx.Rngs(0), inside
        self.attend = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)
        self.head = nnx.Linear(6, 4, rngs=rngs)

    def loss(self, b):
        x = jnp.stack([b["x"], b["x"][:, ::-1]], 1)
        x = self.attend(x, mask=nnx.make_causal_mask(x[..., 0]))
        return self.inside(self.head(x).mean(1), b)


GUARDED = lambda logits, b: jnp.nan_to_num(CE(logits, b["y"]).mean())


@pytest.mark.parametrize(("inside", "options"), [(masked, {}), (GUARDED, {}), (GUARDED, {"accumulate": 2})])
def test_masks_are_followed_and_a_guarded_mean_is_a_mean(inside, options):
    loss = lambda model, b: model.loss(b)
    batch = {name: np.concatenate([x, x[::-1]]) for name, x in BATCH.items()}
    trainer = ax.DDP(Attends(inside), mesh_of(data=4)).trainer(optax.sgd(0.1), loss, **options)
    np.testing.assert_allclose(trainer.step(batch)["loss"], loss(Attends(inside), batch), rtol=1e-5)


def test_a_number_of_the_rows_is_that_of_the_whole_batch():
    class Counting(Net):
        def rows(self, x):
            return jnp.asarray(x.shape[0], jnp.float32)

    loss = lambda model, b: (CE(model(b["x"]), b["y"]).mean() + 0.1 * (rows := model.rows(b["x"])), {"rows": rows})
    found = ax.DDP(Counting(None), mesh_of(data=4)).trainer(optax.sgd(0.1), loss).step(BATCH)
    np.testing.assert_allclose(found["loss"], loss(Counting(None), BATCH)[0], rtol=1e-5)
    assert found["rows"] == 8


class Routed(nnx.Module):
    """Rows beside a mean of the hidden ones, or what a router says, in 16 bits."""

    def __init__(self, kind, dtype):
        rngs = nnx.Rngs(0)
        self.first, self.head = nnx.Linear(6, 6, dtype=dtype, rngs=rngs), nnx.Linear(6, 4, dtype=dtype, rngs=rngs)
        self.experts = ax.ParallelMoE(6, 6, 2, dtype=dtype, rngs=rngs) if kind == "experts" else None

    def __call__(self, x):
        x = nnx.relu(self.first(x))
        if self.experts is None:
            return self.head(x), jnp.mean(x.astype(jnp.float32) ** 2)
        y, router = self.experts(x[None])
        return self.head(x + y[0]), router.load_balance


@pytest.mark.parametrize("kind", ["relu", "experts"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_number_beside_rows_of_a_model_in_16_bits(kind, dtype, accumulate):
    def loss_fn(model, b):
        logits, number = model(b["x"])
        return CE(logits.astype(jnp.float32), b["y"]).mean() + number

    if kind == "experts" and accumulate > 1:
        pytest.skip("a router's load is each microbatch's")
    trainer = ax.DDP(Routed(kind, dtype), mesh_of(data=2)).trainer(optax.sgd(0.1), loss_fn, accumulate=accumulate)
    graph, params, rest = nnx.split(Routed(kind, dtype), nnx.Param, ...)
    for _ in range(2):
        wanted, grads = jax.value_and_grad(lambda p: loss_fn(nnx.merge(graph, p, rest), BATCH))(params)
        np.testing.assert_allclose(trainer.step(BATCH)["loss"], wanted, rtol=2e-2)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def _rows_less_one(model, b):
    squares = jnp.square(model(b["x"]).astype(jnp.float16))
    return jnp.sum(squares) / jnp.asarray(squares.size - 1, jnp.float16)


def test_a_count_in_16_bits_is_held_to_more_than_its_own_rounding():
    batch = {"x": RNG.normal(size=(2048, 6)).astype("f")}
    trainer = ax.DDP(nnx.Linear(6, 1, rngs=nnx.Rngs(0)), mesh_of(data=4)).trainer(optax.sgd(0.1), _rows_less_one)
    wide = lambda x: np.asarray(x, np.float64)
    out = nnx.Linear(6, 1, rngs=nnx.Rngs(0))(batch["x"]).astype(jnp.float16)
    np.testing.assert_allclose(trainer.step(batch)["loss"], np.square(wide(out)).sum() / 2047, rtol=1e-3)
