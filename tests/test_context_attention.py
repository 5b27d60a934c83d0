"""Attention of sequences whose positions are split over ranks equals that of whole sequences: results and gradients."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import gradients_by_hand, plain_attention, seen_by, with_gradients
from jax.sharding import AxisType, PartitionSpec
from plan_tables import pairwise

import axonml_jax as ax
from axonml_jax.layers.pieces import RingRounds, Visible
from axonml_jax.ledger.count import collectives_in
from axonml_jax.program.program import read_program
from axonml_jax.sharding.layout import sequence_order

ROWS, SIZE = 2, 4
TABLE = {
    "method": ["gather", "ulysses", "ring", "2 x ring", "2 x gather"],
    "order": ["contiguous", "zigzag", "striped"],
    "rule": ["full", "causal", "window", "causal window", "documents", "cross", "causal documents"],
    "heads": [(4, 4), (4, 2), (8, 1)],
    "ranks": [2, 3, 4, 8],
    "block": [3, 512],
    "extra": [None, "bias", "dropout", "dropout by head", "sinks"],
    "check_vma": [False, True],
}
RULES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2)},
    "causal window": {"causal": True, "window": (4, 0)},
    "documents": {"segments": True},
    "cross": {},
    "causal documents": {"causal": True, "segments": True},
}


def possible(row):
    """Whether the heads, and the groups of a mixed method, divide over the ranks."""
    count = {"ulysses": row["ranks"], "2 x ring": 2, "2 x gather": 2}.get(row["method"], 1)
    n, g = row["heads"]
    return row["ranks"] % count == 0 and n % count == 0 and (g % count == 0 or count % g == 0)


COVER = pairwise(TABLE, possible=possible)


def inputs(row, seed=0):
    """Whole q, k, v, the bias's table and a cotangent in float64, and the segments of both."""
    rng, (n, g) = np.random.default_rng(seed), row["heads"]
    s = 4 * row["ranks"]
    t = 2 * s if row["rule"] == "cross" else s
    shapes = [(ROWS, s, n, SIZE), (ROWS, t, g, SIZE), (ROWS, t, g, SIZE), (n, 2 * t + s), (ROWS, s, n, SIZE)]
    q, k, v, table, cotangent = (rng.standard_normal(shape) for shape in shapes)
    ids = np.sort(rng.integers(0, 3, (ROWS, s)), axis=1).astype(np.int32)
    return (q, k, v, table, cotangent), ids


def shared_options(row, table, s):
    """What the split attention is given beside segments and dropout."""
    options = dict(RULES[row["rule"]])
    options.pop("segments", None)
    if row["extra"] == "bias":
        options["bias"] = lambda queries, keys, table: table[:, keys[None, :] - queries[:, None] + s]
        options["arrays"] = (table,)
    if row["extra"] == "sinks":
        options["sinks"] = table[:, 0]
    return options


def split_attention(row, ids, method, key):
    degree, by_head = row["ranks"], row["extra"] == "dropout by head"
    mesh = jax.make_mesh((degree,), ("context",), devices=jax.devices()[:degree], axis_types=(AxisType.Auto,))
    split = PartitionSpec(None, "context")

    def attend(q, k, v, table, ids):
        options = shared_options(row, table, q.shape[1] * degree)
        if "segments" in RULES[row["rule"]]:
            options["segment_ids"] = ids
        if "score_mod" in row:
            options |= {"score_mod": row["score_mod"], "arrays": (table,)}
        if row["extra"] in ("dropout", "dropout by head"):
            keys = jax.random.split(key, q.shape[2]) if by_head else key
            options |= {"dropout_rate": 0.3, "dropout_key": keys}
        return ax.context_attention(q, k, v, method=method, order=row["order"], block_size=row["block"], **options)

    specs = {"in_specs": (split, split, split, PartitionSpec(), split), "out_specs": split}
    call = jax.shard_map(attend, mesh=mesh, **specs, check_vma=row["check_vma"])

    def whole(q, k, v, table, ids):
        orders = [sequence_order(row["order"], x.shape[1], degree) for x in (q, k)]
        out = call(q[:, orders[0]], k[:, orders[1]], v[:, orders[1]], table, ids[:, orders[0]])
        return out[:, np.argsort(orders[0])]

    return lambda q, k, v, table: whole(q, k, v, table, ids)


