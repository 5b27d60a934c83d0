"""Files and other libraries' datasets as sources: what is read, by which worker, and what is refused."""

import gzip
import json
import os
import pickle
import resource
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

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


def test_more_files_of_json_lines_than_may_be_open_are_read(tmp_path):
    for i in range(100):
        (tmp_path / f"{i:03d}.jsonl").write_text(f'{{"a": {i}}}\n')
    found, (soft, hard) = ax.open_dataset(tmp_path), resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/dev/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 80, hard))
        assert [found[i]["a"] for i in (*range(100), 0)] == [*range(100), 0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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


def test_what_lies_in_hidden_folders_says_nothing_of_a_folders_format(tmp_path):
    (tmp_path / ".cache" / "deep").mkdir(parents=True)
    (tmp_path / ".cache" / "deep" / "x.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "a.txt").write_text("text")
    assert [ax.open_dataset(tmp_path)[0]["text"]] == ["text"]
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / "y.jsonl").write_text('{"a": 2}\n')
    assert ax.open_dataset(tmp_path)[0] == {"a": 2}


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


class Tensor:
    """What a CPU tensor of PyTorch gives others: its dtype is none of NumPy's, bfloat16 has no array, gradients forbid one."""

    def __init__(self, values, *, follows=False):
        self._values, self._follows = values, follows
        self.shape, self.dtype = values.shape, type("dtype", (), {"__repr__": lambda self: f"torch.{values.dtype}"})()

    def detach(self):
        return Tensor(self._values)

    def __array__(self, dtype=None, copy=None):
        if self._follows:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        if self._values.dtype == jnp.bfloat16:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return np.asarray(self._values)

    def __getitem__(self, index):
        return Tensor(self._values[index])

    def contiguous(self):
        return Tensor(np.ascontiguousarray(self._values))

    def __dlpack__(self, **options):
        if not self._values.flags.c_contiguous:
            raise BufferError("Only DLPack tensors with trivial (compact) striding are supported")
        return jnp.asarray(self._values).__dlpack__()

    def __dlpack_device__(self):
        return (1, 0)


def of_torch(values, *, follows=False):
    torch = pytest.importorskip("torch")
    made = (
        torch.tensor(np.asarray(values, np.float32)).bfloat16()
        if values.dtype == jnp.bfloat16
        else torch.tensor(values)
    )
    return made.requires_grad_(follows)


@pytest.mark.parametrize("tensor", [Tensor, of_torch])
def test_tensors_of_pytorch_are_batches_samples_and_parameters(tensor):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 4)).astype(np.float32), np.arange(16) % 3
    module, mesh = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), ax.make_mesh(data=8)

    def loss_fn(model, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    def made(**options):
        return ax.DDP(nnx.clone(module), mesh, **options).trainer(optax.sgd(0.1), loss_fn)

    want, given = made(), made()
    for start in (0, 8):
        rows = slice(start, start + 8)
        np.testing.assert_array_equal(
            given.step(tensor(x[rows], follows=True), tensor(y[rows]))["loss"], want.step(x[rows], y[rows])["loss"]
        )
    batch, tensors = (x, y), (tensor(x), tensor(y))
    assert given.evaluate(*tensors)["loss"] == want.evaluate(*batch)["loss"]
    assert given.validate([tensors]) == want.validate([batch]) and not given.check(tensors).differs
    first = lambda model, batch: model(batch[0])
    np.testing.assert_array_equal(given.predict([tensors], first), want.predict([batch], first))
    np.testing.assert_array_equal(given.model(tensors[0]), want.model(x))
    assert given.model.value_and_grad(loss_fn)(*tensors)[0] == want.model.value_and_grad(loss_fn)(*batch)[0]
    low = x.astype(jnp.bfloat16)
    assert given.evaluate(tensor(low), y)["loss"] == want.evaluate(low, y)["loss"]
    wide = tensor(np.repeat(low, 2, axis=1))
    assert given.evaluate(wide[:, ::2], y)["loss"] == want.evaluate(low, y)["loss"]
    assert given.train_step.trace(given.state, jax.eval_shape(lambda: batch))
    pairs = [(tensor(a), int(b)) for a, b in zip(low, y, strict=True)]
    loader = ax.create_dataloader(pairs, 8, mesh, shuffle=False, num_epochs=1)
    assert [each[0].dtype for each in loader] == [jnp.bfloat16] * 2
    values = {name: tensor(np.array(value)) for name, value in want.model.state_dict().items()}
    given.model.load_state_dict(values)
    np.testing.assert_array_equal(given.model(x), want.model(x))
    given.model.set_parameters(
        {name: tensor(np.array(value + 1), follows=True) for name, value in want.model.state_dict().items()}
    )
    np.testing.assert_array_equal(given.model.state_dict()["bias"], want.model.state_dict()["bias"] + 1)


def test_a_tensor_that_has_no_array_is_refused_as_its_framework_says():
    def has_none(self, dtype=None, copy=None):
        raise TypeError("can't convert Sparse layout tensor to numpy. Use Tensor.to_dense() first.")

    def is_not(self):
        raise RuntimeError("unsupported memory format option Contiguous")

    sparse = type("Sparse", (Tensor,), {"__array__": has_none, "detach": lambda self: self, "contiguous": is_not})
    trainer = ax.DDP(nnx.Linear(4, 3, rngs=nnx.Rngs(0))).trainer(optax.sgd(0.1), lambda m, x: jnp.mean(m(x)))
    with pytest.raises(TypeError, match=r"Use Tensor\.to_dense\(\) first"):
        trainer.step(sparse(np.ones((8, 4), np.float32)))


class Shuffled:
    """What torchdata's `StatefulDataLoader` keeps of a shuffled epoch: a generator's state is a tensor in its position."""

    def __init__(self, tensor):
        self.state = {
            "batches": 2,
            "sampler": {"generator": tensor(np.arange(5, dtype=np.uint8)), "fits": [True, None]},
        }

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_a_position_with_tensors_comes_back_with_tensors(tmp_path, monkeypatch):
    made = type(
        "Tensor",
        (),
        {"__init__": lambda self, x: setattr(self, "x", x), "numpy": lambda self: self.x, "__module__": "torch"},
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(from_numpy=made))
    loader, again = Shuffled(made), Shuffled(lambda x: None)
    module = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    ax.save(tmp_path / "run", module, data=loader)
    ax.restore(tmp_path / "run", module, data=again)
    sampler = again.state["sampler"]
    assert again.state["batches"] == 2 and sampler["fits"] == [True, None] and isinstance(sampler["generator"], made)
    np.testing.assert_array_equal(sampler["generator"].numpy(), np.arange(5, dtype=np.uint8))


@pytest.mark.filterwarnings("ignore:.*is deprecated, please do not call")  # torch of itself
def test_a_stateful_loader_of_pytorch_goes_on_where_it_was(tmp_path):
    torch, stateful = pytest.importorskip("torch"), pytest.importorskip("torchdata.stateful_dataloader")
    module = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    make = lambda seed: (
        torch.manual_seed(seed) and stateful.StatefulDataLoader(list(range(24)), batch_size=4, shuffle=True)
    )
    loader = make(0)
    batches = iter(loader)
    next(batches)
    ax.save(tmp_path / "run", module, data=loader)
    ax.restore(tmp_path / "run", module, data=(again := make(1)))
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches]


