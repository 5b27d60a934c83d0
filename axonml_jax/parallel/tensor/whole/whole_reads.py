"""Parameters that `auto_parallelize` split are whole to whoever reads them; only the layer that owns one reads its part.

The model's program is traced on gathered parameters, so that no code of a user ever sees a shard, however it reads: an
attribute, a shape, `nnx.state`. Then it is run with the shards in their place: the part that a layer takes of a gathered
parameter is the shard that it was gathered from, and only what others read is gathered (`run_marked.py`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from axonml_jax._types import named_leaves, path_name
from axonml_jax.compat.jaxpr import trace
from axonml_jax.mesh.axes import LAYER_AXES, as_axes
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.parallel.tensor.bound_axes import bound, degree
from axonml_jax.parallel.tensor.specs import SPEC, WHOLE, tensor_specs
from axonml_jax.parallel.tensor.whole.marks import Places, SplitValue, closed, gathered, marked_program, opened, part_of
from axonml_jax.parallel.tensor.whole.run_marked import run_marked
from axonml_jax.parallel.tensor.whole.split_loss import WholeLosses, recorded, whole_allowed


def own_part(parameter: nnx.Variable) -> jax.Array:
    """What a layer multiplies with: its rank's part, whether the parameter holds that or, while traced, the whole."""
    value, written = parameter[...], parameter.get_metadata()
    if WHOLE not in written or value.shape != tuple(written[WHOLE]):
        return value
    places = _places(written[SPEC])
    return part_of(value, places) if places else value


def left_split(layer: nnx.Module, y: jax.Array, axis: str) -> jax.Array:
    """The output of a layer that leaves it split for another one; said in the program where layers were swapped."""
    return opened(y, axis) if _is_swapped(layer) else y


def taken_split(layer: nnx.Module, x: jax.Array, axis: str) -> jax.Array:
    """The input of a layer that takes what another one left split."""
    return closed(x, axis) if _is_swapped(layer) else x


def _is_swapped(layer: Any) -> bool:
    return WHOLE in layer.kernel.get_metadata()


def reading_whole(fun: Callable, model: Functional, variables: Variables, *args: Any) -> Any:
    """`fun(variables, *args)`, to which the split parameters of swapped layers are whole, inside `shard_map`.

    Args:
      fun: returns a pytree; leaves that are no arrays are handed through.
      model: whose variables they are.
      variables: as one rank reads them.
      *args: pytrees of arrays.

    Communicates: an all-gather of every such parameter that something besides its own layer reads, nothing backward; of
    3-D layers' a reduce-scatter of its gradient over depth.
    """
    places, swapped = _split(model) if bound(LAYER_AXES) else ({}, set())
    if not swapped:
        return _checked(fun, places, variables, *args)
    leaves, treedef, found = _with_places(places, variables, args)
    own = [at if path_name(path[1:]) in swapped else () for (path, _), at in zip(leaves, found, strict=True)]
    seen: dict[str, Any] = {}

    def arrays_of(*leaves: Any) -> list[jax.Array]:
        given = [gathered(leaf, at) if at else leaf for leaf, at in zip(leaves, own, strict=True)]
        params, frozen, state, args = treedef.unflatten(given)
        with whole_allowed():
            out, seen["treedef"] = jax.tree.flatten(fun(Variables(params, frozen, state), *args))
        seen["fixed"] = [None if isinstance(leaf, jax.Array) else leaf for leaf in out]
        return [leaf for leaf in out if isinstance(leaf, jax.Array)]

    values = [leaf for _, leaf in leaves]
    program = marked_program(trace(arrays_of, *values).jaxpr)
    losses = WholeLosses(program, [frozenset(axis for _, axis in at) for at in found])
    shards = [SplitValue(leaf, at) if at else leaf for leaf, at in zip(values, own, strict=True)]
    arrays = iter(run_marked(program, shards, losses))
    losses.refuse()
    return seen["treedef"].unflatten([next(arrays) if leaf is None else leaf for leaf in seen["fixed"]])


def _checked(fun: Callable, places: Mapping[str, Places], variables: Variables, *args: Any) -> Any:
    """`fun(variables, *args)`; a loss of parts that is given the whole is refused."""
    with recorded() as seen:
        out = fun(variables, *args)
    if seen:
        leaves, treedef, found = _with_places(places, variables, args)

        def arrays_of(*leaves: Any) -> list[jax.Array]:
            params, frozen, state, args = treedef.unflatten(leaves)
            made = fun(Variables(params, frozen, state), *args)
            return [leaf for leaf in jax.tree.leaves(made) if isinstance(leaf, jax.Array)]

        program = marked_program(trace(arrays_of, *(leaf for _, leaf in leaves)).jaxpr)
        WholeLosses(program, [frozenset(axis for _, axis in at) for at in found]).refuse()
    return out


def _with_places(places: Mapping[str, Places], variables: Variables, args: tuple) -> tuple[list, Any, list[Places]]:
    """All leaves with their paths, their structure, and where each is split."""
    tree = (variables.params, variables.frozen, variables.state, args)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    found = [places.get(path_name(path[1:]), ()) if path[0].idx < 2 else () for path, _ in leaves]
    return leaves, treedef, found


def _places(spec: PartitionSpec) -> Places:
    """Where a spec splits an array over axes that are bound here."""
    split = ((dim, axis) for dim, entry in enumerate(spec) for axis in bound(as_axes(entry or ())))
    return tuple((dim, axis) for dim, axis in split if degree(axis) > 1)


def _split(model: Functional) -> tuple[dict[str, Places], set[str]]:
    """The parameters that are split here, by name, and which of them look whole."""
    if (module := model.abstract_module) is None:
        return {}, set()
    specs = named_leaves(tensor_specs(module, {axis: degree(axis) for axis in bound(LAYER_AXES)}))
    places = {name: at for name, spec in specs.items() if (at := _places(spec))}
    marked = (
        "/".join(map(str, path))
        for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param))
        if WHOLE in leaf.get_metadata()
    )
    return places, places.keys() & set(marked)
