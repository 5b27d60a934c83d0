"""Scripts as users of JAX and Flax have them, with one changed line: idioms x plans, each held to the user's own plain loop."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import axonml_jax as ax
from axonml_jax.testing.equality import assert_trees_close

X = np.random.default_rng(0).normal(size=(16, 8, 8)).astype(np.float32)
BATCH = {"x": X, "y": np.tanh(X.sum(-1, keepdims=True))}
RULES = (("batch", "data"), ("mlp", "model"), ("embed", None))


def auto(shape, names):
    """A mesh of a user's with Auto axes."""
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def explicit(shape, names):
    """One as `jax.make_mesh` makes it."""
    return jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(names))


def guide(kind=auto):
    """The mesh of Flax's guide, of all devices."""
    return kind((2, 4), ("data", "model"))


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


# Placing values in the model's code


def constrained(x):
    return jax.lax.with_sharding_constraint(x, P("data", None, "model"))


def constrained_by_mesh(x):
    return jax.lax.with_sharding_constraint(x, NamedSharding(guide(), P("data", None, "model")))


def as_tunix(x):
    """As on an accelerator: on CPU its own returns x."""
    from jax.interpreters import pxla

    mesh = pxla.thread_resources.env.physical_mesh
    spec = P("data", None, "model")
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def as_maxtext(x):
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, P("data", None, "model"))


def as_bonsai(x):
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.sharding.reshard(x, P("data", None, None))


@jax.custom_vjp
def _halved(x):
    return x / 2


_halved.defvjp(lambda x: (constrained(x / 2), None), lambda _, g: (constrained(g / 2),))


def in_rules(x):
    """Constraints in a loop, in a branch, and in a derivative of the user's own."""
    x = jax.lax.fori_loop(0, 2, lambda _, x: constrained(x), x)
    x = jax.lax.cond(jnp.ones(()) < 0, lambda x: -x, constrained, x)
    return _halved(x) * 2


class Block(nnx.Module):
    """x + down(relu(up(x))), with attention in front, whose values a model places."""

    def __init__(self, rngs, place, attends=False, named=True):
        init = nnx.initializers.lecun_normal()
        over = lambda *names: nnx.with_partitioning(init, names) if named else init
        self.up = nnx.Linear(8, 16, kernel_init=over(None, "model"), rngs=rngs)
        self.down = nnx.Linear(16, 8, kernel_init=over("model", None), rngs=rngs)
        self.place, self.attends = nnx.static(place), attends

    def __call__(self, x):
        if self.attends:
            heads = x.reshape(*x.shape[:-1], 2, 4)
            x = x + jax.nn.dot_product_attention(heads, heads, heads, is_causal=True).reshape(x.shape)
        return x + self.down(self.place(jax.nn.relu(self.up(x))))


class Net(nnx.Module):
    """Blocks, and a head."""

    def __init__(self, rngs, place=lambda x: x, attends=False, named=True):
        self.blocks = nnx.List([Block(rngs, place, attends, named) for _ in range(2)])
        self.head = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ExplicitBlock(nnx.Module):
    """As Bonsai writes it: layers are told where their results lie."""

    def __init__(self, rngs):
        made = lambda n, m, *spec: nnx.Linear(
            n, m, kernel_metadata={"out_sharding": P(*spec)}, use_bias=False, rngs=rngs
        )
        self.up, self.down = made(8, 16, None, "model"), made(16, 8, "model", None)

    def __call__(self, x):
        x = as_bonsai(x)
        up = self.up(x, out_sharding=P("data", None, "model"))
        return x + self.down(nnx.silu(up), out_sharding=P("data", None, None))


class ExplicitNet(nnx.Module):
    """Blocks, and a product that is told."""

    def __init__(self, rngs):
        self.blocks = nnx.List([ExplicitBlock(rngs) for _ in range(2)])
        self.head = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (8, 1), out_sharding=P("model", None)))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return jnp.dot(x, self.head[...], out_sharding=P("data", None, None))


