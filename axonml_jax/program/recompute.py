"""What a piece of work keeps for its backward: sets of values, each priced in memory and time on the piece's graph."""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from axonml_jax.compat.jaxpr import live, trace
from axonml_jax.compat.order import TO_HOST, Offloadable, Saveable
from axonml_jax.program.cut import is_sum, sums
from axonml_jax.program.program import Equation, Program, forward, names_of, read_program, rule_of

KEEP = "axonml.keep:"
"""Prefix of the checkpoint names of values that a choice may keep."""

KERNELS = "kernels"
"""The one label of all results of kernels and other operations without a rule, which cannot be named one by one."""


class Rates(NamedTuple):
    """The speeds of a device.

    Attributes:
      flops: FLOP/s of products.
      bandwidth: bytes/s to and from its memory.
      link: bytes/s to and from other devices.
      host: bytes/s to its host's memory, and as many back at once; 0: nothing is sent there.
    """

    flops: float
    bandwidth: float
    link: float
    host: float = 0.0


class Price(NamedTuple):
    """The cost of keeping one set of values in one piece of work.

    Attributes:
      keep: labels of what is kept; None: whatever the backward reads, as without recomputation.
      kept: bytes that stay on the device from the forward to the backward; less the inputs that are sent to the host.
      fullest: peak bytes of the backward beside them, recomputed values and those back from the host included.
      flops: FLOPs of products that are done twice.
      seconds: of all that is done twice, and of reading and writing what is sent to the host.
      host: labels of what is kept in the host's memory.
      away: bytes that are kept there.
    """

    keep: frozenset[str] | None
    kept: int
    fullest: int
    flops: int
    seconds: float
    host: frozenset[str] = frozenset()
    away: int = 0


@dataclass(frozen=True)
class Keeps:
    """The policy (see `SaveWhere`) that keeps values with these labels, and sums over ranks always.

    Attributes:
      labels: of what is kept on the device.
      host: of what is kept in the host's memory.
    """

    labels: frozenset[str]
    host: frozenset[str] = frozenset()

    def __call__(self, result: Saveable) -> bool | Offloadable:
        """Whether a result is kept, or sent to the host."""
        if (name := result.given_name) is not None:
            label = name.removeprefix(KEEP)
            return TO_HOST if label in self.host else label in self.labels
        return sums(result) or (KERNELS in self.labels and any(map(_opaque, result.made_by)))


def _opaque(name: str) -> bool:
    """Whether an operation has no rule, such as a kernel, so that values inside of its gradients cannot be named."""
    return rule_of(name).kind == "opaque"


# --------------------------------------------------------------------------------------------------
# The graph: a forward and its backward in one program, of which everything but the operations is forgotten.
# --------------------------------------------------------------------------------------------------

_PLACED = "name reshape squeeze expand_dims broadcast_in_dim transpose convert_element_type copy pvary stop_gradient"
_ALIASES = frozenset(_PLACED.split())  # another form of one value, which compilers make where it is read


