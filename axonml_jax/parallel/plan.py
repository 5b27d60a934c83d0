"""`Plan`: strategies on axes and the options of a step, as data that is checked, compared and printed."""

import enum
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from numbers import Integral
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from jax.sharding import PartitionSpec

from axonml_jax.base import PyTree, bytes_meant, is_choice, is_one_of, lines, member, named_leaves, section, table
from axonml_jax.mesh.axes import AXES, BATCH_AXES, LAYER_AXES, PARTITIONED, STAGES, AxisNames, as_axes
from axonml_jax.mesh.shape import MeshShape
from axonml_jax.model.loss import Precision
from axonml_jax.model.view import Functional
from axonml_jax.parallel.context import Context
from axonml_jax.sharding.batch import BatchLayout, second_dim
from axonml_jax.sharding.layout import Order, as_spec
from axonml_jax.strategies.replicate import Replicate
from axonml_jax.strategies.shard import Shard
from axonml_jax.strategies.strategy import (
    AbstractStrategy,
    C,
    Decides,
    Fabric,
    InLayers,
    LeftToXLA,
    LocalRounds,
    Reducer,
    SplitsPositions,
)

if TYPE_CHECKING:
    from axonml_jax.model.lora import Adapter
    from axonml_jax.parallel.annotations import Annotations, LogicalRules
    from axonml_jax.pipeline.schedules import Pipelined

# --------------------------------------------------------------------------------------------------
# What rests in host memory between its uses, by JAX's memory kinds.
# --------------------------------------------------------------------------------------------------


class CPUOffload(enum.Enum):
    """State that is kept in host memory (names as in AxonML; PyTorch's `CPUOffload(offload_params=True)` is FULL).

    NONE: nothing. PARAMS: parameters. OPTIMIZER_STATES: the optimizer's state. FULL: both, and gradients once they are
    reduced. Results are the same; the device holds less, and every step moves what was offloaded to it and back.
    """

    NONE = "none"
    PARAMS = "params"
    OPTIMIZER_STATES = "optimizer_states"
    FULL = "full"

    @classmethod
    def _missing_(cls, value: object) -> "CPUOffload | None":
        return member(cls, "offload", value)

    @property
    def params(self) -> bool:
        """Whether parameters rest on the host."""
        return self in (CPUOffload.PARAMS, CPUOffload.FULL)

    @property
    def optimizer(self) -> bool:
        """Whether the optimizer's state rests on the host."""
        return self in (CPUOffload.OPTIMIZER_STATES, CPUOffload.FULL)

    @property
    def gradients(self) -> bool:
        """Whether reduced gradients go to the host."""
        return self is CPUOffload.FULL


# --------------------------------------------------------------------------------------------------
# Path rules that split the parameters of any model over axes whose communication XLA's partitioner chooses.
# --------------------------------------------------------------------------------------------------

Rules = Mapping[str, PartitionSpec] | Iterable[tuple[str, PartitionSpec]]


