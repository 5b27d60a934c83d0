"""Published models as they are under plans of one changed line, their own annotations among them, beside plain `jax.jit`.

    python benchmarks/truth/annotated.py [--models PATTERN]     # exit status 1 where losses differ

Needs `google-tunix`, and for Bonsai's Qwen 3 a clone of it on the path. Each row is three AdamW steps of a small configuration
on 8 simulated devices; `--read` prints what was read of the annotations.
"""

import argparse
import importlib.util
import re
import sys
import warnings

import axonml_jax as ax

ax.fake_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from foreign import bonsai
from foreign.tunix import FAMILIES
from jax.sharding import AxisType, Mesh

TOLERANCE = 1e-5
STEPS = 3


def mesh(kind=AxisType.Auto, **degrees):
    """As a user makes one, with the model's own axis names."""
    devices = np.array(jax.devices()[: int(np.prod(list(degrees.values())))]).reshape(tuple(degrees.values()))
    return Mesh(devices, tuple(degrees), axis_types=(kind,) * len(degrees))


def around(made, own, make):
    """Everything under the user's mesh."""

    def losses():
        with jax.set_mesh(own):
            return trained(make(), made)

    return losses


def plans(made):
    """The one line of each row."""
    model = made.model
    both, three = mesh(fsdp=4, tp=2), mesh(data=2, fsdp=2, tp=2)
    return {
        "ax.DDP(model)": lambda: trained(ax.DDP(model), made),
        "ax.FSDP(model)": lambda: trained(ax.FSDP(model), made),
        "ax.FSDP(model, mesh) on data, fsdp": lambda: trained(ax.FSDP(model, mesh(data=2, fsdp=4)), made),
        "ax.parallelize(model, mesh) on fsdp, tp": lambda: trained(ax.parallelize(model, both), made),
        "the same on data, fsdp, tp": lambda: trained(ax.parallelize(model, three), made),
        "the same, all under jax.set_mesh": around(made, both, lambda: ax.parallelize(model, both)),
    }


def batches(made):
    """The same for every row."""
    generator = np.random.default_rng(1)
    return [made.batch(generator) for _ in range(STEPS)]


def trained(model, made):
    """Losses under a plan."""
    trainer = model.trainer(optax.adamw(1e-2), made.loss_fn)
    return [float(trainer.step(batch)["loss"]) for batch in batches(made)]


def plainly(made):
    """Losses of the loop that NNX's users write, on one device."""
    graphdef, params, others = nnx.split(made.model, nnx.Param, ...)
    params, tx = nnx.to_pure_dict(params), optax.adamw(1e-2)

    @jax.jit
    def step(params, state, batch):
        loss = lambda params: made.loss_fn(nnx.merge(graphdef, params, others, copy=True), batch)
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    losses, state = [], tx.init(params)
    for batch in batches(made):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses


def of_bonsai():
    """The losses of Qwen 3 as Bonsai has it by line, under its Explicit mesh, and those of a plain loop without a mesh."""
    given, kind = bonsai.batches(STEPS), AxisType.Explicit
    trained = lambda model, loss_fn: _steps(model.trainer(optax.adamw(1e-2), loss_fn), given)
    both, one = mesh(kind, fsdp=4, tp=2), mesh(kind, fsdp=8)

    def under(own, wrap, **axes):
        def losses():
            with jax.set_mesh(own):
                model, loss_fn = bonsai.made(**axes)
                return trained(wrap(model), loss_fn)

        return losses

    hybrid = lambda model: ax.FSDP(model, ax.make_mesh(data=2, fsdp=4), sharding_strategy="hybrid_shard")
    rows = {
        "ax.DDP(model)": under(both, ax.DDP, fsdp=True, tp=True),
        "ax.FSDP(model)": under(both, ax.FSDP, fsdp=True, tp=True),
        'ax.FSDP(model, mesh, sharding_strategy="hybrid_shard")': under(both, hybrid, fsdp=True, tp=True),
        "ax.parallelize(model, mesh) on fsdp, tp": under(both, lambda m: ax.parallelize(m, both), fsdp=True, tp=True),
        "ax.FSDP(model), annotated over fsdp alone": under(one, ax.FSDP, fsdp=True),
        "ax.parallelize(model, mesh) on fsdp alone": under(one, lambda m: ax.parallelize(m, one), fsdp=True),
    }
    model, loss_fn = bonsai.made()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        value, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return value

    return rows, [float(step(model, optimizer, batch)) for batch in given]


def _steps(trainer, given):
    return [float(trainer.step(batch)["loss"]) for batch in given]


def row(name, line, losses, wanted):
    """A line of the table, and whether the losses are equal."""
    try:
        difference = max(abs(a - b) for a, b in zip(losses(), wanted, strict=True))
    except (TypeError, ValueError) as error:
        return f"| {name} | `{line}` | refused: {' '.join(str(error).split())[:160]} |", True
    equal = difference <= TOLERANCE
    return f"| {name} | `{line}` | {'equal' if equal else 'DIFFERS'} ({difference:.1e}) |", equal


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="a regular expression: only models whose names it finds")
    parser.add_argument("--read", action="store_true", help="print what was read of each model's annotations")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # theirs
    good = True
    print("| model | the line | losses of three steps beside one device |\n| --- | --- | --- |")
    for family in FAMILIES:
        if not re.search(args.models, family.name):
            continue
        with nnx.use_eager_sharding(False):
            made = family.made(jnp.float32)
        wanted = plainly(made)
        for line, losses in plans(made).items():
            text, equal = row(family.name, line, losses, wanted)
            good &= equal
            print(text, flush=True)
        if args.read:
            print(ax.Plan.from_annotations(made.model, mesh(fsdp=4, tp=2)).annotations)
    if re.search(args.models, "Qwen 3 (Bonsai)") and importlib.util.find_spec("bonsai") is not None:
        rows, wanted = of_bonsai()
        for line, losses in rows.items():
            text, equal = row("Qwen 3 (Bonsai)", line, losses, wanted)
            good &= equal
            print(text, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
