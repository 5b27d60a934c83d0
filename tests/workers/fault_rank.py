"""A small resumable training, one process of it, in which faults happen: `python fault_rank.py FOLDER [FAULT RANK STEP] ...`.

A fault happens once: a file in FOLDER says so. Prints a digest of the final state on rank 0. FAULT_AXIS names the plan;
with FAULT_UNDISTURBED a second training is made, from the first state on and without checkpoints, and its digest printed; with
FAULT_MEMORY=k the state is copied to memory every k steps; with FAULT_HOLD the first step waits for a file `go` in FOLDER. With
READ as the fault this process alone reads the newest checkpoint again and again instead, until that of the last step.
"""

import contextlib
import errno
import hashlib
import os
import resource
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

sys.path.insert(0, str(Path(__file__).parent))

from fault_actions import EndingRows, die, fill, jump, limit_files, only_reading, use_up_memory, wake_later

import axonml_jax as ax
from axonml_jax.checkpoint import memory as own_copies
from axonml_jax.checkpoint import places as in_folder
from axonml_jax.checkpoint import saving
from axonml_jax.checkpoint import saving as failures
from axonml_jax.checkpoint.memory import MemoryCopies, restore_newest
from axonml_jax.cli.loop import Preemption, Record
from axonml_jax.cli.records import JsonLines
from axonml_jax.sharding.layout import to_host
from axonml_jax.training.callbacks import as_floats
from axonml_jax.training.same_everywhere import check_same

STEPS, EVERY, ROWS, BATCH = 12, 3, 96, 12
STUCK_AFTER = float(os.environ.get("FAULT_STUCK_AFTER", "12"))
STEP_SECONDS = float(os.environ.get("FAULT_STEP_SECONDS", "0"))  # what a step takes at least
TERMINATED = 143
LARGEST = 2048  # records are shorter, what a process writes of a checkpoint is not
WIDTHS = (3, 7, 5, 7)


class Net(nnx.Module):
    """Layers of odd width, two at least."""

    def __init__(self, depth=2, seed=0):
        rngs, widths = nnx.Rngs(seed), (*WIDTHS[:depth], 1)
        self.layers = nnx.List([nnx.Linear(*sizes, rngs=rngs) for sizes in pairwise(widths)])

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = jnp.tanh(layer(x))
        return self.layers[-1](x)


def loss_fn(model, batch):
    return jnp.mean((model(batch) - jnp.sum(batch, 1, keepdims=True)) ** 2)


class Fault:
    """What goes wrong in this process, if anything."""

    def __init__(self, folder, kind, rank, step, number=0):
        self.kind, self.rank, self.step = kind, int(rank), int(step)
        self.memory = None
        self._happened, self._checkpoints = folder / f"fault-happened{number or ''}", folder / "checkpoints"
        self.passes = kind.endswith("-passes")
        if self.passes:
            failures.REMEDIES[errno.EFBIG] = "wait a step"

    def due(self, rank, step, *kinds):
        """Whether one of these kinds happens here and now; then it never does again."""
        if self.kind not in kinds or rank != self.rank or step != self.step or self._happened.exists():
            return False
        self._happened.touch()
        return True

    def before(self, rank, step):
        """Between two steps."""
        if self.passes and rank == self.rank and step == self.step + 1:
            self._happened.with_name("filler").unlink(missing_ok=True)
            limit_files(resource.RLIM_INFINITY)
            if self.kind == "read-only-passes":
                only_reading(self._checkpoints, False)
        if self.due(rank, step, "kill"):
            die()
        if self.due(rank, step, "lose-memory"):  # as a machine that is replaced
            self.memory.forget()
            die()
        if self.due(rank, step, "terminate"):
            os.kill(os.getpid(), signal.SIGTERM)
        if self.due(rank, step, "sleep"):
            time.sleep(600)
        if self.due(rank, step, "slow"):
            time.sleep(0.75 * STUCK_AFTER)
        if self.due(rank, step, "stop", "stop-and-continue"):
            if self.kind == "stop-and-continue":
                wake_later(0.75 * STUCK_AFTER)
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.due(rank, step, "clock-forward", "clock-back"):
            jump(2 if self.kind == "clock-forward" else -2)
        if self.due(rank, step, "out-of-memory"):
            use_up_memory()
        if self.due(rank, step, "exit"):
            os._exit(0)
        if self.due(rank, step, "raise"):
            raise ValueError("a fault was asked for")

    def worker_of(self, rows, count):
        """Samples whose reader ends about when the fault's step reads so many of them."""
        return EndingRows(rows, count * (self.step - 1), self._happened)

    def arm(self, rank, step):
        """Inside the save of a step."""
        if self.due(rank, step, "disk-full", "disk-full-passes"):
            fill(self._happened.with_name("filler"))
        if self.due(rank, step, "read-only", "read-only-passes"):
            only_reading(self._checkpoints, True)
        if self.due(rank, step, "file-too-large", "file-too-large-passes"):
            limit_files(LARGEST if rank == 0 else 16)  # the others write little, and no records

        def patch(room, name, *kinds):
            real = getattr(room, name)

            def faulty(*args, **options):
                if self.due(rank, step, kinds[0]):
                    die()
                if len(kinds) > 1 and self.due(rank, step, kinds[1]):
                    raise OSError(28, "No space left on device")
                return real(*args, **options)

            setattr(room, name, faulty)

        patch(saving.arrays, "start_writing", "kill-in-save")
        patch(saving, "checksums", "kill-before-commit", "no-space-at-commit")
        patch(saving, "put_in_place", "kill-at-commit")
        patch(in_folder, "remove", "kill-in-rotation")
        patch(own_copies, "values_of", "kill-in-copy")


