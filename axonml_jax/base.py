"""Shared by all floors: types of trees and names of leaves, checks of fields, logging, tables, and synonyms of options."""

import contextlib
import difflib
import enum
import functools
import inspect
import io
import logging
import math
import numbers
import os
import random
import re
import shutil
import signal
import sys
import textwrap
import threading
import typing
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

if TYPE_CHECKING:
    import jax


# --------------------------------------------------------------------------------------------------
# Names for the trees that travel through the library, and how a place in one is written.
# --------------------------------------------------------------------------------------------------

PyTree = Any
"""A nest of dicts, lists, tuples and registered dataclasses with arrays as leaves."""

LossFn = Callable[[Any, Any], Any]
"""`loss_fn(model, batch) -> loss` or `(loss, metrics)`."""


def is_array(x: Any) -> bool:
    """Whether a leaf has a shape and a dtype, which numbers, flags and strings lack."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def host_arrays(tree: PyTree) -> PyTree:
    """Replace tensors of other frameworks (PyTorch, TensorFlow: anything with `__array__`) by NumPy arrays.

    Arrays of the other byte order, which JAX does not know, become this machine's. Tensors that require gradients are detached.
    """
    import jax

    if isinstance(tree, Iterator):  # no tree: JAX would not flatten it
        return tree
    return jax.tree.map(_on_host, tree) if any(map(_is_foreign, jax.tree.leaves(tree))) else tree


_FOREIGN: dict[type, bool] = {}


def _is_foreign(x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return not x.dtype.isnative
    found = _FOREIGN.get(type(x))
    if found is None:
        import jax

        found = hasattr(x, "__array__") and not isinstance(x, np.generic | jax.Array | type)
    return _FOREIGN.setdefault(type(x), found)


def _on_host(x: Any) -> Any:
    import jax

    if not _is_foreign(x):
        return x
    if isinstance(x, np.ndarray):
        return x.astype(x.dtype.newbyteorder("="))
    x = x.detach() if hasattr(x, "detach") else x
    try:
        return np.asarray(x)
    except TypeError:  # bfloat16, which is none of NumPy's own; JAX takes no part of a larger tensor
        with contextlib.suppress(Exception):
            return np.asarray(jax.numpy.from_dlpack(x.contiguous() if hasattr(x, "contiguous") else x))
        raise  # a sparse tensor, one of another device: what its own framework says


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of JAX random keys, which NumPy does not have."""
    import jax

    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def from_every_process(leaf: Any, sharding: Any) -> "jax.Array":
    """A global array of a full one that every process has, random keys too: each moves the parts that its devices hold."""
    import jax

    if is_key(leaf):
        data = from_every_process(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def refuse_not_held(leaves: dict[str, Any], *, keys: bool = True) -> None:
    """Refuse leaves of a batch that JAX arrays cannot hold.

    Args:
      leaves: by path.
      keys: whether JAX's typed random keys are accepted.

    Raises:
      TypeError: naming every leaf that is not made of numbers, has masked values, or has 64-bit integers that do not fit 32
        bits, where JAX has no others.
    """
    if wrong := [f"  {name or 'batch'}: {why}" for name, leaf in leaves.items() if (why := _not_held(leaf, keys))]:
        raise TypeError(
            "JAX arrays cannot hold these leaves of the batch; encode them as numbers, or leave them out:\n"
            + some_of(wrong, "\n")
        )


_SHOWN = 5


def some_of(names: Sequence[str], between: str = ", ") -> str:
    """The first few of some names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
    return between.join(names[:_SHOWN]) + more


def _not_held(leaf: Any, keys: bool) -> str | None:
    """Why JAX arrays cannot hold a leaf, and what to give instead; None if they can."""
    import jax

    if np.ma.is_masked(leaf):
        return "masked values; give leaf.filled(value), and np.ma.getmaskarray(leaf) as a leaf for the loss to leave them out"
    values = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    if not isinstance(dtype := values.dtype, np.dtype):
        return None if keys else "a JAX random key; give a whole number, and let the loss call jax.random.key(number)"
    if dtype.hasobject:
        return f"objects ({type(next(iter(values.flat), None)).__name__}); see jax.tree_util.register_dataclass for your own"
    if not any(jax.numpy.issubdtype(dtype, kind) for kind in (np.number, np.bool_)) or dtype.char in "gG":
        return str(dtype)
    held = jax.dtypes.canonicalize_dtype(dtype)
    if held != dtype and held.kind in "iu" and isinstance(values, np.ndarray | np.generic) and values.size:
        least, most, limits = values.min(), values.max(), np.iinfo(held)
        if least < limits.min or limits.max < most:
            return (
                f"{dtype} from {least} to {most}, which do not fit {held}; renumber them (np.unique(leaf, "
                "return_inverse=True)), or call jax.config.update('jax_enable_x64', True) first"
            )
    return None


def is_one_of(given: Any, choices: Iterable[Any]) -> bool:
    """Whether a value equals one of some plain choices; safe for arrays, whose comparison has no truth value.

    >>> import jax.numpy as jnp
    >>> is_one_of("full", (None, "full")), is_one_of(["full"], (None, "full")), is_one_of(jnp.ones(3), (True, False))
    (True, False, False)
    """
    return isinstance(given, Hashable) and given in tuple(choices)


def path_name(path: tuple) -> str:
    """The name of a key path as users write it: `blocks/0/attention/kernel`.

    >>> from jax.tree_util import DictKey, SequenceKey
    >>> path_name((DictKey("blocks"), SequenceKey(0)))
    'blocks/0'
    """
    import jax  # what parses a command line is here before JAX is

    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Map every leaf of `tree` to its path name, in tree order.

    >>> named_leaves({"b": 2, "a": {"c": 1}})
    {'a/c': 1, 'b': 2}

    Raises:
      ValueError: when two leaves would have one name, as those of `{"a": {"b": x}, "a/b": y}`.
    """
    import jax

    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {path_name(path): leaf for path, leaf in leaves}
    if len(named) < len(leaves):
        raise ValueError(_twins([path for path, _ in leaves]))
    return named


def _twins(paths: list[tuple]) -> str:
    import jax

    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(path_name(path), []).append(jax.tree_util.keystr(path))
    lines = [f"  {name}: {' and '.join(found)}" for name, found in by_name.items() if len(found) > 1]
    return (
        "\n".join(["these leaves of the tree have the same name and cannot be told apart:", *lines])
        + "\nrename one of them"
    )


# --------------------------------------------------------------------------------------------------
# Whether a value's numbers, flags and choices are what its class says: no type checker has seen what a file holds.
# --------------------------------------------------------------------------------------------------

_COUNTED = 2**31
_WORDS = {int: f"a whole number below {_COUNTED:,}", float: "a finite number", bool: "true or false"}


def wrong_types(config: Any) -> Iterator[str]:
    """A line for every field whose value has the wrong type or is not one of its choices.

    Args:
      config: a dataclass.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Sizes:
    ...     width: int | None = None
    ...     kind: typing.Literal["plain", "gated"] = "plain"
    >>> list(wrong_types(Sizes(width=3, kind="plain")))
    []
    >>> print(*wrong_types(Sizes(width=True, kind="gelu")), sep="\\n")
    width=True: must be a whole number below 2,147,483,648, or None
    kind='gelu': must be one of plain, gated
    """
    for name, kinds in _kinds(type(config)).items():
        value = getattr(config, name)
        if not any(_fits(value, kind) for kind in kinds):
            words = [_WORDS[kind] for kind in kinds if kind in _WORDS]
            words += [f"one of {', '.join(map(str, chosen))}" for chosen in map(_choices, kinds) if chosen]
            yield f"{name}={value!r:.60}: must be {', or '.join(words)}{', or None' * (type(None) in kinds)}"


@functools.cache
def _kinds(cls: type) -> dict[str, tuple[Any, ...]]:
    hints = typing.get_type_hints(cls).items()
    found = {name: (kind,) if _choices(kind) else typing.get_args(kind) or (kind,) for name, kind in hints}
    return {name: kinds for name, kinds in found.items() if any(each in _WORDS or _choices(each) for each in kinds)}


def _choices(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _fits(value: Any, kind: Any) -> bool:
    if chosen := _choices(kind):
        return isinstance(value, str) and value in chosen
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return isinstance(value, numbers.Integral) and abs(int(value)) < _COUNTED
    if kind is float:
        return isinstance(value, numbers.Real) and _is_finite(value)
    return isinstance(value, kind)


def _is_finite(value: numbers.Real) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:  # a whole number without end
        return False


# --------------------------------------------------------------------------------------------------
# Exit statuses of commands: those of signals are 128 plus the signal's number, as shells have it.
# --------------------------------------------------------------------------------------------------

USAGE_ERROR = 2
"""Exit status for anything wrong with the arguments or the configuration."""

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

CLOSED_PIPE = 141
"""Exit status when the reader of the output is gone."""

TERMINATED = 143
"""Exit status after SIGTERM; a training run is saved and not at its end."""

# --------------------------------------------------------------------------------------------------
# Messages that know their rank or the user's line: a logger, warnings, printing once, and one seed for everything.
# --------------------------------------------------------------------------------------------------

logger = logging.getLogger("axonml_jax")
"""The library's logger. With several processes (or ranks of `spawn`) a message starts with its rank, as `[2/8] `."""


def warn(message: str, kind: type[Warning] = UserWarning) -> None:
    """Issue a warning at the user's line: the innermost frame outside of this package, JAX and `contextlib`."""
    frame, level = sys._getframe(1), 2
    while frame is not None and _is_between(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, kind, stacklevel=level)


_BETWEEN = os.path.dirname(__file__) + os.sep, str(contextlib.__file__)
_JAX = os.sep + os.path.join("jax", "_src") + os.sep


def _is_between(path: str) -> bool:
    return path.startswith(_BETWEEN) or _JAX in path


def print0(*args: Any, **kwargs: Any) -> None:
    """`print` in the main process only (under `spawn`: in rank 0 only)."""
    if _place()[0] == 0:
        print(*args, **kwargs)


def cores() -> int:
    """Returns the number of cores that this process may run on, as XLA counts them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Lossy(io.FileIO):
    """An output stream that may fail: what a full or failing disk does not take is lost, with one message and no error.

    Attributes:
      asks: whether this process gets a SIGTERM (once, and only if it handles it) when the reader has gone, instead of an error.
    """

    asks = told = _asked = False

    def write(self, data: Any, /) -> int | None:
        """Write as much as possible; all of it counts as written."""
        try:
            return super().write(data)
        except OSError as error:
            gone = isinstance(error, BrokenPipeError)
            if gone and not self.asks:
                raise
            if not self.told:
                self.told, what = True, {1: "standard output", 2: "standard error"}.get(self.name, self.name)
                told = f"axonml-jax: cannot write to {what} ({error.strerror}): lines are lost from here on\n"
                with contextlib.suppress(OSError):
                    os.write(2, told.encode())
                if gone and not Lossy._asked and callable(signal.getsignal(signal.SIGTERM)):
                    Lossy._asked = True
                    os.kill(os.getpid(), signal.SIGTERM)
            return len(data)


def seed(n: int) -> "jax.Array":
    """Seed Python's and NumPy's generators, and return JAX's key: the same in every process.

    Args:
      n: an int from 0 to 2**32 - 1.

    Returns:
      `jax.random.key(n)`. Split or fold in a rank's index where ranks should differ.

    Raises:
      ValueError: when n is out of range.
    """
    if not 0 <= n < 2**32:
        raise ValueError(f"seed({n}): NumPy takes seeds from 0 to 2**32 - 1; choose one of those")
    import jax

    random.seed(n)
    np.random.seed(n)
    return jax.random.key(n)


def _place() -> tuple[int, int]:
    """This process's rank and the number of processes; it starts no devices."""
    thread = threading.current_thread()
    if hasattr(thread, "rank"):  # a rank of `spawn` (mesh/world.py)
        return thread.rank, thread.world_size  # pyright: ignore[reportAttributeAccessIssue]
    if (jax := sys.modules.get("jax")) is None or not jax.distributed.is_initialized():
        return 0, 1
    from axonml_jax.compat.processes import joined_as

    return joined_as()


def _prefix_rank(record: logging.LogRecord) -> bool:
    index, count = _place()
    if count > 1:
        record.msg = f"[{index}/{count}] {record.msg}"
    return True


logger.addFilter(_prefix_rank)


# --------------------------------------------------------------------------------------------------
# Small pieces of HTML for notebooks: escaped, without scripts and style sheets, in the colours of the page around them.
# --------------------------------------------------------------------------------------------------

_RULE = "border-bottom:1px solid #8886"
_BAR = "#3f83c9"
_BAR_PIXELS = 96


def bytes_meant(text: str) -> float:
    """Parse a size such as "16GiB" into bytes.

    >>> bytes_meant("16GiB") == 16 * 2**30, bytes_meant("80GB"), bytes_meant("512")
    (True, 80000000000.0, 512.0)

    Raises:
      ValueError: for anything else.
    """
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "": 1}
    number = text.rstrip("KMGTiB ")
    unit = text[len(number) :].strip()
    try:
        return float(number) * units[unit]
    except (KeyError, ValueError):
        raise ValueError(f"{text!r} must be a size such as 16GiB or 80GB") from None


def size_in_words(size: float) -> str:
    """Format a number of bytes for people.

    >>> size_in_words(1536), size_in_words(80e9), size_in_words(7)
    ('1.5 KiB', '74.5 GiB', '7 B')
    """
    for unit, one in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= one:
            return f"{size / one:.1f} {unit}"
    return f"{size:.0f} B"


def section(title: str, *parts: str) -> str:
    """HTML of a title above HTML parts, which scrolls if it is too wide for the page.

    >>> section("a < b", "<p>so</p>")
    '<div style="overflow-x:auto"><div><b>a &lt; b</b></div><p>so</p></div>'
    """
    head = f"<div><b>{escape(title)}</b></div>" if title else ""
    return f'<div style="overflow-x:auto">{head}{"".join(parts)}</div>'


def lines(text: str) -> str:
    """HTML of a text with its line breaks.

    >>> lines("1 < 2\\n3")
    '<div style="margin:4px 0">1 &lt; 2<br>3</div>'
    """
    return f'<div style="margin:4px 0">{"<br>".join(map(escape, text.splitlines()))}</div>'


def columns_of_terminal() -> int | None:
    """The width of the terminal in columns; None if standard output is a file, a pipe or a notebook."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


def folded(text: str) -> str:
    """Fold a text for the terminal: lines that are too long are broken between words, indented below their first word.

    Tables stay as they are, and so does everything where standard output is no terminal.
    """
    width = columns_of_terminal()
    if width is None:
        return text
    return "\n\n".join(
        block if re.search(r"^-+( +-+)*$", block, re.MULTILINE) else "\n".join(_broken(block, width))
        for block in text.split("\n\n")
    )


def _broken(block: str, width: int) -> Iterator[str]:
    for line in block.split("\n"):
        indent = " " * (len(line) - len(re.sub(r"^(\w+ {2,}| *)", "", line)) or 4)
        folds = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        yield line if len(line) <= width else folds.fill(line)


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], left: int, spare: Sequence[str] = ()) -> str:
    """A plain-text table whose first `left` columns are flush left and the others flush right.

    >>> print(aligned(["what", "bytes"], [["a", "1,024"], ["bcd", "8"]], left=1))
    what  bytes
    ----  -----
    a     1,024
    bcd       8

    Args:
      header: names of the columns.
      rows: cells.
      left: number of columns that hold words.
      spare: columns that are left out, in this order, where the terminal is narrower than the table.
    """
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    every, shown, width = (
        [header, ["-" * width for width in widths], *rows],
        list(range(len(header))),
        columns_of_terminal(),
    )
    without = []
    for name in spare:
        if width is not None and sum(widths[index] + 2 for index in shown) - 2 > width:
            shown.remove(header.index(name))
            without.append(name)
    lines = [
        "  ".join(line[i].ljust(widths[i]) if i < left else line[i].rjust(widths[i]) for i in shown).rstrip()
        for line in every
    ]
    return "\n".join([*lines, *([f"(not shown on this narrow terminal: {', '.join(without)})"] if without else [])])


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int,
    *,
    shares: Sequence[float] = (),
    quiet: Collection[int] = (),
) -> str:
    """An HTML table whose first `left` columns are flush left and the others flush right.

    Args:
      header: names of the columns.
      rows: cells, escaped here.
      left: number of columns that hold words.
      shares: of every row a number from 0 to 1, drawn as a bar behind it; none are drawn when empty.
      quiet: rows that are written faintly.
    """
    head = "".join(_cell("th", name, index < left) for index, name in enumerate(header)) + "<th></th>" * bool(shares)
    bars = [f"<td>{_bar(share)}</td>" for share in shares] or [""] * len(rows)
    body = [
        f"<tr{_FAINT * (number in quiet)}>{''.join(_cell('td', cell, i < left) for i, cell in enumerate(row))}{bar}</tr>"
        for number, (row, bar) in enumerate(zip(rows, bars, strict=True))
    ]
    return (
        '<table style="border-collapse:collapse;margin:6px 0">'
        f'<thead><tr style="{_RULE}">{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    )


_FAINT = ' style="opacity:0.55"'


def _cell(tag: str, text: str, words: bool) -> str:
    side = "left" if words else "right"
    return f'<{tag} style="text-align:{side};padding:2px 8px">{escape(text)}</{tag}>'


def _bar(share: float) -> str:
    wide = round(_BAR_PIXELS * min(max(share, 0.0), 1.0))
    return f'<div style="width:{wide}px;height:0.7em;background:{_BAR}"></div>'


# --------------------------------------------------------------------------------------------------
# What others call our names: one table, for the choices where another name means one thing, and for the hints
# elsewhere.
#
# A choice (an axis, a precision, a strategy, a schedule, a dtype) is taken by any of its names, however it is spelt:
# `HYBRID_SHARD` is `hybrid_shard`. A keyword or a key of a configuration has one name, the same in both, and a refusal
# says which; `SAME_KEYS` are taken all the same.
# --------------------------------------------------------------------------------------------------

AXIS_SYNONYMS: dict[str, str] = {
    "dp": "data",
    "ddp": "data",
    "batch": "data",
    "replica": "data",
    "dp_replicate": "data",
    "pp": "pipe",
    "pipeline": "pipe",
    "stage": "pipe",
    "zero": "fsdp",
    "dp_shard": "fsdp",
    "cp": "context",
    "context_parallel": "context",
    "seq": "context",
    "sequence": "context",
    "ep": "expert",
    "expert_parallel": "expert",
    "experts": "expert",
    "tp": "tensor",
    "mp": "tensor",
    "model": "tensor",
}
"""Other names of mesh axes, and the library's."""

CHOICES: dict[str, dict[str, str]] = {
    "dtype": {
        "fp64": "float64",
        "f64": "float64",
        "fp32": "float32",
        "f32": "float32",
        "bf16": "bfloat16",
        "fp16": "float16",
        "f16": "float16",
        "half": "float16",
    },
    "precision": {
        "fp32": "float32",
        "f32": "float32",
        "bfloat16": "bf16",
        "bf16_mixed": "bf16",
        "float16": "fp16",
        "f16": "fp16",
        "half": "fp16",
        "fp16_mixed": "fp16",
        "float8": "fp8",
    },
    "sharding_strategy": {
        "zero3": "full_shard",
        "zero_3": "full_shard",
        "zero2": "shard_grad_op",
        "zero_2": "shard_grad_op",
        "zero1": "shard_optimizer",
        "zero_1": "shard_optimizer",
        "zero0": "no_shard",
        "hsdp": "hybrid_shard",
    },
    "schedule": {
        "one_f_one_b": "1f1b",
        "interleaved1f1b": "interleaved",
        "interleaved_1f1b": "interleaved",
        "interleaved_one_f_one_b": "interleaved",
        "zb": "zero-bubble",
    },
    "hardware": {"v5litepod": "v5e", "v5_lite": "v5e", "trillium": "v6e"},
}
"""Other names of values, spelt as `_plain` does, and the library's, by the setting that takes them."""

KEYS: dict[str, str] = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "bs": "global_batch_size",
    "batch_size": "global_batch_size",
    "batch": "global_batch_size",
    "grad_clip": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "max_steps": "steps",
    "num_steps": "steps",
    "warmup": "warmup_steps",
    "optimizer": "name",
    "seq_len": "length",
    "sequence_length": "length",
    "context_length": "max_length",
    "grad_accum": "accumulate",
    "dtype": "precision",
    "gradient_accumulation_steps": "accumulate",
    "zero_stage": "sharding_strategy",
    "strategy": "sharding_strategy",
    "n_layer": "num_layers",
    "n_layers": "num_layers",
    "num_hidden_layers": "num_layers",
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "n_head": "num_heads",
    "n_heads": "num_heads",
    "num_attention_heads": "num_heads",
    "intermediate_size": "mlp_hidden_size",
    "activation_checkpointing": "remat",
}
"""Other names of configuration keys, and the last part of the library's."""

