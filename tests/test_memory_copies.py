"""Copies of the state in memory: whole or none, two generations, sent to other processes, and back bit for bit."""

import os
import re
import zlib
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_launcher_nodes import ends, launchers  # noqa: F401

import axonml_jax as ax
from axonml_jax.checkpoint import memory as memory_module
from axonml_jax.checkpoint.memory import (
    START,
    Agreed,
    Box,
    CopyIndex,
    DamagedCopy,
    Generation,
    Members,
    MemoryCopies,
    OwnCopies,
    Post,
    agree,
    assembled,
    holds,
    send,
    shard_name,
    steps_of,
    within_memory,
)
from axonml_jax.cli.run import RunFolder
from axonml_jax.config.config import ConfigError, read_config
from axonml_jax.launch.standby import HostMemory
from axonml_jax.mesh.environment import MEMORY, Handed, keepers
from axonml_jax.mesh.join import TOKEN

FIRST = ("w", ((0, 3),))


@pytest.fixture
def memory():
    """Generations of this process's own."""
    made = []

    def memory(count=2):
        made.extend(os.memfd_create("test") for _ in range(count))
        return [Generation(handle) for handle in made[-count:]]

    yield memory
    for handle in made:
        os.close(handle)


def write(generation, step, values=(1.0, 2.0, 3.0)):
    values = np.array(values, np.float32)
    generation.clear()
    generation.put(START, values)
    index = CopyIndex(step, "shard", {"step": step}, {FIRST: ("float32", (3,), START, zlib.crc32(values.tobytes()))})
    generation.commit(index.text(), START + 64)


def test_what_is_read_back_lies_in_the_memory_that_it_lay_in():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    for kind in ("device", "pinned_host"):
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"), memory_kind=kind)
        like = jax.device_put(np.arange(4.0), place)
        found = assembled({"w": like}, lambda part: np.full([high - low for low, high in part[1]], 7.0))["w"]
        assert found.sharding == place
        assert {shard.data.sharding.memory_kind for shard in found.addressable_shards} == {kind}
        np.testing.assert_array_equal(found, np.full(4, 7.0))


def test_a_copy_is_whole_or_none(memory):
    [generation] = memory(1)
    assert generation.checked() is None
    write(generation, 4)
    index, _ = generation.checked()
    assert (index.step, index.shard, index.about, list(index.parts)) == (4, "shard", {"step": 4}, [FIRST])
    np.testing.assert_array_equal(generation.part(index, FIRST), [1, 2, 3])
    generation.clear()  # what a process does first that writes the next one
    assert generation.checked() is None


@pytest.mark.parametrize("place", [3, START + 1, START + 70])
def test_a_flipped_byte_anywhere_is_found(memory, place):
    [generation] = memory(1)
    write(generation, 4)
    old = bytearray(1)
    generation.read_into(memoryview(old), place)
    generation.put(place, bytes([old[0] ^ 1]))
    with pytest.raises(DamagedCopy):
        generation.checked()


def test_random_indices_are_refused_by_name(memory):
    [generation] = memory(1)
    write(generation, 4)
    text, numbers = generation.index()[0].text(), np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(text)
        for place in numbers.integers(0, len(text), 3):
            changed[place] = numbers.integers(32, 127)
        generation.commit(bytes(changed), START + 64)
        try:
            generation.checked()
        except DamagedCopy:
            continue


def test_processes_keep_copies_on_another_machine_only_of_what_is_not_there():
    assert keepers([2, 3, 2]) == (2, 3, 5, 6, 5, 0, 1)
    sharded = Members((0, 0, 1, 1), ("a", "b", "c", "d"), (10, 10, 10, 10))
    assert sharded.keepers == (2, 3, 0, 1) and sharded.kept_by(0) == (2,) and sharded.bytes_on(1) == 80
    hybrid = Members((0, 0, 1, 1), ("a", "b", "a", "b"), (10, 10, 10, 10))
    assert hybrid.keepers == (None,) * 4 and hybrid.bytes_on(1) == 40
    assert Members((0, 0), ("a", "b"), (10, 10)).keepers == (None, None)


