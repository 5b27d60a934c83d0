"""Which linear layers feed which: features may stay split between two layers when all that is done to them is element-wise."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flax import nnx
from jax.extend.core import Jaxpr, Literal, Var

from axonml_jax.parallel.tensor.auto.probe import PREFIX, traced

Path = tuple
ELEMENTWISE = frozenset(
    """abs add and cbrt ceil clamp convert_element_type copy copy_p cos div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
    integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow reduce_precision rem round rsqrt select_n
    sign sin sqrt square stop_gradient sub tan tanh xor""".split()  # noqa: SIM905
)
"""Primitives that treat every feature alike, when their other operands do."""

CALLS = frozenset(
    ["jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"]
)
"""Primitives that call their body once, on the same operands."""

UNIFORM = object()
"""The mark of a value that is the same for every feature."""


@dataclass
class Pairs:
    """What a trace of the model says.

    Attributes:
      columns: layers whose output may stay split.
      rows: layers that take it.
      read: layers whose parameters are read outside their own calls.
    """

    columns: set[Path] = field(default_factory=set)
    rows: set[Path] = field(default_factory=set)
    read: set[Path] = field(default_factory=set)


def find_pairs(
    model: nnx.Module, candidates: Mapping[Path, tuple[int, int]], others: set[Path], example: tuple, ranks: int
) -> Pairs:
    """Pair linear layers, never where the result would differ.

    Args:
      model: the model, unchanged.
      candidates: linear layers with their input and output sizes.
      others: other layers of interest, of which only reads of their parameters are sought.
      example: arguments of a call.
      ranks: into how many parts features would be split.
    """
    paths: dict[Path, str | None] = dict.fromkeys([*candidates, *others])
    jaxpr, owners = traced(model, paths, example, ranks)
    read = {owners[i] for i in _read_outside(jaxpr.jaxpr, set(owners))}
    able = {path for path, (_, size) in candidates.items() if path not in read and size % ranks == 0}
    gathering: set[Path] = set()
    while True:
        flow = _Flow(list(paths), able - gathering, set(candidates) - read)
        flow.run(jaxpr.jaxpr, {})
        flow.end(jaxpr.jaxpr)
        if not flow.broken:
            break
        gathering |= flow.broken
    if flow.rows and not _same_code(model, paths, flow, example, ranks, jaxpr):
        return Pairs(read=read)
    return Pairs(flow.columns_used(), flow.rows, read)


class _Flow:
    """One walk through a program with a guess of which layers leave their output split; `broken` are the wrong guesses."""

    def __init__(self, names: list[Path], columns: set[Path], takers: set[Path]):
        self.names, self.columns, self.takers = names, columns, takers
        self.broken: set[Path] = set()
        self.rows: set[Path] = set()
        self.whole: set[Path] = set()
        self.taken: list[tuple[Path, frozenset[Path]]] = []
        self.marks: dict[Var, Any] = {}

    def run(self, jaxpr: Jaxpr, given: dict[Var, Any]) -> None:
        """Walk; `given` marks the inputs."""
        self.marks |= given
        for eqn in jaxpr.eqns:
            marks = [None if isinstance(v, Literal) else self.marks.get(v) for v in eqn.invars]
            self.marks |= dict.fromkeys(eqn.outvars)  # a body may be walked again with other inputs
            if (path := self._layer(eqn)) is not None:
                self._at_layer(path, eqn, marks)
            elif (inner := _plain_call(eqn)) is not None:
                self.run(inner, dict(zip(inner.invars, marks, strict=True)))
                for outer, var in zip(eqn.outvars, inner.outvars, strict=True):
                    self.marks[outer] = None if isinstance(var, Literal) else self.marks.get(var)
            else:
                self._at(eqn, marks)

    def end(self, jaxpr: Jaxpr) -> None:
        """What leaves the program is whole; so is the output of a column that no row takes, and every input of a layer."""
        for var in jaxpr.outvars:
            self._refuse(None if isinstance(var, Literal) else self.marks.get(var))
        mixed = self.rows & self.whole
        self.broken |= {s for path, sources in self.taken if path in mixed for s in sources}
        used = self.columns_used()
        self.broken |= {path for path in self.columns if path not in used and path not in self.rows}
        self.broken |= self.rows & used & self.columns  # a row's own output is whole

    def _layer(self, eqn: Any) -> Path | None:
        name = eqn.params.get("name") if eqn.primitive.name in ("jit", "pjit") else None
        return self.names[int(name[len(PREFIX) :])] if isinstance(name, str) and name.startswith(PREFIX) else None

    def _at_layer(self, path: Path, eqn: Any, marks: list) -> None:
        sources = frozenset().union(*(mark for mark in marks if isinstance(mark, frozenset)))
        if sources and path in self.takers and path not in self.columns_used():
            self.rows.add(path)
            self.taken.append((path, sources))
        elif sources:
            self.broken |= sources
        else:
            self.whole.add(path)
            if path in self.columns:
                self.marks[eqn.outvars[0]] = frozenset([path])

    def columns_used(self) -> set[Path]:
        """The layers whose split output a row takes."""
        return {source for _, sources in self.taken for source in sources}

    def _at(self, eqn: Any, marks: list) -> None:
        name = eqn.primitive.name
        split = frozenset().union(*(mark for mark in marks if isinstance(mark, frozenset)))
        if name == "broadcast_in_dim" and not split:
            if self._spreads(eqn):
                self.marks[eqn.outvars[0]] = UNIFORM
            return
        alike = [
            mark is not None or isinstance(v, Literal) or v.aval.shape[-1:] in ((), (1,))
            for v, mark in zip(eqn.invars, marks, strict=True)
        ]
        if name in ELEMENTWISE and all(alike):
            if split or any(mark is UNIFORM for mark in marks):
                self.marks |= dict.fromkeys(eqn.outvars, split or UNIFORM)
        else:
            self.broken |= split

    @staticmethod
    def _spreads(eqn: Any) -> bool:
        """Whether a broadcast gives every feature the same."""
        last, dims = len(eqn.params["shape"]) - 1, eqn.params["broadcast_dimensions"]
        return last not in dims or eqn.invars[0].aval.shape[dims.index(last)] == 1

    def _refuse(self, mark: Any) -> None:
        if isinstance(mark, frozenset):
            self.broken |= mark


def _plain_call(eqn: Any) -> Jaxpr | None:
    """The body of an equation that calls it once on the same operands."""
    if eqn.primitive.name not in CALLS:
        return None
    inner = next((eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params), None)
    inner = getattr(inner, "jaxpr", inner)  # a closed one
    return inner if isinstance(inner, Jaxpr) and len(inner.invars) == len(eqn.invars) else None


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
        if (inner := _plain_call(eqn)) is not None:
            yield from _reads(inner, {v: i for v, i in zip(inner.invars, mine, strict=True) if i is not None})
        else:
            yield from (i for i in mine if i is not None)


def _same_code(model: nnx.Module, paths: dict, flow: _Flow, example: tuple, ranks: int, whole: Any) -> bool:
    """Whether the model does the same with a rank's features: code that reads sizes off shapes would not."""
    columns = flow.columns_used()
    parts = {path: "column" if path in columns else "row" if path in flow.rows else None for path in paths}
    try:
        split, _ = traced(model, parts, example, ranks)
    except (TypeError, ValueError):
        return False
    return list(_steps(whole.jaxpr)) == list(_steps(split.jaxpr))


def _steps(jaxpr: Jaxpr) -> Iterator[tuple]:
    for eqn in jaxpr.eqns:
        name = str(eqn.params.get("name", ""))
        literals = tuple(str(v.val) for v in eqn.invars if isinstance(v, Literal))
        yield eqn.primitive.name, name, literals
        if (inner := _plain_call(eqn)) is not None and not name.startswith(PREFIX):
            yield from _steps(inner)
