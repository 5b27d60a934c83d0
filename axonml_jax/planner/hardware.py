"""What accelerators can do, as published: a table of figures with the source of each."""

import math
from dataclasses import dataclass, field

import numpy as np

from axonml_jax.cost.amounts import Many, either, least, most, varies
from axonml_jax.synonyms import meant

GB, TERA = 1e9, 1e12
_BOOK = "How to Scale Your Model (Austin et al. 2025), chapter 2, table of TPU figures"
_CLOUD = "Google Cloud TPU documentation, system architecture pages"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of accelerator and how its devices are joined.

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
      platform: what JAX compiles for: "tpu", "cuda" or None (no kernels of its own).
      torus: dims of the torus that the chips of a pod form; 0: none.
      block_seconds: seconds that forward and backward of one block take however few tokens it has, where a model was measured.
      step_seconds: seconds that come with every step of the model however few tokens it has, where one was measured.
      layer_link: of `link`, bytes per second that what a model's layers send themselves reaches, with what their ranks compute
        alike meanwhile, where a model was measured; None: as `link`.
      reached: share of `flops` that the products of its blocks reach, where a model was measured; None: nobody knows. See
        `Assumptions.on`.
      alone: how many times as fast a device computes while the others are idle: simulated devices share their host's cores.
      sources: where each figure is from, by attribute; what is not there is an assumption.
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
    platform: str | None = None
    torus: int = 0
    block_seconds: float = 0.0
    step_seconds: float = 0.0
    layer_link: float | None = None
    reached: float | None = None
    alone: float = 1.0
    sources: dict[str, str] = field(default_factory=dict, compare=False, hash=False)

    def bandwidth(self, ranks: Many, inner: Many, *, layers: bool = False) -> Many:
        """Bytes per second of one device along a mesh axis.

        Inside an island it is the link's. Across islands a node's whole connection is shared by the groups that use it at
        once: link / min(devices per island, product of inner axes) (AxoNN, Singh et al. 2024, section 5).

        Args:
          ranks: of the axis.
          inner: product of the degrees of the axes inside it.
          layers: whether layers send it themselves.
        """
        link = self.link if self.layer_link is None or not layers else self.layer_link
        across = least(link, self.cross * self.island / least(self.island, inner))
        return either(ranks * inner <= self.island, link, across)

    def idle(self, bubble: Many) -> Many:
        """What is left of a pipeline's bubble where devices that wait leave their cores to the others.

        >>> import dataclasses
        >>> [dataclasses.replace(HARDWARE["v5p"], alone=alone).idle(1.5) for alone in (1.0, 2.0, 4.0)]
        [1.5, 0.25, 0.0]

        Args:
          bubble: idle time over useful time.
        """
        return most(0.0, (1 + bubble) / self.alone - 1)

    def delay(self, ranks: Many, inner: Many) -> Many:
        """Seconds that one collective along a mesh axis takes however little it sends; it grows with log2 of its ranks."""
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
):
    sources = {
        "flops": f"{_CLOUD}; {_BOOK}",
        "memory": _CLOUD,
        "memory_bandwidth": f"{_CLOUD}; {_BOOK}",
        "link": f"{_BOOK}: twice the one-way bandwidth of a link, as a ring over a torus dim uses both directions",
        "island": f"{_CLOUD}: chips of the largest pod",
        "cross": f"{_BOOK}: data-center network, per chip",
        "torus": _CLOUD,
    }
    return Hardware(
        name=name, flops=flops, memory=memory, memory_bandwidth=memory_bandwidth, link=2 * one_way, island=island,
        cross=cross, platform="tpu", torus=torus, sources=sources,
    )  # fmt: skip


def _gpu(name: str, flops: float, memory: float, memory_bandwidth: float, nvlink: float, cross: float, sheet: str):
    sources = {
        "flops": f"{sheet}: dense bfloat16 of the SXM module, without sparsity",
        "memory": sheet,
        "memory_bandwidth": sheet,
        "link": f"{sheet}: half of NVLink's figure, which counts both directions",
        "island": "NVIDIA DGX/HGX: eight GPUs behind NVSwitch",
        "cross": f"{sheet} (DGX): one network card per GPU",
    }
    return Hardware(
        name=name, flops=flops, memory=memory, memory_bandwidth=memory_bandwidth, link=nvlink / 2, island=8, cross=cross,
        latency=5e-6, platform="cuda", sources=sources,
    )  # fmt: skip


HARDWARE: dict[str, Hardware] = {
    each.name: each
    for each in (
        _tpu("v4", 275 * TERA, 32 * 2**30, 1200 * GB, 45 * GB, 4096, 6.25 * GB, 3),
        _tpu("v5e", 197 * TERA, 16 * 2**30, 819 * GB, 45 * GB, 256, 3.125 * GB, 2),
        _tpu("v5p", 459 * TERA, 95 * GB, 2765 * GB, 90 * GB, 8960, 6.25 * GB, 3),
        _tpu("v6e", 918 * TERA, 32 * 2**30, 1638 * GB, 90 * GB, 256, 12.5 * GB, 2),
        _gpu("a100", 312 * TERA, 80 * GB, 2039 * GB, 600 * GB, 25 * GB, "NVIDIA A100 80GB data sheet"),
        _gpu("h100", 989 * TERA, 80 * GB, 3350 * GB, 900 * GB, 50 * GB, "NVIDIA H100 data sheet"),
        _gpu("h200", 989 * TERA, 141 * GB, 4800 * GB, 900 * GB, 50 * GB, "NVIDIA H200 data sheet"),
    )
}
"""Name -> figures. Latencies are assumptions of the order that collectives of a few bytes show."""


def hardware(name: "str | Hardware") -> Hardware:
    """Hardware by its name.

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
