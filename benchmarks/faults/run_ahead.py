"""A plain donated training loop on simulated devices runs to its end, and what waiting for each step costs.

Run: python benchmarks/faults/run_ahead.py --devices 8 --steps 5000
Shows: the loop ends on 2, 8 and 16 devices with `fake_devices` and `bound_run_ahead` (without them jax 0.10 and 0.11
hang within a few hundred steps), microseconds per step, and those of `bound_run_ahead` alone on a finished tree.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from axonml_jax.mesh.shape import make_mesh
from axonml_jax.mesh.simulate import bound_run_ahead, fake_devices

WIDTH, DEPTH, ROWS = 64, 4, 16


def loss_of(weights, x):
    for w in weights:
        x = x + jnp.tanh(x @ w)
    return jnp.mean((x - 1.0) ** 2)


def local_step(weights, x):
    loss, grads = jax.value_and_grad(loss_of)(weights, x)
    grads = jax.lax.pmean(grads, "data")  # one all-reduce per leaf: the worst case for the thread pool
    return [w - 0.05 * g for w, g in zip(weights, grads, strict=True)], jax.lax.pmean(loss, "data")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="number of simulated devices")
    parser.add_argument("--steps", type=int, default=5000, help="number of training steps")
    parser.add_argument(
        "--ahead", action="store_true", help="never wait (jax 0.10 and 0.11 may hang): what it would gain"
    )
    options = parser.parse_args()
    fake_devices(options.devices)
    mesh = make_mesh(data=-1)
    rng = np.random.default_rng(0)
    everywhere, split = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("data")))
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH for _ in range(DEPTH)]
    weights = jax.device_put(weights, everywhere)
    x = jax.device_put(rng.normal(size=(ROWS * options.devices, WIDTH)).astype(np.float32), split)
    specs = (PartitionSpec(), PartitionSpec("data"))
    mapped = jax.shard_map(local_step, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    step = jax.jit(mapped, donate_argnums=0)

    weights, first = bound_run_ahead(step(weights, x))
    start = time.perf_counter()
    for _ in range(options.steps):
        weights, loss = step(weights, x) if options.ahead else bound_run_ahead(step(weights, x))
    jax.block_until_ready(weights)
    per_step = (time.perf_counter() - start) / options.steps
    start = time.perf_counter()
    for _ in range(10_000):
        bound_run_ahead((weights, loss))
    check = (time.perf_counter() - start) / 10_000
    print(
        f"jax {jax.__version__}, {options.devices} devices: {options.steps} steps, {per_step * 1e6:.0f} us per step, "
        f"bound_run_ahead on a finished tree {check * 1e6:.1f} us, loss {float(first):.4f} -> {float(loss):.4f}"
    )
    assert float(loss) < float(first)


if __name__ == "__main__":
    main()
