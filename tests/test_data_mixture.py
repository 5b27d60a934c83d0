"""Mixtures: shares that are exact in the long run, orders drawn from the seed, and refusals."""

import gc
import math
import pickle
import weakref
from collections import Counter
from fractions import Fraction

import jax
import numpy as np
import pytest
from data_sources import Counted, Numbers

import axonml_jax as ax
from axonml_jax.data.streams import Shares

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


def test_a_mixture_within_a_mixture_keeps_its_shares():
    mesh = ax.make_mesh(data=1, devices=jax.devices()[:1])
    inner = ax.mix({"a": Numbers(900), "b": Numbers(100, 1000)}, {"a": 1, "b": 9})
    for other in (Numbers(500, 2000), lambda: iter(range(2000, 2500))):
        mixed = ax.mix({"inner": inner, "other": other}, {"inner": 1, "other": 1})
        batches = zip(ax.create_dataloader(mixed, 100, mesh), range(10), strict=False)
        drawn = np.concatenate([np.asarray(batch) for batch, _ in batches])
        own = drawn[drawn < 2000]
        assert 450 < len(own) < 550 and 0.85 < (own >= 1000).mean() < 0.95
    with pytest.raises(ValueError, match="pack takes every document of a Mixture once"):
        ax.pack(ax.mix({"a": ["ab"], "b": ["cd"]}, {"a": 1, "b": 9}), 4)


def test_weights_may_be_numbers_of_numpy_and_jax():
    for one in (np.float32(1.5), jax.numpy.float32(1.5), np.float64(1.5)):
        assert Shares([one, np.int64(2)], seed=4).before(7000) == Shares([1.5, 2], seed=4).before(7000)


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


def test_every_source_has_an_order_of_its_own():
    """Sources of one length, of which one seed for all would draw the same samples side by side."""
    mesh = ax.make_mesh(data=1, devices=jax.devices()[:1])
    for third, shuffle in (
        (Numbers(40, 200), True),
        (lambda: iter(range(200, 240)), False),
    ):  # streams' sources shuffle anyway
        mixed = ax.mix({"a": Numbers(40), "b": Numbers(40, 100), "c": third}, {"a": 1, "b": 1, "c": 1}, seed=3)
        batches = zip(ax.create_dataloader(mixed, 60, mesh, seed=3, shuffle=shuffle), range(3), strict=False)
        drawn = np.concatenate([np.asarray(batch) for batch, _ in batches])
        a, b = (drawn[(drawn >= first) & (drawn < first + 40)][:40] - first for first in (0, 100))
        assert sorted(a.tolist()) == sorted(b.tolist()) == list(range(40)) and (a != b).mean() > 0.8


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


class Named(Counted):
    """A stream that says what it holds."""

    fingerprint = "counted"


def test_the_place_in_a_mixture_of_streams_is_of_that_mixture():
    mesh = ax.make_mesh(data=1, devices=jax.devices()[:1])
    loader = lambda *shares: ax.create_dataloader(
        ax.mix({"a": Named(50), "b": Numbers(50, 100)}, dict(zip("ab", shares, strict=True))), 50, mesh
    )
    state = loader(3, 1).state_dict()
    assert state["fingerprint"] == "a: counted, b: 50 mixed [3.0, 1.0] by 0, each in an order of its own"
    with pytest.raises(ValueError, match=r"the saved position is of other data or another order. fingerprint: saved a"):
        loader(1, 1).load_state_dict(state)
    packed = ax.create_dataloader(ax.pack(lambda: iter(["ab"]), 4), 1, mesh).state_dict()
    assert packed["fingerprint"].endswith("in shared rows of 4")


def test_orders_are_let_go_of_with_their_mixture():
    mixed, places = ax.mix({"a": Numbers(50), "b": Numbers(9)}, {"a": 3, "b": 1}), np.arange(59)
    found = mixed.order_of(3, places, shuffle=True, seed=7)
    assert (pickle.loads(pickle.dumps(mixed)).order_of(3, places, shuffle=True, seed=7) == found).all()
    kept = weakref.ref(mixed._order(50, True, 7, 3))
    assert kept() is not None
    del mixed
    gc.collect()
    assert kept() is None


def test_what_is_no_mixture_is_refused():
    with pytest.raises(TypeError, match="mix takes sources and weights by name"):
        ax.mix([[{"a": 1}] * 4] * 2, [1, 1])
    with pytest.raises(ValueError, match="'b', 'c' must be in both"):
        ax.mix({"a": Numbers(1), "b": Numbers(1)}, {"a": 1, "c": 1})
    with pytest.raises(ValueError, match=r"seed=-1.*; the weight of 'a' is 0: must be positive"):
        ax.mix({"a": Numbers(1)}, {"a": 0}, seed=-1)
    for weight in (math.inf, math.nan, "3"):
        with pytest.raises(ValueError, match=r"the weight of 'a' is .*: must be positive, and a finite number"):
            ax.mix({"a": Numbers(1)}, {"a": weight})
    tiny = {"a": 1, "b": 1e-9, "c": 1e-6, "d": Fraction(1, 10**8)}
    with pytest.raises(ValueError, match=r"the shares of 'b' and 'd' are below one in 1,048,576") as error:
        ax.mix({name: Numbers(1) for name in tiny}, tiny)
    assert "'c'" not in str(error.value)
    with pytest.raises(ValueError, match="'a' must hold samples"):
        ax.mix({"a": Numbers(0)}, {"a": 1})
    mixed = iter(ax.mix({"a": iter(range(2)), "b": Numbers(9)}, {"a": 1, "b": 1}))
    with pytest.raises(ValueError, match="'a' of a mixture can be iterated over once"):
        [next(mixed) for _ in range(20)]
