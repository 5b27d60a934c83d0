"""Layers swapped as they are made, inside a `with auto_parallelize(mesh):` block of this thread."""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flax import nnx

from axonml_jax.parallel.tensor.auto import swap
from axonml_jax.parallel.tensor.auto.exclude import Rule
from axonml_jax.parallel.tensor.auto.split_axes import SplitAxes
from axonml_jax.parallel.tensor.auto.swap_report import AutoReport, SwappedLayer

_KINDS = (*swap.RULES, nnx.MultiHeadAttention)
_lock = threading.Lock()
_original: dict[type, Callable] = {}
_open_blocks = 0


class _Blocks(threading.local):
    """The blocks that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Block] = []


class _Block:
    def __init__(self, ground: SplitAxes, report: AutoReport, exclude: tuple[Rule, ...]):
        self.ground, self.report, self.exclude = ground, report, exclude
        self.seen: set[Rule] = set()
        self.numbers: dict[str, int] = {}
        self.entries: dict[int, SwappedLayer] = {}
        self.layers: list[Any] = []  # kept, so that no id is given twice

    def made(self, layer: Any) -> None:
        """A layer has just been made: swap it."""
        kind = next(base for base in _KINDS if isinstance(layer, base))
        number = self.numbers[kind.__name__] = self.numbers.get(kind.__name__, 0) + 1
        try:
            parts = self._changes(kind, layer)
        except swap.Left as left:
            became, why = None, str(left)
        else:
            became, why = parts[""][0].__name__, parts[""][3]
            for name, change in parts.items():
                part = getattr(layer, name) if name else layer
                swap.apply(part, change)
                self.entries.pop(id(part), None)  # a projection is told of with its attention
        self.entries[id(layer)] = SwappedLayer(f"{kind.__name__} {number}", kind.__name__, became, why)
        self.layers.append(layer)
        self.report.entries[:] = self.entries.values()

    def _changes(self, kind: type, layer: Any) -> dict[str, swap.Change]:
        for rule in self.exclude:
            if isinstance(rule, type) and isinstance(layer, rule):
                self.seen.add(rule)
                raise swap.Left(f"excluded by {rule.__name__}")
        if kind is nnx.MultiHeadAttention:
            return swap.attention(layer, self.ground)
        return {"": swap.RULES[kind](layer, self.ground)}


_blocks = _Blocks()


@contextmanager
def making(ground: SplitAxes, report: AutoReport, exclude: tuple[Rule, ...] = ()) -> Iterator[AutoReport]:
    """Swap what this thread makes until the block ends, whichever way it ends."""
    block = _Block(ground, report, exclude)
    _blocks.stack.append(block)
    _watch(+1)
    try:
        yield report
    finally:
        _watch(-1)
        _blocks.stack.pop()
    if unused := [rule for rule in exclude if rule not in block.seen]:
        kinds = sorted({entry.kind for entry in report.entries})
        raise ValueError(
            f"exclude={unused} left out nothing in this block, which made {', '.join(kinds) or 'no layer'}"
        )
    if (warning := report.nothing_swapped()) is not None:
        warnings.warn(warning, stacklevel=3)


def _watch(more: int) -> None:
    """Flax's layers report that they were made while a block is open in any thread."""
    global _open_blocks  # constructors belong to the process, as the lock around this does
    with _lock:
        before, _open_blocks = _open_blocks, _open_blocks + more
        if before == 0:
            for kind in _KINDS:
                _original[kind] = kind.__init__
                kind.__init__ = _reporting(kind, kind.__init__)  # pyright: ignore[reportAttributeAccessIssue]
        elif _open_blocks == 0:
            for kind in _KINDS:
                kind.__init__ = _original.pop(kind)  # pyright: ignore[reportAttributeAccessIssue]


def _reporting(kind: type, init: Callable) -> Callable:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if type(self) is kind and _blocks.stack:
            _blocks.stack[-1].made(self)

    return __init__
