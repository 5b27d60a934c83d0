"""Samples per second of `ax.create_dataloader` beside grain's own loader and PyTorch's DataLoader, on one dataset.

    python benchmarks/speed/loader_speed.py [--workers 0 2] [--torch-python PYTHON]

Ours places batches on the device, theirs end on the host. Each runs in a process of its own; the median of some passes counts.
A Python that has PyTorch is named by --torch-python, otherwise its column is left out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import numpy as np

SAMPLES, BATCH, LENGTH, PASSES = 20_000, 64, 512, 5


class Rows:
    """A sample is made when it is asked for: some tokens, and a little work in Python."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        tokens = (np.arange(LENGTH, dtype=np.int32) * (int(index) + 1)) % 50_257
        return {"tokens": tokens, "targets": np.roll(tokens, -1)}


def ours(workers):
    import jax

    import axonml_jax as ax

    mesh = ax.make_mesh(data=1, devices=jax.devices()[:1])
    loader = ax.create_dataloader(Rows(), BATCH, mesh, num_workers=workers)
    return lambda: loader


def grain(workers):
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()
    dataset = grain.MapDataset.source(Rows()).shuffle(seed=0).repeat().batch(BATCH)
    stream = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    return lambda: stream.mp_prefetch(grain.MultiprocessingOptions(workers, 2)) if workers else stream


def torch(workers):
    import torch

    loader = torch.utils.data.DataLoader(
        Rows(), BATCH, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=workers > 0
    )

    def endless():
        while True:
            yield from loader

    return endless


def measure(make, batches=SAMPLES // BATCH):
    """Samples per second after a tenth of a pass, workers running."""
    stream, rates = iter(make()()), []
    for _ in range(batches // 10):
        next(stream)
    for _ in range(PASSES):
        start = time.perf_counter()
        for _ in range(batches):
            next(stream)
        rates.append(batches * BATCH / (time.perf_counter() - start))
    if hasattr(stream, "close"):
        stream.close()
    return statistics.median(rates)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--torch-python")
    parser.add_argument("--one", nargs=2, metavar=("LOADER", "WORKERS"))
    options = parser.parse_args()
    if options.one:
        make, workers = {"ours": ours, "grain": grain, "torch": torch}[options.one[0]], int(options.one[1])
        print(json.dumps(measure(lambda: make(workers))), flush=True)
        return
    pythons = {"ours": sys.executable, "grain": sys.executable}
    if options.torch_python:
        pythons["torch"] = options.torch_python
    for workers in options.workers:
        found = {}
        for name, python in pythons.items():
            run = subprocess.run(
                [python, __file__, "--one", name, str(workers)], stdout=subprocess.PIPE, text=True, check=True
            )
            found[name] = json.loads(run.stdout.splitlines()[-1])
        rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in found.items())
        print(
            f"{workers} workers: samples per second {rates}; ours / grain {found['ours'] / found['grain']:.2f}",
            flush=True,
        )
        assert found["ours"] > 0


if __name__ == "__main__":
    main()
