"""The model's own call on a global batch, under any plan."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from axonml_jax._types import PyTree, is_array, named_leaves, path_name
from axonml_jax.collectives.primitives import sum_over
from axonml_jax.compat.canaries.typed import require_types
from axonml_jax.compat.jaxpr import trace
from axonml_jax.mesh.fake_devices import bound_run_ahead
from axonml_jax.model.functional import Functional, Mode, Variables
from axonml_jax.parallel.adapted import reading_adapted
from axonml_jax.parallel.context.put_back import put_back
from axonml_jax.parallel.float8.reading_float8 import reading_float8
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.tensor.specs import padded_sizes
from axonml_jax.program.differing import SAME, differing
from axonml_jax.program.program import read_program
from axonml_jax.sharding.batch import BatchLayout
from axonml_jax.sharding.check_batch import check_batch
from axonml_jax.training.buffers import sync_buffers
from axonml_jax.training.compiler import Compiled, compiler_options
from axonml_jax.training.objective import refuse_moved, shard_key
from axonml_jax.training.rest.choose import rest_of
from axonml_jax.training.step import forward_mode
from axonml_jax.training.typed_errors import explain_typed_scan
from axonml_jax.training.whole_outputs import SPLITTING, longer_dims, refuse_partial, split_dims, varying

Arrays = Mapping[str, Any]
"""A call's arrays by their paths: an argument's number or name, then the path in it."""


def parameter_names(model: Any) -> list[str]:
    """What a model's `__call__` calls its positional arguments; nothing where it takes any number."""
    try:
        parameters = inspect.signature(type(model).__call__).parameters.values()
    except (TypeError, ValueError):
        return []
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in parameters if each.kind in plain][1:]


def unique(names: list[str]) -> list[str]:
    """Names of which no two are the same: a later one has its number behind it."""
    taken: set[str] = set()
    for i, name in enumerate(names):
        names[i] = f"{name}#{i}" if name in taken else name
        taken.add(name)
    return names


