"""A model's forward traced with every layer of interest as one named call, on whole activations or on a rank's."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from axonml_jax.compat.jaxpr import trace
from axonml_jax.parallel.tensor.auto.example import Example
from axonml_jax.parallel.tensor.whole.marks import MARK, marked_program
from axonml_jax.program.program import Program

PREFIX = f"{MARK}layer_"


class LayerPart(NamedTuple):
    """What of a layer is only a rank's: of a "column" the output, of a "row" the input, along `dim`."""

    kind: str
    dim: int


def modes_of(model: nnx.Module) -> list[bool | None]:
    """In which modes the model's calls may differ: as it is, and where it has layers that change, in training and without."""
    modules = [module for _, module in nnx.iter_graph(model) if isinstance(module, nnx.Module)]
    switches = any(hasattr(each, name) for each in modules for name in ("deterministic", "use_running_average"))
    return [None, True, False] if switches else [None]


def traced(
    model: nnx.Module,
    paths: Mapping[tuple, LayerPart | None],
    example: Example,
    ranks: int,
    training: bool | None = None,
) -> tuple[Program, dict]:
    """The program of a call of the model, and whose parameter each of its first inputs is.

    Args:
      model: the model; a copy of it is traced.
      paths: the layers of interest; None: as it is.
      example: the call.
      ranks: into how many parts features are split.
      training: True or False switch the model as `model.train()` and `model.eval()` do.

    Returns:
      (program, number of an input -> path of the layer that owns it); a layer's calls are `jit` equations named `PREFIX` and
      the layer's position in `paths`.
    """
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    names = {path: i for i, path in enumerate(paths)}

    def call(params: Any, rest: Any, arrays: list) -> Any:
        copy: Any = nnx.merge(graphdef, params, rest, copy=True)
        layers = {path: module for path, module in nnx.iter_graph(copy) if path in names}
        for path, layer in layers.items():
            layer.__class__ = _probe(type(layer), f"{PREFIX}{names[path]}", paths[path], ranks)
        if training is not None:
            copy.train() if training else copy.eval()
        return [leaf for leaf in jax.tree.leaves(example.call(copy, arrays)) if isinstance(leaf, jax.Array)]

    program = marked_program(trace(call, params, rest, example.arrays).jaxpr)
    owners, leaves = {}, jax.tree_util.tree_leaves_with_path(params)
    for number, (where, _) in enumerate(leaves):
        keys = tuple(getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in where)
        owner = next((path for path in names if keys[: len(path)] == path), None)
        if owner is not None:
            owners[number] = owner
    return program, owners


def _probe(kind: type, name: str, part: LayerPart | None, ranks: int) -> type:
    """A subclass whose calls are named ones."""

    def named(fn: Callable) -> Callable:
        def run(x: jax.Array) -> jax.Array:
            return fn(x)

        run.__name__ = run.__qualname__ = name
        return jax.jit(run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def whole(x: jax.Array) -> jax.Array:
            if part is not None and part.kind == "row":  # the values do not matter here, only what is done with them
                x = jnp.concatenate([x] * ranks, axis=part.dim)
            y = kind.__call__(self, x, *args[1:], **kwargs)
            if part is not None and part.kind == "column":
                return jax.lax.slice_in_dim(y, 0, y.shape[part.dim] // ranks, axis=part.dim)
            return y

        return named(whole)(args[0])

    attributes: dict[str, Any] = {"__call__": __call__}
    if hasattr(kind, "attend"):
        attributes["attend"] = lambda self, query, *rest: named(lambda x: kind.attend(self, x, *rest))(query)  # pyright: ignore
    return type(kind.__name__, (kind,), attributes)
