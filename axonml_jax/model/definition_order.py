"""In which order a model's parameters are read, as far as it can be told before a batch is seen.

Of an NNX module it is that in which its author defined them; of a Linen module that in which `init` called its modules.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flax import linen, nnx

from axonml_jax._types import named_leaves


def definition_order(model: nnx.Module) -> dict[str, tuple]:
    """A sort key of every variable's path: the places of the attributes on the way to it, in the order of assignment."""
    return {"/".join(path): place for path, place in _walk(model, (), (), set())}


def _walk(node: Any, path: tuple, place: tuple, seen: set[int]) -> Iterator[tuple[tuple, tuple]]:
    if isinstance(node, nnx.Variable):
        yield path, place
        return
    if id(node) in seen:
        return
    seen.add(id(node))
    for i, (name, child) in enumerate(_children(node)):
        yield from _walk(child, (*path, name), (*place, i), seen)


def _children(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, (list, tuple, nnx.List)):
        return [(str(i), child) for i, child in enumerate(node)]
    if isinstance(node, dict):
        return [(str(name), child) for name, child in node.items()]
    if isinstance(node, nnx.Module):
        return [(name, child) for name, child in vars(node).items() if not name.startswith("_pytree")]
    return []


def order_of_init(params: Any) -> dict[str, tuple] | None:
    """A sort key of every parameter's path, read off the dicts that Linen's `init` filled while it called the modules.

    None where every dict is in alphabetical order: whatever passes `jit`, `eval_shape` or `jax.tree.map` is.

    >>> order_of_init({"Conv_0": {"kernel": 0}, "BatchNorm_0": {"scale": 0}})
    {'Conv_0/kernel': (0, 0), 'BatchNorm_0/scale': (1, 0)}
    """
    found, tells = {}, False
    todo: list[tuple[Any, tuple, tuple]] = [(params, (), ())]
    while todo:
        node, path, place = todo.pop(0)
        if not isinstance(node, Mapping):
            found["/".join(path)] = place
            continue
        names = list(map(str, node))
        tells |= names != sorted(names)
        todo += [(child, (*path, str(name)), (*place, i)) for i, (name, child) in enumerate(node.items())]
    return found if tells else None


def noting_calls(init: Callable[[], Any], found: dict[str, tuple]) -> Callable[[], Any]:
    """`init` of a Linen module, which leaves in `found` the places of its parameters: by the modules that it calls.

    Nothing is left where no call is seen, as of a jitted function that is traced already.
    """

    def noted() -> Any:
        calls: dict[tuple[str, ...], int] = {}

        def note(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
            calls.setdefault(context.module.path, len(calls))
            return call(*args, **kwargs)

        with linen.intercept_methods(note):
            made = init()
        params = made.get("params", made) if isinstance(made, Mapping) else {}
        if (order := order_of_init(params)) is None and len(calls) > 1:  # sorted: by an inner jit
            names = {name: tuple(name.split("/")) for name in named_leaves(linen.meta.unbox(params))}
            order = {name: (*_called(calls, path), -1, path[-1]) for name, path in names.items()}
        found.update(order or {})
        return made

    return noted


def _called(calls: Mapping[tuple[str, ...], int], path: tuple[str, ...]) -> tuple[int, ...]:
    """When the modules on the way to a parameter were first called, from the root inwards."""
    return tuple(calls[path[:end]] for end in range(len(path)) if path[:end] in calls)
