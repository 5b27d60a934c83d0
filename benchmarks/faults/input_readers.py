"""What reads documents that others have written: for each kind valid ones, how they are changed, and what a case of it does."""

import contextlib
import copy
import json
import random
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mutations import as_json, of_bytes, of_values

ROOT = Path(__file__).resolve().parents[2]
NAMED: tuple[type[Exception], ...] = (ValueError, FileNotFoundError)
"""Errors that say what is wrong with a document; their text must not be empty."""


@dataclass(frozen=True)
class Reader:
    """A kind of document.

    Attributes:
      weight: its share of the cases.
      prepare: (folder) -> what a case needs, made once.
      case: (folder, prepared, draw) -> reads one changed document; returns normally when it is as good as a valid one.
      errors: how it may end.
      says_where: whether the error must name the document's folder.
    """

    weight: int
    prepare: Callable
    case: Callable
    errors: tuple[type[BaseException], ...] = NAMED
    says_where: bool = False


def checkpoint(folder: Path):
    """A checkpoint's manifest and files, written without Orbax."""
    from axonml_jax.checkpoint.format import Entry, Manifest, checksums

    (folder / "it" / "arrays").mkdir(parents=True)
    (folder / "it" / "arrays" / "d").write_bytes(b"12345678")
    (folder / "outside").write_bytes(b"secret")
    entries = {"model/w": Entry((2, 3), "float32"), "rng": Entry((2,), "uint32", "threefry2x32")}
    about = {"data": {"epoch": 1, "samples": 3}, "metrics": {"loss": 1.5}, "about": {"who": "me"}}
    Manifest(step=3, entries=entries, files=checksums(folder / "it"), **about).write(folder / "it")
    text = (folder / "it" / "checkpoint.json").read_bytes()
    return text, {name: value for name, value in json.loads(text).items() if name != "crc32"}


def read_checkpoint(folder: Path, prepared, draw: random.Random):
    """Some with a checksum that fits: what somebody has written who knows how."""
    from axonml_jax.checkpoint.format import Manifest, _text_sum, damage

    text, content = prepared
    if draw.random() < 0.6:
        changed = of_values(content, draw, ("../outside", "arrays/../../outside", "arrays/d", "/etc/passwd"))
        with contextlib.suppress(ValueError, RecursionError):  # no JSON can be written of it
            text = as_json(
                {"crc32": _text_sum(json.loads(as_json(changed))), **changed} if isinstance(changed, dict) else changed
            )
    else:
        text = of_bytes(text, draw)
    (folder / "it" / "checkpoint.json").write_bytes(text)
    manifest = Manifest.read(folder / "it")
    damage(folder / "it", manifest, manifest.files)


def configurations(_: Path):
    """The configurations of the repository, as text and as values."""
    import yaml

    texts = [path.read_bytes() for path in sorted((ROOT / "configs").glob("*.yaml"))]
    return texts, [yaml.safe_load(text) for text in texts]


def _laughs(form: bytes) -> bytes:
    """Nine anchors, each of which repeats the one before it nine times."""
    return b"".join(form % (c + 1, c + 1, b", ".join([b"*%c" % c] * 9)) for c in range(97, 106))


BOMBS = (
    b"a: &a [x, x, x, x, x, x, x, x, x]\n" + _laughs(b"%c: &%c [%s]\n"),
    b"a: &a {x: 1}\n" + _laughs(b"%c: &%c {<<: [%s]}\n"),
    *(b"a: &a [*a]\n", b"a: &a {b: *a}\n", b"[" * 50_000, b"{a: " * 20_000, b"- " * 20_000),
    *(b"a: " + b"9" * 100_000, b"a: 0x" + b"f" * 100_000, b"a: " + b":".join([b"59"] * 20_000), b"a: 2026-99-99\n"),
    *(
        b"a: !!python/object/apply:os.system [touch it]\n",
        b"a: !!binary x\n",
        b"\xff\xfe",
        b"train: {steps: 1, steps: 2}\n",
    ),
    *(b"? [a]\n: b\n", b"a: 1\n---\nb: 2\n", b"%YAML 9.9\n---\na: 1\n", b""),
    b"\n".join(b"key%d: 1" % i for i in range(9000)),
)
"""YAML that is made to hurt."""