class Scanned(nnx.Module):
    """Flax's guide: layers stacked by `nnx.vmap` with metadata, run by `lax.scan`."""

    def __init__(self, rngs):
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def stack(rngs):
            return Block(rngs, constrained)

        self.blocks, self.head = stack(rngs.fork(split=2)), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(jax.lax.scan(lambda x, block: (block(x), None), x, self.blocks)[0])


class Normed(nnx.Module):
    """BatchNorm, dropout and a checkpointed block beside constraints."""

    def __init__(self, rngs):
        self.block, self.head = Block(rngs, constrained), nnx.Linear(8, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(8, use_running_average=False, rngs=rngs)

    def __call__(self, x):
        x = nnx.remat(lambda block, x: block(x))(self.block, x)
        return self.head(jax.lax.with_sharding_constraint(self.norm(x), P("data")))


class LinenNet(linen.Module):
    """Boxes with logical names, and logical constraints."""

    @linen.compact
    def __call__(self, x):
        for _ in range(2):
            init = linen.with_logical_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
            up = linen.with_logical_constraint(linen.Dense(16, kernel_init=init)(x), ("batch", None, "mlp"))
            x = x + linen.Dense(8)(linen.relu(up))
        return linen.Dense(1)(x)


@dataclass(frozen=True)
class Idiom:
    """A way to write a script.

    Attributes:
      make: the model, under `around`.
      around: what stands around making it; and around wrapping and stepping, with `all_around`.
      all_around: see there.
      explicit: its axes are Explicit.
      factory: the model is given as a function.
      attends: `make` takes whether the model attends to other positions.
      split: where stages of a pipeline begin; (): at blocks.
    """

    make: Callable[..., Any]
    around: Callable[[], Any] = contextlib.nullcontext
    all_around: bool = True
    explicit: bool = False
    factory: bool = False
    attends: bool = False
    split: tuple[str, ...] = ()


def placing(place):
    """A plain model whose values are placed."""
    return lambda attends=False: Net(nnx.Rngs(0), place, attends)


def set_guide(kind=auto):
    """`jax.set_mesh` of the guide's mesh."""
    return lambda: jax.set_mesh(guide(kind))


@contextlib.contextmanager
def with_rules():
    with jax.set_mesh(guide()), linen.logical_axis_rules(RULES):
        yield


def legacy():
    """`with mesh:`."""
    return guide()


def other_names():
    return jax.set_mesh(auto((4, 2), ("rows", "columns")))


def eagerly(make):
    """A model whose metadata names axes that no mesh around it has."""

    def made(*args):
        with nnx.use_eager_sharding(False):
            return make(*args)

    return made


IDIOMS = {
    "set_mesh, Explicit": Idiom(placing(lambda x: x), set_guide(explicit), attends=True),
    "set_mesh, Auto, names of one's own": Idiom(eagerly(placing(lambda x: x)), other_names, attends=True),
    "with mesh": Idiom(eagerly(placing(lambda x: x)), legacy, attends=True),
    "constraint, set_mesh": Idiom(placing(constrained), set_guide(), attends=True),
    "constraint, set_mesh around the model": Idiom(placing(constrained), set_guide(), all_around=False),
    "constraint by NamedSharding": Idiom(eagerly(placing(constrained_by_mesh)), attends=True),
    "Tunix's shard(), with mesh": Idiom(eagerly(placing(as_tunix)), legacy),
    "MaxText's, set_mesh": Idiom(placing(as_maxtext), set_guide()),
    "constraints in loops, branches, rules": Idiom(placing(in_rules), set_guide()),
    "Flax's guide": Idiom(lambda: Scanned(nnx.Rngs(0)), set_guide(), split=("head",)),
    "BatchNorm, remat, constraints": Idiom(lambda: Normed(nnx.Rngs(0)), set_guide()),
    "Explicit: reshard, out_sharding": Idiom(lambda: ExplicitNet(nnx.Rngs(0)), set_guide(explicit), explicit=True),
    "Explicit, set_mesh around the model": Idiom(
        lambda: ExplicitNet(nnx.Rngs(0)), set_guide(explicit), False, explicit=True
    ),
    "a function that makes the model": Idiom(placing(constrained), set_guide(), factory=True),
    "Linen: logical constraints and boxes": Idiom(LinenNet, with_rules),
}


def hybrid(model, **options):
    return ax.FSDP(model, ax.make_mesh(data=2, fsdp=4), sharding_strategy="hybrid_shard", **options)


def by_rules(model, **options):
    """On the user's own mesh, whose names are his."""
    stacked = (None,) if isinstance(model, Scanned) else ()
    rules = {
        ".*up/kernel|Dense_[02]/kernel": P(*stacked, None, "tensor"),
        ".*down/kernel|Dense_[13]/kernel": P(*stacked, "tensor"),
        ".*": P(),
    }
    return ax.TensorParallel(model, guide(), rules=rules, **options)


PLANS: dict[str, Callable[..., Any]] = {
    "DDP": lambda model, **options: ax.DDP(model, ax.make_mesh(data=8), **options),
    "FSDP": lambda model, **options: ax.FSDP(model, ax.make_mesh(fsdp=8), **options),
    "hybrid": hybrid,
    "path rules": by_rules,
    "pipeline": lambda model, **options: ax.Pipeline(
        model, ax.make_mesh(data=4, pipe=2), num_microbatches=2, **options
    ),
    "context": lambda model, **options: ax.ContextParallel(model, ax.make_mesh(data=2, context=4), **options),
}


def made(idiom: Idiom, attends: bool):
    """A model and its variables, where it is Linen's."""
    model = idiom.make(True) if attends and idiom.attends else idiom.make()
    return model, model.init(jax.random.key(0), X) if isinstance(model, linen.Module) else None


def on_one_device(idiom: Idiom, attends: bool, steps: int = 3):
    """Losses of the user's own loop, on a mesh of one device with his names."""
    names = ("data", "model", "rows", "columns")
    kind = explicit if idiom.explicit else auto
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(kind((1,) * 4, names)))
        stack.enter_context(linen.logical_axis_rules(()))
        model, variables = made(idiom, attends)
        tx = optax.adamw(5e-2)
        for block in model.blocks if isinstance(model, Net) else ():
            block.place = nnx.static(lambda x: x)  # a mesh of other devices is refused there
        if variables is not None:
            return _linen_loop(model, linen.meta.unbox(variables)["params"], tx, steps)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            value, grads = nnx.value_and_grad(loss)(model, BATCH)
            optimizer.update(model, grads)
            return value

        return [float(step(model, optimizer)) for _ in range(steps)]


