"""Losses and metrics as people write them under plans, against one plain `jax.value_and_grad` of the whole batch.

    python benchmarks/truth/meaning.py [PATTERN ...] [--plans "ddp; fsdp; ..."] [--linen] [--check-vma] [--rows N] [--cover N]

A cell is a loss of `meaning_losses.py` under a plan: two steps of SGD in float64, whose loss, metrics and parameters must be
those of the user's function, called on the whole batch on one device. Prints a line for each loss and exits with 1 where a
cell is different or crashed; a cell that is refused by name is counted. `--cover N` takes every Nth cell of all plans, models
and modes.
"""

import argparse
import sys
import time
from pathlib import Path

import axonml_jax as ax

if __name__ == "__main__":
    ax.fake_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from axonml_jax.parallel.plan import Partition

sys.path.insert(0, str(Path(__file__).parent))
from meaning_losses import CASES, Layered, LinenNet, Net, batch_of


def layered(mesh):
    """In layers."""
    return Layered(nnx.Rngs(0))


def swapped(mesh):
    """Its layers split over `tensor`."""
    ax.auto_parallelize(model := layered(mesh), mesh)
    return model


class OfTexts(ax.Context):
    """Splits the positions of tokens and their labels alone."""

    def position_dim(self, path, shape):
        return 1 if path in ("tokens", "labels") else None


def in_parts(order, **o):
    """A plan that splits the positions of texts, in an order of the ranks' own."""
    return ax.Plan(context=OfTexts(order=order), **o)


def staged(loss_fn=None, **o):
    """A plan of two stages and microbatches; where the second begins depends on what the loss calls the model with."""
    kinds = []

    class Noting(Layered):
        def __call__(self, x):
            kinds.append(x.dtype.kind)
            return super().__call__(x)

    jax.eval_shape(lambda: loss_fn(Noting(nnx.Rngs(0)), jax.tree.map(jnp.asarray, batch_of(8))))
    split = ["w2"] if kinds[0] == "f" else ["blocks/1"]
    return ax.Plan(pipe=ax.Pipelined(num_microbatches=2, split=split), **o)


RULES = Partition([("w1", PartitionSpec(None, "tensor")), (".*", PartitionSpec())])
PLANS = {
    "ddp": ({"data": 8}, lambda **o: ax.Plan(**o)),
    "ddp, synchronous": ({"data": 8}, lambda **o: ax.Plan(data=ax.Replicate(sync_strategy="synchronous"), **o)),
    "fsdp": ({"fsdp": 8}, lambda **o: ax.Plan(fsdp=ax.Shard(), **o)),
    "zero-1": ({"fsdp": 8}, lambda **o: ax.Plan(fsdp=ax.Shard(stage=1), **o)),
    "zero-2": ({"fsdp": 4}, lambda **o: ax.Plan(fsdp=ax.Shard(stage=2), **o)),
    "hybrid": ({"data": 2, "fsdp": 4}, lambda **o: ax.Plan(fsdp=ax.Shard(), **o)),
    "remat": ({"data": 4}, lambda **o: ax.Plan(remat="full", **o)),
    "ddp, accumulate": ({"data": 4}, lambda **o: ax.Plan(accumulate=4, **o)),
    "fsdp, accumulate": ({"fsdp": 4}, lambda **o: ax.Plan(fsdp=ax.Shard(), accumulate=2, **o)),
    "one device, accumulate": ({"data": 1}, lambda **o: ax.Plan(accumulate=4, **o)),
    "tensor": ({"data": 2, "tensor": 2}, lambda **o: ax.Plan(**o), swapped),
    "tensor, accumulate": ({"fsdp": 2, "tensor": 2}, lambda **o: ax.Plan(fsdp=ax.Shard(), accumulate=2, **o), swapped),
    "context": ({"context": 4}, lambda **o: in_parts("zigzag", **o), layered),
    "context, fsdp": ({"fsdp": 2, "context": 2}, lambda **o: in_parts("striped", **o), layered),
    "context, accumulate": ({"context": 4}, lambda **o: in_parts("contiguous", accumulate=4, **o), layered),
    "context, data, accumulate": (
        {"data": 2, "context": 2},
        lambda **o: in_parts("zigzag", accumulate=2, **o),
        layered,
    ),
    "context, pipeline": (
        {"context": 2, "pipe": 2},
        lambda **o: staged(context=OfTexts(order="striped"), **o),
        layered,
    ),
    "rules": ({"data": 2, "tensor": 2}, lambda **o: ax.Plan(partition=RULES, **o)),
    "rules, accumulate": ({"data": 2, "tensor": 2}, lambda **o: ax.Plan(partition=RULES, accumulate=2, **o)),
    "pipeline": ({"pipe": 2}, staged, layered),
    "pipeline, fsdp": ({"fsdp": 2, "pipe": 2}, lambda **o: staged(fsdp=ax.Shard(), **o), layered),
}
"""By name the degrees of a mesh, a plan on it, and the model on it where that is another one."""

