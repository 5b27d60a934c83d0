"""Text as bytes: what is read, how it is split, windows over it, and the bigram's entropy."""

import bz2
import gzip
import lzma
import os
import socket
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from axonml_jax.cli.tasks import read_text
from axonml_jax.config.sections import DataConfig
from axonml_jax.data.sources import ByteWindows, TextSplit, bigram_nats, load_text


@pytest.fixture
def folder(tmp_path):
    """Twenty files of 50 bytes, each of one letter, and what must not be read."""
    for i in range(20):
        file = tmp_path / f"part{i % 3}" / f"{i:02d}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes([65 + i]) * 50)
    (tmp_path / "image.png").write_bytes(b"\xff" * 50)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hidden.txt").write_bytes(b"\xff" * 50)
    return tmp_path


def test_the_standard_library_is_text_that_every_machine_has():
    train, valid = load_text(max_bytes=300_000)
    assert len(train) + len(valid) == 300_000
    assert 0.05 < len(valid) / 300_000 <= 0.1
    assert b"import " in train.tobytes()
    again = load_text(max_bytes=300_000)
    np.testing.assert_array_equal(train, again.train)
    np.testing.assert_array_equal(valid, again.valid)


def test_files_are_split_whole_into_training_and_validation(folder):
    train, valid = load_text(folder, valid_fraction=0.2)
    assert (len(train), len(valid)) == (800, 200)
    assert set(train) | set(valid) == set(range(65, 85))
    assert not set(train) & set(valid)


def test_the_split_depends_on_the_seed_alone(folder):
    def drawn(seed):
        return tuple(sorted(set(load_text(folder, valid_fraction=0.2, seed=seed).valid)))

    assert drawn(0) == drawn(0)
    assert len({drawn(seed) for seed in range(5)}) > 1


def test_max_bytes_and_suffixes_limit_what_is_read(folder):
    train, valid = load_text(folder, max_bytes=220)
    assert len(train) + len(valid) == 220
    assert set(load_text(folder, suffixes=(".png",)).train) == {255}


def test_a_small_fraction_still_validates_on_the_smallest_file(folder):
    (folder / "short.txt").write_bytes(b"~" * 3)
    assert load_text(folder, valid_fraction=1e-6).valid.tobytes() == b"~~~"


@pytest.mark.parametrize("fraction,cut", [(0.1, 90), (0.7, 30), (0.001, 99)])
def test_a_single_file_is_cut_near_its_end(tmp_path, fraction, cut):
    content = bytes(range(1, 101))
    (tmp_path / "only.txt").write_bytes(content)
    for path in (tmp_path, str(tmp_path / "only.txt")):
        train, valid = load_text(path, valid_fraction=fraction)
        assert (train.tobytes(), valid.tobytes()) == (content[:cut], content[cut:])


def test_a_folder_without_text_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match=r"no such folder: .*nowhere"):
        load_text(tmp_path / "nowhere")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"no text in .*: 1 files ending in \.txt, .*0 bytes"):
        load_text(tmp_path)
    with pytest.raises(ValueError, match=r"0 files ending in \.xyz"):
        load_text(suffixes=(".xyz",))


def not_regular(folder):
    """A name of every kind that is no regular file, and what is said of it."""
    (folder / "gone.txt").symlink_to("nowhere.txt")
    (folder / "round.txt").symlink_to("round.txt")
    os.mkfifo(folder / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(folder / "ear.txt"))
    (folder / "null.txt").symlink_to(os.devnull)
    (folder / "elsewhere").symlink_to(folder / "part0", target_is_directory=True)
    links = {"gone.txt": "a dangling link", "round.txt": "a dangling link", "elsewhere": "a link to a folder"}
    return {**links, "pipe.txt": "a FIFO", "ear.txt": "a socket", "null.txt": "a device"}


