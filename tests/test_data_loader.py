"""Global batches: the same samples whatever the mesh, exact resumption, any kind of dataset, and refusals."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.data.loader import create_dataloader
from axonml_jax.data.sampler import LoadingError, epoch_order
from axonml_jax.data.sampler import named as naming

MESHES = {
    "one device": {"data": 1},
    "data": {"data": 4},
    "data x tensor": {"data": 2, "tensor": 4},
    "every batch axis": {"data": 2, "fsdp": 2, "depth": 2},
    "other order": {"tensor": 2, "fsdp": 2, "data": 2},
    "tensor only": {"tensor": 2},
}


def make_mesh(shape):
    count = int(np.prod(list(shape.values())))
    return Mesh(np.array(jax.devices()[:count]).reshape(*shape.values()), tuple(shape))


class Squares:
    """Counts what is read."""

    def __init__(self, size):
        self.size = size
        self.read = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        assert 0 <= index < self.size
        self.read.append(index)
        return {"id": index, "square": np.full((2, 3), index**2, np.float32)}


class Failing(Squares):
    def __getitem__(self, index):
        raise OSError(f"cannot read sample {index}")


def ids(loader):
    return [batch["id"].tolist() for batch in loader]


@pytest.mark.parametrize("name", MESHES)
def test_batches_are_slices_of_the_epochs_order_on_every_mesh(name):
    mesh = make_mesh(MESHES[name])
    loader = create_dataloader(Squares(20), 8, mesh, seed=5, num_epochs=2)
    orders = [epoch_order(20, shuffle=True, seed=5, epoch=epoch) for epoch in range(2)]
    assert len(loader) == 2
    batches = list(loader)
    assert [batch["id"].tolist() for batch in batches] == [o[i : i + 8].tolist() for o in orders for i in (0, 8)]
    squares = batches[1]["square"]
    np.testing.assert_array_equal(squares[:, 1, 2], orders[0][8:16] ** 2)
    batch_degree = int(np.prod([n for axis, n in MESHES[name].items() if axis != "tensor"]))
    assert squares.shape == (8, 2, 3)
    assert {shard.data.shape for shard in squares.addressable_shards} == {(8 // batch_degree, 2, 3)}
    assert len(squares.addressable_shards) == mesh.size


def test_shards_follow_the_canonical_axis_order():
    mesh = make_mesh({"fsdp": 2, "data": 2})
    (batch,) = create_dataloader(Squares(4), 4, mesh, shuffle=False, num_epochs=1)
    held = {shard.device: shard.data.tolist() for shard in batch["id"].addressable_shards}
    devices = mesh.devices  # [fsdp, data]: rows are split over data first, the slower axis
    assert [held[devices[f, d]] for d in range(2) for f in range(2)] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("size,batch,expected", [
    (10, 4, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]),
    (3, 8, [[0, 1, 2, 0, 1, 2, 0, 1]]),
    (8, 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
])  # fmt: skip
def test_without_drop_last_the_last_batch_wraps_round(size, batch, expected):
    loader = create_dataloader(
        Squares(size), batch, make_mesh({"data": 2}), shuffle=False, drop_last=False, num_epochs=1
    )
    assert len(loader) == len(expected)
    assert ids(loader) == expected


def test_an_endless_loader_goes_on_and_a_finished_one_goes_on_with_new_permutations():
    mesh = make_mesh({"data": 2})
    endless = iter(create_dataloader(Squares(4), 2, mesh, shuffle=False))
    assert [next(endless)["id"].tolist() for _ in range(5)] == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]
    endless.close()
    finite, endless = (create_dataloader(Squares(9), 2, mesh, num_epochs=n) for n in (2, None))
    expected = [batch["id"].tolist() for batch, _ in zip(endless, range(24), strict=False)]
    assert [*ids(finite), *ids(finite), *ids(finite)] == expected
    assert finite.state_dict() | {"epoch": 6, "samples": 0} == finite.state_dict()


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("consumed", range(8))
def test_a_saved_position_continues_exactly_on_another_mesh(consumed, drop_last):
    def loader(mesh, **kwargs):
        return create_dataloader(Squares(13), 4, make_mesh(mesh), num_epochs=2, drop_last=drop_last, **kwargs)

    first = loader({"data": 4})
    whole, following = ids(first), ids(first)
    first = loader({"data": 4})
    stream = iter(first)
    for _ in range(min(consumed, len(whole))):
        next(stream)
    state = first.state_dict()
    stream.close()
    resumed = loader({"fsdp": 2, "tensor": 2}, prefetch=0)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert ids(resumed) == (whole[consumed:] or following)  # the end of a walk is the start of the next


STEPS = [
    ("a", 0), ("a", 1), ("b", 2), ("a", 3), ("load", 1), ("a", 1), ("b", 2), ("a", 3), ("load", 5), ("b", 5), ("a", None),
    ("b", None), ("c", 6), ("load", 6), ("c", 6), ("c", 7),
]  # fmt: skip


@pytest.mark.parametrize("source", ["dataset", "stream"])
def test_a_loader_has_one_position_whoever_walks(source):
    """Batches in turn by three iterators and after loads, of walks of 6 batches; None: its walk has ended."""
    mesh, given = make_mesh({"data": 2}), [{"id": i} for i in range(13)]
    make = lambda n: create_dataloader(given if source == "dataset" else lambda: iter(given), 2, mesh, num_epochs=n)
    endless = make(None)
    states, expected = [endless.state_dict()], []
    for batch, _ in zip(endless, range(12), strict=False):
        states.append(endless.state_dict())
        expected.append(batch["id"].tolist())
    loader = make(1)
    walkers = {name: iter(loader) for name in "abc"}
    for who, number in STEPS:
        if who == "load":
            loader.load_state_dict(states[number])
            assert loader.state_dict() == states[number]
        elif number is None:
            assert next(walkers[who], None) is None
        else:
            assert next(walkers[who])["id"].tolist() == expected[number], (who, number)
            assert loader.state_dict() == states[number + 1]


def test_a_position_at_an_epochs_end_is_followed_by_a_whole_walk():
    mesh, samples = make_mesh({"data": 2}), [{"id": i} for i in range(9)]
    for source in (samples, lambda: iter(samples)):
        first, again = (create_dataloader(source, 4, mesh, num_epochs=1) for _ in range(2))
        stream = iter(first)
        walk = [next(stream)["id"].tolist() for _ in range(2)]
        again.load_state_dict(first.state_dict())  # a source's end is not known yet
        assert next(stream, None) is None
        second = ids(first)
        assert ids(again) == second and len(second) == 2 and second != walk
        assert again.state_dict() == first.state_dict()


def test_the_position_counts_batches_handed_out_not_those_loaded_ahead():
    dataset = Squares(40)
    loader = create_dataloader(dataset, 4, make_mesh({"data": 2}), shuffle=False, prefetch=3)
    stream = iter(loader)
    assert next(stream)["id"].tolist() == [0, 1, 2, 3]
    assert len(dataset.read) == 16
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (0, 4)
    stream.close()
    assert next(iter(loader))["id"].tolist() == [4, 5, 6, 7]


def test_a_position_is_kept_when_the_batch_size_changes():
    mesh = make_mesh({"data": 2})
    first = create_dataloader(Squares(20), 4, mesh, seed=1, num_epochs=2)
    stream = iter(first)
    drawn = [number for _ in range(3) for number in next(stream)["id"].tolist()]
    second = create_dataloader(Squares(20), 6, mesh, seed=1, num_epochs=2)
    second.load_state_dict(first.state_dict())
    rest = ids(second)
    orders = [epoch_order(20, shuffle=True, seed=1, epoch=epoch).tolist() for epoch in range(2)]
    assert drawn == orders[0][:12]
    assert rest == [orders[0][12:18], orders[1][:6], orders[1][6:12], orders[1][12:18]]
    larger = create_dataloader(Squares(20), 10, mesh, seed=1, num_epochs=2)
    larger.load_state_dict(first.state_dict())
    assert ids(larger) == [orders[1][:10], orders[1][10:]]


class Pair(NamedTuple):
    image: object
    label: object


class Tensor:
    """Stands for a tensor of another framework: only `__array__`."""

    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.value, dtype)


SAMPLES = {
    "tuple of tensor and number": lambda i: (Tensor([float(i), 0.0]), i),
    "named tuple": lambda i: Pair(np.full((2,), i, np.uint8), i % 2 == 0),
    "nested": lambda i: {"a": [np.float16(i)], "b": {"c": (i, None)}},
    "a number": lambda i: i,
    "bfloat16": lambda i: np.full(2, i, ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_may_be_any_structure_of_arrays_and_numbers(name):
    samples = [SAMPLES[name](i) for i in range(4)]
    (batch,) = create_dataloader(samples, 4, make_mesh({"data": 2}), shuffle=False, num_epochs=1)
    expected = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *samples)
    assert jax.tree.structure(batch) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(batch), jax.tree.leaves(expected), strict=True):
        assert isinstance(got, jax.Array) and got.dtype == jax.dtypes.canonicalize_dtype(want.dtype)
        np.testing.assert_array_equal(got, want)


def aligned(shape, dtype):
    """An array whose memory JAX takes for its own on CPU."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def test_a_collate_may_fill_its_arrays_again():
    buffer = aligned((64, 16), np.int64)

    def collate(samples):
        buffer[:] = np.array(samples)[:, None]
        return buffer

    loader = create_dataloader(
        list(range(256)), 64, make_mesh({"data": 4}), shuffle=False, num_epochs=1, collate=collate
    )
    assert [batch[:, 3].tolist() for batch in loader] == np.arange(256).reshape(4, 64).tolist()


