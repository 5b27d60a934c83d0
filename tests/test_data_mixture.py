"""Mixtures: shares that are exact in the long run, orders drawn from the seed, and refusals."""

from collections import Counter

import jax
import numpy as np
import pytest
from data_sources import Counted, Numbers

import axonml_jax as ax
from axonml_jax.data.mixture import Shares

WEIGHTS = {"even": [1, 1], "thirds": [1, 1, 1], "floats": [0.1, 0.2, 0.7], "a rare one": [0.0003, 1.0], "one": [5]}


@pytest.mark.parametrize("name", WEIGHTS)
def test_shares_are_within_one_sample_after_every_block(name):
    weights = np.array(WEIGHTS[name])
    shares = Shares(weights.tolist(), seed=4)
    numbers = np.arange(5 * shares.block)
    sources, places = shares.places(numbers)
    for block in range(1, 6):
        counts = np.bincount(sources[: block * shares.block], minlength=len(weights))
        assert np.abs(counts - weights / weights.sum() * block * shares.block).max() <= 1
    for source in range(len(weights)):  # every source is drawn in its order, nothing left out
        assert sorted(places[sources == source]) == list(range((sources == source).sum()))
    shuffled = np.random.default_rng(0).permutation(numbers)
    assert (shares.sources(shuffled) == sources[shuffled]).all()
    if len(weights) > 1:
        assert (Shares(weights.tolist(), seed=5).sources(numbers) != sources).any()


def test_a_source_that_runs_out_begins_again_in_another_order_and_the_other_goes_on_over_epochs():
    mixed = ax.mix({"a": Numbers(10), "b": Numbers(1000, 1000)}, {"a": 1, "b": 1})
    mesh = ax.make_mesh(data=1, devices=jax.devices()[:1])
    loader = ax.create_dataloader(mixed, 101, mesh, num_epochs=3, drop_last=False)
    drawn = np.concatenate([np.asarray(batch) for batch in loader])[:3030]
    counts = Counter(drawn.tolist())
    assert [counts[i] for i in range(10)] == pytest.approx([151.5] * 10, abs=15)
    assert sorted(counts[i] for i in range(1000, 2000))[::999] == [1, 2]  # its second epoch began
    small = drawn[drawn < 10][:100].reshape(10, 10)
    assert (np.sort(small) == np.arange(10)).all() and (small[0] != small[1]).any()


def test_streams_are_mixed_as_datasets_are():
    make = lambda kind: ax.mix({"a": kind(50), "b": Numbers(50, 100)}, {"a": 3, "b": 1}, seed=7)
    mesh = ax.make_mesh(data=1, devices=jax.devices()[:1])
    found = []
    for kind in (Numbers, Counted):
        loader = iter(ax.create_dataloader(make(kind), 50, mesh, shuffle=False))
        found.append(np.concatenate([np.asarray(next(loader)) for _ in range(20)]))
        loader.close()
    assert ((found[0] < 100) == (found[1] < 100)).all()
    assert (found[0][found[0] < 100] == found[1][found[1] < 100]).all()


def test_what_is_no_mixture_is_refused():
    with pytest.raises(ValueError, match="'b', 'c' must be in both"):
        ax.mix({"a": Numbers(1), "b": Numbers(1)}, {"a": 1, "c": 1})
    with pytest.raises(ValueError, match=r"seed=-1.*; the weight of 'a' is 0: must be positive"):
        ax.mix({"a": Numbers(1)}, {"a": 0}, seed=-1)
    with pytest.raises(ValueError, match="'a' must hold samples"):
        ax.mix({"a": Numbers(0)}, {"a": 1})
    mixed = iter(ax.mix({"a": iter(range(2)), "b": Numbers(9)}, {"a": 1, "b": 1}))
    with pytest.raises(ValueError, match="'a' of a mixture gives its samples once"):
        [next(mixed) for _ in range(20)]