class _Op(NamedTuple):
    """An operation: what it reads and makes, by number, and what it costs."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    flops: int
    moved: int
    sent: int
    fuses: bool


@dataclass(frozen=True)
class Graph:
    """The operations of one piece of work and of its derivative.

    Attributes:
      ops: forward and backward, in order.
      backward: from which of them on they are the backward's; those before are the forward's.
      sizes: bytes of every value; 0 for another form of one, or what is part of the next operation.
      read: values of the forward that the backward reads.
      labels: of the values that may be kept.
      always: values that are there whatever is chosen: inputs and constants.
      sums: those that are sums over ranks, which every set keeps.
    """

    ops: tuple[_Op, ...]
    backward: int
    sizes: Mapping[int, int]
    read: frozenset[int]
    labels: Mapping[str, tuple[int, ...]]
    always: frozenset[int]
    sums: frozenset[int]

    @cached_property
    def _maker(self) -> dict[int, int]:
        return {number: i for i, op in enumerate(self.ops[: self.backward]) for number in op.makes}

    def bytes_of(self, label: str) -> int:
        """Bytes of the values with a label."""
        return sum(self.sizes[number] for number in self.labels[label])

    @cached_property
    def given(self) -> frozenset[str]:
        """Labels of the work's inputs, which are there whatever is kept, unless they are sent to the host."""
        return frozenset(label for label, numbers in self.labels.items() if self.always.issuperset(numbers))

    def forward_seconds(self, rates: Rates) -> float:
        """Seconds that the forward takes."""
        return sum(_seconds(op, rates) for op in self.ops[: self.backward])

    def price(self, keep: frozenset[str] | None, rates: Rates, host: frozenset[str] = frozenset()) -> Price:
        """Price one set of values that are kept on the device, and another of those that are sent to the host."""
        if keep is None:
            kept = sum(self.sizes[number] for number in self.read - self.always)
            return Price(None, kept, self._fullest((), self.read | self.always), 0, 0.0)
        sent = {number for label in host for number in self.labels[label]}
        stop = self.always | self.sums | sent | {number for label in keep for number in self.labels[label]}
        again, found, used = set(), list(self.read), set()
        while found:
            number = found.pop()
            if number in stop or number not in self._maker:
                used.add(number)
            elif (maker := self._maker[number]) not in again:
                again.add(maker)
                found += self.ops[maker].reads
        sent &= used
        away = sum(self.sizes[number] for number in sent)
        kept = sum(self.sizes[number] for number in used - self.always) - away
        ops = [self.ops[i] for i in sorted(again)]
        flops = sum(op.flops for op in ops)
        seconds = sum(_seconds(op, rates) for op in ops) + 2 * away / rates.bandwidth
        fullest = self._fullest(sorted(again), used) + AHEAD * away
        return Price(keep, kept, fullest, flops, seconds, host, away)

    def _fullest(self, again: Iterable[int], there: Collection[int]) -> int:
        """Peak bytes of a backward that repeats some operations, without the values that are there throughout."""
        order = [*(self.ops[i] for i in again), *self.ops[self.backward :]]
        last = {number: i for i, op in enumerate(order) for number in op.reads}
        made = {number for op in order for number in op.makes}
        live, most, ends = 0, 0, {}
        for i, op in enumerate(order):
            for number in op.makes:
                if number in there:
                    continue
                live += self.sizes[number]
                if number in last:
                    ends.setdefault(last[number], []).append(number)
            ended = sum(self.sizes[number] for number in ends.pop(i, ()) if number in made)
            most = max(most, live - (ended if op.fuses else 0))  # written in the place of what it reads last
            live -= ended
        return most


AHEAD = 2
"""Trips of a loop whose values are back from the host at once: the one at work, and the next one."""


def _seconds(op: _Op, rates: Rates) -> float:
    return op.flops / rates.flops + op.sent / rates.link + (0 if op.fuses else op.moved / rates.bandwidth)


def graph_of(work: Callable[..., Sequence[Any]], given: Sequence[Any], moving: Sequence[int]) -> Graph:
    """Trace and differentiate `work(*given)`; returns its graph, with values labelled as `Keeps` knows them.

    Args:
      work: returns a list of what has a gradient.
      given: arrays, tracers or their shapes; values do not count.
      moving: which of them it is differentiated for.
    """

    def differentiated(given: Sequence[Any]) -> tuple[Any, Any]:
        def of_moving(*values: Any) -> list[Any]:
            every = list(given)
            for i, value in zip(moving, values, strict=True):
                every[i] = value
            return list(work(*every))

        return jax.vjp(of_moving, *(given[i] for i in moving))

    out = jax.eval_shape(lambda given: differentiated(given)[0], list(given))

    def both(given: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, Any]:
        out, pull = differentiated(given)
        return pull(list(cotangents)), out

    program = read_program(live(trace(both, list(given), out).jaxpr))
    return _graph(program, len(given))


def _graph(program: Program, num_given: int) -> Graph:
    starts = [i >= num_given for i in range(len(program.inputs))]
    any_of = lambda equation, operands: [any(operands)] * len(equation.outputs)
    of_backward = forward(program, starts, any_of, False)
    late = lambda equation: any(of_backward.get(number, False) for number in equation.read)
    first = [each for each in program.equations if not late(each)]
    second = [each for each in program.equations if late(each)]
    made = {number for each in first for number in each.outputs}
    read = {number for each in second for number in each.read if number in made}
    roots = _roots(program)
    of_root: Callable[[Iterable[Any]], tuple[Any, ...]] = lambda numbers: tuple(
        dict.fromkeys(roots.get(number, number) for number in numbers)
    )
    sizes = _sizes(program, first, second, of_root)
    labels: dict[str, tuple[int, ...]] = {}
    for each in first:
        if each.name == "name" and (each.op.label.startswith(KEEP) or not each.op.label.startswith("axonml.")):
            label = each.op.label.removeprefix(KEEP)
            labels[label] = tuple(dict.fromkeys((*labels.get(label, ()), *of_root(each.outputs))))
        elif _opaque(each.name):
            labels[KERNELS] = (*labels.get(KERNELS, ()), *each.outputs)
    op = partial(_op, program, of_root)
    ops = tuple(op(each) for each in (*first, *second) if each.name not in _ALIASES)
    summed = {number for each in first if is_sum(each.name) for number in each.outputs}
    return Graph(
        ops, sum(each.name not in _ALIASES for each in first), sizes, frozenset(of_root(read)), labels,
        frozenset((*program.inputs, *program.constants)), frozenset(of_root(summed)),
    )  # fmt: skip


