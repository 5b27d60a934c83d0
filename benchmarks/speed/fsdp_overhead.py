"""What the FSDP facade's fused step costs over the same step written by hand: gathers of each unit, replayed by hand.

Run: python benchmarks/speed/fsdp_overhead.py [--devices 2] [--rounds 60]
Shows: memory and FLOPs of both programs, what differs in their optimized HLO, and the paired ratio of medians with its 95%
interval. Bar: 1.02. Losses of both agree.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import jax
import jax.numpy as jnp
import numpy as np
import optax
from deep_models import MLP
from flax import nnx
from hlo import by_opcode, differences
from jax.sharding import NamedSharding, PartitionSpec
from paired import alternate, machine, ratio, table, verdict
from small_gpt import Stepping, optimizer

import axonml_jax as ax
from axonml_jax.compat.order import together

SPLIT = PartitionSpec("fsdp")
BAR = 1.02


def loss_fn(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def block(weights, x):
    up, down = weights["up"], weights["down"]
    return x + jax.nn.relu(x @ up["kernel"] + up["bias"]) @ down["kernel"] + down["bias"]


@jax.tree_util.register_static
class Static:
    """A value that is no array, among residuals."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value

    def __hash__(self):
        return hash(self.value)


def gathered(shards, tie):
    """Whole weights, gathered no sooner than `tie` is there."""
    shards, tie = together((shards, tie))
    return jax.tree.map(lambda x: jax.lax.all_gather(x, "fsdp", tiled=True), shards), tie


@jax.custom_vjp
def unit(shards, x):
    return block(gathered(shards, x)[0], x)


def forward(shards, x):
    weights, x = gathered(shards, x)
    out, vjp = jax.vjp(block, weights, x)
    leaves, treedef = jax.tree.flatten(vjp)
    places = {id(weight): i for i, weight in enumerate(jax.tree.leaves(weights))}
    again = tuple(places.get(id(leaf), -1) for leaf in leaves)
    kept = [leaf for leaf, i in zip(leaves, again, strict=True) if i < 0]
    return out, (kept, shards, Static((treedef, again)))


def backward(saved, grad):
    kept, shards, static = saved
    treedef, again = static.value
    weights, grad = gathered(shards, grad)
    rest, weights = iter(kept), jax.tree.leaves(weights)
    of_weights, of_x = treedef.unflatten([next(rest) if i < 0 else weights[i] for i in again])(grad)
    scatter = lambda x: jax.lax.psum_scatter(x, "fsdp", tiled=True)
    return jax.tree.map(scatter, of_weights), of_x


unit.defvjp(forward, backward)


def hand_written(model, mesh):
    """`(state, step)` as one would write it without this library: shards along dim 0, a unit per block."""
    tx, params = optimizer(), nnx.to_pure_dict(nnx.state(model, nnx.Param))["blocks"]

    def local(state, batch):
        number, params, opt_state, key = state

        def loss_of(params):
            x = batch["x"]
            for i in range(len(params)):
                x = unit(params[i], x)
            loss = ((x - batch["y"]) ** 2).mean()
            return loss / mesh.size, loss

        (_, loss), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        norm = jnp.sqrt(jax.lax.psum(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)), "fsdp"))
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": jax.lax.pmean(loss, "fsdp"), "grad_norm": norm}
        return (number + 1, optax.apply_updates(params, updates), opt_state, key), metrics

    state = (jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.key(0))
    specs = jax.tree.map(lambda x: SPLIT if x.ndim else PartitionSpec(), state)
    step = jax.shard_map(local, mesh=mesh, in_specs=(specs, SPLIT), out_specs=(specs, PartitionSpec()), check_vma=False)
    state = jax.device_put(state, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    state = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(state)
    old = jax.__version_info__ < (0, 11)  # as training/compile.py says
    options = {"xla_disable_hlo_passes": "cse_barrier_expander"} if old else None
    return state, jax.jit(step, donate_argnums=0, compiler_options=options)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="number of simulated devices")
    parser.add_argument("--rounds", type=int, default=60, help="steps of each side that are timed")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=512, help="of the global batch")
    options = parser.parse_args()
    ax.fake_devices(options.devices)
    make = lambda: MLP(options.blocks, options.width, nnx.Rngs(0))
    mesh, rng = ax.make_mesh(fsdp=-1), np.random.default_rng(0)
    batch = {name: rng.normal(size=(options.rows, options.width)).astype(np.float32) for name in ("x", "y")}
    batch = jax.device_put(batch, NamedSharding(mesh, SPLIT))
    trainer, (state, step) = ax.FSDP(make(), mesh).trainer(optimizer(), loss_fn), hand_written(make(), mesh)
    compiled = {"facade": trainer.train_step.lower(trainer.state, batch).compile()}
    compiled["hand-written"] = step.lower(state, batch).compile()
    runs = {
        "facade": Stepping(None, lambda _, batch: facade_step(trainer, batch), batch),
        "hand-written": Stepping(state, step, batch),
    }
    print(machine("jax", "flax", "optax") + f", {options.devices} simulated devices")
    for name, program in compiled.items():
        memory, flops = program.memory_analysis(), program.cost_analysis()["flops"]
        print(f"{name}: temporaries {memory.temp_size_in_bytes / 2**20:.2f} MB, {flops / 1e9:.4f} GFLOP")
    ours, theirs = differences(*(program.as_text() for program in compiled.values()))
    print(f"only in the facade's: {by_opcode(ours)}\nonly in the hand-written: {by_opcode(theirs)}")
    alternate(runs, 5)
    losses = [float(run.metrics["loss"]) for run in runs.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-4)
    times = alternate(runs, options.rounds)
    print("\n" + table(times, "hand-written"))
    print(f"facade / hand-written: {verdict(ratio(times['facade'], times['hand-written']), BAR)}")


def facade_step(trainer, batch):
    metrics = trainer.step(batch)
    return trainer.state, metrics


if __name__ == "__main__":
    main()
