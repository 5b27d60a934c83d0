"""A manifest that is not as it was written ends in one named error, whatever is wrong with it, or is read as it was."""

import copy
import json
import os
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonml_jax as ax
from axonml_jax.checkpoint.format import Manifest, _text_sum

LIKE = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.arange(4, dtype=jnp.int32)}


class Position:
    """A data position as a checkpoint keeps it."""

    def state_dict(self):
        return {"epoch": 1, "samples": 3}

    def load_state_dict(self, state):
        raise AssertionError("nobody asked")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("manifest") / "it"
    return ax.save(path, LIKE, data=Position(), metrics={"loss": 1.5}, about={"who": "me"})


def content_of(folder):
    content = json.loads((folder / "checkpoint.json").read_text())
    del content["crc32"]
    return content


def put(folder, content):
    """Write a manifest whose checksum is right, whatever it says."""
    text = json.dumps({"crc32": _text_sum(json.loads(json.dumps(content))), **content})
    (folder / "checkpoint.json").write_text(text)


@pytest.fixture
def broken(saved, tmp_path):
    """A copy of the checkpoint, some of whose manifest is changed."""

    def broken(change):
        folder = tmp_path / "broken"
        shutil.copytree(saved, folder)
        content = content_of(folder)
        change(content, folder)
        put(folder, content)
        return folder

    return broken


def set_to(*path_and_value):
    *path, last, value = path_and_value

    def change(content, folder):
        for name in path:
            content = content[name]
        content[last] = value

    return change


def renamed(new):
    def change(content, folder):
        name = next(iter(content["files"]))
        content["files"][new] = content["files"].pop(name)

    return change


def linked(content, folder):
    outside = folder.with_name("outside")
    name = next(iter(content["files"]))
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)


def linked_whole(content, folder):
    outside = folder.with_name("elsewhere")
    (folder / "arrays").rename(outside)
    (folder / "arrays").symlink_to(outside)
    content["files"] = {}


def piped(content, folder):
    os.mkfifo(folder / "pipe")
    content["files"]["pipe"] = [0, 0]


WRONG = {
    "a field that nobody knows": (set_to("colour", "red"), "unknown field 'colour'"),
    "a field too few": (lambda content, folder: content.pop("entries"), "missing field 'entries'"),
    "a step that is text": (set_to("step", "5"), "step='5' must be a whole number or null"),
    "a negative step": (set_to("step", -1), "step=-1 must"),
    "entries that are a list": (set_to("entries", []), "entries must be an object"),
    "an entry without its key": (set_to("entries", "a", {"shape": [2, 3], "dtype": "float32"}), "entries['a'] must be"),
    "a shape that is no list": (set_to("entries", "a", "shape", 6), "shape=6, which must be a list"),
    "an infinite shape": (set_to("entries", "a", "shape", [float("inf")]), "shape=[inf]"),
    "an unknown dtype": (set_to("entries", "a", "dtype", "float99"), "dtype='float99'"),
    "a dtype of objects": (set_to("entries", "a", "dtype", "object"), "dtype='object'"),
    "data that is a list": (set_to("data", [1]), "data must be an object or null"),
    "a metric that is text": (set_to("metrics", "loss", "low"), "metrics['loss'] must be a number"),
    "a metric without end": (set_to("metrics", "loss", 10**400), "metrics['loss'] must be a number"),
    "about that is text": (set_to("about", "me"), "about must be an object"),
    "a size that is text": (set_to("files", "arrays/d", "12"), "must be a size in bytes and a CRC-32"),
    "a path upwards": (renamed("../outside"), "files['../outside'] leads out of the checkpoint"),
    "a path upwards within": (renamed("arrays/../../outside"), "leads out of the checkpoint"),
    "an absolute path": (renamed("/etc/hostname"), "files['/etc/hostname'] leads out of the checkpoint"),
    "an empty path": (renamed(""), "files[''] is no path of a file"),
    "a path that no file can have": (renamed("a\0b"), "is no path of a file"),
    "a link to a file outside": (linked, "leads out of the checkpoint"),
    "a link to arrays outside": (linked_whole, "arrays: leads out of the checkpoint"),
    "a pipe, which never ends": (piped, "pipe: is no ordinary file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_manifest_is_named(broken, case):
    change, said = WRONG[case]
    with pytest.raises(ax.DamagedCheckpoint) as caught:
        ax.restore(broken(change), LIKE)
    assert "broken is damaged:\n" in str(caught.value) and said in str(caught.value)


def test_of_a_manifest_that_is_wrong_all_over_the_first_lines_are_shown(broken):
    entries = {f"layer{number}": {} for number in range(40)}
    with pytest.raises(ax.DamagedCheckpoint) as caught:
        ax.restore(broken(set_to("entries", entries)), LIKE)
    assert str(caught.value).count("\n") == 11 and "... and 30 more" in str(caught.value)


VALUES = (None, True, -1, 0, 3, 2**70, 1.5, float("nan"), float("inf"), "", "x", "../x", [], [0], [[]], {}, {"x": 1})


def places(value, path=()):
    """Every place in nested values."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places(each, (*path, key))


def mutated(content, draw):
    """A manifest with one thing in it removed, renamed, doubled or replaced."""
    content = copy.deepcopy(content)
    *path, last = draw.choice([place for place in places(content) if place])
    holder = content
    for name in path:
        holder = holder[name]
    kind = draw.choice(("remove", "rename", "replace", "replace"))
    if kind == "remove":
        del holder[last]
    elif kind == "rename" and isinstance(holder, dict):
        holder[draw.choice(("x", "", "..", "/", last + "x"))] = holder.pop(last)
    else:
        holder[last] = draw.choice(VALUES)
    return content


def test_a_few_hundred_wrong_manifests_end_in_a_named_error_or_are_read_as_they_were(saved, tmp_path):
    draw, folder = random.Random(0), tmp_path / "fuzzed"
    shutil.copytree(saved, folder)
    whole, text = content_of(saved), (saved / "checkpoint.json").read_bytes()
    ended = {"read": 0, "refused": 0}
    for number in range(400):
        if number % 4:
            put(folder, mutated(whole, draw))
        else:  # bytes that nobody has summed
            garbled = bytearray(text)
            garbled[draw.randrange(len(text))] = draw.randrange(256)
            (folder / "checkpoint.json").write_bytes(garbled[: draw.choice((len(text), draw.randrange(len(text))))])
        try:
            manifest = Manifest.read(folder)
            if number % 8 == 1:  # Orbax takes its time
                found = ax.restore(folder, LIKE)
                jax.tree.map(np.testing.assert_array_equal, found, LIKE)
            assert isinstance(manifest.step, int | None)
            ended["read"] += 1
        except ValueError as error:
            assert str(folder) in str(error)
            ended["refused"] += 1
    assert min(ended.values()) > 20, ended