def oracle(row, arrays, ids, key):
    """The result, and the gradients of q, k, v and the bias's table."""
    q, k, v, table, cotangent = arrays
    (rows, s, n, _), t = q.shape, k.shape[1]
    options, extra = dict(RULES[row["rule"]]), row["extra"]
    segments = ids if options.pop("segments", False) else None
    at = np.arange(t)[None, :] - np.arange(s)[:, None] + s
    bias, factors = table[:, at] if extra == "bias" else 0.0, 1.0
    if extra == "dropout":
        factors = np.asarray(jax.random.bernoulli(key, 0.7, (rows, n, s, t))) / 0.7
    if extra == "dropout by head":
        draw = lambda own: jax.random.bernoulli(own, 0.7, (rows, s, t))
        factors = np.asarray(jax.vmap(draw, out_axes=1)(jax.random.split(key, n))) / 0.7
    seen = seen_by(s, t, segment_ids=segments, **options)
    if extra == "sinks":  # one more key of score and value 0, seen by all, whose bias is the sink
        k, v = (np.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k, v))
        bias = np.pad(np.broadcast_to(table[:, :1, None], (n, s, 1)), ((0, 0), (0, 0), (t, 0)))
        seen = np.concatenate([np.broadcast_to(seen, (rows, 1, s, t)), np.ones((rows, 1, s, 1), bool)], -1)
    *found, of_scores = gradients_by_hand(q, k, v, cotangent, seen, bias=bias, factors=factors)
    of_table = np.zeros_like(table)
    if extra == "bias":
        np.add.at(of_table, (slice(None), at), of_scores.sum(0))
    if extra == "sinks":
        found[2:4] = [x[:, :t] for x in found[2:4]]
        of_table[:, 0] = of_scores[..., t].sum((0, 2))
    return *found, of_table


def named_method(row):
    kind = row["method"].split(" x ")
    return (2, kind[1]) if len(kind) == 2 else kind[0]


def check(rows):
    """Rows that compute one thing in several ways, in one program: what they share is compiled once."""
    (arrays, ids), key = inputs(rows[0]), jax.random.key(7)
    wanted = oracle(rows[0], arrays, ids, key)
    split = [with_gradients(split_attention(row, jnp.asarray(ids), named_method(row), key)) for row in rows]
    every = jax.jit(lambda *given: [run(*given) for run in split])(*arrays)
    for row, got in zip(rows, every, strict=True):
        for name, a, b in zip(("out", "q", "k", "v", "table"), got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10, err_msg=f"{name} of {row}")


@pytest.mark.parametrize("row", COVER, ids=lambda row: "-".join(str(x).replace(" ", "_") for x in row.values()))
def test_results_and_gradients_are_those_of_whole_sequences(row):
    check([row])


def test_gradients_of_sinks_are_summed_over_rows_queries_and_ranks():
    """A table's row with sinks may not be among those that run; this one is, by both ways to read keys."""
    shared = {"ranks": 2, "order": "zigzag", "rule": "causal", "block": 3, "extra": "sinks", "heads": (4, 2)}
    check([shared | {"method": "gather", "check_vma": False}, shared | {"method": "ring", "check_vma": True}])


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_scores_are_changed_as_a_function_says(method):
    """A soft cap, a temperature per head with a gradient, and a very low number in the place of a mask."""
    row = {"ranks": 2, "order": "zigzag", "rule": "full", "block": 3, "extra": None, "check_vma": True, "heads": (4, 2)}
    (q, k, v, _, cotangent), ids = inputs(row)
    heat, low = np.linspace(0.5, 2, 4), np.finfo(np.float64).min

    def score_mod(scores, where, heat):
        capped = 2 * jnp.tanh(scores * heat[where.heads][:, None, None] / 2)
        seen = where.keys[None, :] <= where.queries[:, None] - 2  # the first two queries see no key
        return jnp.where(seen, capped, low)

    def plain(q, k, v, heat):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = jnp.einsum("bsnd,btnd->bnst", q, k) * SIZE**-0.5
        at = jnp.arange(q.shape[1])
        changed = score_mod(scores, types.SimpleNamespace(heads=jnp.arange(4), queries=at, keys=at), heat)
        return jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(changed, -1), v)

    split = split_attention(row | {"score_mod": score_mod}, jnp.asarray(ids), method, None)
    got = jax.jit(with_gradients(split))(q, k, v, heat, cotangent)
    wanted = jax.jit(with_gradients(plain))(q, k, v, heat, cotangent)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