def _roots(program: Program) -> dict[int, int]:
    """Map every value that is another form of one (a reshape, a cast, ...) to that one."""
    found: dict[int, int] = {}
    for each in program.equations:
        if each.name in _ALIASES and len(each.read) == 1:
            found[each.outputs[0]] = found.get(each.read[0], each.read[0])
    return found


def _sizes(
    program: Program, first: Sequence[Equation], second: Sequence[Equation], of_root: Callable
) -> dict[int, int]:
    """Bytes of every value; 0 for other forms of a value, and for elementwise results that one operation reads at once.

    Who reads another form of a value reads the value itself. A value with a name is there for whoever keeps it.
    """
    readers: dict[int, int] = {}
    for each in (*first, *second):
        for number in of_root(each.read) if each.name not in _ALIASES else ():
            readers[number] = readers.get(number, 0) + 1
    made = {number for each in first for number in each.outputs}
    stays = {number for each in second for number in each.read if number in made} | set(names_of(program.outputs))
    stays |= {number for each in first if each.name == "name" for number in each.outputs}
    stays = set(of_root(stays))
    sizes = {number: _bytes(aval) for number, aval in program.avals.items()}
    for each in (*first, *second):
        fused = rule_of(each.name).kind in ("elementwise", "placing") and not rule_of(each.name).costly
        for number in each.outputs:
            if each.name in _ALIASES or (fused and readers.get(number, 0) <= 1 and number not in stays):
                sizes[number] = 0
    return sizes


def _bytes(aval: Any) -> int:
    try:
        return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize
    except TypeError:  # typed random keys
        return 4 * math.prod(aval.shape)


def _op(program: Program, of_root: Callable, each: Equation) -> _Op:
    reads, flops = of_root(each.read), work_of(each)
    moved = sum(_bytes(aval) for aval in (*each.op.given, *each.op.made))
    sent = moved if rule_of(each.name).sends is not None else 0
    kind = rule_of(each.name).kind
    return _Op(reads, each.outputs, flops, moved, sent, kind in ("elementwise", "placing"))


def work_of(each: Equation) -> int:
    """FLOPs of an equation's products: loops count every trip, branches the costliest, while loops one trip."""
    if each.name == "dot_general":
        sides, _ = each.op.contraction
        contracted = math.prod(each.op.given[0].shape[dim] for dim in sides[0])
        return 2 * contracted * math.prod(each.op.made[0].shape)
    if each.name == "conv_general_dilated":
        kernel, made = each.op.given[1], each.op.made[0]
        spec = each.op.options["dimension_numbers"].rhs_spec
        return 2 * math.prod(made.shape) * math.prod(kernel.shape) // max(1, kernel.shape[spec[0]])
    within = [sum(map(work_of, body.equations)) for body in each.bodies]
    if each.op.scan is not None:
        return int(each.op.scan.options["length"]) * sum(within)
    return max(within, default=0)


# --------------------------------------------------------------------------------------------------
# The front: the sets of which no other keeps less, holds less and repeats less.
# --------------------------------------------------------------------------------------------------

EXCHANGES = 2
"""Rounds in which neighbours of the best sets are tried."""

MOST_LABELS = 16
"""Number of the largest values that are chosen one by one; the others are kept all together or not at all."""


