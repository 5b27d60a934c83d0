"""One process of a launch: `python ddp_rank.py PORT NUM_PROCESSES PROCESS_ID` trains under DDP and prints what it saw as JSON.

The test process computes what one device would have seen; the table of runs is shared.
"""

import functools
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from workers.launch import QUICK

if __name__ == "__main__":  # programs that run a few times: compiling them well costs more than it gives
    os.environ["XLA_FLAGS"] = QUICK

import jax
import numpy as np
import optax
from flax import nnx
from plan_models import BatchNormNet, DropoutMLP, mean_loss, regression, weighted_loss

import axonml_jax as ax
from axonml_jax.sharding.layout import to_host

STEPS, ROWS = 5, 12
BATCHES = [regression(ROWS, seed) for seed in range(STEPS)]
TX = optax.adamw(1e-2)


@functools.cache
def dropout():
    return DropoutMLP(nnx.Rngs(0))


@functools.cache
def norms():
    return BatchNormNet(nnx.Rngs(0))


RUNS = {  # name: (model, loss function, options of the data strategy, microbatches)
    "overlapped": (dropout, mean_loss, {"bucket_size_mb": 0.0002}, 1),
    "accumulated": (norms, weighted_loss, {"sync_strategy": "synchronous"}, 3),
    "independent": (dropout, mean_loss, {"sync_strategy": "no_sync"}, 1),
}


def plan_of(name):
    _, _, options, accumulate = RUNS[name]
    return ax.Plan(data=ax.Replicate(**options), accumulate=accumulate)


class Rows:
    """The rows of the five batches as a dataset, which counts how many of them this process loads."""

    def __init__(self):
        self.loaded = 0

    def __len__(self):
        return STEPS * ROWS

    def __getitem__(self, index):
        self.loaded += 1
        batch, row = BATCHES[index // ROWS], index % ROWS
        return {name: batch[name][row] for name in ("x", "y", "w")}


def train(name, world):
    """A run fed with whole NumPy batches: its model, trainer, state at the start, and what the oracle gives too."""
    make, loss_fn, _, _ = RUNS[name]
    model = ax.parallelize(make(), world, plan_of(name))
    seen, start = {}, model.state_dict()
    if not model.plan.independent:
        returned, seen["gradients"] = model.value_and_grad(loss_fn)(BATCHES[0])
        seen["first_loss"] = returned[0] if isinstance(returned, tuple) else returned
        model.load_state_dict(start)  # value_and_grad moved the running averages
    trainer = model.trainer(TX, loss_fn)
    first = to_host(trainer.state)
    metrics = [to_host(trainer.step(batch)) for batch in BATCHES]
    seen |= {key: [m[key] for m in metrics] for key in ("loss", "grad_norm")}
    return model, trainer, first, seen | to_host({"parameters": model.parameters(), "state": model.variables.state})


def face(model, trainer, world):
    """The rest of the face, on a trained model."""
    before, x = model.state_dict(), BATCHES[0]["x"]
    seen = {"evaluation": trainer.evaluate(BATCHES[0])["loss"], "outputs": model.eval()(x), "state_dict": before}
    odd = {key: value[:-1] for key, value in BATCHES[1].items() if np.ndim(value)}
    seen["predictions"] = trainer.predict([BATCHES[0], odd], lambda model, batch: model(batch["x"]))
    seen["validation"] = trainer.validate([BATCHES[0], odd])["loss"]
    module = model.module  # on this process alone
    module.eval()
    np.testing.assert_allclose(to_host(seen["outputs"]), module(x), rtol=1e-9)
    model.load_state_dict({name: value + 1 for name, value in before.items()})
    after = model.state_dict()
    assert all(np.array_equal(after[name], value + 1) for name, value in before.items())
    model.load_state_dict(before)
    kept = to_host(trainer.state)
    first = to_host(trainer.step(BATCHES[1]))
    trainer.state = kept
    assert all(np.array_equal(value, first[name]) for name, value in to_host(trainer.step(BATCHES[1])).items())
    model.set_parameters(jax.tree.map(lambda value: np.asarray(value) * 0, kept.variables.params))
    assert all(not leaf.any() for leaf in jax.tree.leaves(to_host(model.parameters())))
    return seen


def by_loader(trainer, start, world):
    """A run again, fed with the rows that each process loads for itself."""
    dataset = Rows()
    loader = ax.create_dataloader(dataset, ROWS, world.mesh, shuffle=False, num_epochs=1, prefetch=0)
    trainer.state = start
    losses = [float(trainer.step({**batch, "scale": BATCHES[0]["scale"]})["loss"]) for batch in loader]
    assert dataset.loaded == STEPS * ROWS // world.world_size, "a process loads its own rows only"
    return losses


def synchronized(model):
    """Independent models differ; afterwards every process holds the first one's bits."""
    own = [np.asarray(leaf.addressable_data(0)).tobytes().hex() for leaf in jax.tree.leaves(model.parameters())]
    model.sync_parameters()
    now = [np.asarray(leaf.addressable_data(0)).tobytes().hex() for leaf in jax.tree.leaves(model.parameters())]
    return {"own": own, "synced": now}


def main(port, num_processes, process_id):
    jax.config.update("jax_enable_x64", True)
    world = ax.init(coordinator=f"127.0.0.1:{port}", num_processes=num_processes, process_id=process_id, timeout=60)
    seen = {}
    for name in RUNS:
        model, trainer, start, seen[name] = train(name, world)
        if name == "overlapped":
            seen["loader"] = by_loader(trainer, start, world)
        if name == "accumulated":
            seen["face"] = face(model, trainer, world)
        if name == "independent":
            seen["bits"] = synchronized(model)
    print(
        json.dumps(jax.tree.map(lambda x: x if isinstance(x, str) else np.asarray(x).tolist(), to_host(seen))),
        flush=True,
    )
    ax.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
