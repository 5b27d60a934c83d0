"""The format of a checkpoint: arrays, manifest, checksums, and the processes that write them as a team."""

import itertools
import json
import logging
import math
import operator
import os
import re
import shutil
import tempfile
import traceback
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from axonml_jax.base import PyTree, host_arrays, named_leaves
from axonml_jax.checkpoint.ownership import FolderInUse
from axonml_jax.compat.processes import coordinator_client, lost_processes
from axonml_jax.sharding.layout import MODEL, Checkpointable, Leaf, to_stored

# --------------------------------------------------------------------------------------------------
# Names for the arrays of whatever can be saved: trainers, models, plain Flax modules, any pytree.
# --------------------------------------------------------------------------------------------------

STATE = "variables/"
"""What the names of a `TrainState` that is saved as any pytree start with."""


def leaves_of(thing: Any) -> dict[str, Leaf]:
    """Every array of a trainer, model or pytree, by name.

    Raises:
      ValueError: when there is none.
    """
    if isinstance(thing, Checkpointable):
        return thing.checkpoint_leaves()
    named = _module_leaves(thing) if isinstance(thing, nnx.Module) else named_leaves(host_arrays(thing))
    if not named:
        raise ValueError(f"a {type(thing).__name__} without arrays cannot be saved or restored")
    return {name: Leaf(leaf) for name, leaf in named.items()}


def takes_arrays(thing: Any) -> bool:
    """Whether `filled` fills the object in place (a trainer, parallel model or NNX module); any other pytree is rebuilt."""
    return isinstance(thing, Checkpointable | nnx.Module)


def filled(thing: Any, arrays: Mapping[str, Any]) -> Any:
    """Put arrays into a thing: returns a new pytree, or the very object, filled in place."""
    if isinstance(thing, Checkpointable):
        thing.take_leaves(arrays)
        return thing
    if isinstance(thing, nnx.Module):
        state = _state(thing)
        names = list(named_leaves(nnx.to_pure_dict(state)))
        leaves = [arrays[MODEL + name] for name in names]
        pure = jax.tree.unflatten(jax.tree.structure(nnx.to_pure_dict(state)), leaves)
        nnx.replace_by_pure_dict(state, pure)
        nnx.update(thing, state)
        return thing
    return jax.tree.unflatten(jax.tree.structure(thing), [arrays[name] for name in named_leaves(thing)])


def scope_of(thing: Any, wanted: Collection[str]) -> str:
    """The prefix of a checkpoint's names that a thing restores: a model takes a run's model, all else takes everything.

    Args:
      thing: what is restored.
      wanted: its arrays' names.
    """
    is_model = takes_arrays(thing) and all(name.startswith(MODEL) for name in wanted)
    return MODEL if is_model else ""


def _module_leaves(module: nnx.Module) -> dict[str, Any]:
    return {MODEL + name: leaf for name, leaf in named_leaves(nnx.to_pure_dict(_state(module))).items()}


def _state(module: nnx.Module) -> PyTree:
    """The variables that are saved: all but intermediates and random streams, which start anew as in a trainer."""
    return nnx.filter_state(nnx.state(module), nnx.Not(nnx.Any(nnx.RngState, nnx.Intermediate)))


# --------------------------------------------------------------------------------------------------
# Values that JSON holds as they are: what a checkpoint may say about itself.
# --------------------------------------------------------------------------------------------------


def plain(name: str, value: Any) -> Any:
    """Convert a value to plain Python: NumPy and JAX numbers and arrays become numbers and lists, tuples become lists.

    Args:
      name: what the value is, for the error.
      value: nested dicts with text as keys, lists, text, numbers, booleans and None.

    Raises:
      TypeError: naming every value that is none of these, by path.
    """
    wrong: list[str] = []
    found = _plain(name, value, wrong)
    if wrong:
        raise TypeError(
            f"a checkpoint keeps plain values (text, numbers, booleans, None, lists, dicts with text as keys), not "
            f"{', '.join(wrong)}: turn it into one, or leave it out"
        )
    return found


def number(name: str, value: Any) -> float:
    """A metric as a float.

    Raises:
      TypeError: when it is no number, or is one as text or a complex one.
    """
    try:
        if isinstance(value, bytearray) or np.asarray(value).dtype.kind in "SUc":
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is a {type(value).__name__}, and must be a number") from None