@dataclass(frozen=True)
class Partition:
    """Rules by path name; the first that matches a parameter's whole name says how it is split.

    Adapters (`ax.lora`) are split as the sides of their matrices are; rules name the model's own parameters.

    Attributes:
      rules: (regular expression, PartitionSpec over `tensor` and `expert`) in order. They may name `data` and `fsdp` too:
        the dim on which a strategy that shards over it does so; elsewhere it chooses.
      adapters: the adapters of a model's matrices, by path (see `for_model`).
    """

    rules: tuple[tuple[str, PartitionSpec], ...]
    adapters: "tuple[tuple[str, Adapter], ...]" = field(default=(), repr=False)

    @staticmethod
    def of(rules: Rules, names: Mapping[str, str] = MappingProxyType({})) -> "Partition":
        """Builds the rules from a mapping or from pairs.

        Args:
          rules: pairs of a regular expression and a PartitionSpec.
          names: for the user's names of axes, this library's.

        Raises:
          TypeError, ValueError: listing every rule that is none.
        """
        pairs: Any = tuple(rules.items() if isinstance(rules, Mapping) else (tuple(rule) for rule in rules))
        pairs = tuple(_in_our_names(rule, names) for rule in pairs)
        wrong = [problem for rule in pairs if (problem := _wrong(rule))]
        if wrong or not pairs:
            raise ValueError(
                "rules are pairs of a regular expression of parameter names and a PartitionSpec over 'tensor' and 'expert', "
                'such as (r".*/up/kernel", P(None, "tensor")): ' + ("; ".join(wrong) or "none was given")
            )
        return Partition(pairs)

    @property
    def axes(self) -> frozenset[str]:
        """The axes left to the partitioner: `tensor` and `expert` where the rules name them; `tensor` if they name neither."""
        return self.named.intersection(PARTITIONED) or frozenset(PARTITIONED[:1])

    @property
    def named(self) -> frozenset[str]:
        """All axes that the rules name."""
        return frozenset(axis for _, spec in self.rules for entry in spec for axis in as_axes(entry or ()))

    def for_model(self, model: Functional) -> "Partition":
        """The rules with the model's adapters, which they split too."""
        return replace(self, adapters=tuple(model.adapters.items()))

    def specs(self, variables: PyTree, degrees: Mapping[str, int]) -> dict[str, PartitionSpec]:
        """The PartitionSpec of every parameter, by path name.

        Args:
          variables: shapes of all parameters.
          degrees: size of every mesh axis.

        Raises:
          ValueError: listing every parameter that no rule matches or whose dims do not divide, and every rule that is the
            first to match none (which another one hides, or which has a typing error).
        """
        added = {name for _, adapter in self.adapters for name in adapter.added}
        leaves = {name: leaf for name, leaf in named_leaves(variables).items() if name not in added}
        rules = [(re.compile(rule[0]), rule) for rule in self.rules]  # once: `re` forgets some of more than 512
        chosen = {name: next((rule for each, rule in rules if each.fullmatch(name)), None) for name in leaves}
        problems = [
            f"  {name} {tuple(leaves[name].shape)}: no rule matches it" for name, r in chosen.items() if r is None
        ]
        used = set(chosen.values())
        problems += [f"  rule {rule[0]!r}: {self._unused(rule, leaves)}" for rule in self.rules if rule not in used]
        for name, rule in chosen.items():
            if rule is not None and (problem := _indivisible(leaves[name].shape, rule[1], degrees)):
                problems.append(f"  {name}: {problem}")
        if problems:
            raise ValueError(
                "the rules do not fit the model's parameters:\n"
                + "\n".join(problems)
                + '\n(".*" as the last rule, with '
                "PartitionSpec(), keeps the rest whole on every rank)"
            )
        own = {name: rule[1] for name, rule in chosen.items() if rule is not None}
        if not self.adapters:
            return own
        from axonml_jax.layers.adapters import specs_beside

        beside = (specs_beside(own[name], adapter) for name, adapter in self.adapters)
        return own | {name: spec for specs in beside for name, spec in specs.items()}

    def _unused(self, rule: tuple[str, PartitionSpec], names: Iterable[str]) -> str:
        hidden = [name for name in names if re.fullmatch(rule[0], name)]
        if not hidden:
            return "matches no parameter"
        first = next(earlier for earlier, _ in self.rules if re.fullmatch(earlier, hidden[0]))
        return f"every parameter it matches ({', '.join(hidden[:3])}) is taken by an earlier rule, {first!r}"


def _in_our_names(rule: Any, names: Mapping[str, str]) -> Any:
    if len(rule) != 2 or not isinstance(rule[1], PartitionSpec) or PartitionSpec.UNCONSTRAINED in rule[1]:
        return rule
    return rule[0], as_spec([tuple(names.get(axis, axis) for axis in as_axes(entry or ())) for entry in rule[1]])


def _wrong(rule: Any) -> str | None:
    if len(rule) != 2 or not isinstance(rule[0], str) or not isinstance(rule[1], PartitionSpec):
        return f"{rule!r} is no such pair"
    if PartitionSpec.UNCONSTRAINED in rule[1]:
        return f"{rule[0]!r} leaves a dim UNCONSTRAINED: name an axis, or None for a dim that is not split"
    try:
        re.compile(rule[0])
    except re.error as error:
        return f"{rule[0]!r} is no regular expression ({error})"
    others = {axis for entry in rule[1] for axis in as_axes(entry or ())} - {*PARTITIONED, "data", "fsdp"}
    if others:
        return f"{rule[0]!r} names the axes {sorted(others)}, which are not left to the partitioner"
    both = [entry for entry in rule[1] if isinstance(entry, tuple) and 0 < len({*entry} - {*PARTITIONED}) < len(entry)]
    return f"{rule[0]!r} splits a dim over {both[0]}: what rests sharded needs a dim of its own" if both else None


def _indivisible(shape: tuple[int, ...], spec: PartitionSpec, degrees: Mapping[str, int]) -> str | None:
    if len(spec) > len(shape):
        return f"{spec} has more entries than its shape {tuple(shape)} has dims"
    own = lambda entry: [axis for axis in as_axes(entry or ()) if axis in PARTITIONED]  # sharded at rest it is padded
    ranks = lambda entry: math.prod(degrees.get(axis, 1) for axis in own(entry))
    wrong = {dim: entry for dim, entry in enumerate(spec) if shape[dim] % ranks(entry)}
    over = " and ".join(dict.fromkeys(f"{axis}={degrees[axis]}" for entry in wrong.values() for axis in as_axes(entry)))
    return f"dims {[*wrong]} of {tuple(shape)} do not divide over {over} ({spec})" if wrong else None


