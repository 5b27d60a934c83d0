"""`auto_parallelize`: a Flax NNX model's own layers made tensor-parallel ones in place."""

import difflib
import functools
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flax import linen, nnx

from axonml_jax.base import warn
from axonml_jax.compat.order import no_mesh_around
from axonml_jax.layers import swap
from axonml_jax.layers.swap import AutoReport, Example, Pairs, SplitAxes, SwappedLayer, find_pairs, port
from axonml_jax.layers.whole import SPEC
from axonml_jax.mesh.axes import LAYER_AXES

# --------------------------------------------------------------------------------------------------
# Layers that the user leaves out of `auto_parallelize`: by path, or by the type of a module.
# --------------------------------------------------------------------------------------------------

Rule = str | type
"""A regular expression of a module's whole path, or a type of modules; what is inside such a module is left out too."""


def rules_of(exclude: Rule | Collection[Rule], *, paths: bool = True) -> tuple[Rule, ...]:
    """Check the `exclude` argument and return it as a tuple.

    Args:
      exclude: one rule or several.
      paths: whether rules may be paths; in a `with` block layers have none yet.

    Raises:
      TypeError: for anything else, and for paths where there are none.
      ValueError: for what is no regular expression.
    """
    rules: tuple[Any, ...] = tuple(exclude) if isinstance(exclude, list | tuple | set | frozenset) else (exclude,)
    wrong = [rule for rule in rules if not isinstance(rule, str | type)]
    if wrong:
        raise TypeError(
            f"exclude={exclude!r} has {wrong}: give regular expressions of module paths ('decoder/position') or "
            "types of modules"
        )
    if not paths and (names := [rule for rule in rules if isinstance(rule, str)]):
        raise TypeError(
            f"exclude={names} are paths, and layers made in a block have none yet: give types of modules there, or swap the "
            "finished model, auto_parallelize(model, mesh, exclude=...)"
        )
    for rule in rules:
        try:
            re.compile(rule if isinstance(rule, str) else "")
        except re.error as error:
            raise ValueError(f"exclude: {rule!r} is no regular expression: {error}") from error
    return rules


def excluded(modules: Mapping[tuple, Any], rules: Iterable[Rule]) -> dict[tuple, str]:
    """The excluded modules, each with the reason.

    Raises:
      ValueError: for a rule that matches nothing, with the nearest path or the types there are.
    """
    names = {path: "/".join(map(str, path)) for path in modules}
    found: dict[tuple, str] = {}
    unused = []
    for rule in rules:
        outer = [path for path, module in modules.items() if _matches(rule, names[path], module)]
        if not outer:
            unused.append(_nothing(rule, [name for name in names.values() if name], modules))
        for path in modules:
            if any(path[: len(each)] == each for each in outer):
                found[path] = f"excluded by {rule!r}" if isinstance(rule, str) else f"excluded by {rule.__name__}"
    if unused:
        raise ValueError("exclude leaves out nothing by these:\n" + "\n".join(unused))
    return found


def _matches(rule: Rule, name: str, module: Any) -> bool:
    return re.fullmatch(rule, name) is not None if isinstance(rule, str) else isinstance(module, rule)


def _nothing(rule: Rule, names: list[str], modules: Mapping[tuple, Any]) -> str:
    if isinstance(rule, type):
        kinds = sorted({type(module).__name__ for module in modules.values()})
        return f"  {rule.__name__}: the model has no such module, but {', '.join(kinds)}"
    near = difflib.get_close_matches(rule, names, n=1, cutoff=0.0)
    return f"  {rule!r}: no module has this path" + (f"; the nearest is {near[0]!r}" if near else "")


# --------------------------------------------------------------------------------------------------
# Layers swapped as they are made, inside a `with auto_parallelize(mesh):` block of this thread.
# --------------------------------------------------------------------------------------------------

_KINDS = (*swap.RULES, nnx.MultiHeadAttention)
_lock = threading.Lock()
_original: dict[type, Callable] = {}
_open_blocks = 0


class _Blocks(threading.local):
    """The open blocks of this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Block] = []


class _Block:
    def __init__(self, split_axes: SplitAxes, report: AutoReport, exclude: tuple[Rule, ...]):
        self.split_axes, self.report, self.exclude = split_axes, report, exclude
        self.seen: set[Rule] = set()
        self.numbers: dict[str, int] = {}
        self.entries: dict[int, SwappedLayer] = {}
        self.layers: list[Any] = []  # kept, so that no id is given twice

    def made(self, layer: Any) -> None:
        """Swap a layer that has just been made."""
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
                self.entries.pop(id(part), None)  # the attention layer's entry stands for its projections
        self.entries[id(layer)] = SwappedLayer(f"{kind.__name__} {number}", kind.__name__, became, why)
        self.layers.append(layer)
        self.report.entries[:] = self.entries.values()

    def _changes(self, kind: type, layer: Any) -> dict[str, swap.Change]:
        for rule in self.exclude:
            if isinstance(rule, type) and isinstance(layer, rule):
                self.seen.add(rule)
                raise swap.Left(f"excluded by {rule.__name__}")
        if kind is nnx.MultiHeadAttention:
            return swap.attention(layer, self.split_axes)
        return {"": swap.RULES[kind](layer, self.split_axes)}


_blocks = _Blocks()


@contextmanager
def making(split_axes: SplitAxes, report: AutoReport, exclude: tuple[Rule, ...] = ()) -> Iterator[AutoReport]:
    """Swap the layers that this thread makes until the block ends, with or without an error."""
    block = _Block(split_axes, report, exclude)
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
        warn(warning)


def _watch(more: int) -> None:
    """Make Flax's layer constructors report new layers while a block is open in any thread."""
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