def sent(method, ranks, *, backward=False, heads=(4, 2), **options):
    """What one rank sends, as {kind: [elements of each]}; 8 float32 positions of q, k and v on each."""
    mesh = jax.sharding.AbstractMesh((ranks,), ("context",), (AxisType.Auto,))
    split, specs = PartitionSpec(None, "context"), PartitionSpec(None, "context")
    shapes = [jax.ShapeDtypeStruct((ROWS, 8 * ranks, n, SIZE), jnp.float32) for n in (heads[0], heads[1], heads[1])]
    attend = lambda q, k, v: ax.context_attention(q, k, v, method=method, **options)
    both = lambda q, k, v: jax.vjp(attend, q, k, v)[1](q)
    call = jax.shard_map(
        both if backward else attend, mesh=mesh, in_specs=(split,) * 3, out_specs=specs, check_vma=False
    )
    found = {}
    for entry in collectives_in(call, *shapes):
        assert entry.axes == ("context",) and not entry.path
        found.setdefault(entry.kind, []).extend(entry.leaf_elements)
    return found


def test_what_is_sent_is_what_the_formulas_say():
    n, position = 4, ROWS * 8 * SIZE  # elements of one head's positions on a rank
    kv, h, g = 2 * 2 * position, 4 * position, 2 * position
    assert sent("gather", n) == {"all_gather": [n * kv]}  # a rank sends its part n - 1 times
    assert sent("gather", n, backward=True) == {"all_gather": [n * kv] * 2, "reduce_scatter": [n * kv]}
    assert sent("ring", n) == {"permute": [kv] * (n - 1)}
    assert sent("ring", n, backward=True) == {
        "permute": [kv] * 3 * (n - 1)
    }  # keys and values twice, their gradients once
    assert sent("ulysses", 2) == {"all_to_all": [h, g, g, h]}
    gradients_alone = sorted([h, g, g, h, h, g, g])  # the result is not sent back
    assert sorted(sent("ulysses", 2, backward=True)["all_to_all"]) == gradients_alone
    assert sent("ulysses", n) == {"all_to_all": [h, 2 * g, 2 * g, h]}  # two key heads are repeated for four ranks
    assert sent((2, "ring"), n) == {"all_to_all": [h, g, g, h], "permute": [kv]}
    assert sent("ring", 1) == sent("auto", 1) == {}


def test_a_ring_sends_no_further_than_positions_see():
    window = {"window": (8, 0), "causal": True}
    assert sent("ring", 8, **window, backward=True) == {"permute": [4 * ROWS * 8 * SIZE] * 3}
    assert sent("auto", 8, **window) == sent("ring", 8, **window)
    rounds = RingRounds.of(Visible(causal=True), [[(8 * r, 8 * r + 7)] for r in range(4)])
    assert sum(len(rounds.keys(r)) for r in range(4)) == 4 * 3 / 2
    assert [rounds.computing(r) for r in range(4)] == [(0, 1, 2, 3), (1, 2, 3), (2, 3), (3,)]
    assert [rounds.home(r) for r in range(4)] == [(), ((3, 2),), ((3, 1),), ((3, 0),)]
    zigzag = [[(4 * r, 4 * r + 3), (4 * (7 - r), 4 * (7 - r) + 3)] for r in range(4)]
    assert all(len(RingRounds.of(Visible(causal=True), zigzag).keys(r)) == 4 for r in (1, 2, 3))


@pytest.mark.parametrize(
    ("ranks", "heads", "chosen"), [(2, (8, 8), "all_to_all"), (4, (4, 2), "all_to_all"), (8, (8, 1), "all_gather")]
)
def test_auto_takes_what_sends_less(ranks, heads, chosen):
    found = {method: sent(method, ranks, heads=heads, backward=True) for method in ("auto", "gather", "ulysses")}
    on_the_wire = lambda kinds: sum(sum(sizes) for sizes in kinds.values())
    assert chosen in found["auto"]
    assert on_the_wire(found["auto"]) == min(map(on_the_wire, found.values()))


