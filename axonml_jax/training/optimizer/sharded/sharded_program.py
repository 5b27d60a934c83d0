"""An update of parameters as a program of what ranks hold: element by element, and sums over all elements in between.

`read_update` makes one of the traced update. A rank runs the steps of the parameters of which it holds something, and those of
values that are the same on all ranks; a total (a sum, a maximum or a minimum over all elements of an array) is joined over
the ranks that hold parts of it, all totals of a round at once.
"""

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.collectives.primitives import axis_index, max_over, min_over, sum_over
from axonml_jax.collectives.varying import vary
from axonml_jax.sharding.layout import Layout
from axonml_jax.training.optimizer.sharded.bind_typed import typed_alike
from axonml_jax.training.optimizer.sharded.matrices import MatrixWork, on_owners

Held = Mapping[int, Any]
"""Arguments that a rank holds parts of, by position."""

OnRank = Callable[[Callable[[Held], Any]], Any]
"""Runs a function of what this rank holds; along a pipeline ranks hold different arguments."""

_JOIN = {"sum": sum_over, "max": max_over, "min": min_over}


@dataclass(frozen=True)
class UpdateStep:
    """One operation of an update.

    Attributes:
      run: from the values it reads to those it makes; of a total what one rank's elements come to.
      inputs, outputs: what it reads and makes.
      owner: the parameter (position) whose elements it acts on; None: the same on all ranks.
      level: how many rounds of totals come before it.
      total: how the ranks' values are joined ("sum", "max", "min"); None: they are not.
      dtype: of a total.
      kind: what it does to each element, whatever the shape; None: it may do anything.
      work: what it does to the whole of the parameter, on the rank that gathers it; None: it acts on parts.
    """

    run: Callable[[Sequence[Any]], Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    owner: int | None
    level: int
    total: str | None = None
    dtype: Any = None
    kind: Hashable = None
    work: MatrixWork | None = None

    @property
    def communicates(self) -> bool:
        """Whether ranks meet for it."""
        return self.total is not None or self.work is not None


@dataclass(frozen=True)
class ShardedProgram:
    """A function of arguments of which every rank holds parts, or some, or all.

    Attributes:
      steps: in order.
      inputs: the numbers of its arguments.
      outputs: what it returns.
      owners: of every argument, then of every result, the parameter that it belongs to, or None.
      constants: by number.
      layouts: of every parameter.
      pipe: axes along which ranks hold different parameters.
    """

    steps: tuple[UpdateStep, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    owners: tuple[tuple[int | None, ...], tuple[int | None, ...]]
    constants: Mapping[int, Any]
    layouts: tuple[Layout, ...]
    pipe: tuple[str, ...]

    @property
    def communicates(self) -> bool:
        """Whether ranks meet in it."""
        return any(step.communicates for step in self.steps)

    def run(
        self, whole: Held, on_rank: OnRank, finish: Callable[[dict[int, Any]], Any], on_runs: OnRank | None = None
    ) -> tuple[Any, dict[int, Any]]:
        """Run it inside `shard_map`.

        Args:
          whole: the arguments that are the same on all ranks, by position.
          on_rank: what runs a function of the arguments that this rank holds parts of.
          finish: makes of a rank's results, by position, something of the same type on all ranks.
          on_runs: the same for the results, where one parameter may stand for several (`runs.py`); None: `on_rank`.

        Returns:
          What `finish` made, and the results that are the same on all ranks, by position.

        Communicates: one all-reduce of scalars per round of totals, kind of join, and axes that split what is joined; for
        work on whole matrices see `on_owners`.
        """
        env = dict(self.constants) | {self.inputs[i]: value for i, value in whole.items()}
        for level in range(1 + max((step.level for step in self.steps), default=0)):
            _run((step for step in self.steps if step.owner is None and step.level == level), env)
            if not self.pipe:  # else every rank does the work of its own parameters where it needs the results
                env |= on_rank(functools.partial(self._worked, self._works(level), env))
            for group in self._groups(step for step in self.steps if step.total and step.level == level):
                parts = on_rank(functools.partial(self._parts, group, env))
                joined = _JOIN[group[0].total or ""](parts, self._axes(group[0]))
                env |= {step.outputs[0]: joined[k] for k, step in enumerate(group)}
        mine = (on_runs or on_rank)(lambda held: finish(self._results(env, held)))
        loose = [i for i, owner in enumerate(self.owners[1]) if owner is None]
        return mine, {i: env[self.outputs[i]] for i in loose}

    def _works(self, level: int) -> list[UpdateStep]:
        return [step for step in self.steps if step.work is not None and step.level == level]

    def _worked(self, works: Sequence[UpdateStep], env: Mapping[int, Any], held: Held) -> dict[int, jax.Array]:
        """The results of whole-matrix works that do not wait for each other; works that are alike send together."""
        own = self._made([number for step in works for number in step.inputs], env, held)
        return self._exchanged(works, own)

    def _exchanged(self, works: Sequence[UpdateStep], own: Mapping[int, Any]) -> dict[int, jax.Array]:
        groups: dict[Hashable, list[UpdateStep]] = {}
        for step in works:
            assert step.work is not None
            groups.setdefault(step.work.like, []).append(step)
        made = {}
        for first, *others in groups.values():
            assert first.work is not None and first.owner is not None
            given = [[own[number] for number in step.inputs] for step in (first, *others)]
            results = on_owners(first.work, self.layouts[first.owner], given)
            made |= {step.outputs[0]: result for step, result in zip((first, *others), results, strict=True)}
        return made

    def _results(self, env: Mapping[int, Any], held: Held) -> dict[int, Any]:
        """The results that belong to parameters of which this rank holds something."""
        present = self._present(held)
        mine = [i for i, owner in enumerate(self.owners[1]) if owner in present]
        own = self._made([self.outputs[i] for i in mine], env, held)
        return {i: own[self.outputs[i]] for i in mine}

    def _parts(self, totals: Sequence[UpdateStep], env: Mapping[int, Any], held: Held) -> jax.Array:
        """What this rank's elements come to, of every total; [len(totals)]."""
        present = self._present(held)
        own = self._made([n for step in totals for n in step.inputs if step.owner in present], env, held)
        values = []
        for step in totals:
            empty = jnp.asarray(neutral(step.total, step.dtype))
            if step.owner is None or step.owner not in present:
                values.append(empty)
                continue
            (x,) = (own[number] for number in step.inputs)
            values += step.run([_within(jnp.asarray(x), self.layouts[step.owner], empty)])
        return jnp.stack([vary(value, self._axes(totals[0])) for value in values])

    def _made(self, wanted: Iterable[int], env: Mapping[int, Any], held: Held) -> dict[int, Any]:
        """Values with the wanted ones, made of what this rank holds."""
        own = dict(env) | {self.inputs[i]: value for i, value in held.items()}
        needed, chosen, present = set(wanted), [], self._present(held)
        for step in reversed(self.steps):
            here = not step.communicates or (step.work is not None and bool(self.pipe))
            if step.owner in present and here and needed.intersection(step.outputs):
                needed.update(step.inputs)
                chosen.append(step)
        for level in sorted({step.level for step in chosen}):
            now = [step for step in reversed(chosen) if step.level == level]
            _run((step for step in now if step.work is None), own)
            own |= self._exchanged([step for step in now if step.work is not None], own)
        return own

    def _present(self, held: Held) -> Collection[int]:
        return {owner for i in held if (owner := self.owners[0][i]) is not None}

    def _axes(self, total: UpdateStep) -> tuple[str, ...]:
        assert total.owner is not None
        return (*self.pipe, *self.layouts[total.owner].axes)

    def _groups(self, totals: Iterable[UpdateStep]) -> list[list[UpdateStep]]:
        """Totals that are joined at once."""
        groups: dict[Any, list[UpdateStep]] = {}
        for step in totals:
            groups.setdefault((step.total, self._axes(step), jnp.dtype(step.dtype)), []).append(step)
        return list(groups.values())


def neutral(total: str | None, dtype: Any) -> np.ndarray:
    """What a rank without elements adds to a total."""
    if total == "sum":
        return np.zeros((), dtype)
    floating = jnp.issubdtype(dtype, jnp.floating)
    info = None if floating else jnp.iinfo(dtype)
    least, most = (-np.inf, np.inf) if info is None else (info.min, info.max)
    return np.asarray(least if total == "max" else most, dtype)


def _within(x: jax.Array, layout: Layout, empty: jax.Array) -> jax.Array:
    """A rank's elements without those that only pad it."""
    if not layout.axes:
        return x
    if not layout.shape:  # one element per rank, of which the first is meant
        return jnp.where(axis_index(layout.axes) == 0, x, empty.astype(x.dtype))
    for dim, (size, more) in enumerate(zip(layout.shape, layout.stored, strict=True)):
        if more > size:
            start = axis_index(layout.axes_of(dim)) * layout.shard[dim]
            inside = start + jax.lax.broadcasted_iota(jnp.int32, x.shape, dim) < size
            x = jnp.where(inside, x, empty.astype(x.dtype))
    return x


def _run(steps: Iterable[UpdateStep], env: dict[int, Any]) -> None:
    for step in steps:
        env.update(zip(step.outputs, step.run(typed_alike([env[number] for number in step.inputs])), strict=True))