def step_number(step: Any) -> int:
    """Check and return a step as a Python int; NumPy and JAX integers are accepted.

    Raises:
      TypeError, ValueError: when it is no whole number, or below 0.
    """
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step={step!r} must be a whole number: the updates made") from None
    if number < 0:
        raise ValueError(f"step={number} must be at least 0: it is the number of updates made")
    return number


def is_whole(value: Any, lowest: int = 0, below: float = math.inf) -> bool:
    """Whether a value is an int (not a bool) of at least `lowest` and below `below`."""
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value < below


def _plain(name: str, value: Any, wrong: list[str]) -> Any:
    if isinstance(value, np.generic | np.ndarray | jax.Array) and not _is_key_array(value):
        value = np.asarray(value).tolist()
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        wrong += [f"the key {key!r} of {name}" for key in value if not isinstance(key, str)]
        return {str(key): _plain(f"{name}[{key!r}]", each, wrong) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{name}[{index}]", each, wrong) for index, each in enumerate(value)]
    wrong.append(f"{name}, a {type(value).__name__}")
    return None


def _is_key_array(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


# --------------------------------------------------------------------------------------------------
# What the names in a folder of checkpoints mean.
# --------------------------------------------------------------------------------------------------

SAVING = ".saving"
"""What the name of an unfinished checkpoint ends with, and of one that is being deleted."""

REPLACED = ".replaced"
"""What the name of a checkpoint ends with while another takes its place."""

DAMAGED = ".damaged"
"""What the name of a checkpoint that was passed over ends with; it is kept for inspection."""

ABANDONED = ".abandoned"
"""What the name of a checkpoint ends with that a run has left behind: it went back, and saved at a lower step."""

_NAME = re.compile(r"step_(\d{8,})")

_OWN = re.compile(rf"step_\d{{8,}}({re.escape(DAMAGED)}|{re.escape(ABANDONED)})?")


def is_own_name(name: str) -> bool:
    """Whether a name, without `SAVING` or `REPLACED`, is one that a manager gives to checkpoints.

    >>> [is_own_name(name) for name in ("step_00000040", "step_00000040.damaged", "notes")]
    [True, True, False]
    """
    return _OWN.fullmatch(name) is not None


def name_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step_{step:08d}"


def path_of(folder: Path, step: int) -> Path:
    """The path of a step's checkpoint in a folder."""
    return folder / name_of(step)


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Every checkpoint of a folder by step, in order.

    One that is being replaced, or whose replacement was cut off, is there under the name that it was given for that.
    """
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    names.sort(key=lambda name: not name.endswith(REPLACED))  # of two the one without wins
    found = ((_NAME.fullmatch(name.removesuffix(REPLACED)), name) for name in names)
    return dict(sorted({int(match[1]): folder / name for match, name in found if match}.items()))


def newest_below(folder: Path) -> Path | None:
    """The newest checkpoint of a folder of checkpoints, or of a run's folder that holds one; None for any other folder."""
    places = (folder, *sorted(path for path in folder.iterdir() if path.is_dir())) if folder.is_dir() else ()
    found = (checkpoints_in(place) for place in places)
    return next((list(steps.values())[-1] for steps in found if steps), None)


# --------------------------------------------------------------------------------------------------
# What the fields of a manifest may hold: a file that somebody else has written is not believed.
# --------------------------------------------------------------------------------------------------

_INT64 = 2**63


def wrong_fields(content: Mapping[str, Any]) -> list[str]:
    """Lines that name every field that is not as `Manifest.write` writes it; empty for a valid manifest."""
    lines = [f"unknown field {name!r}" for name in content if name not in _RULES]
    lines += [f"missing field {name!r}" for name in _RULES if name not in content]
    for name, rule in _RULES.items():
        lines += rule(content[name]) if name in content else ()
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"... and {len(lines) - _SHOWN} more"]


def _each(field: str, value: Any, problem: Callable[[str, Any], str | None]) -> Iterator[str]:
    """Yield the problems of an object's entries, or that the value is not an object."""
    if not isinstance(value, dict):
        yield f"{field} must be an object"
        return
    for name, each in value.items():
        if said := problem(name, each):
            yield f"{field}[{name!r:.120}] {said}"


def _step(value: Any) -> Iterator[str]:
    if value is not None and not is_whole(value, below=_INT64):
        yield f"step={value!r:.60} must be a whole number or null"


def _data(value: Any) -> Iterator[str]:
    if not isinstance(value, dict | None):
        yield "data must be an object or null"


def _entry(_: str, entry: Any) -> str | None:
    if not isinstance(entry, dict) or set(entry) != {"shape", "dtype", "key"}:
        return f"must be an object with dtype, key and shape, not {entry!r:.60}"
    shape, key = entry["shape"], entry["key"]
    if not isinstance(shape, list) or not all(is_whole(size, below=_INT64) for size in shape):
        return f"has shape={shape!r:.60}, which must be a list of whole numbers"
    if not _is_dtype(entry["dtype"]):
        return f"has dtype={entry['dtype']!r:.60}, which must name one of numbers"
    return None if key is None or isinstance(key, str) else f"has key={key!r:.60}, which must be text or null"


def _is_dtype(name: Any) -> bool:
    try:
        dtype = jnp.dtype(name) if isinstance(name, str) else None
    except (TypeError, ValueError, SyntaxError):
        return False
    return dtype is not None and dtype.name == name and (jnp.issubdtype(dtype, jnp.number) or dtype.name == "bool")


def _metric(_: str, metric: Any) -> str | None:
    try:
        fits = isinstance(metric, int | float) and not isinstance(metric, bool) and float(metric) is not None
    except OverflowError:
        fits = False
    return None if fits else f"must be a number, not {metric!r:.60}"


def _file(name: str, said: Any) -> str | None:
    if problem := _path(name):
        return problem
    fits = isinstance(said, list) and len(said) == 2 and is_whole(said[0]) and is_whole(said[1], below=2**32)
    return None if fits else f"must be a size in bytes and a CRC-32, not {said!r:.60}"


def _path(name: str) -> str | None:
    """Why a path cannot be that of a file in a checkpoint; None if it can."""
    if name.startswith("/") or ".." in PurePosixPath(name).parts:
        return "leads out of the checkpoint"
    whole = name and str(PurePosixPath(name)) == name != "." and "\0" not in name
    return None if whole else "is no path of a file"


_RULES: dict[str, Callable[[Any], Iterator[str]]] = {
    "step": _step,
    "entries": lambda value: _each("entries", value, _entry),
    "data": _data,
    "metrics": lambda value: _each("metrics", value, _metric),
    "about": lambda value: _each("about", value, lambda *_: None),
    "files": lambda value: _each("files", value, _file),
}


# --------------------------------------------------------------------------------------------------
# The file that makes a folder a checkpoint: what is in it, what belongs to it, and the checksum of every file.
# --------------------------------------------------------------------------------------------------

NAME = "checkpoint.json"
SAVED_AT = "saved_at"
"""The entry of `about` that says when a checkpoint was saved: seconds since 1970 by the clock of the main process."""

ARRAYS = "arrays"
"""The folder with the arrays, an Orbax checkpoint of its own."""

FORMAT = 1
"""A new field is a line of `Manifest` and one of `_RULES`; `Manifest.read` brings older formats up to date."""

_CHUNK = 1 << 24
_READERS = 4  # reading and summing both leave Python's lock alone


class DamagedCheckpoint(ValueError):
    """Raised for a checkpoint whose files are not what was written."""


@dataclass(frozen=True)
class Entry:
    """The manifest's entry for one array: dtype, shape and, for random keys, their kind.

    Attributes:
      shape: of the whole array; for random keys of their words, which has one more dim.
      dtype: its name; for random keys that of their words.
      key: the implementation of a typed random key, else None.
    """

    shape: tuple[int, ...]
    dtype: str
    key: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint's manifest: what it contains, its checksums and metadata.

    Attributes:
      step: updates made.
      entries: its arrays by name.
      data: the data loader's position.
      metrics: of the step.
      about: plan, mesh, package versions, time, and what the caller gave as `about`, for people.
      files: size in bytes and CRC-32 of every other file.
    """

    step: int | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    data: dict[str, Any] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def saved_at(self) -> float | None:
        """The time of the save, in seconds since 1970; None if the manifest does not give it."""
        said = self.about.get(SAVED_AT)
        return said if isinstance(said, float) and math.isfinite(said) else None

    def write(self, folder: Path) -> None:
        """Write the manifest; it is on disk when this returns."""
        content = {"format": FORMAT, **asdict(self)}
        text = _readable({"crc32": _text_sum(content), **content})
        with (folder / NAME).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """Read and check the manifest of a checkpoint.

        Raises:
          FileNotFoundError: when the folder is no checkpoint.
          DamagedCheckpoint: when the file is not what was written, naming every field that is wrong.
          ValueError: when a newer version wrote it.
        """
        path = folder / NAME
        if not path.is_file():
            other = "it has no " + NAME if folder.is_dir() else "there is no such folder"
            near = ""
            if (folder.parent / NAME).is_file():
                near = f"; the checkpoint is {folder.parent}: give that"
            elif newest := newest_below(folder):
                near = f"; the newest that is in it is {newest}: give that"
            elif (folder / "_CHECKPOINT_METADATA").is_file():
                near = "; Orbax wrote it: orbax.checkpoint reads it, and model.set_parameters takes the parameters"
            raise FileNotFoundError(f"{folder} is no checkpoint: {other}{near}")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            expected, version = content.pop("crc32"), content.pop("format")
            damaged = expected != _text_sum({"format": version, **content})
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            damaged, content, version = True, {}, FORMAT
        if damaged:
            raise DamagedCheckpoint(f"{folder} is damaged:\n  {NAME}: its checksum does not fit its content")
        if version != FORMAT:
            raise ValueError(f"{folder} has format {version!r:.60}, this version reads {FORMAT}: update axonml-jax")
        if lines := wrong_fields(content):
            raise DamagedCheckpoint("\n".join([f"{folder} is damaged:", *(f"  {NAME}: {line}" for line in lines)]))
        entries = {name: Entry(tuple(e["shape"]), e["dtype"], e["key"]) for name, e in content.pop("entries").items()}
        return Manifest(entries=entries, **content)


def manifests_in(folder: Path) -> dict[int, Manifest]:
    """The manifest of every checkpoint in a folder, by step; an empty one where it cannot be read."""
    found = {}
    for step, path in checkpoints_in(folder).items():
        try:
            found[step] = Manifest.read(path)
        except (OSError, ValueError):
            found[step] = Manifest()
    return found


def checksums(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of every file under a folder, by its path there; all are on disk when this returns."""
    for each in folder.rglob("*"):
        sync(each)  # Orbax syncs the arrays, and not what describes them
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME)
    with ThreadPoolExecutor(_READERS) as pool:
        return {
            path.relative_to(folder).as_posix(): found
            for path, found in zip(paths, pool.map(_file_sum, paths), strict=True)
        }


