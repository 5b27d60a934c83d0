"""What compiled programs may send where an axis that splits positions is left to XLA's partitioner."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from axonml_jax.ledger.across_positions import PositionTraffic, place, position_traffic
from axonml_jax.ledger.compiled import collectives_in_compiled
from axonml_jax.ledger.table import number
from axonml_jax.mesh.axes import as_axes
from axonml_jax.parallel.context.context_attention import SCOPE
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import is_layout


def accepting(placement: Placement, mesh: Mesh) -> Callable[[Any], None] | None:
    """What refuses a compiled step that would hang or sends more than the plan's strategies allow; None where none is asked."""
    asked = [each for each in (would_hang(placement, mesh), over_budget(placement)) if each is not None]

    def accept(compiled: Any) -> None:
        for refuse in asked:
            refuse(compiled)

    return accept if asked else None


def would_hang(placement: Placement, mesh: Mesh) -> Callable[[Any], None] | None:
    """What refuses a compiled program in which devices would wait for others for ever; None where none can be.

    A pipeline's stages are branches, which ranks of other stages do not take. XLA:CPU's permutes wait for all devices, whatever
    pairs they have, and the partitioner makes some where code shifts positions.

    Raises:
      ValueError: from the function returned; it lists every permute in a branch, and the remedies.
    """
    if placement.stages is None or not placement.left or mesh.devices.flat[0].platform != "cpu":
        return None

    def refuse(compiled: Any) -> None:
        there = [each for each in collectives_in_compiled(compiled) if each.in_branch and each.kind == "permute"]
        if there:
            lines = dict.fromkeys(f"  permute of {each.result.split('{')[0]}, by {place(each)}" for each in there)
            raise ValueError(
                "XLA's partitioner sends positions between neighbours in the branch of one stage, and on CPU that waits for "
                "the devices of all stages, for ever:\n" + "\n".join(lines) + "\nuse a mesh without pipe or without "
                f"{', '.join(sorted(placement.left))}, or write the model for its rank's positions (splits_positions = True)"
            )

    return refuse


def over_budget(placement: Placement) -> Callable[[Any], None] | None:
    """What refuses a compiled step that sends more than the plan's strategies allow; None where none is asked.

    Raises:
      ValueError: from the function returned; it lists every operation that sends, with its bytes, and the remedies.
    """
    budgets = {
        name: each.partitioner_budget
        for axis, each in placement.plan.on(placement.degrees).items()
        for name in as_axes(axis)
        if each.left_to_partitioner and placement.degrees[name] > 1
    }
    if not budgets:
        return None

    def refuse(compiled: Any) -> None:
        for axis, budget in budgets.items():
            traffic = traffic_along(placement, compiled, axis)
            sent, allowed = traffic.bytes(traffic.others), budget(float(traffic.bytes(traffic.attention)))
            if sent > allowed:
                raise ValueError(_refusal(traffic, allowed))

    return refuse


def traffic_along(placement: Placement, compiled: Any, axis: str) -> PositionTraffic:
    """What a compiled step sends along an axis that is left to the partitioner."""
    leaves = jax.tree.leaves((placement.params, placement.frozen), is_leaf=is_layout)
    shapes = [placement.read_shape(layout) for layout in leaves]
    sizes = {math.prod(shape) for shape in shapes} | {math.prod(shape[1:]) for shape in shapes if shape}
    return position_traffic(compiled, placement.degrees, axis, scope=SCOPE, parameters=sizes)


def _refusal(traffic: PositionTraffic, allowed: float) -> str:
    sent = lambda some: number(traffic.bytes(some))
    listed = sorted(traffic.others, key=lambda each: traffic.bytes([each]), reverse=True)
    lines = [f"  {each.kind} of {each.result.split('{')[0]}: {sent([each])} bytes, by {place(each)}" for each in listed]
    return (
        f"besides attention, which sends {sent(traffic.attention)} bytes per rank along {traffic.axis}, the model's code sends "
        f"{sent(traffic.others)} across positions, more than {allowed:,.0f}:\n"
        + "\n".join(lines[:12])
        + (f"\n  and {len(lines) - 12} more" if len(lines) > 12 else "")
        + "\nallow it by ax.Context(allow_communication=True) or a number of bytes, in a configuration "
        "context.allow_communication, or use a mesh without this axis"
    )
