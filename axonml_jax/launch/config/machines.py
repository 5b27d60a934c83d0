"""Machines that may come and go (`launch --nnodes MIN:MAX`): what a run needs for it, and its batch on fewer of them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from axonml_jax.launch.config.against_mesh import against_split
from axonml_jax.launch.config.run_config import ConfigError, RunConfig
from axonml_jax.launch.config.sections.own_config import OwnModel

MACHINES = "AXONML_JAX_MACHINES"
"""The variable by which the launcher says how many machines there may be."""

_ROWS = ("data", "fsdp", "expert", "depth")
"""The mesh axes over which rows of a batch are split."""


@dataclass(frozen=True)
class Machines:
    """How many machines a job may have.

    Attributes:
      smallest, largest: the numbers.
      unit: how many come and go together.
    """

    smallest: int
    largest: int
    unit: int = 1

    def text(self) -> str:
        """As the variable says it.

        >>> Machines(2, 6, 2).text(), Machines.parse("2:6:2") == Machines(2, 6, 2)
        ('2:6:2', True)
        """
        return f"{self.smallest}:{self.largest}:{self.unit}"

    @staticmethod
    def parse(text: str) -> "Machines":
        """The inverse of `text`."""
        return Machines(*map(int, text.split(":")))

    @property
    def counts(self) -> range:
        """Every number of machines that a world may have."""
        return range(self.smallest, self.largest + 1, self.unit)


def machines_of(environ: Mapping[str, str]) -> tuple[Machines, int] | None:
    """How many machines this process's job may have, and how many it has; None where they do not come and go."""
    text = environ.get(MACHINES)
    return None if text is None else (Machines.parse(text), int(environ["GROUP_WORLD_SIZE"]))


def for_world(config: RunConfig, machines: Machines, now: int, devices: int) -> RunConfig:
    """The run's configuration on the machines that are there: its batch is that of the largest number of them.

    With `train.on_shrink` keep_batch the global batch stays and is accumulated of more microbatches, so that none is larger
    than on all machines; with shrink_batch it has as many rows per device as there. It depends on their number alone.

    Args:
      config: as it is for the largest number of machines.
      machines: how many there may be.
      now: how many there are.
      devices: of all of them.

    Raises:
      ConfigError: with everything for which the run could not go on with another number of machines.
    """
    per_machine = devices // now
    if problems := list(_problems(config, machines, per_machine)):
        raise ConfigError("\n".join(f"--nnodes {machines.smallest}:{machines.largest}: {each}" for each in problems))
    size, accumulate = config.train.global_batch_size, config.plan.accumulate
    if config.train.on_shrink == "shrink_batch":
        return replace(config, train=replace(config.train, global_batch_size=size * now // machines.largest))
    shards, most = (_shards(config, per_machine * count) for count in (now, machines.largest))
    more = microbatches(size // shards, math.ceil(accumulate * most / shards))
    return replace(config, plan=replace(config.plan, accumulate=more))


def microbatches(rows: int, least: int) -> int:
    """Into how many equal parts the rows of a rank are cut, when they must be so many at least.

    >>> microbatches(6, 2), microbatches(8, 3), microbatches(5, 2)
    (2, 4, 5)
    """
    return next(parts for parts in range(least, rows + 1) if rows % parts == 0)


def _problems(config: RunConfig, machines: Machines, per_machine: int) -> Iterator[str]:
    degrees, kept = config.degrees, config.checkpoint
    free = next((axis for axis, degree in degrees.items() if degree == -1), None)
    if free is None:
        yield "the mesh has a fixed number of devices: give one degree as -1, such as mesh.data=-1"
        return
    if config.plan.diloco.every is not None or config.plan.sync_strategy == "no_sync":
        name = "plan.sync_strategy=no_sync" if config.plan.diloco.every is None else "plan.diloco.every"
        yield f"with {name} every replica has parameters of its own, and those of machines that go would be lost: leave it out"
    if kept.every is None and kept.memory_every is None:
        yield "nothing is kept that the others could go on from: set checkpoint.memory_every, or checkpoint.every"
    elif kept.every is None and free != "data":
        yield (
            f"mesh.{free}=-1: with another number of machines every device has other parts of the state, and copies in memory "
            "do not fit: set checkpoint.every, to go on from the disk, or fix this degree and give mesh.data=-1"
        )
    together = math.prod(degree for axis, degree in degrees.items() if axis != free)
    if (machines.unit * per_machine) % together:
        yield (
            f"{together} devices belong together (all degrees but mesh.{free}=-1), and machines of {per_machine} come and go "
            f"by {machines.unit}: give --node-unit {math.lcm(together, per_machine) // per_machine}, and multiples of it"
        )
        return
    yield from _of_sizes(config, machines, free, per_machine, together)
    if free not in _ROWS and config.train.on_shrink == "shrink_batch":
        yield f"train.on_shrink=shrink_batch: with mesh.{free}=-1 devices have as many rows on fewer machines: leave it out"
        return
    yield from _of_batch(config, machines, per_machine)


def _of_sizes(config: RunConfig, machines: Machines, free: str, per_machine: int, together: int) -> Iterator[str]:
    """What of the model does not divide over the open axis, for every number of machines."""
    if isinstance(config.model, OwnModel):
        return  # of which nothing is known
    length = None if config.data.class_path else config.data.length
    for count in machines.counts:
        mesh = replace(config.mesh, **{free: per_machine * count // together})
        found = list(against_split(mesh, config.model, length))
        found += config.context.problems(mesh, length) if mesh.context > 1 else []
        yield from (f"on {count} machine(s) {each}" for each in found)


def _of_batch(config: RunConfig, machines: Machines, per_machine: int) -> Iterator[str]:
    """What the batch does not divide over."""
    size, keeps, cut = config.train.global_batch_size, config.train.on_shrink == "keep_batch", config.plan.accumulate
    shards = {count: _shards(config, per_machine * count) for count in machines.counts}
    must = shards if keeps else {machines.largest: shards[machines.largest]}
    if wrong := {count: parts for count, parts in must.items() if size % parts}:
        said = ", ".join(f"{parts} parts on {count} machines" for count, parts in wrong.items())
        other = f"a multiple of {math.lcm(*must.values())}" + ", or train.on_shrink=shrink_batch" * keeps
        yield f"train.global_batch_size={size} does not divide into {said}: give {other}"
    elif (rows := size // shards[machines.largest]) % cut:
        yield f"plan.accumulate={cut} does not divide the {rows} row(s) of a device on {machines.largest} machines"


def _shards(config: RunConfig, devices: int) -> int:
    """Into how many equal parts the rows of a batch are cut among so many devices, microbatches of a pipeline counted."""
    fixed = math.prod(degree for degree in config.degrees.values() if degree != -1)
    degrees = {axis: devices // fixed if degree == -1 else degree for axis, degree in config.degrees.items()}
    parts = math.prod(degree for axis, degree in degrees.items() if axis in _ROWS)
    return parts * (config.pipeline.num_microbatches if config.mesh.pipe > 1 else 1)
