"""The boundary of the model in a traced loss: a stand-in that notes its calls, which are made later on a rank's operands.

What a model does inside exists at a rank's shapes only: collectives, kernels, experts' capacities. So a call of the model, of
one of its methods or modules, is one equation of the loss's program, of which shapes alone are known; it is made when that
program is run on a rank's rows.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axonml_jax.base import is_array, named_leaves
from axonml_jax.collectives.primitives import vary
from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.model_call import Transformed, model_call
from axonml_jax.compat.row_keys import Drawn, drawn_by_rows, is_row_key
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.meaning.following import Following
from axonml_jax.meaning.places import SUM, Group, Place, Places, Split, split_sizes
from axonml_jax.meaning.settings import Attribute, Changed, Settings, having, module_at
from axonml_jax.meaning.values import Ranks, Value
from axonml_jax.model.view import BoundLinen, Functional, Mode, Variables, hidden_arrays, hidden_words, tracers_within
from axonml_jax.program.program import Equation, all_but_named, read_program

Path = tuple[Any, ...]

Share = Fraction | int
"""How an array of the whole batch is made of the ranks': a factor times their sum, or the one of the rank with this number."""


@dataclass(frozen=True, eq=False)
class Call:
    """A call of the model, of a module or a method of it, as it was noted in a trace.

    Attributes:
      path: the path of the module in the model; () is the model.
      method: its name.
      treedef: the structure of its arguments.
      rest: their leaves, None in the place of arrays.
      given: the abstract values of the arrays.
      made: those of the results: arrays that are returned, then variables of the model that are changed.
      out_treedef, out_rest: of what is returned, likewise.
      changed: the paths of the changed variables.
      set: the attributes of its modules that the loss has set before it, such as those of `model.eval()`.
      draws: what is drawn in it, where keys are those of rows (`compat/row_keys.py`).
      traced: its trace, of the variables, a key and the arrays, flat: it is read where shapes do not say enough.
      shares: of a call at a part of the positions, how each array that is returned is made of the ranks' where it has no
        positions (`pooled.py`); None: it is not known how. An array without a share is the mean.
    """

    path: Path
    method: str
    treedef: Any
    rest: tuple[Any, ...]
    given: tuple[Any, ...]
    made: tuple[Any, ...]
    out_treedef: Any
    out_rest: tuple[Any, ...]
    changed: tuple[Path, ...]
    set: tuple[Attribute, ...] = ()
    draws: tuple[Drawn, ...] = ()
    traced: Any = None
    shares: tuple[Share | None, ...] = ()

    def alike(self, other: "Call") -> bool:
        """Whether another call is the same, perhaps at other shapes."""
        count = lambda call: (len(call.given), len(call.made))
        hosts = [[x for x in call.rest if _on_host(x)] for call in (self, other)]
        if len(hosts[0]) != len(hosts[1]) or not all(map(np.array_equal, *hosts)):
            return False
        same = (self.path, self.method, self.treedef) == (other.path, other.method, other.treedef)
        same = same and self.changed == other.changed and len(self.set) == len(other.set)
        return same and count(self) == count(other) and all(map(Attribute.same, self.set, other.set))

    def returns_numbers(self, other: "Call") -> bool:
        """Whether it returns an array whose shape does not change with the rows."""
        returned = self.out_rest.count(None)
        return any(a.shape == b.shape for a, b in zip(self.made[:returned], other.made[:returned], strict=True))

    def followed(self, given: Sequence[Places], groups: Sequence[Group]) -> list[Places]:
        """The places of its results, followed through the model's own operations."""
        program, following = read_program(self.traced, all_but_named), Following(groups)
        fixed = [following.none] * (len(program.inputs) - len(given))
        return following.program(program, [*fixed, *given])

    def run(self, bound: Any, arrays: Sequence[Any]) -> list[Any]:
        """Makes the call on a bound model, with other arrays."""
        with having(bound, self.set):
            out = _invoke(bound, self.path, self.method, self.treedef, self.rest, arrays)
        after = variables_of(bound) if self.changed else {}
        return [*_arrays(out), *(x for path in self.changed for x in jax.tree.leaves(after[path]))]


