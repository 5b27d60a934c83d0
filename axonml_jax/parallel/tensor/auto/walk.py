"""One walk through a model's program: which layers' outputs may stay split until other layers take them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from axonml_jax.parallel.tensor.auto.carry import Mark, Split, Uniform, blocks_wanted, carried
from axonml_jax.parallel.tensor.auto.ports import Port
from axonml_jax.parallel.tensor.auto.probe import PREFIX
from axonml_jax.program.atoms import is_constant
from axonml_jax.program.dataflow import results
from axonml_jax.program.program import Equation, Program

Path = tuple


class Walk:
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

    def run(self, program: Program) -> None:
        """Walk through a program of whole inputs. What leaves it is whole; so is the output of a column that no row takes, and
        every input of a layer."""
        self._refuse(results(program, [None] * len(program.inputs), self._rule, None), "it is a result of the model")
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

    def _rule(self, equation: Equation, marks: list[Mark]) -> Sequence[Mark]:
        number = len(self.steps)
        if (path := self._layer(equation)) is not None:
            made = [self._at_layer(path, equation, marks), *[None] * (len(equation.outputs) - 1)]
        elif equation.called is not None:
            made = results(equation.called, marks, self._rule, None)
        else:
            made = [self._at(equation, marks)] * len(equation.outputs)
        sizes = [self._sizes(mark, aval.shape) for mark, aval in zip(made, equation.op.made, strict=True)]
        self.steps.insert(number, (*doing(equation), equation, sizes))
        return made

    def _layer(self, equation: Equation) -> Path | None:
        label = equation.op.label
        return self.names[int(label[len(PREFIX) :])] if label.startswith(PREFIX) else None

    def _at_layer(self, path: Path, equation: Equation, marks: list[Mark]) -> Mark:
        """The mark of a layer's output."""
        op = equation.op
        split = [(mark, aval.ndim) for mark, aval in zip(marks, op.given, strict=True) if isinstance(mark, Split)]
        if not split:
            self.whole.add(path)
            if path not in self.columns:
                return None
            dim = self.opened[path] = self.ports[path].out_dim(op.made[0].ndim)
            return Split(dim, frozenset([path]), self.columns[path])
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
        return None

    def _at(self, equation: Equation, marks: list[Mark]) -> Mark:
        found = carried(equation, marks, self.ranks)
        if not isinstance(found, bool):
            return found
        for mark in marks:
            if isinstance(mark, Split) and mark.blocks == 1 and (blocks := blocks_wanted(equation, mark)) > 1:
                self.fused |= dict.fromkeys(mark.sources, blocks)
        self._refuse(marks, f"`{equation.name}` mixes or counts its parts{line_of(equation)}")
        return None

    def _sizes(self, mark: Mark, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        sizes: list[tuple[int, ...]] = [(size,) for size in shape]
        if isinstance(mark, Split):
            sizes[mark.dim] = (shape[mark.dim] // self.ranks,)
        if isinstance(mark, Uniform):
            sizes = [(size, size // self.ranks) if d in mark.dims else (size,) for d, size in enumerate(shape)]
        return sizes

    def differs_on_a_rank(self, program: Program) -> str | None:
        """Where a program, traced with a rank's parts, first does something else; None: nowhere."""
        theirs = list(_steps(program))
        for mine, other in zip(self.steps, theirs, strict=False):
            if mine[:-2] != other[:-1] or not _fit(mine[-1], other[-1]):
                return f"`{mine[0]}` depends on how many features there are{line_of(mine[-2])}"
        return None if len(theirs) == len(self.steps) else "what the model does depends on how many features there are"

    def _refuse(self, marks: Sequence[Mark], why: str) -> None:
        self._break({source for mark in marks if isinstance(mark, Split) for source in mark.sources}, why)

    def _break(self, paths: Iterable[Path], why: str) -> None:
        self.broken = dict.fromkeys(paths, why) | self.broken  # the first reason stays


def doing(equation: Equation) -> tuple:
    """What an equation does, whatever the sizes: its primitive, its name and the constants in it."""
    return equation.name, equation.op.label, tuple(str(atom.val) for atom in equation.inputs if is_constant(atom))


def line_of(equation: Equation) -> str:
    """The user's line that an equation comes from, for messages."""
    return f" ({line})" if (line := equation.op.line) else ""


def _steps(program: Program) -> Iterator[tuple]:
    """What a program does with the shapes of the results; bodies of calls after the call, layers not opened."""
    for equation in program.equations:
        yield (*doing(equation), [aval.shape for aval in equation.op.made])
        if not equation.op.label.startswith(PREFIX) and equation.called is not None:
            yield from _steps(equation.called)


def _fit(allowed: list[list[tuple[int, ...]]], shapes: list[tuple[int, ...]]) -> bool:
    """Whether results have allowed sizes in all dims."""
    if [len(sizes) for sizes in allowed] != [len(shape) for shape in shapes]:
        return False
    pairs = (pair for sizes, shape in zip(allowed, shapes, strict=True) for pair in zip(sizes, shape, strict=True))
    return all(size in may for may, size in pairs)
