"""Hardware figures, assumptions, and goodput: failures, recovery, how often to save."""

import math
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from axonml_jax.base import meant, priced_platform
from axonml_jax.cost.decoder import Many, either, least, most, varies
from axonml_jax.mesh.axes import AXES

# --------------------------------------------------------------------------------------------------
# What accelerators can do, as published: a table of figures with the source of each.
# --------------------------------------------------------------------------------------------------

GB, TERA = 1e9, 1e12
_BOOK = "How to Scale Your Model (Austin et al. 2025), chapter 2, table of TPU figures"
_CLOUD = "Google Cloud TPU documentation, system architecture pages"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of accelerator and the links between its devices.

    Attributes:
      name: what it is called.
      flops: peak dense bfloat16 FLOP/s of a device.
      memory: bytes of a device.
      memory_bandwidth: bytes per second.
      link: bytes per second that a device sends and receives over one ring inside an island, both directions of a torus link,
        one direction of NVLink.
      island: devices joined by `link`: a pod's chips, a node's GPUs.
      cross: bytes per second of one device to other islands, when all of its island's devices send.
      latency: seconds that a collective of two devices takes however little it sends, inside an island.
      cross_latency: the same across islands.
      host_link: bytes per second between a device and its host's memory, each way; 0: not known.
      platform: what JAX compiles for: "tpu", "cuda" (or "gpu"), "cpu"; None: no kernels of attention are counted on.
      torus: dims of the torus that the chips of a pod form; 0: none.
      block_seconds: fixed seconds of forward and backward of one block, whatever its number of tokens, where a model was
        measured.
      step_seconds: fixed seconds of every step of the model, where one was measured.
      layer_link: bytes per second that collectives of layers reach inside an island, with what their ranks compute redundantly
        meanwhile, where a model was measured; None: as `link`.
      reached: share of `flops` that products reach, or a measured model's whole blocks; None: not measured. See
        `Assumptions.on`.
      score_seconds: seconds of an attention kernel per pair of positions and head, forward and backward, beside its products;
        used where `reached` is of products alone.
      passes_reached: share of `memory_bandwidth` that norms, activations and the loss reach between products; 0: `reached` is
        not of products alone.
      alone: speed of a device while the others are idle over its speed while all compute: simulated devices share cores.
      sources: where each figure is from, by attribute; figures without a source are assumptions.
    """

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    link: float
    island: int
    cross: float
    latency: float = 1e-6
    cross_latency: float = 2e-5
    host_link: float = 0.0
    platform: str | None = None
    torus: int = 0
    block_seconds: float = 0.0
    step_seconds: float = 0.0
    layer_link: float | None = None
    reached: float | None = None
    score_seconds: float = 0.0
    passes_reached: float = 0.0
    alone: float = 1.0
    sources: dict[str, str] = field(default_factory=dict, compare=False, hash=False)

    def __post_init__(self):
        object.__setattr__(self, "platform", priced_platform(self.platform))

    def bandwidth(self, ranks: Many, inner: Many, *, layers: bool = False) -> Many:
        """Bytes per second of one device along a mesh axis.

        Inside an island it is the link's. Across islands a node's whole connection is shared by the groups that use it at
        once: link / min(devices per island, product of inner axes) (AxoNN, Singh et al. 2024, section 5).

        Args:
          ranks: of the axis.
          inner: product of the degrees of the axes inside it.
          layers: whether collectives of layers send it (then `layer_link`).
        """
        link = self.link if self.layer_link is None or not layers else self.layer_link
        across = least(link, self.cross * self.island / least(self.island, inner))
        return either(ranks * inner <= self.island, link, across)

    def in_slices(self, devices: int, slices: int) -> "Hardware":
        """The same chips as an island per slice: slices of equal size, which the data-center network connects.

        >>> HARDWARE["v5p"].in_slices(2048, 4).island
        512

        Args:
          devices: of the job.
          slices: that they come in.

        Raises:
          ValueError: if this hardware has no slices, if they do not divide the devices, or if a slice is larger than a pod.
        """
        if slices == 1:
            return self
        if not self.torus:
            raise ValueError(
                f"slices={slices}: {self.name} comes in nodes of {self.island}, which are priced; TPUs form slices"
            )
        if slices < 1 or devices % slices:
            raise ValueError(f"slices={slices}: {devices} devices do not form so many of one size")
        if devices // slices > self.island:
            raise ValueError(
                f"slices={slices}: a slice of {devices // slices} is more than the largest pod of {self.name}, {self.island}"
            )
        return replace(self, island=devices // slices)

    def idle(self, bubble: Many) -> Many:
        """The bubble that remains, over useful time, if waiting devices leave their cores to the others (`alone`).

        >>> import dataclasses
        >>> [dataclasses.replace(HARDWARE["v5p"], alone=alone).idle(1.5) for alone in (1.0, 2.0, 4.0)]
        [1.5, 0.25, 0.0]

        Args:
          bubble: idle time over useful time.
        """
        return most(0.0, (1 + bubble) / self.alone - 1)

    def delay(self, ranks: Many, inner: Many) -> Many:
        """Seconds that one collective along a mesh axis takes at least; grows with log2 of its ranks."""
        hops = most(1.0, np.log2(ranks) if varies(ranks) else math.log2(ranks))  # trees, or rings over a torus's dims
        return hops * either(ranks * inner <= self.island, self.latency, self.cross_latency)


def _tpu(
    name: str,
    flops: float,
    memory: float,
    memory_bandwidth: float,
    one_way: float,
    island: int,
    cross: float,
    torus: int,
    host_link: float,
):
    sources = {
        "flops": f"{_CLOUD}; {_BOOK}",
        "memory": _CLOUD,
        "memory_bandwidth": f"{_CLOUD}; {_BOOK}",
        "link": f"{_BOOK}: twice the one-way bandwidth of a link, as a ring over a torus dim uses both directions",
        "island": f"{_CLOUD}: chips of the largest pod",
        "cross": f"{_BOOK}: data-center network, per chip",
        "torus": _CLOUD,
        "host_link": f"{_BOOK} and the text behind it: about 15 GB/s of PCIe per chip, v4 16 and v6e 32 GB/s each way",
    }
    return Hardware(
        name=name, flops=flops, memory=memory, memory_bandwidth=memory_bandwidth, link=2 * one_way, island=island,
        cross=cross, host_link=host_link, platform="tpu", torus=torus, sources=sources,
    )  # fmt: skip


_REACHED = 0.86
"""Share of PCIe's figure that copies to and from pinned memory reach: 55 of 64 GB/s (NVIDIA's nvbandwidth, PCIe 5.0 x16)."""


_HOPPER = {"reached": 0.79, "score_seconds": 1.42e-12, "passes_reached": 0.42}
"""Measured on a step of GPT-2 small on an H200 (`benchmarks/peers/gpu_speed.py`): the share of peak that products reach, the
time of cuDNN's attention beyond its products, and the share of memory bandwidth in the rest of the step, update excluded."""


