"""Files and other libraries' datasets as sources: what is read, by which worker, and what is refused."""

import gzip
import json
import pickle
import sys
import types

import jax
import numpy as np
import pytest

import axonml_jax as ax

ROWS = [{"text": f"line {i}", "label": i} for i in range(10)]


def write_jsonl(path, rows=ROWS):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def write_parquet(path, rows=ROWS):
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path, row_group_size=3)
    return path


@pytest.mark.parametrize("write,name", [(write_jsonl, "rows.jsonl"), (write_parquet, "rows.parquet")])
def test_rows_are_found_by_number_over_all_files(tmp_path, write, name):
    one = ax.open_dataset(write(tmp_path / name))
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / name, ROWS[:4])
    both = ax.open_dataset(tmp_path)
    assert [one[i] for i in range(10)] == ROWS and len(both) == 14
    assert [both[i] for i in range(14)] == ROWS + ROWS[:4] and both[-1] == ROWS[3]
    assert pickle.loads(pickle.dumps(both))[12] == ROWS[2]
    assert one.fingerprint != both.fingerprint == ax.open_dataset(tmp_path).fingerprint
    fields = ax.open_dataset(tmp_path, fields=["label"])
    assert fields[11] == {"label": 1}
    with pytest.raises(IndexError):
        both[14]
    mesh = ax.make_mesh(data=1, devices=jax.devices()[:1])
    batches = ax.create_dataloader(fields, 7, mesh, shuffle=False, num_epochs=1, num_workers=1)
    assert [batch["label"].tolist() for batch in batches] == [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 0, 1, 2, 3]]
    with pytest.raises(ValueError, match=r"no field 'labels': there are 'text', 'label'. Did you mean 'label'\?"):
        ax.open_dataset(tmp_path, fields=["labels"])[0]


def test_rows_of_parquet_are_made_a_group_at_a_time(tmp_path, monkeypatch):
    rows = ax.open_dataset(write_parquet(tmp_path / "rows.parquet"))
    groups, read = [], type(rows)._table
    monkeypatch.setattr(type(rows), "_table", lambda self, group: groups.append(group) or read(self, group))
    assert rows.__getitems__([8, 1, 0, 1, 7, -1]) == [ROWS[i] for i in (8, 1, 0, 1, 7, 9)]
    assert groups == [0, 2, 3]


def test_json_lines_may_be_blank_indented_and_unended_but_not_broken(tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b'\n{"a": 1}\r\n   \n  {"a": 2}\n\n{"a": "\xc3\xa9"}')
    found = ax.open_dataset(path)
    assert [found[i]["a"] for i in range(len(found))] == [1, 2, "é"]
    path.write_bytes(b'{"a": 1}\n{"a": \n[1]\n')
    broken = ax.open_dataset(path)
    with pytest.raises(ValueError, match=r"odd.jsonl, byte 9: no JSON"):
        broken[1]
    with pytest.raises(ValueError, match="holds a list, not named fields"):
        broken[2]
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"odd.jsonl, byte 0: no JSON \(.*recursion"):
        ax.open_dataset(path)[0]


def test_compressed_lines_are_not_taken_for_text(tmp_path, caplog):
    content = gzip.compress(write_jsonl(tmp_path / "rows.jsonl").read_bytes())
    for name in ("one.jsonl.gz", "two.jsonl"):
        (tmp_path / name).write_bytes(content)
        for format in (None, "jsonl", "text"):
            with pytest.raises(
                ValueError, match=f"{name}' is no text: compressed by gzip. Give text in UTF-8: decompress"
            ):
                ax.open_dataset(tmp_path / name, format)
    assert len(ax.open_dataset(tmp_path)) == 10 and len(caplog.messages) == 1
    assert "two.jsonl: compressed by gzip" in caplog.text and "one.jsonl.gz: compressed: decompress it" in caplog.text
    for name in ("rows.jsonl", "two.jsonl"):
        (tmp_path / name).rename(tmp_path / f"{name}.txt")  # without lines the folder is still one of lines
    with pytest.raises(ValueError, match=r"no files ending in .jsonl, .ndjson(.|\n)*one.jsonl.gz: compressed"):
        ax.open_dataset(tmp_path)


def test_every_text_file_is_a_sample(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    found = ax.open_dataset(tmp_path)
    assert [found[i] for i in range(len(found))] == [
        {"text": "first", "path": "a.md"},
        {"text": "second", "path": "b.txt"},
    ]
    assert ax.open_dataset(tmp_path / "c.bin", "text")[0] == {"text": "\ufffd", "path": "c.bin"}


def test_what_is_not_there_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no such file or folder"):
        ax.open_dataset(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"no files ending in \.txt"):
        ax.open_dataset(tmp_path)
    with pytest.raises(ValueError, match="format='csv': must be one of text, jsonl, parquet"):
        ax.open_dataset(tmp_path, "csv")
    (tmp_path / "rows.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match="pip install 'axonml-jax\\[parquet\\]'"):
        ax.open_dataset(tmp_path)


def test_datasets_of_hugging_face_are_sources():
    datasets = pytest.importorskip("datasets")
    mesh = ax.make_mesh(data=1, devices=jax.devices()[:1])
    whole = datasets.Dataset.from_list([{"x": i} for i in range(40)])
    loader = ax.create_dataloader(whole, 10, mesh, shuffle=False, num_epochs=1)
    assert [batch["x"].tolist() for batch in loader] == np.arange(40).reshape(4, 10).tolist()
    make = lambda: ax.create_dataloader(whole.to_iterable_dataset(num_shards=4), 10, mesh, shuffle_window=7)
    first, second = make(), make()
    every = [batch["x"].tolist() for _, batch in zip(range(9), make(), strict=False)]
    stream = iter(first)
    found = [next(stream)["x"].tolist() for _ in range(5)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + [batch["x"].tolist() for _, batch in zip(range(4), second, strict=False)] == every
    assert first.state_dict()["place"]["own"]


def test_iterable_datasets_of_torch_are_iterated_over():
    """A stand-in with what makes torch's odd: it inherits `__getitem__`, and may have a length."""
    dataset = type("Dataset", (), {"__getitem__": lambda self, index: 1 / 0})
    iterable = types.new_class("IterableDataset", (dataset,))
    own = type("Own", (iterable,), {"__iter__": lambda self: iter(range(8)), "__len__": lambda self: 8})
    mesh = ax.make_mesh(data=1, devices=jax.devices()[:1])
    assert [batch.tolist() for batch in ax.create_dataloader(own(), 4, mesh, shuffle=False, num_epochs=1)] == [
        [0, 1, 2, 3], [4, 5, 6, 7]
    ]  # fmt: skip


def test_a_parquet_file_that_is_not_what_it_says_is_refused_by_name(tmp_path):
    path = write_parquet(tmp_path / "rows.parquet")
    data = path.read_bytes()
    for wrong in (data[:-9], data[:40] + data[60:], b"PAR1" + b"\xff" * 9 + b"\0" * 300 + b"PAR1"):
        (tmp_path / "cut.parquet").write_bytes(wrong)
        with pytest.raises(ValueError, match=r"cut\.parquet"):
            rows = ax.open_dataset(tmp_path / "cut.parquet")
            rows[0], rows[len(rows) - 1]
    rows = ax.open_dataset(path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"rows\.parquet"):  # of the disk, and no matter of its content
        rows[0]
