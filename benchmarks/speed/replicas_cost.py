"""What comparing replicas costs: seconds to compile, to compare, and of one step beside it.

    python benchmarks/speed/replicas_cost.py [--mb 256] [--devices 4] [--rounds 7]

The state is that of adam over one big layer, whole on every simulated device (DDP); all of it is summed on each. Medians are
printed, and what travels: two numbers of 32 bits an array and device.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import axonml_jax as ax
from axonml_jax.training.run_state import CompareReplicas


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256, help="size of the state in MiB, on every device")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    ax.fake_devices(options.devices)
    width = int((options.mb * 2**20 / 4 / 3) ** 0.5)  # parameters and adam's two moments in float32
    model = ax.DDP(nnx.Linear(width, width, use_bias=False, rngs=nnx.Rngs(0)), ax.make_mesh(data=options.devices))
    trainer = model.trainer(optax.adam(1e-3), lambda model, batch: jnp.mean(model(batch) ** 2))
    batch = np.random.default_rng(0).normal(size=(options.devices, width)).astype(np.float32)
    compare, steps, times = CompareReplicas(), [], []
    for _ in range(options.rounds + 1):
        start = time.perf_counter()
        jax.block_until_ready(trainer.step(batch))
        steps.append(time.perf_counter() - start)
        start = time.perf_counter()
        found = compare(trainer.state)
        times.append(time.perf_counter() - start)
        assert found == [], found
    one = statistics.median(times[1:])
    print(f"state               {options.mb} MiB on each of {options.devices} devices")
    print(f"first comparison    {times[0]:.2f} s, with its compilation")
    print(f"comparison          {one:.3f} s, {options.mb * options.devices / 1024 / one:.1f} GiB/s over all devices")
    print(f"step                {statistics.median(steps[1:]):.3f} s")


if __name__ == "__main__":
    main()
