"""The choice of what units of a plan keep for the backward: by names, by a budget of bytes, or given. `units.py` runs it."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import jax

from axonml_jax.base import aligned, size_in_words, warn
from axonml_jax.compat.order import SaveWhere, TellsHost, platform_around
from axonml_jax.program.program import rule_of
from axonml_jax.program.recompute import (
    KEEP,
    KERNELS,
    Keeps,
    Piece,
    Price,
    Rates,
    choose,
    front,
    graph_of,
    most_of_a_stage,
    peak,
    repeated,
)

# --------------------------------------------------------------------------------------------------
# The choice as a value: it prints, compares, and goes into configurations.
# --------------------------------------------------------------------------------------------------

EVERYTHING = "everything"
"""The word in a configuration for a unit of which nothing is recomputed."""

HOST = "host:"
"""The prefix of a label, or of a regular expression of labels, whose values are kept in the host's memory."""

INPUT = "input"
"""The label of the values that a loop's trip hands to the next one: in a transformer the residual stream."""


@dataclass(frozen=True)
class UnitChoice:
    """The values that one unit keeps for its backward, and the cost.

    Attributes:
      name: the path of its module.
      keep: labels of values that are kept: the path of the weight that a product reads, a `checkpoint_name`, or an operation;
        None: whatever the backward reads.
      again: labels of values that are made again.
      trips: how many times it runs, in a scan.
      bytes: bytes that are kept on the device, in all trips, beside what it is given.
      flops: floating-point operations of products that are done twice, in all trips.
      seconds: time of what is done twice, in all trips.
      host: labels of values that are kept in the host's memory, and brought back a trip ahead.
      away: bytes that are kept in the host's memory, in all trips.
    """

    name: str
    keep: tuple[str, ...] | None
    again: tuple[str, ...] = field(default=(), compare=False)
    trips: int = field(default=1, compare=False)
    bytes: int = field(default=0, compare=False)
    flops: int = field(default=0, compare=False)
    seconds: float = field(default=0.0, compare=False)
    host: tuple[str, ...] = ()
    away: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Recompute:
    """The values that every unit of a program keeps for its backward; all others are recomputed.

    Attributes:
      units: the units, in the order of the forward.
      live: bytes that are predicted to be live at the fullest moment of the backward, beside what rests; None: not predicted.
      pieces: the units with all that they could keep, of which this was chosen; empty: it was given.

    >>> print(Recompute((UnitChoice("blocks/0", ("mlp/up/kernel",), ("mlp/down/kernel",), 1, 2048, 64, 1e-6),)))
    unit      kept           again              bytes  FLOPs  seconds
    --------  -------------  ---------------  -------  -----  -------
    blocks/0  mlp/up/kernel  mlp/down/kernel  2.0 KiB     64    1e-06
    """

    units: tuple[UnitChoice, ...]
    live: int | None = field(default=None, compare=False)
    pieces: tuple[Piece, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> "Recompute":
        """Reads a configuration: the unit's path -> labels, "host:" before those of values on the host; or "everything"."""

        def one(name: str, keep: Any) -> UnitChoice:
            if keep == EVERYTHING:
                return UnitChoice(name, None)
            here, away = _divided(keep)
            return UnitChoice(name, here, host=away)

        return cls(tuple(one(name, keep) for name, keep in named.items()))

    def to_dict(self) -> dict[str, Any]:
        """The choice in the form that `of` reads."""
        labels = lambda unit: [*unit.keep, *(HOST + label for label in unit.host)]
        return {unit.name: EVERYTHING if unit.keep is None else labels(unit) for unit in self.units}

    @property
    def flops(self) -> int:
        """FLOPs of products that are computed twice; of a pipeline's stages the most."""
        return int(self._of_device([unit.flops for unit in self.units]))

    @property
    def seconds(self) -> float:
        """Seconds of all that is computed twice; of a pipeline's stages the most."""
        return self._of_device([unit.seconds for unit in self.units])

    def _of_device(self, of_units: Sequence[float]) -> float:
        return most_of_a_stage(self.pieces or [None] * len(self.units), of_units)

    def curve(self, points: int = 13) -> tuple[tuple[int, float], ...]:
        """The choices within other numbers of bytes, the most first: (bytes live, seconds of what is computed twice).

        Args:
          points: at most, evenly between what repeats nothing and what holds least.
        """
        if not self.pieces:
            return ()
        held = lambda found: (peak(self.pieces, found), repeated(self.pieces, found))
        least, most = held(_least(self.pieces)), held(choose(self.pieces, _ENOUGH) or _least(self.pieces))
        found = {least, most}
        for i in range(1, points - 1):
            within = choose(self.pieces, least[0] + (most[0] - least[0]) * i // (points - 1))
            found |= {held(within)} if within else set()
        best = sorted(found, key=lambda point: (point[1], point[0]))
        return tuple(p for i, p in enumerate(best) if all(p[0] < before[0] for before in best[:i]))

    def __str__(self) -> str:
        rows = []
        alike = lambda unit: (unit.keep, unit.host, unit.again, unit.trips, unit.bytes, unit.flops)
        for _, group in groupby(self.units, alike):
            first, *others = group
            name = f"{first.name} .. {others[-1].name}" if others else first.name
            number = 1 + len(others)
            rows.append(
                (
                    name + (f" x {first.trips}" if first.trips > 1 else ""),
                    EVERYTHING if first.keep is None else _in_words(first.keep),
                    _in_words(first.host),
                    _in_words(first.again),
                    size_in_words(number * first.bytes),
                    size_in_words(number * first.away),
                    f"{number * first.flops:,}",
                    f"{number * first.seconds:.3g}",
                )
            )
        heads = ["unit", "kept", "on the host", "again", "bytes", "host bytes", "FLOPs", "seconds"]
        if not any(unit.host for unit in self.units):
            heads, rows = [heads[i] for i in _ON_DEVICE], [[row[i] for i in _ON_DEVICE] for row in rows]
        return aligned(heads, rows, left=heads.index("bytes"))

    def choice(self, units: "Sequence[Unit]") -> "Recompute":
        """Checks that a program has these units and labels, and returns the choice for all its units.

        Raises:
          ValueError: naming units and labels that are not there, and units outside of loops that send to the host.
        """
        there, own = [unit.name for unit in units], {unit.name: unit for unit in self.units}
        missing = [name for name in own if name not in there]
        told = {name: {*(unit.keep or ()), *unit.host} - {KERNELS} for name, unit in own.items()}
        unknown = {
            unit.name: wrong for unit in units if unit.name in own and (wrong := told[unit.name] - set(unit.labels))
        }
        if missing or unknown:
            raise ValueError(
                f"remat names units {missing} and values {unknown} that this program lacks; it has the units {there}, with the "
                f"values {sorted({label for unit in units for label in unit.labels})}: choose again with memory="
            )
        return _sent_in_loops(Recompute(tuple(own.get(name, UnitChoice(name, None)) for name in there)), units)


_ENOUGH = 1 << 60
"""Bytes that hold whatever a step keeps."""

_ON_DEVICE = (0, 1, 3, 4, 6, 7)
"""Columns of a table of units of which none sends to the host."""


def _divided(rules: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Separates the rules of values on the device from those of values on the host, without their prefix."""
    away = tuple(rule.removeprefix(HOST) for rule in rules if rule.startswith(HOST))
    return tuple(rule for rule in rules if not rule.startswith(HOST)), away


def _sent_in_loops(found: Recompute, units: "Sequence[Unit]") -> Recompute:
    """Checks that all units that send values to the host are loops, and returns the choice.

    Raises:
      ValueError: naming those that are not.
    """
    sending = [choice.name for choice in found.units if choice.host]
    if sending and any(unit.stage is not None for unit in units):
        raise ValueError(f"remat sends values of the units {sending} to the host: {NOT_IN_SLOTS}")
    if wrong := [unit.name for unit in units if unit.name in sending and unit.plain]:
        raise ValueError(
            f"remat sends values of the units {wrong} to the host, and these are no loops: XLA then holds more of the device's "
            "memory than where values are kept. Loop over the blocks (scan_layers=True, nnx.scan), or keep them on the device"
        )
    if sending:
        say_where(f"remat sends values of the units {sending} to the host")
    return found


NOT_IN_SLOTS = "a pipeline's stages keep in slots of the device's memory, so leave what is sent to the host out"


def say_where(what: str) -> None:
    """Warn on CPUs, where XLA sends nothing to the host."""
    if platform_around() == "cpu":
        warn(f"{what}: XLA for CPUs drops that, and they stay where they are")


def _in_words(labels: Sequence[str]) -> str:
    """The first four labels, and the number of others."""
    few, more = labels[:4], len(labels) - 4
    return ", ".join(few) + (f" and {more} more" if more > 0 else "") or "nothing"


# --------------------------------------------------------------------------------------------------
# Choosers of what is recomputed: each is called once while a step is traced.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """A unit that a policy is asked about.

    Attributes:
      name: the path of its module.
      labels: the labels of the values that it may keep, or send to the host.
      given: bytes in one trip, by label, of values that a loop carries, which it may send to the host.
      kind: equal for units that are alike.
      work: for `graph_of`: what one trip does, what it is given, and what of it has a gradient.
      trips: how many times it runs.
      plain: whether it may keep whatever the backward reads: False in loops and pipelines.
      entering: bytes of its inputs that no unit before it has, and of what a loop carries in all trips.
      grads: bytes of gradients that stay when its backward is over.
      stage, slots: those of its `Piece`.
    """

    name: str
    labels: tuple[str, ...]
    given: Mapping[str, int]
    kind: Any
    work: tuple[Callable, Sequence[Any], Sequence[int]]
    trips: int
    plain: bool
    entering: int
    grads: int
    stage: int | None = None
    slots: int | None = None


@dataclass(frozen=True)
class ByNames:
    """Keeps the values whose labels, alone or behind the path of their unit, some regular expression finds.

    What expressions behind "host:" find is kept in the host's memory, even where others find it too.
    """

    rules: tuple[str, ...]

    def choice(self, units: Sequence[Unit]) -> Recompute:
        """Chooses for each unit the values whose labels the expressions find.

        Raises:
          ValueError: for an expression that finds nothing, or sends a unit's values to the host that is no loop.
        """
        here, away = _divided(self.rules)
        found = lambda rule, unit, label: re.search(rule, label) or re.search(rule, f"{unit.name}/{label}")
        idle = [rule for rule in (*here, *away) if not any(found(rule, u, label) for u in units for label in u.labels)]
        if idle:
            every = sorted({label for unit in units for label in unit.labels})
            raise ValueError(f"remat={list(self.rules)}: {idle} finds none of the values {every}")
        some = lambda unit, rules: [label for label in unit.labels if any(found(rule, unit, label) for rule in rules)]

        def one(unit: Unit) -> UnitChoice:
            host = some(unit, away)
            return UnitChoice(
                unit.name, tuple(label for label in some(unit, here) if label not in host), host=tuple(host)
            )

        return _sent_in_loops(Recompute(tuple(map(one, units))), units)


class WithinBytes:
    """Chooses within a number of bytes the values whose recomputation takes least time.

    Args:
      allowance: bytes for all that comes and goes in a step.
      rates: the rates of the device.
      fronts: the fronts of kinds of units, shared with other choosers: looked up, and added to.
      host: bytes that may be in the host's memory; a loop takes its part of them.
      as_one: whether the stages of a pipeline, if none repeats more than it must, keep what they keep without recomputation.

    Attributes:
      found: what was chosen; None before it was asked.
    """

    def __init__(
        self, allowance: int, rates: Rates, fronts: dict[Any, list[Price]] | None = None, host: float = math.inf,
        as_one: bool = True,
    ):  # fmt: skip
        self.allowance = allowance
        self.rates = rates
        self.host = host
        self.as_one = as_one
        self.found: Recompute | None = None
        self._fronts = {} if fronts is None else fronts

    def choice(self, units: Sequence[Unit]) -> Recompute:
        """Chooses what each unit keeps."""
        for unit in units:
            if (unit.kind, unit.plain) not in self._fronts:
                rates = self.rates if unit.stage is None else self.rates._replace(host=0.0)
                self._fronts[unit.kind, unit.plain] = front(graph_of(*unit.work), rates, plain=unit.plain)
        most = self.host / max(1, sum(not unit.plain for unit in units))
        kinds = {(unit.kind, unit.plain, unit.trips): unit.trips for unit in units}
        may = {key: [price for price in self._fronts[key[:2]] if n * price.away <= most] for key, n in kinds.items()}
        fronts = [may[unit.kind, unit.plain, unit.trips] for unit in units]
        pieces = [
            Piece(own, u.trips, u.entering, u.grads, u.stage, u.slots) for u, own in zip(units, fronts, strict=True)
        ]
        chosen = choose(pieces, self.allowance)
        chosen = chosen or _least(pieces)
        found = tuple(map(_chosen, units, chosen))
        least = [price.seconds <= own[0].seconds for price, own in zip(chosen, fronts, strict=True)]
        if self.as_one and all(least) and all(unit.stage is not None for unit in units):
            found = tuple(replace(each, keep=None, again=()) for each in found)  # as stages do without recomputation
        self.found = Recompute(found, peak(pieces, chosen), tuple(pieces))
        return self.found


def _least(pieces: Sequence[Piece]) -> list[Price]:
    """The choice that holds least for every piece: one that keeps values by name, and the fewest."""
    held = lambda piece, price: (price.keep is None, len(price.keep or ()), piece.kept(price) + price.fullest)
    return [min(piece.front, key=partial(held, piece)) for piece in pieces]


def _chosen(unit: Unit, price: Price) -> UnitChoice:
    keep = None if price.keep is None else tuple(label for label in (*unit.labels, KERNELS) if label in price.keep)
    host = tuple(label for label in unit.labels if label in price.host)
    made = [label for label in unit.labels if label not in unit.given]
    again = () if keep is None else tuple(label for label in made if label not in keep and label not in host)
    n, slots = unit.trips, unit.trips if unit.slots is None else unit.slots
    here = price.kept + sum(unit.given.get(label, 0) for label in host)
    return UnitChoice(
        unit.name, keep, again, n, slots * here, n * price.flops, n * price.seconds, host=host, away=n * price.away
    )


def transform(choice: UnitChoice, *, apart: bool) -> Callable[[Callable], Callable]:
    """Wraps the function of a unit in a checkpoint that keeps the chosen values."""
    if choice.keep is None:
        return lambda work: work
    policy = SaveWhere(Keeps(frozenset(choice.keep), frozenset(choice.host)))
    return lambda work: jax.checkpoint(work, policy=policy, prevent_cse=not apart)


def by_policy(policy: Any, *, loop: bool) -> Callable[[Callable], Callable]:
    """Wraps the function of a unit in a checkpoint by a policy of JAX's, or of the user's.

    Warns where the policy sends values to the host and they are not sent, or take more memory so.
    """
    said: list[str] = []

    def told(name: str) -> None:
        if said:
            return
        said.append(name)
        say_where(f"remat's policy sends {name!r} to the host")
        if not loop and platform_around() == "tpu":
            warn(
                f"remat's policy sends {name!r} to the host in a unit that is no loop: XLA for TPUs then holds more of the "
                "chip's memory than where values are kept. Loop over the blocks (scan_layers=True, nnx.scan)"
            )

    return lambda work: jax.checkpoint(work, policy=TellsHost(policy, told), prevent_cse=not loop)


# --------------------------------------------------------------------------------------------------
# The units of a cut program: their values by name, and what of them is given to whom.
# --------------------------------------------------------------------------------------------------

_NAMED = ("heavy", "collective", "loop", "random")
"""Kinds of operations whose results may be kept; what is elementwise is made again for next to nothing."""


def chosen(remat: Any, cut: Any, parts: Sequence[Any], names: Sequence[str], grads: Sequence[int]) -> tuple[list, list]:
    """Names the values of a program's parts, asks a policy what each keeps, and returns the parts and their transforms.

    Args:
      remat: who says what each unit keeps: has `choice(units) -> Recompute`.
      cut: the program in segments.
      parts: what runs each segment.
      names: the names of the weights, by position.
      grads: bytes of each weight's gradient, as they stay when a unit's backward is over.
    """
    named, units, seen, taken = [], [], set(), set()
    for i, part in enumerate(parts):
        part, unit = _named(cut, i, part, names, grads, seen, taken)
        named.append(part)
        units.append(unit)
    found = remat.choice(units).units
    return named, [transform(choice, apart=not unit.plain) for choice, unit in zip(found, units, strict=True)]


def _named(
    cut: Any, i: int, part: Any, names: Sequence[str], grads: Sequence[int], seen: set[int], taken: set[str]
) -> tuple[Any, Unit]:
    segment, loop = cut.segments[i], hasattr(part, "body")
    body = part.body if loop else part
    paths: dict[int, Any]
    if loop:
        paths = {part.inner[k]: names[weight] for k, weight in part.scanned.items()}
    else:
        paths = {cut.program.inputs[weight]: names[weight] for weight in segment.weights}
    carry = range(part.num_consts, part.num_consts + part.num_carry) if loop else ()
    carried = [part.inner[k] for k in carry]
    fresh = [number for number in segment.inputs if number not in seen and number not in cut.program.inputs]
    seen.update(fresh)
    entering = sum(map(size_of, (cut.program.avals[number] for number in fresh)))
    trips = int(part.options["length"]) if loop else 1
    entering += trips * sum(size_of(body.avals[number]) for number in carried)
    last = [w for w in (*segment.weights, *segment.scanned.values()) if cut.first.get(w, i) == i]
    own = {"trips": trips, "plain": not loop, "entering": entering, "grads": sum(grads[w] for w in last)}
    body, unit = unit_of(body, paths, _common(list(paths.values())) or f"part {i}", taken, carried, **own)
    return (replace(part, body=body) if loop else body), unit


def unit_of(
    body: Any, paths: Mapping[int, str], prefix: str, taken: set[str], carried: Sequence[int] = (), **rest: Any
) -> tuple[Any, Unit]:
    """Names the values of a body, and describes it as a unit to ask a policy about.

    Args:
      body: the work.
      paths: the paths of its weights, by number.
      prefix: the path of its module, or a name.
      taken: names of those before it, which it adds its own to: another one, where it is among them.
      carried: numbers of what a loop's trips hand on.
      rest: what else a `Unit` says.
    """
    name = next(n for n in (prefix, *(f"{prefix} ({i})" for i in range(2, len(taken) + 3))) if n not in taken)
    taken.add(name)
    named = _labels(body, {number: path.removeprefix(prefix).strip("/") for number, path in paths.items()}, carried)
    body = replace(body, names={number: KEEP + label for number, label in named.items()})
    user = [each.op.label for each in body.equations if each.name == "name" and not each.op.label.startswith("axonml.")]
    given = {named[number]: size_of(body.avals[number]) for number in carried if number in named}
    labels, kind = tuple(dict.fromkeys((*named.values(), *user))), _kind(body, named, not rest["plain"])
    return body, Unit(name=name, labels=labels, given=given, kind=kind, work=body.work(), **rest)


def _common(paths: Sequence[str]) -> str:
    """The path of the innermost module that all paths are in."""
    parts = [path.split("/") for path in paths]
    same: list[str] = []
    for column in zip(*(each[:-1] for each in parts), strict=False):
        if len(set(column)) > 1:
            break
        same.append(column[0])
    return "/".join(same)


def _labels(body: Any, paths: Mapping[int, str], carried: Sequence[int]) -> dict[int, str]:
    """Labels every value that may be kept: a product's by the path of its weight, others by their operation.

    Values that a loop carries, with a gradient, and that its work reads are labelled too (`INPUT`): they may go to the host.
    """
    made_of = dict(paths)
    for each in body.prelude.equations:
        if origin := next((made_of[number] for number in each.read if number in made_of), None):
            made_of |= dict.fromkeys(each.outputs, origin)
    found: dict[int, str] = {}
    count: dict[str, int] = {}
    for number in carried:
        if number in body.inputs and number in body.prelude.varied:
            count[INPUT] = count.get(INPUT, 0) + 1
            found[number] = INPUT if count[INPUT] == 1 else f"{INPUT}:{count[INPUT]}"
    for each in body.equations:
        if rule_of(each.name).kind not in _NAMED and not each.name.startswith("custom_"):
            continue
        label = next((made_of[number] for number in each.read if number in made_of), each.name)
        for number in each.outputs:
            count[label] = count.get(label, 0) + 1
            found[number] = label if count[label] == 1 else f"{label}:{count[label]}"
    return found


def _kind(body: Any, named: Mapping[int, str], loop: bool) -> Any:
    """A key that is equal for bodies that do the same on arrays of the same sizes."""
    place: dict[int, int] = {}
    number = lambda atom: place.setdefault(atom, len(place)) if isinstance(atom, int) else str(atom)
    does = tuple(
        (
            each.name,
            tuple(map(number, each.inputs)),
            tuple((number(n), str(body.avals[n]), named.get(n)) for n in each.outputs),
        )
        for each in body.equations
    )
    return loop, does, tuple(map(number, body.outputs))


def size_of(aval: Any) -> int:
    """Bytes of an array; of anything else 0."""
    try:
        return aval.size * aval.dtype.itemsize
    except AttributeError:
        return 0
