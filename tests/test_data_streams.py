"""Iterable sources: what they may be, epochs, shuffling, their own state, errors by name, Ctrl-C."""

import itertools
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import data_sources
import numpy as np
import pytest
from data_sources import Counted, FailsAt, Numbers, Stateful, StreamFailsAt
from meshes import mesh_of

import axonml_jax as ax


def loader_of(source, size=4, **options):
    return ax.create_dataloader(source, size, mesh_of(data=2), **{"shuffle": False, "num_epochs": 1} | options)


def ids(loader):
    return [batch.tolist() for batch in loader]


EXPECTED = [[0, 1, 2, 3], [4, 5, 6, 7]]
SOURCES = {
    "an iterable": lambda: Counted(9),
    "a generator": lambda: (i for i in range(9)),
    "an iterator": lambda: iter(range(9)),
    "a function": lambda: lambda: iter(range(9)),
    "a dataset": lambda: Numbers(9),
    "a set of one order": lambda: dict.fromkeys(range(9)).keys(),
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_kind_of_source_gives_the_same_batches(name):
    assert ids(loader_of(SOURCES[name]())) == EXPECTED
    assert ids(loader_of(SOURCES[name](), 2)) == np.arange(8).reshape(4, 2).tolist()


def test_the_end_of_an_epoch_is_cut_or_filled_up_and_epochs_follow_each_other():
    assert ids(loader_of(Counted(6), num_epochs=2)) == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert ids(loader_of(Counted(6), num_epochs=2, drop_last=False)) == [[0, 1, 2, 3], [4, 5, 0, 1]] * 2
    assert ids(loader_of(Counted(3), 8, drop_last=False)) == [[0, 1, 2, 0, 1, 2, 0, 1]]
    loader = loader_of(Counted(8))
    assert ids(loader) == ids(loader) == EXPECTED
    with pytest.raises(TypeError, match="does not know how many batches"):
        len(loader)


def test_windows_are_permuted_and_differ_by_epoch_and_seed():
    options = {"shuffle": True, "shuffle_window": 8, "num_epochs": 2}
    found = np.array(ids(loader_of(Counted(32), 8, **options))).reshape(2, 4, 8)
    for epoch in found:
        assert [sorted(window) for window in epoch.tolist()] == np.arange(32).reshape(4, 8).tolist()
    assert (found != np.arange(32).reshape(4, 8)).any(axis=(1, 2)).all() and (found[0] != found[1]).any()
    assert (np.array(ids(loader_of(Counted(32), 8, seed=1, **options))).reshape(2, 4, 8) != found).any()


def test_a_source_that_knows_its_place_is_not_read_before_it():
    first = loader_of(Stateful(40), prefetch=0)
    stream = iter(first)
    for _ in range(5):
        next(stream)
    source = Stateful(40)
    second = loader_of(source, prefetch=0)
    second.load_state_dict(first.state_dict())
    assert next(iter(second)).tolist() == [20, 21, 22, 23] and min(source.read) == 20


class Keeping(Stateful):
    """Begins at the place that was set whenever it is iterated over in the epoch of that place, as Hugging Face's do."""

    def __init__(self, size):
        super().__init__(size)
        self.place, self.epoch = {}, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in range(self.place["at"] if self.place.get("epoch") == self.epoch else 0, self.size):
            self.at = number + 1
            yield self.epoch * 100 + number

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.place = state


class Counting(Stateful):
    """Counts its epochs itself."""

    epoch = 0

    def __iter__(self):
        yield from (100 * self.epoch + number for number in super().__iter__())
        self.epoch += 1

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at, self.epoch = state["at"], state["epoch"]


def hugging_face(size):
    return pytest.importorskip("datasets").Dataset.from_dict({"x": range(size)}).to_iterable_dataset()


def numbers_of(loader, count=None):
    return [np.asarray(b["x"] if isinstance(b, dict) else b).tolist() for b in itertools.islice(loader, count)]


@pytest.mark.parametrize("make", [Keeping, Stateful, hugging_face])
def test_a_source_that_keeps_its_place_in_itself_is_set_back_to_its_start(make):
    """After a resume the last batch was filled up from the place that was set, and a second loader began there."""
    options = {"num_epochs": 2, "drop_last": False}
    whole = numbers_of(loader_of(make(10), **options))
    for cut in range(1, 6):
        first = loader_of(make(10), prefetch=0, **options)
        head = numbers_of(first, cut)
        second = loader_of(make(10), **options)
        second.load_state_dict(first.state_dict())
        assert head + numbers_of(second) == whole, cut
    loader = loader_of(source := make(12), prefetch=0)
    start, begins = loader.state_dict(), numbers_of(loader, 1)
    middle = loader.state_dict()
    assert numbers_of(loader, 1) == [[4, 5, 6, 7]]
    for position, expected in ((middle, [[4, 5, 6, 7]]), (start, begins)) * 2:
        loader.load_state_dict(position)
        assert numbers_of(loader, 1) == expected
    assert numbers_of(loader_of(source), 1) == begins
    assert numbers_of(loader_of(pickle.loads(pickle.dumps(source))), 1) == begins  # what a worker process gets


def test_a_source_that_counts_its_epochs_itself_goes_on_counting_after_a_resume():
    whole = numbers_of(loader_of(Counting(8), num_epochs=3))
    assert whole[2:] == [[100, 101, 102, 103], [104, 105, 106, 107], [200, 201, 202, 203], [204, 205, 206, 207]]
    first = loader_of(Counting(8), num_epochs=3, prefetch=0)
    head = numbers_of(first, 3)
    second = loader_of(Counting(8), num_epochs=3)
    second.load_state_dict(first.state_dict())
    assert head + numbers_of(second) == whole


class Epochs(Counted):
    """Says which epoch it was told of."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch * 100 + i for i in range(self.size)])


def test_an_epoch_is_told():
    assert ids(loader_of(Epochs(4), num_epochs=3)) == [[0, 1, 2, 3], [100, 101, 102, 103], [200, 201, 202, 203]]


def test_processes_that_read_other_samples_are_told_at_the_first_batch(monkeypatch, caplog):
    said = []
    compared = lambda words, devices, what: said.append(words["samples"]) if what == "samples" else []
    monkeypatch.setattr("axonml_jax.data.loader.unlike", compared)
    rows = [{"id": np.arange(3) + i, "name": str(i), "not": object()} for i in range(16)]
    parts = lambda part: lambda: iter(rows[part])
    for part in (slice(None), slice(None), slice(0, None, 2), slice(None, None, -1)):
        loader = loader_of(parts(part), collate=lambda samples: np.stack([sample["id"] for sample in samples]))
        for _ in range(2):  # a process may look at a batch again, alone
            next(iter(loader))
    assert len(said) == 4 and said[0] == said[1] and len(set(said)) == 3
    assert not caplog.records
    monkeypatch.setattr("axonml_jax.data.loader.unlike", lambda *said: [] if said[2] != "samples" else ["other"])
    list(loader_of(lambda: iter(range(8))))
    assert [record.message.partition(" from")[0] for record in caplog.records] == [
        "the processes read different samples"
    ]


def test_a_generator_that_is_asked_for_again_is_refused():
    loader = loader_of(i for i in range(8))
    assert ids(loader) == EXPECTED
    for again in (loader, loader_of((i for i in range(8)), num_epochs=2)):
        with pytest.raises(ValueError, match="a generator can be iterated over once"):
            ids(again)
    with pytest.raises(ValueError, match="3 samples fill no batch of 4"):
        ids(loader_of(Counted(3), num_epochs=None))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("source", [FailsAt(12), StreamFailsAt(12)])
def test_an_error_names_the_worker_and_the_sample(source, num_workers):
    who = "worker 1, " if num_workers else "^"
    with pytest.raises(RuntimeError, match=f"{who}reading sample 5 of epoch 0: OSError: the disk is gone"):
        ids(loader_of(source, num_workers=num_workers))


def test_a_sample_that_raises_stop_iteration_ends_no_epoch():
    class Stops(Numbers):
        def __getitem__(self, index):
            return super().__getitem__(index) if index < 5 else next(iter(()))

    class Texts(Stops):
        def __getitem__(self, index):
            return str(super().__getitem__(index))

    class Many(Stops):
        def __getitems__(self, indices):
            return [self[i] for i in indices]

    def stopping(samples):
        raise StopIteration

    for source, said in (
        (Stops(9), "reading sample 5 of epoch 0"),
        (Many(9), r"reading samples \[4, 5, 6, 7\] of epoch 0"),
    ):
        with pytest.raises(RuntimeError, match=f"{said}: StopIteration"):
            ids(loader_of(source))
    for source in (Numbers(9), Counted(9)):
        with pytest.raises(RuntimeError, match="collate of 4 samples raised StopIteration"):
            ids(loader_of(source, collate=stopping))
    mixed = ax.mix({"a": Stops(9), "b": Counted(9)}, {"a": 1, "b": 1})
    with pytest.raises(RuntimeError, match="of a mixture's source raised StopIteration"):
        [batch for batch, _ in zip(loader_of(mixed, num_epochs=None), range(9), strict=False)]
    with pytest.raises(RuntimeError, match="reading document 5: StopIteration"):
        ax.pack(Texts(9), 4)


@pytest.mark.slow
def test_workers_read_streams_in_order():
    source = data_sources.numbers
    assert ids(loader_of(source, num_workers=2)) == np.arange(48).reshape(12, 4).tolist()


SCRIPT = """
import sys
import axonml_jax as ax
import jax
from data_sources import Numbers

if __name__ == "__main__":
    loader = ax.create_dataloader(Numbers(10_000), 4, ax.make_mesh(data=1, devices=jax.devices()[:1]), num_workers=2)
    try:
        for batch in loader:
            print("batch", flush=True)
    except KeyboardInterrupt:
        import multiprocessing
        print("interrupted", len(multiprocessing.active_children()), flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_and_nothing_else_is_said(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "JAX_PLATFORMS": "cpu"}
    run = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert run.stdout.readline() == "batch\n"
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to every process
        out, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert out.endswith("interrupted 0\n") and run.returncode == 0, errors
    assert "Traceback" not in errors
    for _ in range(100):
        try:
            os.killpg(run.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("a worker is left")


ASKED = """
import multiprocessing, os, signal, sys, threading, time
import axonml_jax as ax
import jax
from data_sources import Numbers
from grain._src.python.dataset.transformations.process_prefetch import ProcessPrefetchDatasetIterator

def ask_while_they_start():
    while len(multiprocessing.active_children()) < 2: time.sleep(0.001)
    os.killpg(0, signal.SIGTERM)

if __name__ == "__main__":
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    loader = ax.create_dataloader(Numbers(10_000), 4, ax.make_mesh(data=1, devices=jax.devices()[:1]), num_workers=2)
    asking = threading.Thread(target=ask_while_they_start)
    asking.start()
    batches = iter(loader)
    next(batches)
    asking.join()
    os.killpg(0, signal.SIGTERM)
    for _ in range(40): next(batches)
    print(len(asked), len(multiprocessing.active_children()), flush=True)
    ProcessPrefetchDatasetIterator.close = lambda self: None  # leaves them to Python, which sends SIGTERM and waits
"""


@pytest.mark.slow
def test_sigterm_to_all_processes_leaves_the_workers_to_the_run_and_they_end_with_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ASKED)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, start_new_session=True, timeout=120
    )  # fmt: skip
    assert run.returncode == 0 and run.stdout == "2 2\n", run.stdout + run.stderr


class Frame:
    """What is asked of a DataFrame."""

    columns, iloc = ["x"], None

    def __len__(self):
        return 8

    def __getitem__(self, name):
        return np.arange(8)

    def keys(self):
        return self.columns


class Table(Frame):
    """What is asked of a DataFrame of Polars, and of a table of Arrow."""

    iloc = property()
    schema = None


class Series(list):
    """What is asked of a Series of pandas, whose labels are in another order than its places."""

    iloc = index = None

    def __getitem__(self, label):
        return super().__getitem__(7 - label)


class Split(list):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def grains(make):
    return lambda: make(pytest.importorskip("grain").MapDataset.range(16))


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (grains(lambda numbers: numbers.repeat()), ValueError, r"has no end: leave \.repeat\(\) of Grain out"),
        (
            grains(lambda numbers: numbers.filter(lambda x: x % 2 == 0)),
            ValueError,
            r"give dataset\.to_iter_dataset\(\)",
        ),
        (lambda: Numbers, TypeError, r"Numbers is a class: give an object of it, Numbers\(\.\.\.\)"),
        (Frame, TypeError, r"a Frame is read by columns.*: give dict\(frame\), a dict of arrays"),
        (Table, TypeError, r"a Table is read by columns.*frame\.to_dict\(\) of Polars"),
        (lambda: Series(range(8)), TypeError, r"a Series is read by its labels.*: give series\.to_numpy\(\)"),
        (lambda: __file__, TypeError, r"a str is no dataset: ax\.open_dataset\(path\)"),
        (lambda: Path(__file__), TypeError, r"Path is no dataset: ax\.open_dataset\(path\)"),
        (
            lambda: {"train": Split(range(8)), "test": Split(range(8))},
            TypeError,
            r"a dict holds datasets by name: give one",
        ),
        (
            lambda: (np.ones((8, 3)), np.arange(8)),
            TypeError,
            r'a tuple of 2 arrays of 8 rows .*give a dict of arrays, \{"x"',
        ),
    ],
)
def test_what_is_nearly_a_dataset_is_refused_with_the_remedy(make, kind, said):
    with pytest.raises(kind, match=said):
        ids(loader_of(make()))


def test_what_is_nearly_one_of_those_is_a_dataset():
    rows = np.arange(24).reshape(8, 3)
    for samples in (list(rows), tuple(rows), [rows[:, 0]] * 8):
        assert ids(loader_of(samples)) == np.array(samples).reshape(2, 4, -1).tolist()
    assert numbers_of(loader_of(dict(Frame()))) == EXPECTED
    halves = grains(lambda numbers: numbers.filter(lambda x: x % 2 == 0).to_iter_dataset())()
    assert ids(loader_of(halves)) == [[0, 2, 4, 6], [8, 10, 12, 14]]
    assert ids(loader_of(grains(lambda numbers: numbers.repeat(1))(), 16)) == [[*range(16)]]