def _gpu(
    name: str, flops: float, memory: float, memory_bandwidth: float, nvlink: float, cross: float, pcie: float, sheet: str,
    **reached: Any,
):  # fmt: skip
    sources = {
        "flops": f"{sheet}: dense bfloat16 of the SXM module, without sparsity",
        "memory": sheet,
        "memory_bandwidth": sheet,
        "link": f"{sheet}: half of NVLink's figure, which counts both directions",
        "island": "NVIDIA DGX/HGX: eight GPUs behind NVSwitch",
        "cross": f"{sheet} (DGX): one network card per GPU",
        "host_link": f"{sheet}: half of PCIe's figure, which counts both directions, and of that the {_REACHED:.0%} that "
        "copies reach in NVIDIA's nvbandwidth",
        **dict.fromkeys(
            reached, "measured: one step of GPT-2 small on one H200; an H100 is the same chip with other memory"
        ),
    }
    return Hardware(
        name=name, flops=flops, memory=memory, memory_bandwidth=memory_bandwidth, link=nvlink / 2, island=8, cross=cross,
        latency=5e-6, host_link=_REACHED * pcie / 2, platform="cuda", sources=sources, **reached,
    )  # fmt: skip


HARDWARE: dict[str, Hardware] = {
    each.name: each
    for each in (
        _tpu("v4", 275 * TERA, 32 * 2**30, 1200 * GB, 45 * GB, 4096, 6.25 * GB, 3, 16 * GB),
        _tpu("v5e", 197 * TERA, 16 * 2**30, 819 * GB, 45 * GB, 256, 3.125 * GB, 2, 15 * GB),
        _tpu("v5p", 459 * TERA, 95 * GB, 2765 * GB, 90 * GB, 8960, 6.25 * GB, 3, 15 * GB),
        _tpu("v6e", 918 * TERA, 32 * 2**30, 1638 * GB, 90 * GB, 256, 12.5 * GB, 2, 32 * GB),
        _gpu("a100", 312 * TERA, 80 * GB, 2039 * GB, 600 * GB, 25 * GB, 64 * GB, "NVIDIA A100 80GB data sheet"),
        _gpu("h100", 989 * TERA, 80 * GB, 3350 * GB, 900 * GB, 50 * GB, 128 * GB, "NVIDIA H100 data sheet", **_HOPPER),
        _gpu("h200", 989 * TERA, 141 * GB, 4800 * GB, 900 * GB, 50 * GB, 128 * GB, "NVIDIA H200 data sheet", **_HOPPER),
    )
}
"""Name -> figures. Latencies are assumptions, of the order of what collectives of a few bytes take."""


