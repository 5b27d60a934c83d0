"""A dict of arrays as a dataset: the batches of its rows, and what is refused."""

import jax
import numpy as np
import pytest

import axonml_jax as ax


def test_a_dict_of_arrays_gives_the_batches_of_its_rows():
    arrays = {"id": list(range(20)), "in": {"square": np.arange(20)[:, None] ** 2}}
    rows = [{"id": i, "in": {"square": np.array([i**2])}} for i in range(20)]
    mesh = ax.make_mesh(data=2, devices=jax.devices()[:2])
    for size, options in ((8, {}), (8, {"drop_last": False}), (20, {"shuffle": False})):
        both = [list(ax.create_dataloader(data, size, mesh, num_epochs=2, **options)) for data in (arrays, rows)]
        for ours, theirs in zip(*both, strict=True):
            assert jax.tree.map(lambda x: (x.sharding, x.tolist()), ours) == jax.tree.map(
                lambda x: (x.sharding, x.tolist()), theirs
            )
    by_index = ax.create_dataloader(dict(enumerate(rows)), 8, mesh, shuffle=False, num_epochs=1)
    assert [batch["id"].tolist() for batch in by_index] == [[*range(8)], [*range(8, 16)]]


@pytest.mark.parametrize("arrays,said", [
    ({"x": np.ones((3, 2)), "y": np.ones(4), "z": {"w": 1.0}}, "x: 3, y: 4, z/w: a scalar"), ({}, "lengths are none"),
])  # fmt: skip
def test_a_dict_whose_arrays_differ_in_length_is_refused_by_name(arrays, said):
    with pytest.raises(ValueError, match=said):
        ax.create_dataloader(arrays, 1, ax.make_mesh(data=1, devices=jax.devices()[:1]))


MASKED = np.ma.masked_greater(np.arange(8), 6)


@pytest.mark.parametrize("collate", [None, lambda samples: {"x": np.ma.stack([sample["x"] for sample in samples])}])
@pytest.mark.parametrize("column,said", [
    (np.arange(8) + 2**31 - 7, r"x: int64 from \d+ to 2147483648, which do not fit int32"),
    (np.arange(8, dtype=np.uint64) + 2**32 - 7, r"x: uint64 from \d+ to 4294967296"),
    ([2**31 + i - 7 for i in range(8)], r"x: int64 from \d+ to 2147483648"),
    (MASKED, "x: masked values; give leaf.filled"),
    (np.ma.stack([MASKED, MASKED], 1), "x: masked values"),
    (np.array([2**70] * 8, object), r"x: objects \(int\)"),
    (np.arange(8).astype("M8[s]"), r"x: datetime64\[s\]"),
    (np.arange(8).astype(np.longdouble), f"x: {np.dtype(np.longdouble)}"),
])  # fmt: skip
@pytest.mark.parametrize("rows", [False, True])
def test_what_devices_would_hold_as_something_else_is_refused_by_name(column, said, rows, collate):
    source = [{"x": x} for x in column] if rows else {"x": column}
    loader = ax.create_dataloader(source, 8, ax.make_mesh(data=1, devices=jax.devices()[:1]), collate=collate)
    with jax.enable_x64(False), pytest.raises(TypeError, match=said):
        next(iter(loader))


def test_keys_of_jax_are_refused_as_samples():
    keys = jax.random.split(jax.random.key(0), 4)
    mesh = ax.make_mesh(data=1, devices=jax.devices()[:1])
    for source in ({"k": keys}, [{"k": key} for key in keys]):
        with pytest.raises(TypeError, match=r"k: a JAX random key; give a whole number"):
            next(iter(ax.create_dataloader(source, 4, mesh)))