RATE, LIMIT = 0.1, 1e-9


def plain(loss_fn, rows, net=Net):
    """Loss, metrics and parameters of two steps on one device: the user's function of the whole batch."""
    graph, params = nnx.split(net(nnx.Rngs(0)), nnx.Param)

    def of_params(params, batch):
        found = loss_fn(nnx.merge(graph, params), batch)
        return found if isinstance(found, tuple) else (found, {})

    step, seen = jax.jit(jax.value_and_grad(of_params, has_aux=True)), []
    for _ in range(2):
        (loss, metrics), grads = step(params, batch_of(rows))
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
        seen.append({"loss": loss, **metrics})
    return seen, nnx.to_pure_dict(params)


def under_plan(loss_fn, rows, name, *, linen, check_vma):
    """The same of a trainer's two steps."""
    degrees, plan, *own = PLANS[name]
    count = int(np.prod(list(degrees.values())))
    mesh = ax.make_mesh(devices=jax.devices()[:count], **degrees)
    linen = linen and not own
    model = own[0](mesh) if own else LinenNet() if linen else Net(nnx.Rngs(0))
    params = {"params": nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(0)), nnx.Param))} if linen else None
    options = {"loss_fn": loss_fn} if "pipe" in degrees else {}
    parallel = ax.parallelize(model, mesh, plan(check_vma=check_vma, **options), params=params)
    trainer = parallel.trainer(optax.sgd(RATE), loss_fn)
    seen = [jax.tree.map(np.asarray, trainer.step(batch_of(rows))) for _ in range(2)]
    for each in seen:
        del each["grad_norm"]
    return seen, jax.tree.map(np.asarray, parallel.parameters())


def distance(got, wanted):
    """The largest difference of two trees, relative to the largest element of the second."""
    a, b = (np.concatenate([np.ravel(np.asarray(x, float)) for x in jax.tree.leaves(tree)]) for tree in (got, wanted))
    return float(np.abs(a - b).max() / (np.abs(b).max() + 1e-12))


def cell(loss_fn, wanted, rows, name, *, sweeps=True, **options):
    """How far a cell is from one device, or why it was refused; with two sweeps where nothing else takes the loss."""
    net = Layered if len(PLANS[name]) > 2 else Net
    wanted = wanted if net is Net else plain(loss_fn, rows, net)
    try:
        seen, params = under_plan(loss_fn, rows, name, **options)
    except ValueError as error:
        if "two_sweeps" in str(error) and sweeps:
            return cell(ax.mixing_rows(loss_fn, two_sweeps=True), wanted, rows, name, sweeps=False, **options)
        if "the loss" in str(error) or "the model" in str(error):
            return f"refused: {error}"
        raise
    named = lambda metrics: {key.split("/")[-1]: value for key, value in metrics.items()}
    metrics = max(distance(named(a), named(b)) for a, b in zip(seen, wanted[0], strict=True))
    start = nnx.to_pure_dict(nnx.state(net(nnx.Rngs(0)), nnx.Param))
    moved = lambda params: jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), params, start)
    params = params.get("params", params)
    return max(
        metrics / 1e3 if any(v.dtype == np.float32 for v in seen[0].values()) else metrics,
        distance(moved(params), moved(wanted[1])),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--plans", default="; ".join(PLANS))
    parser.add_argument("--linen", action="store_true")
    parser.add_argument("--check-vma", action="store_true")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--cover", type=int, default=0)
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    plans = [name for name in PLANS if name in given.plans.split("; ")]
    bad, refused, cells, start = 0, 0, 0, time.time()
    for i, (loss, fun) in enumerate(CASES.items()):
        if given.patterns and not any(pattern in loss for pattern in given.patterns):
            continue
        wanted, line = plain(fun, given.rows), []
        for j, plan in enumerate(plans):
            linen, check_vma = given.linen, given.check_vma
            if given.cover:
                if (i + j) % given.cover:
                    continue
                linen, check_vma = bool((i + j // 2) % 2), bool((i // 2 + j) % 2)
            cells += 1
            try:
                found = cell(fun, wanted, given.rows, plan, linen=linen, check_vma=check_vma)
            except Exception as error:
                found = f"CRASHED {type(error).__name__}: {str(error)[:300]}"
            refused += str(found).startswith("refused")
            wrong = (isinstance(found, str) and not found.startswith("refused")) or (
                not isinstance(found, str) and not found < LIMIT
            )
            bad += wrong
            text = found if isinstance(found, str) else f"{found:.0e}"
            line.append(
                f"{plan}{' linen' * linen}{' vma' * check_vma} {'DIFFERENT ' * (wrong and not isinstance(found, str))}{text}"
            )
        print(f"{loss:52s} {'; '.join(line)}", flush=True)
    print(
        f"{cells} cells, {refused} refused, {bad} different or crashed, {time.time() - start:.0f} s; jax {jax.__version__}"
    )
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
