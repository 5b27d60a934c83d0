"""Arrays by name, to and from disk, through Orbax: every process writes and every device reads only its own share."""

import itertools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from axonml_jax.checkpoint.manifest import Entry
from axonml_jax.checkpoint.team import Team
from axonml_jax.sharding.leaf import Leaf
from axonml_jax.sharding.stored import to_stored

_savers = itertools.count()


def entry_of(leaf: Leaf) -> Entry:
    """What a manifest says about a leaf."""
    if _is_key(leaf):
        words = jax.eval_shape(jax.random.key_data, leaf.array)
        return Entry(tuple(words.shape), str(words.dtype), str(jax.random.key_impl(leaf.array)))
    return Entry(leaf.shape, jnp.dtype(leaf.dtype).name)


def checkpointer(team: Team) -> Any:
    """Orbax's checkpointer; every process must make as many of them in the same order.

    Args:
      team: the processes that save with it; they meet there, so that one that cannot write is heard of by all.
    """
    import orbax.checkpoint as ocp  # half a second that `import axonml_jax` should not cost

    logging.getLogger("absl").addFilter(_without_chatter)
    processes, name = team.size, f"axonml{next(_savers)}"
    team.writes_as(name)
    # Named processes meet at the coordinator; left to itself, Orbax runs a device collective.
    several = ocp.options.MultiprocessingOptions(
        primary_host=0,
        active_processes=set(range(processes)) if processes > 1 else None,
        barrier_sync_key_prefix=name if processes > 1 else None,
    )
    # Weights hardly compress (8% of random ones), and trying takes longer than writing them.
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=several, use_compression=False)
    behind = ocp.options.AsyncOptions(barrier_sync_fn=team.written if processes > 1 else None)
    return ocp.AsyncCheckpointer(handler, async_options=behind, multiprocessing_options=several)


@contextmanager
def closing(saver: Any) -> Iterator[None]:
    """Close a checkpointer at the end; after an error quietly, as it says again, and less well, what has failed."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            saver.close()
        raise
    saver.close()


def start_writing(saver: Any, folder: Path, leaves: Mapping[str, Leaf]) -> None:
    """Copy whole arrays to the host and begin to write them; `saver.wait_until_finished` waits for the disk.

    Zero-size arrays have nothing to write.
    """
    import orbax.checkpoint as ocp

    tree = {name: _writable(leaf) for name, leaf in leaves.items() if entry_of(leaf).shape.count(0) == 0}
    saver.save(folder, args=ocp.args.PyTreeSave(tree))


def read(saver: Any, folder: Path, wanted: Mapping[str, Leaf], entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Arrays by name, each in the shape, dtype and place of the wanted leaf.

    Padding is added while reading, so no device ever holds more than its share. No process waits for another one.
    """
    import orbax.checkpoint as ocp
    from etils import epath  # Orbax's paths

    empty = {name for name, entry in entries.items() if 0 in entry.shape}
    asked = {name: _restore_args(leaf) for name, leaf in wanted.items() if name not in empty}
    item = dict.fromkeys(asked, 0)
    args = ocp.args.PyTreeRestore(item=item, restore_args=asked, partial_restore=True)
    # The checkpointer's own `restore` ends with a meeting of all processes, and one that cannot read would not come.
    found = saver.handler.restore(epath.Path(folder), args=args) if asked else {}
    return {
        name: _arrived(found[name], leaf) if name in found else _nothing(leaf, entries[name])
        for name, leaf in wanted.items()
    }


def _writable(leaf: Leaf) -> Any:
    array = leaf.whole()
    if _is_key(leaf):
        return jax.random.key_data(array)
    return array if isinstance(array, jax.Array) else np.asarray(array)


def _restore_args(leaf: Leaf) -> Any:
    import orbax.checkpoint as ocp

    sharding = getattr(leaf.array, "sharding", None)
    if _is_key(leaf):
        if sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=_of_words(sharding))
    dtype = None if isinstance(leaf.array, bool | int | float) else leaf.dtype
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
    if sharding.memory_kind not in (None, "device"):
        sharding = sharding.with_memory_kind("device")
    if len(leaf.shape) != np.ndim(leaf.array):  # a scalar that rests as one element per rank
        place = NamedSharding(sharding.mesh, PartitionSpec())
        return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=place, dtype=dtype)
    shape = tuple(np.shape(leaf.array))
    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array, sharding=sharding, global_shape=shape, strict=False, dtype=dtype
    )


def _arrived(value: Any, leaf: Leaf) -> Any:
    sharding = getattr(leaf.array, "sharding", None)
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(leaf.array))
    if isinstance(leaf.array, bool | int | float):
        return type(leaf.array)(value.item())
    if sharding is None:
        return value
    if value.shape != np.shape(leaf.array):
        value = jax.jit(to_stored, static_argnums=1, out_shardings=sharding.with_memory_kind("device"))(
            value, leaf.layout
        )
    if sharding.memory_kind not in (None, "device"):
        value = jax.device_put(value, sharding)
    return value


def _nothing(leaf: Leaf, entry: Entry) -> Any:
    sharding = getattr(leaf.array, "sharding", None)
    shape = np.shape(leaf.array)
    if sharding is None or _is_key(leaf):
        return np.zeros(shape, leaf.dtype)
    return jax.jit(lambda: jnp.zeros(shape, leaf.dtype), out_shardings=sharding)()


def _is_key(leaf: Leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _of_words(sharding: Any) -> Any:
    """Where the words of a key go: with one dim more than the key has, never split."""
    return NamedSharding(sharding.mesh, sharding.spec) if isinstance(sharding, NamedSharding) else sharding


def _without_chatter(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING or "orbax" not in record.pathname
