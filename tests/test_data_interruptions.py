"""Two hundred interruptions, each with another number of processes: no sample is lost or doubled, whatever the source."""

import json
from dataclasses import asdict

import data_sources
import jax
import numpy as np
import pytest
from data_sources import Counted, Numbers, Stateful, collected

import axonml_jax as ax
from axonml_jax.data.sampler import Batching, Fetch
from axonml_jax.data.streams import Stream, StreamFeed, as_dataset

BATCH, WORLDS = 12, (1, 2, 3, 4, 6, 12)

# what makes the source, and how many samples of it are permuted among each other
SOURCES = {
    "a dataset": (lambda: Numbers(96), True),
    "a mixture of datasets": (data_sources.mixture, True),
    "an iterable": (lambda: Counted(96), 1),
    "an iterable, shuffled": (lambda: Counted(96), 7),
    "its own state": (lambda: Stateful(96), 1),
    "its own state, shuffled": (lambda: Stateful(96), 10),
    "a generator function": (lambda: data_sources.numbers, 5),
    "packed rows of a stream": (data_sources.packed_stream, 1),
    "a mixture with an iterable": (data_sources.mixed_stream, 4),
}


def feed_of(make, order, world, rank):
    """What one process of so many reads."""
    source = as_dataset(make())
    rows = np.arange(BATCH).reshape(world, -1)[rank]
    if isinstance(source, Stream):
        return StreamFeed(Stream(source.source, order, 11), BATCH, True, rows, collected)
    return Fetch(source, Batching(len(source), BATCH, True), rows, order, 11, collected)


def drawn(feeds, state, batches):
    """The samples of some batches in global order, and the state after them, which all processes agree on."""
    starts = [feed.first() if state is None else feed.position(json.loads(state)) for feed in feeds]
    samples, after = [], starts
    for index in range(batches):
        found = [feed.batch(start, index, None, None) for feed, start in zip(feeds, starts, strict=True)]
        samples += [sample for batch, *_ in found for sample in batch]
        after = [position for _, position, _ in found]
    states = {json.dumps(asdict(position)) for position in after}
    assert len(states) == 1
    return samples, states.pop()


@pytest.mark.parametrize("name", SOURCES)
def test_no_sample_is_lost_or_doubled_over_interruptions_and_changes_of_world_size(name):
    make, order = SOURCES[name]
    draw = np.random.default_rng(sum(map(ord, name)))
    pieces = draw.integers(1, 6, 200).tolist()
    whole, _ = drawn([feed_of(make, order, 1, 0)], None, sum(pieces))
    state, found = None, []
    for batches in pieces:
        world = int(draw.choice(WORLDS))
        samples, state = drawn([feed_of(make, order, world, rank) for rank in range(world)], state, batches)
        found += samples
    assert found == whole
    if name in ("a dataset", "an iterable", "an iterable, shuffled", "its own state", "its own state, shuffled"):
        epochs = np.array(found[: len(found) // 96 * 96]).reshape(-1, 96)
        assert len(epochs) > 50 and (np.sort(epochs) == np.arange(96)).all()


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "name", ["a mixture of datasets", "an iterable, shuffled", "its own state", "packed rows of a stream"]
)
def test_loaders_go_on_to_the_sample_on_other_meshes_and_workers(name, num_workers):
    make, order = SOURCES[name]
    options = {"shuffle": order not in (1, False), "shuffle_window": max(int(order), 1), "seed": 2}

    def loader(devices, workers):
        mesh = ax.make_mesh(data=devices, devices=jax.devices()[:devices])
        source = make()
        source = source if name != "packed rows of a stream" else data_sources.packed_stream()
        return ax.create_dataloader(source, BATCH, mesh, num_workers=workers, collate=as_rows, **options)

    whole = data_sources.first(loader(1, 0), 9)
    state, found = None, []
    for devices, workers, batches in ((4, num_workers, 2), (2, 0, 3), (1, num_workers, 4)):
        current = loader(devices, workers)
        if state is not None:
            current.load_state_dict(json.loads(state))
        stream = iter(current)
        found += data_sources.first(stream, batches)
        state = json.dumps(current.state_dict())
        stream.close()
    assert found == whole


def as_rows(samples):
    """One number or one row of tokens per sample."""
    return np.stack([np.asarray(sample["tokens"] if isinstance(sample, dict) else sample) for sample in samples])