@pytest.mark.parametrize("method", ["gather", "ulysses", "ring"])
def test_scores_of_one_block_at_most_are_there(method):
    """Of 64 positions in blocks of 8 no value has 64 x 64 entries, forward or backward, in a loop over layers too."""
    attend = lambda q: ax.context_attention(q, q, q, method=method, causal=True, block_size=8)
    layers = lambda q: jax.lax.scan(lambda x, _: (x + attend(x), None), q, None, length=2)[0]
    mesh = jax.sharding.AbstractMesh((2,), ("context",), (AxisType.Auto,))
    split = PartitionSpec(None, "context")
    shape = jax.ShapeDtypeStruct((1, 64, 2, SIZE), jnp.float32)
    for run in (attend, layers):
        both = lambda q, run=run: jax.vjp(run, q)[1](q)[0]
        call = jax.shard_map(both, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
        assert max(sizes_in(read_program(jax.make_jaxpr(call)(shape)))) < 64 * 64


def sizes_in(program):
    for equation in program.equations:
        yield from (getattr(aval, "size", 0) for aval in equation.op.made)
        for body in equation.bodies:
            yield from sizes_in(body)


def test_inside_loops_and_recomputed_it_is_the_same():
    row = {"ranks": 2, "order": "zigzag", "rule": "causal", "block": 3, "extra": None, "check_vma": True}
    row["heads"] = (4, 2)
    (q, k, v, _, cotangent), ids = inputs(row)
    split = split_attention(row, jnp.asarray(ids), "ring", None)
    whole = lambda q, k, v, _: plain_attention(q, k, v, causal=True)

    def layers(attention):
        def run(q, k, v, more):
            layer = jax.checkpoint(lambda x, _: (x + attention(x, k, v, more), None))
            return jax.lax.scan(layer, q, None, length=2)[0]

        return jax.jit(with_gradients(run))

    for a, b in zip(layers(split)(q, k, v, q, cotangent), layers(whole)(q, k, v, q, cotangent), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


def test_bfloat16_scores_are_summed_in_float32():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 64, 2, 16)), jnp.bfloat16) for _ in range(3))
    got = ax.context_attention(q, k, v, causal=True, block_size=16)
    wanted = plain_attention(*(x.astype(jnp.float32) for x in (q, k, v)), causal=True)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), wanted, atol=0.02)


def test_what_does_not_fit_is_refused_at_once():
    q, k = jnp.zeros((2, 8, 4, 4)), jnp.zeros((2, 8, 3, 4))
    with pytest.raises(ValueError) as error:
        ax.context_attention(q, k, k, window=(-1, 0), dropout_rate=0.5, segment_ids=jnp.zeros((2, 7), int))
    for part in ("4 query heads are no multiple of 3", "window=", "segment_ids of shapes", "needs a dropout_key"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="generator threefry"):
        ax.context_attention(q, q, q, dropout_rate=0.5, dropout_key=jax.random.key(0, impl="rbg"))
    for keys in (jax.random.split(jax.random.key(0), 2), jax.random.split(jax.random.PRNGKey(0), 2)):
        with pytest.raises(ValueError, match="dropout_key has 2 keys: give one, or one for each of the 4 query heads"):
            ax.context_attention(q, q, q, dropout_rate=0.5, dropout_key=keys)
    for size in (0, -3):
        with pytest.raises(ValueError, match=f"block_size={size} must be a positive number of positions"):
            ax.context_attention(q, q, q, block_size=size)
    with pytest.raises(
        ValueError, match=r"method='ring2' must be one of auto, gather, ulysses, ring, or \(U, 'ring'\)"
    ):
        ax.context_attention(q, q, q, method="ring2")
    with pytest.raises(ValueError, match=r"splits heads over 8 ranks: 4 query heads.*with U one of \[1, 2, 4\]"):
        sent("ulysses", 8)
    with pytest.raises(ValueError, match=r"\(3, 'ring'\): 3 must divide the 4 ranks"):
        sent((3, "ring"), 4)
    with pytest.raises(ValueError, match="bias and score_mod both change scores"):
        ax.context_attention(q, q, q, bias=lambda *_: q, score_mod=lambda scores, *_: scores)
    with pytest.raises(ValueError, match=r"bias\(.*returned an array of shape \(8, 8\)"):
        ax.context_attention(q, q, q, bias=lambda queries, keys: 1.0 * queries[:, None] - keys[None])
