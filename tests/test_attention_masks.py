"""Digits of dims, elements of masks, and the shapes that masks of positions have."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_spellings import FEW, HEADS, LENGTH, K, Q, V, alibi, bucketed, dpa, normal, plain, where

from axonml_jax.attention.found import Band, Chunks, Digit, Prefix, arranged, joined, regrouped, sees, whole
from axonml_jax.attention.masks import ALL, MaskLeaf, classified
from axonml_jax.attention.recognise import find_attention
from axonml_jax.attention.rewrite import replaced
from axonml_jax.compat.jaxpr import trace
from axonml_jax.program.program import read_program
from axonml_jax.program.values import NotStatic, elements, nested, number

lax = jax.lax


def values_of(fun, *args):
    values = nested(read_program(trace(fun, *args).jaxpr))
    return values, values.results[0]


def test_digits_are_regrouped_and_joined_again():
    a, b = whole("a", 6), whole("b", 4)
    parted = regrouped((a, b), (2, 3, 4))
    assert parted == ((Digit("a", 3, 2),), (Digit("a", 1, 3),), b)
    assert regrouped(parted, (6, 1, 4)) == (a, (), b) and regrouped((a, b), (24,)) == ((*a, *b),)
    assert regrouped((a, b), (8, 3)) is None and joined([*a, *whole("c", 1)]) == a


@pytest.mark.parametrize("spread", [False, True])
def test_an_array_is_arranged_by_digits(spread):
    x = np.arange(24.0).reshape(6, 4)
    index = {"a": np.arange(6), "b": np.arange(4)}
    high, low, b = Digit("a", 3, 2), Digit("a", 1, 3), Digit("b", 1, 4)
    for order in itertools.permutations([(low,), (high, b), (Digit("new", 1, 2),)]):
        got = arranged(x, ((high, low), (b,)), tuple(order), spread=spread)
        sizes = [
            1 if index_[0].label == "new" and not spread else int(np.prod([d.size for d in index_])) for index_ in order
        ]
        assert got.shape == tuple(sizes)
        for i, j in itertools.product(index["a"], index["b"]):
            at = {(low,): i % 3, (high, b): i // 3 * 4 + j, (Digit("new", 1, 2),): 0}
            assert got[tuple(at[each] for each in order)] == x[i, j]


TABLE = np.arange(40).reshape(5, 8) % 7
STATIC = {
    "comparison": lambda: jnp.arange(5)[:, None] >= jnp.arange(8),
    "tril": lambda: jnp.tril(jnp.ones((5, 8)), k=2),
    "table": lambda: jnp.asarray(TABLE)[1:, ::2].T,
    "pieces": lambda: jnp.concatenate([jnp.zeros((2, 3)), jnp.ones((2, 1)), jnp.full((2, 4), 2.0)], 1)[:, ::-1],
    "arithmetic": lambda: (jnp.arange(12) - 6) // 4 * 3 + (jnp.arange(12) - 6) % 5,
    "shapes": lambda: jnp.tile(jnp.arange(6).reshape(2, 3).T, (2, 1)).reshape(4, 3),
    "choice": lambda: jnp.where(jnp.arange(6) > 2, jnp.sqrt(jnp.arange(6.0)), -jnp.abs(jnp.arange(6.0) - 3)),
    "slices": lambda: lax.dynamic_slice(jnp.asarray(TABLE), (jnp.int32(4), jnp.int32(1)), (2, 3)),
    "bits": lambda: ((jnp.arange(9) & 3) | 4) ^ 1,
    "numbers": lambda: jnp.broadcast_to(2.0 * jnp.sqrt(3.0), (2, 3)),
}


@pytest.mark.parametrize("name", STATIC)
def test_elements_are_those_that_the_program_makes(name):
    values, atom = values_of(STATIC[name])
    wanted = np.asarray(STATIC[name]())
    got = np.broadcast_to(elements(values, atom, np.indices(wanted.shape, sparse=True)), wanted.shape)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert number(values, atom) == (None if name != "numbers" else pytest.approx(2 * np.sqrt(3.0)))


def test_elements_of_inputs_are_not_known():
    values, atom = values_of(lambda x: jnp.arange(3) + x, 1)
    with pytest.raises(NotStatic):
        elements(values, atom, [np.arange(3)])


MASKS = {
    (): lambda i, j: (i + j) >= 0,
    (Band(None, 0),): lambda i, j: j <= i,
    (Band(None, 4),): lambda i, j: j <= i + 4,
    (Band(5, 0),): lambda i, j: (j <= i) & (i - j < 6),
    (Band(3, 1),): lambda i, j: (j <= i + 1) & (i <= j + 3),
    (Band(0, None),): lambda i, j: j >= i,
    (Prefix(7),): lambda i, j: (j <= i) | (j < 7),
    (Chunks(4),): lambda i, j: i // 4 == j // 4,
    (Chunks(4), Band(None, 0)): lambda i, j: (i // 4 == j // 4) & (j <= i),
    None: lambda i, j: (j <= i) & (j != 9),
}


@pytest.mark.parametrize("length", [16, 5000], ids=["all of it", "some rows and columns"])
@pytest.mark.parametrize(
    "terms", MASKS, ids=lambda terms: ", ".join(map(str, terms)) if terms is not None else "no terms"
)
def test_masks_of_positions_are_classified(terms, length):
    assert length == 16 or length**2 > ALL
    values, atom = values_of(lambda: MASKS[terms](jnp.arange(length)[:, None], jnp.arange(length)[None, :]))
    leaf = MaskLeaf(atom, (whole("query", length), whole("key", length)), True)
    assert classified(values, [leaf], {"query": length, "key": length}) == terms
    if length == 16 and terms is not None:
        i = jnp.arange(length)
        seen = np.ones((length, length), bool)
        for term in terms:
            seen &= np.asarray(sees(term, i, i, None))[0, 0]
        np.testing.assert_array_equal(seen, MASKS[terms](i[:, None], i[None, :]))


PATCHES = {
    "an array over queries and keys": lambda image: lambda: jnp.asarray(np.tril(np.ones((5000, 5000), bool)) | image),
    "an array over positions": lambda image: lambda: (
        (jnp.arange(5000)[:, None] >= jnp.arange(5000)) | (jnp.asarray(image.any(1))[:, None] & jnp.asarray(image.any(1)))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_between_the_rows_that_are_compared_is_seen(name):
    image = np.zeros((5000, 5000), bool)
    image[2950:2970, 2950:2970] = True
    values, atom = values_of(PATCHES[name](image))
    leaf = MaskLeaf(atom, (whole("query", 5000), whole("key", 5000)), True)
    assert classified(values, [leaf], {"query": 5000, "key": 5000}) is None


AT = {
    "ALiBi": (plain(alibi), (Q, K, V), 1),
    "T5": (bucketed, (Q, K, V, normal(6, HEADS)), 1),
    "a table of all": (plain(lambda s, table: s + table), (Q, K, V, normal(HEADS, LENGTH, LENGTH)), 1),
    "a mask": (where(lambda i, j: (i - j) % 3 == 0), (Q, K, V), 0),
    "a mask of lengths": (where(lambda i, j, n: (i - j) % n[:, None, None, None] == 0), (Q, K, V, jnp.asarray([2, 3])), 0),
    "grouped heads": (
        lambda q, k, v: dpa(q, k, v, (jnp.arange(4.0)[:, None, None] * jnp.abs(jnp.arange(8.0) - 3))[None]), (Q, *FEW), 1
    ),
    "a bias of rows": (plain(lambda s, x: s + jnp.sin(x)[:, None, None]), (Q, K, V, normal(2, LENGTH)), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", AT)
def test_operands_are_read_at_some_positions_alone(name):
    fun, args, biased = AT[name]
    found = find_attention(read_program(trace(fun, *args).jaxpr))
    (attention,) = found.attentions
    operand = attention.biases[0] if biased else attention.mask[0].mask
    i, j = jnp.asarray([6, 1, 2]), jnp.asarray([7, 0, 3, 4, 1])
    read = []

    def instead(_, q, k, v, given):
        some, whole = given.at(operand, i, j), given(operand)
        whole = whole[:, :, i] if whole.shape[2] > 1 else whole
        read.extend([some, whole[..., j] if whole.shape[3] > 1 else whole])
        return q

    def run(*args):
        replaced(found, instead)(args)
        return read.pop(-2), read.pop(-1)

    np.testing.assert_allclose(*jax.jit(run)(*args), rtol=1e-12)
    if name in ("ALiBi", "T5", "a mask"):
        used = jax.make_jaxpr(
            lambda *args: replaced(found, lambda _, q, k, v, given: q + given.at(operand, i, j).sum())(args)
        )
        assert not [var for eqn in used(*args).eqns for var in eqn.outvars if var.aval.shape[-2:] == (LENGTH, LENGTH)]


def test_a_value_keeps_its_name_through_calls_and_loops():
    def fun(x, w):
        def body(carry, row):
            y, table = carry
            y, table = jax.checkpoint(lambda y, table: (y + table, table))(y, table)
            return (y + w, table), row * 2

        return lax.scan(body, (x, w), jnp.ones((3, 2)))

    values = nested(read_program(trace(fun, jnp.ones(2), jnp.ones(2)).jaxpr))
    assert values.results[1] == values.top.values[1]
    (add, again, times) = values.nodes[-3:]
    assert add.inputs[1] == again.inputs[1] == values.top.values[1]
    assert set(values.links[add.inputs[0]]) == {values.top.values[0], again.outputs[0]}
    assert values.links[values.results[2]] == times.outputs
    assert values.at(add.inputs[1], add.level) is not None and values.at(add.outputs[0], values.top) is None
