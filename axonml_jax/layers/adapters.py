"""LoRA under tensor parallelism: adapters beside the shards of a kernel, multiplied one after the other."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from axonml_jax.base import named_leaves
from axonml_jax.collectives.gradients import copy_to
from axonml_jax.collectives.primitives import bound, degree
from axonml_jax.compat.jaxpr import Operation
from axonml_jax.compat.varying_types import CASTS
from axonml_jax.layers.fused import products_apart
from axonml_jax.layers.whole import marked_program, tensor_specs
from axonml_jax.mesh.axes import BATCH_AXES, LAYER_AXES, as_axes
from axonml_jax.model.lora import Adapter, dequantized, merged
from axonml_jax.model.view import Functional, Sides, Variables, merge
from axonml_jax.program.program import Equation, Program, run_program, run_traced

# --------------------------------------------------------------------------------------------------
# How adapters of low rank are split over the tensor axes: as the sides of their matrices are.
# --------------------------------------------------------------------------------------------------


def layer_specs(model: Functional, axis_sizes: Mapping[str, int]) -> dict[str, Any]:
    """`tensor_specs` of a model's parameters, and of its adapters.

    Of a matrix [..., i, o] the first one, [..., i, r], is split as i is and the second, [..., r, o], as o is; so are the
    scales [..., o] of one that rests as int8. Of kernels with several dims on a side each dim is.

    Raises:
      ValueError: see `tensor_specs`.
    """
    specs: dict[Any, Any] = flatten_dict(tensor_specs(model.abstract_module, axis_sizes))
    for path, spec in list(specs.items()):
        if (adapter := model.adapters.get("/".join(map(str, path)))) is not None:
            for name, own in specs_beside(spec, adapter).items():
                specs[*path[:-1], name.rpartition("/")[2]] = own
    return unflatten_dict(specs)


def specs_beside(spec: PartitionSpec, adapter: Adapter) -> dict[str, PartitionSpec]:
    """The specs of what lies beside a matrix with this spec, by path: its adapters, and its column scales if it has some.

    >>> specs_beside(PartitionSpec(None, "tensor"), Adapter("a", "b", 1.0, Sides()))["b"] == PartitionSpec(None, "tensor")
    True
    """
    stack, inputs, outputs = _entries(spec, adapter.sides)
    scales = {} if adapter.column_scales is None else {adapter.column_scales: PartitionSpec(*stack, *outputs)}
    return {adapter.a: PartitionSpec(*stack, *inputs, None), adapter.b: PartitionSpec(*stack, None, *outputs)} | scales


def summed_axes(model: Functional) -> dict[str, tuple[str, ...]]:
    """The bound axes over which an adapter's gradient is the sum of the ranks', by the adapter's path.

    Of a matrix whose columns are split each rank has a part of the first adapter's gradient; of one whose rows are, of the
    second's. Along axes that split rows of the batch the step sums already.
    """
    sizes = {axis: degree(axis) for axis in bound(LAYER_AXES)}
    specs: dict[Any, Any] = flatten_dict(tensor_specs(model.abstract_module, sizes))
    found = {}
    for path, spec in specs.items():
        if (adapter := model.adapters.get("/".join(map(str, path)))) is not None:
            _, inputs, outputs = _entries(spec, adapter.sides)
            found |= {adapter.a: _summed(outputs), adapter.b: _summed(inputs)}
    return {name: axes for name, axes in found.items() if axes}


def _entries(spec: PartitionSpec, sides: Sides) -> tuple[list[Any], list[Any], list[Any]]:
    """The parts of a matrix's spec for its stacked dims, its input dims and its output dims."""
    entries = [*spec, *[None] * (sides.stacked + len(sides.roles) - len(spec))]
    return entries[: sides.stacked], [entries[d] for d in sides.dims("i")], [entries[d] for d in sides.dims("o")]


def _summed(entries: list[Any]) -> tuple[str, ...]:
    axes = bound(tuple(axis for entry in entries for axis in as_axes(entry or ())))
    return tuple(axis for axis in axes if axis not in BATCH_AXES and degree(axis) > 1)