def test_who_keeps_whose_copies_is_computed_once_for_all_machines(monkeypatch):
    """It compares every process with every other one: per machine and process it took minutes for 1,000 processes."""
    asked, real = [], memory_module.to_send
    monkeypatch.setattr(memory_module, "to_send", lambda *given: asked.append(given) or real(*given))
    members = Members(tuple(range(8)), tuple("abcdefgh"), (10,) * 8)
    assert [members.bytes_on(node) for node in range(8)] == [40] * 8 and len(asked) == 1


def test_all_go_on_from_the_newest_step_that_everybody_can_have():
    shards = ["a", "b", "c"]
    assert agree(shards, [{"a": [4, 6]}, {"b": [4, 6]}, {"c": [4]}]) == Agreed(4, (0, 1, 2))
    assert agree(shards, [{"a": [4, 6], "c": [6]}, {"b": [4, 6]}, {"c": [4]}]) == Agreed(6, (0, 1, 0))
    assert agree(shards, [{"a": [4]}, {"b": [6]}, {"c": [4, 6]}]) is None
    assert agree(shards, [{"a": [4]}, {}, {"c": [4]}]) is None
    assert agree(shards, [{}, {}, {}]) is None


def arrays(value, mesh):
    at = jax.NamedSharding(mesh, jax.P("fsdp"))
    return {"w": jax.device_put(jnp.full(8, value, jnp.bfloat16), at), "key": jax.random.key(int(value))}