def test_lists_of_numbers_are_arrays_in_samples_and_refused_as_a_batch():
    """Rows of Hugging Face and of JSON are lists: a loader gave a list of arrays, one for each position."""
    mesh = ax.make_mesh(data=8)
    rows = [{"ids": [i, i + 1, True], "grid": [[i, 0.5]], "pair": [np.ones(2), np.zeros(1)]} for i in range(8)]
    (batch,) = ax.create_dataloader(rows, 8, mesh, shuffle=False, num_epochs=1)
    assert batch["ids"].shape == (8, 3) and batch["grid"].shape == (8, 1, 2)
    assert [each.shape for each in batch["pair"]] == [(8, 2), (8, 1)]
    (pairs,) = ax.create_dataloader([{"uneven": [[i, 1], [2]]} for i in range(8)], 8, mesh, num_epochs=1)
    assert [each.shape for each in pairs["uneven"]] == [(8, 2), (8, 1)]
    with pytest.raises(ValueError, match=r"differ in structure: .* Give a collate"):
        next(iter(ax.create_dataloader([[[1] * (1 + i), [2]] for i in range(8)], 8, mesh)))
    np.testing.assert_array_equal(batch["ids"][:, 1], np.arange(1, 9))
    uneven = [{"ids": [0] * (1 + i % 2)} for i in range(8)]
    with pytest.raises(ValueError, match=r"differ in shape: ids: \[\(1,\), \(2,\)\]\. Pad them"):
        next(iter(ax.create_dataloader(uneven, 8, mesh)))
    trainer = ax.DDP(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), mesh).trainer(
        optax.sgd(0.1), lambda m, b: jnp.mean(m(b["ids"]))
    )
    with pytest.raises(
        ValueError, match=r"its leaves are 'ids/0/0', .* and 19 more\. Turn lists of numbers into arrays, np"
    ):
        trainer.step({"ids": [row["ids"] for row in rows]})


def test_a_loader_of_pytorch_is_no_dataset():
    loader = type(
        "DataLoader",
        (),
        {"dataset": [1], "collate_fn": None, "__iter__": lambda self: iter([]), "__len__": lambda self: 0},
    )
    with pytest.raises(TypeError, match=r"a DataLoader gives batches, .*: give its dataset, loader\.dataset; or leave"):
        ax.create_dataloader(loader(), 4, ax.make_mesh(data=8))


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