# --------------------------------------------------------------------------------------------------
# Matrices with adapters multiply as x W + scale (x A) B: the traced model's products with W are found and done so.
#
# The model is traced on its own parameters, as if there were no adapters, and the program is run with a `LowRank` in
# the place of each matrix that has some. W is never changed nor copied, and no gradient of it is made (docs/adr/0017).
# Whatever else reads such a matrix, as a lookup or a product with a backward of its own, reads W + scale A B.
#
# A W that rests as int8 is a float inside of its product alone, and once more inside of that product's backward.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LowRank:
    """A matrix, or a stack of matrices, with its adapters: stands for W + scale A B in a traced program.

    Attributes:
      weight: W [..., i, o], or the int8 that stands for it.
      a: [..., i, r].
      b: [..., r, o].
      scale: the factor of A B.
      sides: the dims of W, among which i and o may be several.
      summed: the axes over which the gradients of a and of b are sums of the ranks'.
      column_scales: [..., o] of int8, in the dtype of W; None: W is there itself.
    """

    weight: Any
    a: Any
    b: Any
    scale: float
    sides: Sides
    summed: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    column_scales: Any = None

    @property
    def dtype(self) -> Any:
        """The dtype in which W is read."""
        return (self.weight if self.column_scales is None else self.column_scales).dtype

    @functools.cached_property
    def adapters(self) -> tuple[jax.Array, jax.Array]:
        """A and B as this rank reads them."""
        a, b = (copy_to(x, axes) if axes else x for x, axes in zip((self.a, self.b), self.summed, strict=True))
        return a, b

    @functools.cached_property
    def merged(self) -> jax.Array:
        """Compute W + scale A B."""
        a, b = self.adapters
        own = self.weight if self.column_scales is None else dequantized(self.weight, self.column_scales, self.sides)
        return merged(own, a, b, self.scale, self.sides)

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The arrays that it consists of."""
        more = () if self.column_scales is None else (self.column_scales,)
        return self.weight, self.a, self.b, *more

    def on(self, leaves: Sequence[Any]) -> "LowRank":
        """The matrix with other arrays in the order of `leaves`, such as those of an inner trace, or slices of a stack."""
        weight, a, b, *more = leaves
        sides = replace(self.sides, stacked=weight.ndim - len(self.sides.roles))
        return LowRank(weight, a, b, self.scale, sides, self.summed, *more)

    def cast(self, op: Operation) -> "LowRank":
        """The same after a cast of W to another dtype or type: int8 stays int8, and its scales are cast."""
        scales = self.column_scales
        if scales is None:
            return replace(self, weight=op.bind([self.weight])[0])
        weight = op.bind([self.weight])[0] if op.name in CASTS else self.weight
        return replace(self, weight=weight, column_scales=op.bind([scales])[0])

    def product(self, multiply: Callable[[Any, Any], Any], other: Any) -> Any:
        """Compute `multiply(other, W)`; for int8 the backward recomputes W's floats instead of keeping them."""
        if self.column_scales is None:
            return multiply(other, self.weight)
        again = jax.checkpoint(lambda other, own, scales: multiply(other, dequantized(own, scales, self.sides)))
        return again(other, self.weight, self.column_scales)


def reading_adapted(fun: Callable, model: Functional, variables: Variables, *args: Any) -> Any:
    """Call `fun(variables, *args)` of a model with adapters, whose products by W use A and B too.

    Communicates: over axes along which a layer splits its matrix, an all-reduce of the gradient of the adapter that is not
    split.
    """
    read = flatten_dict(merge(variables.params, variables.frozen))
    there = {"/".join(map(str, path)): leaf for path, leaf in read.items()}
    added = {each for adapter in model.adapters.values() for each in adapter.added}
    seen_by_model = {name: _seen(model, there, name) for name in there if name not in added}
    own = {path: seen_by_model[name] for path, name in zip(read, there, strict=True) if name not in added}
    base = Variables(unflatten_dict(own), {}, variables.state)
    summed = summed_axes(model)

    def traced(params: Any, state: Any, *args: Any) -> Any:
        with products_apart():
            return fun(Variables(params, {}, state), *args)

    def with_adapters(program: Program, leaves: Sequence[Any]) -> list[Any]:
        values = list(leaves)
        for i, name in enumerate(named_leaves(base.params)):
            if (adapter := model.adapters.get(name)) is not None:
                axes = summed.get(adapter.a, ()), summed.get(adapter.b, ())
                more = [there[each] for each in adapter.added]
                values[i] = LowRank(there[name], more[0], more[1], adapter.scale, adapter.sides, axes, *more[2:])
        return _run(program, values)

    return run_traced(traced, with_adapters, base.params, base.state, *args, read=marked_program)


def _seen(model: Functional, read: Mapping[str, Any], name: str) -> Any:
    """A parameter as the model's code is traced with it: for int8 the shape of its floats, which are not made."""
    adapter = model.adapters.get(name)
    if adapter is None or adapter.column_scales is None:
        return read[name]
    whole = functools.partial(dequantized, sides=adapter.sides)
    return jax.eval_shape(whole, read[name], read[adapter.column_scales])


def _run(program: Program, values: Sequence[Any]) -> list[Any]:
    """Run a program on values some of which are `LowRank`."""
    return [_merged(value) for value in run_program(program, values, _at)]


def _at(equation: Equation, given: list[Any]) -> Sequence[Any] | None:
    if not any(isinstance(value, LowRank) for value in given):
        return None
    op = equation.op
    with op.scope():
        if op.name == "convert_element_type" or op.name in CASTS:
            return [given[0].cast(op)]
        if op.name == "dot_general" and (made := _product(equation, given)) is not None:
            return [made]
        if op.name == "ragged_dot_general" and (made := _ragged(equation, given)) is not None:
            return [made]
        if op.scan is not None:
            return _scanned(equation, given)
        if op.checkpointed is not None:
            return _checkpointed(equation, given)
        if op.called is not None and (called := equation.called) is not None:
            return _run(called, given)
        return op.bind([_merged(value) for value in given])


