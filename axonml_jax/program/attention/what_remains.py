"""What of a program is still read once attentions are replaced; and which of them cannot be, because more is read of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from axonml_jax.program.atoms import Atom, is_constant, names_of
from axonml_jax.program.attention.found_attention import FoundAttention
from axonml_jax.program.attention.mark import ORDER, PLURAL, Mark
from axonml_jax.program.nested import Level, Nested, Node
from axonml_jax.program.program import Equation


@dataclass(frozen=True, eq=False)
class Remains:
    """A program some of whose values are made in another way.

    Attributes:
      values: the program.
      replaced: those values, and what each is made of.
      places: the levels at which they are made.
    """

    values: Nested
    replaced: Mapping[int, Sequence[Atom]]
    places: Sequence[Level] = field(default=())

    @cached_property
    def opened(self) -> frozenset[Equation]:
        """The equations whose bodies are run equation by equation; all others are run as they are."""
        return frozenset(
            level.equation for place in self.places for level in place.around if level.equation is not None
        )

    @cached_property
    def live(self) -> frozenset[int]:
        """What is read, directly or not, by the results or by what acts."""
        found: set[int] = set()
        todo = [*names_of(self.values.results)]
        for node in self.values.nodes:
            if node.equation.op.acts:
                todo += self._needs_of(node.level, node.equation, node.inputs)
        for equation in self.opened:
            if equation.op.loop is not None:  # a while loop keeps all that it carries
                for level in self.values.levels[equation]:
                    todo += names_of(level.of((*level.program.inputs, *level.program.outputs)))
        while todo:
            value = todo.pop()
            if value not in found:
                found.add(value)
                todo += self._needs(value)
        return frozenset(found)

    def is_live(self, atom: Atom) -> bool:
        """Whether it is read; constants are."""
        return is_constant(atom) or atom in self.live

    def _needs(self, value: int) -> tuple[int, ...]:
        if value in self.replaced:
            return names_of(self.replaced[value])
        home = self.values.homes.get(value)
        if home is None:
            return ()
        return self._needs_of(*home, self.values.read_for(value))

    def _needs_of(self, level: Level, equation: Equation | None, inputs: Sequence[Atom]) -> tuple[int, ...]:
        """What is read for what an equation makes: of one in a body that is run as it is, all that the outermost such reads."""
        found = names_of(inputs)
        if equation is not None and equation in self.values.levels and equation not in self.opened:
            found = names_of(level.of(equation.inputs))
        for each in level.around:
            if each.equation is not None and each.parent is not None and each.equation not in self.opened:
                found = names_of(each.parent.of(each.equation.inputs))
        return found


def remaining(values: Nested, attentions: Sequence[FoundAttention]) -> Remains:
    """The program once these are replaced."""
    places = [node.level for found in attentions if (node := values.maker(found.out.value)) is not None]
    made_of = {found.out.value: (found.q.value, found.k.value, found.v.value) for found in attentions}
    return Remains(values, made_of, places)


def settled(
    values: Nested, attentions: Sequence[FoundAttention], products: Sequence[Node], marks: Mapping[int, Mark]
) -> tuple[FoundAttention, ...]:
    """Attentions with why they are left as they are, and with what goes with them.

    Args:
      values: the program.
      attentions: those found.
      products: of queries and keys, of each.
      marks: what every value is.
    """
    found = list(attentions)
    whole = Remains(values, {}, [level for levels in values.levels.values() for level in levels])
    found = [each if each.out.value in whole.live else replace(each, left="nothing reads its result") for each in found]
    while True:
        remains = remaining(values, [each for each in found if not each.left])
        still = [
            i for i, (each, product) in enumerate(zip(found, products, strict=True))
            if not each.left and product.outputs[0] in remains.live
        ]  # fmt: skip
        if not still:
            break
        for i in still:
            found[i] = replace(found[i], left=_reader(values, remains, products[i], marks))
    return tuple([each if each.left else replace(each, replaces=_gone(values, each, whole, remains)) for each in found])


def _reader(values: Nested, remains: Remains, product: Node, marks: Mapping[int, Mark]) -> str:
    """Who reads what is inside an attention: of all that do the one that reads the most finished."""
    own = {value: mark for value, mark in marks.items() if mark.product is product and mark.stage != "lost"}
    found = [(own[value].stage, "are returned") for value in names_of(values.results) if value in own]
    for node in values.nodes:
        stages = [own[value].stage for value in node.read if value in own]
        others = [value for value in node.outputs if value not in own and value not in remains.replaced]
        reads = node.equation.op.acts or any(value in remains.live for value in others)
        if stages and reads:
            at = f" at {node.equation.op.line}" if node.equation.op.line else ""
            found += [(stage, f"are read by {node.name}{at}") for stage in stages]
    stage, how = min(found, key=lambda each: ORDER.index(each[0]), default=("scores", "are read elsewhere"))
    return f"its {PLURAL[stage]} {how}"


def _gone(values: Nested, found: FoundAttention, whole: Remains, remains: Remains) -> tuple[str, ...]:
    """The primitives that were run for an attention and are no more."""
    maker, names, visited = values.maker(found.out.value), [], set()
    todo = [] if maker is None else [maker]
    while todo:
        node = todo.pop()
        if node in visited:
            continue
        visited.add(node)
        names.append(node.name)
        for atom in node.read:
            before = values.maker(atom)
            if before is not None and atom in whole.live and atom not in remains.live:
                todo.append(before)
    return tuple(names[::-1])
