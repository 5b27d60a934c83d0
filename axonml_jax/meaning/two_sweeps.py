"""Two sweeps over microbatches, for a loss that needs what the model makes of all rows at once.

The first sweep runs the model on every microbatch and keeps what it returns; the loss is taken of all rows, and differentiated
by these results. The second runs the model again and gives every microbatch the gradients of its results (GradCache, Gao et al.
2021). The price is one more forward, and the results of all microbatches in memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.compat.model_call import PRIMITIVE as MODEL_CALL
from axonml_jax.meaning.following import calls_model
from axonml_jax.meaning.interpreter import Interpreter
from axonml_jax.meaning.model_call import RealCalls, Share, no_mean, summand
from axonml_jax.meaning.places import SUM, Places, Split, local_outer
from axonml_jax.meaning.values import Ranks, Value
from axonml_jax.model.loss import Loss, WeightedMean
from axonml_jax.program.program import Atom, Program, made_by, names_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Swept:
    """The results of the first sweep: gradients by what the model made, and the loss.

    Attributes:
      results: the gradients of the loss by every floating result of the model's calls, [count, ...] each.
      read: by every floating value of the model that the loss reads beside its calls.
      loss: what this rank adds to the loss's sums, and to those of its metrics.
    """

    results: list[jax.Array]
    read: list[jax.Array]
    loss: Loss


class Recording(RealCalls):
    """Makes the model's calls, and keeps their results.

    Attributes:
      arrays: the results, call by call.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.arrays: list[jax.Array] = []

    def made(self, number: int, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Makes a call and keeps its results."""
        made = super().made(number, arrays)
        self.arrays += made
        return made


def calls_of(program: Program) -> list[int]:
    """The numbers of all results of the model's calls, call by call."""
    return [number for equation in program.equations if equation.name == MODEL_CALL for number in equation.outputs]


def read_beside(program: Program, wanted: Sequence[Atom], fixed: int) -> list[int]:
    """The model's variables, the first `fixed` inputs, that the wanted values need beside the model's calls, by number."""
    needed = made_by(program.equations, wanted, calls_of(program))
    read = {number for equation in needed for number in equation.read} | set(names_of(wanted))
    return [k for k, number in enumerate(program.inputs[:fixed]) if number in read]


def of_variables(program: Program, atom: Atom, fixed: int) -> bool:
    """Whether a value is made of the model's variables, the first `fixed` inputs, alone: of no call and no row."""
    needed = made_by(program.equations, [atom])
    read = {number for equation in needed for number in equation.read} | set(names_of([atom]))
    return not any(map(calls_model, needed)) and read.isdisjoint(program.inputs[fixed:])


def floating(arrays: Sequence[Any]) -> list[Any]:
    """The arrays that have gradients: those of floating dtypes."""
    return [x for x in arrays if _moves(x)]


def _moves(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def of_all_rows(
    program: Program,
    wanted: tuple[Loss, Sequence[Atom]],
    values: Sequence[Value],
    read: Mapping[int, jax.Array],
    results: Sequence[jax.Array],
    places: Sequence[Places],
    shares: Sequence[Sequence[Share | None]],
    ranks: Ranks,
) -> tuple[Swept, list[jax.Array]]:
    """Computes the loss of all rows from the model's results, and its gradients by these; and other values of all rows.

    Args:
      program: the loss at the whole batch's shape.
      wanted: the loss as values of the program, and the others.
      values: its inputs, of all this rank's rows.
      read: the variables that are read beside the model's calls, by their place among the values.
      results: the results of the model's calls, [count, ...] each.
      places: the places of these results, for all microbatches of all ranks, and for positions.
      shares: how they are made of the ranks' where they are sums over them.
      ranks: the ranks.

    Communicates: what the loss's meaning needs, and its transpose.
    """
    numbers = calls_of(program)
    at = dict(zip(numbers, zip(places, shares, strict=True), strict=True))
    moves = [_moves(x) for x in results]
    fixed = {n: x for n, x, own in zip(numbers, results, moves, strict=True) if not own}
    differentiated = [n for n, own in zip(numbers, moves, strict=True) if own]
    of_loss, others = wanted
    atoms, treedef = jax.tree.flatten(of_loss)

    def total(results: list[jax.Array], beside: list[jax.Array]) -> tuple[jax.Array, tuple[Loss, list[jax.Array]]]:
        stacks = fixed | dict(zip(differentiated, results, strict=True))
        known = {n: _joined(stacks[n], program.avals[n], *at[n], ranks) for n in numbers}
        given, own = list(values), iter(beside)
        for k, x in read.items():
            given[k] = ranks.held(next(own) if _moves(x) else x, given[k].places, given[k].shape)
        made = Interpreter(ranks).run(program, given, known, wanted=[*atoms, *others])
        loss = treedef.unflatten(map(ranks.rows_as_sum, made[: len(atoms)]))
        return loss.total, (loss, [ranks.settled(value, ranks.none) for value in made[len(atoms) :]])

    moving = [x for x, own in zip(results, moves, strict=True) if own]
    value, back, (sums, made) = jax.vjp(total, moving, floating(list(read.values())), has_aux=True)
    of_results, of_read = back(ranks.vary(jnp.ones((), value.dtype)))
    return Swept(of_results, of_read, sums), made


def _joined(stack: jax.Array, aval: Any, places: Places, shares: Sequence[Share | None], ranks: Ranks) -> Value:
    """Joins results of microbatches along their dim of rows; floating ones without rows are averaged."""
    if None in places:
        return Value(aval.shape, aval.dtype, ranks.none, lambda _: no_mean(aval))
    held = tuple(None if group.ranks == 1 else place for group, place in zip(ranks.groups, places, strict=True))
    rows = places[0]
    array = _in_rows(stack, rows, places, ranks) if isinstance(rows, Split) else stack.mean(0)
    shares = (Fraction(1, ranks.groups[0].ranks), *shares[1:])  # microbatches are averaged
    if SUM not in held:
        return ranks.held(array, held, aval.shape)
    return Value(aval.shape, aval.dtype, held, lambda _: ranks.vary(summand(array, held, shares, ranks)))


def _in_rows(stack: jax.Array, rows: Split, places: Places, ranks: Ranks) -> jax.Array:
    """Joins a stack of microbatches along the dim of rows, inside of dims that are merged with it further out."""
    own, dim, outer = stack.shape[1:], rows.dim, local_outer(places, ranks.groups, 0)
    seen = stack.reshape(len(stack), *own[:dim], outer, own[dim] // outer, *own[dim + 1 :])
    return jnp.moveaxis(seen, 0, dim + 1).reshape(*own[:dim], -1, *own[dim + 1 :])


def second(swept: Swept, number: jax.Array, results: Sequence[jax.Array], beside: Sequence[jax.Array]) -> jax.Array:
    """The scalar that one microbatch differentiates: every result times its gradient; for values read beside, once."""
    once = sum(map(_times, swept.read, floating(beside)), jnp.zeros(()))
    return sum(map(_times, swept.results, floating(results)), jnp.where(number == 0, once, 0))


def _times(gradient: jax.Array, x: jax.Array) -> jax.Array:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.sum((gradient.astype(wide) * x.astype(wide)).real)


def first_only(
    loss: Loss, number: jax.Array, one: jax.Array, loss_name: str, weight_name: str
) -> dict[str, WeightedMean]:
    """The sums of the loss and its metrics, as metrics that the first microbatch alone adds to.

    Args:
      loss: what this rank adds.
      number: which microbatch it is.
      one: what this rank and microbatch adds to a weight that sums to one.
      loss_name, weight_name: the names of the loss's total and its weight.
    """
    kept = jax.tree.map(lambda x: jnp.where(number == 0, x, jnp.zeros_like(x)), loss)
    metrics = {**kept.metrics, loss_name: WeightedMean(kept.total, one)}
    return metrics if loss.weight is None else metrics | {weight_name: WeightedMean(kept.weight, one)}


def finished(metrics: Mapping[str, jax.Array], loss_name: str, weight_name: str) -> tuple:
    """The loss, its metrics and the factor of gradients, from the metrics that ranks summed."""
    kept = {name: value for name, value in metrics.items() if name not in (loss_name, weight_name)}
    total, weight = metrics[loss_name], metrics.get(weight_name)
    return (total, kept, None) if weight is None else (total / weight, kept, 1 / weight)