def test_a_batch_that_was_placed_is_not_what_is_filled_into_its_array_again():
    mesh, batch = ax.make_mesh(data=8), aligned((64, 16), np.int32)
    placed = ax.Plan().batch_layout(dict(mesh.shape)).place({"x": batch}, mesh)
    batch[:] = 1
    assert np.asarray(placed["x"]).max() == 0


def test_collate_receives_the_samples_and_batched_reading_is_used():
    class Batched(Squares):
        def __getitems__(self, indices):
            return [(index, "text") for index in indices]

        def __getitem__(self, index):
            raise AssertionError("read one by one")

    loader = create_dataloader(
        Batched(4), 2, make_mesh({"data": 2}), shuffle=False, num_epochs=1,
        collate=lambda samples: np.array([number * len(text) for number, text in samples]),
    )  # fmt: skip
    assert [batch.tolist() for batch in loader] == [[0, 4], [8, 12]]


@pytest.mark.slow
def test_workers_give_the_same_batches_stop_when_closed_and_resume():
    def loader(num_workers):
        return create_dataloader(
            Squares(11), 4, make_mesh({"data": 2}), num_epochs=3, num_workers=num_workers, drop_last=False
        )

    expected = ids(loader(0))
    first, second = loader(1), loader(2)
    others = set(multiprocessing.active_children())
    stream = iter(first)
    assert next(stream)["id"].tolist() == expected[0]
    assert len(set(multiprocessing.active_children()) - others) == 1
    stream.close()
    assert set(multiprocessing.active_children()) <= others
    second.load_state_dict(first.state_dict())
    assert ids(second) == expected[1:]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_dataset_reaches_the_caller(num_workers):
    loader = create_dataloader(
        Failing(4), 2, make_mesh({"data": 2}), shuffle=False, num_workers=num_workers, num_epochs=1
    )
    with pytest.raises(Exception, match="cannot read sample 0"):
        next(iter(loader))


