"""The state of a run between steps: its first value, its leaves by name for checkpoints, and checks that replicas are equal."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax.base import PyTree, named_leaves, some_of
from axonml_jax.model.view import Functional, Variables
from axonml_jax.parallel.placement import Placement, in_round
from axonml_jax.sharding.layout import (
    AVERAGE,
    HOST,
    MODEL,
    Leaf,
    cast,
    copies,
    movable,
    place,
    to_device_memory,
    to_host,
)
from axonml_jax.training.compose import Kept, filled, rest_of
from axonml_jax.training.optimizer import MovingAverage
from axonml_jax.training.rest import Rest, RestingOptimizer
from axonml_jax.training.state import TrainState
from axonml_jax.training.transforms import kept_of, transforms_of

# --------------------------------------------------------------------------------------------------
# The first state of a run, created where it will live.
# --------------------------------------------------------------------------------------------------


def first_variables(model: Functional, given: Variables, rest: Rest, mesh: Mesh) -> Variables:
    """Places a model's variables where they rest: those given, or those that `model.create` makes there."""
    return rest.place(given, mesh) if model.create is None else rest.create(model, mesh)


class RestingState(NamedTuple):
    """The resting forms of a run's whole state.

    Attributes:
      rest: the form of the model's variables.
      optimizer: the form of the optimizer's state.
      kept: the form of what the step's transforms keep, by name.
    """

    rest: Rest
    optimizer: RestingOptimizer
    kept: Mapping[str, Kept]


def init_state(variables: Variables, at: RestingState, mesh: Mesh, key: jax.Array) -> TrainState:
    """Makes a run's first state from variables that already rest on the mesh."""
    step, key = (place(each, PartitionSpec(), mesh) for each in (jnp.zeros((), jnp.int32), key))
    opt_state = at.optimizer.first(variables.params, mesh)
    extras = {name: each.first(variables.params, mesh) for name, each in at.kept.items()}
    return TrainState(step, variables, opt_state, key, extras)


def state_specs(state: TrainState, at: RestingState, *, between: bool = True) -> TrainState:
    """The PartitionSpec of every array of a state between steps, or as the step's `shard_map` takes it."""
    rest, optimizer = (at.rest.between(), at.optimizer.between()) if between else (at.rest, at.optimizer)
    extras: Any = {name: at.kept[name].specs(value, between=between) for name, value in state.extras.items()}
    everywhere: Any = PartitionSpec()
    return TrainState(everywhere, rest.specs(state.variables), optimizer.specs(), everywhere, extras)


def abstract_state(shapes: Variables, tx: optax.GradientTransformation, placement: Placement) -> TrainState:
    """The shapes of a run's first state: enough to trace, lower or compile its step, without devices or memory.

    Args:
      shapes: the model's variables as shapes (`Functional.shapes`).
      tx: the optimizer.
      placement: the plan on a mesh, which may be of devices that are not there.

    Returns:
      A `TrainState` of `jax.ShapeDtypeStruct`s.
    """

    def build() -> TrainState:
        rest, optimizer, kept = _resting(placement, tx)
        extras = {name: each.shapes(shapes) for name, each in kept.items()}
        step, key = jnp.zeros((), jnp.int32), jax.random.key(0)
        return TrainState(step, rest.shapes(shapes), optimizer.shapes(shapes), key, extras)

    return jax.eval_shape(build)


