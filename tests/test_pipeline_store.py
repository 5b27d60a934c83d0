"""How leaves come to rest on the ranks of a pipeline: one after the other, each device its own part."""

import weakref

import jax
import numpy as np

import axonml_jax as ax
from axonml_jax.pipeline.store import StageStore
from axonml_jax.sharding.layout import Layout

SHAPES = [(4, 3), (5,), (2, 2), (7,), (3,)]
STAGES = (0, 0, 1, 1, 0)


def test_leaves_come_to_rest_one_after_the_other_and_are_found_again():
    layouts = [Layout.replicated(jax.ShapeDtypeStruct(shape, np.float32)) for shape in SHAPES]
    layouts[1] = layouts[1].on("fsdp", dim=0, size=2)  # rests as six elements
    degrees = {"pipe": 2, "fsdp": 2}
    store = StageStore(tuple(layouts), STAGES, num_stages=2, num_ranks=2, degrees=degrees)
    seen = []

    def leaves():
        for number, shape in enumerate(SHAPES):
            assert all(earlier() is None for earlier in seen[:-1]), "an earlier leaf is kept"
            leaf = np.full(shape, number, np.float32)
            seen.append(weakref.ref(leaf))
            yield leaf
            del leaf

    mesh = ax.make_mesh(**degrees, devices=jax.devices()[:4])
    resting = store.place(leaves(), mesh)
    assert {name: array.addressable_shards[0].data.size for name, array in resting.items()} == {
        "float32": 15,  # the first stage's 12 and 3; the second's 4 and 7, padded
        "float32 over fsdp": 3,
    }
    for number, (shape, whole) in enumerate(zip(SHAPES, store.spread(resting, mesh), strict=True)):
        np.testing.assert_array_equal(whole, np.full(shape, number, np.float32))
