"""Data for many ranks: PyTorch's sampler rule, and a loader of global batches that resumes where it stopped.

    python examples/sampler_and_loader.py

Shows `ax.DistributedSampler`, `ax.create_dataloader`, and that the order does not depend on the mesh.
"""

from itertools import islice

import jax
import numpy as np

import axonml_jax as ax

ax.fake_devices(8)  # simulated; leave it out on real devices


class Squares:  # anything with __len__ and __getitem__, a torch Dataset too
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"x": np.float32(index), "y": np.float32(index**2)}


# Every rank draws its own indices; together they are one epoch.
samplers = [ax.DistributedSampler(Squares(), num_replicas=4, rank=rank) for rank in range(4)]
for sampler in samplers:
    sampler.set_epoch(3)
assert sorted(index for sampler in samplers for index in sampler) == list(range(40))

# Or let the loader make global batches, each row on the device that needs it.
eight = ax.make_mesh(data=8)
loader = ax.create_dataloader(Squares(), 8, eight, seed=1)
drawn = list(islice(loader, 3))
print("one batch:", drawn[0]["x"].astype(int), drawn[0]["x"].sharding.spec)
position = loader.state_dict()

# Saved after three batches on 8 devices, continued on 2: the same samples in the same order.
two = ax.make_mesh(data=2, devices=jax.devices()[:2])
resumed = ax.create_dataloader(Squares(), 8, two, seed=1)
resumed.load_state_dict(position)
fourth, expected = next(iter(resumed)), next(iter(loader))
assert fourth["x"].tolist() == expected["x"].tolist()
assert len(fourth["x"].sharding.device_set) == 2
