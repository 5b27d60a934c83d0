"""What the user says to `auto_parallelize`, by example and exclude, and what it says of every layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from ledger_steps import abstract_mesh
from meshes import mesh_of

import axonml_jax as ax

ARRAY = np.ones((2, 4), np.float32)


class Between(nnx.Module):
    """Two linear layers and a function between them."""

    def __init__(self, between, dropout=0.0):
        self.first, self.second = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1))
        self.dropout, self.between = nnx.Dropout(dropout, deterministic=True, rngs=nnx.Rngs(0)), between

    def __call__(self, x):
        return self.between(self, x)


def acting(m, x):
    return m.second(m.dropout(nnx.relu(m.first(x))))


# What is done with a layer's output, and why it is gathered for that.
REASONS = {
    "norm": (lambda m, x: m.second(nnx.softmax(m.first(x))), "`reduce_max` mixes or counts its parts (line "),
    "a result": (lambda m, x: (m.second(m.first(x)), m.first(x)), "it is a result of the model"),
    "a size off the shape": (
        lambda m, x: m.second((y := m.first(x)) / y.shape[-1]),
        "`div` depends on how many features there are (line ",
    ),
    "reshaped": (lambda m, x: m.second(m.first(x).reshape(-1, 8)), "on a rank's features the model's code fails: "),
    "two inputs": (
        lambda m, x: m.second(m.first(x)) + m.second(x.repeat(2, -1)),
        "second takes a whole input elsewhere",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_report_says_why_a_layer_still_gathers_its_output(name):
    between, why = REASONS[name]
    report = ax.auto_parallelize(Between(between), abstract_mesh(tensor=2), example=ARRAY)
    how = {entry.path: entry.why for entry in report.entries}["first"]
    assert how.startswith("columns, gathers its output: ") and why in how


class Keywords(nnx.Module):
    """A model that takes more than arrays, by keyword only."""

    def __init__(self, dropout=0.0):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Between(acting, dropout) for _ in range(3)])
        self.positions = nnx.Embed(6, 4, rngs=rngs)

    def __call__(self, x, *, cache, segment_ids=None, rngs=None, scaled=False):
        x = x + self.positions(segment_ids) if scaled else x
        for block in self.blocks:
            x = block(x) + (0 if cache is None else cache["x"])
        return x if rngs is None else x + jax.random.normal(rngs.noise(), x.shape)


GIVEN = {
    "arrays and flags": {"cache": {"x": ARRAY}, "segment_ids": np.zeros(2, int), "scaled": True},
    "shapes and streams": {"cache": {"x": jax.ShapeDtypeStruct((2, 4), "float32")}, "rngs": nnx.Rngs(noise=0)},
    "nothing": {"cache": None},
}


@pytest.mark.parametrize("name", GIVEN)
def test_an_example_has_keyword_arguments(name):
    report = ax.auto_parallelize(Keywords(), abstract_mesh(tensor=2), example=ARRAY, example_kwargs=GIVEN[name])
    assert report.swapped["blocks/2/second"] == "RowParallelLinear"
    rows = [line.split("  ")[0] for line in str(report).splitlines()[3:]]
    assert rows == ["blocks/*/first (3 times)", "blocks/*/second (3 times)", "positions"]


def test_pairs_hold_in_training_and_in_evaluation():
    report = ax.auto_parallelize(Keywords(0.5), abstract_mesh(tensor=2), example=ARRAY, example_kwargs={"cache": None})
    assert (
        report.swapped["blocks/0/second"] == "ColumnParallelLinear"
    )  # dropout, in training, draws a mask for all features


def test_an_example_that_is_no_call_of_the_model_is_refused():
    refused = lambda **options: ax.auto_parallelize(Keywords(), abstract_mesh(tensor=2), **options)
    with pytest.raises(TypeError, match=r"Keywords.__call__.*the keyword arguments \['rng'\].*missing a required"):
        refused(example=ARRAY, example_kwargs={"rng": 1})
    with pytest.raises(TypeError, match="must map names of keyword arguments"):
        refused(example=ARRAY, example_kwargs=[ARRAY])


def test_features_that_are_printed_and_bits_that_are_cast_do_not_stop_the_walk():
    class Printing(nnx.Module):
        def __init__(self):
            self.first, self.second = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1))

        def __call__(self, x):
            y = self.first(x)
            jax.debug.print("{}", y)
            bits = jax.lax.bitcast_convert_type(jnp.zeros((2, 4), jnp.uint8), jnp.float32)
            return self.second(jnp.einsum("ij,bj->ib", jnp.eye(8), y).T) + bits[:, None]

    report = ax.auto_parallelize(Printing(), abstract_mesh(tensor=2), example=ARRAY)
    assert report.swapped["first"] == report.swapped["second"] == "ColumnParallelLinear"
    assert "mixes or counts its parts" in str(report)


# What leaves layers out, and which of the model's stay swapped.
LEFT_OUT = {
    "a path": ("positions", {f"blocks/{i}/{name}" for i in range(3) for name in ("first", "second")}),
    "a module around": (r"blocks/[01]", {"blocks/2/first", "blocks/2/second", "positions"}),
    "types and paths": ([nnx.Embed, r"blocks/\d/first"], {f"blocks/{i}/second" for i in range(3)}),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_layers_are_left_out_by_path_and_type(name):
    exclude, swapped = LEFT_OUT[name]
    report = ax.auto_parallelize(Keywords(), abstract_mesh(tensor=2), exclude=exclude)
    assert set(report.swapped) == swapped
    assert any(why.startswith("excluded by ") for why in report.left.values())


def test_a_call_with_another_equation_than_an_einsum_was_split_by_is_refused():
    layer, x = nnx.Einsum("ab,bc->ac", (4, 8), rngs=nnx.Rngs(0)), jnp.ones((6, 4))
    assert ax.auto_parallelize(layer, abstract_mesh(tensor=2)).swapped
    graphdef, state = nnx.split(layer)
    specs = jax.tree.map(lambda _: PartitionSpec(None, "tensor"), state)

    def call(equation):
        run = lambda state, x: nnx.merge(graphdef, state)(x, equation)
        mapped = jax.shard_map(
            run, mesh=mesh_of(tensor=2), in_specs=(specs, PartitionSpec()), out_specs=PartitionSpec(), check_vma=False
        )
        return mapped(state, x)

    np.testing.assert_allclose(call("ab, bc -> ac"), layer(x), rtol=1e-6)
    with pytest.raises(ValueError, match=r"by the letter 'c' of its equation 'ab,bc->ac', .* computes 'ab,bc->ca'"):
        call("ab,bc->ca")


def test_what_leaves_out_nothing_is_refused():
    refused = lambda exclude: ax.auto_parallelize(Keywords(), abstract_mesh(tensor=2), exclude=exclude)
    with pytest.raises(ValueError, match="'position': no module has this path; the nearest is 'positions'"):
        refused(["position", nnx.Embed])
    with pytest.raises(ValueError, match="Conv: the model has no such module, but Between, "):
        refused(nnx.Conv)
    with pytest.raises(TypeError, match=r"exclude=3 has \[3\]"):
        refused(3)
    with pytest.raises(ValueError, match="is no regular expression"):
        refused("(")
    with (
        pytest.raises(ValueError, match="left out nothing in this block, which made Linear"),
        ax.auto_parallelize(abstract_mesh(tensor=2), exclude=nnx.Embed),
    ):
        Between(acting)
    with pytest.raises(TypeError, match="have none yet: give types of modules there"):
        ax.auto_parallelize(abstract_mesh(tensor=2), exclude="first")


def test_with_nothing_swapped_that_is_said():
    with pytest.warns(
        UserWarning, match=r"tensor=2 has no effect.*\n  blocks/\*/first \(3 times\): excluded by"
    ) as warned:
        ax.auto_parallelize(model := Keywords(), abstract_mesh(tensor=2), exclude=".*")
    assert warned[0].filename == __file__
    with pytest.raises(ValueError, match=r"ax\.auto_parallelize, whose report says why each was left"):
        ax.parallelize(model, mesh_of(data=1, tensor=2))
    with (
        pytest.warns(UserWarning, match="Linear 2: excluded by Linear") as warned,
        ax.auto_parallelize(abstract_mesh(tensor=2), exclude=nnx.Linear),
    ):
        Between(acting)
    assert warned[0].filename == __file__


def test_layers_that_are_parallel_already_are_said_to_be():
    model = nnx.Sequential(ax.ColumnParallelLinear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    report = ax.auto_parallelize(model, mesh_of(tensor=2))
    assert report.left == {"layers/0": "it is a parallel layer already"}


class Tied(nnx.Module):
    """An embedding whose transpose makes the logits, written with JAX's own placement."""

    def __init__(self):
        self.table, self.linear = nnx.Embed(16, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1))

    def __call__(self, tokens):
        return self.table.attend(self.linear(self.table(tokens)), out_sharding=None)


def test_an_embedding_is_attended_to_with_options():
    report = ax.auto_parallelize(Tied(), abstract_mesh(tensor=2), example=np.zeros((2, 3), np.int32))
    assert {entry.path for entry in report.entries} >= {"table", "linear"}