def damage(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Compare the named files of a checkpoint with the manifest; returns a line for each that differs."""
    whole = folder.resolve()

    def problem(name: str) -> str | None:
        size, crc = manifest.files[name]
        try:
            path = (folder / name).resolve(strict=True)
            if not path.is_relative_to(whole):
                return f"{name}: leads out of the checkpoint"
            if not path.is_file():
                return f"{name}: is no ordinary file"
            found, sum_ = _file_sum(path)
        except OSError as error:
            return f"{name}: {error.strerror}"
        except (ValueError, RuntimeError) as error:  # a name that no file can have, a link to itself
            return f"{name!r}: {error}"
        if found != size:
            return f"{name}: {found} bytes instead of {size}"
        return f"{name}: its checksum is {sum_:08x} instead of {crc:08x}" if sum_ != crc else None

    with ThreadPoolExecutor(_READERS) as pool:
        return [line for line in pool.map(problem, names) if line]


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _readable(content: dict[str, Any]) -> str:
    """JSON text with one line for each entry of the first two levels."""

    def lines(value: Any) -> str:
        if not isinstance(value, dict) or not value:
            return json.dumps(value)
        return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n }"

    return "{\n" + ",\n".join(f" {json.dumps(key)}: {lines(value)}" for key, value in content.items()) + "\n}\n"


def _file_sum(path: Path) -> tuple[int, int]:
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def _text_sum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


# --------------------------------------------------------------------------------------------------
# What the processes of a job tell each other about a checkpoint, through JAX's coordinator: never a device collective.
# --------------------------------------------------------------------------------------------------

TIMEOUT = 600.0
"""Seconds to wait for the other processes of a job at a save or a restore."""

_MEETINGS, _meetings = "axonml_jax/checkpoint", itertools.count()


class Team:
    """The processes of this job. Every process must make the same calls in the same order.

    Args:
      timeout: seconds to wait for the others.
    """

    def __init__(self, timeout: float = TIMEOUT):
        self.size = jax.process_count() if jax.distributed.is_initialized() else 1
        self.rank = jax.process_index() if self.size > 1 else 0
        self.timeout = timeout
        self._writing: tuple[str, Iterator[int]] = ("", itertools.count())
        self._heard: OSError | None = None

    @property
    def leads(self) -> bool:
        """Whether this process is the main one, which decides."""
        return self.rank == 0

    def tell_all(self, what: str, said: Any) -> list[Any]:
        """Exchange a value between all processes; returns every process's value, by rank.

        Args:
          what: for the error when a process does not come.
          said: plain values.

        Raises:
          TimeoutError: naming the processes that did not come.
        """
        if self.size == 1:
            return [said]
        client, number = coordinator_client(), next(_meetings)
        folder = f"{_MEETINGS}/{number}/"
        client.key_value_set(f"{folder}{self.rank}", json.dumps(said))
        try:
            client.wait_at_barrier(folder, int(1000 * self.timeout))
        except jax.errors.JaxRuntimeError as error:
            if lost := lost_processes(error):
                raise TimeoutError(
                    f"process(es) {lost} ended or were lost before all had come to {what}: a process that has no more to do "
                    "must still save and restore with the others"
                ) from error
            heard = {int(key.rsplit("/", 1)[1]) for key, _ in client.key_value_dir_get(folder)}
            missing = sorted(set(range(self.size)) - heard)
            raise TimeoutError(
                f"process(es) {missing} did not come to {what} within {self.timeout:g} s: every process must save and "
                "restore the same checkpoints in the same order"
            ) from error
        heard = dict(client.key_value_dir_get(folder))
        if self.leads:  # all have come here, so all have heard the last one
            client.key_value_delete(f"{_MEETINGS}/{number - 1}")
        return [json.loads(heard[f"{folder}{rank}"]) for rank in range(self.size)]

    def decide(self, what: str, act: Callable[[], Any]) -> Any:
        """Run `act` in the main process, and return its result, or raise its error, in every process.

        Args:
          what: for the error when a process does not come.
          act: returns plain values; only the main process runs it.
        """
        said: Any = None
        error: BaseException | None = None
        if self.leads:
            try:
                said = {"result": act()}
            except Exception as raised:
                error, said = raised, {"error": describe(raised)}
        outcome = self.tell_all(what, said)[0]
        if error is not None:
            raise error
        if "error" in outcome:
            raise rebuilt(outcome["error"])
        return outcome["result"]

    def writes_as(self, name: str) -> None:
        """Set the name, equal in all processes and new for every checkpointer, under which `written` lets them meet."""
        self._writing = (f"axonml_jax/writing/{name}", itertools.count())

    def written(self, *, key: str, timeout_ms: int) -> None:
        """Barrier that Orbax's threads call twice a save, in all processes; Orbax names its barriers differently (`key`).

        Raises:
          OSError: in every process, naming those that could not write (see `not_written`).
        """
        del key
        self._meet("", timeout_ms)

    def not_written(self, error: Exception) -> Exception:
        """Tell the processes that wait in `written` that this one could not write its part.

        Without it they would wait there until their time is over.

        Returns:
          The error of the whole save, the same in every process.
        """
        if self.size == 1 or error is self._heard or isinstance(error, TimeoutError):
            return error
        try:
            self._meet(str(error) or repr(error), int(1000 * self.timeout))
        except Exception as heard:
            return heard
        return error

    def _meet(self, said: str, timeout_ms: int) -> None:
        client, (name, numbers) = coordinator_client(), self._writing
        place = f"{name}/{next(numbers)}/"
        if said:
            client.key_value_set(f"{place}{self.rank}", said)
        try:
            client.wait_at_barrier(place, timeout_ms)
        except jax.errors.JaxRuntimeError as error:
            raise lost_in_save(error) from error
        failed = sorted((int(key.rsplit("/", 1)[1]), text) for key, text in client.key_value_dir_get(place))
        if failed:
            self._heard = OSError("; ".join(f"on process {process}: {text}" for process, text in failed))
            raise self._heard

    def mine(self, things: Sequence) -> Sequence:
        """This process's share of a list of work."""
        return things[self.rank :: self.size]


def lost_in_save(error: Exception) -> Exception:
    """Convert an error of JAX's coordinator during a save to one that names the processes that have gone, if any."""
    lost = lost_processes(error)
    return OSError(f"process(es) {lost} ended or were lost while the others were writing") if lost else error


_KINDS = {
    kind.__name__: kind
    for kind in (DamagedCheckpoint, FolderInUse, FileExistsError, FileNotFoundError, ValueError, OSError)
}
"""Errors that are the same in every process, so that all of them handle one alike."""


def describe(error: BaseException) -> list[str]:
    """Convert an error to plain values: its kind, or the nearest kind that other processes know, and its text."""
    return [next((each.__name__ for each in type(error).__mro__ if each.__name__ in _KINDS), "OSError"), str(error)]


def rebuilt(said: Sequence[str]) -> Exception:
    """Rebuild the error that another process described."""
    return _KINDS[said[0]](said[1])


# --------------------------------------------------------------------------------------------------
# Arrays by name, to and from disk, through Orbax: every process writes and every device reads only its own share.
# --------------------------------------------------------------------------------------------------

_savers = itertools.count()
_ODD = frozenset("*?[\\")
_SCHEMES = ("gs", "s3", "az", "hf")
_GENERATORS = ("threefry2x32", "rbg", "unsafe_rbg")  # JAX's


class NoPlainName(OSError):
    """Raised when Orbax cannot take a folder's path and this machine has no place for a link to it."""


def entry_of(leaf: Leaf) -> Entry:
    """The manifest entry of a leaf."""
    if _is_key(leaf):
        words = jax.eval_shape(jax.random.key_data, leaf.array)
        return Entry(tuple(words.shape), str(words.dtype), _impl_of(leaf))
    return Entry(leaf.shape, jnp.dtype(leaf.dtype).name)


def entries_of(leaves: Mapping[str, Leaf]) -> dict[str, Entry]:
    """The manifest entries of leaves, each checked to be writable under its name.

    Raises:
      TypeError: naming every leaf that is no array of numbers which files can hold.
      ValueError: naming all names that files cannot tell apart, or hold.
    """
    entries = {name: entry_of(leaf) for name, leaf in leaves.items()}
    if wrong := [f"  {name}: {entry.dtype}" for name, entry in entries.items() if not _is_written(entry.dtype)]:
        raise TypeError(
            "\n".join(["a checkpoint cannot keep values of these kinds as arrays:", *wrong])
            + "\nturn them into arrays of numbers, or leave them out; plain values, such as text, go into about=. Every value "
            "of integers of less than a byte fits .astype(uint8), of small floats .astype(float16)"
        )
    if wrong := [f"  {name!r}" for name in entries if not _is_text(name)]:
        raise ValueError("\n".join(["names of arrays are UTF-8, and these are not:", *wrong]) + "\nrename them")
    if wrong := [f"  {name!r} and {name + '/'!r}" for name in entries if f"{name}/" in entries]:
        raise ValueError("\n".join(["arrays of these names would share one file:", *wrong]) + "\nrename one of the two")
    return entries


def _stored_as(name: str) -> str:
    """The prefix of the keys of an array's chunks: zarr adds a slash to a name that does not end with one."""
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

    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_without_chatter)
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
    """Close a checkpointer at the end of the block; after an error, suppress its own repetition of that error."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            saver.close()
        raise
    saver.close()


def is_plain(folder: Path) -> bool:
    """Whether Orbax and TensorStore use an absolute path literally.

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
    """Check that Orbax can use a folder, by its path or by a link; nothing is written.

    Raises:
      ValueError: when it cannot.
    """
    if not is_plain(folder) and not any(os.access(room, os.W_OK | os.X_OK) for room in _rooms()):
        raise ValueError(_without_room(folder))


