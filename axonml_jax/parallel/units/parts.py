"""From the segments of a cut program to what runs them."""

from axonml_jax.parallel.units.body import Body, Prelude
from axonml_jax.parallel.units.loop import UnitLoop, loop_of
from axonml_jax.program.segments import Cut, Segment


def part_of(segment: Segment, cut: Cut) -> Body | UnitLoop:
    """A segment as a body, or as a loop where it scans over weights."""
    program = cut.program
    weights = [program.inputs[w] for w in segment.weights]
    prelude = Prelude(weights, segment.prelude, segment.derived, cut.varied)
    if segment.scanned:
        return loop_of(segment, program, prelude)
    return Body(prelude, segment.equations, segment.inputs, segment.outputs, program.avals)
