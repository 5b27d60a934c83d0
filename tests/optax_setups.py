"""Optimizers as people write them, a small model with a scalar parameter and odd shapes, and its training on one device."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from plan_models import F64, linear, mean_loss, regression

import axonml_jax as ax


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = linear(7, 7, rngs)
        self.learning_rate = nnx.Param(jnp.array(0.7, F64))  # called like a hyperparameter

    def __call__(self, x):
        return x + jnp.tanh(self.up(x)) * self.learning_rate[...]


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.last = linear(5, 7, rngs), linear(7, 3, rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def by_ndim(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "rest", params)


def skip_first(updates, gradient_step, params):
    """Only the sums of gradients decide: what `MultiSteps(should_skip_update_fn=)` is for."""
    return optax.skip_large_updates(updates, gradient_step, params, max_squared_norm=1e6)


CLIP, RATE = optax.clip_by_global_norm(0.1), 1e-2
WARMUP = optax.warmup_cosine_decay_schedule(0.0, RATE, 2, 10)

SETUPS = {
    "clipping in the chain, adamw": lambda: optax.chain(CLIP, optax.adamw(RATE)),
    "adamw, decay masked": lambda: optax.adamw(RATE, weight_decay=0.1, mask=matrices),
    "warmup and cosine": lambda: optax.chain(CLIP, optax.adamw(WARMUP)),
    "sgd, momentum, nesterov": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "multi_transform": lambda: optax.multi_transform({"matrix": optax.adam(RATE), "rest": optax.sgd(RATE)}, by_ndim),
    "clipping in multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.chain(CLIP, optax.adam(RATE)), "rest": optax.sgd(RATE)}, by_ndim
    ),
    "clipping, masked": lambda: optax.chain(optax.masked(CLIP, matrices), optax.adam(RATE)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(RATE), 2),
    "MultiSteps of a clipping chain": lambda: optax.MultiSteps(optax.chain(CLIP, optax.adamw(RATE)), 2),
    "MultiSteps that skips": lambda: optax.MultiSteps(optax.adam(RATE), 2, should_skip_update_fn=skip_first),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.chain(CLIP, optax.adam(RATE)), 3),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=WARMUP),
    "inject_hyperparams, sgd": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=RATE),
    "EMA of updates": lambda: optax.chain(optax.adam(RATE), optax.ema(0.9)),
    "AMSGrad": lambda: optax.amsgrad(RATE),
    "lion": lambda: optax.lion(RATE),
    "rmsprop": lambda: optax.rmsprop(RATE, centered=True, momentum=0.9),
    "adagrad": lambda: optax.adagrad(RATE),
    "adan": lambda: optax.adan(RATE),
    "rprop": lambda: optax.rprop(RATE),
    "lamb": lambda: optax.lamb(RATE),
    "lars": lambda: optax.lars(RATE),
    "novograd": lambda: optax.novograd(RATE),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(RATE),
    "prodigy": lambda: optax.contrib.prodigy(0.1),
    "element-wise clipping": lambda: optax.chain(optax.clip(0.01), optax.sgd(RATE)),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(RATE)),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(RATE)),
    "muon": lambda: optax.contrib.muon(RATE),
    "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=4),
    "noisy sgd": lambda: optax.noisy_sgd(RATE, key=jax.random.key(0)),
    "polyak sgd": lambda: optax.polyak_sgd(max_learning_rate=0.1),
    "reduce_on_plateau": lambda: optax.chain(
        optax.adam(RATE), optax.contrib.reduce_on_plateau(patience=1, accumulation_size=1)
    ),
    "lookahead": lambda: optax.lookahead(optax.sgd(RATE), 2, 0.5),
    "L-BFGS": lambda: optax.lbfgs(),
}

PLANS = {
    "DDP": (ax.DDP, {"data": 2}, {}),
    "FSDP": (ax.FSDP, {"fsdp": 3}, {}),
    "Pipeline": (ax.Pipeline, {"pipe": 2}, {"num_microbatches": 2}),
    "Pipeline, fsdp inside": (ax.Pipeline, {"pipe": 2, "fsdp": 2}, {"num_microbatches": 2}),
}
"""Name -> facade, mesh, options."""

STEPS = 3


def batches():
    return [regression(12, seed) for seed in range(STEPS)]


def on_one_device(make):
    """Parameters by path after three steps, without this library."""
    tx, (view, params) = make(), nnx.split(Net())
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    params = nnx.to_pure_dict(params)

    def loss_of(params, batch):
        state = nnx.state(Net())
        nnx.replace_by_pure_dict(state, params)
        return mean_loss(nnx.merge(view, state), batch)

    @jax.jit
    def step(params, state, batch):
        (loss, _), grads = jax.value_and_grad(loss_of, has_aux=True)(params, batch)
        updates, state = optax.with_extra_args_support(tx).update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for batch in batches():
        params, state = step(params, state, batch)
    return {"/".join(map(str, path)): leaf for path, leaf in nnx.traversals.flatten_mapping(params).items()}


def under(plan, make, **options):
    """The same under a plan."""
    facade, degrees, given = PLANS[plan]
    count = 1
    for degree in degrees.values():
        count *= degree
    mesh = ax.make_mesh(devices=jax.devices()[:count], **degrees)
    trainer = facade(Net(), mesh, **given, **options).trainer(make(), mean_loss)
    for batch in batches():
        trainer.step(batch)
    return trainer.model.state_dict()