SAME_KEYS: dict[str, str] = {
    "pipeline.microbatches": "pipeline.num_microbatches",
    "plan.cpu_offload": "plan.offload",
    "plan.gather": "plan.wire",
    "plan.mixed_precision": "plan.precision",
    "plan.reduce": "plan.reduce_wire",
}
"""Names of configuration keys in the Python API, and former ones, and the keys that they are accepted for."""

SECTIONS: dict[str, str] = {
    "optimizer": "optim",
    "parallelism": "mesh",
    "dataset": "data",
    "training": "train",
    "trainer": "train",
    "logging": "output",
    "generation": "sample",
    "checkpoints": "checkpoint",
    "checkpointing": "checkpoint",
}
"""Other names of sections of a configuration, and the library's."""

NO_AXIS: dict[str, str] = {
    "sp": "sequence parallelism lies along 'tensor': give that axis, and sequence_parallel=True to the layers; whole models "
    "split sequences along 'context'",
}
"""What people look for as an axis and what there is in its place."""

_STEP = "trainer.step(batch) differentiates the loss and updates"
_PLACED = "the mesh and the plan say where arrays live"
_CAST = 'products are cast by precision="bf16" of the plan, and parameters keep their dtype'
METHODS: dict[str, str] = {
    "apply": "call it, model(x)",
    "backward": _STEP,
    "bfloat16": _CAST,
    "clip_grad_norm_": "model.trainer(..., max_grad_norm=1.0) clips in the step",
    "compile": "a step is compiled when it is first called",
    "cpu": _PLACED,
    "cuda": _PLACED,
    "fit": "call trainer.step(batch) in a loop",
    "half": _CAST,
    "load_checkpoint": "ax.restore(path, trainer)",
    "load_state_dict": "trainer.model.load_state_dict, or ax.restore(path, trainer)",
    "model_state": "trainer.state.variables",
    "named_parameters": "state_dict() has their names",
    "optimizer": "its state is trainer.opt_state, its learning rate trainer.lr",
    "param_groups": "the learning rate is trainer.lr, groups are optax.multi_transform",
    "params": "model.parameters()",
    "requires_grad_": "trainable= says what trains, when the model is wrapped",
    "save": "ax.save(path, trainer)",
    "save_checkpoint": "ax.save(path, trainer)",
    "scheduler": "give the optimizer an optax schedule as its learning rate",
    "state_dict": "trainer.model.state_dict()",
    "to": _PLACED,
    "train": "trainer.step(batch) trains in training mode, and trainer.evaluate in evaluation mode",
    "zero_grad": f"no gradients are kept: {_STEP}",
}
"""Attributes that models and trainers of others have, and what there is in their place."""