def hardware(name: "str | Hardware") -> Hardware:
    """Look up hardware by its name.

    >>> hardware("v5p").flops
    459000000000000.0

    Raises:
      ValueError: for a name that is not in the table.
    """
    if isinstance(name, Hardware):
        return name
    if (known := meant("hardware", name, HARDWARE)) not in HARDWARE:
        raise ValueError(
            f"hardware {name!r} is not in the table: choose one of {', '.join(HARDWARE)}, "
            "or give ax.Hardware (on the command line: measure)"
        )
    return HARDWARE[known]


# Kinds as `jax.Device.device_kind` spells them. The PCIe and NVL cards of the H100 are slower than the SXM module.
_KINDS = {
    r"TPU v4": "v4",
    r"TPU v5 ?(lite|e)": "v5e",
    r"TPU v5p?": "v5p",
    r"TPU v6 ?(lite|e)": "v6e",
    r"NVIDIA A100.*": "a100",
    r"NVIDIA H100(?!.*(PCIe|NVL)).*": "h100",
    r"NVIDIA H200(?!.*NVL).*": "h200",
}


def hardware_of(device_kind: str) -> Hardware | None:
    """Look up hardware by the kind that JAX gives a device; None where it is not in the table (every CPU).

    >>> hardware_of("NVIDIA H100 80GB HBM3").name, hardware_of("cpu")
    ('h100', None)
    """
    name = next((name for kind, name in _KINDS.items() if re.fullmatch(kind, device_kind, re.IGNORECASE)), None)
    return None if name is None else HARDWARE[name]


