"""What a training step sends, counted before anything runs, beside what theory allows.

    python examples/explain_step.py

Shows `ax.explain` on a trainer, as a table and as numbers, for three ways to reduce the same gradients.
"""

import numpy as np
import optax
from flax import nnx

import axonml_jax as ax

ax.fake_devices(8)  # simulated; leave it out on real devices


def loss_fn(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def report(**options):
    model = nnx.Sequential(nnx.Linear(64, 256, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(256, 8, rngs=nnx.Rngs(1)))
    batch = {"x": np.ones((16, 64), np.float32), "y": np.ones((16, 8), np.float32)}
    return ax.explain(ax.DDP(model, mesh, **options).trainer(optax.adamw(1e-3), loss_fn), batch)


mesh = ax.make_mesh(data=-1)
parameters = 64 * 256 + 256 + 256 * 8 + 8
overlapped = report(bucket_size_mb=0.05)  # reduced inside the backward, bucket by bucket
print(overlapped)

# On a ring every rank sends 2 P (N-1)/N elements, whatever the buckets.
bytes_per_element = {"overlapped": 4, "synchronous": 4, "bfloat16": 2}
reports = {
    "overlapped": overlapped,
    "synchronous": report(sync_strategy="synchronous"),
    "bfloat16": report(comm_dtype="bfloat16"),
}
for name, size in bytes_per_element.items():
    sent = reports[name].bytes_by_label["gradients"]
    print(f"{name:12} {sent:>9,} bytes of gradients per rank")
    assert sent == 2 * parameters * 7 / 8 * size
    assert all(target.ratio == 1 for target in reports[name].targets)
assert report(sync_strategy="no_sync").total_bytes == 0
