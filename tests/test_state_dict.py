"""`state_dict` and `load_state_dict`: whole arrays by path name, every offender listed, nothing changed by a refusal."""

import jax
import numpy as np
import optax
import pytest
from plan_models import CASES, regression

import axonml_jax as ax
from axonml_jax.testing.equality import assert_trees_close

RANKS, BATCH = 2, regression(8)
WAYS = {
    "replicated": {},
    "local buffers": {"batch_stats": "local", "broadcast_buffers": False},
    "independent": {"sync_strategy": "no_sync"},
    "partly frozen": {"trainable": "kernel"},
}
NNX_NAMES = {"first/kernel", "last/bias", "last/kernel", "norm/bias", "norm/scale", "norm/mean", "norm/var"}
STATS = (
    "params/BatchNorm_0/bias",
    "params/BatchNorm_0/scale",
    "batch_stats/BatchNorm_0/mean",
    "batch_stats/BatchNorm_0/var",
)
LINEN_NAMES = {"params/Dense_0/kernel", "params/Dense_1/bias", "params/Dense_1/kernel", *STATS}


@pytest.fixture(scope="module")
def mesh():
    return ax.make_mesh(data=RANKS, devices=jax.devices()[:RANKS])


def wrap(name, mesh, **options):
    return ax.DDP(CASES[name].model(), mesh, params=CASES[name].params(), **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["batch_norm", "linen_batch_norm"])
def test_a_state_dict_carries_every_variable_to_a_fresh_model(mesh, name, way):
    source, target = wrap(name, mesh, **WAYS[way]), wrap(name, mesh, **WAYS[way])
    source.trainer(optax.sgd(0.1), CASES[name].loss).step(BATCH)
    values = source.state_dict()
    assert set(values) == (NNX_NAMES if name == "batch_norm" else LINEN_NAMES)
    assert {type(x) for x in values.values()} == {np.ndarray} and next(iter(values)) != "norm/mean"
    assert any(not np.array_equal(x, target.state_dict()[n]) for n, x in values.items())
    assert target.load_state_dict(values) == ([], [])
    assert all(np.array_equal(x, target.state_dict()[n]) for n, x in values.items())
    source.sync_parameters()  # what was loaded is the first rank's, on every rank alike
    for ours, theirs in zip(jax.tree.leaves(target.variables), jax.tree.leaves(source.variables), strict=True):
        assert ours.sharding == theirs.sharding
        for a, b in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
            assert np.array_equal(a.data, b.data)


def test_a_model_trains_on_after_loading_as_the_saved_one_would(mesh):
    a, b = wrap("batch_norm", mesh), wrap("batch_norm", mesh)
    steps = [m.trainer(optax.sgd(0.1), CASES["batch_norm"].loss) for m in (a, b)]
    steps[0].step(BATCH)
    b.load_state_dict(a.state_dict())
    assert_trees_close(steps[1].step(BATCH), steps[0].step(BATCH), "metrics")


def test_a_state_dict_moves_to_another_mesh_and_another_precision(mesh):
    source = wrap("batch_norm", mesh)
    values = source.state_dict()
    target = wrap("batch_norm", None, precision=ax.Precision(param="float32"))
    target.load_state_dict(values)
    loaded = target.state_dict()
    assert loaded["first/kernel"].dtype == np.float32 and loaded["norm/mean"].dtype == np.float64
    np.testing.assert_allclose(loaded["first/kernel"], values["first/kernel"], rtol=1e-6)


def test_a_refusal_lists_every_offender_and_changes_nothing(mesh):
    ddp = wrap("batch_norm", mesh)
    before = ddp.state_dict()
    values = {**before, "first/kernel": np.zeros((5, 7)), "head/bias": np.zeros(2), "norm/mean": np.zeros(7)}
    values["norm/scale"] = "ones"
    del values["last/bias"], values["norm/var"]
    with pytest.raises(ValueError, match="do not fit") as caught:
        ddp.load_state_dict(values)
    for line in (
        "first/kernel: shape (5, 7), needed (5, 6)",
        "norm/mean: shape (7,), needed (6,)",
        "norm/scale: 'ones' is no array, needed shape (6,)",
        "last/bias: missing",
        "norm/var: missing",
        "head/bias: unexpected",
    ):
        assert line in str(caught.value)
    with pytest.raises(ValueError, match=r"first/kernel: shape") as caught:
        ddp.load_state_dict(values, strict=False)  # shapes are never optional
    assert "missing" not in str(caught.value)
    with pytest.raises(TypeError, match=r"load_state_dict takes arrays by path name.*not a NoneType"):
        ddp.load_state_dict(None)
    assert_trees_close(ddp.state_dict(), before, "variables after a refusal")


def test_without_strict_what_matches_is_loaded_and_the_rest_reported(mesh):
    ddp = wrap("linen_batch_norm", mesh)
    with pytest.raises(ValueError, match="strict=False loads what matches"):
        ddp.load_state_dict({"params/Dense_1/bias": np.ones(3), "head": np.ones(3)})
    missing, unexpected = ddp.load_state_dict({"params/Dense_1/bias": np.ones(3), "head": np.ones(3)}, strict=False)
    assert set(missing) == LINEN_NAMES - {"params/Dense_1/bias"} and unexpected == ["head"]
    assert ddp.state_dict()["params/Dense_1/bias"].tolist() == [1, 1, 1]