def test_only_regular_files_are_read_and_what_is_passed_over_is_said(folder, caplog):
    before, expected = load_text(folder).fingerprint, not_regular(folder)
    assert not caplog.messages
    assert load_text(folder).fingerprint == before
    [message] = caplog.messages
    first, *lines = message.splitlines()
    assert first == f"passed over in {str(folder)!r}, for only regular files of text are read:"
    assert dict(line.strip().split(": ") for line in lines) == expected


def test_records_beside_text_that_are_left_out_are_named(folder, caplog):
    """A README beside a table was what a run trained on, without a word of the table."""
    (folder / "rows.csv").write_text("a,b\n1,2\n")
    load_text(folder)
    assert "1 of records (.json, .csv, .tsv), such as rows.csv" in caplog.text
    (folder / "gone.txt").symlink_to("nowhere")
    caplog.clear()
    load_text(folder)
    assert "gone.txt: a dangling link" in caplog.text
    (folder / "gone.txt").unlink()
    caplog.clear()
    load_text(folder, suffixes=(".txt",))
    assert not caplog.messages


def test_a_link_to_a_file_is_read_as_the_file(folder):
    before = load_text(folder).fingerprint
    (folder / "part0" / "00.txt").rename(folder / "00.bytes")
    (folder / "part0" / "00.txt").symlink_to(folder / "00.bytes")
    assert load_text(folder).fingerprint == before


def test_what_may_not_be_read_is_passed_over(folder, caplog):
    for name in ("part0", "part1/01.txt"):
        (folder / name).chmod(0)
    if os.access(folder / "part0", os.R_OK):
        pytest.skip("this user may read everything")
    train, valid = load_text(folder)
    (folder / "part0").chmod(0o700)
    assert len(train) + len(valid) == 12 * 50
    assert "part0: a folder that cannot be listed: Permission denied" in caplog.text
    assert "part1/01.txt: cannot be read: Permission denied" in caplog.text


def test_many_names_that_are_passed_over_are_ten_lines_and_a_count(folder, caplog):
    for i in range(30):
        (folder / f"gone{i:02d}.txt").symlink_to("nowhere")
    load_text(folder)
    lines = caplog.messages[0].splitlines()
    assert len(lines) == 12 and lines[-1] == "  and 20 more"


def test_what_is_no_text_is_refused_or_passed_over(folder, caplog):
    before = load_text(folder).fingerprint
    kinds = {
        "a.txt": (gzip.compress(b"the cat"), "compressed by gzip"), "b.txt": (bz2.compress(b"the cat"), "compressed by bzip2"),
        "c.txt": (lzma.compress(b"the cat"), "compressed by xz"), "d.txt": (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
        "e.txt": ("the cat".encode("utf-16"), "UTF-16"), "f.txt": (b"the \0cat", "binary, with a zero at byte 4"),
    }  # fmt: skip
    for name, (content, said) in kinds.items():
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}' is no text: {said}.*decompress or convert"):
            load_text(folder / name)
    (folder / "g.txt.gz").write_bytes(gzip.compress(b"the cat"))
    assert load_text(folder).fingerprint == before
    lines = dict(line.strip().split(": ", 1) for line in caplog.messages[0].splitlines()[1:])
    assert lines.keys() == {*kinds, "g.txt.gz"} and all(kinds[name][1] in lines[name] for name in kinds)


def test_a_path_that_is_no_file_says_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"no text in .*pipe'(.|\n)*pipe: a FIFO"):
        load_text(tmp_path / "pipe")
    (tmp_path / "gone").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"no such folder: .*gone"):
        load_text(tmp_path / "gone")


def test_runs_written_into_the_folder_are_no_part_of_the_text(tmp_path):
    (tmp_path / "a.txt").write_text("the cat")
    (tmp_path / "b.txt").write_text("the dog")
    before = load_text(tmp_path, without=tmp_path / "runs").fingerprint
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "launch.txt").write_text("a run")
    assert load_text(tmp_path, without=tmp_path / "." / "runs").fingerprint == before
    assert load_text(tmp_path).fingerprint != before
    with pytest.raises(
        ValueError, match=r"is output\.dir, the folder that runs are written to.* Give output\.dir another"
    ):
        read_text(DataConfig(path=str(tmp_path / "runs"), length=1), f"{tmp_path}/./runs")


