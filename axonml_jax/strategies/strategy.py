"""The contract of strategies: a parameter's layout along a mesh axis, the axis's role, and what is sent."""

import abc
import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar, get_args

import jax
import jax.numpy as jnp

from axonml_jax.base import PyTree
from axonml_jax.collectives.primitives import axis_index, axis_size, bound, sum_over, vary
from axonml_jax.mesh.axes import AxisNames, as_axes
from axonml_jax.model.view import Functional
from axonml_jax.sharding.batch import second_dim
from axonml_jax.sharding.layout import Layout, Order, order_parts

# --------------------------------------------------------------------------------------------------
# By which method attention reads the keys and values of other ranks.
# --------------------------------------------------------------------------------------------------

MethodName = Literal["auto", "gather", "ulysses", "ring"]

METHODS: tuple[MethodName, ...] = get_args(MethodName)

Method = MethodName | tuple[int, Literal["gather", "ring"]]
"""A name, or (U, "ring" or "gather"): Ulysses among U neighbours, a ring or an all-gather among their groups."""


def method_problem(method: object) -> str | None:
    """Returns why a value is no valid method; None where it is one."""
    if isinstance(method, str) and method in METHODS:
        return None
    if isinstance(method, (tuple, list)) and len(method) == 2:
        count, rest = method
        if isinstance(count, int) and not isinstance(count, bool) and count >= 1 and rest in ("gather", "ring"):
            return None
    return f"method={method!r} must be one of {', '.join(METHODS)}, or (U, 'ring') or (U, 'gather') for Ulysses among U ranks"


def heads_and_gathers(
    method: Method,
    *,
    ranks: int,
    heads: int,
    kv_heads: int,
    window: tuple[int, int] | None,
    causal: bool,
    places: int,
    order: Order,
) -> tuple[int, bool]:
    """Returns (U, gathers): how many ranks split heads, and whether their groups all-gather keys and values or use a ring.

    "auto" takes a ring where a window reaches no further than the neighbours' positions in contiguous order, else the cheaper
    in bytes of Ulysses and gathering: forward and backward send 4 (N-1)/N (h + g) and 6 (N-1) g elements per position (h, g:
    the widths of all query heads and of all key heads, which Ulysses repeats where there are fewer than ranks).

    Args:
      method: the user's, checked here.
      ranks: N.
      heads, kv_heads: the numbers of heads on this rank, all of which Ulysses splits.
      window, causal: what positions see.
      places: positions of a rank.
      order: the order in which ranks hold them.

    Raises:
      ValueError: for a value that is no method, for U that does not divide N, and for heads that U ranks cannot split, with
        the U that could.
    """
    if problem := method_problem(method):
        raise ValueError(problem)
    if method == "auto":
        near = window is not None and window[0] <= places and (causal or window[1] <= places)
        if near and order == "contiguous":
            return 1, False
        cheaper = 4 * (heads + max(kv_heads, ranks)) < 6 * ranks * kv_heads
        return (ranks, True) if cheaper and not unsplittable(ranks, heads, kv_heads) else (1, True)
    if isinstance(method, str):
        count, gathers = (ranks, True) if method == "ulysses" else (1, method == "gather")
    else:
        count, gathers = method[0], method[1] == "gather"
    if ranks % count:
        raise ValueError(f"method={method!r}: {count} must divide the {ranks} ranks that split positions")
    if problem := unsplittable(count, heads, kv_heads):
        able = [n for n in range(1, ranks + 1) if ranks % n == 0 and not unsplittable(n, heads, kv_heads)]
        raise ValueError(
            f"method={method!r} splits heads over {count} ranks: {problem}. Use method='gather' or 'ring', or "
            f"(U, 'ring') with U one of {able}"
        )
    return count, gathers


def unsplittable(count: int, heads: int, kv_heads: int) -> str | None:
    """The reason why `count` ranks cannot split heads; None where they can."""
    if heads % count:
        return f"{heads} query heads do not divide over them"
    if kv_heads % count and count % kv_heads:
        return f"{kv_heads} key and value heads are neither a multiple nor a divisor of {count}"
    return None