# --------------------------------------------------------------------------------------------------
# `Recovery`: what one way of getting a job back after a failure takes, part by part, and what its copies cost.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One way of recovery. Times are in seconds, sizes in bytes of one device, bandwidths in bytes per second of one device.

    Copies of the state are made as the training goes on: a copy stops it for `blocked` seconds and can be returned to
    `commit` seconds after it began. A failure before that goes back to the copy before.

    Attributes:
      name: what it is called.
      notice: from a failure until it is detected.
      replace: until a machine takes the place of the failed one; 0: a spare one is ready.
      start: until all processes run and have found each other.
      compile: until their programs are compiled, or read from the cache.
      size: bytes of the state of one device.
      read: bandwidth at which a device reads its state back.
      write: bandwidth at which a device's copy is written while training goes on; infinite: the copy is done when it resumes.
      blocked: for which a copy stops the training.
      shrinks: whether the surviving replicas of the model go on in the step that failed, without a copy, and the failed one
        joins them when its machine is replaced. Else all wait for that machine and return to the last copy.
    """

    name: str
    notice: float = 0.0
    replace: float = 0.0
    start: float = 0.0
    compile: float = 0.0
    size: float = 0.0
    read: float = float("inf")
    write: float = float("inf")
    blocked: float = 0.0
    shrinks: bool = False

    def __post_init__(self):
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, float | int)}
        wrong = {name: value for name, value in numbers.items() if not value >= 0}
        wrong |= {name: getattr(self, name) for name in ("read", "write") if not getattr(self, name) > 0}
        if wrong:
            raise ValueError(f"Recovery {self.name!r}: {wrong}: seconds and bytes are 0 or more, bandwidths above 0")

    @property
    def restore(self) -> float:
        """Seconds to read the state back."""
        return self.size / self.read

    @property
    def commit(self) -> float:
        """Seconds from the start of a copy until the job can return to it."""
        return self.blocked + self.size / self.write

    @property
    def pause(self) -> float:
        """Seconds from a failure until training continues."""
        if self.shrinks:
            return self.notice + self.compile
        return self.notice + self.replace + self.start + self.compile + self.restore

    @property
    def growing(self) -> float:
        """Seconds for which all replicas wait when one joins again; 0 for a way that does not shrink."""
        return self.start + self.compile + self.restore if self.shrinks else 0.0


# --------------------------------------------------------------------------------------------------
# How often devices fail, as published: interruptions of a training over the device-hours in which they were counted.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FailureRate:
    """How often the devices of one cluster interrupted a job.

    Attributes:
      name: what it is called.
      events: interruptions that were counted.
      device_hours: over which they were counted.
      counted: what counts as an interruption.
      source: the publication of both numbers.
    """

    name: str
    events: float
    device_hours: float
    counted: str
    source: str

    @property
    def per_device_hour(self) -> float:
        """Interruptions of a job per device and hour."""
        return self.events / self.device_hours


def _of_nodes(name: str, per_thousand_node_days: float) -> FailureRate:
    return FailureRate(
        name=name, events=per_thousand_node_days, device_hours=1000 * 24 * 8,
        counted="failures of infrastructure that ended a job, per thousand days of a node of 8 A100",
        source="Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters (HPCA 2025)",
    )  # fmt: skip


FAILURE_RATES: dict[str, FailureRate] = {
    each.name: each
    for each in (
        FailureRate(
            name="llama3", events=419, device_hours=54 * 24 * 16384,
            counted="unexpected interruptions of one training in 54 days on 16,384 H100",
            source="Grattafiori et al., The Llama 3 Herd of Models (2024), section 3.3.4",
        ),
        _of_nodes("rsc-1", 6.50),
        _of_nodes("rsc-2", 2.34),
        FailureRate(
            name="opt-175b", events=35 + 70, device_hours=2 * 30 * 24 * 992,
            counted="restarts for hardware in 2 months on 992 A100, manual (at least 35) and automatic (estimated 70 and more)",
            source="Zhang et al., OPT: Open Pre-trained Transformer Language Models (2022), section 2.5",
        ),
        FailureRate(
            name="tpu-v4", events=0.0008, device_hours=24 * 4,
            counted="machines of 4 chips that fail, 0.08% a day; links and switches left out",
            source="Zu et al., Resiliency at Scale: Managing Google's TPUv4 Supercomputer (NSDI 2024), section 5.2",
        ),
    )
}  # fmt: skip
"""Name -> rate. None of the sources says how failures are correlated: they are taken to be independent."""


def failure_rate(given: "str | float") -> float:
    """Interruptions per device-hour, from the name of a published cluster, or a number.

    >>> f"{failure_rate('llama3'):.2e}"
    '1.97e-05'
    >>> failure_rate("1e-4")
    0.0001

    Raises:
      ValueError: for another name, or a number below 0.
    """
    if isinstance(given, str) and given.lower() in FAILURE_RATES:
        return FAILURE_RATES[given.lower()].per_device_hour
    try:
        rate = float(given)
    except ValueError:
        rate = float("nan")
    if not 0 <= rate < float("inf"):
        raise ValueError(
            f"{given!r} is no failure rate: give failures per device-hour (0 or more), or one of {', '.join(FAILURE_RATES)}"
        )
    return rate


# --------------------------------------------------------------------------------------------------
# The mesh axes of which the planner tries every degree. Nothing here imports JAX.
# --------------------------------------------------------------------------------------------------

FAMILIES: tuple[tuple[str, ...], ...] = (
    ("data", "pipe", "fsdp", "expert", "context", "tensor"),
    ("data", "pipe", "fsdp", "depth", "row", "col"),
)
"""Mesh axes that go together: layers are split Megatron's way or AxoNN's. Experts go with the former."""

SHORTEST = 1024
"""The fewest positions on a rank of `context` that the planner tries."""

SEARCHED = tuple(axis for axis in AXES if any(axis in family for family in FAMILIES))
"""The mesh axes of which legal plans are enumerated."""


# --------------------------------------------------------------------------------------------------
# Assumptions of the cost model beside the hardware's figures.
# --------------------------------------------------------------------------------------------------

_NO_SHARES = ("host_bandwidth", "imbalance")


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Assumptions about the time that a plan takes.

    By `efficiency` and `passes` MaxText's published steps of dense models and of Mixtral on TPUs are priced within 11%
    (`benchmarks/peers/published_mfu.py`); `passes` is an H200's.

    Attributes:
      efficiency: share of the peak FLOP/s that products reach, waiting excluded.
      score_seconds: seconds of an attention kernel per pair of positions and head, forward and backward, beside its products.
      passes: share of the memory's bandwidth that norms, activations and the loss reach between products; 0: they are in
        `efficiency`.
      overlap: share of the compute time behind which gathers of parameters and reductions of gradients can hide.
      layer_overlap: the same for collectives inside layers; 0, as a product waits for its input.
      blocks: efficiency of attention that is computed in blocks, as where it reads positions of other ranks, over `efficiency`,
        on platforms with attention kernels. Not measured.
      imbalance: tokens of the busiest rank's experts over the mean, by which experts' products take longer; a round of a
        dispatch has slots for 1.25 times the mean. Not measured.
      memory_margin: share of a device's memory that a plan may fill; the rest is for fragmentation and the runtime.
      host_bandwidth: bytes per second between a device and its host's memory.
    """

    efficiency: float = 0.7
    score_seconds: float = 0.0
    passes: float = 0.42
    overlap: float = 0.7
    layer_overlap: float = 0.0
    blocks: float = 0.5
    imbalance: float = 1.25
    memory_margin: float = 0.9
    host_bandwidth: float = 16e9

    @classmethod
    def on(cls, hardware: Hardware, efficiency: float | None = None, **given: Any) -> "Assumptions":
        """The defaults for hardware, with its measured shares and host link; arguments override them.

        On CPUs nothing overlaps: XLA:CPU begins no collective before it needs the result.
        """
        if hardware.reached is not None:
            given = {"score_seconds": hardware.score_seconds, "passes": hardware.passes_reached, **given}
        known = cls.efficiency if hardware.reached is None else hardware.reached
        hidden = {"overlap": 0.0} if hardware.platform == "cpu" else {}
        linked = {"host_bandwidth": hardware.host_link} if hardware.host_link else {}
        return cls(efficiency=known if efficiency is None else efficiency, **(hidden | linked | given))

    def __post_init__(self):
        wrong = {name: value for name, value in vars(self).items() if not value >= 0}
        wrong |= {name: value for name, value in vars(self).items() if name not in _NO_SHARES and value > 1}
        if wrong or self.imbalance < 1 or not self.efficiency or not self.blocks or not self.host_bandwidth:
            raise ValueError(
                f"Assumptions: {wrong or vars(self)}: shares lie between 0 and 1, and efficiency and blocks above 0; imbalance "
                "is at least 1"
            )


