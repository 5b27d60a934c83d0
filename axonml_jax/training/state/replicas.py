"""Are replicas still equal? A checksum of every array on every device, compared among the devices that should hold the same.

A replicated array in which a bit has flipped, or that a step has made otherwise on one device, stays so without a word: every
device goes on with its own.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from axonml_jax._types import named_leaves
from axonml_jax.sharding.memory import HOST, to_device_memory
from axonml_jax.sharding.place import to_host
from axonml_jax.training.state.train_state import TrainState

_SHOWN = 3


class ReplicasDiffer(RuntimeError):
    """Devices that should hold the same do not; the message names them and the arrays."""


@dataclass(frozen=True)
class UnequalReplica:
    """Arrays that are not the same on all devices that should hold the same.

    Attributes:
      device: the one whose arrays differ from those of most others.
      process: that it belongs to.
      names: of the arrays, by path, in their order.
      certain: whether most others agree; of two that differ nobody knows which is wrong.
    """

    device: int
    process: int
    names: tuple[str, ...]
    certain: bool

    def __str__(self) -> str:
        more = f" and {len(self.names) - _SHOWN} more" if len(self.names) > _SHOWN else ""
        who = f"device {self.device} (process {self.process})"
        doubt = "" if self.certain else ", though which side is wrong is not known"
        return f"{who} differs in {', '.join(self.names[:_SHOWN])}{more}{doubt}"


class CompareReplicas:
    """Compares the parameters and the optimizer's state of devices that should hold the same: replicas of a part, or of all.

    Which these are is read from the arrays' shardings, so that only what is held more than once is compared: with DDP
    everything, with hybrid sharding what the replica groups hold, with FSDP alone next to nothing. The program is compiled
    once; its checksums are sums of integers, bit for bit the same in any order.
    """

    def __init__(self):
        self._compiled: Any = None

    def __call__(self, state: TrainState) -> list[UnequalReplica]:
        """What differs; the same answer in every process, and all must call it.

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
    return {
        name: leaf for name, leaf in named.items() if isinstance(leaf, jax.Array) and leaf.size and _copies(leaf) > 1
    }


def _copies(leaf: jax.Array) -> int:
    """How many devices hold the same part of an array."""
    shards = {str(index) for index in leaf.sharding.devices_indices_map(leaf.shape).values()}
    return len(leaf.sharding.device_set) // len(shards)


def _program(leaves: Sequence[jax.Array]) -> Any:
    """Checksums of all arrays, [devices, arrays, 2], a row on each device: nothing is sent."""
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
    """Two numbers of 32 bits that no single flipped bit leaves as they were, nor two elements that change places.

    >>> checksum(jnp.array([1.0, 2.0])).tolist() == checksum(jnp.array([2.0, 1.0])).tolist()
    False
    """
    words = _words(array).ravel()
    weights = 2 * jax.lax.iota(jnp.uint32, words.size) + 1
    total = lambda each: jnp.sum(each, dtype=jnp.uint32)
    return jnp.stack([total(words), total(words * weights)])


def _words(array: jax.Array) -> jax.Array:
    """An array's bits as numbers of 32 bits at most."""
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
    """Who differs, from the checksums of all arrays on all devices.

    Args:
      names: of the arrays.
      where: sharding and shape of each.
      sums: [devices, arrays, 2], devices in the order of their mesh.
    """
    devices = list(where[0][0].mesh.devices.flat)
    row = {device: number for number, device in enumerate(devices)}
    wrong: dict[Any, list[str]] = {}
    certain: dict[Any, bool] = {}
    for k, (name, (sharding, shape)) in enumerate(zip(names, where, strict=True)):
        parts: dict[str, list[Any]] = {}
        for device, index in sharding.devices_indices_map(shape).items():
            parts.setdefault(str(index), []).append(device)
        for holders in parts.values():
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
    """What to tell people of replicas that differ."""
    more = f"; and {len(found) - _SHOWN} more devices" if len(found) > _SHOWN else ""
    return (
        f"after step {step} the replicas are not equal: {'; '.join(map(str, found[:_SHOWN]))}{more}. A bit has flipped in a "
        "device, or a program is not the same everywhere: go on from a checkpoint from before, without that device"
    )
