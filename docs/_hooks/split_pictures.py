"""The pictures of what every rank holds under each plan: a model, a batch, and the rank's part of both.

`python docs/_hooks/split_pictures.py` writes them; `tests/test_plan_table.py` fails while a page has another.
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "guides" / "pictures"
RANKS, CELL, GAP = 4, 17, 26
HELD, READ, OWN_ROWS, EMPTY = "#5b8fd1", "#cfe0f5", "#e8a33d", "none"
EVERY = (0, 1, 2, 3)


def one(rank):
    """The rank's own quarter."""
    return (rank,)


def every(_rank):
    """All four quarters."""
    return EVERY


def half(rank):
    """The half of two ranks that lie next to each other along the mesh's last axis."""
    return ((0, 1), (2, 3))[rank % 2]


# name: (title, what is sent, layers held, features held, layers read, features read, rows, positions)
PLANS = {
    "ddp": ("DDP: mesh data=4", "all-reduce of gradients", every, every, every, every, one, every),
    "fsdp": (
        "FSDP: mesh fsdp=4",
        "all-gather of a layer when it is needed, reduce-scatter of its gradient",
        *(every, one, every, every, one, every),
    ),
    "tensor": (
        "Tensor: mesh tensor=4",
        "all-reduce of activations, twice a layer and direction",
        *(every, one, every, one, every, every),
    ),
    "context": (
        "Context: mesh context=4",
        "keys and values of other positions, all-reduce of gradients",
        *(every, every, every, every, every, one),
    ),
    "pipeline": (
        "Pipeline: mesh pipe=4",
        "activations to the next rank and gradients back, a microbatch at a time",
        *(one, every, one, every, every, every),
    ),
}
TOGETHER = (
    "FSDP and tensor: mesh fsdp=2, tensor=2",
    "gathers and reduce-scatters between ranks 0 and 2, 1 and 3; activations between 0 and 1, 2 and 3",
    *(every, lambda rank: ((0, 2, 1, 3)[rank],), every, half, lambda rank: ((0, 1), (2, 3))[rank // 2], every),
)
ARROW = (
    '<defs><marker id="to" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    '<path d="M0,0 L6,3 L0,6 z" fill="#444"/></marker></defs>'
)
WIDTH, PANEL, TOP = 770, 4 * CELL + GAP, 64


def drawing(plans):
    """The plans as SVG, one below the other."""
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    height = 12 + len(plans) * (TOP + 5 * CELL + 12) + 34
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {style}>']
    parts.append(f'<rect width="{WIDTH}" height="{height}" fill="white"/>')
    for row, plan in enumerate(plans):
        parts += panels(plan, 12 + row * (TOP + 5 * CELL + 12))
    return "\n".join([*parts, *legend(height - 20), "</svg>", ""])


def panels(plan, top):
    """One plan: for every rank its part of the model and of the batch."""
    title, says, layers, features, read_layers, read_features, rows, positions = plan
    yield text(16, top + 14, title, bold=True)
    yield text(16, top + 32, f"sends: {says}", size=11)
    for rank in range(RANKS):
        left = 16 + rank * (2 * PANEL - 4)
        yield text(left, top + TOP - 10, f"rank {rank}", size=11)
        for layer in EVERY:
            for feature in EVERY:
                held = layer in layers(rank) and feature in features(rank)
                read = layer in read_layers(rank) and feature in read_features(rank)
                yield cell(left + feature * CELL, top + TOP + layer * CELL, HELD if held else READ if read else EMPTY)
        for row in EVERY:
            for position in EVERY:
                own = row in rows(rank) and position in positions(rank)
                x = left + PANEL - GAP + 10 + position * CELL
                yield cell(x, top + TOP + row * CELL, OWN_ROWS if own else EMPTY)


def checkpoint():
    """Four ranks of FSDP write whole arrays, which three ranks of another mesh and a plain module read."""
    height = 290
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {style}>{ARROW}'
    yield f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    saved = [(16 + 90 * (rank % 2), 50 + 110 * (rank // 2), f"rank {rank}", EVERY, (rank,)) for rank in range(RANKS)]
    saved.append((345, 105, "whole arrays by name", EVERY, EVERY))
    saved += [(540 + 90 * rank, 50, f"stage {rank}", (2 * rank, 2 * rank + 1), EVERY) for rank in range(2)]
    saved += [(540 + 90 * rank, 180, f"rank {rank}", EVERY, EVERY) for rank in range(2)]
    for x, y, said, layers, features in saved:
        yield text(x, y - 6, said, size=11)
        yield from square(x, y, layers, features)
    yield text(16, 22, "saved by FSDP on four devices", bold=True)
    yield text(320, 22, "one checkpoint", bold=True)
    yield text(540, 22, "restored by a pipeline of two", bold=True)
    yield text(540, 156, "or DDP on two, or a plain module", bold=True)
    for x1, x2, y in ((205, 325, 140), (430, 520, 100), (430, 520, 200)):
        yield f'<line x1="{x1}" y1="140" x2="{x2}" y2="{y}" stroke="#444" marker-end="url(#to)"/>'
    yield from ("</svg>", "")


def square(left, top, layers, features):
    """A model's layers and features, those of a rank filled."""
    for layer in EVERY:
        for feature in EVERY:
            held = layer in layers and feature in features
            yield cell(left + feature * CELL, top + layer * CELL, HELD if held else EMPTY)


def legend(y):
    """What colours and directions mean."""
    words = (
        (HELD, "parameters held (layers down, features across)"),
        (READ, "read for a moment"),
        (OWN_ROWS, "part of the batch (rows down, positions across)"),
    )
    x = 16
    for fill, said in words:
        yield cell(x, y - 11, fill, size=13)
        yield text(x + 20, y, said, size=11)
        x += 40 + 6.1 * len(said)


def cell(x, y, fill, size=CELL):
    """A square."""
    return f'<rect x="{x:g}" y="{y:g}" width="{size}" height="{size}" fill="{fill}" stroke="#777"/>'


def text(x, y, words, *, size=12, bold=False):
    """Words from a place on."""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}"{weight}>{words}</text>'


def pictures():
    """File name -> picture."""
    each = {f"split-{name}.svg": drawing([plan]) for name, plan in PLANS.items()}
    return each | {
        "split-plans.svg": drawing([*PLANS.values(), TOGETHER]),
        "split-three.svg": drawing([PLANS["ddp"], PLANS["fsdp"], TOGETHER]),
        "split-checkpoint.svg": "\n".join(checkpoint()),
    }


if __name__ == "__main__":
    for name, picture in pictures().items():
        (FOLDER / name).write_text(picture, "utf-8")