# --------------------------------------------------------------------------------------------------
# Expected goodput in closed form, and the interval between copies that makes it largest.
#
# Goodput is training that is kept over wall time: 1 is a job that neither fails nor makes copies. With failures that
# come one by one at a rate of 1/M per second (M: the job's mean time between failures), an interval of t seconds of
# training between two copies, d seconds for which a copy stops the training, c seconds from its beginning until it can
# be returned to, and R seconds from a failure until the training goes on (a failure in them begins them anew):
#
#     goodput = t / M * exp(-(R + c - d) / M) / (exp((t + d) / M) - 1)
#
# That is Daly's run time, M exp(R / M) (exp((t + d) / M) - 1) / t (A higher order estimate of the optimum checkpoint
# interval for restart dumps, 2006), with copies that go on behind the training's back. Copies do not overlap: where t +
# d < c the training waits for the copy before, and d is c - t. Young's (1974) is the first term of the best interval,
# sqrt(2 d M).
# --------------------------------------------------------------------------------------------------

HOUR = 3600.0
WEEK = 7 * 24 * HOUR


def expected_goodput(way: Recovery, *, rate: float, interval: float, replicas: int = 1) -> float:
    """Expected long-run share of wall time that is training whose result is kept.

    For a way that shrinks, each replica is present for 1 / (1 + rate / replicas * replace) of the time, and joins as often as
    it fails, so that all wait for (exp(rate * growing) - 1) of the time for one to join. A failure then loses part of one step,
    which is the interval.

    Args:
      way: of recovery.
      rate: failures of the whole job per second.
      interval: seconds of training between two copies; of a way that shrinks those of a step.
      replicas: of the model; more than 1 for a way that shrinks.

    >>> saves = Recovery(name="disk", blocked=300, start=600)
    >>> f"{expected_goodput(saves, rate=1 / (24 * HOUR), interval=7020):.4f}"
    '0.9126'

    Raises:
      ValueError: for an interval that is not above 0, a negative or infinite rate, or a way that shrinks with fewer than 2
        replicas.
    """
    if not (interval > 0 and 0 <= rate < math.inf):
        raise ValueError(f"interval={interval}, rate={rate}: the interval is above 0, the rate 0 or more and finite")
    there = 1.0
    if way.shrinks:
        if replicas < 2:
            raise ValueError(f"{way.name}: replicas={replicas}: a job shrinks to the replicas that live, of at least 2")
        there = 1 / (1 + rate / replicas * way.replace)
    blocked = 0.0 if way.shrinks else max(way.blocked, way.commit - interval)
    if rate == 0:
        return interval / (interval + blocked)
    rate, behind = rate * there, 0.0 if way.shrinks else way.commit - blocked
    joining = max(0.0, 1 - math.expm1(min(rate * way.growing, 1.0)))
    kept = (
        rate * interval * math.exp(-rate * (way.pause + behind)) / math.expm1(min(rate * (interval + blocked), 700.0))
    )
    return there * joining * kept