Kind = TypeVar("Kind", bound=enum.Enum)


def meant(setting: str, given: Any, choices: Iterable[str] = ()) -> Any:
    """The choice that a given name, or a synonym of it, means.

    Args:
      setting: which row of `CHOICES` knows the other names.
      given: a name, however it is spelt; anything but text is given back.
      choices: ours; none: whatever the table says.

    Returns:
      One of `choices`, or `given` where it is none of them.

    >>> meant("sharding_strategy", "ShardingStrategy.HYBRID_SHARD", ["hybrid_shard"]), meant("dtype", "bf16")
    ('hybrid_shard', 'bfloat16')
    """
    if not isinstance(given, str):
        return given
    ours = {_plain(choice): choice for choice in choices}
    plain = _plain(given)
    found = CHOICES.get(setting, {}).get(plain, given)
    return ours.get(plain, found if not ours or found in ours.values() else given)


def member(kind: type[Kind], setting: str, given: Any) -> Kind | None:
    """Implements `_missing_` of an Enum: the member that a name means, or None."""
    if not isinstance(given, Hashable):
        return None
    by_value = {each.value: each for each in kind}
    by_name = {_plain(each.name): each for each in kind}
    found = by_value.get(meant(setting, given, by_value))
    return by_name.get(_plain(given)) if found is None and isinstance(given, str) else found