def resting_shapes(state: TrainState, placement: Placement, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes of an `abstract_state` with their shardings and memory kinds: what is offloaded rests in host memory."""
    offload, specs = placement.plan.offload, state_specs(state, _resting(placement, tx), between=False)

    def on(host: bool):
        def shape(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(mesh, spec, memory_kind=HOST if host and movable(leaf) else "device")
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return shape

    placed = jax.tree.map(on(False), state, specs)
    own, theirs = state.variables, specs.variables
    params, frozen = jax.tree.map(on(offload.params), (own.params, own.frozen), (theirs.params, theirs.frozen))
    opt_state = jax.tree.map(on(offload.optimizer), state.opt_state, specs.opt_state)
    return replace(placed, variables=Variables(params, frozen, placed.variables.state), opt_state=opt_state)


def _resting(placement: Placement, tx: optax.GradientTransformation) -> RestingState:
    """The resting forms of a run's state under the options that a trainer has by default."""
    rest = rest_of(in_round(placement))
    return RestingState(rest, rest.optimizer(tx), kept_of(transforms_of(rest)))


# --------------------------------------------------------------------------------------------------
# A `TrainState` as arrays by names that do not depend on the plan, and back: what checkpoints hold.
# --------------------------------------------------------------------------------------------------

_OPTIMIZER = "optimizer/"


def variable_leaves(model: Functional, variables: Variables, rest: Rest) -> dict[str, Leaf]:
    """A model's variables by name, as in its `state_dict` behind `model/`; trained and frozen ones side by side."""
    prefix, (params, frozen) = MODEL + model.param_prefix, rest.param_leaves(variables)
    own = named_leaves(params) | named_leaves(frozen)
    for name, adapter in model.adapters.items():
        scales = None if adapter.column_scales is None else own[adapter.column_scales]
        low_rank = own[adapter.a], own[adapter.b], adapter.scale
        own[name] = replace(own[name], low_rank=low_rank, column_scales=scales)
    return {prefix + name: leaf for name, leaf in own.items()} | _named(MODEL, jax.tree.map(Leaf, variables.state))


def variables_of(model: Functional, like: Variables, arrays: Mapping[str, Any], rest: Rest) -> Variables:
    """The inverse of `variable_leaves`."""
    prefix = MODEL + model.param_prefix

    def fill(held: Variables) -> Variables:
        params, frozen = filled(prefix, held.params, arrays), filled(prefix, held.frozen, arrays)
        return Variables(params, frozen, filled(MODEL, held.state, arrays))

    return rest.resting(model, like, fill)


def state_leaves(model: Functional, state: TrainState, at: RestingState) -> dict[str, Leaf]:
    """Everything in a state by name: `step`, `key`, `model/...`, `optimizer/...`, `ema/...`, `rounds/...`, `left_out/...`.

    The optimizer's own names are the same with a moving average and without one.
    """
    opt, averages = _apart(at.optimizer.leaves(state.opt_state))
    leaves = variable_leaves(model, state.variables, at.rest) | _named(_OPTIMIZER, opt) | _named(AVERAGE, averages)
    leaves |= {"key": Leaf(state.key), "step": Leaf(state.step)}
    for name, value in state.extras.items():
        leaves |= at.kept[name].leaves(value)
    return leaves


def state_of_leaves(model: Functional, like: TrainState, arrays: Mapping[str, Any], at: RestingState) -> TrainState:
    """The inverse of `state_leaves`. Where an average is missing among the arrays it begins with its parameter."""
    own = MODEL + model.param_prefix

    def average(name: str, kept: Any) -> Any:
        found = arrays.get(AVERAGE + name)
        return _copied(arrays[own + name], kept) if found is None else found

    def fill(tree: PyTree) -> PyTree:
        opt, averages = _apart(tree)
        opt = filled(_OPTIMIZER, opt, arrays)
        if averages is None:
            return opt
        found = [average(name, kept) for name, kept in named_leaves(averages).items()]
        return MovingAverage(opt, jax.tree.unflatten(jax.tree.structure(averages), found))

    opt_state = at.optimizer.resting(like.opt_state, fill)
    variables = variables_of(model, like.variables, arrays, at.rest)
    extras = {name: at.kept[name].filled(value, arrays) for name, value in like.extras.items()}
    return TrainState(arrays["step"], variables, opt_state, arrays["key"], extras)


def with_new_average(model: Functional, state: TrainState, at: RestingState) -> TrainState:
    """Restarts the moving average from the parameters as they are now; all else stays."""
    leaves = state_leaves(model, state, at)
    arrays = {name: leaf.array for name, leaf in leaves.items() if not name.startswith(AVERAGE)}
    return state_of_leaves(model, state, arrays, at)


def averaged_variables(model: Functional, state: TrainState, at: RestingState) -> Variables:
    """A model's variables with the moving average in the place of the trained parameters, as copies (see `with_ema`)."""
    leaves = variable_leaves(model, state.variables, at.rest)
    own, averages = MODEL + model.param_prefix, named_leaves(at.optimizer.leaves(state.opt_state).ema)

    def placed(name: str, leaf: Leaf) -> Any:
        if not name.startswith(own) or (average := averages.get(name.removeprefix(own))) is None:
            return leaf.array
        return _copied(average.array, leaf.array)

    return variables_of(model, state.variables, {name: placed(name, leaf) for name, leaf in leaves.items()}, at.rest)


def _apart(opt_state: PyTree) -> tuple[PyTree, PyTree]:
    """Splits the optimizer's state -> (the optimizer's own, the moving average or None)."""
    return tuple(opt_state) if isinstance(opt_state, MovingAverage) else (opt_state, None)


def _copied(array: jax.Array, like: Any) -> jax.Array:
    """Copies an array in the dtype of another one, onto the devices of that one."""
    at = array.sharding
    assert isinstance(at, NamedSharding)
    found = copies(cast(jax.device_put(array, NamedSharding(at.mesh, at.spec)), like.dtype))  # out of host memory
    return found if like.sharding is None else jax.device_put(found, like.sharding)


def _named(prefix: str, tree: PyTree) -> dict[str, Leaf]:
    return {prefix + name: leaf for name, leaf in named_leaves(tree).items()}


# --------------------------------------------------------------------------------------------------
# Are replicas still equal? A checksum of every array on every device, compared among the devices that should hold the
# same.
#
# Nothing else notices a replicated array in which a bit has flipped, or that a step has made otherwise on one device:
# every device goes on with its own.
# --------------------------------------------------------------------------------------------------

_SHOWN = 3


class ReplicasDiffer(RuntimeError):
    """Raised when replicas differ: devices that should hold the same bits do not. The message names devices and arrays."""


@dataclass(frozen=True)
class UnequalReplica:
    """A device whose arrays differ from those of the devices that should hold the same.

    Attributes:
      device: the id of the device whose arrays differ from those of most others.
      process: the index of the process that it belongs to.
      names: the paths of the arrays, in their order.
      certain: whether most others agree; of two that differ nobody knows which is wrong.
    """

    device: int
    process: int
    names: tuple[str, ...]
    certain: bool

    def __str__(self) -> str:
        who = f"device {self.device} (process {self.process})"
        doubt = "" if self.certain else ", though which side is wrong is not known"
        return f"{who} differs in {some_of(self.names)}{doubt}"


class CompareReplicas:
    """Compares the parameters and optimizer state of devices that should hold the same: replicas of a part, or of all.

    Which these are is read from the arrays' shardings, so that only what is held more than once is compared: with DDP
    everything, with hybrid sharding what the replica groups hold, with FSDP alone next to nothing. The program is compiled
    once; its checksums are sums of integers, bit for bit the same in any order.
    """

    def __init__(self):
        self._compiled: Any = None

    def __call__(self, state: TrainState) -> list[UnequalReplica]:
        """The devices that differ from their replicas, the same list in every process; all processes must call it.

        Args:
          state: between two steps.
        """
        arrays = _held_more_than_once(state)
        if not arrays:
            return []
        leaves = list(arrays.values())
        if self._compiled is None:
            self._compiled = _program(leaves)
        where = [(leaf.sharding, leaf.shape) for leaf in leaves]
        return differences(list(arrays), where, to_host(self._compiled(leaves)))


def _held_more_than_once(state: TrainState) -> dict[str, jax.Array]:
    trees = {
        "params": state.params,
        "optimizer": state.opt_state,
        "rounds": state.rounds,
        "strategies": state.strategies,
        "left_out": state.left_out,
    }
    named = {f"{tree}/{name}": leaf for tree in trees for name, leaf in named_leaves(trees[tree]).items()}
    twice = lambda leaf: len(_replicas(leaf.sharding, leaf.shape)[0]) > 1
    return {name: leaf for name, leaf in named.items() if isinstance(leaf, jax.Array) and leaf.size and twice(leaf)}


@lru_cache(maxsize=4096)
def _replicas(sharding: Any, shape: tuple[int, ...]) -> tuple[tuple[Any, ...], ...]:
    """The devices that hold the same part of an array, for every part."""
    parts: dict[str, list[Any]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        parts.setdefault(str(index), []).append(device)
    return tuple(map(tuple, parts.values()))


def _program(leaves: Sequence[jax.Array]) -> Any:
    """Compiles the checksums of all arrays, [devices, arrays, 2], one row per device: nothing is sent."""
    mesh: Any = leaves[0].sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
    specs = [leaf.sharding.spec for leaf in leaves]  # pyright: ignore[reportAttributeAccessIssue]

    def sums(leaves: list[jax.Array]) -> jax.Array:
        return jnp.stack([checksum(leaf) for leaf in leaves])[None]

    mapped = jax.shard_map(
        sums, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(mesh.axis_names), check_vma=False
    )
    offloaded = [leaf.sharding.memory_kind == HOST for leaf in leaves]
    moved = lambda leaves: [to_device_memory(leaf, when) for leaf, when in zip(leaves, offloaded, strict=True)]
    return jax.jit(lambda leaves: mapped(moved(leaves)))


def checksum(array: jax.Array) -> jax.Array:
    """Two 32-bit checksums of an array's words: their sum, and the sum of hashes of each word with its place.

    Any one flipped bit changes both; several changes, such as elements exchanged or negated, change the second but for a
    chance of 2^-32.

    >>> checksum(jnp.array([1.0, 2.0])).tolist() == checksum(jnp.array([2.0, 1.0])).tolist()
    False
    """
    words = _words(array).ravel()
    places = jax.lax.iota(jnp.uint32, words.size) * jnp.uint32(0x9E3779B9)
    total = lambda each: jnp.sum(each, dtype=jnp.uint32)
    return jnp.stack([total(words), total(_hashed(words ^ _hashed(places)))])


def _hashed(words: jax.Array) -> jax.Array:
    """A hash of every word, another one for every word: the finalizer of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ (words >> shift)) * jnp.uint32(factor)
    return words ^ (words >> 16)


def _words(array: jax.Array) -> jax.Array:
    """An array's bits as unsigned integers of at most 32 bits."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return _words(jax.random.key_data(array))
    if jnp.iscomplexobj(array):
        return jnp.stack([_words(array.real), _words(array.imag)])
    if array.dtype == bool:
        return array.astype(jnp.uint32)
    bits = min(8 * array.dtype.itemsize, 32)
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)


def differences(
    names: Sequence[str], where: Sequence[tuple[Any, tuple[int, ...]]], sums: np.ndarray
) -> list[UnequalReplica]:
    """Finds the devices that differ from their replicas, from the checksums of all arrays on all devices.

    Args:
      names: the names of the arrays.
      where: sharding and shape of each.
      sums: [devices, arrays, 2], devices in the order of their mesh.
    """
    devices = list(where[0][0].mesh.devices.flat)
    row = {device: number for number, device in enumerate(devices)}
    wrong: dict[Any, list[str]] = {}
    certain: dict[Any, bool] = {}
    for k, (name, (sharding, shape)) in enumerate(zip(names, where, strict=True)):
        for holders in _replicas(sharding, shape):
            found = {device: tuple(sums[row[device], k].tolist()) for device in holders}
            (usual, count), *_ = Counter(found.values()).most_common(1)
            for device in holders:
                if found[device] != usual:
                    wrong.setdefault(device, []).append(name)
                    certain[device] = certain.get(device, True) and 2 * count > len(holders)
    return [
        UnequalReplica(device.id, device.process_index, tuple(dict.fromkeys(wrong[device])), certain[device])
        for device in sorted(wrong, key=row.__getitem__)
    ]


def in_words(found: Sequence[UnequalReplica], step: int) -> str:
    """The message of an error about replicas that differ."""
    more = f"; and {len(found) - _SHOWN} more devices" if len(found) > _SHOWN else ""
    return (
        f"after step {step} the replicas are not equal: {'; '.join(map(str, found[:_SHOWN]))}{more}. A bit has flipped in a "
        "device, or a program is not the same everywhere: go on from a checkpoint from before, without that device"
    )
