"""The ring formulas against a simulated ring, and the parsing of labels; no devices."""

from fractions import Fraction

import pytest

from axonml_jax.cost.decoder import KINDS, wire_elements
from axonml_jax.ledger.count import label_of


def ring_all_gather(chunk: int, ranks: int) -> int:
    """Elements one rank forwards until everybody holds every rank's chunk."""
    held = [{rank} for rank in range(ranks)]
    sent, latest = 0, list(range(ranks))
    while any(len(chunks) < ranks for chunks in held):
        latest = [latest[rank - 1] for rank in range(ranks)]
        for rank, chunk_id in enumerate(latest):
            held[rank].add(chunk_id)
        sent += chunk
    return sent


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_formulas_equal_what_a_simulated_ring_sends(ranks):
    chunk = 5
    gathered = ring_all_gather(chunk, ranks)
    assert wire_elements("all_gather", chunk * ranks, ranks) == gathered
    assert wire_elements("reduce_scatter", chunk * ranks, ranks) == gathered
    assert wire_elements("all_reduce", chunk * ranks, ranks) == 2 * gathered


@pytest.mark.parametrize(
    ("kind", "elements", "ranks", "sent"),
    [
        ("all_reduce", 1000, 8, 1750),
        ("all_reduce", 7, 3, Fraction(28, 3)),
        ("all_gather", 64, 8, 56),
        ("reduce_scatter", 10, 4, Fraction(15, 2)),
        ("all_to_all", 12, 4, 9),
        ("permute", 12, 4, 12),
        ("broadcast", 12, 4, 12),
        ("ragged_all_to_all", 12, 4, 12),
        ("all_reduce", 0, 4, 0),
    ],
)
def test_formulas_are_exact(kind, elements, ranks, sent):
    amount = wire_elements(kind, elements, ranks)
    assert amount == sent
    assert isinstance(amount, type(sent))


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_sends_nothing(kind):
    assert wire_elements(kind, 100, 1) == 0


@pytest.mark.parametrize(("kind", "n", "ranks"), [("gossip", 1, 2), ("all_reduce", -1, 2), ("all_reduce", 1, 0)])
def test_senseless_sizes_are_refused(kind, n, ranks):
    with pytest.raises(ValueError, match=kind):
        wire_elements(kind, n, ranks)


@pytest.mark.parametrize(
    ("scope", "kind", "expected"),
    [
        ("", "all_reduce", ("", 0)),
        ("decoder/attention", "all_reduce", ("", 0)),
        ("axonml.gradients", "all_reduce", ("gradients", 0)),
        ("axonml.gradients/bucket3", "all_reduce", ("gradients", 0)),
        ("axonml.gradients.pad12", "reduce_scatter", ("gradients", 12)),
        ("axonml.gradients/axonml.norm", "all_reduce", ("norm", 0)),
        ("jit(step)/transpose(jvp(axonml.metrics))", "all_reduce", ("metrics", 0)),
        ("jvp(axonml.parameters)", "all_gather", ("parameters", 0)),
        ("axonml.parameters", "all_reduce", ("parameters", 0)),
        ("transpose(jvp(axonml.parameters))", "all_gather", ("parameters", 0)),
        ("transpose(jvp(axonml.parameters))", "reduce_scatter", ("gradients", 0)),
        ("transpose(jvp(block))/checkpoint/axonml.parameters", "all_reduce", ("gradients", 0)),
    ],
)
def test_labels_are_read_through_transformations(scope, kind, expected):
    assert label_of(scope, kind) == expected
