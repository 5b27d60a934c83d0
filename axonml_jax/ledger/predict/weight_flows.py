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
from axonml_jax.parallel.theory import leaf_traffic, rounds


def weight_flows(placed: Sequence[Placed]) -> Iterator[Flow]:
    """Gathers of parameters and reductions of gradients along data, fsdp and depth, of what a rank holds."""
    buffers = set()
    for each in placed:
        if not each.count:
            continue
        if _pipelined(each) and each.weight.place == "both ends":
            yield from _sent_along(each)
        if each.copied:
            continue
        yield from _gathers(each)
        # A pipeline's rank keeps everything that lies over the same axes in one buffer, which is reduced as one array.
        packed = _pipelined(each) and each.layout.axes in buffers
        buffers.add(each.layout.axes)
        if each.weight.trained:
            yield from _reductions(each, 0 if packed else 1 if _pipelined(each) else each.count)


def _gathers(each: Placed) -> Iterator[Flow]:
    if not isinstance(each.plan.fsdp, Shard) or not each.sharded:
        return
    often, hop = rounds(each.plan, dict(each.degrees)), each.plan.fsdp.gather_hop
    make = lambda times, work: _in_hops(
        _trips_more(each, _flow(each, PARAMETERS, "all_gather", "fsdp", each.gathered, each.read_dtype, times, work)),
        hop,
    )
    yield from make(often.forward, "forward")
    recomputes = each.plan.remat is not None or (each.weight.layers > 1 and each.weight.redone)
    again = each.weight.again or (each.weight.rebuilds and recomputes) or _pipelined(each)
    if each.weight.trained and again:
        yield from make(often.backward, "backward")


def _trips_more(each: Placed, flow: Flow) -> Flow:
    """Slices that a scan gathers ahead: the last trips gather as many in vain (see `units/gathered.py`)."""
    slices, ahead = each.slices, each.plan.fsdp.prefetch if isinstance(each.plan.fsdp, Shard) else 0
    if slices == 1 or not ahead:
        return flow
    more = lambda count: count * (slices + min(ahead, slices)) // slices
    return replace(flow, elements=more(flow.elements), padding=more(flow.padding), launches=more(flow.launches))


def _pipelined(each: Placed) -> bool:
    return dict(each.degrees).get(AXIS, 1) > 1


def _sent_along(each: Placed) -> Iterator[Flow]:
    """A weight that several stages read lives on one: it is sent to the others once per step, and its gradient back."""
    for label, dtype, work in ((PARAMETERS, each.read_dtype, "forward"), ("", each.sum_dtype, "backward")):
        yield _flow(each, label, "all_reduce", AXIS, each.read, dtype, 1, work)


def _reductions(each: Placed, launches: int) -> Iterator[Flow]:
    """From the innermost axis outwards, as `Placement.sync` goes."""
    plan, degrees = each.plan, dict(each.degrees)
    if plan.independent:
        return
    if degrees.get("depth", 1) > 1 and "depth" not in each.layout.axes:
        scattered = isinstance(plan.fsdp, Shard) and plan.fsdp.each_microbatch
        size = each.shard if scattered else each.gathered
        yield _flow(each, GRADIENTS, "all_reduce", "depth", size, each.sum_dtype, 1, "backward")
    if each.sharded and isinstance(plan.fsdp, Shard):
        times = rounds(plan, degrees).scatters
        sums = _flow(each, GRADIENTS, "reduce_scatter", "fsdp", each.gathered, each.sum_dtype, times, "backward")
        yield from _in_hops(sums, plan.fsdp.scatter_hop)
    for axis, strategy in (("fsdp", plan.fsdp), ("data", plan.data)):
        if degrees.get(axis, 1) > 1 and not isinstance(strategy, Shard):
            sent = jnp.dtype(strategy.comm_dtype or each.sum_dtype)
            sums = _flow(each, GRADIENTS, "all_reduce", axis, each.shard, sent, 1, "backward")
            yield replace(sums, launches=launches * each.reductions(axis))


def _in_hops(flow: Flow, hop: int | None) -> Iterator[Flow]:
    """A gather or reduce-scatter as it goes: across the groups of `hop` neighbours, where it is whole, and among them."""
    if hop is None or hop in (1, flow.group_size):
        yield flow
        return
    across = flow.group_size // hop
    yield replace(flow, group_size=across)
    yield replace(flow, group_size=hop, elements=flow.elements // across, padding=0)


def _flow(each: Placed, label: str, kind: str, axis: str, elements: int, dtype: Any, times: int, work: str) -> Flow:
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
        where=EACH_MICROBATCH if times > 1 else ONCE,
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


def minimum_traffic(placed: Iterable[Placed]) -> Fraction:
    """Bytes per rank and step that theory allows for parameters and gradients: `parallel.theory` on predicted layouts."""
    own = [each for each in placed if each.count and not each.copied and not each.plan.independent]
    amounts = (leaf_traffic(each.plan, dict(each.degrees), each.layout, each.weight.trained) for each in own)
    return sum((each.count * amount for each, amount in zip(own, amounts, strict=True)), Fraction(0))


def _product(degrees: dict[str, int], axes: Iterable[str]) -> int:
    total = 1
    for axis in axes:
        total *= degrees[axis]
    return total
