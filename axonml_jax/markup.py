"""Small pieces of HTML for notebooks: escaped, without scripts and style sheets, in the colours of the page around them."""

from collections.abc import Collection, Sequence
from html import escape

_RULE = "border-bottom:1px solid #8886"
_BAR = "#3f83c9"
_BAR_PIXELS = 96


def section(title: str, *parts: str) -> str:
    """A title, escaped here, above parts that are HTML already; what is too wide for the page scrolls.

    >>> section("a < b", "<p>so</p>")
    '<div style="overflow-x:auto"><div><b>a &lt; b</b></div><p>so</p></div>'
    """
    head = f"<div><b>{escape(title)}</b></div>" if title else ""
    return f'<div style="overflow-x:auto">{head}{"".join(parts)}</div>'


def lines(text: str) -> str:
    """Text as a block whose lines stay lines.

    >>> lines("1 < 2\\n3")
    '<div style="margin:4px 0">1 &lt; 2<br>3</div>'
    """
    return f'<div style="margin:4px 0">{"<br>".join(map(escape, text.splitlines()))}</div>'


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int,
    *,
    shares: Sequence[float] = (),
    quiet: Collection[int] = (),
) -> str:
    """A table whose first `left` columns are flush left and the others flush right.

    Args:
      header: names of the columns.
      rows: cells, escaped here.
      left: number of columns that hold words.
      shares: of every row a number from 0 to 1, drawn as a bar behind it; none are drawn when empty.
      quiet: rows that are written faintly.
    """
    head = "".join(_cell("th", name, index < left) for index, name in enumerate(header)) + "<th></th>" * bool(shares)
    bars = [f"<td>{_bar(share)}</td>" for share in shares] or [""] * len(rows)
    body = [
        f"<tr{_FAINT * (number in quiet)}>{''.join(_cell('td', cell, i < left) for i, cell in enumerate(row))}{bar}</tr>"
        for number, (row, bar) in enumerate(zip(rows, bars, strict=True))
    ]
    return (
        '<table style="border-collapse:collapse;margin:6px 0">'
        f'<thead><tr style="{_RULE}">{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    )


_FAINT = ' style="opacity:0.55"'


def _cell(tag: str, text: str, words: bool) -> str:
    side = "left" if words else "right"
    return f'<{tag} style="text-align:{side};padding:2px 8px">{escape(text)}</{tag}>'


def _bar(share: float) -> str:
    wide = round(_BAR_PIXELS * min(max(share, 0.0), 1.0))
    return f'<div style="width:{wide}px;height:0.7em;background:{_BAR}"></div>'