def changed_yaml(prepared, draw: random.Random) -> bytes:
    """A configuration as somebody else has written it."""
    import yaml

    texts, values = prepared
    kind = draw.random()
    if kind < 0.1:
        return draw.choice(BOMBS)
    if kind < 0.5:
        return of_bytes(draw.choice(texts), draw)
    with contextlib.suppress(RecursionError, ValueError, yaml.YAMLError):
        names = ("class_path", "config", "steps", "train", "dir", "<<", "__path__")
        return yaml.safe_dump(of_values(draw.choice(values), draw, names)).encode(errors="replace")
    return draw.choice(BOMBS)


def read_yaml(_: Path, prepared, draw: random.Random):
    from axonml_jax.config.config import plain_yaml

    plain_yaml(changed_yaml(prepared, draw).decode(errors="replace"))


def read_configuration(folder: Path, prepared, draw: random.Random):
    from axonml_jax.config.config import read_config

    (folder / "it.yaml").write_bytes(changed_yaml(prepared, draw))
    read_config("train", [str(folder / "it.yaml")])


def listener(_: Path):
    return None


def read_messages(_: Path, prepared, draw: random.Random):
    """A caller at a listening socket, and a launcher's peer, who say something else than they should."""
    from axonml_jax.launch.machines import Connection, is_answer, is_hello, is_news
    from axonml_jax.mesh.join import Callers, Talk

    token = draw.choice((b"", b"hush"))
    failure = {"rank": 1, "host": "a", "pid": 2, "returncode": -9, "seconds": 1.5, "lines": ["boom"]}
    start = {"start": 1, "port": 29501, "nodes": [0, 1], "sizes": [1, 2]}
    hello = {"node": 1, "size": 2, "nnodes": 2, "min-nodes": 1, "node-unit": 1, "max-restarts": 0}
    hello |= {"program": "0" * 64, "arguments": "1" * 64, "versions": "jax 0.12.0"}
    news = [
        {"alarm": 0},
        start,
        {"leave": "why"},
        {"ended": 0, "node": 1, "well": False, "failure": failure},
        {"gone": 1, "why": "cut"},
    ]
    news += [{"regroup": 0}, {"leaving": 0}, {"over": 1}, hello, {"sizes": [1, 2], "fault": ""}]
    message = draw.choice(news)
    changed = of_values(message, draw) if draw.random() < 0.5 else message
    if isinstance(changed, dict):
        for check in (is_hello, lambda said: is_news(said, 2), lambda said: is_answer(said, 2)):
            check(changed)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as there, server.accept()[0] as here:
            talk, other = (Talk(token, "launchers", calls=calls) for calls in (True, False))
            assert talk.greeted(other.greeting) and other.greeted(talk.greeting)
            try:
                line = talk.sealed(changed)
            except (ValueError, RecursionError):
                line = talk.sealed({})
            said = line if draw.random() < 0.3 else of_bytes(line, draw)[:60_000]
            there.sendall(said)
            there.shutdown(socket.SHUT_WR)
            heard = Connection(here, other).messages()
            assert not heard or said.startswith(line), "a forged line was heard"
        callers = Callers(server, token, "launchers", is_hello)
        with contextlib.closing(callers), socket.create_connection(server.getsockname()) as caller:
            callers.pump()
            caller.sendall(of_bytes(talk.greeting + line, draw)[:60_000])
            caller.shutdown(socket.SHUT_WR)
            assert not [each for _ in range(3) for each in callers.pump()], "a stranger was heard"