# --------------------------------------------------------------------------------------------------
# The strategies of mesh axes that a plan has no name of its own for, as an immutable mapping.
# --------------------------------------------------------------------------------------------------


class PlanAxes(Mapping[AxisNames, AbstractStrategy]):
    """Strategies by axis name, or by the tuple of names of the axes that one strategy owns together; hashable.

    >>> from axonml_jax.strategies.replicate import Replicate
    >>> PlanAxes({"island": Replicate()}) == {"island": Replicate()}
    True
    """

    def __init__(self, strategies: Mapping[AxisNames, AbstractStrategy]):
        self._items = {key if isinstance(key, str) else tuple(key): value for key, value in strategies.items()}

    def __getitem__(self, axis: AxisNames) -> AbstractStrategy:
        return self._items[axis if isinstance(axis, str) else tuple(axis)]

    def __iter__(self) -> Iterator[AxisNames]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def axes_problems(axes: Any) -> list[str]:
    """Lists the problems of a plan's `axes`."""
    if not isinstance(axes, Mapping):
        return [f"axes={axes!r} must be a mapping of axis names (or tuples of them) to strategies"]
    keys = [key for key in axes if not _is_key(key)]
    names = [name for key in axes if key not in keys for name in as_axes(key)]
    problems = [f"axes: {key!r} must be an axis name, or a tuple of them" for key in keys]
    problems += [f"axes: {name!r} has two strategies: give it one" for name in {n for n in names if names.count(n) > 1}]
    problems += [
        f"axes: {name!r} is split by the model's own layers, which bring their strategy: leave it out"
        for name in names
        if name in LAYER_AXES
    ]
    return problems + [
        f"axes: {axis!r} has {strategy!r}, which must be an ax.AbstractStrategy"
        for axis, strategy in axes.items()
        if not isinstance(strategy, AbstractStrategy) and axis != "pipe"
    ]


def _is_key(key: Any) -> bool:
    return (isinstance(key, str) and bool(key)) or (
        isinstance(key, tuple) and bool(key) and all(isinstance(name, str) and name for name in key)
    )


def inwards(
    strategies: Mapping[AxisNames, AbstractStrategy], mesh_axes: tuple[str, ...]
) -> dict[AxisNames, AbstractStrategy]:
    """The strategies whose axes a mesh has, from the outermost axis inwards.

    The library's axes come in their canonical order. An axis of the user's own comes right behind the library's axis that
    stands before it in the mesh.

    Args:
      strategies: by axis, or by several.
      mesh_axes: the names of the mesh's axes, in its order.

    Raises:
      ValueError: when the mesh has some but not all axes of one strategy.
    """

    def place(key: AxisNames) -> tuple[float, int]:
        first = as_axes(key)[0]
        position = mesh_axes.index(first)
        if first in AXES:
            return AXES.index(first), position
        before = [AXES.index(name) for name in mesh_axes[:position] if name in AXES]
        return (before[-1] if before else -1) + 0.5, position

    missing = {key: set(as_axes(key)).difference(mesh_axes) for key in strategies}
    if torn := {key: names for key, names in missing.items() if names and len(names) < len(as_axes(key))}:
        raise ValueError(
            f"one strategy owns the axes {', '.join(map(str, torn))} together, but the mesh {mesh_axes} lacks "
            f"{sorted({name for names in torn.values() for name in names})}: give the mesh these axes (of degree 1 if need be)"
        )
    there = [key for key, names in missing.items() if not names]
    return {key: strategies[key] for key in sorted(there, key=place)}


# --------------------------------------------------------------------------------------------------
# A plan as HTML, for notebooks: what is chosen, what is left at its default, and the pipeline's timetable.
# --------------------------------------------------------------------------------------------------


def plan_html(plan: Any, title: str, degrees: Mapping[str, int] | None) -> str:
    """A plan's fields as an HTML table, those that are chosen before defaults, and its pipeline's timetable.

    Args:
      plan: an `ax.Plan`.
      title: above the table.
      degrees: the axis sizes of the mesh that it runs on; None: those of the plan's own mesh, if it has one.
    """
    own = None if plan.mesh is None else plan.mesh.degrees
    degrees = own if degrees is None else degrees
    chosen = {name for name, _ in _chosen(plan)}
    names = sorted((each.name for each in fields(plan) if each.name != "mesh"), key=lambda name: name not in chosen)
    cells = [[name, in_words(getattr(plan, name))] for name in names]
    quiet = [row for row, name in enumerate(names) if name not in chosen]
    mesh = "any mesh" if degrees is None else " x ".join(f"{axis} {ranks}" for axis, ranks in degrees.items() if ranks)
    parts = [lines(f"on {mesh or 'one device'}"), table(["field", "value"], cells, left=2, quiet=quiet)]
    if plan.pipe is not None and STAGES in (degrees or {}):
        parts.append(plan.pipe.timetable((degrees or {})[STAGES], plan.microbatches)._repr_html_())
    return section(title, *parts)