def daly_interval(blocked: float, mtbf: float) -> float:
    """Daly's higher-order estimate of the best seconds of training between two copies.

    sqrt(2 d M) (1 + 1/3 sqrt(d / 2M) + 1/9 d / 2M) - d for d < 2M, else M.

    >>> [f"{daly_interval(5, minutes):.3g}" for minutes in (24 * 60, 6 * 60, 15)]  # the paper's figures 3 to 5, in minutes
    ['117', '56.7', '9.14']

    Args:
      blocked: seconds for which a copy stops the training, d.
      mtbf: mean seconds between failures of the job, M.
    """
    if blocked >= 2 * mtbf:
        return mtbf
    share = blocked / (2 * mtbf)
    return math.sqrt(2 * blocked * mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - blocked


def best_steps(way: Recovery, *, rate: float, step: float, most: int) -> int:
    """The number of steps between two copies with the largest expected goodput.

    Daly's interval, or the shortest in which a copy is done before the next if that is longer, in whole steps.

    Args:
      way: of recovery; one that shrinks needs none.
      rate: failures of the whole job per second.
      step: seconds of a step.
      most: the largest answer, which a job that never fails gets, such as the steps of the run.

    Raises:
      ValueError: for a way that shrinks, a step that is not above 0 s, or `most` below 1.
    """
    if way.shrinks or not step > 0 or most < 1:
        raise ValueError(
            f"{way.name}: step={step}, most={most}: a way with copies, a step above 0 s, at least one step"
        )
    if rate == 0:
        return most
    wanted = max(daly_interval(way.blocked, 1 / rate), way.commit - way.blocked) / step
    near = {min(max(round_(wanted), 1), most) for round_ in (math.floor, math.ceil)}
    return max(sorted(near), key=lambda steps: expected_goodput(way, rate=rate, interval=steps * step))


# --------------------------------------------------------------------------------------------------
# `SaveAdvice`: how often a planned job should save, and its expected goodput; `SaveAssumptions`: what this follows from.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SaveAssumptions:
    """Assumptions about failures, and about a job that restarts from its checkpoint.

    Attributes:
      failures_per_device_hour: interruptions of the job for each of its devices and each hour; by default those of Llama 3's
        training, the largest of those published.
      mtbf: hours between two failures of the whole job, in place of `failures_per_device_hour`; None: use that.
      checkpoint_bandwidth: bytes per second that each device writes and reads of a checkpoint while all do. The default is what
        Llama 3's storage sustained, 2 TB/s, over the 16,384 devices of the job (Grattafiori et al. 2024, section 3.3.1).
      restart_seconds: from a failure until the restarted job could take a step, without reading the state: detection, another
        machine, processes, compiled programs. Assumed.
      save_seconds: for which an asynchronous save stops the training besides copying the state to the host: measured in
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
        """Failures of the job per second.

        Args:
          num_devices: of the job.
        """
        hourly = self.failures_per_device_hour * num_devices if self.mtbf is None else 1 / self.mtbf
        return hourly / HOUR


@dataclass(frozen=True, kw_only=True)
class SaveAdvice:
    """Advice how often to save.

    Attributes:
      steps: of training between two checkpoints.
      seconds: that these steps take.
      goodput: expected training time that is kept over wall time, in the long run.
      mtbf: hours between two failures of the job; infinite: it never fails.
      size: bytes of a device's part of a checkpoint.
      blocked: seconds for which a save stops the training.
      commit: seconds from the start of a save until it is complete on disk.
      pause: seconds from a failure until the training goes on.
      assumed: the assumptions that all this follows from.
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
        """The advice as plain values; `mtbf` is None without failures."""
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
    """How often to save a job that restarts from its checkpoint after each failure.

    A save stops the training while the state is copied to the host; it is written while training goes on, and the next save
    waits for it (`ax.CheckpointManager`). Each device is taken to write replicated state too: an upper bound.

    Args:
      size: bytes of parameters and optimizer state on a device between steps.
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