def safetensors_file(folder: Path):
    """A file with arrays of several dtypes: its header, and what is behind that."""
    import axonml_jax as ax

    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones((), np.int64),
        "c": np.zeros((0, 4), np.uint8),
    }
    ax.save_safetensors(folder / "valid", arrays, metadata={"format": "pt"})
    data = (folder / "valid").read_bytes()
    size = int.from_bytes(data[:8], "little")
    return data, json.loads(data[8 : 8 + size]), data[8 + size :]


DTYPES = (
    "F32",
    "I32",
    "U32",
    "F64",
    "I64",
    "F16",
    "BF16",
    "BOOL",
    "I8",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "F4",
    "C64",
    "X",
)


def read_safetensors(folder: Path, prepared, draw: random.Random):
    import axonml_jax as ax
    from axonml_jax.model.safetensors import StoredArrays

    whole, header, rest = prepared
    kind = draw.random()
    if kind < 0.4:
        data = of_bytes(whole, draw)
    elif kind < 0.5:  # a length that lies
        data = draw.choice((0, 1, 7, len(whole), 2**27, 2**40, 2**63, 2**64 - 1)).to_bytes(8, "little") + whole[8:]
    else:
        changed = of_values(header, draw, ("a", "b", "../x", "__metadata__", "dtype"))
        if kind > 0.75:
            changed = copy.deepcopy(header)
            own = changed[draw.choice(("a", "b", "c"))]
            lie = draw.choice(("dtype", "shape", "data_offsets"))
            ends = [[0, 4], [4, 0], [0, 2**62], [2**64, 2**65], [-1, 3], [24, 32], own["data_offsets"][::-1]]
            sizes = [[], [2**62, 0], [0, 2**63], [3, 2], [6], [2**40, 2**40], [-1, -6], [1] * 100]
            own[lie] = draw.choice({"dtype": DTYPES, "shape": sizes, "data_offsets": ends}[lie])
        try:
            text = as_json(changed)
        except (ValueError, RecursionError):
            text = b"[" * 3000
        if 0.7 < kind < 0.75:  # a name that stands twice
            text = text.replace(b'"b"', b'"a"')
        data = len(text).to_bytes(8, "little") + text + rest[: draw.choice((len(rest), len(rest), 3))]
    (folder / "it.safetensors").write_bytes(data)
    found = ax.load_safetensors(folder / "it.safetensors")
    assert sum(array.nbytes for array in found.values()) <= len(data), "more arrays than bytes"
    stored = StoredArrays(folder / "it.safetensors")
    for name in stored:
        stored[name][tuple(slice(0, 1) for _ in stored[name].shape)]


def index_of_files(folder: Path):
    safetensors_file(folder)
    (folder / "in").mkdir()
    shutil.copy(folder / "valid", folder / "in" / "model-1.safetensors")
    shutil.copy(folder / "valid", folder / "outside.safetensors")
    return {"metadata": {"total_size": 32}, "weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}


def read_index(folder: Path, prepared, draw: random.Random):
    from axonml_jax.model.safetensors import safetensors_files

    text = of_bytes(as_json(prepared), draw)
    if draw.random() < 0.7:
        changed = of_values(prepared, draw, ("../outside.safetensors",))
        if draw.random() < 0.5 and isinstance(changed, dict) and isinstance(changed.get("weight_map"), dict):
            outside = (
                "../outside.safetensors",
                str(folder / "outside.safetensors"),
                "x/../../outside.safetensors",
                ".",
                "..",
                "",
            )
            changed["weight_map"]["a"] = draw.choice(outside)
        with contextlib.suppress(ValueError, RecursionError):
            text = as_json(changed)
    (folder / "in" / "model.safetensors.index.json").write_bytes(text)
    inside = (folder / "in").resolve()
    for file in safetensors_files(folder / "in"):
        assert file.resolve().is_relative_to(inside), f"{file} is outside"