def _linen_loop(model, params, tx, steps):
    state, losses = tx.init(params), []
    for _ in range(steps):
        call = lambda params: loss(lambda x: model.apply({"params": params}, x), BATCH)
        value, grads = jax.value_and_grad(call)(params)
        updates, state = tx.update(grads, state, params)
        params, losses = optax.apply_updates(params, updates), [*losses, float(value)]
    return losses


def under(idiom: Idiom, plan: str, steps: int = 3, **options):
    """Losses of the script with one changed line."""
    with idiom.around() if idiom.all_around else contextlib.nullcontext():
        with idiom.around() if not idiom.all_around else contextlib.nullcontext():
            model, variables = made(idiom, plan == "context") if not idiom.factory else (idiom.make, None)
        given = {} if variables is None else {"params": variables}
        given |= {"split": idiom.split} if idiom.split and plan == "pipeline" else {}
        trainer = PLANS[plan](model, **given, **options).trainer(optax.adamw(5e-2), loss)
        return [float(trainer.step(BATCH)["loss"]) for _ in range(steps)]


def compared(name: str, plan: str, **options) -> str:
    """ "equal", or why not."""
    idiom = IDIOMS[name]
    try:
        got = under(idiom, plan, **options)
    except (ValueError, TypeError) as error:
        return f"refused: {error}"
    wanted = on_one_device(idiom, plan == "context" and idiom.attends)
    assert_trees_close({"losses": np.float32(got)}, {"losses": np.float32(wanted)}, f"{name} under {plan}")
    return "equal"


__all__ = ["IDIOMS", "PLANS", "Mesh", "compared"]