@contextmanager
def plain_name(folder: Path) -> Iterator[Path]:
    """Yield a path of the folder that Orbax uses literally: its own, or that of a link private to this process.

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
    """Replace the link's path by the folder's own in an error."""
    text = str(error)
    return OSError(text.replace(str(plain), str(folder))) if plain != folder and str(plain) in text else error


def lacking(folder: Path, entries: Mapping[str, Entry]) -> list[str]:
    """Names that the manifest has but the arrays written to a folder lack."""
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
    """Existing folders in which links can be made."""
    rooms = dict.fromkeys(Path(room) for room in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"))
    return [room for room in rooms if is_plain(room.absolute()) and room.is_dir()]


def _without_room(folder: Path) -> str:
    return (
        f"{folder} has one of * ? [ \\ or .. in its path, begins like a URL or is no UTF-8: checkpoints go through "
        "a link without them, and no folder for temporary files takes one: give another path, or set TMPDIR to such a folder"
    )


def start_writing(saver: Any, folder: Path, leaves: Mapping[str, Leaf]) -> None:
    """Copy arrays to the host and start to write them; `saver.wait_until_finished` waits for the disk.

    Zero-size arrays have nothing to write; where all are, no folder is made.
    """
    import orbax.checkpoint as ocp

    tree = {name: _writable(leaf) for name, leaf in leaves.items() if entry_of(leaf).shape.count(0) == 0}
    if tree:
        saver.save(folder, args=ocp.args.PyTreeSave(tree))


def read(saver: Any, folder: Path, wanted: Mapping[str, Leaf], entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Read arrays by name, each in the shape, dtype and sharding of the wanted leaf.

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
    return {name: _arrived(found[name], leaf) if name in found else _nothing(leaf) for name, leaf in wanted.items()}


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
        return jax.random.wrap_key_data(jnp.asarray(value), impl=_impl_of(leaf))
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


def _nothing(leaf: Leaf) -> Any:
    """A zero-size array in the place of a leaf."""
    sharding = getattr(leaf.array, "sharding", None)
    shape = np.shape(leaf.array)
    if _is_key(leaf):
        words = jax.eval_shape(jax.random.key_data, leaf.array)
        return leaf.array if isinstance(leaf.array, jax.Array) else _arrived(np.zeros(words.shape, words.dtype), leaf)
    if sharding is None:
        return np.zeros(shape, leaf.dtype)
    return jax.jit(lambda: jnp.zeros(shape, leaf.dtype), out_shardings=sharding)()


def _is_key(leaf: Leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _impl_of(leaf: Leaf) -> str:
    """The name of the generator of random keys, of keys that are given as shapes too."""
    if isinstance(leaf.array, jax.Array):
        return str(jax.random.key_impl(leaf.array))
    made = {name: jax.eval_shape(partial(jax.random.key, impl=name), 0).dtype for name in _GENERATORS}
    return next(name for name, dtype in made.items() if dtype == leaf.dtype)


def _of_words(sharding: Any) -> Any:
    """The sharding of a key's words: like the keys', with one more dim that is never split."""
    return NamedSharding(sharding.mesh, sharding.spec) if isinstance(sharding, NamedSharding) else sharding


_ORBAX = f"{os.sep}orbax{os.sep}checkpoint{os.sep}"


def _without_chatter(record: logging.LogRecord) -> bool:
    # What is wrong with a save is raised, and Orbax logs it once more for each array: without the traceback then.
    raised = record.exc_info[2] if record.exc_info and record.name == "asyncio" else None
    files = [record.pathname, *(frame.f_code.co_filename for frame, _ in traceback.walk_tb(raised))]
    if not any(_ORBAX in file for file in files):
        return True
    record.exc_info = record.exc_text = None
    return record.levelno > logging.WARNING


# --------------------------------------------------------------------------------------------------
# Work of the main process that may take an hour, such as a download: the others wait for it as long as its process lives.
# --------------------------------------------------------------------------------------------------

_MEET = 30.0
"""Seconds between two meetings, far fewer than processes wait for each other at one of them."""


def decide_at_length(team: Team, what: str, act: Callable[[], Any]) -> Any:
    """`team.decide` for an `act` without a time limit; the processes meet meanwhile, so that none waits for a dead one.

    Raises:
      TimeoutError: when a process no longer comes; what the main one has begun ends first.
    """
    if team.size == 1:
        return act()
    outcome = _begun(what, act) if team.leads else Future()
    try:
        while not team.decide(what, lambda: _ended(outcome)):
            pass
    except Exception:
        if team.leads:
            wait([outcome])
        raise
    return team.decide(what, outcome.result)


def tell_all_at_length(team: Team, what: str, act: Callable[[], Any]) -> list[Any]:
    """`team.tell_all` of the result of `act`, without a time limit; the processes meet meanwhile.

    Args:
      team: the processes.
      what: for the error when a process does not come.
      act: returns plain values, and raises nothing: the others would wait for this process.

    Raises:
      TimeoutError: when a process no longer comes.
    """
    if team.size == 1:
        return [act()]
    outcome = _begun(what, act)
    while not all(team.tell_all(what, _ended(outcome))):
        pass
    return team.tell_all(what, outcome.result())


def _begun(what: str, act: Callable[[], Any]) -> Future:
    outcome: Future = Future()

    def work():
        try:
            outcome.set_result(act())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=work, name=what, daemon=True).start()
    return outcome


def _ended(outcome: Future) -> bool:
    wait([outcome], _MEET)
    return outcome.done()


# --------------------------------------------------------------------------------------------------
# Whether a checkpoint fits the object to restore into: all differences are listed at once.
# --------------------------------------------------------------------------------------------------

DIFFERENCES = ("missing", "unexpected", "mismatched")
"""What may be accepted: names the checkpoint lacks, names only it has, and arrays of another shape or dtype."""

OPTIONAL = ("guard/",)
"""How the names of arrays begin that may be missing or unexpected in any restore: counts of skipped updates."""

_SHOWN = 10


def differences(
    wanted: Mapping[str, Leaf], found: Mapping[str, Entry], optional: tuple[str, ...] = OPTIONAL
) -> dict[str, dict[str, str]]:
    """Differences between wanted and saved arrays in words, by kind and name.

    Any float dtype fits any other, and any integer dtype fits a Python int; other dtypes must be equal.

    Args:
      wanted: what shall be restored.
      found: what the checkpoint has.
      optional: how names begin that may be missing or unexpected.
    """
    mismatched = {}
    for name, leaf in wanted.items():
        if name in found and (problem := _mismatch(leaf, found[name])):
            mismatched[name] = problem
    missing = {name: _shape(entry_of(leaf)) for name, leaf in wanted.items() if name not in found}
    unexpected = {name: _shape(entry) for name, entry in found.items() if name not in wanted}
    return {
        "missing": {name: text for name, text in missing.items() if not name.startswith(optional)},
        "unexpected": {name: text for name, text in unexpected.items() if not name.startswith(optional)},
        "mismatched": mismatched,
    }


def rounded(wanted: Mapping[str, Leaf], found: Mapping[str, Entry]) -> str:
    """Describe the arrays whose floats lose digits or range in a restore, by pair of dtypes; empty if none does.

    >>> rounded({"w": Leaf(jnp.zeros(2, jnp.bfloat16))}, {"w": Entry((2,), "float32")})
    '1 from float32 to bfloat16 (w)'
    """
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, leaf in wanted.items():
        saved, needed = found[name].dtype, entry_of(leaf).dtype
        if found[name].key is None and not isinstance(leaf.array, bool | int | float) and _loses(saved, needed):
            kinds.setdefault((saved, needed), []).append(name)
    shown = lambda names: ", ".join([*names[:3], "..."] if len(names) > 3 else names)
    return "; ".join(f"{len(names)} from {a} to {b} ({shown(names)})" for (a, b), names in kinds.items())


def _loses(saved: str, needed: str) -> bool:
    if saved == needed or not all(jnp.issubdtype(jnp.dtype(each), jnp.inexact) for each in (saved, needed)):
        return False
    a, b = jnp.finfo(saved), jnp.finfo(needed)
    return a.nmant > b.nmant or a.maxexp > b.maxexp or a.minexp < b.minexp


def refused(where: str, found: Mapping[str, Mapping[str, str]], accept: Collection[str]) -> str | None:
    """The error message for differences that were not accepted; None if all were."""
    lines = listing({kind: names for kind, names in found.items() if kind not in accept})
    if not lines:
        return None
    saved, wanted = (any(n.startswith(STATE) for n in found.get(kind, {})) for kind in ("unexpected", "missing"))
    if saved != wanted:
        lines.append(
            f"it holds only a trainer's state: read it by state = ax.restore({where!r}, trainer.state). What "
            "ax.save(path, trainer) saves can be restored by trainers under every plan"
            if saved
            else f"it does not hold a trainer's state: ax.restore({where!r}, x) needs the kind of object that was saved, a "
            "trainer or a model x"
        )
    kinds = tuple(kind for kind, names in found.items() if names and kind not in accept)
    return (
        f"{where} does not fit the object to restore into:\n" + "\n".join(lines) + "\naccept="
        f"{kinds!r} restores what fits and leaves the rest unchanged"
    )


def listing(found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """One line for each difference: all of them, or the first ten and counts by kind."""
    lines = [f"  {name}: {kind} {text}" for kind, names in found.items() for name, text in names.items()]
    if len(lines) <= _SHOWN:
        return lines
    counts = ", ".join(f"{len(names)} {kind}" for kind, names in found.items() if names)
    return [*lines[:_SHOWN], f"  ... and {len(lines) - _SHOWN} more; in all {counts}"]


def _mismatch(leaf: Leaf, got: Entry) -> str | None:
    need, entries = entry_of(leaf), leaf.entries
    if need.key != got.key:
        return f"(saved as {got.key or got.dtype}, needed as {need.key or need.dtype})"
    if need.shape != got.shape:
        return f"(saved {_shape(got)}, needed {_shape(need)}{entries and f', {entries}'})"
    kind = jnp.integer if isinstance(leaf.array, int) else jnp.floating
    if need.dtype != got.dtype and not all(jnp.issubdtype(jnp.dtype(entry.dtype), kind) for entry in (need, got)):
        return f"(saved as {got.dtype}, needed as {need.dtype})"
    return None


def _shape(entry: Entry) -> str:
    return f"{entry.dtype}{list(entry.shape)}"