def test_the_newest_complete_copy_stays_while_another_is_written(memory):
    copies, mesh = OwnCopies(memory()), ax.make_mesh(fsdp=8)
    for step, complete in ((1, None), (2, None), (3, 2), (4, 2), (5, 4)):
        copies.begin(step, arrays(step, mesh), "shard", {}, complete)()
    assert sorted(steps_of(copies.look())["shard"]) == [4, 5]
    copies.begin(6, arrays(6, mesh), "shard", {}, 4)  # and the process dies: its checksums are never written
    [left] = OwnCopies(copies.generations).look()
    assert (left.shard, left.step, left.complete) == ("shard", 4, 2)
    found, _ = copies.read("shard", 4, arrays(9, mesh))
    wanted = arrays(4, mesh)
    assert found["w"].sharding == wanted["w"].sharding and found["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["w"], wanted["w"])
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(wanted["key"]).tolist()


def test_another_run_of_the_same_launch_does_not_take_the_copies():
    with HostMemory([1], 0) as handed:
        place = {"NODE_RANK": "0", MEMORY: handed.of(0).text()}
        for name in ("runs/first", "runs/second"):
            run, loader = trainer_and_data("fsdp", 0)
            with closing(MemoryCopies(1, place)) as copies:
                assert copies.look(run, of=name) is None and copies.lost is None
                trained(run, loader, range(1, 3), copies)


def test_processes_with_the_same_parts_have_the_same_name():
    mesh = ax.make_mesh(fsdp=8)
    names = [shard_name(arrays(value, mesh)) for value in (1, 2)]
    assert names[0] == names[1] != shard_name({"w": arrays(1, mesh)["w"]})


def held_step(generation):
    return None if (found := holds(generation)) is None else found[1]


def test_a_copy_travels_whole_or_leaves_what_was_there(memory):
    (mine, theirs), generations = memory(), memory()
    write(mine, 5)
    write(generations[0], 3)
    with closing(Post("127.0.0.1", b"secret")) as post:
        post.boxes["keep", 1] = Box(generations, 64, "shard")
        send(post.address, b"secret", "keep", 1, mine, 3)
        assert [held_step(each) for each in generations] == [3, 5]
        write(mine, 7, (4.0, 5.0, 6.0))
        with pytest.raises(ConnectionError, match="does not take it"):
            send(post.address, b"secret", "keep", 2, mine, 5)  # nobody has asked process 2
        with pytest.raises(OSError):
            send(post.address, b"another", "keep", 1, mine, 5)
        assert [held_step(each) for each in generations] == [3, 5]
        mine.put(START, bytes(4))  # damaged at its sender
        with pytest.raises(OSError):
            send(post.address, b"secret", "keep", 1, mine, 5)
        assert [held_step(each) for each in generations] == [None, 5]
        write(theirs, 8)
        send(post.address, b"secret", "keep", 1, theirs, 5)
    assert [held_step(each) for each in generations] == [8, 5]
    np.testing.assert_array_equal(generations[0].part(generations[0].checked()[0], FIRST), [1, 2, 3])


def test_what_a_launcher_hands_out_has_no_name_and_goes_with_it():
    with HostMemory([1, 2], 1) as memory:
        first, second = memory.of(0), memory.of(1)
        assert (list(first.others), list(second.others)) == ([0], [])
        assert Handed.parse(first.text()) == first
        assert all(os.fstat(handle).st_nlink == 0 for handle in first.all)
    with pytest.raises(OSError):
        os.fstat(first.own[0])


def trainer_and_data(axis, seed):
    mesh = ax.make_mesh(**{axis: 8})
    model = ax.parallelize(nnx.Linear(3, 5, rngs=nnx.Rngs(seed)), mesh)
    rows = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    loss = lambda model, batch: jnp.mean(model(batch) ** 2)
    return model.trainer(optax.adam(0.1), loss), ax.create_dataloader(rows, 8, mesh, seed=1)


def trained(run, loader, steps, copies=None):
    losses = []
    for step, batch in zip(steps, loader, strict=False):
        losses.append(float(run.step(batch)["loss"]))
        if copies is not None:
            copies.keep(step, run, data=loader)
            copies._wait()
    return losses


@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_a_run_goes_on_from_memory_bit_for_bit(axis):
    with HostMemory([1], 0) as memory:
        place = {"NODE_RANK": "0", MEMORY: memory.of(0).text()}
        run, loader = trainer_and_data(axis, 0)
        with closing(MemoryCopies(2, place)) as copies:
            assert copies.look(run) is None
            trained(run, loader, range(1, 8), copies)  # of 2, 4 and 6; then the process ends
            assert copies.cost.startswith("3 copies") and "2 x 0.0 MB of its own" in copies.bound
        wanted = trained(run, loader, range(8, 12))
        again, position = trainer_and_data(axis, 1)
        with closing(MemoryCopies(2, place)) as copies:
            assert copies.look(again) == 6
            manifest = copies.restore(again, data=position)
            assert manifest.step == again.state.step == 6
            assert trained(again, position, range(7, 12), copies)[1:] == wanted
        for name, array in run.resting_arrays().items():
            here = again.resting_arrays()[name]
            if name != "key":
                np.testing.assert_array_equal(here, array, err_msg=name)


def test_without_a_launcher_that_restarts_or_with_too_little_memory_copies_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"axonml-jax launch --max-restarts"):
        MemoryCopies(2, {})
    with open(os.devnull) as file, pytest.raises(ValueError, match=r"--max-restarts"):  # a child has the variable only
        MemoryCopies(2, {MEMORY: f"own={file.fileno()},{file.fileno()}"})
    quickstart = str(Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml")
    with pytest.raises(ConfigError, match=r"memory_every=2: .* axonml-jax launch --max-restarts"):
        RunFolder(read_config("train", [quickstart, "--checkpoint.memory_every=2"]), {})
    with pytest.raises(ConfigError, match=r"memory_every=2, spikes.factor=3.0: .* leave one of the two out"):
        RunFolder(read_config("train", [quickstart, "--checkpoint.memory_every=2", "--spikes.factor=3"]), {})
    run, _ = trainer_and_data("fsdp", 0)
    monkeypatch.setattr("axonml_jax.checkpoint.memory.machine_memory", lambda: 1000)
    with HostMemory([1], 0) as memory:
        copies = MemoryCopies(2, {"NODE_RANK": "0", MEMORY: memory.of(0).text()})
        with pytest.raises(ValueError, match=r"GB of 1e-06 GB on node 0, more than 50%.*memory_every=null"):
            copies.look(run)


def test_a_job_that_runs_goes_on_with_the_copies_that_fit():
    """On two machines each keeps copies for the other; the job began on four, where another one had the same parts."""
    members, memory = Members((0, 1), ("a", "b"), (10, 10)), {0: 100, 1: 80}
    assert within_memory(members, memory, again=False) == (members, "")
    memory[1] = 60  # of which 30 for copies: 40 of both, 20 of its own
    with pytest.raises(ValueError, match="4e-08 GB of 6e-08 GB on node 1, more than 50%: split the state over more"):
        within_memory(members, memory, again=False)
    alone, said = within_memory(members, memory, again=True)
    assert alone.keepers == (None, None) and alone.own and alone.bytes_on(1) == 20
    assert "6e-08 GB on node 1" in said and "no copies of each other's state, and the loss of one goes back" in said
    none, said = within_memory(members, {0: 100, 1: 30}, again=True)
    assert not none.own and none.bytes_on(0) == 0 and "none are made on these machines, and a restart goes back" in said


@pytest.mark.parametrize("size, kept, said", [(1.5, [4], "2 x 0.0 MB of its own"), (1.0, [], "none is made")])
def test_copies_that_are_too_much_after_a_restart_are_left_out(monkeypatch, caplog, size, kept, said):
    run, loader = trainer_and_data("data", 0)
    with HostMemory([1], 0) as memory:
        place = {"NODE_RANK": "0", MEMORY: memory.of(0).text()}
        copies = MemoryCopies(2, place)
        copies.look(run)
        taken = copies._known.bytes_on(0)
        monkeypatch.setattr("axonml_jax.checkpoint.memory.machine_memory", lambda: int(2 * taken * size / 1.5))
        with closing(MemoryCopies(2, {**place, "AXONML_JAX_RESTART_COUNT": "1"})) as copies:
            assert copies.look(run) is None and said in copies.bound
            trained(run, loader, range(1, 5), copies)
            assert [step for steps in steps_of(copies._own.look()).values() for step in steps][-1:] == kept
    assert (said in copies.bound) and ("none are made on these machines" in caplog.text) == (not kept)


RANK = """
import runpy, sys
sys.argv[1:] = [FOLDER, "lose-memory", "1", "9"]
runpy.run_path(WORKER, run_name="__main__")
"""


@pytest.mark.slow
def test_a_machine_that_lost_its_memory_gets_its_state_from_the_next(launchers, tmp_path, monkeypatch):  # noqa: F811
    worker = Path(__file__).parent / "workers" / "fault_rank.py"
    text = f"FOLDER, WORKER = {str(tmp_path)!r}, {str(worker)!r}\n{RANK}"
    wanted = {"FAULT_AXIS": "fsdp", "FAULT_MEMORY": "1", "FAULT_UNDISTURBED": "1", "FAULT_STEP_SECONDS": "0.1"}
    for name, value in {**wanted, TOKEN: "secret"}.items():
        monkeypatch.setenv(name, value)
    _, started = launchers(text, ["--max-restarts=1"], ["--max-restarts=1"], ready=False)
    (first, out, error), (second, *_) = ends(started, 120)
    assert (first, second) == (0, 0), error[-3000:]
    [step] = re.findall(r"state of step (\d+) sent: process 1 from process 0", out)
    assert int(step) in (7, 8) and f"start={step}" in out  # the newest checkpoint is of step 6
    assert re.findall(r"\bdigest=(\w+)", out) == re.findall(r"undisturbed=(\w+)", out)
    assert (tmp_path / "metrics.jsonl").read_text() == (tmp_path / "undisturbed.jsonl").read_text()
