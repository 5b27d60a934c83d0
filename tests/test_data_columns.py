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