class Forward:
    """`forward(variables, key, args, kwargs) -> (outputs, state)`: dim 0 of every array argument is the global batch.

    Outputs keep the batch dim that grows with the batch, wherever it is. Dims that are split on a rank are whole outside:
    positions, where an axis splits them, in the sequence's order, and what layers leave split, such as logits over the
    vocabulary. Floating outputs without a batch dim are averaged over ranks. `accept` may refuse a program (see `Compiled`).
    """

    def __init__(
        self,
        model: Functional,
        placement: Placement,
        mesh: Mesh,
        training: bool | None,
        accept: Callable[[Any], None] | None = None,
    ):
        self.model, self.placement, self.rest, self.mesh = model, placement, rest_of(placement), mesh
        self.mode = forward_mode(placement, training)
        options = compiler_options(placement, mesh)
        self._compiled = Compiled(self._whole, mesh, accept, static_argnames="static", compiler_options=options)
        self._parameters = parameter_names(model.module(model.shapes))

    def __call__(self, variables: Variables, key: jax.Array, args: tuple, kwargs: dict) -> tuple[PyTree, PyTree]:
        """Run the model; arguments that are no arrays (flags, strings) are passed as they are."""
        leaves, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
        names = unique([self._name(path) for path, _ in leaves])
        arrays = {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True) if is_array(leaf)}
        check_batch(self.placement.batch_layout, arrays)
        rest = [(name, None if name in arrays else leaf) for name, (_, leaf) in zip(names, leaves, strict=True)]
        static = (treedef, tuple(rest))
        with explain_typed_scan(self.placement.plan.check_vma):
            return bound_run_ahead(
                self._compiled(variables, key, self.placement.batch_layout.place(arrays, self.mesh), static=static)
            )

    def _name(self, path: tuple) -> str:
        """The path of an argument's leaf; a positional one has the name that the model's `__call__` gives it."""
        own = path[1:]
        if path[0].idx == 0 and own[0].idx < len(self._parameters):
            return path_name((jax.tree_util.DictKey(self._parameters[own[0].idx]), *own[1:]))
        return path_name(own)

    def _whole(self, variables: Variables, key: jax.Array, arrays: Arrays, static: tuple) -> tuple[PyTree, PyTree]:
        placement, specs = self.placement, self.rest.specs(variables)
        arrays = placement.batch_layout.opened(arrays)
        dims, inner, sizes = self._dims(variables, arrays, static)

        def local(variables, key, arrays):
            key = shard_key(key, 0, placement.key_number())
            variables = self.rest.enter(variables)
            out, state = self._read_and_call(variables, key, arrays, static)
            out = jax.tree.map(self._finish, out, dims, inner)
            state = sync_buffers(variables.state, state, placement, self.model)
            return out, self.rest.leave(Variables(variables.params, variables.frozen, state)).state

        def out_spec(dim: int, split: dict):
            axes = split | ({dim: placement.batch_layout.rows} if dim >= 0 else {})
            return PartitionSpec(*(axes.get(i) for i in range(max(axes, default=-1) + 1)))

        out, state = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(specs, PartitionSpec(), placement.batch_layout.specs(arrays)),
            out_specs=(jax.tree.map(out_spec, dims, inner), specs.state),
            axis_names=placement.manual_axes,
            check_vma=placement.plan.check_vma,
        )(variables, key, arrays)
        return jax.tree.map(unpadded_dims, out, inner, sizes), state

    def _read_and_call(
        self, variables: Variables, key: jax.Array, arrays: Arrays, static: tuple, whole: tuple[str, ...] = ()
    ) -> tuple[Any, PyTree]:
        def call(read: Variables, key: jax.Array, arrays: Arrays):
            return self._call(read, key, arrays, static, whole=whole)

        return self.rest.read(call, self.model, variables, key, arrays)

    def _call(
        self,
        variables: Variables,
        key: jax.Array,
        arrays: Arrays,
        static: tuple,
        mode: Mode | None = None,
        whole: tuple[str, ...] = (),
        alone: bool = False,
    ) -> tuple[Any, PyTree]:
        treedef, rest = static

        def call(variables: Variables, key: jax.Array, arrays: Arrays) -> tuple[Any, PyTree]:
            leaves = [arrays.get(name, value) for name, value in rest]
            args, kwargs = treedef.unflatten(leaves)
            with self.placement.inside(whole):
                bound = self.model.bind(variables, key, mode or self.mode)
                return bound(*args, **kwargs), self.model.state_of(bound)

        def checked(variables: Variables, key: jax.Array, arrays: Arrays) -> tuple[Any, PyTree]:
            out, state = call(variables, key, arrays)
            again = lambda state: call(replace(variables, state=state), key, arrays)[1]
            refuse_moved(self.model, variables.state, state, again)
            return out, state

        seen = checked if (mode or self.mode).training is False else call
        adapted = functools.partial(reading_adapted, seen if alone else self.placement.rewritten(seen), self.model)
        return reading_float8(adapted, self.mode.precision, variables, key, arrays)

    def _dims(self, variables: Variables, arrays: Arrays, static: tuple) -> tuple[PyTree, PyTree, PyTree]:
        """For every output the dim that grows with the batch, or -1, the dims that are split otherwise, with their axes, and
        its shape on one device, of which split dims may be padded; () where that is not asked."""
        placement, key = self.placement, jax.random.key(0)
        parts, dims = self._batch_dims(variables, arrays, static)
        split = self._position_dims(parts, dims, variables, arrays, static)
        splitting = {axis: placement.degrees.get(axis, 1) for axis in SPLITTING if axis not in placement.left}
        if all(degree == 1 for degree in splitting.values()):
            return dims, split, jax.tree.map(lambda _: (), dims)

        def alone(variables: Variables, arrays: Arrays):
            own = replace(self.mode, batch_norm_axes=())
            return self._call(variables, key, arrays, static, own, alone=True)[0]

        @functools.cache
        def typed() -> PyTree:
            seen = []
            require_types(True)

            def local(variables: Variables, arrays: Arrays):
                own = self.rest.enter(variables)
                seen.append(varying(self._read_and_call(own, key, arrays, static)[0]))

            specs = (self.rest.specs(variables), placement.batch_layout.specs(arrays))
            call = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=None, check_vma=True)
            jax.eval_shape(call, variables, arrays)
            return seen[-1]

        whole = jax.eval_shape(alone, self.model.shapes, arrays)
        padded = padded_sizes(self.model.abstract_module)
        found = split_dims(whole, parts, dims, split, splitting, typed, padded)
        return dims, found, jax.tree.map(lambda x: tuple(getattr(x, "shape", ())) if padded else (), whole)

    def _position_dims(
        self, parts: PyTree, dims: PyTree, variables: Variables, arrays: Arrays, static: tuple
    ) -> PyTree:
        """For every output `{dim: axes}` of the positions that are split: those dims that are longer where ranks have all."""
        placement, layout = self.placement, self.placement.batch_layout
        split = jax.tree.map(lambda _: {}, dims)
        for axis in placement.position_axes:
            others = tuple(each for each in layout.positions if each[0] != axis)
            longer = self._outputs(variables, arrays, static, replace(layout, positions=others))
            split = jax.tree.map(
                lambda own, small, large, axis=axis: own | longer_dims(own, small, large, axis),
                split,
                parts,
                longer,
                is_leaf=lambda x: isinstance(x, dict) and all(isinstance(key, int) for key in x),
            )
        if placement.position_axes:
            refuse_partial(self._made_of_parts(variables, arrays, static), split, placement.position_axes)
        return split

    def _made_of_parts(self, variables: Variables, arrays: Arrays, static: tuple) -> dict[str, frozenset[str]]:
        """Over which axes each output may differ, by its path, for what the model reads the same on all ranks."""
        layout, found = self.placement.batch_layout, {}
        axes = {name: frozenset(sum(layout.split(name, x.shape).values(), ())) for name, x in arrays.items()}

        def probed(read: Variables, key: jax.Array, arrays: Arrays) -> tuple[Any, PyTree]:
            out, state = self._call(read, key, arrays, static)
            named = named_leaves(out)
            flat = lambda read, key, arrays: jax.tree.leaves(self._call(read, key, arrays, static)[0])
            program = read_program(trace(flat, read, key, arrays).jaxpr)
            given = [SAME] * len(jax.tree.leaves((read, key))) + jax.tree.leaves(
                {name: axes[name] for name in arrays}, is_leaf=lambda x: isinstance(x, frozenset)
            )
            found.update(zip(named, differing(program, given, lambda *_: None), strict=True))
            return out, state

        def local(variables: Variables, arrays: Arrays) -> PyTree:
            return self.rest.read(probed, self.model, self.rest.enter(variables), jax.random.key(0), arrays)[0]

        self._shapes(local, variables, arrays, layout)
        return found

    def _batch_dims(self, variables: Variables, arrays: Arrays, static: tuple) -> tuple[PyTree, PyTree]:
        """One rank's outputs, and for each the dim that grows with the batch, or -1: seen by tracing two batch sizes."""
        more = lambda x: jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype) if x.ndim else x
        layout = self.placement.batch_layout
        small = self._outputs(variables, arrays, static, layout)
        large = self._outputs(variables, {name: more(x) for name, x in arrays.items()}, static, layout)
        return small, jax.tree.map(_growing_dim, small, large)

    def _outputs(self, variables: Variables, arrays: Arrays, static: tuple, layout: BatchLayout) -> PyTree:
        """One rank's outputs, of a batch that is split so."""
        along = {axis for axis, _ in layout.positions}
        whole = tuple(axis for axis in self.placement.position_axes if axis not in along)

        def local(variables: Variables, arrays: Arrays) -> PyTree:
            return self._read_and_call(self.rest.enter(variables), jax.random.key(0), arrays, static, whole)[0]

        return self._shapes(local, variables, arrays, layout)

    def _shapes(self, local: Callable, variables: Variables, arrays: Arrays, layout: BatchLayout) -> PyTree:
        # Unchecked and said to be replicated, so that the shapes seen are those of one rank.
        options = {"axis_names": self.placement.manual_axes, "check_vma": False}
        specs = (self.rest.specs(variables), layout.specs(arrays))
        call = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec(), **options)
        return jax.eval_shape(call, variables, arrays)

    def _finish(self, out: Any, dim: int, split: dict) -> Any:
        taken, orders = {axis for axes in split.values() for axis in axes}, dict(self.placement.batch_layout.orders)
        for along, axes in split.items():
            for axis in orders.keys() & set(axes):
                out = put_back(out, along, axis, orders[axis])
        axes = tuple(axis for axis in self.placement.batch_axes if axis not in taken)
        if dim >= 0 or not axes or not isinstance(out, jax.Array):  # a number that is no array is the same everywhere
            return out
        if jnp.issubdtype(out.dtype, jnp.floating):
            return sum_over(out, axes) / self.placement.ranks(axes)
        raise ValueError(
            f"the model returned an array of shape {out.shape} and dtype {out.dtype} without a batch dim: it may differ from "
            "rank to rank and has no mean. Return it as a float, or call the model through a loss_fn"
        )


def unpadded_dims(out: Any, split: Mapping[int, Any], shape: tuple[int, ...]) -> Any:
    """An output without the padding of dims that ranks share unevenly.

    Args:
      out: as ranks' parts join.
      split: its dims that are split, besides rows.
      shape: on one device; () where nothing is padded.
    """
    for dim in split if shape else ():
        if out.shape[dim] > shape[dim]:
            out = jax.lax.slice_in_dim(out, 0, shape[dim], axis=dim)
    return out


def _growing_dim(small: Any, large: Any) -> int:
    dims = [i for i, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b]
    if len(dims) > 1:
        raise ValueError(
            f"the model returned an array with several batch dims (shape {small.shape}): return one per batch dim"
        )
    return dims[0] if dims else -1
