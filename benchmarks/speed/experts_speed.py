"""Speed of mixtures of experts on CPU: the experts' products, and a whole step.

`--products`: processor time of the experts' products beside one dense layer of the same work, forward and with gradients, at
even, random, Zipf and one-sided loads; and of even loads as one batched product, in which nothing is sorted or padded: what is
left to it is that every expert's matrices are read, and their gradients written. Run it on one core (`taskset -c 0`).
`--step`: a step of a small model over `expert` on simulated devices beside a plain `jit` of the same model on the same devices,
whose arrays are placed alike and left to the partitioner; wall time, in turns.

    taskset -c 0 python benchmarks/speed/experts_speed.py --products
    python benchmarks/speed/experts_speed.py --step --rounds 10
"""

import argparse
import functools
import os
import statistics
import time

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

import axonml_jax as ax

ax.fake_devices(8)

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from paired import alternate, ratio

from axonml_jax.layers.dispatch import ExpertWeights, Sorted, activated, block_products, block_sizes
from axonml_jax.layers.whole import tensor_specs
from axonml_jax.models.config import ExpertsConfig, TransformerConfig
from axonml_jax.models.transformer import Transformer

EXPERTS, WIDTH, INNER = 8, 512, 1024
CONFIG = TransformerConfig(
    vocab_size=256, num_layers=2, hidden_size=192, num_heads=3, mlp_hidden_size=576, max_length=128,
    experts=ExpertsConfig(num_experts=8, top_k=2, inner_size=288),
)  # fmt: skip


def processor_ms(fun, *args) -> float:
    """Of one call, the median of nine, compiled before."""
    compiled = jax.jit(fun).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    spent = []
    for _ in range(9):
        start = time.process_time()
        jax.block_until_ready(compiled(*args))
        spent.append(time.process_time() - start)
    return 1e3 * statistics.median(spent)


def loads(rows: int) -> dict[str, np.ndarray]:
    """Rows of each expert."""
    rng, zipf = np.random.default_rng(0), 1 / np.arange(1, EXPERTS + 1)
    return {
        "even": np.full(EXPERTS, rows // EXPERTS),
        "random": rng.multinomial(rows, [1 / EXPERTS] * EXPERTS),
        "zipf": rng.multinomial(rows, zipf / zipf.sum()),
        "one expert": np.eye(EXPERTS, dtype=int)[0] * rows,
    }


def _weighed(fun, to, *args):
    return (to * fun(*args)).sum()


def products() -> None:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    weights = ExpertWeights(draw(EXPERTS, WIDTH, INNER), draw(EXPERTS, WIDTH, INNER), draw(EXPERTS, INNER, WIDTH))
    one = jax.tree.map(lambda leaf: leaf[0], weights)
    for each in (64, 256):
        rows = EXPERTS * each
        x, to = draw(rows, WIDTH), draw(rows, WIDTH)
        dense = lambda x, w: activated("swiglu", x @ w.gate, x @ w.up) @ w.down
        with_gradients = lambda fun, to=to: jax.grad(functools.partial(_weighed, fun, to), argnums=(0, 1))
        base = processor_ms(dense, x, one), processor_ms(with_gradients(dense), x, one)
        print(f"{each} rows an expert: dense {base[0]:.1f} ms forward, {base[1]:.1f} ms with gradients")
        batched = lambda x, w, each=each, dense=dense: jax.vmap(dense)(x.reshape(EXPERTS, each, WIDTH), w).reshape(
            x.shape
        )
        times = processor_ms(batched, x, weights), processor_ms(with_gradients(batched), x, weights)
        print(f"  one product {times[0] / base[0]:.2f} times forward, {times[1] / base[1]:.2f} with gradients")
        blocks = block_sizes(int(1.25 * rows), rows, EXPERTS)
        at = jnp.arange(rows, dtype=jnp.int32)
        own = lambda x, w, counts, at=at, blocks=blocks: block_products("swiglu", blocks, x, Sorted(at, at, counts), w)
        for name, load in loads(rows).items():
            counts = jnp.asarray(load, jnp.int32)
            forward, both = processor_ms(own, x, weights, counts), processor_ms(with_gradients(own), x, weights, counts)
            print(f"  {name:<11} {forward / base[0]:.2f} times forward, {both / base[1]:.2f} with gradients")


def loss_fn(model, batch):
    return ax.WeightedMean(*model.loss(batch["tokens"], batch["targets"]))


def plain_step(model, mesh, tx):
    """A step by `jit` alone: parameters and batch placed as the library places them, the partitioner does the rest."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    specs = tensor_specs(model, mesh.shape)
    placed = lambda spec: NamedSharding(mesh, spec)
    flat = jax.tree.unflatten(jax.tree.structure(params), [placed(spec) for spec in jax.tree.leaves(
        specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))])  # fmt: skip
    params = jax.device_put(params, flat)
    state = params, jax.jit(tx.init)(params)

    def loss(params, batch):
        total, weight = nnx.merge(graph, params, rest, copy=True).loss(batch["tokens"], batch["targets"])
        return total / weight

    @jax.jit
    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step, state, placed(PartitionSpec("expert"))


def step_times(rounds: int) -> None:
    mesh = ax.make_mesh(expert=8)
    rng = np.random.default_rng(0)
    words = rng.integers(0, 256, (32, 129))
    batch = {"tokens": words[:, :-1], "targets": words[:, 1:]}
    model, tx = Transformer(CONFIG, rngs=nnx.Rngs(0)), optax.adamw(1e-3)
    trainer = ax.parallelize(model, mesh, ax.Plan()).trainer(tx, loss_fn)
    step, state, where = plain_step(model, mesh, tx)
    placed = jax.device_put(batch, where)
    held = [state]

    def ours():
        jax.block_until_ready([trainer.step(batch)["loss"] for _ in range(3)])

    def plain():
        for _ in range(3):
            held[0], value = step(held[0], placed)
        jax.block_until_ready(value)

    sides = {"axonml_jax": ours, "plain jit": plain}
    alternate(sides, 1)  # compiles
    times = alternate(sides, rounds)
    for name, seconds in times.items():
        print(f"{name:<11} {1e3 * statistics.median(seconds) / 3:.0f} ms/step")
    print(f"ratio {ratio(times['axonml_jax'], times['plain jit'])} over {rounds} rounds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    chosen = parser.parse_args()
    if chosen.products:
        products()
    if chosen.step:
        step_times(chosen.rounds)
    if not (chosen.products or chosen.step):
        parser.error("give --products or --step")


if __name__ == "__main__":
    main()