@dataclass(eq=False)
class Calls:
    """Notes the calls of the model in one trace, in the place of making them.

    Attributes:
      model, mode, variables, key: the model, and how and to what it is bound.
      axes: the mesh axes over which a rank's arrays are typed as varying.
      noted: the calls, in order.
      drawn: the random streams that calls have drawn from, by path.
      drawn_by_loss: those that the loss itself has.
    """

    model: Functional
    mode: Mode
    variables: Variables
    key: jax.Array
    axes: tuple[str, ...]
    noted: list[Call] = field(default_factory=list)
    drawn: set[Path] = field(default_factory=set)
    drawn_by_loss: set[Path] = field(default_factory=set)
    _there: dict[Path, Any] = field(default_factory=dict)
    _settings: Settings = field(default_factory=lambda: Settings(()))
    _touched: set[tuple[Path, str]] = field(default_factory=set)
    _unknown: set[tuple[int, str]] = field(default_factory=set)

    @contextmanager
    def stand_in(self) -> Iterator[Any]:
        """Context with the model as the loss gets it: its variables can be read, and its calls are noted."""
        bound = self.model.bind(self.variables, self.key, self.mode)
        if isinstance(bound, BoundLinen):
            self._there = variables_of(bound)
            bound.__class__ = _linen_stand_in(self)
            yield bound
            return
        nodes = list(nnx.iter_graph(bound))
        if not is_row_key(self.key):  # under keys of rows `refuse_draws` refuses a stream from which both draw
            _turn_streams(nodes)
        self._there = _values(nodes)
        self._settings = Settings(nodes)
        modules = [(path, node) for path, node in nodes if isinstance(node, nnx.Module)]
        own = {id(module): (self, bound, path) for path, module in modules}
        for _, module in modules:
            module.__class__ = _nnx_stand_in(type(module))
        _STANDING.update(own)
        counts = _counts(nodes)
        try:
            yield bound
            self.drawn_by_loss |= _drawn_from(nodes, counts)
        finally:
            for each in own:
                del _STANDING[each]

    def changed_by_loss(self, bound: Any) -> dict[Path, Any]:
        """The variables that the loss has changed itself, outside of its calls of the model."""
        return self._changed(variables_of(bound))

    def _changed(self, values: Mapping[Path, Any]) -> dict[Path, Any]:
        return {path: x for path, x in values.items() if self._differs(path, x)}

    def _set_by_loss(self) -> tuple[Attribute, ...]:
        """The attributes of modules that differ from those at the start, or that an earlier call has set.

        Raises:
          Transformed: where they are more than settings, or where a call has set what only the real model knows.
        """
        found = self._settings.changed(also=self._touched)
        if found.others or self._unknown or not self._settings.same_contents():
            raise Transformed("changes the model's modules in more than settings")
        return found.settings

    def _set_by_call(self, bound: Any, found: Changed) -> None:
        """Gives the stand-in the settings that a call has set; other attributes that it set may not be read."""
        for each in found.settings:
            vars(module_at(bound, each.path))[each.name] = each.value
            self._touched.add((each.path, each.name))
        for path, name in found.others:
            vars(owner := module_at(bound, path)).pop(name, None)
            self._unknown.add((id(owner), name))

    def _differs(self, path: Path, x: Any) -> bool:
        old = jax.tree.leaves(self._there.get(path))
        return len(old) != len(jax.tree.leaves(x)) or any(
            a is not b for a, b in zip(old, jax.tree.leaves(x), strict=True)
        )

    def note(self, bound: Any, path: Path, method: str, args: tuple, kwargs: dict) -> Any:
        """Notes a call, and returns stand-ins for its results.

        NumPy's arrays are passed as they are where the model's code must know what they hold.
        """
        if self._changed(variables_of(bound)):
            raise Transformed("changes the model's variables before it calls the model")
        leaves, treedef = jax.tree.flatten((args, kwargs))
        about = (bound, path, method, leaves, treedef, self._set_by_loss())
        try:
            return self._noted(*about, is_array)
        except MUST_KNOW:
            if not any(map(_on_host, leaves)):
                raise
            return self._noted(*about, lambda x: is_array(x) and not _on_host(x))

    def _noted(
        self,
        bound: Any,
        path: Path,
        method: str,
        leaves: Sequence[Any],
        treedef: Any,
        attributes: tuple[Attribute, ...],
        traces: Callable[[Any], bool],
    ) -> Any:
        """Notes a call; `traces` says of which leaves of its arguments shapes alone are known."""
        there, seen = variables_of(bound), dict[str, Any]()
        arrays = [jnp.asarray(x) for x in leaves if traces(x)]
        rest = tuple(None if traces(x) else x for x in leaves)
        within = isinstance(bound, BoundLinen) and bound.is_within

        def fun(variables: Variables, key: jax.Array, arrays: list) -> list:
            variables, key, arrays = vary((variables, key, arrays), self.axes)
            own = self.model.bind(variables, key, self.mode)
            if within:
                own.fix()
            nodes = [] if isinstance(own, BoundLinen) else list(nnx.iter_graph(own))
            before, counts = _values(nodes) if nodes else variables_of(own), _counts(nodes)
            with having(own, attributes):
                settings = Settings(nodes)
                out = _invoke(own, path, method, treedef, rest, arrays)
                seen["set"] = settings.changed(variables=False)
            self.drawn |= _drawn_from(nodes, counts)
            after = variables_of(own)
            new = {at: x for at, x in after.items() if at not in before or not _same(before[at], x)}
            seen.update(new=new, out=(jax.tree.structure(out), _without_arrays(out, [*rest, own], path, method)))
            return [*_arrays(out), *jax.tree.leaves(list(new.values()))]

        traced = trace(fun, self.variables, self.key, arrays)
        made, given = traced.made, tuple(jax.typeof(x) for x in arrays)
        drawn = drawn_by_rows(self.key, traced.jaxpr)
        changed, (tree, arrays_of) = tuple(seen["new"]), seen["out"]
        about = attributes, drawn, traced.jaxpr
        call = Call(path, method, treedef, rest, given, tuple(made), tree, arrays_of, changed, *about)
        self.noted.append(call)
        out = self._answered(bound, call, arrays, seen["new"])
        self._there = variables_of(bound) if call.changed else there
        self._set_by_call(bound, seen["set"])
        return out

    def _answered(self, bound: Any, call: Call, arrays: list[jax.Array], new: Mapping[Path, Any]) -> Any:
        """The stand-ins for a call's results; variables that it changes are changed in the stand-in too."""
        plain = model_call(len(self.noted) - 1, arrays, call.made)
        own = [tuple(varying_axes(aval) - set(self.axes)) for aval in call.made]
        results = iter([vary(x, axes) for x, axes in zip(plain, own, strict=True)])
        out = call.out_treedef.unflatten([next(results) if x is None else x for x in call.out_rest])
        put_variables(bound, {at: jax.tree.map(lambda _: next(results), like) for at, like in new.items()})
        return out

    def unknown(self, module: Any, name: str) -> bool:
        """Whether a call has set this attribute to a value that only the real model has."""
        return (id(module), name) in self._unknown