# --------------------------------------------------------------------------------------------------
# `auto_parallelize`: as a function on a model that exists, or as a context in which models are made.
# --------------------------------------------------------------------------------------------------

Path = tuple[Any, ...]


@no_mesh_around()
def auto_parallelize(
    *args: Any,
    mesh: Any = None,
    example: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    exclude: Rule | Collection[Rule] = (),
) -> Any:
    """Make a Flax NNX model's own layers tensor-parallel ones, in place and without touching its code.

    `auto_parallelize(model, mesh)` swaps the layers of a model that exists; `with auto_parallelize(mesh) as report:` those of
    every model made in the block, by this thread. `Linear`, `LinearGeneral`, `Einsum`, `Embed`, `Conv` and
    `MultiHeadAttention` (their own types, not subclasses) keep their parameters, names and results; where no axis is bound
    they stay the plain layers. A layer that is not paired gathers its output. With `example`, the model's program is traced,
    and linear layers (`Linear`, `LinearGeneral`, `Einsum`) whose outputs reach other ones through operations that treat all
    parts alike, such as activations, or attention of heads, are paired with them (Megatron's column and row): nothing is
    gathered between. The result never depends on any of this, nor on how code reads parameters: all code but its own layer
    sees a split parameter gathered.

    Args:
      model: an `nnx.Module`, on arrays or on shapes.
      mesh: a mesh with `tensor`, or with `row`, `col` and `depth`, then for AxoNN's 3-D layers (see `ax.make_mesh`).
      example: the arguments of a call of the model (arrays or shapes): one, or a tuple of several; for pairing.
      example_kwargs: the keyword arguments of that call.
      exclude: layers to leave as they are: regular expressions of whole paths of modules (`"decoder/position"`) and types of
        modules, one or several; with a module all layers in it. In a block only types.

    Returns:
      An `AutoReport` of what was swapped and what was left and why; print it. As a context, that of the block.

    Raises:
      TypeError: when the model is no `nnx.Module`, or cannot be called as the example says.
      ValueError: when the mesh has no axis that splits layers, and for an `exclude` that matches nothing.

    Warns:
      UserWarning: when nothing was swapped.
    """
    if len(args) > 2 or (len(args) == 2 and mesh is not None) or (not args and mesh is None):
        raise TypeError("give auto_parallelize(model, mesh), or with auto_parallelize(mesh): ...")
    if len(args) == 2 or (len(args) == 1 and mesh is not None):
        model, mesh = args if len(args) == 2 else (args[0], mesh)
        if not isinstance(model, nnx.Module):
            raise TypeError(_not_nnx(model))
        given = example is not None or example_kwargs is not None
        call = Example.of(model, example, example_kwargs) if given else None
        report = _swap_all(model, mesh, call, rules_of(exclude))
        if (warning := report.nothing_swapped()) is not None:
            warn(warning)
        return report
    if example is not None or example_kwargs is not None:
        raise TypeError(
            "example belongs to auto_parallelize(model, mesh, example=...): in a block there is no model yet"
        )
    mesh = args[0] if args else mesh
    return making(SplitAxes.of(mesh), AutoReport(_splitting(mesh)), rules_of(exclude, paths=False))


def _not_nnx(model: Any) -> str:
    said = f"auto_parallelize swaps the layers of an nnx.Module, but a {type(model).__name__} was given"
    if not isinstance(model, linen.Module):
        return said
    remedy = "split its parameters by rules, ax.TensorParallel(model, mesh, rules=..., params=...)"
    return f"{said}: a Linen module makes its layers while it is called, so that there are none to swap; {remedy}"


def _splitting(mesh: Any) -> dict[str, int]:
    return {axis: size for axis, size in dict(mesh.shape).items() if size > 1 and axis in LAYER_AXES}


