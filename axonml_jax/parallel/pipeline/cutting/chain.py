"""Modules given one by one as the stages of a pipeline: one model that applies them in order and marks where each begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

from axonml_jax._types import PyTree
from axonml_jax.compat.operation import Operation

_MARK = "axonml.stage"


@dataclass(frozen=True)
class PipelineStage:
    """A module and where it runs.

    Attributes:
      module: an NNX or a Linen module that takes what the one before returns.
      device: its index on the `pipe` axis; neighbours on one device are one stage.
    """

    module: Any
    device: int


def mark(tree: PyTree, stage: int) -> PyTree:
    """The same arrays, named in the program as what stage `stage` starts from."""
    return jax.tree.map(lambda x: checkpoint_name(x, f"{_MARK}{stage}"), tree)


def marked(op: Operation) -> int | None:
    """The stage that an operation marks the beginning of; None for all others."""
    return int(op.label[len(_MARK) :]) if op.label.startswith(_MARK) else None


class Chain(nnx.Module):
    """NNX modules applied in order; `groups[i]` is how many of them make stage i."""

    def __init__(self, modules: Sequence[nnx.Module], groups: Sequence[int]):
        self.stages = nnx.List(modules)
        self.groups = tuple(groups)

    def __call__(self, x: PyTree) -> PyTree:
        """The last module's result of the first one's argument."""
        start = 0
        for stage, count in enumerate(self.groups):
            x = mark(x, stage) if stage else x
            for module in self.stages[start : start + count]:
                x = module(x)
            start += count
        return x

    def prefixes(self) -> list[str]:
        """How the paths of each module's parameters begin."""
        return [f"stages/{i}/" for i in range(len(self.stages))]


class LinenChain(linen.Module):
    """Linen modules applied in order; `groups[i]` is how many of them make stage i."""

    stages: tuple[linen.Module, ...]
    groups: tuple[int, ...]

    def __call__(self, x: PyTree) -> PyTree:
        """The last module's result of the first one's argument."""
        start = 0
        for stage, count in enumerate(self.groups):
            x = mark(x, stage) if stage else x
            for module in self.stages[start : start + count]:
                x = module(x)  # pyright: ignore[reportCallIssue]
            start += count
        return x

    def prefixes(self) -> list[str]:
        """How the paths of each module's parameters begin."""
        return [f"stages_{i}/" for i in range(len(self.stages))]


def stage_of_modules(chain: Chain | LinenChain) -> list[int]:
    """The stage of every module."""
    return [stage for stage, count in enumerate(chain.groups) for _ in range(count)]


def join_variables(variables: Sequence[PyTree]) -> PyTree:
    """The variables of a `LinenChain` from those of its modules, each all collections or the params alone."""
    joined: dict[str, dict[str, Any]] = {}
    for i, given in enumerate(variables):
        collections = dict(given) if "params" in given else {"params": given}
        for name, tree in collections.items():
            joined.setdefault(name, {})[f"stages_{i}"] = tree
    return joined
