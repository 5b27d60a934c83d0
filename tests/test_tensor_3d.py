"""AxoNN's 3-D layers on grids of row x col x depth equal the plain Flax layers, in outputs and in every gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tensor_cases import EMBED, LINEAR, P, assert_equals_one_device, make_mesh, normal

from axonml_jax.layers.grid import ParallelConv, ParallelEmbedding, ParallelLinear
from axonml_jax.layers.products import Prefetch
from axonml_jax.layers.whole import Units, tensor_specs

GRIDS = {
    "1x1x1": dict(depth=1, row=1, col=1),
    "2x2x2": dict(depth=2, row=2, col=2),
    "4x1x2": dict(depth=2, row=4, col=1),
    "1x2x4": dict(depth=4, row=1, col=2),
    "row 4": dict(row=4),
    "col 2": dict(col=2),
    "data 2 x 2x2x1": dict(data=2, row=2, col=2),
}


class Laid(nnx.Module):
    """A chain in which every layer takes its input as the one before left it; the transposed layout alternates."""

    def __init__(self, use_bias, overlap, prefetch):
        options = {"use_bias": use_bias, "overlap": overlap, "rngs": nnx.Rngs(0), **LINEAR}
        self.prefetch = prefetch
        self.first = ParallelLinear(8, 16, gather_output=False, **options)
        self.second = ParallelLinear(16, 8, transpose=True, scatter_input=False, gather_output=False, **options)
        self.third = ParallelLinear(8, 8, scatter_input=False, **options)
        self.easy = ParallelLinear(8, 4, transpose=True, **options)

    def __call__(self, x):
        order = Prefetch() if self.prefetch else None
        first = jnp.tanh(self.first(x, prefetch=order))
        second = jnp.tanh(self.second(first, prefetch=order))
        third = self.third(second, prefetch=order)
        easy = self.easy(jnp.tanh(third), prefetch=order)
        return {"first": first, "second": second, "third": third, "easy": order.last(easy) if order else easy}


# (grid, bias, leading dims of one example, check_vma); reductions overlap where there is a bias, weights are prefetched in 2d
CASES = [
    ("1x1x1", True, 0, True), ("2x2x2", True, 1, True), ("2x2x2", False, 2, False), ("4x1x2", True, 0, False),
    ("4x1x2", False, 1, True), ("1x2x4", True, 2, True), ("row 4", True, 1, False), ("data 2 x 2x2x1", False, 0, True),
]  # fmt: skip
IDS = [f"{g}-{'bias' if b else 'nobias'}-{lead + 1}d-{'vma' if vma else 'novma'}" for g, b, lead, vma in CASES]
LEADS = {0: (), 1: (3,), 2: (1, 3)}


def batch_of(sizes):
    return tuple(axis for axis in ("data", "depth") if axis in sizes) or None


def split(sizes, lead, axis=None):
    return P(batch_of(sizes), *[None] * lead, axis if axis in sizes else None)


@pytest.mark.parametrize(("grid", "use_bias", "lead", "check_vma"), CASES, ids=IDS)
def test_linear_layers_equal_one_device(grid, use_bias, lead, check_vma):
    sizes = GRIDS[grid]
    specs = {name: split(sizes, lead) for name in ("third", "easy")}
    specs |= {"first": split(sizes, lead, "row"), "second": split(sizes, lead, "col")}
    x = normal(4, *LEADS[lead], 8)
    model = Laid(use_bias, overlap=use_bias, prefetch=lead == 1)
    assert_equals_one_device(model, x, sizes, x_spec=split(sizes, lead), y_spec=specs, check_vma=check_vma)


class Tied(nnx.Module):
    """Embedding, layers in the alternating layout, and the tied head, laid out and in easy mode."""

    def __init__(self):
        self.laid = ParallelEmbedding(
            16, 8, transpose=True, scatter_input=False, gather_output=False, rngs=nnx.Rngs(0), **EMBED
        )
        self.mix = ParallelLinear(8, 8, scatter_input=False, rngs=nnx.Rngs(1), **LINEAR)
        self.easy = ParallelEmbedding(16, 8, overlap=True, rngs=nnx.Rngs(2), **EMBED)

    def __call__(self, ids):
        laid, easy = self.laid(ids), self.easy(ids)
        mixed = self.mix(laid) + easy
        return {"laid": laid, "logits": self.easy.attend(mixed), "laid logits": self.laid.attend(laid)}


@pytest.mark.parametrize(
    ("grid", "check_vma"), [("2x2x2", True), ("4x1x2", False), ("1x2x4", True), ("col 2", False)],
    ids=["2x2x2-vma", "4x1x2-novma", "1x2x4-vma", "col 2-novma"],
)  # fmt: skip
def test_embeddings_and_tied_heads_equal_one_device(grid, check_vma):
    sizes = GRIDS[grid]
    ids = jnp.asarray(np.random.default_rng(0).integers(-16, 16, (4, 3)))
    specs = {"laid": split(sizes, 1, "col"), "logits": split(sizes, 1), "laid logits": split(sizes, 1, "row")}
    spec = P(batch_of(sizes))
    assert_equals_one_device(Tied(), ids, sizes, x_spec=spec, y_spec=specs, check_vma=check_vma)


class Convs(nnx.Module):
    """Convolutions of one spatial rank with every option that moves channels, laid out and in easy mode."""

    def __init__(self, rank, use_bias):
        options = {"use_bias": use_bias, "rngs": nnx.Rngs(0), **LINEAR}
        kernel = (3, 2, 1)[:rank]
        mask = normal(*kernel, 8, 16) > 0
        self.first = ParallelConv(4, 8, kernel, strides=2, gather_output=False, overlap=use_bias, **options)
        self.second = ParallelConv(
            8, 16, kernel, padding="CIRCULAR", kernel_dilation=2, mask=mask, transpose=True, scatter_input=False,
            gather_output=False, **options,
        )  # fmt: skip
        grouped = {"feature_group_count": 4, "scatter_input": False, "gather_output": False}
        self.grouped = ParallelConv(16, 16, kernel, **grouped, **options)
        self.easy = ParallelConv(16, 8, kernel, padding="VALID", feature_group_count=2, transpose=True, **options)

    def __call__(self, x):
        order = Prefetch()
        first = jnp.tanh(self.first(x, prefetch=order))
        second = jnp.tanh(self.second(first, prefetch=order))
        easy = self.easy(jnp.concatenate([x, x**2, jnp.sin(x), jnp.cos(x)], -1))
        return {"first": first, "second": second, "grouped": self.grouped(second), "easy": easy}


@pytest.mark.parametrize(
    ("grid", "rank", "use_bias", "check_vma"),
    [
        ("2x2x2", 2, True, True),
        ("2x2x2", 1, False, False),
        ("col 2", 3, True, False),
    ],
    ids=["2x2x2-2d-bias-vma", "2x2x2-1d-nobias-novma", "col 2-3d-bias-novma"],
)
def test_convolutions_equal_one_device(grid, rank, use_bias, check_vma):
    sizes = GRIDS[grid]
    specs = {name: split(sizes, rank, axis) for name, axis in (("first", "row"), ("second", "col"), ("grouped", "row"))}
    specs["easy"] = split(sizes, rank)
    x = normal(4, *(6, 5, 3)[:rank], 4)
    assert_equals_one_device(
        Convs(rank, use_bias), x, sizes, x_spec=split(sizes, rank), y_spec=specs, check_vma=check_vma
    )


def test_outside_a_mesh_they_are_the_flax_layers():
    x, ids = normal(2, 7, 7, 4), jnp.array([[0, 7, -1, 9]])
    options = dict(strides=2, padding="SAME", feature_group_count=2)
    convs = [kind(4, 8, (3, 3), rngs=nnx.Rngs(0), **options) for kind in (ParallelConv, nnx.Conv)]
    np.testing.assert_array_equal(convs[0](x), convs[1](x))
    tables = [kind(8, 4, rngs=nnx.Rngs(0)) for kind in (ParallelEmbedding, nnx.Embed)]
    np.testing.assert_array_equal(tables[0](ids), tables[1](ids))
    np.testing.assert_array_equal(tables[0].attend(x), tables[1].attend(x))


def test_an_example_without_batch_dim_is_convolved_too():
    conv = ParallelConv(4, 8, (3,), rngs=nnx.Rngs(0), **LINEAR)
    assert_equals_one_device(conv, normal(6, 4), dict(row=2, col=2))


class Misfits(nnx.Module):
    def __init__(self):
        keys = nnx.Rngs(0)
        self.linear = ParallelLinear(6, 7, rngs=keys)
        self.conv = ParallelConv(12, 24, 3, feature_group_count=3, rngs=keys)


def test_what_does_not_divide_is_listed_by_path():
    with pytest.raises(ValueError, match="do not divide") as error:
        tensor_specs(Misfits(), dict(row=2, col=2, depth=2))
    for part in (
        "linear/kernel: dim 0 of (6, 7) over ('col', 'depth') (6 % 4 = 2)",
        "linear/kernel: dim 1",
        "linear/bias",
    ):
        assert part in str(error.value)
    assert "conv/kernel: 3 groups over row (3 % 2 = 1)" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "sizes", "x", "message"),
    [
        (ParallelLinear, (6, 6), (2, 6), r"ParallelLinear\(6, 6\) kernel .* does not divide"),
        (ParallelLinear, (8, 8), (2, 8), r"ParallelLinear\(8, 8\) kernel .* gives \(4, 2\): .*tensor_specs"),
        (ParallelConv, (4, 6, 3), (2, 5, 4), r"ParallelConv\(4, 6, \(3,\)\) kernel .* does not divide"),
        (partial(ParallelConv, feature_group_count=3), (9, 9, 3), (2, 5, 9), "3 groups do not divide over the 4"),
        (ParallelEmbedding, (6, 6), (2, 3), r"ParallelEmbedding\(6, 6\) embedding .* does not divide"),
    ],
    ids=["linear", "whole", "conv", "groups", "embedding"],
)
def test_a_layer_refuses_what_is_not_its_shard(kind, sizes, x, message):
    layer = kind(*sizes, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    mapped = jax.shard_map(
        lambda params, x: nnx.merge(graphdef, params, rest, copy=True)(x),
        mesh=make_mesh(row=4, col=2), in_specs=P(), out_specs=P(), check_vma=False,
    )  # fmt: skip
    x = jnp.zeros(x, int if isinstance(layer, nnx.Embed) else float)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped, nnx.to_pure_dict(params), x)


def test_units_that_would_be_cut_are_refused():
    layer = ParallelLinear(8, 24, units=Units(6, "heads"), use_bias=False, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    mapped = jax.shard_map(
        lambda params, x: nnx.merge(graphdef, params, rest, copy=True)(x),
        mesh=make_mesh(row=4, col=2), in_specs=({"kernel": P("col", "row")}, P()), out_specs=P(), check_vma=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="6 heads do not divide over the 4 ranks of 'row'"):
        jax.eval_shape(mapped, nnx.to_pure_dict(params), jnp.zeros((2, 8)))
