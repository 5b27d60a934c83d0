"""Path rules that split the parameters of any model over axes whose communication XLA's partitioner chooses."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import PartitionSpec

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.mesh.axes import as_axes
from axonml_jax.model.functional import Functional
from axonml_jax.model.lora.lora_view import Adapter
from axonml_jax.parallel.tensor.adapter_specs import specs_beside

PARTITIONED = ("tensor", "expert")
"""The axes that rules may name. Along `expert` rows of the batch are split too."""

Rules = Mapping[str, PartitionSpec] | Iterable[tuple[str, PartitionSpec]]


@dataclass(frozen=True)
class Partition:
    """Rules by path name; the first that matches a parameter's whole name says how it is split.

    Adapters (`ax.lora`) are split as the sides of their matrices are; rules name the model's own parameters.

    Attributes:
      rules: (regular expression, PartitionSpec over `tensor` and `expert`) in order.
      adapters: of a model's matrices, by path (see `for_model`).
    """

    rules: tuple[tuple[str, PartitionSpec], ...]
    adapters: tuple[tuple[str, Adapter], ...] = field(default=(), repr=False)

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
                "rules are pairs of a regular expression of parameter names and a PartitionSpec over 'tensor' and 'expert', "
                'such as (r".*/up/kernel", P(None, "tensor")): ' + ("; ".join(wrong) or "none was given")
            )
        return Partition(pairs)

    @property
    def axes(self) -> frozenset[str]:
        """The axes that the rules name, all of which a step leaves to the partitioner; `tensor` where they name none."""
        return frozenset(
            axis for _, spec in self.rules for entry in spec for axis in as_axes(entry or ())
        ) or frozenset(PARTITIONED[:1])

    def for_model(self, model: Functional) -> "Partition":
        """The rules, which know the model's adapters."""
        return replace(self, adapters=tuple(model.adapters.items()))

    def specs(self, variables: PyTree, degrees: Mapping[str, int]) -> dict[str, PartitionSpec]:
        """How each parameter is split, by path name.

        Args:
          variables: shapes of all parameters.
          degrees: size of every mesh axis.

        Raises:
          ValueError: listing every parameter that no rule matches or whose dims do not divide, and every rule that is the
            first to match none (which another one hides, or which has a typing error).
        """
        added = {name for _, adapter in self.adapters for name in adapter.added}
        leaves = {name: leaf for name, leaf in named_leaves(variables).items() if name not in added}
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
        own = {name: rule[1] for name, rule in chosen.items() if rule is not None}
        beside = (specs_beside(own[name], adapter) for name, adapter in self.adapters)
        return own | {name: spec for specs in beside for name, spec in specs.items()}

    def _unused(self, rule: tuple[str, PartitionSpec], names: Iterable[str]) -> str:
        hidden = [name for name in names if re.fullmatch(rule[0], name)]
        if not hidden:
            return "matches no parameter"
        first = next(earlier for earlier, _ in self.rules if re.fullmatch(earlier, hidden[0]))
        return f"every parameter it matches ({', '.join(hidden[:3])}) is taken by an earlier rule, {first!r}"


def _wrong(rule: Any) -> str | None:
    if len(rule) != 2 or not isinstance(rule[0], str) or not isinstance(rule[1], PartitionSpec):
        return f"{rule!r} is no such pair"
    try:
        re.compile(rule[0])
    except re.error as error:
        return f"{rule[0]!r} is no regular expression ({error})"
    others = {axis for entry in rule[1] for axis in as_axes(entry or ())} - {*PARTITIONED}
    return f"{rule[0]!r} names the axes {sorted(others)}, which are not left to the partitioner" if others else None


def _indivisible(shape: tuple[int, ...], spec: PartitionSpec, degrees: Mapping[str, int]) -> str | None:
    if len(spec) > len(shape):
        return f"{spec} has more entries than its shape {tuple(shape)} has dims"
    ranks = lambda entry: math.prod(degrees.get(axis, 1) for axis in as_axes(entry or ()))
    wrong = {dim: entry for dim, entry in enumerate(spec) if shape[dim] % ranks(entry)}
    over = " and ".join(dict.fromkeys(f"{axis}={degrees[axis]}" for entry in wrong.values() for axis in as_axes(entry)))
    return f"dims {[*wrong]} of {tuple(shape)} do not divide over {over} ({spec})" if wrong else None
