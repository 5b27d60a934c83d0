"""Timetables and orders as text: rows of labels over a ruler, broken into blocks that fit the line."""

from collections.abc import Mapping, Sequence


def draw_grid(rows: Mapping[str, Sequence[str]], *, ruler: str = "tick", width: int = 120) -> str:
    """Labels in columns of one width, with the number of each column above.

    >>> print(draw_grid({"rank 0": ["0F0", "", "0B0"], "rank 1": ["", "1F0"]}))
    tick      0   1   2
    rank 0  0F0   . 0B0
    rank 1    . 1F0   .

    Args:
      rows: labels by column for every row's name; "" and columns behind the end are idle, drawn as a dot.
      ruler: what is counted by the columns.
      width: the longest line; more columns go into another block below.
    """
    length = max(map(len, rows.values()), default=0)
    head = max(map(len, (ruler, *rows)), default=0)
    cell = max([len(str(length - 1)), *(len(label) for labels in rows.values() for label in labels)])
    step = max(1, (width - head - 1) // (cell + 1))
    blocks = []
    for start in range(0, length, step):
        columns = range(start, min(start + step, length))
        lines = [(ruler, [str(column) for column in columns])]
        lines += [(name, [labels[c] if c < len(labels) else "" for c in columns]) for name, labels in rows.items()]
        blocks.append("\n".join(_line(name, labels, head, cell) for name, labels in lines))
    return "\n\n".join(blocks)


def _line(name: str, labels: Sequence[str], head: int, cell: int) -> str:
    return f"{name:<{head}} " + "".join(f" {label or '.':>{cell}}" for label in labels)
