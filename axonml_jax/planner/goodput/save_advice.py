"""`SaveAdvice`: how often a planned job should save, and what goodput it may then expect; `SaveAssumptions`: of what."""

from dataclasses import asdict, dataclass
from typing import Any

from axonml_jax.planner.goodput.expected_goodput import HOUR, WEEK, best_steps, expected_goodput
from axonml_jax.planner.goodput.failure_rates import FAILURE_RATES
from axonml_jax.planner.goodput.recovery_ways import Recovery


@dataclass(frozen=True, kw_only=True)
class SaveAssumptions:
    """What is assumed of failures, and of a job that is started again from its checkpoint.

    Attributes:
      failures_per_device_hour: interruptions of the job for each of its devices and each hour; by default those of Llama 3's
        training, the largest of those published.
      mtbf: hours between two failures of the whole job, in the place of the former; None: as that says.
      checkpoint_bandwidth: bytes per second that each device writes and reads of a checkpoint while all do. The default is what
        Llama 3's storage sustained, 2 TB/s, over the 16,384 devices of the job (Grattafiori et al. 2024, section 3.3.1).
      restart_seconds: from a failure until a step of the job started again could begin, but for reading the state: noticing,
        another machine, processes, compiled programs. Assumed.
      save_seconds: for which an asynchronous save stops the training beside copying the state to the host: measured in
        docs/reliability.md for 256 MiB.
    """

    failures_per_device_hour: float = FAILURE_RATES["llama3"].per_device_hour
    mtbf: float | None = None
    checkpoint_bandwidth: float = 2e12 / 16384
    restart_seconds: float = 300.0
    save_seconds: float = 0.04

    def __post_init__(self):
        given = {name: value for name, value in vars(self).items() if value is not None}
        wrong = {name: value for name, value in given.items() if not 0 <= value < float("inf")}
        wrong |= {name: given[name] for name in ("mtbf", "checkpoint_bandwidth") if given.get(name) == 0}
        if wrong:
            raise ValueError(
                f"SaveAssumptions: {wrong}: rates and seconds are 0 or more and finite, mtbf and checkpoint_bandwidth above 0"
            )

    def rate(self, num_devices: int) -> float:
        """Failures of a job per second.

        Args:
          num_devices: of the job.
        """
        hourly = self.failures_per_device_hour * num_devices if self.mtbf is None else 1 / self.mtbf
        return hourly / HOUR


@dataclass(frozen=True, kw_only=True)
class SaveAdvice:
    """How often to save.

    Attributes:
      steps: of training between two checkpoints.
      seconds: that they take.
      goodput: training that is then kept over wall time, in the long run.
      mtbf: hours between two failures of the job; infinite: it never fails.
      size: bytes of a device's part of a checkpoint.
      blocked: seconds for which a save stops the training.
      commit: seconds from its beginning until it is whole on disk.
      pause: seconds from a failure until the training goes on.
      assumed: what all this follows from.
    """

    steps: int
    seconds: float
    goodput: float
    mtbf: float
    size: float
    blocked: float
    commit: float
    pause: float
    assumed: SaveAssumptions

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; without failures `mtbf` is None."""
        return asdict(self) | {"mtbf": self.mtbf if self.mtbf != float("inf") else None}

    def __str__(self) -> str:
        if self.mtbf == float("inf"):
            return "a job that never fails needs no checkpoint but its last"
        given = self.assumed
        of_devices = f" ({given.failures_per_device_hour:.2e} per device-hour)" if given.mtbf is None else ""
        lines = (
            f"save every {self.steps:,} steps ({_time(self.seconds)}): expected goodput {self.goodput:.2%}",
            f"  assumed: a failure every {_time(self.mtbf * HOUR)}{of_devices}, {given.checkpoint_bandwidth / 1e6:,.0f} MB/s "
            f"of checkpoint per device, {_time(given.restart_seconds)} to restart",
            f"  a save of {self.size / 2**30:.2f} GiB per device stops the training for {_time(self.blocked)} and is whole "
            f"after {_time(self.commit)}; a failure stops it for {_time(self.pause)}",
        )
        return "\n".join(lines)


def advise(
    size: float, step: float, num_devices: int, host_bandwidth: float, assumed: SaveAssumptions | None = None
) -> SaveAdvice:
    """How often a job should save that is started again from its checkpoint after each failure.

    A save stops the training while the state is copied to the host, is written behind its back, and the next one waits for it
    (`ax.CheckpointManager`). Of state that several devices hold each is taken to write all: an upper bound.

    Args:
      size: bytes of parameters and optimizer state that a device rests with.
      step: seconds of a step.
      num_devices: of the job.
      host_bandwidth: bytes per second between a device and its host's memory.
      assumed: of failures and restarts.
    """
    assumed = assumed or SaveAssumptions()
    way = Recovery(
        name="restart from disk", start=assumed.restart_seconds, size=size, read=assumed.checkpoint_bandwidth,
        write=assumed.checkpoint_bandwidth, blocked=assumed.save_seconds + size / host_bandwidth,
    )  # fmt: skip
    rate = assumed.rate(num_devices)
    steps = best_steps(way, rate=rate, step=step, most=max(1, round(WEEK / step)))
    return SaveAdvice(
        steps=steps, seconds=steps * step, goodput=expected_goodput(way, rate=rate, interval=steps * step),
        mtbf=1 / rate / HOUR if rate else float("inf"), size=size, blocked=way.blocked, commit=way.commit, pause=way.pause,
        assumed=assumed,
    )  # fmt: skip


def _time(seconds: float) -> str:
    for unit, length, limit in (("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 2 * HOUR), ("h", HOUR, 72 * HOUR)):
        if seconds < limit:
            return f"{seconds / length:,.3g} {unit}"
    return f"{seconds / (24 * HOUR):,.0f} days"
