"""What a checkpoint costs: how long an asynchronous save blocks, and bytes per second beside raw writes of the same size.

    python benchmarks/speed/checkpoint_cost.py [--mb 256] [--devices 4] [--rounds 5] [--folder DIR] [--odd]

The state is that of adam over one big layer, split over simulated devices (FSDP); `--odd` gives it a width that does not
divide, so that every array rests with padding, which is cut off before it is written. Raw is the same bytes from one NumPy
array in one file, with fsync. Rounds alternate between the two; medians are printed. Checksums are part of a save: every file
is read back once after it was written.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import axonml_jax as ax


def raw_write(path: Path, content: np.ndarray) -> float:
    """Seconds to write bytes to a file, fsync included."""
    start = time.perf_counter()
    with path.open("wb") as file:
        file.write(content.data)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256, help="size of the state in MiB")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--odd", action="store_true", help="a width that does not divide by the devices")
    parser.add_argument("--folder", help="where to write; None: the folder for temporary files")
    options = parser.parse_args()
    ax.fake_devices(options.devices)
    width = int((options.mb * 2**20 / 4 / 3) ** 0.5)  # parameters and adam's two moments in float32
    width = width // options.devices * options.devices + options.odd
    model = ax.FSDP(nnx.Linear(width, width, use_bias=False, rngs=nnx.Rngs(0)), ax.make_mesh(fsdp=options.devices))
    trainer = model.trainer(optax.adam(1e-3), lambda model, batch: jnp.mean(model(batch) ** 2))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state) if hasattr(leaf, "nbytes"))
    rng = np.random.default_rng(0)
    trainer.step(rng.normal(size=(options.devices, width)).astype(np.float32))
    jax.block_until_ready(trainer.state.step)
    content = rng.integers(0, 256, size, np.uint8)
    blocked, whole, restored, raw = [], [], [], []
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    with ax.CheckpointManager(folder / "run", keep=1) as manager:
        for number in range(options.rounds):
            raw.append(raw_write(folder / "raw", content))
            start = time.perf_counter()
            manager.save(number, trainer, force=True)
            blocked.append(time.perf_counter() - start)
            manager.wait()
            whole.append(time.perf_counter() - start)
            start = time.perf_counter()
            manager.restore(trainer)
            jax.block_until_ready(trainer.state.variables)
            restored.append(time.perf_counter() - start)
        stored = sum(path.stat().st_size for path in (folder / "run").rglob("*") if path.is_file())
    shutil.rmtree(folder)
    speed = lambda seconds: f"{size / 2**20 / statistics.median(seconds):8.0f} MiB/s"
    print(f"state {size / 2**20:.0f} MiB on {options.devices} simulated devices, {stored / 2**20:.0f} MiB on disk")
    print(f"blocked by an asynchronous save  {1000 * statistics.median(blocked):8.0f} ms")
    print(f"save until committed             {1000 * statistics.median(whole):8.0f} ms  {speed(whole)}")
    print(f"restore with its check           {1000 * statistics.median(restored):8.0f} ms  {speed(restored)}")
    print(f"raw write with fsync             {1000 * statistics.median(raw):8.0f} ms  {speed(raw)}")
    print(f"save over raw, in pairs          {statistics.median(a / b for a, b in zip(whole, raw, strict=True)):8.2f}")


if __name__ == "__main__":
    main()
