"""Path rules that split the parameters of any model over an axis whose communication XLA's partitioner chooses."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.mesh.axes import as_axes
from axonml_jax.model.functional import Variables
from axonml_jax.model.trainable import merge
from axonml_jax.sharding.layout import Layout, is_layout

if TYPE_CHECKING:
    from axonml_jax.parallel.placement import Placement

PARTITIONED = "tensor"
"""The axis that may be left to the partitioner."""

Rules = Mapping[str, PartitionSpec] | Iterable[tuple[str, PartitionSpec]]


@dataclass(frozen=True)
class Partition:
    """Rules by path name; the first that matches a parameter's whole name says how it is split.

    Attributes:
      rules: (regular expression, PartitionSpec over `tensor`) in order.
    """

    rules: tuple[tuple[str, PartitionSpec], ...]

    @staticmethod
    def of(rules: Rules) -> "Partition":
        """From a mapping or from pairs.

        Raises:
          TypeError, ValueError: listing every rule that is none.
        """
        pairs: Any = tuple(rules.items() if isinstance(rules, Mapping) else (tuple(rule) for rule in rules))
        wrong = [problem for rule in pairs if (problem := _wrong(rule))]
        if wrong or not pairs:
            raise ValueError(
                "rules are pairs of a regular expression of parameter names and a PartitionSpec over 'tensor', such as "
                '(r".*/up/kernel", P(None, "tensor")): ' + ("; ".join(wrong) or "none was given")
            )
        return Partition(pairs)

    def specs(self, variables: PyTree, degrees: Mapping[str, int]) -> dict[str, PartitionSpec]:
        """How each parameter is split, by path name.

        Args:
          variables: shapes of all parameters.
          degrees: size of every mesh axis.

        Raises:
          ValueError: listing every parameter that no rule matches or whose dims do not divide, and every rule that is the
            first to match none (which another one hides, or which has a typing error).
        """
        leaves = named_leaves(variables)
        chosen = {name: next((rule for rule in self.rules if re.fullmatch(rule[0], name)), None) for name in leaves}
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
        return {name: rule[1] for name, rule in chosen.items() if rule is not None}

    def _unused(self, rule: tuple[str, PartitionSpec], names: Iterable[str]) -> str:
        hidden = [name for name in names if re.fullmatch(rule[0], name)]
        if not hidden:
            return "matches no parameter"
        first = next(earlier for earlier, _ in self.rules if re.fullmatch(earlier, hidden[0]))
        return f"every parameter it matches ({', '.join(hidden[:3])}) is taken by an earlier rule, {first!r}"


def by_rules(
    partition: Partition, variables: Variables, degrees: Mapping[str, int], in_layers: Mapping[str, Any]
) -> dict[str, PartitionSpec]:
    """The splits that a plan's rules ask for, by path name.

    Raises:
      ValueError: for a mesh with other axes than data and tensor, a model whose layers split themselves, and rules that do
        not fit.
    """
    split = [name for name, spec in in_layers.items() if any(spec)]
    if split:
        raise ValueError(
            f"rules split models whose layers do not split themselves, but these do: {', '.join(split[:8])}"
        )
    others = {axis: size for axis, size in degrees.items() if size > 1 and axis not in ("data", PARTITIONED)}
    if others:
        raise ValueError(
            f"with path rules the mesh has data and tensor, but this one has {others} too: build the model with parallel "
            "layers, or swap its layers by ax.auto_parallelize"
        )
    return partition.specs(merge(variables.params, variables.frozen), degrees)


def left_to_partitioner(placement: "Placement") -> "Placement":
    """A placement whose `tensor` axis is the partitioner's: leaves look whole along it inside a step, and rest split."""

    def whole(layout: Layout) -> Layout:
        entries = [tuple(axis for axis in as_axes(entry or ()) if axis != PARTITIONED) for entry in layout.spec]
        spec = PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))
        parts = [math.prod(placement.degrees[axis] for axis in entry) for entry in entries]
        parts += [1] * (len(layout.stored) - len(parts))
        return replace(layout, spec=spec, parts=tuple(parts))

    seen = (jax.tree.map(whole, tree, is_leaf=is_layout) for tree in (placement.params, placement.frozen))
    params, frozen = seen
    return replace(placement, params=params, frozen=frozen, at_rest=placement)


def _wrong(rule: Any) -> str | None:
    if len(rule) != 2 or not isinstance(rule[0], str) or not isinstance(rule[1], PartitionSpec):
        return f"{rule!r} is no such pair"
    try:
        re.compile(rule[0])
    except re.error as error:
        return f"{rule[0]!r} is no regular expression ({error})"
    others = {axis for entry in rule[1] for axis in as_axes(entry or ())} - {PARTITIONED}
    return f"{rule[0]!r} names the axes {sorted(others)}, which are not left to the partitioner" if others else None


def _indivisible(shape: tuple[int, ...], spec: PartitionSpec, degrees: Mapping[str, int]) -> str | None:
    if len(spec) > len(shape):
        return f"{spec} has more entries than its shape {tuple(shape)} has dims"
    ranks = degrees.get(PARTITIONED, 1)
    wrong = [dim for dim, entry in enumerate(spec) if entry and shape[dim] % ranks]
    return f"dims {wrong} of {tuple(shape)} do not divide over tensor={ranks} ({spec})" if wrong else None
