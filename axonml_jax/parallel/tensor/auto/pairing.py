"""Which linear layers feed which: features may stay split between two layers where what is done to them treats parts alike."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flax import nnx

from axonml_jax.parallel.tensor.auto.example import Example
from axonml_jax.parallel.tensor.auto.ports import Port
from axonml_jax.parallel.tensor.auto.probe import PREFIX, LayerPart, modes_of, traced
from axonml_jax.parallel.tensor.auto.walk import Path, Walk
from axonml_jax.program.atoms import entry_of, names_of
from axonml_jax.program.program import Program


@dataclass
class Pairs:
    """What a trace of the model says.

    Attributes:
      columns: layers whose output may stay split.
      rows: layers that take it: along which of how many dims of their input.
      read: layers whose parameters are read outside their own calls.
      why: of other layers, why their output may not stay split.
      blocks: of columns that are several layers side by side, of how many.
    """

    columns: set[Path] = field(default_factory=set)
    rows: dict[Path, tuple[int, int]] = field(default_factory=dict)
    read: set[Path] = field(default_factory=set)
    why: dict[Path, str] = field(default_factory=dict)
    blocks: dict[Path, int] = field(default_factory=dict)


def find_pairs(
    model: nnx.Module, candidates: Mapping[Path, Port], others: set[Path], example: Example, ranks: int
) -> Pairs:
    """Pair linear layers, never where the result would differ, in training or without.

    Args:
      model: the model, unchanged.
      candidates: layers that may be paired.
      others: other layers of interest, of which only reads of their parameters are sought.
      example: a call.
      ranks: into how many parts features would be split.
    """
    search = _Search(model, [*candidates, *others], example, ranks)
    ports = {path: each for path, each in candidates.items() if path not in search.read}
    able = {path for path, each in ports.items() if each.out_size > 1 and each.out_size % ranks == 0}
    kept = search.settled(ports, able)
    if not search.same_code(kept):
        # Code that reads sizes off the configuration is found kind by kind: layers of one name in all blocks.
        fine = set()
        for kind in _kinds(kept):
            alone = search.settled(ports, kind)
            fine |= kind if search.same_code(alone) else set()
        kept = search.settled(ports, fine)
        if not search.same_code(kept):
            return Pairs(read=search.read, why=search.why)
    rows = {path: where for flow in kept for path, where in flow.rows.items()}
    return Pairs(_used(kept), rows, search.read, search.why, search.blocks)


class _Search:
    """The model's programs in all its modes.

    Attributes:
      read: layers whose parameters are read outside their own calls.
      why: why outputs of layers may not stay split.
    """

    def __init__(self, model: nnx.Module, names: list[Path], example: Example, ranks: int):
        self.model, self.names, self.example, self.ranks = model, names, example, ranks
        self.programs: dict[bool | None, Program] = {}
        self.read: set[Path] = set()
        self.why: dict[Path, str] = {}
        self.blocks: dict[Path, int] = {}
        for mode in modes_of(model):
            try:
                program, owners = traced(model, dict.fromkeys(names), example, ranks, mode)
            except Exception:
                if mode is None:
                    raise
                continue  # a mode in which the model cannot be called, such as dropout without a stream
            self.programs[mode] = program
            self.read |= {owners[i] for i in _read_outside(program, set(owners))}

    def settled(self, ports: Mapping[Path, Port], able: set[Path]) -> list[Walk]:
        """Walks in which no guess is wrong: fewer and fewer of `able` leave their output split."""
        while True:
            flows = []
            for program in self.programs.values():
                flows.append(Walk(self.names, ports, {p: self.blocks.get(p, 1) for p in able}, self.ranks))
                flows[-1].run(program)
            broken = _torn(flows) | {path: why for flow in flows for path, why in flow.broken.items()}
            if fused := self._fused(flows, ports, able & broken.keys()):
                self.blocks |= fused
                continue
            self.why = {path: why for path, why in broken.items() if path in able} | self.why
            if not broken.keys() & able:
                return flows
            able = able - broken.keys()

    def _fused(self, flows: list[Walk], ports: Mapping[Path, Port], broken: set[Path]) -> dict[Path, int]:
        """Layers to try again as several side by side, whose output is cut into them."""
        found = {path: blocks for flow in flows for path, blocks in flow.fused.items() if path in broken}
        fits = lambda path, blocks: ports[path].fuses and ports[path].out_size % (blocks * self.ranks) == 0
        return {p: blocks for p, blocks in found.items() if p not in self.blocks and fits(p, blocks)}

    def same_code(self, flows: list[Walk]) -> bool:
        """Whether the model does the same with a rank's features: code that reads sizes off shapes would not."""
        parts: dict[Path, LayerPart | None] = dict.fromkeys(self.names)
        for flow in flows:
            parts |= {path: LayerPart("column", flow.opened[path]) for path in flow.used()}
            parts |= {path: LayerPart("row", dim) for path, (dim, _) in flow.rows.items()}
        if not any(flow.rows for flow in flows):
            return True
        for mode, flow in zip(self.programs, flows, strict=True):
            try:
                split, _ = traced(self.model, parts, self.example, self.ranks, mode)
                differs = flow.differs_on_a_rank(split)
            except (TypeError, ValueError) as error:
                differs = f"on a rank's features the model's code fails: {str(error).splitlines()[0]}"
            if differs is not None:
                self.why = dict.fromkeys(_used(flows), differs) | self.why
                return False
        return True


def _torn(flows: list[Walk]) -> dict[Path, str]:
    """Columns that feed a row in one mode of the model which takes something else in another."""
    torn: dict[Path, str] = {}
    for flow in flows:
        for path, sources in flow.taken:
            if any(path in other.whole or other.rows.get(path, flow.rows[path]) != flow.rows[path] for other in flows):
                torn |= dict.fromkeys(sources, f"{path[-1]} takes a whole input elsewhere")
    return torn


def _used(flows: list[Walk]) -> set[Path]:
    return set().union(*(flow.used() for flow in flows))


def _kinds(flows: list[Walk]) -> list[set[Path]]:
    """The layers that leave their output split, those together that feed one row or have one name in several blocks."""
    kinds: list[set] = []
    for _, sources in (taken for flow in flows for taken in flow.taken):
        names = {tuple(part for part in path if not isinstance(part, int)) for path in sources}
        touching = [kind for kind in kinds if kind & names]
        kinds = [kind for kind in kinds if not kind & names] + [names.union(*touching)]
    of = lambda path: tuple(part for part in path if not isinstance(part, int))
    return [{path for path in _used(flows) if of(path) in kind} for kind in kinds]


def _read_outside(program: Program, positions: set[int]) -> Iterator[int]:
    """Which inputs are read by more than layers' own calls."""
    alias = {program.inputs[i]: i for i in positions}
    yield from _reads(program, alias)
    yield from (alias[number] for number in names_of(program.outputs) if number in alias)


def _reads(program: Program, alias: dict[int, int]) -> Iterator[int]:
    """The reads, one by one; `alias` learns the values that calls hand an input through to."""
    for equation in program.equations:
        mine = [entry_of(atom, alias, None) for atom in equation.inputs]
        if all(i is None for i in mine) or equation.op.label.startswith(PREFIX):
            continue
        if (inner := equation.called) is not None:
            inside = {number: i for number, i in zip(inner.inputs, mine, strict=True) if i is not None}
            yield from _reads(inner, inside)
            through = ((n, entry_of(own, inside, None)) for n, own in zip(equation.outputs, inner.outputs, strict=True))
            alias |= {number: i for number, i in through if i is not None}
        else:
            yield from (i for i in mine if i is not None)