def front(graph: Graph, rates: Rates, *, plain: bool) -> list[Price]:
    """The sets worth keeping, from the one that repeats least to the one that keeps least.

    Searches greedily, adding values to none and taking them from all; then tries every neighbour of the best sets, with one
    value more, one less, or one in another's place.

    Args:
      graph: of the work.
      rates: of the device.
      plain: whether the work may keep whatever the backward reads (`keep=None`); else it is a loop's trip, which may send
        values to the host.
    """
    price = functools.cache(partial(graph.price, rates=rates))
    large = sorted((label for label in graph.labels if label not in graph.given), key=graph.bytes_of, reverse=True)
    together = [frozenset((label,)) for label in large[:MOST_LABELS]]
    together += [frozenset(large[MOST_LABELS:])] if large[MOST_LABELS:] else []
    found = [price(None)] if plain else []
    for start, change in ((frozenset(), frozenset.union), (frozenset(large), frozenset.difference)):
        now, left = price(start), list(together)
        found.append(now)
        while left:
            tried = [(price(change(now.keep, each)), each) for each in left]  # pyright: ignore[reportArgumentType]
            now, taken = min(tried, key=lambda pair: _worth(now, pair[0]))
            left.remove(taken)
            found.append(now)
    for _ in range(EXCHANGES):
        found = _best(found)
        known = {each.keep for each in found}
        # In the same order in all processes, which choose alike, each for itself.
        near = dict.fromkeys(keep for own in found for keep in _neighbours(own.keep, together))
        found += [price(keep) for keep in near if keep not in known]
    if not plain and rates.host:
        found += [more for each in _best(found) for more in _sending(graph, rates, each)]
    return _best(found)


def _sending(graph: Graph, rates: Rates, price: Price) -> Iterator[Price]:
    """Move more and more of a set to the host, as long as the copies end before the next trip's begin.

    That is as much as the link takes in the time of a forward: the backward, which brings it back, takes longer.
    """
    limit = rates.host * graph.forward_seconds(rates)
    keep, host, away = price.keep or frozenset(), frozenset[str](), 0
    for label in sorted((keep | graph.given) - {KERNELS}, key=lambda label: (-graph.bytes_of(label), label)):
        size = graph.bytes_of(label)
        if size and away + size <= limit:
            keep, host, away = keep - {label}, host | {label}, away + size
            yield graph.price(keep, rates, host)


def _neighbours(keep: frozenset[str] | None, together: Sequence[frozenset[str]]) -> Iterator[frozenset[str]]:
    if keep is None:
        return
    out, within = [s for s in together if not s <= keep], [s for s in together if s <= keep]
    yield from (keep | more for more in out)
    yield from (keep - less for less in within)
    yield from (keep - less | more for less in within for more in out)


def _worth(before: Price, after: Price) -> tuple:
    """Sort key: seconds lost per byte saved; the least is the best next set."""
    held = (after.kept + after.fullest) - (before.kept + before.fullest)
    seconds = after.seconds - before.seconds
    if held <= 0 and seconds <= 0:
        return (0, held, seconds)
    return (1, seconds / held if held > 0 else seconds / -held, seconds) if held else (1, seconds, 0)


def _best(found: Iterable[Price]) -> list[Price]:
    """The Pareto-optimal sets, and the one that keeps nothing; among equals the set with the fewest labels."""
    fewest = lambda each: -math.inf if each.keep is None else len(each.keep) + len(each.host)
    order = {(p.seconds, p.kept, p.fullest): p for p in sorted(found, key=fewest, reverse=True)}.values()
    order = sorted(order, key=lambda each: (each.seconds, each.kept, each.fullest))
    best: list[Price] = []
    for each in order:
        if not each.keep or not any(own.kept <= each.kept and own.fullest <= each.fullest for own in best):
            best.append(each)
    return best


# --------------------------------------------------------------------------------------------------
# One choice for every piece of a program, within a number of bytes.
# --------------------------------------------------------------------------------------------------

GRAIN = 512
"""The budget has so many parts, and kept bytes within one part count as equal: a choice may keep a part less than it could."""


class Piece(NamedTuple):
    """One piece of a program, in the order of its forward.

    Attributes:
      front: what it may keep, and where; the same list for pieces that are alike.
      trips: how many times it runs.
      entering: bytes of what it is given and the backward reads, whatever is chosen.
      grads: bytes of gradients that its backward leaves until the end.
      stage: its stage of a pipeline; None: there is no pipeline.
      slots: number of its trips whose values a rank of a pipeline keeps at once; None: all.
    """

    front: Sequence[Price]
    trips: int = 1
    entering: int = 0
    grads: int = 0
    stage: int | None = None
    slots: int | None = None

    def kept(self, price: Price) -> int:
        """Bytes held from the forward to the backward."""
        return self.entering + (self.trips if self.slots is None else self.slots) * price.kept


