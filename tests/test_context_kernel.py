"""Attention across ranks by the kernels: splash, interpreted on CPU, equals whole sequences; and where none computes it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import gradients_by_hand, seen_by, with_gradients
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import axonml_jax as ax
from axonml_jax.layers import context as by_kernel
from axonml_jax.layers import context as splash_pieces
from axonml_jax.layers import kernels as fused
from axonml_jax.layers import pieces as block_visits
from axonml_jax.layers.linear import Softcap
from axonml_jax.layers.pieces import Visible, by_rank, in_sequence
from axonml_jax.ledger.count import collectives_in
from axonml_jax.sharding.layout import sequence_order
from axonml_jax.strategies.strategy import positions_of

PLACES, SIZE = 256, 128  # positions of a rank, two blocks of the kernel's here; the size of a head

CAUSAL = {"causal": True}
ROWS = [  # ranks, method, order, rules, heads, documents
    (2, "gather", "contiguous", CAUSAL, (2, 2), False),
    (2, "gather", "striped", CAUSAL, (2, 1), True),
    (3, "gather", "zigzag", CAUSAL | {"window": (300, 0)}, (2, 1), False),
    (3, "gather", "zigzag", {}, (2, 1), True),
    (4, (2, "gather"), "striped", CAUSAL, (4, 2), False),
    (2, "ring", "contiguous", CAUSAL, (2, 1), False),
    (4, "ring", "zigzag", CAUSAL, (1, 1), False),
    (3, "ring", "zigzag", CAUSAL, (2, 1), True),
    (2, "ring", "striped", CAUSAL, (2, 2), True),
    (2, "ring", "striped", CAUSAL | {"window": (200, 0)}, (1, 1), False),
    (3, "ring", "contiguous", {"window": (200, 130)}, (2, 1), True),
    (3, "ring", "zigzag", {}, (2, 2), False),
    (4, (2, "ring"), "zigzag", CAUSAL, (2, 2), True),
    (4, (2, "ring"), "striped", CAUSAL, (4, 2), False),
    (4, (2, "ring"), "contiguous", {}, (2, 2), True),
    (2, "ulysses", "zigzag", CAUSAL, (2, 2), True),
    (2, "ulysses", "striped", {"window": (40, 40)}, (4, 2), False),
    (1, "auto", "contiguous", CAUSAL, (2, 1), True),
]


@pytest.fixture
def on_tpu(monkeypatch):
    """A trace for a TPU, whose kernel is interpreted and has blocks of 128; the pieces that it computed."""
    asked, forward = [], splash_pieces.splash_forward
    interpreted = functools.partial(splash_pieces.SplashCall, interpret=True)

    def recorded(call, piece):
        asked.append(piece)
        return forward(call, piece)

    for room in (fused, by_kernel):
        monkeypatch.setattr(room, "target_platform", lambda: "tpu")
    monkeypatch.setattr(block_visits, "_MOST", 128)
    monkeypatch.setattr(splash_pieces, "SplashCall", interpreted)
    monkeypatch.setattr(splash_pieces, "splash_forward", recorded)
    with jax.enable_x64(False):  # of few query heads the kernel counts in 64 bits otherwise
        yield asked


def split(ranks, order, ids=None, *, mesh=None, check_vma=False, **options):
    """Attention of so many ranks, of whole sequences in their order; the fourth argument is `sinks` where these are wanted."""
    sinks = options.pop("sinks", False)
    mesh = mesh or jax.make_mesh((ranks,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])
    parts = PartitionSpec(None, "context")

    def attend(q, k, v, more, ids):
        given = {} if ids is None else {"segment_ids": ids}
        given |= {"sinks": more} if sinks else {}
        return ax.context_attention(q, k, v, order=order, **given, **options)

    specs = (parts, parts, parts, PartitionSpec(), None if ids is None else parts)
    call = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=parts, check_vma=check_vma)

    def whole(q, k, v, more=None):
        own, other = (sequence_order(order, x.shape[1], ranks) for x in (q, k))
        out = call(q[:, own], k[:, other], v[:, other], more, None if ids is None else ids[:, own])
        return out[:, np.argsort(own)]

    return whole


def drawn(ranks, heads, keys=1, rows=1):
    """q, k, v and a cotangent in float64, and segments."""
    rng, (n, g), s = np.random.default_rng(0), heads, ranks * PLACES
    q, k, v, cotangent = (
        rng.standard_normal((rows, length, each, SIZE))
        for length, each in ((s, n), (keys * s, g), (keys * s, g), (s, n))
    )
    return (q, k, v, cotangent), np.sort(rng.integers(0, 3, (rows, s)), axis=1).astype(np.int32)


def narrow(*arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


def assert_equal(got, wanted):
    for name, own, right in zip(("out", "q", "k", "v", "more"), got, wanted):  # noqa: B905
        np.testing.assert_allclose(own, right, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(str(x).replace(" ", "") for x in row))
def test_splash_in_pieces_is_the_attention_of_whole_sequences(row, on_tpu):
    ranks, method, order, rules, heads, documents = row
    (q, k, v, cotangent), ids = drawn(ranks, heads, rows=2 if documents else 1)
    seen = seen_by(q.shape[1], k.shape[1], segment_ids=ids if documents else None, **rules)
    wanted = gradients_by_hand(q, k, v, cotangent, seen)[:4]
    own = jnp.asarray(ids) if documents else None
    called = split(ranks, order, own, method=method, kernel="splash", **rules)
    got = jax.jit(with_gradients(called))(*narrow(q, k, v), None, *narrow(cotangent))
    assert len(on_tpu) >= 1
    assert_equal(got, wanted)


@pytest.mark.slow
def test_sinks_and_a_cap_are_those_of_blocks(on_tpu):
    """Sinks are merged with what the kernel reads, and take their part of every piece's weights."""
    (q, k, v, cotangent), _ = drawn(2, (2, 1))
    sinks, found = jnp.asarray([0.3, -1.0], jnp.float32), {}
    for kernel in ("splash", "blocks"):
        options = {"method": "ring", "sinks": True, "score_mod": Softcap(1.5), "causal": True}
        called = split(2, "zigzag", kernel=kernel, **options)
        found[kernel] = jax.jit(with_gradients(called))(*narrow(q, k, v), sinks, *narrow(cotangent))
    assert on_tpu
    assert_equal(*found.values())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gather", "ring"])
