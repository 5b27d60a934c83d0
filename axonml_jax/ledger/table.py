"""Tables as plain text, aligned columns without a dependency or a terminal, and as HTML for notebooks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axonml_jax import markup
from axonml_jax.cost.wire import Amount


@dataclass(frozen=True)
class PrintedTable:
    """Rows under a header, printed as text and shown as HTML.

    Attributes:
      header: names of the columns.
      rows: cells.
      left: columns that hold words; the others hold numbers.
      shares: of every row a number from 0 to 1, a bar in HTML; empty: no bars.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int
    shares: Sequence[float] = ()

    def __str__(self) -> str:
        return aligned(self.header, self.rows, self.left)

    def _repr_html_(self) -> str:
        return markup.table(self.header, self.rows, self.left, shares=self.shares)


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table whose first `left` columns are flush left and the others flush right.

    >>> print(aligned(["what", "bytes"], [["a", "1,024"], ["bcd", "8"]], left=1))
    what  bytes
    ----  -----
    a     1,024
    bcd       8
    """
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def number(amount: Amount) -> str:
    """Thousands separated; a fraction with one decimal.

    >>> from fractions import Fraction
    >>> number(1234567), number(Fraction(10, 3))
    ('1,234,567', '3.3')
    """
    return f"{amount:,}" if isinstance(amount, int) else f"{float(amount):,.1f}"


def axes_table(sent: Mapping[str, Amount], total: Amount) -> PrintedTable:
    """What one rank sends over which mesh axes."""
    rows = [[axes, number(amount)] for axes, amount in sent.items()]
    shares = [float(amount / total) if total else 0.0 for amount in sent.values()]
    return PrintedTable(["axes", "bytes/rank"], [*rows, ["total", number(total)]], left=1, shares=[*shares, 0.0])