MUST_KNOW = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""Errors of code that reads what an array holds, of which only the shape is known."""


def _on_host(x: Any) -> bool:
    return isinstance(x, (np.ndarray, np.generic))


def _same(a: Any, b: Any) -> bool:
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _has_modules(given: Any) -> bool:
    is_module = lambda x: isinstance(x, nnx.Module)
    return any(map(is_module, jax.tree.leaves(given, is_leaf=is_module)))


def _arrays(out: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(out) if is_array(x)]


def _invoke(bound: Any, path: Path, method: str, treedef: Any, rest: Sequence[Any], arrays: Sequence[Any]) -> Any:
    given = iter(arrays)
    args, kwargs = treedef.unflatten([next(given) if x is None else x for x in rest])
    return getattr(module_at(bound, path), method)(*args, **kwargs)


# --------------------------------------------------------------------------------------------------
# What a call returns with arrays in it where JAX does not see them: in objects of other classes, functions, generators.
# --------------------------------------------------------------------------------------------------


class Hidden:
    """Stands for an object with hidden arrays while a loss is traced; reading arrays of it is refused.

    Args:
      given: the object; `isinstance` sees its class.
      words: the words of the refusal.
    """

    def __init__(self, given: Any, words: str):
        vars(self).update(_kind=type(given), _given=given, _words=words)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._given, name)
        return self._refuse() if tracers_within(found) else found

    def _refuse(self, *args: Any, **options: Any) -> Any:
        raise TypeError(self._words)

    __class__ = property(lambda self: self._kind)  # pyright: ignore[reportAssignmentType]
    __call__ = __iter__ = __next__ = __getitem__ = _refuse


def _without_arrays(out: Any, given: Sequence[Any], path: Path, method: str) -> tuple[Any, ...]:
    """The leaves of a call's result, with None in the place of arrays."""
    leaves, hidden = jax.tree.leaves(out), hidden_arrays(out, given)
    hides = lambda x: Hidden(x, hidden_words(hidden, path, method))
    return tuple(None if is_array(x) else hides(x) if n in hidden else x for n, x in enumerate(leaves))