def test_queries_may_be_fewer_than_keys(method, on_tpu):
    """Causal, by positions: the keys behind the last query are seen by none, and their gradients are 0."""
    (q, k, v, cotangent), _ = drawn(2, (1, 1), keys=2)
    wanted = gradients_by_hand(q, k, v, cotangent, seen_by(q.shape[1], k.shape[1], causal=True))[:4]
    called = split(2, "contiguous", method=method, kernel="splash", causal=True)
    got = jax.jit(with_gradients(called))(*narrow(q, k, v), None, *narrow(cotangent))
    assert on_tpu
    assert not np.any(got[2][:, q.shape[1] :]) and not np.any(got[3][:, q.shape[1] :])
    assert_equal(got, wanted)


def shapes(ranks, heads=(4, 2), places=PLACES, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct((1, ranks * places, n, SIZE), dtype) for n in (heads[0], heads[1], heads[1])]


def sent(kernel, method, ranks=4):
    """What a rank sends, forward and backward."""
    mesh = AbstractMesh((ranks,), ("context",), (AxisType.Auto,))
    called = split(ranks, "zigzag", mesh=mesh, method=method, kernel=kernel, causal=True)
    both = lambda *arrays: jax.vjp(called, *arrays)[1](jnp.ones(arrays[0].shape, arrays[0].dtype))
    return sorted((each.kind, each.leaf_elements, str(each.dtype)) for each in collectives_in(both, *shapes(ranks)))


@pytest.mark.parametrize("method", ["gather", "ring", "ulysses", (2, "ring"), (2, "gather")], ids=str)
def test_kernels_send_what_blocks_send(method, on_tpu):
    assert sent("splash", method) == sent("blocks", method)
    assert on_tpu


def test_without_a_kernel_blocks_compute_it_or_its_name_is_refused_with_all_reasons(on_tpu):
    given = shapes(2)
    for options in (
        {"block_size": 64},
        {"score_mod": lambda scores, where: scores},
        {"bias": lambda queries, keys: jnp.zeros((1, len(queries), len(keys)))},
        {"method": "ring", "window": (4, 4), "zigzag": True},
        {"check_vma": True},
    ):
        order = "zigzag" if options.pop("zigzag", False) else "contiguous"
        assert jax.eval_shape(split(2, order, **options), *given).shape == given[0].shape
    assert on_tpu == []
    wrong = {"method": "ring", "block_size": 8, "score_mod": lambda scores, where: scores, "window": (4, 4)}
    reasons = (
        "kernel='splash' does not apply here: block_size=8 .*; it changes no .*; in a ring its windows are of positions that "
        "follow each other evenly .order='zigzag' must be 'contiguous', or .*; it has no varying types .check_vma must be False"
    )
    with pytest.raises(ValueError, match=reasons):
        jax.eval_shape(split(2, "zigzag", kernel="splash", check_vma=True, **wrong), *given)
    reasons = (
        "kernel='cudnn' does not apply here: .*; a rank has .* of 2 groups .*; it is a kernel for cuda, .*; it is used "
    )
    with pytest.raises(ValueError, match=reasons + "without sliding windows .*; it computes in bfloat16"):
        jax.eval_shape(split(2, "zigzag", kernel="cudnn", **wrong), *given)
    with jax.enable_x64(True):
        jax.eval_shape(split(2, "zigzag"), *given)
        assert on_tpu == []
        with pytest.raises(ValueError, match=r"kernel='splash' .*: it counts in 32 bits, and jax_enable_x64 is on"):
            jax.eval_shape(split(2, "zigzag", kernel="splash"), *given)
    with pytest.raises(ValueError, match="kernel='flash' must be one of auto, blocks, splash, cudnn"):
        jax.eval_shape(lambda q, k, v: ax.context_attention(q, k, v, kernel="flash"), *given)
    many = {"mesh": AbstractMesh((32,), ("context",), (AxisType.Auto,)), "method": "gather", "causal": True}
    with pytest.raises(ValueError, match="131072 queries and 4194304 keys at once is too large"):
        jax.eval_shape(split(32, "zigzag", kernel="splash", **many), *shapes(32, places=2**17))


