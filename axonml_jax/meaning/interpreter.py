"""A program of the whole batch run on one rank's part, inside `shard_map`."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.collectives.primitives import vary
from axonml_jax.compat.jaxpr import Operation
from axonml_jax.meaning.bodies import BODIES, kind_of
from axonml_jax.meaning.following import Following, TalksItself
from axonml_jax.meaning.places import Places, Split
from axonml_jax.meaning.values import ACTS, Ranks, Value
from axonml_jax.program.program import Equation, Program, is_constant, is_elementwise, made_by, rule_of


class Interpreter:
    """Runs programs that were traced at the whole batch's shape on this rank's part.

    Attributes:
      ranks: the groups of ranks, and their collectives.
      following: what is known of places without arrays.
      call: runs the model on this rank's operands in the place of a call of it (`model_call.py`).
    """

    def __init__(self, ranks: Ranks, call: Any = None):
        self.ranks, self.call = ranks, call
        self.following = Following(ranks.groups, call)

    def run(
        self, program: Program, given: Sequence[Value], known: Mapping[int, Value] | None = None, wanted: Any = None
    ) -> list[Value]:
        """The results of a program.

        Args:
          program: the program.
          given: its inputs.
          known: values, by number, that are there already in the place of those that it would make.
          wanted: numbers that are returned in the place of its results, for which only what they need is run.
        """
        known = known or {}
        env = {number: self.ranks.known(constant) for number, constant in program.constants.items()}
        env.update(zip(program.inputs, given, strict=True))
        env.update(known)
        read = lambda atom: self._constant(atom) if is_constant(atom) else env[atom]
        for equation in program.equations if wanted is None else made_by(program.equations, wanted, known):
            if equation.outputs and all(number in known for number in equation.outputs):
                continue
            operands, before = [read(atom) for atom in equation.inputs], self.ranks.at
            self.ranks.at = equation.name, equation.op.line
            env.update(zip(equation.outputs, self._equation(equation, operands), strict=True))
            env.update(known)
            self.ranks.at = before
        return [read(atom) for atom in (program.outputs if wanted is None else wanted)]

    def _constant(self, atom: Any) -> Value:
        value = self.ranks.known(jnp.asarray(atom.val, atom.aval.dtype))
        value.zero = value.shape == () and not jnp.issubdtype(value.dtype, jax.dtypes.extended) and bool(atom.val == 0)
        return value

    def _equation(self, equation: Equation, given: Sequence[Value]) -> list[Value]:
        op = equation.op
        if (kind := kind_of(equation)) is not None:
            return BODIES[kind](self, equation, given)
        if set(op.mesh_axes) & set(self.ranks.axes) and not rule_of(op.name).casts:
            raise TalksItself(op.name, op.line)
        if rule_of(op.name).casts:
            return [self._cast(op, value) for value in given]
        if all(value.is_whole for value in given) and (made := self._lazily(op, given)) is not None:
            return made
        steps = self.following.steps(op, [value.places for value in given])
        wanted = list(zip(*(step.wanted for step in steps), strict=True)) if given else []
        arrays = [self.ranks.settled(value, tuple(places)) for value, places in zip(given, wanted, strict=True)]
        places = [tuple(each) for each in zip(*(step.made for step in steps), strict=True)]
        joined = [group for step, group in zip(steps, self.ranks.groups, strict=True) if step.act]
        if joined:
            self.ranks.check_talk()
            act = next(step.act for step in steps if step.act)
            with jax.named_scope("axonml.loss"):
                made = [ACTS[act](self.ranks, op, arrays, joined)]
        else:
            made = self._bind(op, arrays, wanted, places)
        return [self.ranks.held(x, at, aval.shape) for x, at, aval in zip(made, places, op.made, strict=True)]

    def _cast(self, op: Operation, value: Value) -> Value:
        make = value.make
        return Value(
            value.shape, value.dtype, value.places, lambda places: vary(make(places), op.mesh_axes), value.zero
        )

    def _bind(
        self, op: Operation, arrays: Sequence[Any], wanted: Sequence[Places], made: Sequence[Places]
    ) -> list[Any]:
        if op.bodies and self.ranks.checked and not op.name.startswith("scatter") and not any(map(any, wanted)):
            arrays = [self.ranks.unvaried(x) for x in arrays]
        changed = localised(op, self.ranks, wanted, made) if any(map(any, [*wanted, *made])) else {}
        return op.bind(arrays, **changed)

    # Whole values that are made as far as they are read

    def _lazily(self, op: Operation, given: Sequence[Value]) -> list[Value] | None:
        if op.name == "broadcast_in_dim" and len(given) == 1:
            return [self._lazy_broadcast(op, given[0])]
        if op.name == "iota" and not given:
            return [self._lazy_iota(op)]
        one = len(op.made) == 1 and given and not op.has_effects
        if one and is_elementwise(op.name) and op.name != "bitcast_convert_type":
            return [self._lazy_elementwise(op, given)]
        return None

    def _lazy_elementwise(self, op: Operation, given: Sequence[Value]) -> Value:
        (aval,) = op.made

        def make(places: Places) -> jax.Array:
            return op.bind([value.at(_spread(places, value.shape)) for value in given])[0]

        zero = op.name in ("convert_element_type", "copy") and given[0].zero
        return self.ranks.lazy(aval.shape, aval.dtype, make, zero)

    def _lazy_broadcast(self, op: Operation, value: Value) -> Value:
        shape, to = op.options["shape"], tuple(op.options["broadcast_dimensions"])

        def inside(place: Any) -> Any:
            kept = isinstance(place, Split) and place.dim in to and value.shape[to.index(place.dim)] == shape[place.dim]
            return place._replace(dim=to.index(place.dim)) if kept else None

        def make(places: Places) -> jax.Array:
            return op.bind([value.at(tuple(map(inside, places)))], shape=self.ranks.local(shape, places))[0]

        return self.ranks.lazy(shape, value.dtype, make, value.zero)

    def _lazy_iota(self, op: Operation) -> Value:
        (aval,), along = op.made, op.options["dimension"]

        def make(places: Places) -> jax.Array:
            own = tuple(
                place._replace(dim=0) if isinstance(place, Split) and place.dim == along else None for place in places
            )
            numbers = self.ranks.block(jnp.arange(aval.shape[along], dtype=aval.dtype), own)
            return jax.lax.broadcast_in_dim(numbers, self.ranks.local(aval.shape, places), (along,))

        return self.ranks.lazy(aval.shape, aval.dtype, make)


def _spread(places: Places, shape: Sequence[int]) -> Places:
    """The places of an operand of an elementwise operation, which may be spread over dims that it has not."""
    return tuple(place if isinstance(place, Split) and shape and shape[place.dim] > 1 else None for place in places)


def localised(op: Operation, ranks: Ranks, wanted: Sequence[Places], made: Sequence[Places]) -> dict[str, Any]:
    """The options of an operation that say shapes, of this rank's part."""
    if op.name == "broadcast_in_dim":
        return {"shape": ranks.local(op.made[0].shape, made[0])}
    if op.name == "reshape":
        return {"new_sizes": ranks.local(op.made[0].shape, made[0])}
    whole = op.given[0].shape if op.given else ()
    own = ranks.local(whole, wanted[0]) if wanted else ()
    if op.name == "slice":
        ends = zip(op.options["limit_indices"], whole, own, strict=True)
        return {"limit_indices": tuple(part if part != size else end for end, size, part in ends)}
    if op.name in ("dynamic_slice", "gather"):
        sizes = zip(op.options["slice_sizes"], whole, own, strict=True)
        return {"slice_sizes": tuple(part if size == n else size for size, n, part in sizes)}
    return {}
