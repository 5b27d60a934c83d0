"""The picture of the guide on context parallelism: who holds which tokens, and what ranks of a ring read in which round.

`python docs/_hooks/context_picture.py` writes it; `tests/test_plan_table.py` fails while the page has another.
"""

from pathlib import Path

from axonml_jax.layers.pieces import RingRounds, Visible
from axonml_jax.sharding.layout import ORDERS, causal_balance, order_parts, sequence_order

FILE = Path(__file__).resolve().parents[1] / "guides" / "pictures" / "context.svg"
RANKS, TOKENS, CELL = 4, 16, 30
COLOURS = ("#7fb0e3", "#eebb66", "#85c788", "#c9a9d6")
ARROW = (
    '<defs><marker id="to" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    '<path d="M0,0 L6,3 L0,6 z" fill="#444"/></marker></defs>'
)
LEFT, TOP, WIDTH, HEIGHT = 110, 46, 770, 400


def drawing():
    """The picture as SVG."""
    style = 'font-family="sans-serif" font-size="13" text-anchor="middle" fill="#222"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{ARROW}')
    parts += tokens_by_order()
    for left, order in ((LEFT, "contiguous"), (LEFT + 330, "zigzag")):
        parts += rounds_of_ring(order, left, TOP + 3 * (CELL + 10) + 62)
    return "\n".join([*filter(None, parts), "</svg>", ""])


def tokens_by_order():
    """A row for each order: the sequence's tokens in the colours of the ranks that hold them."""
    yield text(LEFT + TOKENS * CELL / 2, TOP - 14, f"rank that holds each of {TOKENS} tokens", bold=True)
    yield text(LEFT + TOKENS * CELL + 90, TOP - 14, "causal work, largest over mean", size=11)
    for row, order in enumerate(ORDERS):
        y, held = TOP + row * (CELL + 10), sequence_order(order, TOKENS, RANKS).reshape(RANKS, -1)
        yield text(LEFT - 55, y + 20, order)
        for rank, tokens in enumerate(held):
            for token in tokens:
                yield cell(LEFT + int(token) * CELL, y, COLOURS[rank], str(rank))
        yield text(LEFT + TOKENS * CELL + 90, y + 20, f"{causal_balance(order, TOKENS, RANKS):.2f}")


def rounds_of_ring(order, left, top):
    """A row for each round: whose keys and values every rank has, hollow where its queries see none of them."""
    rounds = ring_rounds(order)
    yield text(left + 3.5 * CELL, top - 34, f"a ring, {order}: whose keys a rank reads", bold=True)
    for rank in range(RANKS):
        yield text(left + rank * 2 * CELL + CELL / 2, top - 10, f"rank {rank}", size=11)
    for number in range(rounds.count):
        y, computing = top + number * (CELL + 8), rounds.computing(number)
        yield text(left - 40, y + 20, f"round {number}", size=11)
        for rank in range(RANKS):
            x, source = left + rank * 2 * CELL, (rank - number) % RANKS
            seen = rank in computing
            yield cell(x, y, COLOURS[source] if seen else "none", str(source) if seen else "")
            if number and rank:
                line = f'x1="{x - CELL}" y1="{y - 12}" x2="{x - 2}" y2="{y + 10}"'
                yield f'<line {line} stroke="#444" marker-end="url(#to)"/>' if sends(rounds, number, rank) else ""


def ring_rounds(order):
    """Of causal attention."""
    chunks = order_parts(order, RANKS) // RANKS
    held = sequence_order(order, TOKENS, RANKS).reshape(RANKS, chunks, -1)
    return RingRounds.of(Visible(causal=True), [[(int(c[0]), int(c[-1])) for c in own] for own in held])


def sends(rounds, number, rank):
    """Whether a rank gets keys from the one before it in front of a round."""
    return (rank - 1, rank) in rounds.keys(number)


def cell(x, y, fill, word):
    """A square with a word in it."""
    return f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{fill}" stroke="#666"/>' + text(
        x + CELL / 2, y + 20, word
    )


def text(x, y, words, *, size=13, bold=False):
    """Words around a place."""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}"{weight}>{words}</text>'


if __name__ == "__main__":
    FILE.write_text(drawing(), "utf-8")
