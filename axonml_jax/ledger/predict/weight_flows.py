"""What parameters and their gradients send under a plan: gathers, reductions, the norm, the metrics."""

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from axonml_jax.ledger.label import GRADIENTS, PARAMETERS
from axonml_jax.ledger.predict.flow import EACH_MICROBATCH, ONCE, Flow
from axonml_jax.ledger.predict.weight import Placed
from axonml_jax.mesh.axes import batch_axes
from axonml_jax.parallel.fsdp import Shard
from axonml_jax.parallel.plan import Plan


def weight_flows(placed: Iterable[Placed], microbatches: int) -> Iterator[Flow]:
    """Gathers of parameters and reductions of gradients along data, fsdp and depth.

    Args:
      placed: what a rank holds.
      microbatches: A; how often a rank reads its parameters under ZeRO-3.
    """
    for each in placed:
        if each.count:
            yield from _gathers(each, microbatches)
            if each.weight.trained:
                yield from _reductions(each, microbatches)


def reads_by_unit(plan: Plan) -> bool:
    """Whether parameters are gathered when they are used; a pipeline gathers a rank's stages once, unless told otherwise."""
    when_used = isinstance(plan.fsdp, Shard) and plan.fsdp.when_used
    return when_used and (plan.pipe is None or plan.pipe.gather == "tick")


def reduces_each(plan: Plan) -> bool:
    """Whether gradients are scattered after every microbatch."""
    each = isinstance(plan.fsdp, Shard) and plan.fsdp.each_microbatch
    return each and (plan.pipe is None or plan.pipe.gather == "tick")


def _gathers(each: Placed, microbatches: int) -> Iterator[Flow]:
    strategy = each.plan.fsdp
    if not isinstance(strategy, Shard) or not each.sharded:
        return
    make = lambda times, work: _flow(
        each, PARAMETERS, "all_gather", "fsdp", each.gathered, each.read_dtype, times, reads_by_unit(each.plan), work
    )
    if not reads_by_unit(each.plan):
        yield make(1, "forward")
        return
    yield make(microbatches, "forward")
    again = each.weight.again or (each.weight.rebuilds and each.plan.remat is not None)
    if each.weight.trained and again:
        yield make(microbatches, "backward")


def _reductions(each: Placed, microbatches: int) -> Iterator[Flow]:
    """From the innermost axis outwards, as `Placement.sync` goes."""
    plan, degrees = each.plan, dict(each.degrees)
    if plan.independent:
        return
    if degrees.get("depth", 1) > 1 and "depth" not in each.layout.axes:
        yield _flow(each, GRADIENTS, "all_reduce", "depth", each.gathered, each.sum_dtype, 1, False, "backward")
    if each.sharded and isinstance(plan.fsdp, Shard):
        often = reduces_each(plan)
        times = microbatches if often else 1
        yield _flow(each, GRADIENTS, "reduce_scatter", "fsdp", each.gathered, each.sum_dtype, times, often, "backward")
    for axis, strategy in (("fsdp", plan.fsdp), ("data", plan.data)):
        if degrees.get(axis, 1) > 1 and not isinstance(strategy, Shard):
            sent = jnp.dtype(strategy.comm_dtype or each.sum_dtype)
            yield _flow(each, GRADIENTS, "all_reduce", axis, each.shard, sent, 1, False, "backward")


def _flow(
    each: Placed, label: str, kind: str, axis: str, elements: int, dtype: Any, times: int, often: bool, work: str
) -> Flow:
    padding = max(0, each.gathered - each.read) if axis == "fsdp" else 0
    return Flow(
        label=label,
        kind=kind,
        axes=(axis,),
        group_size=dict(each.degrees)[axis],
        dtype=dtype.name,
        itemsize=dtype.itemsize,
        elements=each.count * elements,
        padding=each.count * padding,
        launches=each.count,
        times=times,
        where=EACH_MICROBATCH if often and times > 1 else ONCE,
        work=work,
    )


def small_flows(placed: Sequence[Placed], loss_values: int) -> Iterator[Flow]:
    """The loss's sum over the batch shards, and the gradient norm's over everything that splits gradients."""
    plan, degrees = placed[0].plan, dict(placed[0].degrees)
    scalar = {"kind": "all_reduce", "dtype": "float32", "itemsize": 4}
    if not plan.independent and (axes := batch_axes(degrees)):
        ranks = _product(degrees, axes)
        yield Flow(label="metrics", axes=axes, group_size=ranks, elements=loss_values, **scalar)
    for axes in {each.layout.axes for each in placed if each.weight.trained and each.count}:
        if axes:
            yield Flow(label="norm", axes=axes, group_size=_product(degrees, axes), elements=1, **scalar)


def minimum_traffic(placed: Iterable[Placed], microbatches: int) -> Fraction:
    """Bytes per rank and step that theory allows for parameters and gradients: `parallel.theory` on predicted layouts."""
    total = Fraction(0)
    for each in placed:
        plan, share = each.plan, Fraction(each.count * each.read)
        if plan.independent or not each.count:
            continue
        reduced, trained = each.sum_dtype.itemsize, each.weight.trained
        depth = dict(each.degrees).get("depth", 1)
        if "depth" not in each.layout.axes:
            total += 2 * share * Fraction(depth - 1, depth) * reduced * trained
        for axis, strategy in (("fsdp", plan.fsdp), ("data", plan.data)):
            ranks = dict(each.degrees).get(axis, 1)
            moved = share * Fraction(ranks - 1, ranks)
            if not isinstance(strategy, Shard):
                total += 2 * moved * strategy.wire_itemsize(each.sum_dtype) * trained
                continue
            again = microbatches if reduces_each(plan) else 1
            gathers = (2 if trained else 1) * microbatches if reads_by_unit(plan) else 1
            total += moved * (gathers * each.read_dtype.itemsize + again * reduced * trained)
            share /= ranks
    return total


def _product(degrees: dict[str, int], axes: Iterable[str]) -> int:
    total = 1
    for axis in axes:
        total *= degrees[axis]
    return total
