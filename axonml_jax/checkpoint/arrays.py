"""Arrays by name, to and from disk, through Orbax: every process writes and every device reads only its own share."""

import itertools
import logging
import os
import shutil
import tempfile
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
_ODD = frozenset("*?[\\")
_SCHEMES = ("gs", "s3", "az", "hf")


class NoPlainName(OSError):
    """A folder whose path Orbax cannot take, on a machine that has no place for a link to it."""


def entry_of(leaf: Leaf) -> Entry:
    """What a manifest says about a leaf."""
    if _is_key(leaf):
        words = jax.eval_shape(jax.random.key_data, leaf.array)
        return Entry(tuple(words.shape), str(words.dtype), str(jax.random.key_impl(leaf.array)))
    return Entry(leaf.shape, jnp.dtype(leaf.dtype).name)


def entries_of(leaves: Mapping[str, Leaf]) -> dict[str, Entry]:
    """What a manifest says about leaves, of which each can be written under its name.

    Raises:
      TypeError: naming every leaf that is no array of numbers which files can hold.
      ValueError: naming all names that files cannot tell apart, or hold.
    """
    entries = {name: entry_of(leaf) for name, leaf in leaves.items()}
    if wrong := [f"  {name}: {entry.dtype}" for name, entry in entries.items() if not _is_written(entry.dtype)]:
        raise TypeError(
            "\n".join(["a checkpoint cannot keep values of these kinds as arrays:", *wrong])
            + "\nturn them into arrays of numbers, or leave them out; plain values, such as text, go into about="
        )
    if wrong := [f"  {name!r}" for name in entries if not _is_text(name)]:
        raise ValueError("\n".join(["names of arrays are UTF-8, and these are not:", *wrong]) + "\nrename them")
    if wrong := [f"  {name!r} and {name + '/'!r}" for name in entries if f"{name}/" in entries]:
        raise ValueError("\n".join(["arrays of these names would share one file:", *wrong]) + "\nrename one of the two")
    return entries


def _stored_as(name: str) -> str:
    """What the keys of an array's parts begin with: zarr adds a slash to a name that does not end with one."""
    return f"{name.removesuffix('/')}/".removeprefix("" if name.strip("/") else "/")


def _is_written(dtype: str) -> bool:
    import tensorstore as ts

    try:
        found = jnp.dtype(dtype)
        return (jnp.issubdtype(found, jnp.number) or dtype == "bool") and bool(ts.dtype(dtype))
    except (TypeError, ValueError):
        return False


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


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


def is_plain(folder: Path) -> bool:
    """Whether Orbax and TensorStore take an absolute path for what it says.

    Orbax globs for what each process has written, and a `[`, `*` or `?` in the path matches other folders or none: the arrays
    are then not merged, without an error. TensorStore reads a backslash as a slash, and takes only UTF-8 without `..`.
    Orbax's paths (etils) take `/s3/run` for `s3://run`.

    >>> is_plain(Path("/runs/a")), is_plain(Path("/runs/[a]/b")), is_plain(Path("/s3/a"))
    (True, False, False)
    """
    text, parts = str(folder), folder.parts
    of_url = text.startswith("//") or (parts[1:2] and parts[1] in _SCHEMES)
    return _is_text(text) and _ODD.isdisjoint(text) and ".." not in parts and not of_url


def require_plain(folder: Path) -> None:
    """See that Orbax can take a folder, by its path or by a link; nothing is written.

    Raises:
      ValueError: when it cannot.
    """
    if not is_plain(folder) and not any(os.access(room, os.W_OK | os.X_OK) for room in _rooms()):
        raise ValueError(_without_room(folder))


@contextmanager
def plain_name(folder: Path) -> Iterator[Path]:
    """The folder by a path that Orbax takes for what it says: its own, or that of a link which is this process's alone.

    Raises:
      NoPlainName: when no link can be made.
    """
    if is_plain(folder):
        yield folder
        return
    place, errors = None, []
    for room in _rooms():
        try:
            place = Path(tempfile.mkdtemp(prefix="axonml_jax_", dir=room))
            (place / "checkpoint").symlink_to(folder)
            break
        except OSError as error:
            errors.append(str(error))
    if place is None:
        raise NoPlainName("; ".join([_without_room(folder), *errors]))
    try:
        yield place / "checkpoint"
    finally:
        shutil.rmtree(place, ignore_errors=True)  # the link, and not what it leads to


def by_its_name(error: Exception, plain: Path, folder: Path) -> Exception:
    """An error that names a folder by its own path, where it says the link's."""
    text = str(error)
    return OSError(text.replace(str(plain), str(folder))) if plain != folder and str(plain) in text else error


def lacking(folder: Path, entries: Mapping[str, Entry]) -> list[str]:
    """The names that a manifest has, and arrays that were written there have not."""
    import tensorstore as ts

    asked = [name for name, entry in entries.items() if 0 not in entry.shape]
    if not asked:
        return []
    with plain_name(folder) as plain:
        spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{plain}/"}, "assume_config": False}
        store = ts.KvStore.open(spec).result()
        there = {key.decode() for key in store.list().result()}
    return [name for name in asked if f"{_stored_as(name)}.zarray" not in there]


def _rooms() -> list[Path]:
    """Folders for links."""
    rooms = dict.fromkeys(Path(room) for room in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"))
    return [room for room in rooms if is_plain(room.absolute()) and room.is_dir()]


def _without_room(folder: Path) -> str:
    return (
        f"{folder} has one of * ? [ \\ or .. in its path, begins like a URL or is no UTF-8: checkpoints go through "
        "a link without them, and no folder for temporary files takes one: give another path, or set TMPDIR to such a folder"
    )


def start_writing(saver: Any, folder: Path, leaves: Mapping[str, Leaf]) -> None:
    """Copy whole arrays to the host and begin to write them; `saver.wait_until_finished` waits for the disk.

    Zero-size arrays have nothing to write; where all are, no folder is made.
    """
    import orbax.checkpoint as ocp

    tree = {name: _writable(leaf) for name, leaf in leaves.items() if entry_of(leaf).shape.count(0) == 0}
    if tree:
        saver.save(folder, args=ocp.args.PyTreeSave(tree))


def read(saver: Any, folder: Path, wanted: Mapping[str, Leaf], entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Arrays by name, each in the shape, dtype and place of the wanted leaf.

    Padding is added while reading, so no device ever holds more than its share. No process waits for another one.

    Raises:
      OSError, ValueError, KeyError: when they cannot be read, or one that has an entry is not there.
      NoPlainName: see `plain_name`.
    """
    import orbax.checkpoint as ocp
    from etils import epath  # Orbax's paths

    empty = {name for name, entry in entries.items() if 0 in entry.shape}
    asked = {name: _restore_args(leaf) for name, leaf in wanted.items() if name not in empty}
    item = dict.fromkeys(asked, 0)
    args = ocp.args.PyTreeRestore(item=item, restore_args=asked, partial_restore=True)
    with plain_name(folder) as plain:
        try:
            # The checkpointer's own `restore` ends with a meeting of all processes, and one that cannot read would not come.
            found = saver.handler.restore(epath.Path(plain), args=args) if asked else {}
        except (OSError, ValueError, KeyError) as error:
            raise by_its_name(error, plain, folder) from error
    if gone := [name for name, value in found.items() if not isinstance(value, np.ndarray | np.generic | jax.Array)]:
        raise ValueError(f"the arrays lack {', '.join(gone)}")  # Orbax gives back the item's 0
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