def digest(trainer):
    """Of everything in the state."""
    total = hashlib.sha256()
    for name, leaf in sorted(trainer.checkpoint_leaves().items()):
        value = jax.random.key_data(leaf.whole()) if name == "key" else leaf.whole()
        total.update(name.encode() + np.asarray(to_host(value)).tobytes())
    return total.hexdigest()[:16]


def prepare(name, rate, ranks, seed=0, ends=None):
    """A trainer under a plan, and its data, which a worker reads where a fault ends it."""
    depth = max(2, ranks) if name == "pipe" else 2
    split = tuple(f"layers/{i}" for i in range(1, depth))
    degrees, plan = {
        "data": ({"data": -1}, {}),
        "fsdp": ({"fsdp": -1}, {}),
        "hybrid": ({"data": 2, "fsdp": -1}, {}),
        "pipe": ({"pipe": -1}, {"pipe": ax.Pipelined(num_microbatches=2, split=split)}),
        "diloco": ({"data": -1}, {"data": ax.DiLoCo(every=4)}),
    }[name]
    model = ax.parallelize(Net(depth, seed), ax.make_mesh(**degrees), ax.Plan(**plan))
    rows = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    data = rows if ends is None else ends.worker_of(rows, BATCH // ranks)
    loader = ax.create_dataloader(data, BATCH, model.mesh, seed=1, num_workers=int(ends is not None))
    return model.trainer(optax.adam(rate), loss_fn), loader


def nothing(*args):
    """What happens around the steps of an undisturbed training."""


def train(trainer, loader, start, records, before=nothing, began=nothing, after=nothing):
    """From a step to the last, or to where `after` says so."""
    for step, batch in zip(range(start + 1, STEPS + 1), loader, strict=False):
        before(step)
        loss = trainer.step(batch)["loss"]
        began(step, loss)
        measured = as_floats({"loss": loss})
        if records:
            records.write(Record(step, measured))
        if after(step):
            return step
    return None


def read(folder):
    """Beside whoever writes: what is newest is read again and again, on one device."""
    (trainer, loader), seen = prepare("data", 0.01, 1), set()
    (folder / "go").touch()
    with ax.CheckpointManager(folder / "checkpoints") as manager:
        while max(seen, default=0) < STEPS:
            if (restored := manager.restore(trainer, data=loader)) and restored.step not in seen:
                seen.add(restored.step)
                print(f"read={restored.step} {digest(trainer)}", flush=True)
            time.sleep(0.02)
    return 0


def main(folder, *asked):
    folder, seconds = Path(folder), float(os.environ.get("FAULT_INIT_TIMEOUT", "60"))
    if asked == ("READ",):
        return read(folder)
    world = ax.init(timeout=seconds)
    faults = [Fault(folder, *asked[i : i + 3], number=i // 3) for i in range(0, len(asked), 3)]
    rate = 0.02 if any(fault.due(world.rank, 0, "other-configuration") for fault in faults) else 0.01
    check_same("configuration", {"optim.learning_rate": rate}, world)
    seed = int(any(fault.due(world.rank, 0, "other-values") for fault in faults))
    ends = next((each for each in faults if each.kind == "worker-exit" and each.rank == world.rank), None)
    trainer, loader = prepare(os.environ.get("FAULT_AXIS", "data"), rate, world.world_size, seed, ends)
    first, beginning = to_host(trainer.state), loader.state_dict()
    opened = lambda name, start: JsonLines(folder / name, start) if world.is_main_process else None

    def before(step):
        while "FAULT_HOLD" in os.environ and not (folder / "go").exists():
            time.sleep(0.05)
        time.sleep(STEP_SECONDS)
        for fault in faults:
            fault.before(world.rank, step)
            if step == fault.step:
                fault.arm(world.rank, step)

    every = os.environ.get("FAULT_MEMORY")
    # A fault that passes is over before the next step: the save has to be too.
    passes = any(fault.passes for fault in faults)
    how = {"every": EVERY, "keep": 2} | ({"max_failures": 2, "asynchronous": False} if passes else {})
    with contextlib.ExitStack() as opened_here:
        manager = opened_here.enter_context(ax.CheckpointManager(folder / "checkpoints", **how))
        preemption = opened_here.enter_context(Preemption())
        memory = opened_here.enter_context(contextlib.closing(MemoryCopies(int(every)))) if every else None
        for fault in faults:
            fault.memory = memory
        if memory:
            restored, _ = restore_newest(memory, manager, trainer, data=loader)
        else:
            restored = manager.restore(trainer, data=loader)
        manager.claim()  # before records are opened
        start = restored.step if restored else 0
        ax.print0(f"start={start}", flush=True)
        with contextlib.ExitStack() as stack:
            watchdog = None

            def began(step, loss):
                nonlocal watchdog
                dog = ax.Watchdog(STUCK_AFTER, warning=STUCK_AFTER / 4)
                watchdog = watchdog or stack.enter_context(dog)  # once all is compiled
                watchdog.began(step, loss)

            def after(step):
                stop = preemption.stop_after(step)
                manager.save(step, trainer, data=loader, force=stop)
                if memory:
                    memory.keep(step, trainer, data=loader)
                return stop

            stopped = train(trainer, loader, start, opened("metrics.jsonl", start), before, began, after)
        if stopped is not None:
            manager.wait()
            ax.print0(f"terminated={stopped}", flush=True)
            return TERMINATED
    said = digest(trainer)
    ax.print0(f"digest={said}", flush=True)
    if os.environ.get("FAULT_UNDISTURBED"):  # the same training again, to which nothing happens
        trainer.state = first
        loader.load_state_dict(beginning)
        train(trainer, loader, 0, opened("undisturbed.jsonl", 0))
        said = digest(trainer)
        ax.print0(f"undisturbed={said}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
