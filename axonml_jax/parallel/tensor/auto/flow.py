"""One walk through a model's program: which layers' outputs may stay split until other layers take them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import Jaxpr, Var

from axonml_jax.model.atoms import entry_of, is_constant
from axonml_jax.model.trace import plain_call
from axonml_jax.parallel.tensor.auto.carry import Mark, Split, Uniform, blocks_wanted, carried
from axonml_jax.parallel.tensor.auto.ports import Port
from axonml_jax.parallel.tensor.auto.probe import PREFIX

Path = tuple


class Flow:
    """A walk with a guess of which layers leave their output split, in how many blocks each; `broken` are wrong guesses.

    Attributes:
      broken: layers whose output must be whole, each with the reason.
      fused: those of them that may stay split in blocks, and in how many.
      rows: layers that take a split input: along which of how many dims.
      opened: layers whose output is split: along which dim.
      whole: layers that take a whole input.
      steps: what the program does: see `doing`, the equation, and the sizes that a rank may see in each dim of each result.
    """

    def __init__(self, names: list[Path], ports: Mapping[Path, Port], columns: Mapping[Path, int], ranks: int):
        self.names, self.ports, self.columns, self.ranks = names, ports, columns, ranks
        self.broken: dict[Path, str] = {}
        self.fused: dict[Path, int] = {}
        self.rows: dict[Path, tuple[int, int]] = {}
        self.opened: dict[Path, int] = {}
        self.steps: list[tuple] = []
        self.taken: list[tuple[Path, frozenset[Path]]] = []
        self.whole: set[Path] = set()
        self._marks: dict[Var, Mark] = {}

    def run(self, jaxpr: Jaxpr, given: Mapping[Var, Mark]) -> None:
        """Walk; `given` marks the inputs."""
        self._marks |= given
        for eqn in jaxpr.eqns:
            marks = [self._mark(atom) for atom in eqn.invars]
            self._marks |= dict.fromkeys(eqn.outvars)  # a body may be walked again with other inputs
            number = len(self.steps)
            if (path := self._layer(eqn)) is not None:
                self._at_layer(path, eqn, marks)
            elif (inner := plain_call(eqn)) is not None:
                self.run(inner, dict(zip(inner.invars, marks, strict=True)))
                for outer, var in zip(eqn.outvars, inner.outvars, strict=True):
                    self._marks[outer] = self._mark(var)
            else:
                self._at(eqn, marks)
            self.steps.insert(number, (*doing(eqn), eqn, [self._sizes(v) for v in eqn.outvars]))

    def end(self, jaxpr: Jaxpr) -> None:
        """What leaves the program is whole; so is the output of a column that no row takes, and every input of a layer."""
        for var in jaxpr.outvars:
            self._refuse([self._mark(var)], "it is a result of the model")
        for path, sources in self.taken:
            if path in self.whole:
                self._break(sources, f"{path[-1]} takes a whole input elsewhere")
        used = self.used()
        self._break({p for p in self.columns if p not in used and p not in self.rows}, "no layer takes it as it is")
        self._break(
            self.rows.keys() & used & self.columns.keys(), "it takes a split input"
        )  # a row's own output is whole

    def used(self) -> set[Path]:
        """The layers whose split output a row takes."""
        return {source for _, sources in self.taken for source in sources}

    def _mark(self, atom: Any) -> Mark:
        return entry_of(atom, self._marks, None)

    def _layer(self, eqn: Any) -> Path | None:
        name = eqn.params.get("name") if eqn.primitive.name in ("jit", "pjit") else None
        return self.names[int(name[len(PREFIX) :])] if isinstance(name, str) and name.startswith(PREFIX) else None

    def _at_layer(self, path: Path, eqn: Any, marks: list[Mark]) -> None:
        split = [(mark, v.aval.ndim) for mark, v in zip(marks, eqn.invars, strict=True) if isinstance(mark, Split)]
        if not split:
            self.whole.add(path)
            if path in self.columns:
                dim = self.opened[path] = self.ports[path].out_dim(eqn.outvars[0].aval.ndim)
                self._marks[eqn.outvars[0]] = Split(dim, frozenset([path]), self.columns[path])
            return
        mark, ndim = split[0]
        where = mark.dim, ndim
        able = (
            mark.blocks == 1
            and path in self.ports
            and path not in self.used()
            and self.ports[path].takes(*where) is not None
        )
        if able and self.rows.setdefault(path, where) == where:
            self.taken.append((path, mark.sources))
        else:
            self._break(mark.sources, f"{path[-1]} needs it whole")

    def _at(self, eqn: Any, marks: list[Mark]) -> None:
        found = carried(eqn, marks, self.ranks)
        if isinstance(found, bool):
            for mark in marks:
                if isinstance(mark, Split) and mark.blocks == 1 and (blocks := blocks_wanted(eqn, mark)) > 1:
                    self.fused |= dict.fromkeys(mark.sources, blocks)
            self._refuse(marks, f"`{eqn.primitive.name}` mixes or counts its parts{line_of(eqn)}")
        else:
            self._marks |= dict.fromkeys(eqn.outvars, found)

    def _sizes(self, var: Any) -> list[tuple[int, ...]]:
        mark, shape = self._marks.get(var), _shape(var)
        sizes: list[tuple[int, ...]] = [(size,) for size in shape]
        if isinstance(mark, Split):
            sizes[mark.dim] = (shape[mark.dim] // self.ranks,)
        if isinstance(mark, Uniform):
            sizes = [(size, size // self.ranks) if d in mark.dims else (size,) for d, size in enumerate(shape)]
        return sizes

    def differs_on_a_rank(self, jaxpr: Jaxpr) -> str | None:
        """Where a program, traced with a rank's parts, first does something else; None: nowhere."""
        theirs = list(_steps(jaxpr))
        for mine, other in zip(self.steps, theirs, strict=False):
            if mine[:-2] != other[:-1] or not _fit(mine[-1], other[-1]):
                return f"`{mine[0]}` depends on how many features there are{line_of(mine[-2])}"
        return None if len(theirs) == len(self.steps) else "what the model does depends on how many features there are"

    def _refuse(self, marks: list[Mark], why: str) -> None:
        self._break({source for mark in marks if isinstance(mark, Split) for source in mark.sources}, why)

    def _break(self, paths: Iterable[Path], why: str) -> None:
        self.broken = dict.fromkeys(paths, why) | self.broken  # the first reason stays


