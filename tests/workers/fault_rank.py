"""A small resumable training, one process of it, in which one fault happens: `python fault_rank.py FOLDER [FAULT RANK STEP]`.

The fault happens once: a file in FOLDER says that it has. Prints a digest of the final state on rank 0; with FAULT_UNDISTURBED
set, that of a second training too, from the first state on and without checkpoints. With FAULT_MEMORY=k the state is copied to
memory every k steps too.
"""

import contextlib
import errno
import hashlib
import os
import resource
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import axonml_jax as ax
from axonml_jax.checkpoint import manager as manager_room
from axonml_jax.checkpoint import saving
from axonml_jax.checkpoint.keeping import failures
from axonml_jax.checkpoint.memory import own_copies
from axonml_jax.checkpoint.memory.memory_copies import MemoryCopies
from axonml_jax.launch.job.fit import Record
from axonml_jax.launch.job.preemption import Preemption
from axonml_jax.launch.job.records import JsonLines
from axonml_jax.sharding.place import to_host
from axonml_jax.training.same_everywhere import check_same

STEPS, EVERY, ROWS = 12, 3, 64
STUCK_AFTER = float(os.environ.get("FAULT_STUCK_AFTER", "12"))
STEP_SECONDS = float(os.environ.get("FAULT_STEP_SECONDS", "0"))  # what a step takes at least
TERMINATED = 143
ROOM = 1 << 13
LARGEST = 2048  # records are shorter, what a process writes of a checkpoint is not


class Net(nnx.Module):
    """Two layers of odd width."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(3, 7, rngs=rngs), nnx.Linear(7, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def loss_fn(model, batch):
    return jnp.mean((model(batch) - jnp.sum(batch, 1, keepdims=True)) ** 2)


def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
    time.sleep(60)


def fill(path):
    """Leave next to nothing of the file system that a file is on."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
        # What a line of records needs is left.
        file.truncate(max(0, file.tell() - ROOM))


def limit_files(size):
    """No file of this process may become larger; what it writes beyond is an error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


class Fault:
    """What goes wrong in this process, if anything."""

    def __init__(self, folder, kind="none", rank="-1", step="-1"):
        self.kind, self.rank, self.step = kind, int(rank), int(step)
        self.memory = None
        self._happened = folder / "fault-happened"
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
        if self.due(rank, step, "kill"):
            die()
        if self.due(rank, step, "lose-memory"):  # as a machine that is replaced
            self.memory._forget()
            die()
        if self.due(rank, step, "terminate"):
            os.kill(os.getpid(), signal.SIGTERM)
        if self.due(rank, step, "sleep"):
            time.sleep(600)
        if self.due(rank, step, "stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.due(rank, step, "exit"):
            os._exit(0)
        if self.due(rank, step, "raise"):
            raise ValueError("a fault was asked for")

    def arm(self, rank, step):
        """Inside the save of a step."""
        if self.due(rank, step, "disk-full", "disk-full-passes"):
            fill(self._happened.with_name("filler"))
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
        patch(manager_room, "remove", "kill-in-rotation")
        patch(own_copies, "values_of", "kill-in-copy")


def digest(trainer):
    """Of everything in the state."""
    total = hashlib.sha256()
    for name, leaf in sorted(trainer.checkpoint_leaves().items()):
        value = jax.random.key_data(leaf.whole()) if name == "key" else leaf.whole()
        total.update(name.encode() + np.asarray(to_host(value)).tobytes())
    return total.hexdigest()[:16]


def prepare(axis, rate):
    """A trainer and its data."""
    model = ax.parallelize(Net(), ax.make_mesh(**{axis: -1}))
    rows = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    return model.trainer(optax.adam(rate), loss_fn), ax.create_dataloader(rows, 8, model.mesh, seed=1)


def nothing(*args):
    """What happens around the steps of an undisturbed training."""


def train(trainer, loader, start, records, before=nothing, began=nothing, after=nothing):
    """From a step to the last, or to where `after` says so."""
    for step, batch in zip(range(start + 1, STEPS + 1), loader, strict=False):
        before(step)
        loss = trainer.step(batch)["loss"]
        began(step, loss)
        if records:
            records.write(Record(step, {"loss": float(loss)}))
        if after(step):
            return step
    return None


def main(folder, *fault):
    folder, seconds = Path(folder), float(os.environ.get("FAULT_INIT_TIMEOUT", "60"))
    world, fault = ax.init(timeout=seconds), Fault(folder, *fault)
    rate = 0.02 if fault.due(world.rank, 0, "other-configuration") else 0.01
    check_same("configuration", {"optim.learning_rate": rate}, world)
    trainer, loader = prepare(os.environ.get("FAULT_AXIS", "data"), rate)
    first, beginning = to_host(trainer.state), loader.state_dict()
    opened = lambda name, start: JsonLines(folder / name, start) if world.is_main_process else None

    def before(step):
        time.sleep(STEP_SECONDS)
        fault.before(world.rank, step)
        if step == fault.step:
            fault.arm(world.rank, step)

    every = os.environ.get("FAULT_MEMORY")
    # A fault that passes is over before the next step: the save has to be too.
    how = {"every": EVERY, "keep": 2} | ({"max_failures": 2, "asynchronous": False} if fault.passes else {})
    with contextlib.ExitStack() as opened_here:
        manager = opened_here.enter_context(ax.CheckpointManager(folder / "checkpoints", **how))
        preemption = opened_here.enter_context(Preemption())
        memory = opened_here.enter_context(contextlib.closing(MemoryCopies(int(every)))) if every else None
        fault.memory, restored = memory, None
        if memory:
            restored = memory.restore(trainer, data=loader, after=manager.steps[-1] - 1 if manager.steps else -1)
        restored = restored or manager.restore(trainer, data=loader)
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
