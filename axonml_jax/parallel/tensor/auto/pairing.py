"""Which linear layers feed which: features may stay split between two layers where what is done to them treats parts alike."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flax import nnx
from jax.extend.core import Jaxpr, Literal, Var

from axonml_jax.parallel.tensor.auto.flow import Flow, Path, plain_call
from axonml_jax.parallel.tensor.auto.ports import Port
from axonml_jax.parallel.tensor.auto.probe import PREFIX, Part, traced


@dataclass
class Pairs:
    """What a trace of the model says.

    Attributes:
      columns: layers whose output may stay split.
      rows: layers that take it: along which of how many dims of their input.
      read: layers whose parameters are read outside their own calls.
    """

    columns: set[Path] = field(default_factory=set)
    rows: dict[Path, tuple[int, int]] = field(default_factory=dict)
    read: set[Path] = field(default_factory=set)


def find_pairs(
    model: nnx.Module, candidates: Mapping[Path, Port], others: set[Path], example: tuple, ranks: int
) -> Pairs:
    """Pair linear layers, never where the result would differ.

    Args:
      model: the model, unchanged.
      candidates: layers that may be paired.
      others: other layers of interest, of which only reads of their parameters are sought.
      example: arguments of a call.
      ranks: into how many parts features would be split.
    """
    names: list[Path] = [*candidates, *others]
    jaxpr, owners = traced(model, dict.fromkeys(names), example, ranks)
    read = {owners[i] for i in _read_outside(jaxpr.jaxpr, set(owners))}
    ports = {path: each for path, each in candidates.items() if path not in read}
    able = {path for path, each in ports.items() if each.out_size > 1 and each.out_size % ranks == 0}
    kept = _settled(names, ports, able, jaxpr, ranks)
    if not _same_code(model, names, kept, example, ranks):
        # Code that reads sizes off the configuration is found kind by kind: layers of one name in all blocks.
        fine = set()
        for kind in _kinds(kept):
            alone = _settled(names, ports, kind, jaxpr, ranks)
            fine |= kind if _same_code(model, names, alone, example, ranks) else set()
        kept = _settled(names, ports, fine, jaxpr, ranks)
        if not _same_code(model, names, kept, example, ranks):
            return Pairs(read=read)
    return Pairs(kept.used(), kept.rows, read)


def _settled(names: list[Path], ports: Mapping[Path, Port], able: set[Path], jaxpr: Any, ranks: int) -> Flow:
    """A walk in which no guess is wrong: fewer and fewer of `able` leave their output split."""
    while True:
        flow = Flow(names, ports, able, ranks)
        flow.run(jaxpr.jaxpr, {})
        flow.end(jaxpr.jaxpr)
        if not flow.broken & able:
            return flow
        able = able - flow.broken


def _kinds(flow: Flow) -> list[set[Path]]:
    """The layers that leave their output split, those together that feed one row or have one name in several blocks."""
    kinds: list[set] = []
    for _, sources in flow.taken:
        names = {tuple(part for part in path if not isinstance(part, int)) for path in sources}
        touching = [kind for kind in kinds if kind & names]
        kinds = [kind for kind in kinds if not kind & names] + [names.union(*touching)]
    of = lambda path: tuple(part for part in path if not isinstance(part, int))
    return [{path for path in flow.used() if of(path) in kind} for kind in kinds]


def _same_code(model: nnx.Module, names: list[Path], flow: Flow, example: tuple, ranks: int) -> bool:
    """Whether the model does the same with a rank's features: code that reads sizes off shapes would not."""
    parts: dict[Path, Part | None] = dict.fromkeys(names)
    parts |= {path: Part("column", flow.opened[path]) for path in flow.used()}
    parts |= {path: Part("row", dim) for path, (dim, _) in flow.rows.items()}
    if not flow.rows:
        return True
    try:
        split, _ = traced(model, parts, example, ranks)
    except (TypeError, ValueError):
        return False
    return flow.same_on_a_rank(split.jaxpr)


def _read_outside(jaxpr: Jaxpr, positions: set[int]) -> Iterator[int]:
    """Which inputs are read by more than layers' own calls."""
    alias = {jaxpr.invars[i]: i for i in positions}
    yield from _reads(jaxpr, alias)
    yield from (alias[var] for var in jaxpr.outvars if isinstance(var, Var) and var in alias)


def _reads(jaxpr: Jaxpr, alias: dict[Var, int]) -> Iterator[int]:
    for eqn in jaxpr.eqns:
        mine = [None if isinstance(v, Literal) else alias.get(v) for v in eqn.invars]
        if all(i is None for i in mine) or str(eqn.params.get("name", "")).startswith(PREFIX):
            continue
        if (inner := plain_call(eqn)) is not None:
            yield from _reads(inner, {v: i for v, i in zip(inner.invars, mine, strict=True) if i is not None})
        else:
            yield from (i for i in mine if i is not None)