def doing(eqn: Any) -> tuple:
    """What an equation does, whatever the sizes: its primitive, its name and the constants in it."""
    literals = tuple(str(v.val) for v in eqn.invars if is_constant(v))
    return eqn.primitive.name, str(eqn.params.get("name", "")), literals


def line_of(eqn: Any) -> str:
    """The user's line that an equation comes from, for messages."""
    line = re.fullmatch(r"(.*?):(\d+)(?::\d+)? \((.*)\)", source_info_util.summarize(eqn.source_info))
    return f" (line {line[2]} of {PurePath(line[1]).name}, {line[3]})" if line else ""


def _steps(jaxpr: Jaxpr) -> Iterator[tuple]:
    """What a program does with the shapes of the results; bodies of calls after the call, layers not opened."""
    for eqn in jaxpr.eqns:
        yield (*doing(eqn), [_shape(v) for v in eqn.outvars])
        if not str(eqn.params.get("name", "")).startswith(PREFIX) and (inner := plain_call(eqn)) is not None:
            yield from _steps(inner)


def _fit(allowed: list[list[tuple[int, ...]]], shapes: list[tuple[int, ...]]) -> bool:
    """Whether results have allowed sizes in all dims."""
    if [len(sizes) for sizes in allowed] != [len(shape) for shape in shapes]:
        return False
    pairs = (pair for sizes, shape in zip(allowed, shapes, strict=True) for pair in zip(sizes, shape, strict=True))
    return all(size in may for may, size in pairs)


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(getattr(var.aval, "shape", ()))
