"""One process of a launch: trainers that begin differently in each process, what the first step says, and trainers that do not.

Prints one line of JSON: what came of every case, an error as its text.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import axonml_jax as ax
from axonml_jax.sharding.layout import to_host

BATCH = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)}


class Net(nnx.Module):
    def __init__(self, seed, width=6):
        self.up = nnx.Linear(4, width, rngs=nnx.Rngs(seed))
        self.down = nnx.Linear(width, 2, rngs=nnx.Rngs(seed + 10))

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def squares(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def sizes(model, batch):
    return jnp.mean(jnp.abs(model(batch["x"])))


def trainer(face=ax.DDP, seed=0, tx=None, loss=squares, width=6, **options):
    return face(Net(seed, width), **options).trainer(tx or optax.adam(1e-2), loss)


def weighted(model, batch, weights):
    return jnp.mean(model(batch["x"]) ** 2 * weights)


def cases(rank, world):
    """Every case as a function of nothing."""
    split, replaced = trainer(ax.FSDP, seed=rank), trainer()
    synced, mixed = trainer(seed=rank), trainer(ax.FSDP, seed=rank)
    synced.model.sync_parameters()
    mixed.model.sync_parameters()
    state = to_host(replaced.state)
    other = lambda: jax.tree.map(lambda x: x + rank if x.dtype == np.float32 else x, state)
    weights = np.full((1, 2), 1.0 + rank, np.float32)
    injected = lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.01 * (1 + rank))

    def after_the_first_error():
        split.model.load_state_dict(ax.broadcast_object(split.model.state_dict(), world.default_group()))
        return split.step(BATCH)

    def restored():
        replaced.step(BATCH)
        replaced.state = other()
        return replaced.step(BATCH)

    return {
        "alike": lambda: trainer().step(BATCH),
        "seeds": lambda: trainer(seed=rank).step(BATCH),
        "seeds, split": lambda: split.step(BATCH),
        "then loaded": after_the_first_error,
        "then synchronized": lambda: synced.step(BATCH),
        "split, then synchronized": lambda: mixed.step(BATCH),
        "seeds of the runs": lambda: keyed(rank).step(BATCH),
        "rates": lambda: trainer(tx=optax.adam(0.01 * (1 + rank))).step(BATCH),
        "rates in the state": lambda: trainer(tx=injected()).step(BATCH),
        "losses": lambda: trainer(loss=(squares, sizes)[rank]).step(BATCH),
        "losses' arrays": lambda: trainer(loss=lambda m, b: weighted(m, b, weights)).step(BATCH),
        "widths": lambda: trainer(width=6 + 2 * rank).step(BATCH),
        "plans": lambda: trainer((ax.DDP, ax.FSDP)[rank]).step(BATCH),
        "rows": lambda: trainer().step({"x": BATCH["x"][: 4 + 4 * rank]}),
        "values of rows": lambda: trainer().step({"x": BATCH["x"] + rank}),
        "values of later rows": lambda: steps(*[BATCH] * 4, {"x": BATCH["x"] + rank}),
        "values of last rows": lambda: steps(BATCH, BATCH, BATCH, {"x": BATCH["x"][:4] + rank}),
        "later rows alike": lambda: steps(*[{"x": BATCH["x"] + i} for i in range(9)], {"x": BATCH["x"][:4]}),
        "restored": restored,
        "rounds": lambda: rounds(rank).step(BATCH),
        "gradients alike": lambda: by_hand(),
        "gradients' seeds": lambda: by_hand(seed=rank),
        "gradients' synchronized seeds": lambda: by_hand(seed=rank, sync=True),
        "gradients' losses": lambda: by_hand(loss=(squares, sizes)[rank]),
        "gradients' rows": lambda: by_hand(batch={"x": BATCH["x"] + rank}),
        "gradients' later rows": lambda: by_hand(other=rank),
        "gradients' keys": lambda: by_hand(key=rank),
        "gradients' rates": lambda: by_hand(rate=0.1 * (1 + rank)),
        "gradients, not synchronized": lambda: by_hand(accumulate=True, rate=0.1 * (1 + rank)),
        "gradients after a load": lambda: by_hand(later=rank),
        "evaluated alike": lambda: evaluated(BATCH, [BATCH, short(3)], [BATCH, short(3), BATCH]),
        "evaluated loader": lambda: evaluated(
            *[ax.create_dataloader(BATCH, 4, ax.make_mesh(data=2), num_epochs=1)] * 2
        ),
        "evaluated rows": lambda: evaluated(short(5 + rank)),
        "evaluated values": lambda: evaluated({"x": BATCH["x"] + rank}),
        "evaluated values, later": lambda: evaluated(BATCH, short(5), {"x": BATCH["x"][:4] + rank}),
        "validated rows": lambda: evaluated(BATCH, [BATCH, short(5 + rank)]),
        "validated values": lambda: evaluated(BATCH, [{"x": BATCH["x"] + rank}]),
        "validated numbers": lambda: evaluated(BATCH, [BATCH] * (1 + rank)),
        "predicted values": lambda: evaluated(BATCH, [BATCH], [{"x": BATCH["x"] + rank}]),
        "predicted numbers": lambda: evaluated(BATCH, [BATCH], [BATCH] * (2 - rank)),
        "loaders alike": lambda: [*loader()],
        "loaders' seeds": lambda: [*loader(seed=rank)],
        "loaders' lengths": lambda: [*loader(rows=8 - 4 * rank)],
        "loaders' sizes": lambda: [*loader(size=2 + 2 * rank)],
        "loaders' epochs": lambda: [*loader(num_epochs=1 + rank)],
        "loaders' last batches": lambda: [*loader(size=6, drop_last=rank == 0)],
        "loaders' windows": lambda: [*loader(stream=True, shuffle_window=1 + rank)],
        "loaders' positions": lambda: loaded(rank),
        "independent": lambda: trainer(seed=rank, sync_strategy="no_sync").step(BATCH),
    }


def steps(*batches):
    made = trainer()
    for batch in batches:
        made.step(batch)


def short(rows):
    return {"x": BATCH["x"][:rows]}


def evaluated(*given):
    """What a trainer evaluates: batches, then lists or loaders of them, to validate and then to predict on."""
    made, lists = trainer(), [each for each in given if not isinstance(each, dict)]
    for batch in given[: len(given) - len(lists)]:
        made.evaluate(batch)
    calls = made.validate, lambda batches: made.predict(batches, lambda model, batch: model(batch["x"]))
    for batches, call in zip(lists, calls, strict=False):
        call(batches)


def loader(size=4, rows=8, stream=False, num_epochs=1, **options):
    samples = [{"x": row} for row in BATCH["x"][:rows]]
    given = (lambda: iter(samples)) if stream else samples
    return ax.create_dataloader(given, size, ax.make_mesh(data=2), num_epochs=num_epochs, **options)


def loaded(rank):
    """A loader that goes on from another position in each process."""
    made = loader()
    batches = iter(made)
    next(batches)
    if rank:
        next(batches)
    made.load_state_dict(made.state_dict())
    return [*made]


def by_hand(seed=0, loss=squares, batch=BATCH, key=0, rate=0.1, sync=False, accumulate=False, later=0, other=0):
    """Three updates of a loop of one's own."""
    model = ax.DDP(Net(seed), seed=key)
    if sync:
        model.sync_parameters()
    gradients = model.value_and_grad(loss)
    for step in range(3):
        if accumulate:
            with model.no_sync():
                gradients(batch)
                grads = model.sync_gradients(gradients(batch)[1])
        else:
            grads = gradients(batch)[1]
            batch = {"x": batch["x"] + other}
        model.set_parameters(jax.tree.map(lambda p, g: p - rate * g, model.parameters(), grads))
        if step == 1 and later:
            model.load_state_dict({name: x + later for name, x in model.state_dict().items()})
        elif step == 1:
            model.load_state_dict(model.state_dict())


def keyed(rank):
    return ax.DDP(Net(0), seed=rank).trainer(optax.adam(1e-2), squares)


def rounds(rank):
    model = ax.parallelize(Net(rank), ax.make_mesh(data=2), ax.Plan(data=ax.DiLoCo(every=2)))
    return model.trainer(optax.adam(1e-2), squares)


def main():
    world, found = ax.init(timeout=120), {}
    for name, case in cases(world.rank, world).items():
        try:
            case()
            found[name] = "well"
        except ValueError as error:
            found[name] = str(error)
    print(json.dumps(found), flush=True)
    ax.shutdown()


if __name__ == "__main__":
    main()
