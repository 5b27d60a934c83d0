"""Reads a traced update: what acts element by element, what sums over all elements, and what no rank can do with its part.

The update is traced on whole arrays, so that whatever looks at shapes is decided as on one device. What is followed through the
program is the parameter of which a value holds elements: values of one parameter may meet each other and numbers, but neither
another parameter's nor arrays made apart from them (docs/adr/0007). A parameter that one rank holds whole, along a
pipeline, may meet anything there.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from axonml_jax.compat.operation import Operation
from axonml_jax.program.atoms import is_constant
from axonml_jax.program.program import Equation, Program
from axonml_jax.program.rules import is_elementwise, rule_of
from axonml_jax.sharding.layout import Layout
from axonml_jax.training.optimizer.sharded.mixing import Mixing, frames_of
from axonml_jax.training.optimizer.sharded.sharded_program import ShardedProgram
from axonml_jax.training.optimizer.sharded.update_steps import UpdateSteps
from axonml_jax.training.optimizer.sharded.value import Value, kind_of

_STILL = frozenset(("broadcast_in_dim", "reshape", "reshard", "sharding_constraint"))
"""What leaves a part of a parameter as it is, where the result is the parameter's shape or its elements in a row."""

_JOINING = frozenset(("add", "and", "max", "min", "or"))
"""How single elements join totals: then they are sent in the round of these, and not what comes of them in the next."""


def read_update(
    program: Program,
    owners: tuple[Sequence[int | None], Sequence[int | None]],
    layouts: Sequence[Layout],
    pipe: tuple[str, ...] = (),
) -> ShardedProgram:
    """The program of an update.

    Args:
      program: the update of whole arrays, with calls in it.
      owners: of every leaf of the arguments, and of the result: the parameter that it holds elements of, or None.
      layouts: of every parameter.
      pipe: axes along which ranks hold different parameters.

    Raises:
      Mixing: when ranks cannot run it on what they hold.
    """
    reader = _Reader(layouts, piped=bool(pipe))
    inputs = [reader.new(program.avals[number], owner) for number, owner in zip(program.inputs, owners[0], strict=True)]
    results = [reader.returned(*each) for each in zip(reader.read(program, inputs, ()), owners[1], strict=True)]
    return ShardedProgram(
        steps=tuple(reader.steps),
        inputs=tuple(value.number for value in inputs),
        outputs=tuple(value.number for value in results),
        owners=(tuple(owners[0]), tuple(owners[1])),
        constants=reader.constants,
        layouts=tuple(layouts),
        pipe=pipe,
    )