def test_windows_tell_their_text_from_another():
    first, other = np.zeros(9, np.uint8), np.ones(9, np.uint8)
    seen = {ByteWindows(data, length).fingerprint for data in (first, other) for length in (2, 4)}
    assert len(seen) == 4 and ByteWindows(first, 2).fingerprint in seen
    assert len({TextSplit(*parts).fingerprint for parts in ((first, other), (other, first), (first, first))}) == 3


@pytest.mark.parametrize("kwargs", [{"max_bytes": 1}, {"valid_fraction": 0.0}, {"valid_fraction": 1.0}])
def test_limits_out_of_range_are_named(folder, kwargs):
    (name, value) = next(iter(kwargs.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        load_text(folder, **kwargs)


def test_windows_do_not_overlap_and_targets_are_the_next_bytes():
    data = np.arange(100, dtype=np.uint8)
    windows = ByteWindows(data, 9)
    assert len(windows) == 11
    for i in range(11):
        window = windows[i]
        assert window["tokens"].dtype == window["targets"].dtype == np.int32
        np.testing.assert_array_equal(window["tokens"], np.arange(9) + 9 * i)
        np.testing.assert_array_equal(window["targets"], window["tokens"] + 1)
    np.testing.assert_array_equal(windows[-1]["tokens"], windows[10]["tokens"])
    with pytest.raises(IndexError):
        windows[11]
    assert len(ByteWindows(data, 33)) == 3 and len(ByteWindows(data, 99)) == 1


def test_several_windows_at_once_equal_one_by_one():
    windows = ByteWindows(np.random.default_rng(0).integers(0, 256, 100, np.uint8), 7)
    for index, window in zip([3, 0, 3], windows.__getitems__([3, 0, 3]), strict=True):
        assert window.keys() == windows[index].keys()
        assert all((window[name] == windows[index][name]).all() for name in window)


@pytest.mark.parametrize("data,length", [
    (np.zeros(8, np.uint8), 8), (np.zeros(8, np.int32), 2), (np.zeros((2, 4), np.uint8), 2), (np.zeros(8, np.uint8), 0),
])  # fmt: skip
def test_windows_that_cannot_be_are_refused(data, length):
    with pytest.raises(ValueError, match=f"length={length}"):
        ByteWindows(data, length)


def test_bigram_entropy_equals_the_loop_over_pairs():
    rng = np.random.default_rng(0)
    train, valid = rng.integers(0, 4, 200, np.uint8), rng.integers(0, 5, 50, np.uint8)
    counts = np.full((256, 256), 0.5)
    for a, b in pairwise(train):
        counts[a, b] += 1
    nats = [-np.log(counts[a, b] / counts[a].sum()) for a, b in pairwise(valid)]
    np.testing.assert_allclose(bigram_nats(train, valid, smoothing=0.5), np.mean(nats), rtol=1e-12)


def test_bigram_of_unseen_bytes_is_uniform_and_of_a_certain_text_nearly_zero():
    certain = np.tile(np.array([1, 2], np.uint8), 50_000)
    assert bigram_nats(certain, certain) < 0.02
    unseen = np.array([200, 201, 202], np.uint8)
    np.testing.assert_allclose(bigram_nats(certain, unseen), np.log(256), rtol=1e-12)


def test_bigram_refuses_what_has_no_value():
    for valid, smoothing in ((np.zeros(1, np.uint8), 1.0), (np.zeros(9, np.uint8), 0.0)):
        with pytest.raises(ValueError, match="bigram_nats"):
            bigram_nats(np.zeros(9, np.uint8), valid, smoothing)


def test_the_library_is_read_from_the_python_that_runs():
    some = load_text(max_bytes=None, valid_fraction=0.5)
    library = Path(os.__file__).read_bytes()[:2000]
    assert any(library in part.tobytes() for part in some)
