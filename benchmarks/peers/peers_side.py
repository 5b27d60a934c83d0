"""Our sides of `peers.py`, in a process of their own: a Llama-like model under `ax.FSDP`, or under plain `jax.jit`.

Started by it. Prints what was measured as JSON, last.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from small_gpt import make_batch, optimizer

import axonml_jax as ax
from axonml_jax.ledger.compiled import moved
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=("ours", "recomputed", "jit"))
    parser.add_argument("--sizes", type=json.loads, required=True, help="what TransformerConfig takes, as JSON")
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    return parser.parse_args()


def loss_fn(model, batch):
    """The mean cross entropy of all positions."""
    total, weight = model.loss(batch["tokens"], batch["targets"])
    return total / weight


def ours(model, batch, remat=None):
    """State, step, and the compiled program, of `ax.FSDP` as it comes, or with layers that are recomputed."""
    trainer = ax.FSDP(model, ax.make_mesh(fsdp=-1), remat=remat).trainer(optimizer(), loss_fn)
    return trainer.state, trainer.train_step, lambda: trainer.train_step.lower(trainer.state, batch).compile()


def auto_sharded(model, batch):
    """The same of plain `jax.jit`: every array is split along its last dim that divides, the compiler does the rest."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    tx, (graphdef, params) = optimizer(), nnx.split(model, nnx.Param)

    def placed(leaf):
        dims = [dim for dim, size in enumerate(leaf.shape) if size % mesh.size == 0]
        spec = PartitionSpec(
            *("fsdp" if dims and dim == dims[max(0, len(dims) - 2)] else None for dim in range(leaf.ndim))
        )
        return NamedSharding(mesh, spec)

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda params: loss_fn(nnx.merge(graphdef, params), batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return (optax.apply_updates(params, updates), opt_state), metrics

    state = (params, tx.init(params))
    shardings = jax.tree.map(placed, state)
    state = jax.device_put(state, shardings)
    step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())))
    return state, step, lambda: step.lower(state, batch).compile()


def main():
    options = parse()
    ax.fake_devices(options.devices)
    shape = TransformerConfig(**options.sizes)
    model = Transformer(shape, rngs=nnx.Rngs(0))
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    batch = jax.device_put(make_batch(options.devices, shape), NamedSharding(mesh, PartitionSpec("fsdp")))
    ways = {"ours": ours, "recomputed": partial(ours, remat="full"), "jit": auto_sharded}
    state, step, compiled = ways[options.way](model, batch)
    began = time.perf_counter()
    program = compiled()
    compile_s, memory = time.perf_counter() - began, program.memory_analysis()
    sent = moved(program).get("all")
    seconds, losses = [], []
    for _ in range(options.steps):
        began = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
        losses.append(float(metrics["loss"]))
    found = {
        "parameters": shape.num_params,
        "compile_s": compile_s,
        "temporaries": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "moved": sent.size if sent else 0,
        "flops": program.cost_analysis()["flops"],
        "step_s": seconds[2:],
        "losses": losses,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