# The two kinds of models


def variables_of(bound: Any) -> dict[Path, Any]:
    """The values of a bound model's variables by path, random streams left out."""
    if isinstance(bound, BoundLinen):
        return {(name,): x for name, x in named_leaves({"params": bound.params, **bound.state}).items()}
    return _values(nnx.iter_graph(bound))


def _values(nodes: Iterable[tuple[Path, Any]]) -> dict[Path, Any]:
    variables = ((path, x) for path, x in nodes if isinstance(x, nnx.Variable) and not isinstance(x, nnx.RngState))
    return {path: x.get_raw_value() for path, x in variables}


def _counts(nodes: Iterable[tuple[Path, Any]]) -> dict[Path, Any]:
    """How often each random stream has been drawn from, by its path."""
    return {path[:-1]: x.get_raw_value() for path, x in nodes if isinstance(x, nnx.RngCount)}


_OF_LOSS = 0x6C6F7373
"""What tells the loss's own draws from those of the model's calls."""


def _turn_streams(nodes: Iterable[tuple[Path, Any]]) -> None:
    """Gives a stand-in's streams keys of their own: it and the calls do not see how often the other has drawn."""
    turned = lambda key: jax.random.fold_in(key, _OF_LOSS)
    for _, node in nodes:
        if isinstance(node, nnx.RngKey):
            keys = node.get_raw_value()
            new = jax.vmap(turned)(keys.reshape(-1)).reshape(keys.shape) if keys.shape else turned(keys)
            node.set_raw_value(new)


def _drawn_from(nodes: Iterable[tuple[Path, Any]], before: Mapping[Path, Any]) -> set[Path]:
    return {path for path, count in _counts(nodes).items() if count is not before[path]}


def put_variables(bound: Any, values: Mapping[Path, Any]) -> None:
    """Sets variables of a bound model."""
    if not values:
        return
    if isinstance(bound, BoundLinen):
        leaves = [values.get((name,), leaf) for name, leaf in named_leaves(bound.state).items()]
        bound.state = jax.tree.unflatten(jax.tree.structure(bound.state), leaves)
        return
    nodes = dict(nnx.iter_graph(bound))
    for path, value in values.items():
        if not isinstance(node := nodes.get(path), nnx.Variable):  # one that the call has made, as `sow` does
            raise Transformed("calls a method that makes variables of the model")
        node.set_raw_value(value)


def _linen_stand_in(calls: Calls) -> type:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return calls.note(self, (), "__call__", args, kwargs)

    return type("BoundLinen", (BoundLinen,), {"__call__": __call__})