class _Reader(UpdateSteps):
    """Turns a traced function into steps."""

    def read(self, program: Program, given: Sequence[Value], frames: Sequence[str]) -> list[Value]:
        """The results of a program of these arguments."""
        env: dict[int, Value] = dict(zip(program.inputs, given, strict=True))
        for number, constant in program.constants.items():
            env[number] = self.constant(constant, program.avals[number])
        look = lambda atom: self.constant(atom.val, atom.aval) if is_constant(atom) else env[atom]
        for equation in program.equations:
            made = self._equation(equation, [look(atom) for atom in equation.inputs], frames_of(equation.op, frames))
            env.update(zip(equation.outputs, made, strict=True))
        return [look(atom) for atom in program.outputs]

    def returned(self, value: Value, owner: int | None) -> Value:
        """A result, which must hold elements of the parameter that it belongs to, or be the same on all ranks."""
        if value.owner != owner and self.is_small(value):
            value = self.everywhere(value)
        if self.whole_work.has(value) and owner in (None, value.owner):
            value = self.part(value) if owner is not None else self.work(value, part=False)
        if value.owner is None and (owner is None or value.is_number or self.is_whole(owner)):
            part = None if owner is None or self.is_whole(owner) else self.layouts[owner]
            shape = value.aval.shape if part is None or not part.shape else part.shard
            spread = lambda values: [jnp.broadcast_to(values[0], shape)]
            return self.emit(spread, [value], [value.aval], owner, raw=True)[0] if value.uniform else value
        if value.owner == owner:
            return value
        raise Mixing("what it returns for one parameter, or for none, holds elements of another")

    def _equation(self, equation: Equation, given: list[Value], frames: Sequence[str]) -> list[Value]:
        op, name, avals = equation.op, equation.name, equation.op.made
        if equation.called is not None:
            return self.read(equation.called, given, frames)
        split = any(each.axes for each in self.layouts)
        if split and name == "random_bits" and any(aval.size > 1 for aval in avals):
            raise Mixing("random numbers of a parameter's shape", frames)
        if equation.branches and given[0].owner is None and self._must_split(given) and not op.acts:
            cases = [self.read(branch, given[1:], frames) for branch in equation.branches]
            return [self._chosen(given[0], list(each), frames) for each in zip(*cases, strict=True)]
        given = self._met(op, given)
        if any(map(self.whole_work.has, given)):
            return self.note(equation, given, frames)
        try:
            given, owner = self._settled(op, given, frames)
        except Mixing:
            if not self.may_gather(op, given):
                raise
            return self.note(equation, given, frames)
        if owner is None:
            spread = name == "broadcast_in_dim"
            uniform = (is_elementwise(name) or spread) and all(value.is_number for value in given)
            run = (lambda values: values) if uniform and spread else op.bind
            return self.emit(run, given, avals, None, uniform=uniform, kind=kind_of(op, given) if uniform else None)
        if not self.is_whole(owner) and name in _STILL:
            return [given[0]._replace(aval=avals[0])]
        if not self.is_whole(owner) and name == "dot_general":  # of all dims: a sum of products
            kinds = [jax.ShapeDtypeStruct(given[0].aval.shape, avals[0].dtype)]
            product = lambda values: [jnp.asarray(values[0] * values[1], avals[0].dtype)]
            given = self.emit(product, given, kinds, owner)
            return [self.total(jnp.sum, given[0], "sum", avals[0].dtype)]
        if (total := rule_of(name).total) and given[0].aval.shape and not self.is_whole(owner):
            return [self.total(lambda x: op.bind([x])[0], given[0], total, avals[0].dtype)]
        return self.emit(op.bind, given, avals, owner, kind=kind_of(op, given))

    def _met(self, op: Operation, given: list[Value]) -> list[Value]:
        """The operands with none that is whole, unless all are of one parameter and the operation stays with whole arrays."""
        whole, owned = [each for each in given if self.whole_work.has(each)], [v for v in given if v.owner is not None]
        if not whole:
            return given
        if len({value.owner for value in owned}) == 1:
            shape = self.layouts[whole[0].owner or 0].shape
            alike = all(value.aval.shape == shape for value in owned) and op.made[0].shape == shape
            if len(whole) == len(owned) or not (alike and is_elementwise(op.name)):
                return given
        return [self.everywhere(each) if self.is_small(each) else self.part(each) for each in given]

    def _chosen(self, index: Value, cases: list[Value], frames: Sequence[str]) -> Value:
        """A result of a conditional: all branches run, as totals in them need all ranks."""
        if len({case.number for case in cases}) == 1:
            return cases[0]
        given, owner = self._together([index, *cases], cases[0].aval.shape, "cond", frames)
        uniform = owner is None and all(value.is_number for value in given)
        choose = lambda values: [jax.lax.select_n(values[0], *map(jnp.asarray, values[1:]))]
        return self.emit(choose, given, [cases[0].aval], owner, uniform=uniform)[0]

    def _settled(self, op: Operation, given: list[Value], frames: Sequence[str]) -> tuple[list[Value], int | None]:
        """What an operation acts on, and the parameter whose elements these are, or None: the same on all ranks."""
        name, owned = op.name, [value for value in given if value.owner is not None]
        if name in _JOINING and any(value.owner is None and value.level for value in given):
            given = [self.everywhere(value) if self.is_small(value) else value for value in given]
            owned = [value for value in given if value.owner is not None]
        if not owned:
            return given, None
        if len({value.owner for value in owned}) == 1 and self.is_local(owned[0]) and not op.acts:
            return given, owned[0].owner
        if is_elementwise(name):
            return self._together(given, op.made[0].shape, name, frames)
        shapes = {aval.shape for aval in op.made}
        if name in _STILL and shapes <= self._still(owned[0]):
            return given, owned[0].owner
        if name == "dot_general" and _contracts_all(op):
            return self._together(given, given[0].aval.shape, name, frames)
        if rule_of(name).total and len(op.options["axes"]) == len(owned[0].aval.shape):
            return given, owned[0].owner
        given = [self.everywhere(value) if self.is_small(value) else value for value in given]
        if any(value.owner is not None for value in given):
            raise Mixing(name, frames)
        return given, None

    def _together(
        self, given: list[Value], shape: tuple[int, ...], name: str, frames: Sequence[str]
    ) -> tuple[list[Value], int | None]:
        """Values that meet element by element: of one parameter, or the same on all ranks."""
        given = [value if self.is_small(value) else self.part(value) for value in given]
        owned = [value for value in given if value.owner is not None]
        several = len({value.owner for value in owned}) > 1
        if owned and not several and self.is_local(owned[0]):
            return given, owned[0].owner
        if several or any(value.aval.shape != shape for value in owned):
            if not any(map(self.is_small, given)):
                raise Mixing(f"{name} of several parameters", frames)
            given = [self.everywhere(value) if self.is_small(value) else value for value in given]
            return self._together(given, shape, name, frames)
        if owned and not all(value.owner is not None or value.is_number for value in given):
            raise Mixing(f"{name} with an array that is not a parameter's own", frames)
        return given, owned[0].owner if owned else None

    def _must_split(self, given: Sequence[Value]) -> bool:
        """Whether values belong to several parameters, or to one that is split."""
        owned = [value for value in given if value.owner is not None]
        return len({value.owner for value in owned}) > 1 or not all(map(self.is_local, owned))

    def _still(self, value: Value) -> set[tuple[int, ...]]:
        """The shapes in which a part of a parameter has the same elements in the same order."""
        assert value.owner is not None
        rows = {(value.aval.size,), self.layouts[value.owner].shape} if value.aval.shape else set()
        return {value.aval.shape} | rows


def _contracts_all(op: Operation) -> bool:
    """Whether a product is one of all elements with their like."""
    left, right = op.contraction.contracted
    return left == right == tuple(range(op.given[0].ndim)) == tuple(range(op.given[1].ndim))