def _swap_all(model: nnx.Module, mesh: Any, example: Example | None, exclude: tuple[Rule, ...]) -> AutoReport:
    split_axes = SplitAxes.of(mesh)
    report = AutoReport(_splitting(mesh))
    modules = {path: module for path, module in nnx.iter_graph(model) if isinstance(module, nnx.Module)}
    changes, reasons, kinds = _changes(modules, split_axes)
    for path, why in excluded(modules, exclude).items():
        _leave(changes, reasons, path, why)
    _leave_shared(modules, changes, reasons)
    if example is not None:
        found = _paired(model, modules, changes, split_axes, example)
        for path in found.read:
            _leave(changes, reasons, path, "its parameters are read outside its own call")
        for path in found.why.keys() & changes.keys() - found.columns:
            kind, attributes, specs, how = changes[path]
            changes[path] = kind, attributes, specs, f"{how}: {found.why[path]}"
    elif sum(bool(change[1].get("gather_output")) for change in changes.values()) > 1 and not split_axes.is_grid:
        report.entries.append(
            SwappedLayer("(all)", "", None, "give example= to pair linear layers that feed each other")
        )
    for path, change in changes.items():
        swap.apply(modules[path], change)
    for path, kind in kinds.items():
        name = "/".join(map(str, path)) or "(the model)"
        if path in changes:
            report.entries.append(SwappedLayer(name, kind, changes[path][0].__name__, changes[path][3]))
        else:
            report.entries.append(SwappedLayer(name, kind, None, reasons[path]))
    return report


def _changes(
    modules: Mapping[Path, Any], split_axes: SplitAxes
) -> tuple[dict[Path, swap.Change], dict[Path, str], dict[Path, str]]:
    """The change of each layer, the reasons why others stay, and every layer's type, in the model's order."""
    changes: dict[Path, swap.Change] = {}
    reasons: dict[Path, str] = {}
    kinds: dict[Path, str] = {}
    for path, module in sorted(modules.items(), key=lambda item: len(item[0])):
        kind = type(module)
        if kind is nnx.MultiHeadAttention:
            kinds[path] = kind.__name__
            try:
                parts = swap.attention(module, split_axes)
            except swap.Left as left:
                reasons[path] = f"{left}; its projections are split one by one"
                continue
            changes |= {(*path, name) if name else path: change for name, change in parts.items()}
            kinds |= {(*path, name): "LinearGeneral" for name in parts if name}
        elif kind in swap.RULES and path not in changes:
            kinds[path] = kind.__name__
            try:
                changes[path] = swap.RULES[kind](module, split_axes)
            except swap.Left as left:
                reasons[path] = str(left)
        elif path not in changes and any(isinstance(value, nnx.Param) for value in vars(module).values()):
            kinds[path] = kind.__name__
            reasons[path] = _why_not(module)
    order = {path: i for i, path in enumerate(modules)}
    return changes, reasons, dict(sorted(kinds.items(), key=lambda item: order[item[0]]))


def _why_not(module: nnx.Module) -> str:
    kind = type(module)
    if any(any(each.get_metadata().get(SPEC, ())) for each in vars(module).values() if isinstance(each, nnx.Param)):
        return "it is a parallel layer already"
    if base := next((base for base in swap.RULES if issubclass(kind, base)), None):
        return f"a subclass of {base.__name__}, whose code is its own"
    return "no layer that is split"


def _leave_shared(modules: Mapping[Path, Any], changes: dict, reasons: dict) -> None:
    """Leave layers that share a parameter: its one split may not be right for both."""
    owners: dict[int, list[Path]] = {}
    for path, module in modules.items():
        for value in vars(module).values():
            if isinstance(value, nnx.Param):
                owners.setdefault(id(value), []).append(path)
    for paths in owners.values():
        for path in paths if len(paths) > 1 else ():
            _leave(changes, reasons, path, "it shares a parameter with another layer")


def _leave(changes: dict[Path, swap.Change], reasons: dict[Path, str], path: Path, why: str) -> None:
    """Exclude a layer from the swap; with a projection of an attention layer, the whole attention layer."""
    parent = path[:-1]
    whole = [parent, *((*parent, name) for name in ("query", "key", "value", "out"))]
    paths = whole if parent in changes else [path]
    for each in paths:
        if changes.pop(each, None) is not None:
            reasons[each] = why


def _paired(
    model: nnx.Module, modules: Mapping[Path, Any], changes: dict, split_axes: SplitAxes, example: Example
) -> Pairs:
    """Pair linear layers in `changes`: columns that keep their output split, and the rows that take it."""
    inside = {path for path in changes if path[:-1] in changes and path}  # of an attention layer split by heads
    found_ports = {
        path: port(modules[path], split_axes.axis, split_axes.ranks) for path in changes if path not in inside
    }
    ports = {path: each for path, each in found_ports.items() if each is not None and not split_axes.is_grid}
    others = {path for path in changes if path not in ports and type(modules[path]) is not nnx.MultiHeadAttention}
    found = find_pairs(model, ports, others, example, split_axes.ranks)
    for path in found.columns:
        changes[path] = ports[path].opens(found.blocks.get(path, 1))
    for path, where in found.rows.items():
        change = ports[path].takes(*where)
        assert change is not None
        changes[path] = change
    return found