_STANDING: dict[int, tuple[Calls, Any, Path]] = {}
"""The modules that stand in for others now, by identity: with the `Calls` that note theirs, the model and the path."""


@functools.cache
def _nnx_stand_in(cls: type) -> type:
    """A subclass of a module's class whose call and methods are noted, where arrays go in."""

    def noting(name: str, plain: Callable) -> Callable:
        @functools.wraps(plain)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not _arrays((args, kwargs)) or _has_modules((args, kwargs)):  # then the calls in it are noted
                return plain(self, *args, **kwargs)
            if id(self) not in _STANDING:
                raise Transformed("calls a copy of the model, as transformations of NNX make")
            calls, bound, path = _STANDING[id(self)]
            return calls.note(bound, path, name, args, kwargs)

        return call

    public = (
        name for name in dir(cls) if name == "__call__" or not (name.startswith("_") or hasattr(nnx.Module, name))
    )
    plain = {name: getattr(cls, name) for name in public if inspect.isfunction(inspect.getattr_static(cls, name))}
    own = {name: noting(name, function) for name, function in plain.items()}

    def missing(self: Any, name: str) -> Any:
        calls, _, _ = _STANDING.get(id(self), (None, None, ()))
        if calls is not None and calls.unknown(self, name):
            raise Transformed(f"reads {name!r}, which only a call of the model sets,")
        return other(self, name)

    def other(self: Any, name: str) -> Any:
        found = getattr(cls, "__getattr__", None)
        if found is None:
            raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")
        return found(self, name)

    own["__getattr__"] = missing
    return type(cls.__name__, (cls,), {**own, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


# --------------------------------------------------------------------------------------------------
# The calls that a loss was traced without, made while its program is run.
# --------------------------------------------------------------------------------------------------


class Unclear(Exception):
    """Raised where it cannot be told how ranks hold the results of a call of the model."""


def place_of(whole: Sequence[int], own: Sequence[int], group: Group) -> Split | None:
    """The place of a value in a group, from its shapes on the whole batch and on a rank; None: they are the same.

    Raises:
      Unclear: where that is not one dim, split evenly.
    """
    if len(whole) != len(own):
        raise Unclear
    dims = [dim for dim, (a, b) in enumerate(zip(whole, own, strict=True)) if a != b]
    if not dims:
        return None
    if len(dims) > 1 or whole[dims[0]] != own[dims[0]] * group.ranks:
        raise Unclear
    return Split(dims[0])


def places_of(whole: Sequence[int], own: Sequence[int], groups: Sequence[Group]) -> list[Split | None]:
    """The places of a value in several groups, from its shapes on the whole batch and on a rank of all of them.

    Raises:
      Unclear: where several groups may have split a dim.
    """
    if len(groups) == 1:
        return [place_of(whole, own, groups[0])]
    if len(whole) != len(own):
        raise Unclear
    found: list[Split | None] = [None] * len(groups)
    for dim, (a, b) in enumerate(zip(whole, own, strict=True)):
        fits = [k for k, group in enumerate(groups) if a == b * group.ranks]
        if a != b and (len(fits) != 1 or found[fits[0]] is not None):
            raise Unclear
        if a != b:
            found[fits[0]] = Split(dim)
    return found


class RealCalls:
    """Makes the noted calls, in order, on a bound model.

    Attributes:
      bound: the bound model.
      whole: the calls as noted at the whole batch's shape.
      local: for each group the same calls as noted at its part of the batch; None where some are unknown or differ.
      groups: the ranks among which rows, and positions, are split.
    """

    def __init__(
        self, bound: Any, whole: Sequence[Call], local: Sequence[Sequence[Call] | None], groups: Sequence[Group]
    ):
        known = all(each is not None and _alike(whole, each) for each in local)
        self.bound, self.whole, self.groups = bound, whole, tuple(groups)
        self.local = [each for each in local if each is not None] if known else None
        self._one_by_one = any(each is not None and _counts_differ(whole, each) for each in local)

    def __call__(self, run: Any, equation: Equation, given: Sequence[Value]) -> list[Value]:
        """Makes a call on this rank's part of its operands."""
        number = equation.op.options["number"]
        call, wanted = self.whole[number], self.wanted(number, [value.places for value in given])
        arrays = [run.ranks.settled(value, places) for value, places in zip(given, wanted, strict=True)]
        made = self.made(number, arrays)
        if len(made) != len(call.made):  # as where it returns a list of rows
            raise Unclear
        if self.local is not None and len(self.groups) > 1:
            places = self.places(number)
        else:
            shapes = [places_of(a.shape, jnp.shape(x), self.groups) for x, a in zip(made, call.made, strict=True)]
            places = self._of_results(call, wanted, shapes)
        held = zip(made, call.made, places, self.shares(number), strict=True)
        return [self._held(x, aval, at, own, run.ranks) for x, aval, at, own in held]

    def made(self, number: int, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays that a call returns on this rank."""
        return self.whole[number].run(self.bound, arrays)

    def shares(self, number: int) -> list[tuple[Share | None, ...]]:
        """How each result of a call is made of the ranks' of each group, where it is a sum over them: mostly their mean."""
        found: list[list[Share | None]] = []
        for k, group in enumerate(self.groups):
            own = [] if self.local is None else self.local[k][number].shares
            mean = None if self.local is None and group.positions else Fraction(1, group.ranks)
            found.append([*own, *[mean] * (len(self.whole[number].made) - len(own))])
        return list(zip(*found, strict=True))

    def places(self, number: int) -> list[Places]:
        """The places of a call's results, before it is made.

        Raises:
          Unclear: where there is no trace at a rank's shapes.
        """
        if self.local is None:
            raise Unclear
        call, locals_made = self.whole[number], zip(*(local[number].made for local in self.local), strict=True)
        shapes = [
            [place_of(a.shape, x.shape, group) for x, group in zip(own, self.groups, strict=True)]
            for a, own in zip(call.made, locals_made, strict=True)
        ]
        return self._of_results(call, self.wanted(number, ()), shapes)

    def _of_results(
        self, call: Call, given: Sequence[Places], shapes: Sequence[Sequence[Split | None]]
    ) -> list[Places]:
        """The places of a call's results, from the dims that shapes show as split."""
        found: list[list[Place]] = [list(places) for places in shapes]
        for k, group in enumerate(self.groups):
            sizes = split_sizes([aval.shape for aval in call.given], [at[k] for at in given])
            merged = [n for n, aval in enumerate(call.made) if _is_merged(aval, shapes[n][k], sizes)]
            followed = call.followed([(at[k],) for at in given], (group,)) if merged else []
            for n in merged:
                found[n][k] = _in_order(call.made[n], shapes[n][k], followed[n][0], group)
        none = [SUM if jnp.issubdtype(aval.dtype, jnp.inexact) else None for aval in call.made]
        return [tuple(x if place is None else place for place in at) for x, at in zip(none, found, strict=True)]

    def wanted(self, number: int, given: Sequence[Places]) -> list[Places]:
        """The places in which a call takes its operands: those that the trace at a rank's shapes shows.

        Raises:
          Unclear: where there is none, and an operand that is whole may have rows all the same, or rows are given one by one.
        """
        call = self.whole[number]
        if self.local is not None:
            of_group = lambda aval, own, group: place_of(aval.shape, own.shape, group)
            locals_given = zip(*(local[number].given for local in self.local), strict=True)
            pairs = zip(call.given, locals_given, strict=True) if call.given else ()
            return [
                tuple(of_group(a, each, group) for each, group in zip(own, self.groups, strict=True))
                for a, own in pairs
            ]
        if self._one_by_one:
            raise Unclear
        for k in range(len(self.groups)):
            there = [each[k] for each in given]
            sizes = split_sizes([aval.shape for aval in call.given], there)
            for aval, place in zip(call.given, there, strict=True):
                plain = isinstance(place, Split) and place.outer == 1
                if not plain and sizes.intersection(aval.shape):
                    raise Unclear
        return [tuple(None if place == SUM else place for place in places) for places in given]

    def _held(self, x: Any, aval: Any, places: Places, shares: Sequence[Share | None], ranks: Ranks) -> Value:
        """A result as a `Value`: split along dims that are shorter here; without one a mean over ranks, if it is floating."""
        if SUM in places:
            return Value(aval.shape, aval.dtype, places, lambda _: ranks.vary(summand(x, places, shares, ranks)))
        if all(places):
            return ranks.held(x, places, aval.shape)
        return Value(aval.shape, aval.dtype, (None,) * len(places), lambda _: no_mean(aval))


def summand(x: jax.Array, places: Places, shares: Sequence[Share | None], ranks: Ranks) -> jax.Array:
    """What a rank adds to a sum over ranks.

    Args:
      x: what it has.
      places: in which groups it is a sum.
      shares: how the whole is made of what ranks have, for each group.
      ranks: the ranks.

    Raises:
      ValueError: where that is not known.
    """
    factor = Fraction(1)
    for group, place, share in zip(ranks.groups, places, shares, strict=True):
        if place != SUM:
            continue
        if share is None:
            raise no_share({"output": jax.typeof(x)}, group)
        if isinstance(share, Fraction):
            factor *= share
        else:
            x = jnp.where(ranks.index(group) == share, x, jnp.zeros_like(x))
    x = x if factor.numerator == 1 else x * factor.numerator
    return x if factor.denominator == 1 else x / factor.denominator


def no_share(wrong: Mapping[str, Any], group: Group) -> ValueError:
    """The error for results of the model without positions of which it is not known how they are made of the ranks'."""
    shapes = {name: tuple(aval.shape) for name, aval in wrong.items()}
    return ValueError(
        "the loss reads these results of the model, which have no dim of positions, but each rank along "
        f"{', '.join(group.axes)} computes them from its own positions: {shapes} (output: shape). As far as the model's "
        "operations show, they are neither a mean or a sum over positions, nor made of one position. Return one per position "
        "and pool them in the loss, or reduce them over the axis in the model (jax.lax.psum)"
    )


def _is_merged(aval: Any, place: Split | None, sizes: set[int]) -> bool:
    """Whether a dim is longer than the one that was split: others are merged with it, in an order that shapes do not show."""
    return place is not None and not any(size % aval.shape[place.dim] == 0 for size in sizes)


def _in_order(aval: Any, place: Split | None, followed: Place, group: Group) -> Split:
    """The place of a merged dim, as the model's own operations show it.

    Raises:
      ValueError: where they do not.
    """
    assert place is not None
    if isinstance(followed, Split) and followed.dim == place.dim:
        return followed
    what, axes = "positions" if group.positions else "rows", ", ".join(group.axes)
    raise ValueError(
        f"the model returns an array of shape {tuple(aval.shape)}, whose dim {place.dim} has {what} "
        f"merged with other dims in an order that cannot be derived, though ranks along {axes} have parts "
        "of it. Return them as a dim of their own (the loss may reshape it), or return ax.WeightedMean(total, weight)"
    )


def _alike(whole: Sequence[Call], local: Sequence[Call]) -> bool:
    return len(local) == len(whole) and all(a.alike(b) for a, b in zip(whole, local, strict=True))


def _counts_differ(whole: Sequence[Call], local: Sequence[Call]) -> bool:
    """Whether a call is given another number of arrays at a rank's shapes, as one of a list of rows is."""
    return any(len(a.given) != len(b.given) for a, b in zip(whole, local, strict=False))


def no_mean(aval: Any) -> jax.Array:
    """Refuse to read an array that has neither rows nor a mean."""
    raise ValueError(
        f"the model returned an array of shape {aval.shape} and dtype {aval.dtype} without a batch dim, or one of positions "
        "where these are split, and the loss reads it: "
        "it may differ from rank to rank and has no mean. Return it with a dim of rows, or let the loss compute it from rows"
    )
