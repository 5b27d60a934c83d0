"""The model's own call on a global batch, under any plan."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from axonml_jax._types import PyTree, is_array, path_name
from axonml_jax.collectives.primitives import axis_index, sum_over
from axonml_jax.mesh.fake_devices import bound_run_ahead
from axonml_jax.model.functional import Functional, Mode, Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.tensor.whole.whole_reads import reading_whole
from axonml_jax.training.buffers import sync_buffers
from axonml_jax.training.compiler import compiler_options
from axonml_jax.training.objective import shard_key
from axonml_jax.training.rest.choose import rest_of
from axonml_jax.training.step import forward_mode
from axonml_jax.training.typed_errors import explain_typed_scan
from axonml_jax.training.whole_outputs import SPLITTING, refuse_partial, split_dims, varying

Arrays = Mapping[str, Any]
"""A call's arrays by their paths: an argument's number or name, then the path in it."""


class Forward:
    """`forward(variables, key, args, kwargs) -> (outputs, state)`: dim 0 of every array argument is the global batch.

    Outputs keep the batch dim that grows with the batch, wherever it is. Dims that are split on a rank are whole outside:
    positions, where an axis splits them, and what layers leave split, such as logits over the vocabulary. Floating outputs
    without a batch dim are averaged over ranks.
    """

    def __init__(self, model: Functional, placement: Placement, mesh: Mesh, training: bool | None):
        self.model, self.placement, self.rest, self.mesh = model, placement, rest_of(placement), mesh
        self.mode = forward_mode(placement, training)
        options = compiler_options(placement, mesh)
        self._compiled = jax.jit(self._whole, static_argnames="static", compiler_options=options)

    def __call__(self, variables: Variables, key: jax.Array, args: tuple, kwargs: dict) -> tuple[PyTree, PyTree]:
        """Run the model; arguments that are no arrays (flags, strings) are passed as they are."""
        leaves, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
        arrays = {path_name(path[1:]): leaf for path, leaf in leaves if is_array(leaf)}
        self.placement.batch_layout.check(arrays)
        static = (treedef, tuple((path_name(path[1:]), None if is_array(leaf) else leaf) for path, leaf in leaves))
        with explain_typed_scan(self.placement.plan.check_vma):
            return bound_run_ahead(
                self._compiled(variables, key, self.placement.batch_layout.place(arrays, self.mesh), static=static)
            )

    def _whole(self, variables: Variables, key: jax.Array, arrays: Arrays, static: tuple) -> tuple[PyTree, PyTree]:
        placement, specs = self.placement, self.rest.specs(variables)
        dims, inner = self._dims(variables, arrays, static)

        def local(variables, key, arrays):
            key = shard_key(key, 0, axis_index(placement.batch_axes))
            variables = self.rest.enter(variables)
            out, state = self._read_and_call(variables, key, arrays, static)
            out = jax.tree.map(self._finish, out, dims, inner)
            state = sync_buffers(state, placement, self.model.synchronized())
            return out, self.rest.leave(Variables(variables.params, variables.frozen, state)).state

        def out_spec(dim: int, split: dict):
            axes = split | ({dim: placement.batch_layout.rows} if dim >= 0 else {})
            return PartitionSpec(*(axes.get(i) for i in range(max(axes, default=-1) + 1)))

        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(specs, PartitionSpec(), placement.batch_layout.specs(arrays)),
            out_specs=(jax.tree.map(out_spec, dims, inner), specs.state),
            axis_names=placement.manual_axes,
            check_vma=placement.plan.check_vma,
        )(variables, key, arrays)

    def _read_and_call(self, variables: Variables, key: jax.Array, arrays: Arrays, static: tuple) -> tuple[Any, PyTree]:
        def call(read: Variables, key: jax.Array, arrays: Arrays):
            return self._call(read, key, arrays, static)

        return self.rest.read(call, self.model, variables, key, arrays)

    def _call(
        self, variables: Variables, key: jax.Array, arrays: Arrays, static: tuple, mode: Mode | None = None
    ) -> tuple[Any, PyTree]:
        treedef, rest = static

        def call(variables: Variables, key: jax.Array, arrays: Arrays) -> tuple[Any, PyTree]:
            leaves = [arrays.get(name, value) for name, value in rest]
            args, kwargs = treedef.unflatten(leaves)
            bound = self.model.bind(variables, key, mode or self.mode)
            return bound(*args, **kwargs), self.model.state_of(bound)

        return reading_whole(call, self.model, variables, key, arrays)

    def _dims(self, variables: Variables, arrays: Arrays, static: tuple) -> tuple[PyTree, PyTree]:
        """For every output the dim that grows with the batch, or -1, and the dims that are split otherwise, with their axes."""
        placement, key = self.placement, jax.random.key(0)
        parts, dims = self._batch_dims(variables, arrays, static)
        splitting = {axis: placement.degrees.get(axis, 1) for axis in (*placement.position_axes, *SPLITTING)}
        if all(degree == 1 for degree in splitting.values()) or placement.at_rest is not None:
            return dims, jax.tree.map(lambda _: {}, dims)

        def alone(variables: Variables, arrays: Arrays):
            return self._call(variables, key, arrays, static, replace(self.mode, batch_norm_axes=()))[0]

        def typed() -> PyTree:
            seen = []

            def local(variables: Variables, arrays: Arrays):
                own = self.rest.enter(variables)
                seen.append(varying(self._read_and_call(own, key, arrays, static)[0]))

            specs = (self.rest.specs(variables), placement.batch_layout.specs(arrays))
            call = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=None, check_vma=True)
            jax.eval_shape(call, variables, arrays)
            return seen[-1]

        whole = jax.eval_shape(alone, self.model.shapes, arrays)
        split = split_dims(whole, parts, dims, splitting, typed)
        if any(placement.ranks(axis) > 1 for axis in placement.position_axes):
            call = lambda variables, arrays: self._read_and_call(self.rest.enter(variables), key, arrays, static)[0]
            specs = (self.rest.specs(variables), placement.batch_layout.specs(arrays))
            refuse_partial(call, (variables, arrays), specs, split, placement, self.mesh)
        return dims, split

    def _batch_dims(self, variables: Variables, arrays: Arrays, static: tuple) -> tuple[PyTree, PyTree]:
        """One rank's outputs, and for each the dim that grows with the batch, or -1: seen by tracing two batch sizes."""
        placement = self.placement

        def local(variables, arrays):
            own = self.rest.enter(variables)
            return self._read_and_call(own, jax.random.key(0), arrays, static)[0]

        def outputs(factor: int):
            more = lambda x: jax.ShapeDtypeStruct((factor * x.shape[0], *x.shape[1:]), x.dtype) if x.ndim else x
            shapes = {name: more(x) for name, x in arrays.items()}
            specs = (self.rest.specs(variables), placement.batch_layout.specs(shapes))
            # Unchecked and said to be replicated, so that the shapes seen are those of one rank.
            options = {"axis_names": placement.manual_axes, "check_vma": False}
            call = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec(), **options)
            return jax.eval_shape(call, variables, shapes)

        small = outputs(1)
        return small, jax.tree.map(_growing_dim, small, outputs(2))

    def _finish(self, out: Any, dim: int, split: dict) -> Any:
        taken = {axis for axes in split.values() for axis in axes}
        axes = tuple(axis for axis in self.placement.batch_axes if axis not in taken)
        if dim >= 0 or not axes or not isinstance(out, jax.Array):  # a number that is no array is the same everywhere
            return out
        if jnp.issubdtype(out.dtype, jnp.floating):
            return sum_over(out, axes) / self.placement.ranks(axes)
        raise ValueError(
            f"the model returned an array of shape {out.shape} and dtype {out.dtype} without a batch dim: it may differ from "
            "rank to rank and has no mean. Return it as a float, or call the model through a loss_fn"
        )


def _growing_dim(small: Any, large: Any) -> int:
    dims = [i for i, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b]
    if len(dims) > 1:
        raise ValueError(
            f"the model returned an array with several batch dims (shape {small.shape}): return one per batch dim"
        )
    return dims[0] if dims else -1
