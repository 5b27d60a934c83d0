"""Events of a pipeline on a line of time, as text."""

import math
from collections.abc import Sequence
from fractions import Fraction

from axonml_jax.parallel.pipeline.action import format_orders
from axonml_jax.parallel.pipeline.draw import draw_grid
from axonml_jax.parallel.pipeline.trace import Event

MAX_COLUMNS = 2000
FINEST = 1000  # times are read as fractions with at most this denominator


def draw_events(events: Sequence[Sequence[Event]], width: int) -> str:
    """A row per rank and a column per unit of time; an action that takes several units goes on as `=`.

    Args:
      events: per rank.
      width: the longest line.

    Returns:
      The drawing; only the order of actions, a line per rank, where no unit fits all times in a readable number of columns.
    """
    ends = [[Fraction(event.end).limit_denominator(FINEST) for event in here] for here in events]
    starts = [[Fraction(event.start).limit_denominator(FINEST) for event in here] for here in events]
    unit = _common_unit([time for times in (*starts, *ends) for time in times if time])
    columns = max((int(times[-1] / unit) for times in ends if times), default=0)
    if columns > MAX_COLUMNS:
        return format_orders([[event.action for event in here] for here in events])
    rows = {}
    for rank, here in enumerate(events):
        row = [""] * columns
        for event, start, end in zip(here, starts[rank], ends[rank], strict=True):
            first, last = int(start / unit), int(end / unit)
            row[first:last] = ["=" * len(str(event.action))] * (last - first)
            if last > first:
                row[first] = str(event.action)
        rows[f"rank {rank}"] = row
    ruler = "time" if unit == 1 else f"time x {float(unit):g}"
    return draw_grid(rows, ruler=ruler, width=width)


def _common_unit(times: Sequence[Fraction]) -> Fraction:
    """The largest time of which all are multiples."""
    if not times:
        return Fraction(1)
    below = math.lcm(*(time.denominator for time in times))
    return Fraction(math.gcd(*(int(time * below) for time in times)), below)
