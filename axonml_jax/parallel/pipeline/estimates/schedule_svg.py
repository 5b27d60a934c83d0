"""Events of a pipeline on a line of time, as a picture (SVG) that needs nothing but a browser."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from axonml_jax.parallel.pipeline.estimates.events import Event

WORDS: dict[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of inputs",
    "W": "gradient of weights",
}
IDLE = "idle; numbers are microbatches"
WAITING = "; dashed: all ranks wait for each other"
# From light to dark, one shade per chunk; text turns white on dark ones.
SHADES: dict[str, tuple[str, ...]] = {
    "F": ("#bcd5f0", "#7fb0e3", "#3f83c9", "#1f5a9c"),
    "B": ("#bfe3c0", "#85c788", "#4a9f50", "#2a7332"),
    "I": ("#c3e8dc", "#86cdb6", "#45a488", "#247660"),
    "W": ("#f7d9a8", "#eebb66", "#d18f26", "#9a6413"),
}
DARK = 2  # the first shade under white text
LEFT, TOP, ROW, GAP = 64, 44, 26, 4
FONT = "system-ui, sans-serif"
MONOSPACE = ' font-family="ui-monospace, monospace"'
MAX_WIDTH = 1120


class Colours(NamedTuple):
    """Of everything but the boxes: words, paper, idle time, quiet words, and lines between boxes."""

    words: str
    paper: str
    idle: str
    quiet: str
    between: str


ON_PAPER = Colours("#222", "#fff", "#f1f1f1", "#666", "#fff")
"""A picture that stands for itself."""
IN_PAGE = Colours("currentColor", "none", "#8883", "#888", "none")
"""A part of a page, light or dark, whose words it takes the colour of."""


def draw_svg(
    title: str,
    events: Sequence[Sequence[Event]],
    caption: Sequence[str],
    ticks: Sequence[float] = (),
    *,
    colours: Colours = ON_PAPER,
) -> str:
    """A row per rank, a box per action with its microbatch in it; chunks are shades. Boxes tell their action when pointed at.

    Args:
      title: above the rows.
      events: per rank.
      caption: lines below.
      ticks: times at which all ranks wait for each other, drawn as lines.
      colours: of what is not a box.

    Returns:
      The SVG document.
    """
    everything = [event for here in events for event in here]
    until = max((event.end for event in everything), default=1.0) or 1.0
    shortest = min((event.end - event.start for event in everything if event.end > event.start), default=until)
    digits = max((len(str(event.action.microbatch)) for event in everything), default=1)
    scale = max((9 + 6 * digits) / shortest, min(44 / shortest, MAX_WIDTH / until))
    lines = [line for text in caption for line in text.splitlines() or [""]]
    words = 24 + max(9 * len(title), 7.3 * max(map(len, lines), default=0), _legend_width(events, ticked=bool(ticks)))
    bottom = TOP + len(events) * (ROW + GAP)
    width, height = max(LEFT + until * scale + 16, words), bottom + 62 + 17 * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="{FONT}" font-size="12" fill="{colours.words}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="{colours.paper}"/>',
        f'<text x="12" y="26" font-size="15" font-weight="600">{escape(title)}</text>',
        *_rows(events, until * scale, scale, colours),
        *(_line(LEFT + tick * scale, bottom, colours) for tick in ticks),
        *_axis(until, scale, bottom, colours),
        *_legend(events, bottom + 44, colours, ticked=bool(ticks)),
        *(_text(12, bottom + 70 + 17 * row, line, MONOSPACE) for row, line in enumerate(lines)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _rows(events: Sequence[Sequence[Event]], length: float, scale: float, colours: Colours) -> Iterator[str]:
    num_ranks = len(events)
    for rank, here in enumerate(events):
        y = TOP + rank * (ROW + GAP)
        yield f'<text x="12" y="{y + 17}">rank {rank}</text>'
        yield f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{ROW}" fill="{colours.idle}"/>'
        yield from (_box(event, event.action.stage // num_ranks, y, scale, colours) for event in here)


def _box(event: Event, chunk: int, y: int, scale: float, colours: Colours) -> str:
    stage, work, microbatch = event.action
    x, wide = LEFT + event.start * scale, (event.end - event.start) * scale
    shade = chunk % len(SHADES[work])
    size = min(12.0, wide / (0.62 * len(str(microbatch)) + 0.4))
    colour = "#fff" if shade >= DARK else "#222"
    name = f"{event.action}: {WORDS[work]} of stage {stage}, microbatch {microbatch}, {event.start:g} to {event.end:g}"
    return (
        f'<g><title>{name}</title><rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW}" '
        f'fill="{SHADES[work][shade]}" stroke="{colours.between}"/><text x="{x + wide / 2:.1f}" y="{y + 17}" '
        f'text-anchor="middle" font-size="{size:.1f}" fill="{colour}">{microbatch}</text></g>'
    )


def _line(x: float, bottom: int, colours: Colours) -> str:
    return f'<path d="M{x:.1f} {TOP - 4}V{bottom}" stroke="{colours.words}" stroke-width="0.6" stroke-dasharray="2 3"/>'


def _axis(until: float, scale: float, y: int, colours: Colours) -> Iterator[str]:
    """Times below the rows, a round number apart."""
    step = next(step for power in range(-6, 12) for step in _steps(power) if step * scale >= 40)
    for k in range(int(until / step) + 1):
        yield _text(LEFT + k * step * scale, y + 14, f"{k * step:g}", f' text-anchor="middle" fill="{colours.quiet}"')
    yield _text(12, y + 14, "time", f' fill="{colours.quiet}"')


def _steps(power: int) -> tuple[float, ...]:
    return tuple(digit * 10.0**power for digit in (1, 2, 5))


def _legend(events: Sequence[Sequence[Event]], y: int, colours: Colours, *, ticked: bool) -> Iterator[str]:
    x = 12.0
    for work, words, chunks in _legend_words(events):
        for chunk in range(chunks):
            fill = SHADES[work][chunk % len(SHADES[work])]
            yield f'<rect x="{x:.0f}" y="{y - 11}" width="14" height="14" fill="{fill}"/>'
            x += 17
        yield _text(x + 3, y, words)
        x += 22 + 6.6 * len(words)
    yield f'<rect x="{x:.0f}" y="{y - 11}" width="14" height="14" fill="{colours.idle}"/>'
    yield _text(x + 20, y, IDLE + WAITING * ticked)


def _legend_words(events: Sequence[Sequence[Event]]) -> list[tuple[str, str, int]]:
    """(kind of work, what it is called, shades) of every kind that is drawn."""
    chunks = 1 + max((event.action.stage // len(events) for here in events for event in here), default=0)
    used = {event.action.work for here in events for event in here}
    more = f" (chunks 0 to {chunks - 1})" if chunks > 1 else ""
    return [(work, words + more, chunks) for work, words in WORDS.items() if work in used]


def _legend_width(events: Sequence[Sequence[Event]], *, ticked: bool) -> float:
    each = (17 * chunks + 22 + 6.6 * len(words) for _, words, chunks in _legend_words(events))
    return sum(each) + 20 + 6.6 * len(IDLE + WAITING * ticked)


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}"{style} xml:space="preserve">{escape(words)}</text>'
