"""What parameters and their gradients send under a plan: gathers, reductions, the norm, the metrics."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import jax.numpy as jnp

from axonml_jax.cost.flow import EACH_MICROBATCH, GRADIENTS, ONCE, PARAMETERS, Flow
from axonml_jax.cost.published.minimum import leaf_traffic
from axonml_jax.cost.rounds import rounds
from axonml_jax.cost.weight import Placed
from axonml_jax.mesh.axes import AxisNames, as_axes, flat_axes
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.transfer import Transfer


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
    elements = each.shard
    recomputes = each.plan.remat is not None or (each.weight.layers > 1 and each.weight.redone)
    again = each.weight.again or (each.weight.rebuilds and recomputes) or _pipelined(each)
    for axis, strategy in each.sharded.items():
        ranks, often = each.ranks(axis), rounds(each.plan, dict(each.degrees), strategy.role)
        for sent in strategy.gather_flows(elements, each.layout, axis, ranks, each.read_dtype):
            ahead = lambda flow, strategy=strategy: _trips_more(each, strategy.prefetch, flow)
            yield ahead(_flow(each, PARAMETERS, axis, sent, each.slices, often.forward, "forward"))
            if each.weight.trained and again:
                yield ahead(_flow(each, PARAMETERS, axis, sent, each.slices, often.backward, "backward"))
        elements *= ranks


def _trips_more(each: Placed, ahead: int, flow: Flow) -> Flow:
    """Slices that a scan gathers ahead: the last trips gather as many in vain (see `units/gathered.py`)."""
    slices = each.slices
    if slices == 1 or not ahead:
        return flow
    more = lambda count: count * (slices + min(ahead, slices)) // slices
    return replace(flow, elements=more(flow.elements), padding=more(flow.padding), launches=more(flow.launches))


def _pipelined(each: Placed) -> bool:
    return dict(each.degrees).get(AXIS, 1) > 1


def _sent_along(each: Placed) -> Iterator[Flow]:
    """A weight that several stages read lives on one: it is sent to the others once per step, and its gradient back."""
    ranks = dict(each.degrees)[AXIS]
    for label, dtype, work in ((PARAMETERS, each.read_dtype, "forward"), ("", each.sum_dtype, "backward")):
        sent = Transfer(kind="all_reduce", elements=each.read, ranks=ranks, dtype=dtype)
        yield _flow(each, label, AXIS, sent, each.slices, 1, work)


def _reductions(each: Placed, buffers: int) -> Iterator[Flow]:
    """In the order of `Placement.sync`: what is reduced after every microbatch first, then from the innermost axis outwards.

    Args:
      each: a weight.
      buffers: how many arrays it is reduced as over axes that hold parameters whole.
    """
    plan, elements = each.plan, each.gathered
    outwards = list(reversed(each.strategies.items()))
    inner = [axis for axis, strategy in outwards if strategy.role.reduces == "microbatch"]
    for axis, strategy in sorted(outwards, key=lambda own: own[0] not in inner):
        ranks = each.ranks(axis)
        if axis in each.sharded:
            often, launches = (
                rounds(plan, dict(each.degrees), strategy.role).scatters,
                each.count * each.reductions(axis),
            )
        else:
            often = plan.microbatches if axis in inner else 1
            launches = (buffers if strategy.role.parameters == "whole" else each.count) * each.reductions(axis)
        for sent in strategy.sync_flows(elements, each.layout, axis, ranks, each.sum_dtype) if ranks > 1 else ():
            yield _flow(each, GRADIENTS, axis, sent, launches / each.count, often, "backward")
        elements //= ranks if axis in each.sharded else 1


def _flow(each: Placed, label: str, axis: AxisNames, sent: Transfer, launches: float, times: int, work: str) -> Flow:
    dtype = jnp.dtype(sent.dtype)
    return Flow(
        label=label,
        kind=sent.kind,
        axes=as_axes(axis),
        group_size=sent.ranks,
        dtype=dtype.name,
        itemsize=dtype.itemsize,
        elements=each.count * sent.elements,
        padding=each.count * sent.padding,
        launches=round(each.count * launches),
        times=times,
        where=EACH_MICROBATCH if times > 1 else ONCE,
        work=work,
    )


def small_flows(placed: Sequence[Placed], loss_values: int) -> Iterator[Flow]:
    """The loss's sum over the batch shards, and the gradient norm's over everything that splits gradients."""
    plan, degrees = placed[0].plan, dict(placed[0].degrees)
    scalar = {"kind": "all_reduce", "dtype": "float32", "itemsize": 4}
    alone = flat_axes(axis for axis, each in plan.on(degrees).items() if each.role.reduces == "never")
    if axes := tuple(axis for axis in plan.batch_layout(degrees).rows if axis not in alone):
        ranks = _product(degrees, axes)
        yield Flow(label="metrics", axes=axes, group_size=ranks, elements=loss_values, **scalar)
    piped = (AXIS,) if _pipelined(placed[0]) else ()
    if piped:  # every stage but the last has none to add
        yield Flow(label="", axes=piped, group_size=degrees[AXIS], elements=loss_values, launches=loss_values, **scalar)
    groups = {each.layout.axes for each in placed if each.weight.trained and each.count}
    if piped:  # by what splits them, in any order
        groups = {tuple(axis for axis in degrees if axis in (*piped, *axes)) for axes in groups}
    for axes in groups:
        if axes:
            yield Flow(label="norm", axes=axes, group_size=_product(degrees, axes), elements=1, **scalar)


def minimum_traffic(placed: Iterable[Placed]) -> Fraction:
    """Bytes per rank and step that theory allows for parameters and gradients: `parallel.theory` on predicted layouts."""
    own = [each for each in placed if each.count and not each.copied]
    amounts = (leaf_traffic(each.plan, dict(each.degrees), each.layout, each.weight.trained) for each in own)
    return sum((each.count * amount for each, amount in zip(own, amounts, strict=True)), Fraction(0))


def _product(degrees: dict[str, int], axes: Iterable[str]) -> int:
    total = 1
    for axis in axes:
        total *= degrees[axis]
    return total
