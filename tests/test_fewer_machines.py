"""Configurations of jobs whose machines may come and go: batches, and what would not divide into fewer machines."""

from pathlib import Path

import pytest

from axonml_jax.config.config import (
    ConfigError,
    Machines,
    examples_until,
    for_world,
    keep_settings,
    machines_of,
    read_config,
)

QUICKSTART = str(Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml")
DISK, HEADS = ("--checkpoint.every=5",), ("--model.num_heads=2",)
KEPT = ("--checkpoint.memory_every=1", "--checkpoint.every=null")
BATCHES = {
    "all are there": (Machines(1, 3), 3, 3, [], 24, 1),
    "two of three": (Machines(1, 3), 2, 2, [], 24, 2),
    "one of three, of four devices": (Machines(1, 3), 1, 4, ["--train.global_batch_size=48"], 48, 3),
    "microbatches that divide": (Machines(2, 3), 2, 2, ["--plan.accumulate=2"], 24, 3),
    "fewer rows": (Machines(1, 3), 2, 2, ["--train.on_shrink=shrink_batch"], 16, 1),
    "a number that divides no row": (Machines(1, 4), 3, 3, ["--train.on_shrink=shrink_batch"], 18, 1),
    "replicas of two machines": (Machines(2, 6, 2), 4, 4, ["--mesh.fsdp=2"], 24, 2),
    "tensor parallel": (Machines(1, 2), 1, 4, ["--mesh.tensor=2", "--model.num_heads=2"], 24, 2),
    "heads over what is there": (Machines(1, 2), 1, 1, ["--mesh.data=1", "--mesh.tensor=-1", *DISK, *HEADS], 24, 1),
    "rows and positions": (
        Machines(1, 2),
        1,
        2,
        ["--mesh.data=2", "--mesh.context=-1", *DISK, "--plan.accumulate=3"],
        24,
        3,
    ),
    "from the disk": (Machines(1, 2), 1, 2, ["--mesh.data=1", "--mesh.fsdp=-1", "--checkpoint.every=5"], 24, 2),
}


@pytest.mark.parametrize("case", BATCHES)
def test_the_batch_is_that_of_all_machines_or_shrinks_with_them(case):
    machines, now, devices, flags, size, accumulate = BATCHES[case]
    made = read_config("train", [QUICKSTART, "--devices.simulated=null", *KEPT, "--train.global_batch_size=24", *flags])
    here = for_world(made, machines, now, devices)
    assert (here.train.global_batch_size, here.plan.accumulate) == (size, accumulate)
    assert for_world(made, machines, machines.largest, devices // now * machines.largest) == made


UNFIT = {
    "a fixed mesh": (["--mesh.data=3"], r"fixed number of devices: give one degree as -1"),
    "nothing kept": (["--checkpoint.memory_every=null"], r"nothing is kept .*memory_every, or checkpoint.every"),
    "other parts": (
        ["--mesh.data=1", "--mesh.fsdp=-1"],
        r"mesh.fsdp=-1: .* set checkpoint.every, .* give mesh.data=-1",
    ),
    "own parameters": (["--plan.sync_strategy=no_sync"], r"no_sync every replica has parameters of its own"),
    "local rounds": (["--plan.diloco.every=5"], r"plan.diloco.every every replica has parameters of its own"),
    "a replica of two machines": (["--mesh.fsdp=2"], r"2 devices belong together .* give --node-unit 2"),
    "a batch": (
        ["--train.global_batch_size=16"],
        r"=16 does not divide into 3 parts on 3 machines: give a multiple of 6, or",
    ),
    "a batch that would shrink": (
        ["--train.global_batch_size=16", "--train.on_shrink=shrink_batch"],
        r"=16 does not divide into 3 parts on 3 machines: give a multiple of 3$",
    ),
    "heads": (
        ["--mesh.data=1", "--mesh.tensor=-1", *DISK, *HEADS],
        r"1:3: on 3 machine.s. mesh.tensor=3: 2 query heads",
    ),
    "positions": (
        ["--mesh.data=1", "--mesh.context=-1", *DISK],
        r"on 3 machine.s. data.length=\d+ does not divide into the 6",
    ),
    "experts": (
        ["--mesh.data=1", "--mesh.expert=-1", "--experts.num_experts=4", *DISK],
        r"on 3 machine.s. mesh.expert=3: 4 experts",
    ),
    "rows that do not shrink": (
        ["--mesh.data=1", "--mesh.tensor=-1", "--train.on_shrink=shrink_batch", *DISK],
        r"shrink_batch: with mesh.tensor=-1 devices have as many rows on fewer machines",
    ),
    "microbatches": (["--plan.accumulate=3"], r"plan.accumulate=3 does not divide the 8 row"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_cannot_go_on_with_fewer_machines_is_refused_at_once(case):
    flags, words = UNFIT[case]
    made = read_config("train", [QUICKSTART, "--devices.simulated=null", *KEPT, "--train.global_batch_size=24", *flags])
    with pytest.raises(ConfigError, match=words):
        for_world(made, Machines(1, 3), 3, 3)


def test_a_process_knows_how_many_machines_there_may_be():
    assert machines_of({}) is None
    assert machines_of({"AXONML_JAX_MACHINES": "1:4:1", "GROUP_WORLD_SIZE": "3"}) == (Machines(1, 4), 3)


def test_examples_are_counted_by_the_batches_that_drew_them(tmp_path):
    sizes = {0: 24, 4: 16, 6: 24}
    for start, size in sizes.items():
        made = read_config("train", [QUICKSTART, f"--train.global_batch_size={size}"])
        keep_settings(tmp_path, made, start)
    assert [examples_until(tmp_path, step) for step in (0, 3, 4, 6, 8)] == [0, 72, 96, 128, 176]
    assert examples_until(tmp_path / "..", 3) is None
