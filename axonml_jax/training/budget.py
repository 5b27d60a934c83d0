"""Choosing what units recompute so that a step fits into a number of bytes: choose, compile, measure, choose again."""

import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from axonml_jax.base import bytes_meant, size_in_words
from axonml_jax.cost.memory import SENDS
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.recompute import Recompute, WithinBytes
from axonml_jax.program.recompute import Rates
from axonml_jax.training.compile import Compiled

logger = logging.getLogger(__name__)

_RATES = {
    "cpu": Rates(1e11, 2e10, 1e10),
    "gpu": Rates(5e14, 3e12, 2e11, host=5e14 * SENDS["cuda"]),
    "tpu": Rates(2e14, 1e12, 1e11, host=2e14 * SENDS["tpu"]),
}
"""Speeds of devices by platform, in round numbers: only how work compares with traffic decides. XLA for CPUs sends nothing."""

_HALVED, _MUCH_LEFT = 2, 0.8
"""The most choices that are compiled between what fits and what does not, and the share of the budget above which none is."""

_AND_SOME = 1.25
"""By how much more than the last two choices suggest the next one's allowance is lowered."""

_NEAR = 0.95
"""A choice whose peak fills this share of the budget, or that recomputes nothing, is not made again."""


def budget_of(memory: str | float, mesh: Mesh) -> int:
    """The bytes of a device that a plan's `memory` allows a step.

    Raises:
      ValueError: for a share of a device that does not say how much it has.
    """
    size = bytes_meant(memory) if isinstance(memory, str) else memory
    if size > 1:
        return int(size)
    device = mesh.local_devices[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if not limit:
        raise ValueError(
            f"memory={memory!r} is a share of a device, and {device.device_kind} does not say how much memory it has: give "
            "bytes, as memory='16GiB'"
        )
    return int(size * limit)


def peak_of(compiled: Any) -> int:
    """Peak bytes of a device by the compiler's plan: arguments, results that reuse no argument's buffer, temporaries."""
    found = compiled.memory_analysis()
    own = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return int(own + found.temp_size_in_bytes)


def foreseen(placement: Placement, mesh: Mesh, args: tuple) -> Placement:
    """The placement of a step whose recomputation is chosen within its plan's `memory` from a trace alone, uncompiled.

    The compiler of a machine that is not the one to train on says nothing about the peak. Where `memory` is a share of a
    device, whose size is not known here, nothing is recomputed.

    Args:
      placement: the placement of a plan with `memory`, or any other, which comes back as it is.
      mesh: the mesh that the step is traced for.
      args: the step's arguments, arrays or shapes.
    """
    plan = placement.plan
    if plan.memory is None:
        return placement
    size = bytes_meant(plan.memory) if isinstance(plan.memory, str) else plan.memory
    remat = WithinBytes(int(size) - _resting(args), _RATES[_platform(mesh)], host=size) if size > 1 else None
    return replace(placement, plan=replace(plan, memory=None, remat=remat))


class Budgeted:
    """Stands for a step's `Compiled`: chooses and compiles, for arrays of each kind, the program that fits the plan's `memory`.

    What is chosen from a trace is compiled, and the compiler's plan is read. Where it is above the budget, or leaves much of it
    while work is repeated, the choice is made again with the difference; where that is above it too, once more. Where all are
    above it, what holds least is compiled, then `remat="full"`: one fits, or the budget is refused. Where what fits fills less
    than four fifths of it, up to two choices between that and the one above are compiled.

    Args:
      step: a `TrainStep`, whose plan has `memory`.
      mesh: the mesh that it runs on.
      accept: called with the program that is taken, before it first runs.
      options: options of `jax.jit`.

    Attributes:
      found: what the program of the last call keeps (`Recompute`); "full" where only that fits.
    """

    def __init__(self, step: Any, mesh: Mesh, accept: Callable[[Any], None] | None, **options: Any):
        self._step = step
        self._mesh = mesh
        self._accept = accept
        self._options = options
        self._known: dict[Any, tuple[Any, Compiled]] = {}
        self._fronts: dict[Any, Any] = {}
        self.found: Recompute | str | None = None

    def __call__(self, *args: Any) -> Any:
        """Runs the program that fits, choosing it first for arrays of a new kind."""
        return self._of(args)(*args)

    def inlined(self, *args: Any) -> Any:
        """Refuse to be a part of another program.

        Raises:
          TypeError: with the remedy.
        """
        raise TypeError(
            "memory= measures the step's compiled program, which does not exist inside jax.jit or jax.lax.scan: call the step "
            "in a Python loop, or give the choice that it made, remat=trainer.recompute"
        )

    def trace(self, *args: Any) -> Any:
        """Traces the program that fits, as `jax.jit` does."""
        return self._of(args).trace(*args)

    def as_written(self, *args: Any) -> Any:
        """The traced program without the passes for CPUs (`Compiled.as_written`)."""
        return self._of(args).as_written(*args)

    def lower(self, *args: Any) -> Any:
        """Lowers the program that fits, as `jax.jit` does."""
        return self._of(args).lower(*args)

    @property
    def compilations(self) -> int:
        """How many programs were compiled for calls."""
        return sum(compiled.compilations for _, compiled in self._known.values())

    def _of(self, args: tuple) -> Compiled:
        leaves, treedef = jax.tree.flatten(args)
        like = treedef, *((x.shape, x.dtype) for x in leaves)
        if like not in self._known:
            self._known[like] = self._decided(args, budget_of(self._step.placement.plan.memory, self._mesh))
        self.found, compiled = self._known[like]
        return compiled

    def _decided(self, args: tuple, budget: int) -> tuple[Any, Compiled]:
        tried = self._chosen(args, budget)
        fitting = [each for each in tried if each[1] <= budget]
        if not fitting:
            _, smallest, _, _ = min(tried, key=lambda each: each[1])
            raise ValueError(
                f"memory={self._step.placement.plan.memory!r}: this step needs at least {size_in_words(smallest)} "
                f"({smallest:,} bytes) of a device even if it recomputes all that it can, and {budget:,} were given: give "
                "that much, smaller microbatches (accumulate=), or a plan that splits more (ax.FSDP, more devices)"
            )
        found, peak, compiled, program = min(
            fitting, key=lambda each: (each[0].seconds if _priced(each[0]) else 0.0, each[1])
        )
        logger.info("a step of %s in %s keeps\n%s", size_in_words(peak), size_in_words(budget), found)
        if self._accept is not None:
            self._accept(program)
        return found, compiled

    def _chosen(self, args: tuple, budget: int) -> list[tuple]:
        """The choices that were compiled, in order: the first one, one or two more, and the one that holds least."""
        within = partial(self._within, args, budget)
        tried = [within(budget - _resting(args))]
        staged = self._step.placement.stages is not None
        if staged and tried[0][1] > budget and all(unit.keep is None for unit in tried[0][0].units):
            within = partial(within, as_one=False)  # a stage block by block holds less, and need repeat nothing
            tried = [within(budget - _resting(args))]
        for _ in range(2):
            found, peak, _, _ = tried[-1]
            near = peak > _NEAR * budget or found.seconds == 0 or len(tried) > 1
            # What a choice was predicted to hold, with the difference of what the compiler makes of it and the budget. The
            # compiler's peak need not fall with it as far: the last one holds less by as much as it fell before, and some.
            aim = found.live + budget - peak
            aim = aim if len(tried) == 1 else min(aim, _steeper(tried[-2], tried[-1], budget))
            again = None if peak <= budget and near else within(aim, tried)
            if again is None and peak > budget:  # so little less is the same choice
                again = within(found.live * 15 // 16, tried)
            if again is None:
                break
            tried.append(again)
        fits = lambda: any(each[1] <= budget for each in tried)
        if not fits() and (smallest := within(0, tried)):
            tried.append(smallest)
        if not fits():  # by a few bytes it may hold less than what was chosen to hold least
            return [*tried, self._measured("full", self._with("full"), args)]
        return [*tried, *self._between(within, tried, budget)]

    def _between(self, within: Callable[..., Any], tried: Sequence[tuple], budget: int) -> list[tuple]:
        """Bisects between the best choice that fits and the next above the budget, where the first leaves much unused."""
        fitting, above = [each for each in tried if each[1] <= budget], [each for each in tried if each[1] > budget]
        found: list[tuple] = []
        if not above:
            return found
        best, peak, _, _ = min(fitting, key=lambda each: each[0].seconds)
        low, high = best.live, min(each[0].live for each in above)
        while best.seconds > 0 and peak < _MUCH_LEFT * budget and low < high and len(found) < _HALVED:
            middle = (low + high) // 2
            again = within(middle, [*tried, *found])
            if again is None:
                break
            found.append(again)
            low, high = (middle, high) if again[1] <= budget else (low, min(middle, again[0].live))
        return found

    def _within(
        self, args: tuple, budget: int, allowance: int, known: Sequence[tuple] = (), *, as_one: bool = True
    ) -> Any:
        """Makes and compiles the choice for an allowance: (choice, peak, `Compiled`, program); None: it is known.

        At most `budget` bytes are sent to host memory: a host is taken to have that much for each of its devices.
        """
        rates = _RATES[_platform(self._mesh)]
        chooser = WithinBytes(allowance, rates, self._fronts, host=budget, as_one=as_one)
        compiled = self._with(chooser)
        compiled.trace(*args)  # asks it; the program that is compiled is of the same trace
        assert isinstance(chooser.found, Recompute)
        if any(chooser.found == each[0] for each in known):
            return None
        return self._measured(chooser.found, compiled, args)

    def _measured(self, remat: Any, compiled: Compiled, args: tuple) -> tuple:
        program = compiled.compile(*args)
        return remat, peak_of(program), compiled, program

    def _with(self, remat: Any) -> Compiled:
        """Compiles the step under its plan with this recomputation."""
        own, placement = copy.copy(self._step), self._step.placement
        own.placement = replace(placement, plan=replace(placement.plan, memory=None, remat=remat))
        return Compiled(own._mapped, self._mesh, lambda program: None, **self._options)


def _steeper(before: Any, last: Any, budget: int) -> int:
    """The allowance of the next choice after two above the budget, from how the compiler's peak fell between them."""
    live = last[0].live
    fell, of = before[1] - last[1], before[0].live - live
    down = _AND_SOME * (last[1] - budget) * of / fell if of * fell > 0 else math.inf
    return max(live - int(min(down, live)), live * 3 // 4)


def _priced(found: Any) -> bool:
    return isinstance(found, Recompute)


def _platform(mesh: Mesh) -> str:
    platform = mesh.devices.flat[0].platform
    return platform if platform in _RATES else "gpu"


def _resting(args: tuple) -> int:
    """Bytes of a device that arguments take."""
    total = 0
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        shape = sharding.shard_shape(leaf.shape) if sharding is not None else leaf.shape
        itemsize = 8 if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize
        total += math.prod(shape) * itemsize
    return total
