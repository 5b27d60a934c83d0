"""Events of a pipeline on a line of time, as text."""

import math
from collections.abc import Sequence
from fractions import Fraction

from axonml_jax.parallel.pipeline.estimates.events import Event
from axonml_jax.parallel.pipeline.schedules.action import format_orders
from axonml_jax.parallel.pipeline.schedules.draw import draw_grid

MAX_COLUMNS = 2000
FINEST = 1000  # times are read as fractions with at most this denominator


def draw_events(events: Sequence[Sequence[Event]], width: int) -> str:
    """A row per rank and a column per unit of time; an action that takes several units goes on as `=`.

    Args:
      events: per rank.
      width: the longest line.

    Returns:
      The drawing; only the order of actions, a line per rank, where an action takes no time or no unit fits all times in a
      readable number of columns.
    """
    spans = [[(_exact(event.start), _exact(event.end)) for event in here] for here in events]
    unit = _common_unit([time for here in spans for span in here for time in span])
    columns = max((int(end / unit) for here in spans for _, end in here), default=0)
    if columns > MAX_COLUMNS or any(start == end for here in spans for start, end in here):
        return format_orders([[event.action for event in here] for here in events])
    rows = {}
    for rank, here in enumerate(events):
        row = [""] * columns
        for event, (start, end) in zip(here, spans[rank], strict=True):
            label, first, last = str(event.action), int(start / unit), int(end / unit)
            row[first:last] = [label, *["=" * len(label)] * (last - first - 1)]
        rows[f"rank {rank}"] = row
    ruler = "time" if unit == 1 else f"time x {float(unit):g}"
    return draw_grid(rows, ruler=ruler, width=width)


def _common_unit(times: Sequence[Fraction]) -> Fraction:
    """The largest time of which all are multiples; 1 where all are 0."""
    below = math.lcm(*(time.denominator for time in times))
    return Fraction(math.gcd(*(int(time * below) for time in times)), below) or Fraction(1)


def _exact(time: float) -> Fraction:
    return Fraction(time).limit_denominator(FINEST)
