"""`schedule`: a pipeline's timetable drawn, with its bubble and memory."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from axonml_jax.base import folded
from axonml_jax.cli.flags import require_writable
from axonml_jax.config.config import ConfigError
from axonml_jax.pipeline.schedules import AbstractSchedule, PipelineSchedule, make_schedule, make_timetable
from axonml_jax.pipeline.simulate import Simulation, choose, simulate
from axonml_jax.pipeline.timetable import (
    Event,
    StageCosts,
    Timetable,
    draw_grid,
    draw_svg,
    format_orders,
    tick_times,
    trace_orders,
    trace_ticks,
)

# --------------------------------------------------------------------------------------------------
# Events of a pipeline on a line of time, as text.
# --------------------------------------------------------------------------------------------------

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


# --------------------------------------------------------------------------------------------------
# `axonml-jax schedule`: a pipeline's timetable as text and picture, with its time, bubble and memory.
# --------------------------------------------------------------------------------------------------

FASTEST = "fastest"
NARROWEST = 20


@dataclass(frozen=True)
class Drawing:
    """What is drawn: events and figures of one schedule, in its classic order or in the rows of a timetable.

    Attributes:
      title: which schedule of which size.
      text: the timetable.
      events: per rank, with their times.
      ticks: when the ticks of a timetable end; none in the classic order.
      caption: time, bubble and memory, a line each.
    """

    title: str
    text: str
    events: list[list[Event]]
    ticks: list[float]
    caption: list[str]


def schedule(arguments: Sequence[str]) -> int:
    """Draw one schedule, or the fastest one and why. Starts no devices.

    Args:
      arguments: of the command line, after `schedule`.

    Raises:
      ConfigError: for a size that the schedule refuses, or a picture that cannot be written.
    """
    chosen = _parser().parse_args(arguments)
    if chosen.width < NARROWEST:
        raise ConfigError(f"--width {chosen.width}: a line has at least {NARROWEST} characters")
    require_writable({"--svg": chosen.svg})
    try:
        costs = StageCosts(*chosen.times, communication=chosen.communication)
        drawing = _fastest(chosen, costs) if chosen.schedule == FASTEST else _chosen(chosen, costs)
    except ValueError as error:
        raise ConfigError(_in_flags(str(error))) from error
    print(drawing.title, drawing.text, folded("\n".join(drawing.caption)), sep="\n\n")
    if chosen.svg is not None:
        chosen.svg.write_text(draw_svg(drawing.title, drawing.events, drawing.caption, drawing.ticks), "utf-8")
        print(f"\npicture   {chosen.svg}")
    return 0


def _in_flags(message: str) -> str:
    for name, flag in (("num_ranks", "--stages"), ("num_microbatches", "--microbatches"), ("num_chunks", "--chunks")):
        message = message.replace(name, flag)
    return message


def _chosen(chosen: argparse.Namespace, costs: StageCosts) -> Drawing:
    order = chosen.order or "fused"
    if chosen.variant is not None and order == "fused":
        raise ValueError(
            f"--variant {chosen.variant} differs from the other in --order classic and alternating; fused rows have none"
        )
    planned = make_schedule(chosen.schedule, chosen.stages, chosen.microbatches, chosen.chunks, variant=chosen.variant)
    return _drawing(planned, order, costs, chosen.width)


def _fastest(chosen: argparse.Namespace, costs: StageCosts) -> Drawing:
    without = [f"--{name}" for name in ("order", "variant") if getattr(chosen, name) is not None]
    if without:
        raise ValueError(f"--schedule {FASTEST} chooses these itself: leave out {' and '.join(without)}")
    choice = choose(chosen.stages, chosen.microbatches, chosen.chunks, costs=costs)
    best = choice.best
    planned = make_schedule(best.schedule, chosen.stages, chosen.microbatches, best.num_chunks)
    joined = costs.merged(chosen.stages * chosen.chunks, chosen.chunks // best.num_chunks)
    drawing = _drawing(planned, best.rows, joined, chosen.width)
    return replace(drawing, caption=[*drawing.caption, "", *choice.reason.splitlines()])


def _drawing(planned: AbstractSchedule, order: str, costs: StageCosts, width: int) -> Drawing:
    chunks = f" x {planned.num_chunks} chunks" if planned.num_chunks > 1 else ""
    variant = f" {vars(planned)['variant']}" if "variant" in vars(planned) and order != "fused" else ""
    how = "classic order" if order == "classic" else f"{order} rows"
    title = (
        f"{planned.name}{variant}, {how}: {planned.num_ranks} ranks{chunks}, {planned.num_microbatches} microbatches"
    )
    if order == "classic":
        events = trace_orders(planned.orders, costs)
        found = simulate(planned.orders, costs)
        return Drawing(
            title, draw_events(events, width), events, [], [*_times(planned, found, costs), _kept_activations(found)]
        )
    timetable = make_timetable(planned, order)  # pyright: ignore[reportArgumentType]
    found = simulate(timetable, costs)
    caption = [*_times(planned, found, costs), _kept_activations(found), *_buffers(planned, timetable)]
    _, ends = tick_times(timetable, costs)
    return Drawing(title, timetable.draw(width), trace_ticks(timetable, costs), ends.tolist(), caption)


def _times(planned: AbstractSchedule, found: Simulation, costs: StageCosts) -> list[str]:
    published = planned.ideal_makespan(*(max(times) for times in _uniform(costs)))
    formula = "no published formula" if published is None else f"published, with free sending, {published:g}"
    late = f"; ranks end one after another, the last at {found.finish:g}" if found.finish > found.makespan else ""
    return [
        f"time      {found.makespan:g} ({formula}){late}",
        f"bubble    {found.bubble_fraction:.1%} of the useful time",
    ]


def _uniform(costs: StageCosts) -> list[tuple[float, ...]]:
    fields = (costs.forward, costs.input_gradient, costs.weight_gradient)
    return [tuple(times) if isinstance(times, Sequence) else (times,) for times in fields]


def _kept_activations(found: Simulation) -> str:
    peaks = ", ".join(map(str, found.peak_activations))
    return f"memory    activations kept by rank, at most: {peaks} (one: one microbatch in one stage)"


def _buffers(planned: AbstractSchedule, timetable: Timetable) -> list[str]:
    without = planned.order_problems()
    classic = "it has none" if without else ", ".join(map(str, simulate(planned.orders).peak_activations))
    received = timetable.activations.size, timetable.cotangents.size
    return [
        f"          in the classic order: {classic}",
        f"          allocated on every rank: {timetable.residuals.size}, and a slot for idle ticks; "
        f"of received activations {received[0]}, cotangents {received[1]}",
        f"ticks     {timetable.num_ticks}",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="axonml-jax schedule",
        description="Draw a pipeline's timetable. 2F0 is the forward of stage 2 on microbatch 0; B is a backward, I and W "
        "its two halves, the gradients of inputs and of weights. Stage p lives on rank p mod S.",
    )
    names = ", ".join(known.value for known in PipelineSchedule)
    parser.add_argument("--schedule", default="1f1b", metavar="NAME", help=f"{names}, or {FASTEST} (default: 1f1b)")
    parser.add_argument("--stages", type=int, required=True, metavar="S", help="ranks of the pipeline axis")
    parser.add_argument("--microbatches", type=int, required=True, metavar="M")
    parser.add_argument("--chunks", type=int, default=1, metavar="V", help="stages per rank (default: 1)")
    parser.add_argument("--variant", choices=["H1", "H2"], help="of zero-bubble (default: H1)")
    parser.add_argument(
        "--order",
        choices=["fused", "alternating", "classic"],
        help="rows as executed, with a forward and a backward in each (default) or one of them, or the order papers print",
    )
    parser.add_argument(
        "--times",
        type=_times_of,
        default=(1.0, 1.0, 1.0),
        metavar="F,I,W",
        help="times of a stage's forward, input gradient and weight gradient (default: 1,1,1)",
    )
    parser.add_argument("--communication", type=float, default=0.0, metavar="T", help="time to send (default: 0)")
    parser.add_argument("--width", type=int, default=120, metavar="N", help="characters per line (default: 120)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture too")
    return parser


def _times_of(text: str) -> tuple[float, ...]:
    try:
        forward, given, weight = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be three numbers, as in 1,1,1") from None
    return forward, given, weight