def choose(pieces: Sequence[Piece], budget: int) -> list[Price] | None:
    """The choice that repeats least among those whose live bytes stay within `budget` in every backward; None if none does.

    While a piece is differentiated what it and those before it keep is live, what those after it left of gradients, and what it
    holds itself at its fullest. A rank of a pipeline has slots as large as the fullest stage's, and runs one piece at once.
    """
    if not pieces or pieces[0].stage is None:
        return _choose(pieces, budget)
    found: list[list[Price]] = []
    for fullest in _fullest_of(pieces):
        known: dict[tuple, list[Price] | None] = {}
        chosen: list[Price] = []
        for stage in _by_stage(pieces):
            alike = tuple((id(piece.front), piece.trips, piece.entering, piece.slots) for piece in stage)
            if alike not in known:
                known[alike] = _choose(stage, budget, fullest)
            if (own := known[alike]) is None:
                break
            chosen += own
        else:
            found.append(chosen)
    return min(found, key=partial(repeated, pieces), default=None)


FULLEST = 24
"""Number of peaks that are tried for a pipeline's stages, evenly among all that their pieces have."""


def _fullest_of(pieces: Sequence[Piece]) -> list[int]:
    """Candidate peaks, from the least that all pieces can keep to, up to the most that any piece needs."""
    least = max(min(price.fullest for price in piece.front) for piece in pieces)
    every = {id(piece.front): piece.front for piece in pieces}.values()
    sizes = sorted({least, *(price.fullest for own in every for price in own if price.fullest > least)})
    return [sizes[i * (len(sizes) - 1) // (FULLEST - 1)] for i in range(FULLEST)] if len(sizes) > FULLEST else sizes


def _by_stage(pieces: Sequence[Piece]) -> list[list[Piece]]:
    stages: dict[int | None, list[Piece]] = {}
    for piece in pieces:
        stages.setdefault(piece.stage, []).append(piece)
    return list(stages.values())


def repeated(pieces: Sequence[Piece], chosen: Sequence[Price]) -> float:
    """Seconds of recomputation on a device; for a pipeline, of the stage with the most."""
    return most_of_a_stage(pieces, [piece.trips * price.seconds for piece, price in zip(pieces, chosen, strict=True)])


def most_of_a_stage(pieces: Sequence[Piece | None], values: Sequence[float]) -> float:
    """The largest sum of a stage's values; for pieces without stages the sum of all."""
    sums: dict[int | None, float] = {}
    for piece, value in zip(pieces, values, strict=True):
        stage = None if piece is None else piece.stage
        sums[stage] = sums.get(stage, 0) + value
    return max(sums.values(), default=0)


def _choose(pieces: Sequence[Piece], budget: int, fullest: int | None = None) -> list[Price] | None:
    """Choose for consecutive pieces by dynamic programming over the bytes kept so far and the fewest seconds.

    `fullest`: bytes that any piece may hold, and that are there beside what all of them keep; None: each has its own.
    """
    later = [sum(piece.grads for piece in pieces[i + 1 :]) for i in range(len(pieces))]
    grain = max(1, budget // GRAIN)
    states: dict[int, tuple[float, int, tuple]] = {0: (0.0, 0, ())}
    for piece, after in zip(pieces, later, strict=True):
        nexts: dict[int, tuple[float, int, tuple]] = {}
        for seconds, kept, path in states.values():
            for i, price in enumerate(piece.front):
                total, most = kept + piece.kept(price), price.fullest if fullest is None else fullest
                if price.fullest > most or total + most + after > budget:
                    continue
                slot, time = -(-total // grain), seconds + piece.trips * price.seconds
                if slot not in nexts or (time, total) < nexts[slot][:2]:
                    nexts[slot] = (time, total, (path, i))
        states = _undominated(nexts)
    if not states:
        return None
    _, _, path = min(states.values(), key=lambda state: state[:2])
    chosen: list[Price] = []
    for piece in reversed(pieces):
        path, i = path
        chosen.append(piece.front[i])
    return chosen[::-1]


def _undominated(states: Mapping[int, tuple[float, int, tuple]]) -> dict[int, tuple[float, int, tuple]]:
    best, found = math.inf, {}
    for slot in sorted(states):
        if states[slot][0] < best:
            best, found[slot] = states[slot][0], states[slot]
    return found


def peak(pieces: Sequence[Piece], chosen: Sequence[Price]) -> int:
    """Peak live bytes of a choice's backward."""
    if pieces and pieces[0].stage is not None:
        kept = dict.fromkeys((piece.stage for piece in pieces), 0)
        for piece, price in zip(pieces, chosen, strict=True):
            kept[piece.stage] += piece.kept(price)
        return max(kept.values()) + max(price.fullest for price in chosen)
    later = [sum(piece.grads for piece in pieces[i + 1 :]) for i in range(len(pieces))]
    kept, most = 0, 0
    for piece, price, after in zip(pieces, chosen, later, strict=True):
        kept += piece.kept(price)
        most = max(most, kept + price.fullest + after)
    return most