def test_auto_takes_the_kernel_of_the_platform(on_tpu):
    for method in ("gather", "ring", "ulysses"):
        on_tpu.clear()
        jax.eval_shape(split(2, "zigzag", method=method, causal=True), *shapes(2))
        assert len(on_tpu) == (2 if method == "ring" else 1)


def test_a_kernel_of_gpus_takes_whole_sequences_in_order(monkeypatch):
    """Ulysses: cuDNN is asked for all positions of some heads."""
    for room in (fused, by_kernel):
        monkeypatch.setattr(room, "target_platform", lambda: "cuda")
    mesh = AbstractMesh((2,), ("context",), (AxisType.Auto,))
    called = split(2, "zigzag", mesh=mesh, method="ulysses", kernel="cudnn", causal=True)
    asked = []
    monkeypatch.setattr(
        by_kernel, "fused_attention", lambda name, q, *_, **options: asked.append((name, q.shape, options)) or q
    )
    jax.eval_shape(called, *shapes(2, dtype=jnp.bfloat16))
    assert asked == [("cudnn", (1, 2 * PLACES, 2, SIZE), {"causal": True, "scale": SIZE**-0.5})]


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
def test_places_of_neighbours_are_brought_into_order_and_back(order):
    for ranks, group in ((4, 4), (4, 2), (6, 3), (3, 1)):
        for first in range(0, ranks, group):
            held = jnp.concatenate([positions_of(order, first + i, ranks, 12) for i in range(group)])
            sorted_ = in_sequence(held[None, :, None], order, group, 1)
            assert np.all(np.diff(sorted_[0, :, 0]) > 0)
            assert np.array_equal(by_rank(sorted_, order, group, 1)[0, :, 0], held)


def test_tables_name_every_pair_of_blocks_that_sees_something_once():
    visible, block = Visible(causal=True, window=(300, 0)), 128
    held = sequence_order("zigzag", 4 * 512, 4).reshape(4, -1)
    keys = np.arange(4 * 512)
    most = block_visits.most_visits(visible, [(each, keys) for each in held], block, block)
    assert most[0] < len(keys) // block and most[1] <= 512 // block
    for queries in held:
        bounds = queries.reshape(-1, block), keys.reshape(-1, block)
        may = np.array([[visible.may_see(q[0], q[-1], k[0], k[-1]) for k in bounds[1]] for q in bounds[0]])
        (of_queries, counts), (of_keys, others) = block_visits.visits(jnp.asarray(may), most)
        named = {
            (i, int(j)) for i, row in enumerate(of_queries) for j, real in zip(row, counts[i], strict=True) if real
        }
        again = {
            (int(i), j) for j, row in enumerate(of_keys.T) for i, real in zip(row, others.T[j], strict=True) if real
        }
        assert named == again == set(zip(*np.nonzero(may), strict=True))
        assert int(counts.sum()) == int(others.sum()) == len(named)


@pytest.mark.parametrize(("method", "pieces"), [("gather", 1), ("ring", 4), ((2, "ring"), 2)], ids=str)
def test_a_program_lowered_for_tpus_has_three_kernels_for_every_piece_and_no_scores(method, pieces, monkeypatch):
    for room in (fused, by_kernel):
        monkeypatch.setattr(room, "target_platform", lambda: "tpu")
    mesh = AbstractMesh((4,), ("context",), (AxisType.Auto,))
    called = split(4, "zigzag", mesh=mesh, method=method, causal=True)
    both = lambda *arrays: jax.vjp(called, *arrays)[1](jnp.ones(arrays[0].shape, arrays[0].dtype))
    with jax.enable_x64(False):
        text = jax.jit(both).trace(*shapes(4, places=384)).lower(lowering_platforms=("tpu",)).as_text()
    names = re.findall(r'kernel_name = "(splash_mha_\w+?)"', text)
    assert len(names) == text.count("@tpu_custom_call") == 3 * pieces and len(set(names)) == 3
    rank, piece = (384, 4 * 384) if method == "gather" else (384, 384) if method == "ring" else (768, 768)
    assert f"{rank}x{piece}x" not in text