def _product(equation: Equation, given: list[Any]) -> jax.Array | None:
    """Computes x W + scale (x A) B, or the product from the left; None if the product does not sum over one side of W alone."""
    op, right = equation.op, isinstance(given[1], LowRank)
    own, other = (given[1], given[0]) if right else (given[0], given[1])
    if isinstance(other, LowRank):
        return None
    contracted, batched = (dims[::-1] if right else dims for dims in op.contraction)
    lead = tuple(range(own.sides.stacked))
    sides = {role: own.sides.dims(role) for role in "io"}
    role = next((role for role, dims in sides.items() if sorted(contracted[0]) == list(dims)), None)
    if sorted(batched[0]) != list(lead) or role is None:
        return None
    y = own.product(lambda other, own: op.bind([other, own] if right else [own, other])[0], other)
    first, second, over, rank = _in_turn(own, role)
    over = tuple(over[sides[role].index(dim)] for dim in contracted[0])
    precision = op.options["precision"]

    def dot(left: Any, right_: Any, contract: tuple, batch: tuple) -> jax.Array:
        return jax.lax.dot_general(left, right_, (contract, batch), precision=precision)

    if right:
        inner = dot(other, first, (contracted[1], over), (batched[1], batched[0]))
        more = dot(inner * own.scale, second, ((inner.ndim - 1,), (rank,)), (lead, batched[0]))
    else:
        inner = dot(first, other, (over, contracted[1]), batched)
        more = dot(second, inner * own.scale, ((rank,), (len(lead),)), (batched[0], lead))
    return y + more.astype(y.dtype)


def _in_turn(own: LowRank, role: str) -> tuple[Any, Any, tuple[int, ...], int]:
    """The adapter that is multiplied first with its contracted dims, the second one, and the dim of the rank r.

    Args:
      own: A [*stack, *in, r] and B [*stack, r, *out].
      role: the side of W that is summed over: A's, or B's.
    """
    a, b = (x.astype(own.dtype) for x in own.adapters)
    stacked = own.sides.stacked
    over_a, over_b = tuple(range(stacked, a.ndim - 1)), tuple(range(stacked + 1, b.ndim))
    return (a, b, over_a, stacked) if role == "i" else (b, a, over_b, a.ndim - 1)


def _ragged(equation: Equation, given: list[Any]) -> jax.Array | None:
    """The same as `_product` for a ragged product of rows sorted by matrix; None for any other ragged product."""
    rows, own, counts = given
    dims = equation.op.options["ragged_dot_dimension_numbers"]
    plain = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
    if not isinstance(own, LowRank) or isinstance(rows, LowRank) or own.sides.roles != "io" or str(dims) != str(plain):
        return None
    y = own.product(lambda rows, own: equation.op.bind([rows, own, counts])[0], rows)
    a, b = (x.astype(own.dtype) for x in own.adapters)
    inner = jax.lax.ragged_dot(rows, a, counts) * own.scale
    return y + jax.lax.ragged_dot(inner, b, counts).astype(y.dtype)


def _scanned(equation: Equation, given: list[Any]) -> list[Any]:
    scan, body = equation.op.scan, equation.body
    assert scan is not None and body is not None
    first = scan.first_scanned
    consts, carry = given[: scan.num_consts], [_merged(value) for value in given[scan.num_consts : first]]
    stacks = [_sliceable(value) for value in given[first:]]

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        own = [*map(_again, consts), *carry, *(_on(old, new) for old, new in zip(stacks, slices, strict=True))]
        results = _run(body, own)
        return results[: scan.num_carry], results[scan.num_carry :]

    carry, ys = jax.lax.scan(step, carry, [_leaves(value) for value in stacks], **scan.options)
    return [*carry, *ys]


def _checkpointed(equation: Equation, given: list[Any]) -> list[Any]:
    view, body = equation.op.checkpointed, equation.body
    assert view is not None and body is not None

    def call(*values: Any) -> list[Any]:
        return _run(body, [_on(old, new) for old, new in zip(given, values, strict=True)])

    return jax.checkpoint(call, **view.options)(*map(_leaves, given))


def _sliceable(value: Any) -> Any:
    """An operand of a scan: a stack keeps its adapters; a single matrix, whose rows are scanned over, is merged."""
    return _merged(value) if isinstance(value, LowRank) and not value.sides.stacked else value


def _merged(value: Any) -> Any:
    return value.merged if isinstance(value, LowRank) else value


def _leaves(value: Any) -> Any:
    return value.leaves if isinstance(value, LowRank) else value


def _on(old: Any, new: Any) -> Any:
    return old.on(new) if isinstance(old, LowRank) else new


def _again(value: Any) -> Any:
    """Copy a value for an inner trace, which must not share what it caches."""
    return value.on(value.leaves) if isinstance(value, LowRank) else value