# --------------------------------------------------------------------------------------------------
# What connects the devices of a mesh, as far as defaults of strategies depend on it.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The devices of a mesh and their network.

    Attributes:
      devices: the number of the mesh's devices.
      torus: dims of the torus that TPU chips form; 0 for other devices.
      gloo: whether CPU processes talk over gloo, where many small reductions are slow.
    """

    devices: int
    torus: int = 0
    gloo: bool = False

    @classmethod
    def of(cls, devices: Sequence[Any]) -> "Fabric":
        """Reads the fabric of JAX devices."""
        processes = {device.process_index for device in devices}
        return cls(
            devices=len(devices), torus=_torus(devices), gloo=devices[0].platform == "cpu" and len(processes) > 1
        )


def _torus(devices: Sequence[Any]) -> int:
    if any(device.platform != "tpu" for device in devices):  # other devices may have coordinates of another meaning
        return 0
    return sum(len(set(along)) > 1 for along in zip(*(device.coords for device in devices), strict=True))


# --------------------------------------------------------------------------------------------------
# What a mesh axis does to the batch and to parameters, as the axis's strategy states it.
# --------------------------------------------------------------------------------------------------

Split = Literal["rows", "positions"] | None


@dataclass(frozen=True, kw_only=True)
class Role:
    """What a mesh axis does to the batch and to parameters. Only the axis's strategy states it.

    A layer that splits its own parameters returns complete gradients along its axes; all other gradients are summed over every
    axis that splits the batch.

    Attributes:
      batch: what of the batch the axis splits: "rows"; "positions", the dim of a leaf that the strategy's `position_dim` names;
        or None, where layers split parameters: its ranks share the batch. A strategy that owns several axes may give a tuple,
        one for each.
      parameters: how they rest: "whole" on every rank; "sharded", and gathered to be read; or as the model's own "layers"
        split them.
      reads: when a step reads them: at its "start", unit by unit at their "use" in forward and backward, or inside the
        "layers".
      reduces: when their gradients are reduced: once a "step", after every "microbatch", inside the "layers", or "never":
        every rank then trains a model of its own.
      keys: random keys along axes that split positions: ranks have their "own", so that the masks of a plain dropout
        differ; or they are "alike", for models that draw by global positions. Along axes that split rows they are own.

    Raises:
      ValueError: for an unknown value, or a combination that would be wrong; says why.
    """

    batch: Split | tuple[Split, ...] = "rows"
    parameters: Literal["whole", "sharded", "layers"] = "whole"
    reads: Literal["start", "use", "layers"] = "start"
    reduces: Literal["step", "microbatch", "layers", "never"] = "step"
    keys: Literal["own", "alike"] = "own"

    def __post_init__(self):
        each = self.batch if isinstance(self.batch, tuple) and self.batch else (self.batch,)
        problems = [
            f"{name}={getattr(self, name)!r} must be one of {choices}"
            for name, choices in _CHOICES.items()
            if name != "batch" and getattr(self, name) not in choices
        ]
        if any(split not in _CHOICES["batch"] for split in each):
            problems.append(f"batch={self.batch!r} must be one of {_CHOICES['batch']}, or a tuple of these")
        layers, sharded = self.parameters == "layers", self.parameters == "sharded"
        rules = {
            "layers that split parameters read them and reduce their gradients themselves: give all three or none": (
                len({layers, self.reads == "layers", self.reduces == "layers"}) > 1
            ),
            "ranks that share the batch have the same gradients, whose sum would be too large: batch='rows' or 'positions'": (
                None in each and not layers
            ),
            "ranks with the same keys draw the same masks for other rows: keys='alike' goes with batch='positions'": (
                self.keys == "alike" and "positions" not in each
            ),
            "what is read at its use, or reduced after every microbatch, rests sharded: parameters='sharded'": (
                not sharded and (self.reads == "use" or self.reduces == "microbatch")
            ),
            "what is read at its use is reduced after every microbatch: reduces='microbatch'": (
                self.reads == "use" and self.reduces != "microbatch"
            ),
            "ranks that train models of their own hold them whole: reduces='never' goes with parameters='whole'": (
                sharded and self.reduces == "never"
            ),
        }
        problems += [rule for rule, broken in rules.items() if broken and not problems]
        if problems:
            raise ValueError(f"{self}: {'; '.join(problems)}")

    def splits(self, axes: tuple[str, ...]) -> dict[str, Split]:
        """The part of the batch that each of the strategy's axes splits.

        Raises:
          ValueError: when the role names another number of axes.
        """
        if not isinstance(self.batch, tuple):
            return dict.fromkeys(axes, self.batch)
        if len(self.batch) != len(axes):
            raise ValueError(f"{self} says what {len(self.batch)} axes split, but the strategy has {len(axes)}: {axes}")
        return dict(zip(axes, self.batch, strict=True))


_CHOICES = {
    "batch": ("rows", "positions", None),
    "parameters": ("whole", "sharded", "layers"),
    "reads": ("start", "use", "layers"),
    "reduces": ("step", "microbatch", "layers", "never"),
    "keys": ("own", "alike"),
}


# --------------------------------------------------------------------------------------------------
# `Transfer`: one collective by which a strategy moves one leaf, as it says before anything is traced.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective by which a strategy moves one leaf.

    Attributes:
      kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "permute".
      elements: the number of elements of the full array: what an all-gather returns, a reduce-scatter takes.
      ranks: the number of ranks that take part.
      dtype: the dtype on the wire.
      padding: how many of the elements are padding.
    """

    kind: str
    elements: int
    ranks: int
    dtype: Any
    padding: int = 0

    def in_hops(self, hop: int | None) -> "tuple[Transfer, ...]":
        """A gather or reduce-scatter in two hops: across the groups of `hop` neighbours, and among them; None or 1: in one."""
        if hop is None or hop in (1, self.ranks):
            return (self,)
        across = self.ranks // hop
        return replace(self, ranks=across), replace(self, ranks=hop, elements=self.elements // across, padding=0)


# --------------------------------------------------------------------------------------------------
# Wrap policies: which parts of a model are units, whose weights are gathered together and freed again.
# --------------------------------------------------------------------------------------------------

Wrap = type | str | Sequence[type | str] | Callable[[str], bool] | None
"""None: repeated blocks. A module type or several; regular expressions of module paths; a predicate of the module path."""


def checked_wrap(wrap: Wrap) -> Any:
    """Checks a wrap policy and returns it as None, a predicate, or a tuple of types and patterns.

    Raises:
      TypeError: when it is none of those.
      ValueError: when a pattern is no regular expression.
    """
    if wrap is None or (callable(wrap) and not isinstance(wrap, type)):
        return wrap
    rules = (wrap,) if isinstance(wrap, (type, str)) else tuple(wrap) if isinstance(wrap, Iterable) else (wrap,)
    if not rules or not all(isinstance(rule, (type, str)) for rule in rules):
        raise TypeError(
            f"wrap={wrap!r} names no parts of a model: give None for repeated blocks, a module type, a regular expression of "
            "module paths (or several), or a predicate of the module path"
        )
    for rule in rules:
        try:
            re.compile(rule if isinstance(rule, str) else "")
        except re.error as error:
            raise ValueError(f"wrap={rule!r} is no regular expression: {error}") from error
    return rules


def units(names: Sequence[str], wrap: Any, module_types: Mapping[str, type]) -> dict[str, list[int]]:
    """Finds the units of a model, and the leaves of each.

    Args:
      names: path name of every leaf, such as `blocks/0/attention/query/kernel`.
      wrap: a checked policy.
      module_types: the type of every module by its path; needed for policies of types.

    Returns:
      Positions in `names` by module path; a leaf is in the innermost unit around it, or in none.

    Raises:
      ValueError: when a policy matches no module.

    >>> units(["embed/kernel", "blocks/0/w", "blocks/1/w", "blocks/1/b"], None, {})
    {}
    >>> units(["embed/kernel", "blocks/0/w", "blocks/1/w"], None, {})
    {'blocks/0': [1], 'blocks/1': [2]}
    """
    paths = set(_repeated(names) if wrap is None else _matching(names, wrap, module_types))
    found: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        if (path := next((path for path in reversed(_around(name)) if path in paths), None)) is not None:
            found.setdefault(path, []).append(i)
    return found


def _around(name: str) -> list[str]:
    """The paths of the modules around a leaf or a module, outer ones first."""
    return [name[:end] for end, letter in enumerate(name) if letter == "/"]


def _modules(names: Iterable[str]) -> list[str]:
    """The path of every module that holds a leaf, outer ones first."""
    return sorted(dict.fromkeys(path for name in names for path in _around(name)), key=lambda path: path.count("/"))


def _repeated(names: Sequence[str]) -> list[str]:
    """Outermost modules that are numbered (`blocks/0`, `Block_0`) and have leaves of the same names as a sibling."""
    inside: dict[str, list[str]] = {path: [] for path in _modules(names)}
    for name in names:
        for path in _around(name):
            inside[path].append(name[len(path) :])
    families: dict[tuple, list[str]] = {}
    for path, leaves in inside.items():
        if numbered := re.fullmatch(r"(.*?)\d+", path):
            families.setdefault((numbered.group(1), tuple(sorted(leaves))), []).append(path)
    chosen: dict[str, None] = {}
    for paths in families.values():
        if len(paths) > 1:
            chosen |= dict.fromkeys(path for path in paths if chosen.keys().isdisjoint(_around(path)))
    return list(chosen)


def _matching(names: Sequence[str], wrap: Any, module_types: Mapping[str, type]) -> list[str]:
    paths = _modules(names)
    if not isinstance(wrap, tuple):
        chosen = [path for path in paths if wrap(path)]
    else:
        kinds = tuple(rule for rule in wrap if isinstance(rule, type))
        patterns = [rule for rule in wrap if isinstance(rule, str)]
        chosen = [
            path
            for path in paths
            if any(re.fullmatch(pattern, path) for pattern in patterns)
            or (kinds and issubclass(module_types.get(path, object), kinds))
        ]
    if not chosen:
        kinds = sorted({kind.__name__ for kind in module_types.values()})
        raise ValueError(
            f"wrap={wrap!r} matches no module with parameters; there are {', '.join(paths[:12]) or 'none'}"
            f"{', ...' if len(paths) > 12 else ''}" + (f" of the types {', '.join(kinds)}" if kinds else "")
        )
    return chosen


# --------------------------------------------------------------------------------------------------
# How the positions that this code sees are split over ranks, as the plan around it says.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ContextSplit:
    """The split of sequences over one mesh axis.

    Attributes:
      axis: the mesh axis.
      order: in which order its ranks hold positions (see `sequence_order`).
      method: how attention reads the keys and values of other ranks (see `context_attention`).
    """

    axis: str
    order: Order = "contiguous"
    method: Method = "auto"

    def own_positions(self, count: int) -> jax.Array:
        """The global positions of this rank's `count` places, int32 [count]; inside `shard_map` over the axis."""
        rank, ranks = axis_index(self.axis), axis_size(self.axis)
        return positions_of(self.order, rank, ranks, count)


def positions_of(order: Order, rank: int | jax.Array, ranks: int, count: int) -> jax.Array:
    """The global positions of a rank's `count` places, int32 [count]: the rank may be traced."""
    places = jnp.arange(count, dtype=jnp.int32)
    if order == "striped":
        return places * ranks + rank
    if order == "zigzag":
        half = count * ranks // order_parts(order, ranks)
        second = 2 * ranks - 1 - rank
        return jnp.where(places < half, rank * half + places, second * half + places - half)
    return rank * count + places


# Known to JAX: a function under an inner `jax.jit` that was traced under one split is traced anew under another.
_SPLITS = jax.make_user_context(())


@contextlib.contextmanager
def split_by(split: ContextSplit) -> Iterator[None]:
    """Context in which code inside `shard_map` over the split's axis sees sequences split so."""
    with _SPLITS((*_SPLITS.value, (split.axis, split))):
        yield


@contextlib.contextmanager
def seen_whole(axis: str) -> Iterator[None]:
    """Context in which code inside `shard_map` over the axis sees whole sequences, the same on all its ranks."""
    with _SPLITS((*_SPLITS.value, (axis, None))):
        yield


def current_split(axis: str = "context") -> ContextSplit | None:
    """The split of the sequences that this code sees over an axis; None: it sees whole sequences.

    Inside `shard_map` over the axis, but under no plan that says how, it is contiguous.
    """
    if not bound(axis) or axis_size(axis) == 1:
        return None
    return next((split for name, split in reversed(_SPLITS.value) if name == axis), ContextSplit(axis))


def context_positions(count: int, axis: str = "context") -> jax.Array:
    """The positions, in the whole sequence, of the `count` places that this code has of it, int32 [count].

    Inside a model that runs under `ax.Context` they are this rank's, in the plan's order; elsewhere 0 to count - 1.
    """
    split = current_split(axis)
    return jnp.arange(count, dtype=jnp.int32) if split is None else split.own_positions(count)


# --------------------------------------------------------------------------------------------------
# What only some strategies do: capabilities, which a strategy inherits from beside `AbstractStrategy`. Who wants one asks
# `AbstractStrategy.having`; a method of one without the class is refused, as nobody would call it.
# --------------------------------------------------------------------------------------------------

MIB = 2**20


class Bucketed:
    """Gathers and sums several leaves in one collective."""

    def gather_bucket(self, shards: Sequence[jax.Array], layouts: Sequence[Layout], axis: AxisNames) -> list[jax.Array]:
        """`gather` of several leaves; one by one unless a class says how."""
        return [self.gather(*leaf, axis) for leaf in zip(shards, layouts, strict=True)]  # pyright: ignore

    def sync_bucket(self, grads: Sequence[jax.Array], layouts: Sequence[Layout], axis: AxisNames) -> list[jax.Array]:
        """`sync` of several leaves; one by one unless a class says how."""
        return [self.sync(*leaf, axis) for leaf in zip(grads, layouts, strict=True)]  # pyright: ignore


class Reducer:
    """Decides how a plan's gradients travel, as the strategy of `data` or of the mesh's outermost axis."""

    @property
    def bucket_bytes(self) -> int:
        """Capacity in bytes of a bucket of leaves that are reduced together."""
        return 25 * MIB

    @property
    def overlaps(self) -> bool:
        """Whether gradients are reduced inside the backward."""
        return True

    def wire_dtype(self, dtype: Any) -> Any:
        """The dtype in which a gradient of `dtype` travels."""
        return jnp.dtype(dtype)

    def reducing(self) -> Self:
        """The strategy, with a role that reduces gradients where its own never does: what `sync_gradients` asks for."""
        return self


class SplitsPositions:
    """Splits positions of sequences in a way of its own, or has attention read across them."""

    def position_dim(self, path: str, shape: tuple[int, ...]) -> int | None:
        """The dim of a leaf of the batch that holds positions: dim 1 of leaves that have one.

        Args:
          path: the path of the leaf in the batch, "tokens" or "0/mask"; for a call's argument its number or name.
          shape: the whole leaf's.

        Returns:
          A dim after 0, which holds rows; None: every rank has all of the leaf's rows as they are.
        """
        return second_dim(path, shape)

    @property
    def position_order(self) -> Order:
        """The order in which ranks hold positions; batches and outputs keep the sequence's."""
        return "contiguous"

    def position_split(self, axis: AxisNames) -> ContextSplit | None:
        """How `context_attention` reads positions of other ranks, which the ledger then prices; None: it does not."""
        return None

    def inside(self, axis: AxisNames) -> AbstractContextManager:
        """The context that is entered around every call of the model's code, and of the loss, while a step is traced."""
        return nullcontext()

    def with_fsdp(self, fsdp: "AbstractStrategy") -> "AbstractStrategy | None":
        """The strategy that owns `fsdp` and `context` together, asked of a plan's `context`; None: each keeps its own.

        Args:
          fsdp: the plan's.
        """
        return None


class LeftToXLA:
    """Leaves its axes to XLA's partitioner in a step: none is bound, and the model's code sees whole sequences."""

    def rewritten(self, fun: Callable[..., Any], axis: AxisNames, check_vma: bool) -> Callable[..., Any]:
        """Rewrites the model's code for a step.

        Args:
          fun: takes pytrees and returns one; it sees whole sequences.
          axis: the strategy's.
          check_vma: the plan's.
        """
        return fun

    def partitioner_budget(self, attention: float) -> float:
        """The bytes per rank and step that the model's code may send along the axes, beside sums and recognised attention.

        Args:
          attention: the bytes per rank and step that the recognised attention sends.

        Returns:
          The limit above which a compiled step is refused; infinity: there is none.
        """
        return math.inf


class Lossy:
    """Rounds sums of gradients, or what is read. A strategy with `exact = False` that is no `Lossy` counts as doing both."""

    @property
    def reads_exactly(self) -> bool:
        """Whether the values that are read are those that rest: True where the sums alone are rounded."""
        return False

    def sum_round_trip(self, part: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """The values that `sync` adds of a part of one rank's gradient.

        Args:
          part: [*layout.shard], with its padding: what one rank sends another.
          layout, axis: as for `sync`.
        """
        return part

    @property
    def feeds_back(self) -> bool:
        """Whether what `sum_round_trip` takes from a rank's gradient is added to its gradient in the next step.

        For a role that reduces once a step (Seide et al. 2014). A trainer keeps it, of every rank (`TrainState.left_out`).
        """
        return False


class Stateful:
    """Keeps state between steps for every trained parameter: the error of a lossy gather, an anchor of local steps."""

    def init_state(self, param: jax.Array) -> PyTree:
        """The first state for one trained parameter, given whole; None: none is kept.

        Arrays of the parameter's shape rest as it does, others whole on every rank. Checkpoints keep them.
        """
        return None

    def to_read(self, shard: jax.Array, state: PyTree, layout: Layout, axis: AxisNames) -> jax.Array:
        """The values that a training step gathers in the place of a resting shard: for instance with its error added."""
        return shard

    def after_update(
        self, shard: jax.Array, state: PyTree, layout: Layout, axis: AxisNames, *, before: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        """Changes the shard and the state after an update, once per step whose update is not skipped, inside `shard_map`.

        Args:
          shard: as the optimizer made it.
          state: as it was in this step.
          layout, axis: as for `gather`.
          before: the shard before the update.

        Returns:
          The shard and the state that the next step begins with, shaped and typed as they were.
        """
        return shard, state


class Decides:
    """Has defaults that depend on the model or the devices, or models that it cannot run."""

    def for_model(self, model: Functional) -> Self:
        """The strategy with the defaults decided that depend on the model."""
        return self

    def decided(self, fabric: Fabric, ranks: int) -> Self:
        """The strategy with the defaults decided that depend on the devices.

        Args:
          fabric: what connects the mesh's devices.
          ranks: the size of the axis.
        """
        return self

    def model_problems(self, model: Functional, axis: AxisNames, degrees: Mapping[str, int]) -> list[str]:
        """Problems of a model under the strategy, with the remedies: they are refused before anything is allocated.

        Args:
          model: the pure view of the user's; its modules are known where it is an NNX module.
          axis: the strategy's, of more than one rank.
          degrees: the sizes of the mesh's axes.
        """
        return []


class LocalRounds(abc.ABC):
    """Rounds of steps in which every rank of an axis trains parameters of its own.

    All ranks begin a round with the outer parameters. These are the model: what is evaluated, saved and exported. In a step
    nothing travels along the axis. After the last step of a round the outer parameters are updated from the ranks' trained
    parameters, and every rank begins again.

    Attributes:
      every: H, the steps of a round; it ends where the number of updates divides by it.
    """

    every: int

    @abc.abstractmethod
    def within_round(self) -> "AbstractStrategy":
        """The strategy that a training step uses in this one's place, with a role that never reduces."""

    @property
    def round_copies(self) -> float:
        """Copies of what a rank trains that the end of a round holds at its peak, beside what rests.

        These are the rank's updated parameters, their differences from the outer ones, and the sums of the differences.
        """
        return 3

    @abc.abstractmethod
    def first_kept(self, param: jax.Array) -> PyTree:
        """The first shared state of an outer parameter, given whole, such as its momentum. It rests as the parameter does."""

    @abc.abstractmethod
    def end_round(
        self,
        outer: Sequence[jax.Array],
        own: Sequence[jax.Array],
        kept: Sequence[PyTree],
        layouts: Sequence[Layout],
        axis: AxisNames,
    ) -> tuple[list[jax.Array], list[PyTree]]:
        """Updates the outer parameters at the end of a round, inside `shard_map`, the same on every rank of the axis.

        Args:
          outer: the outer parameters of this round, as they rest, [*layout.shard].
          own: this rank's parameters at the end of the round, shaped as `outer`.
          kept: what is kept of every leaf, as `first_kept` shapes it.
          layouts: the layouts of the leaves.
          axis: the strategy's.

        Returns:
          (outer parameters, kept), shaped and typed as they were.
        """

    @abc.abstractmethod
    def round_dtype(self, dtype: Any) -> Any:
        """The dtype in which most elements of a matrix of `dtype` travel at the end of a round.

        The traffic by published formulas is counted in it (`cost/published.py`).
        """

    @abc.abstractmethod
    def round_flows(self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any) -> Sequence[Transfer]:
        """The transfers of a leaf at the end of a round.

        Args:
          elements: the number of elements of what a rank holds of it.
          layout, axis, ranks: as for `AbstractStrategy.sync_flows`.
          dtype: the dtype of the resting leaf.
        """


CAPABILITIES = (Bucketed, Reducer, SplitsPositions, LeftToXLA, Lossy, Stateful, Decides, LocalRounds)

C = TypeVar("C")


# --------------------------------------------------------------------------------------------------
# The contract of every strategy.
# --------------------------------------------------------------------------------------------------


class AbstractStrategy(abc.ABC):
    """How parameters live on one mesh axis (or on several that one strategy owns together), and how they are read.

    Law: `sync` is the transpose of `gather`: it sums. The division by the total weight happens once, in `training/`.

    `gather` and `sync` run inside `shard_map` with `axis` bound: a mesh axis's name, or a tuple of the names of those that
    the strategy owns together. Their `layout` is the leaf's final one; a strategy looks only at what it put there itself.
    A strategy is a frozen, hashable value. What only some do is a class to inherit from besides (`ax.Stateful` and its like).

    Attributes:
      wrap: which parts of the model are units (see `Wrap`), for a role that reads parameters at their "use".
      prefetch: how many units ahead they are gathered, for such a role.
    """

    wrap: Wrap = None
    prefetch: int = 0

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        for kind in CAPABILITIES:
            said = [name for name in vars(kind) if not name.startswith("_") and hasattr(cls, name)]
            if said and not issubclass(cls, kind):
                bases = ", ".join([*(base.__name__ for base in cls.__bases__), f"ax.{kind.__name__}"])
                raise TypeError(
                    f"{cls.__name__} defines {', '.join(said)}, which are asked of an ax.{kind.__name__} only: inherit from it "
                    f"too, class {cls.__name__}({bases})"
                )

    def having(self, kind: type[C]) -> C | None:
        """The strategy as an instance of a capability, or None; a class may decide it by its values."""
        return self if isinstance(self, kind) else None

    @property
    @abc.abstractmethod
    def role(self) -> Role:
        """The role of the axis: what it does to the batch and to parameters."""

    @abc.abstractmethod
    def spec(self, layout: Layout, axis: AxisNames, axis_size: int) -> Layout:
        """The layout of a parameter between steps.

        Args:
          layout: the layout of the whole array, as the model's layers split it.
          axis: a mesh axis's name, or a tuple of those that the strategy owns together.
          axis_size: R, their ranks.

        Returns:
          The layout refined by this axis (`Layout.on`), or as it is.
        """

    @abc.abstractmethod
    def gather(self, shard: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """Gathers the array that the forward pass reads.

        Args:
          shard: as it rests, [*layout.shard], in the dtype in which the model computes.
          layout: the leaf's.
          axis: as for `spec`.

        Returns:
          The array whole along this axis, without padding; where nothing splits it, [*layout.shape].
        """

    @abc.abstractmethod
    def sync(self, grad: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """Sums the gradient over the axis, and returns the part of this rank's shard.

        Args:
          grad: this rank's gradient of what `gather` returned, shaped alike, in the dtype in which gradients are reduced.
          layout, axis: as for `gather`.

        Returns:
          The sum's part that belongs to this rank's shard.
        """

    @abc.abstractmethod
    def gather_flows(
        self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any
    ) -> Sequence[Transfer]:
        """The transfers of one `gather` of a leaf, which the ledger and the planner price.

        The planner prices many meshes at once: then `elements` and the sizes of the layout are arrays, with an entry for
        each mesh, and so are those of the transfers.

        Args:
          elements: the number of elements of the shard that is gathered.
          layout: the leaf's.
          axis: the strategy's.
          ranks: the size of the axis.
          dtype: the dtype of the shard.

        Returns:
          One `ax.Transfer` for every collective; nothing where nothing is sent.
        """

    @abc.abstractmethod
    def sync_flows(self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any) -> Sequence[Transfer]:
        """The transfers of one `sync` of a gradient of `elements`; the arguments are those of `gather_flows`."""

    @property
    def exact(self) -> bool:
        """Whether reads are of the resting values, and reductions are sums; False declares a lossy strategy."""
        return True

    def round_trip(self, shard: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """The values that ranks read of a gathered shard: its own, unless the strategy is lossy."""
        return shard

    def in_words(self, axis: AxisNames) -> str:
        """A short description for summaries of plans."""
        return f"{type(self).__name__} over {'*'.join(as_axes(axis))}"


def gather_bucket(
    strategy: AbstractStrategy, shards: Sequence[jax.Array], layouts: Sequence[Layout], axis: AxisNames
) -> list[jax.Array]:
    """Gathers several leaves: in one bucket, or one by one."""
    if (own := strategy.having(Bucketed)) is not None:
        return own.gather_bucket(shards, layouts, axis)
    return [strategy.gather(shard, layout, axis) for shard, layout in zip(shards, layouts, strict=True)]


def sync_bucket(
    strategy: AbstractStrategy, grads: Sequence[jax.Array], layouts: Sequence[Layout], axis: AxisNames
) -> list[jax.Array]:
    """Sums the gradients of several shards: in one bucket, or one by one."""
    if (own := strategy.having(Bucketed)) is not None:
        return own.sync_bucket(grads, layouts, axis)
    return [strategy.sync(grad, layout, axis) for grad, layout in zip(grads, layouts, strict=True)]


def reducer_of(strategy: AbstractStrategy) -> Reducer:
    """The strategy as a `Reducer`; the defaults where it is none."""
    return strategy.having(Reducer) or Reducer()


def reads_exactly(strategy: AbstractStrategy) -> bool:
    """Whether the values that are read are those that rest."""
    lossy = strategy.having(Lossy)
    return strategy.exact or (lossy is not None and lossy.reads_exactly)


def feeds_back(strategy: AbstractStrategy) -> bool:
    """Whether a trainer keeps what the strategy's sums leave out (`Lossy.feeds_back`)."""
    lossy = strategy.having(Lossy)
    return lossy is not None and lossy.feeds_back


# --------------------------------------------------------------------------------------------------
# What parameters of parallel layers need from a step along the axes that those layers use: almost nothing.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InLayers(AbstractStrategy):
    """Parallel layers split their own parameters over the axis and communicate themselves (Megatron, AxoNN).

    Communicates: nothing for what a layer splits and along axes that share the batch; along `depth`, which splits the
    batch too, one all-reduce of every other gradient.

    Attributes:
      batch: what of the batch the axis splits: "rows" (`depth`), "positions", or None.
    """

    batch: Literal["rows", "positions"] | None = None

    @property
    def role(self) -> Role:
        """The role of layers' own axes: layers split parameters, read them and reduce their gradients."""
        return Role(batch=self.batch, parameters="layers", reads="layers", reduces="layers")

    def spec(self, layout: Layout, axis: AxisNames, axis_size: int) -> Layout:
        """The layout as it is, with the splits that the layer wrote (see `tensor_specs`)."""
        return layout

    def gather(self, shard: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """The layer's own part, typed as varying where gradients are summed over the axis."""
        return vary(shard, axis) if self.sums(layout, axis) else shard

    def sync(self, grad: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """The layer's own gradient; summed where the axis splits the batch and the layer does not split the leaf."""
        return sum_over(grad, axis) if self.sums(layout, axis) else grad

    def gather_flows(
        self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any
    ) -> tuple[Transfer, ...]:
        """No transfers: the layers send, and say so themselves."""
        return ()

    def sync_flows(
        self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any
    ) -> tuple[Transfer, ...]:
        """The transfers of a gradient: one all-reduce where it is summed here, else none."""
        if not self.sums(layout, axis):
            return ()
        return (Transfer(kind="all_reduce", elements=elements, ranks=ranks, dtype=dtype),)

    def sums(self, layout: Layout, axis: AxisNames) -> bool:
        """Whether a leaf's gradients are summed over the axis: it splits the batch and not the leaf."""
        return self.batch is not None and not set(as_axes(axis)) & set(layout.axes)