class Ending(Squares):
    """Ends the process that reads its third sample."""

    def __getitem__(self, index):
        if index == 2:
            os._exit(0)
        return super().__getitem__(index)


def test_a_worker_that_ends_well_before_its_time_is_named():
    batches = iter(create_dataloader(Ending(4), 2, make_mesh({"data": 1}), shuffle=False, num_workers=1))
    with pytest.raises(RuntimeError, match="a worker of the loader ended with status 0: the dataset or collate"):
        for _ in range(4):
            next(batches)


def test_an_exit_within_a_dataset_is_a_workers_error_and_else_the_programs_end():
    with pytest.raises(LoadingError, match="worker 1, reading it: SystemExit: 0"), naming(lambda: "it", 1):
        sys.exit(0)
    with pytest.raises(SystemExit), naming(lambda: "it", None):
        sys.exit(0)


AT_ITS_END = """
import os
import numpy as np
import axonml_jax as ax

loader = ax.create_dataloader({"x": np.arange(640.0)}, 4, ax.make_mesh(data=1), num_workers=1)
if "GUARDED" not in os.environ:
    try:
        next(iter(loader))
    except RuntimeError as error:
        print(error)
os.environ["GUARDED"] = ""  # its workers skip what is above
if __name__ == "__main__":
    batches = iter(loader)
    print(next(batches)["x"].size)
"""


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_in_one_line_and_workers_that_are_open_at_the_end_say_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(AT_ITS_END)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    environ |= {"PYTHONPATH": str(Path(__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=True)
    told, drawn = done.stdout.splitlines()
    assert 'put what it does under `if __name__ == "__main__":`' in told and drawn == "4"
    assert done.stderr == ""


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_sizes_before_anything_is_read():
    dataset = Squares(100)
    with pytest.raises(ValueError, match=r"global_batch_size=10 .* data=4, fsdp=2 \(8 in all\): 8 or 16"):
        create_dataloader(dataset, 10, make_mesh({"data": 4, "fsdp": 2}))
    with pytest.raises(ValueError, match=r"global_batch_size=3 .* data=4 \(4 in all\): 4 do"):
        create_dataloader(dataset, 3, make_mesh({"data": 4, "tensor": 2}))
    assert dataset.read == []


def test_every_bad_argument_is_named_at_once():
    with pytest.raises(ValueError) as caught:
        create_dataloader(Squares(0), 3, make_mesh({"data": 2}), seed=-1, num_workers=-1, prefetch=-2, num_epochs=0)
    for named in (
        "seed=-1",
        "global_batch_size=3",
        "dataset is empty",
        "num_workers=-1",
        "prefetch=-2",
        "num_epochs=0",
    ):
        assert named in str(caught.value)
    with pytest.raises(ValueError, match="3 samples fill no batch of 4"):
        create_dataloader(Squares(3), 4, make_mesh({"data": 2}))
    for name, value in {
        "num_epochs": 1.5,
        "global_batch_size": "2",
        "seed": None,
        "prefetch": 2.0,
        "num_workers": None,
    }.items():
        options = {"global_batch_size": 2, name: value}
        with pytest.raises(ValueError, match=f"{name}={value!r}: must be a whole number of at least"):
            create_dataloader(Squares(4), mesh=make_mesh({"data": 2}), **options)
    with pytest.raises(ValueError, match="global_batch_size=0"):
        create_dataloader(Squares(3), 0, make_mesh({"data": 2}))
    with pytest.raises(TypeError, match="or __iter__; int has neither"):
        create_dataloader(3, 1, make_mesh({"data": 1}))
    with pytest.raises(TypeError, match="num_workers=1: a generator cannot be sent to worker processes"):
        create_dataloader((i for i in range(3)), 1, make_mesh({"data": 1}), num_workers=1)


@pytest.mark.parametrize("samples,error,named", [
    ([{"x": np.zeros(2)}, {"x": np.zeros(3)}], ValueError, r"x: .*\(2,\), \(3,\)"),
    ([{"x": 1}, {"y": 1}], ValueError, "differ in structure"),
    ([{"x": 1, "name": "a"}, {"x": 2, "name": "b"}], TypeError, r"name: <U1"),
])  # fmt: skip
def test_samples_that_make_no_batch_are_refused_by_path(samples, error, named):
    with pytest.raises(error, match=named):
        next(iter(create_dataloader(samples, 2, make_mesh({"data": 1}))))


def test_a_collate_that_loses_rows_is_refused_by_path():
    loader = create_dataloader(Squares(4), 2, make_mesh({"data": 1}), collate=lambda samples: {"sum": np.zeros(3)})
    with pytest.raises(ValueError, match=r"2 samples.*sum: shape \(3,\)"):
        next(iter(loader))


def test_a_state_of_another_order_is_refused_with_every_difference():
    mesh = make_mesh({"data": 1})
    state = create_dataloader(Squares(10), 2, mesh, seed=1).state_dict()
    other = create_dataloader(Squares(12), 2, mesh, seed=2, shuffle=False)
    with pytest.raises(ValueError) as caught:
        other.load_state_dict(state)
    for named in ("num_samples: saved 10, here 12", "seed: saved 1, here 2", "shuffle: saved True, here False"):
        assert named in str(caught.value)
    same, known = create_dataloader(Squares(10), 2, mesh, seed=1), Squares(10)
    known.fingerprint = "new"
    with pytest.raises(ValueError, match=r"other data or another order\. fingerprint: saved old, here new"):
        create_dataloader(known, 2, mesh, seed=1).load_state_dict(state | {"fingerprint": "old"})
    for accepting, given in (
        (same, state | {"fingerprint": "old"}),
        (create_dataloader(known, 2, mesh, seed=1), state),
    ):
        accepting.load_state_dict(given)  # one of the two has none
    with pytest.raises(ValueError, match="lacks epoch"):
        same.load_state_dict({k: v for k, v in state.items() if k != "epoch"})
    with pytest.raises(ValueError, match="no position among 10 samples"):
        same.load_state_dict(state | {"samples": 11})
    for wrong in ("3", 2.5, None):
        with pytest.raises(ValueError, match="must be whole numbers"):
            same.load_state_dict(state | {"samples": wrong})
    same.load_state_dict(state | {"samples": np.int64(2)})


def test_samples_that_count_twice_are_told(caplog):
    mesh = mesh_of(data=2)
    for rows, drop_last in ((8, False), (10, True), (10, False)):
        ax.create_dataloader({"x": np.arange(rows)}, 4, mesh, drop_last=drop_last)
    assert len(caplog.messages) == 1 and "has 2 samples, and is filled up with 2 from" in caplog.messages[0]
    for drop_last in (True, False):
        ax.create_dataloader(lambda: iter([{"x": 1.0}] * 10), 4, mesh, drop_last=drop_last)
    assert len(caplog.messages) == 2 and "where an epoch does not divide by 4" in caplog.messages[1]
