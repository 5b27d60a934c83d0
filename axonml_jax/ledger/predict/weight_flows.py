"""What parameters and their gradients send under a plan: gathers, reductions, the norm, the metrics."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from axonml_jax.ledger.label import GRADIENTS, PARAMETERS
from axonml_jax.ledger.predict.flow import EACH_MICROBATCH, ONCE, Flow
from axonml_jax.ledger.predict.weight import Placed
from axonml_jax.mesh.axes import AXES, batch_axes
from axonml_jax.parallel.fsdp import Shard
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.plan import Plan


def weight_flows(placed: Sequence[Placed], microbatches: int) -> Iterator[Flow]:
    """Gathers of parameters and reductions of gradients along data, fsdp and depth.

    Args:
      placed: what a rank holds.
      microbatches: A; how often a rank reads its parameters under ZeRO-3.
    """
    buffers = set()
    for each in placed:
        if not each.count:
            continue
        yield from _gathers(each, microbatches)
        # A pipeline's rank keeps everything that lies over the same axes in one buffer, which is reduced as one array.
        packed = _pipelined(each) and each.layout.axes in buffers
        buffers.add(each.layout.axes)
        if each.weight.trained:
            yield from _reductions(each, microbatches, 0 if packed else 1 if _pipelined(each) else each.count)
        if _pipelined(each) and each.weight.place == "both ends":
            yield from _sent_along(each)


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


def _pipelined(each: Placed) -> bool:
    return dict(each.degrees).get(AXIS, 1) > 1


def _sent_along(each: Placed) -> Iterator[Flow]:
    """A weight that several stages read lives on one: it is sent to the others once per step, and its gradient back."""
    for label, dtype, work in ((PARAMETERS, each.read_dtype, "forward"), ("", each.sum_dtype, "backward")):
        yield _flow(each, label, "all_reduce", AXIS, each.read, dtype, 1, False, work)


def _reductions(each: Placed, microbatches: int, launches: int) -> Iterator[Flow]:
    """From the innermost axis outwards, as `Placement.sync` goes."""
    plan, degrees = each.plan, dict(each.degrees)
    if plan.independent:
        return
    if degrees.get("depth", 1) > 1 and "depth" not in each.layout.axes:
        scattered = isinstance(plan.fsdp, Shard) and plan.fsdp.each_microbatch
        size = each.shard if scattered else each.gathered
        yield _flow(each, GRADIENTS, "all_reduce", "depth", size, each.sum_dtype, 1, False, "backward")
    if each.sharded and isinstance(plan.fsdp, Shard):
        often = reduces_each(plan)
        times = microbatches if often else 1
        yield _flow(each, GRADIENTS, "reduce_scatter", "fsdp", each.gathered, each.sum_dtype, times, often, "backward")
    for axis, strategy in (("fsdp", plan.fsdp), ("data", plan.data)):
        if degrees.get(axis, 1) > 1 and not isinstance(strategy, Shard):
            sent = jnp.dtype(strategy.comm_dtype or each.sum_dtype)
            sums = _flow(each, GRADIENTS, "all_reduce", axis, each.shard, sent, 1, False, "backward")
            yield replace(sums, launches=launches * each.reductions(axis))


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
        launches=each.count * (each.reductions(axis) if label == GRADIENTS else each.slices),
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
    piped = (AXIS,) if _pipelined(placed[0]) else ()
    if piped:  # every stage but the last has none to add
        yield Flow(label="", axes=piped, group_size=degrees[AXIS], elements=loss_values, launches=loss_values, **scalar)
    groups = {each.layout.axes for each in placed if each.weight.trained and each.count}
    if piped:  # by what splits them, in any order
        groups = {tuple(axis for axis in AXES if axis in (*piped, *axes)) for axes in groups}
    for axes in groups:
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