def is_choice(kind: type[enum.Enum], given: Any) -> bool:
    """Whether a value is a member, its name or its value."""
    try:
        kind(given)
    except ValueError:
        return False
    return True


def priced_platform(given: str | None) -> str | None:
    """A platform by the name that prices know it by; "gpu", as `jax.default_backend()` names it, is "cuda".

    Raises:
      ValueError: for any other name.
    """
    platform = "cuda" if given == "gpu" else given
    if platform not in (None, "tpu", "cuda", "cpu"):
        raise ValueError(f"platform={given!r} must be 'tpu', 'cuda', 'cpu', or None: no kernels are counted on")
    return platform


def no_attribute(of: object, name: str, *hints: str) -> AttributeError:
    """The error for a missing attribute, with hints; if it is a property, the error that the property raised."""
    if hasattr(type(of), name):
        object.__getattribute__(of, name)
    said = "; ".join([*([METHODS[name]] if name in METHODS else []), *hints])
    said = f": {said}" if said and not name.startswith("_") else ""
    return AttributeError(f"{type(of).__name__!r} object has no attribute {name!r}{said}", name=name, obj=of)


def nearest(given: str, known: Iterable[str], *tables: dict[str, str], cutoff: float = 0.6) -> str | None:
    """The known name that was most likely meant: by the tables of synonyms, else by spelling.

    >>> nearest("lr", ["steps", "learning_rate"], KEYS), nearest("stpes", ["steps"], KEYS)
    ('learning_rate', 'steps')
    """
    known, plain = list(known), _plain(given)
    for table in tables:
        if table.get(plain) in known:
            return table[plain]
    return next(iter(difflib.get_close_matches(given, known, n=1, cutoff=cutoff)), None)


P = ParamSpec("P")
R = TypeVar("R")


def naming_options(fun: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function to refuse unknown keyword arguments with the nearest known name."""
    known = list(inspect.signature(fun).parameters)

    @functools.wraps(fun)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if unknown := [name for name in kwargs if name not in known]:
            near = nearest(unknown[0], known)
            hint = f", did you mean {near!r}?" if near else f": {', '.join(known[1:])} are known"
            raise TypeError(f"{fun.__name__}() got an unexpected keyword argument {unknown[0]!r}{hint}")
        return fun(*args, **kwargs)

    return called


def _plain(name: str) -> str:
    """Normalize a name: without its class, in lower case, with underscores."""
    return name.strip().rpartition(".")[2].lower().replace("-", "_").replace(" ", "_")
