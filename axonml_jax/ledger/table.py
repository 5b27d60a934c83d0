"""Plain-text tables: aligned columns, no dependency and no terminal needed."""

from collections.abc import Sequence

from axonml_jax.cost.wire import Amount


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