def in_words(value: Any, axes: Collection[str] | None = None) -> str:
    """A value of a plan as one would write it, without what is a default.

    Args:
      value: a plan, a strategy, or what a field of one holds.
      axes: the axes of a mesh: a plan's usual strategies of other axes are left out; None: they are not.

    >>> from axonml_jax.strategies.shard import Shard
    >>> in_words(Shard(stage=2)), in_words(Shard()), in_words(None)
    ('Shard(stage=2)', 'Shard()', 'None')
    """
    if isinstance(value, enum.Enum):
        return repr(value.value)
    if not is_dataclass(value):
        return repr(value)
    idle = () if axes is None else [name for name in _USUAL if name not in axes]
    said = [f"{name}={in_words(one)}" for name, one in _chosen(value) if name not in idle]
    return f"{type(value).__name__}({', '.join(said)})"


def _chosen(value: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a dataclass that are not at their defaults."""
    for each in fields(value):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if each.repr and (found := getattr(value, each.name)) != default:
            yield each.name, found


# --------------------------------------------------------------------------------------------------
# What a plan says of recomputation: `Remat`; `parallel/units.py` does it.
# --------------------------------------------------------------------------------------------------

Remat = Literal["full", "selective"] | Sequence[str] | Callable[..., Any] | Mapping[str, Any] | Any | None
"""What the backward recomputes. None: nothing (in scans and pipelines, where it lies apart from its forward, what is
elementwise). "full": all of a unit from its inputs. "selective": all but the results of weight multiplications, which are most
of the work and a small part of the memory (Korthikanti et al. 2022). Regular expressions: all but the values that they find, of
which those behind "host:" are kept in host memory. A policy of `jax.checkpoint_policies`, or what each unit keeps."""

Kernels = Literal["auto", "xla", "interpret"]
"""How norms, GELU and cross entropy of the library's layers are computed. "auto": by kernels on GPUs where they apply; "xla":
never by kernels; "interpret": by kernels on any platform, run slowly by plain operations, to try them (`layers/fused.py`)."""


Memory = str | float | int | None
"""Bytes of a device that a step may have, as "76GiB" or a number, or a share of it, as 0.9."""


def checked_remat(remat: Any) -> tuple[Any, list[str]]:
    """A recomputation policy in the form in which a plan keeps it, and its problems."""
    if is_one_of(remat, (None, "full", "selective")) or callable(getattr(remat, "choice", None)):
        return remat, []
    if isinstance(remat, Mapping):
        from axonml_jax.parallel.recompute import EVERYTHING, Recompute

        wrong = [
            f"remat={{{unit!r}: {kept!r}}}: a unit's path says the list of labels that it keeps, or {EVERYTHING!r}"
            for unit, kept in remat.items()
            if not (isinstance(unit, str) and (is_one_of(kept, (EVERYTHING,)) or _are_names(kept)))
        ]
        return (remat, wrong) if wrong else (Recompute.of(remat), [])
    if callable(remat):
        return remat, []
    rules = _are_names(remat) and bool(remat)
    wrong = [f"remat: {each!r} is no regular expression" for each in remat if not _compiles(each)] if rules else []
    if rules:
        return tuple(remat), wrong
    return remat, [
        f"remat={remat!r} must be None, 'full', 'selective', regular expressions of the names or paths of what is kept, a "
        "policy of jax.checkpoint_policies, or what each unit keeps, as memory= chooses it"
    ]


def _are_names(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and all(isinstance(each, str) for each in given)


def _compiles(rule: str) -> bool:
    try:
        re.compile(rule)
    except re.error:
        return False
    return True


def checked_memory(memory: Any, remat: Any) -> list[str]:
    """Lists the problems of a memory budget, and of a budget beside a policy."""
    rule = f"memory={memory!r} must be bytes of a device, as '76GiB' or 80e9, or a share of it, as 0.9"
    try:
        size = bytes_meant(memory) if isinstance(memory, str) else memory
    except ValueError:
        return [rule]
    number = isinstance(size, (int, float)) and not isinstance(size, bool)
    if size is not None and not (number and size > 0 and math.isfinite(size)):
        return [rule]
    if size is not None and remat is not None:
        return [f"memory={memory!r} chooses what is recomputed, and so does remat={remat!r}: leave one out"]
    return []


# --------------------------------------------------------------------------------------------------
# Everything that decides how a step runs, as one frozen value.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """How a model is distributed over a mesh and trained, as one frozen value.

    A plan changes where work happens, not what is computed, but for random draws (see `draws`), some code in a model that mixes
    rows of the batch, BatchNorm in microbatches, what rounds (`precision`, `comm_dtype`, `ax.Shard(wire=, reduce_wire=)`) and
    where replicas train by themselves (NO_SYNC, `ax.DiLoCo`).

    Attributes:
      mesh: degrees of the mesh; None when a mesh is given beside the plan.
      data: what happens to parameters on the `data` axis.
      fsdp: what happens to them on the `fsdp` axis.
      context: what happens to them on the `context` axis, which splits the positions of sequences.
      axes: the same for axes of your own, by name, or by the tuple of names of axes that one strategy owns together; the
        mesh, which you make, says where they stand. `data`, `fsdp`, `context` and `pipe` may be given here too.
      pipe: the pipeline along the `pipe` axis; None: the model is not cut.
      partition: rules by which the partitioner splits any model's parameters over `tensor`, also as a mapping of regular
        expressions of names to `PartitionSpec`s or as pairs of them; None: only the model's own layers split over it.
      precision: dtypes of parameters, computation, reduction and outputs, and of products' operands; the name of a common
        policy is accepted.
      accumulate: microbatches per update and rank; under a pipeline that many times its microbatches, in one pass.
      update: "shards": the optimizer sees what a rank holds. Work on whole matrices (Muon, Adafactor) is done by one rank for
        each, which gathers what it needs; what cannot be done so is refused. "whole": gradients, parameters and state are
        gathered for the update.
      offload: what rests in host memory.
      remat: what the backward recomputes, unit by unit: None, "full", "selective" (all but weight multiplications), or all but
        what is named: regular expressions of names (`checkpoint_name`) and paths of weights that products read, behind "host:"
        for what units in a loop send to host memory; a policy of `jax.checkpoint_policies`; or what each unit keeps, as
        `memory` chooses it. Sums over ranks are kept.
      memory: bytes of a device that a step may have ("76GiB"), or a share of it (0.9): what each unit keeps is found so that
        the step fits and repeats least. The compiled step is measured, and refused where it does not fit.
      batch_stats: "global" joins BatchNorm statistics over all ranks and keeps buffers equal; "local" leaves every rank
        its own statistics, as PyTorch does.
      broadcast_buffers: with `batch_stats="local"`: True gives every rank the first rank's buffers after each step, False
        leaves each rank its own.
      draws: random draws in a loss, such as dropout's masks: "shards": every batch shard and microbatch has keys of its own,
        so that masks depend on their number; "rows": those that one device draws for the whole batch, under every plan.
        What is not known to be drawn row by row is refused.
      check_vma: let JAX type which values vary over which axes (a safety net; models whose scans start from plain zeros
        do not pass it).
      kernels: of norms, GELU and cross entropy of the library's layers, in 16 bits: "auto" takes this library's kernels on
        GPUs, "xla" never, "interpret" on any platform, run slowly by plain operations, to try them (with `check_vma=False`).
      annotations: what the plan was read from (`Plan.from_annotations`); it prints as a table. None: it was written.
    """

    mesh: MeshShape | None = None
    data: AbstractStrategy = field(default_factory=Replicate)
    fsdp: AbstractStrategy = field(default_factory=Shard)
    context: AbstractStrategy = field(default_factory=Context)
    pipe: "Pipelined | None" = None
    axes: Mapping[AxisNames, AbstractStrategy] = field(default_factory=lambda: PlanAxes({}))
    partition: Partition | None = None
    precision: Precision = field(default_factory=Precision)
    accumulate: int = 1
    update: Literal["shards", "whole"] = "shards"
    offload: CPUOffload = CPUOffload.NONE
    remat: Remat = None
    memory: Memory = None
    batch_stats: Literal["global", "local"] = "global"
    broadcast_buffers: bool = True
    draws: Literal["shards", "rows"] = "shards"
    check_vma: bool = False
    kernels: Kernels = "auto"
    annotations: "Annotations | None" = field(default=None, repr=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "precision", Precision.of(self.precision))
        partition, problems = _as_rules(self.partition)
        object.__setattr__(self, "partition", partition)
        offloads = [each.value for each in CPUOffload]
        if not is_choice(CPUOffload, self.offload):
            problems.append(f"offload={self.offload!r} must be an ax.CPUOffload or one of {offloads}")
        else:
            object.__setattr__(self, "offload", CPUOffload(self.offload))
        remat, wrong = checked_remat(self.remat)
        object.__setattr__(self, "remat", remat)
        problems += [*wrong, *checked_memory(self.memory, self.remat)]
        if not _is_whole(self.accumulate) or not 1 <= self.accumulate < 2**31:
            problems.append(f"accumulate={self.accumulate!r} must be a positive whole number below 2**31")
        pairs = {"batch_stats": ("global", "local"), "draws": ("shards", "rows"), "update": ("shards", "whole")}
        for name, (one, other) in pairs.items():
            if not is_one_of(getattr(self, name), (one, other)):
                problems.append(f"{name}={getattr(self, name)!r} must be {one!r} or {other!r}")
        problems += self._of_kernels()
        for name in ("broadcast_buffers", "check_vma"):
            if not is_one_of(getattr(self, name), (True, False)):
                problems.append(f"{name}={getattr(self, name)!r} must be True or False")
        problems += axes_problems(self.axes) or self._take_axes()
        problems += [
            f"{name}={value!r} must be a strategy such as ax.Replicate() or ax.Shard()"
            for name in _USUAL
            if not isinstance(value := getattr(self, name), AbstractStrategy)
        ]
        problems += [
            f"{name}={value!r} must be {words}"
            for name, (kind, words) in _OF_KIND.items()
            if (value := getattr(self, name)) is not None and not isinstance(value, kind)
        ]
        if self.pipe is not None and not _is_pipelined(self.pipe):
            problems.append(f"pipe={self.pipe!r} must be an ax.Pipelined(schedule=..., num_microbatches=...)")
        problems += self._join_context() if not problems else []
        problems += self._against_pipe() if not problems else []
        problems += self._against_rounds() if not problems else []
        if problems:
            raise ValueError(f"Plan: {'; '.join(problems)}")

    @classmethod
    def from_annotations(
        cls, model: Any, mesh: Any = None, *, params: PyTree | None = None, rules: "LogicalRules" = (), **options: Any
    ) -> "Plan":
        """The plan that a model's annotations describe on a mesh; `print(plan.annotations)` says what was read and became what.

        Read are `sharding`, `sharding_names` and `out_sharding` of NNX variables, how arrays lie, and Linen's boxes; logical
        names by `rules`, by those on variables, and by those in context (`nnx.logical_axis_rules`, `nn.logical_axis_rules`).
        What is split over a tensor-like axis becomes path rules. A batch axis that splits parameters shards them at rest
        (ZeRO-3), one that splits the optimizer's state alone does that (ZeRO-1), and `data` that splits neither replicates.

        Args:
          model: an NNX module, a function without arguments that makes one, or a Linen module.
          mesh: a Mesh; its axis names may be your own. None: all devices on `data`.
          params: a Linen module's variables in their boxes, or a function that makes them.
          rules: what logical names mean, `(("embed", None), ("mlp", "model"))`; before all others.
          **options: of `Plan`; a strategy that is given holds.

        Raises:
          ValueError: naming every name without a rule or an axis, and all else that does not fit the mesh; and for a Linen
            module without `params`.
        """
        from axonml_jax.parallel.annotations import Annotations

        return cls.annotated(Annotations.read(model, mesh, params=params, rules=rules), **options)

    @classmethod
    def annotated(cls, found: "Annotations", **options: Any) -> "Plan":
        """The plan of annotations that have been read (see `from_annotations`).

        Raises:
          ValueError: for what does not fit the mesh.
        """
        found.check()
        parameters, state = found.sharded(), found.sharded(state=True)
        named = {"fsdp", *parameters} if parameters or not state else {*state}
        sharded = [axis for axis in found.degrees if axis in named and found.degrees[axis] > 1]
        own = Shard(stage=1 if state and not parameters else 3)
        chosen: dict[str, Any] = {"partition": Partition(found.rules)} if found.split else {}
        chosen |= {"axes": {tuple(sharded): own}} if len(sharded) > 1 else dict.fromkeys(sharded, own)
        return cls(**{**chosen, **options}, annotations=found)

    def _of_kernels(self) -> list[str]:
        """Lists the problems of the choice of kernels."""
        if not is_one_of(self.kernels, ("auto", "xla", "interpret")):
            return [f"kernels={self.kernels!r} must be 'auto', 'xla' or 'interpret'"]
        if self.kernels == "interpret" and self.check_vma:
            return [
                "kernels='interpret' with check_vma=True: JAX's interpreter of kernels does not type what it indexes as "
                "varying. Take check_vma=False to try kernels, or kernels='auto' to check types"
            ]
        return []

    def _against_pipe(self) -> list[str]:
        """Lists the options that a pipeline cannot be combined with."""
        if self.pipe is None:
            return []
        rules = {
            "stages are split by the model's own layers only: leave partition out": self.partition is not None,
            "sync_strategy=NO_SYNC lets every rank train a model of its own, and the stages share one: use another": (
                self.independent
            ),
            "broadcast_buffers=False keeps buffers apart, and a pipeline's stages each hold some: leave it True": (
                self.batch_stats == "local" and not self.broadcast_buffers and not self.independent
            ),
        }
        return [f"pipe: {rule}" for rule, broken in rules.items() if broken]

    def _against_rounds(self) -> list[str]:
        """Lists the options that rounds, in which ranks train parameters of their own, cannot be combined with."""
        if not (rounds := self.rounds):
            return []
        axes, name = ", ".join(map(str, rounds)), type(next(iter(rounds.values()))).__name__
        rules = {
            f"{axes} have rounds each, and a model has outer parameters once: give one axis {name}": len(rounds) > 1,
            "a pipeline's stages rest in buffers, which have no place for outer parameters: leave pipe out": (
                self.pipe is not None
            ),
            "partition leaves an axis to XLA's partitioner, and the end of a round runs on what a rank holds: use layers that "
            "split themselves (ax.ColumnParallelLinear, ax.auto_parallelize)": self.partition is not None,
            f"offload={self.offload.value!r} brings parameters to the device in pieces, and the end of a round needs all: "
            "leave it out": self.offload is not CPUOffload.NONE,
            "float16 would need a loss scale for each replica: use bf16": self.precision.scales_loss,
            "NO_SYNC on another axis leaves no one model to agree on: synchronize it": self.independent,
            'batch_stats="local" is about models with buffers, which rounds refuse: leave it out': (
                self.batch_stats == "local"
            ),
        }
        return [f"{name}: {rule}" for rule, broken in rules.items() if broken]

    def _take_axes(self) -> list[str]:
        """Moves what `axes` says of the usual axes to their own fields."""
        given, problems = dict(self.axes), []
        for key, strategy in self.axes.items():
            for name in {*_USUAL, "pipe"} & set(as_axes(key)):
                if (own := getattr(self, name)) not in (_DEFAULTS[name], strategy):
                    problems.append(f"{name}={own!r} and axes={{{key!r}: {strategy!r}}} are two strategies of one axis")
                object.__setattr__(self, name, strategy)
                if key == name:
                    given.pop(key)
        object.__setattr__(self, "axes", PlanAxes(given))
        return problems

    def _join_context(self) -> list[str]:
        """Replaces the strategies of `fsdp` and `context` by a joint one, where `context` asks for it."""
        own = self.context.having(SplitsPositions)
        if own is None or (joint := own.with_fsdp(self.fsdp)) is None:
            return []
        if owners := [key for key in self.axes if {"fsdp", "context"} & set(as_axes(key))]:
            return [
                f"context={self.context!r} shards over fsdp and context, which axes= gives to the strategy of {owners}"
            ]
        for name in ("fsdp", "context"):
            object.__setattr__(self, name, joint)
        object.__setattr__(self, "axes", PlanAxes({**self.axes, ("fsdp", "context"): joint}))
        return []

    def __repr__(self) -> str:
        return in_words(self)

    def _repr_html_(self, title: str = "ax.Plan", degrees: Mapping[str, int] | None = None) -> str:
        return plan_html(self, title, degrees)

    @property
    def strategies(self) -> dict[AxisNames, AbstractStrategy]:
        """The strategy of every axis that this plan knows, by axis or by the axes that one strategy owns together."""
        together = {name for key in self.axes for name in as_axes(key)}
        usual = {name: getattr(self, name) for name in _USUAL}
        layers = {axis: InLayers("rows" if axis in BATCH_AXES else None) for axis in LAYER_AXES}
        return {name: each for name, each in usual.items() if name not in together} | dict(self.axes) | layers

    def on(self, mesh_axes: Iterable[str]) -> dict[AxisNames, AbstractStrategy]:
        """The strategies whose axes a mesh has, from the outermost axis inwards (see `inwards`)."""
        return inwards(self.strategies, tuple(mesh_axes))

    def left(self, degrees: Mapping[str, int]) -> frozenset[str]:
        """The mesh axes that a step leaves to XLA's partitioner: what `partition` splits, and what strategies leave to it."""
        own = {name for axis, each in self.on(degrees).items() if each.having(LeftToXLA) for name in as_axes(axis)}
        return frozenset(own | (self.partition.axes if self.partition is not None else set()))

    def batch_layout(self, degrees: Mapping[str, int]) -> BatchLayout:
        """The split of batches over a mesh of these degrees, by the roles of its axes."""
        splits = {
            name: (split, each)
            for axis, each in self.on(degrees).items()
            for name, split in each.role.splits(as_axes(axis)).items()
        }
        rows = (name for name, (split, _) in splits.items() if split == "rows")
        usual = SplitsPositions()
        rules = {
            name: each.having(SplitsPositions) or usual
            for name, (split, each) in splits.items()
            if split == "positions"
        }
        own = lambda each: type(each).position_dim is not SplitsPositions.position_dim
        positions = {name: each.position_dim if own(each) else second_dim for name, each in rules.items()}
        orders: dict[str, Order] = {name: each.position_order for name, each in rules.items()}
        return BatchLayout.of(degrees, rows, positions, orders, self.left(degrees))

    @property
    def rounds(self) -> dict[AxisNames, LocalRounds]:
        """The strategies whose ranks train parameters of their own in rounds, by axis; a plan has those of one axis at most."""
        return {axis: own for axis, each in self.strategies.items() if (own := each.having(LocalRounds)) is not None}

    def within_round(self) -> "Plan":
        """The plan of a step within a round (see `LocalRounds`); the plan itself where it has no rounds."""
        return self._changed(LocalRounds, lambda axis, own: own.within_round()) if self.rounds else self

    def reducing(self) -> "Plan":
        """The plan, but with strategies that all reduce gradients (see `Reducer.reducing`)."""
        return self._changed(Reducer, lambda axis, own: own.reducing())

    def for_model(self, model: Functional) -> "Plan":
        """The plan with everything decided that depends on the model: defaults of strategies, what rules split.

        Raises:
          ValueError: for patterns of path names that match nothing of it.
        """
        self.precision.check_parameters(
            named_leaves(model.shapes.params).keys() | named_leaves(model.shapes.frozen).keys()
        )
        plan = self._changed(Decides, lambda axis, own: own.for_model(model))
        return plan if plan.partition is None else replace(plan, partition=plan.partition.for_model(model))

    def decided(self, fabric: Fabric, degrees: Mapping[str, int]) -> "Plan":
        """The plan with every default of its strategies decided that depends on the devices."""
        ranks = lambda axis: math.prod(degrees.get(name, 1) for name in as_axes(axis))
        return self._changed(Decides, lambda axis, own: own.decided(fabric, ranks(axis)))

    def _changed(self, kind: type[C], change: Callable[[AxisNames, C], Any]) -> "Plan":
        """The plan with the strategies that have a capability replaced."""

        def changed(axis: AxisNames, strategy: AbstractStrategy) -> AbstractStrategy:
            return strategy if (own := strategy.having(kind)) is None else change(axis, own)

        own = {axis: changed(axis, strategy) for axis, strategy in self.axes.items()}
        together = {name: strategy for axis, strategy in own.items() for name in as_axes(axis)}
        usual = {name: together.get(name) or changed(name, getattr(self, name)) for name in _USUAL}
        return replace(self, axes=own, **usual)

    @property
    def microbatches(self) -> int:
        """Microbatches per update and rank."""
        return self.accumulate * (1 if self.pipe is None else self.pipe.num_microbatches)

    @property
    def independent(self) -> bool:
        """Whether every rank trains a model of its own (NO_SYNC)."""
        return any(strategy.role.reduces == "never" for strategy in self.strategies.values())

    def reducer(self, mesh_axes: Iterable[str]) -> AbstractStrategy:
        """The strategy whose buckets and overlap a mesh uses: that of `data`, or of the mesh's outermost axis."""
        there = self.on(mesh_axes)
        return there.get("data") or next(iter(there.values()), self.data)


_USUAL = ("data", "fsdp", "context")
_DEFAULTS = {"data": Replicate(), "fsdp": Shard(), "context": Context(), "pipe": None}
_OF_KIND = {
    "mesh": (MeshShape, "an ax.MeshShape of degrees (give a Mesh beside the plan)"),
    "partition": (Partition, "a mapping of regular expressions of parameter names to PartitionSpecs, or pairs of them"),
}


def _as_rules(given: Any) -> tuple[Any, list[str]]:
    """Builds path rules from a mapping or pairs, and lists their problems; anything else is returned as it is."""
    try:
        return (Partition.of(given) if isinstance(given, (Mapping, list, tuple)) else given), []
    except (TypeError, ValueError) as error:
        return None, [f"partition={given!r}: {error}"]


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_pipelined(value: Any) -> bool:
    from axonml_jax.pipeline.schedules import Pipelined

    return isinstance(value, Pipelined)
