"""What a few real steps of a model show of this machine: fixed times, the share of the peak reached, how fast layers send."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.ledger.predict.predict import predict
from axonml_jax.ledger.predict.prediction import Prediction
from axonml_jax.mesh.shape import make_mesh
from axonml_jax.models.config import TransformerConfig
from axonml_jax.parallel.plan import Plan
from axonml_jax.planner.assumptions import Assumptions
from axonml_jax.planner.candidate import Candidate
from axonml_jax.planner.hardware import Hardware
from axonml_jax.planner.legal import legal_meshes
from axonml_jax.planner.price import price
from axonml_jax.planner.verify import abstract_step

MANY = 4
"""Sequences of a device, in one microbatch or as many."""

SHORT, LONG, BLOCKS = 8, 512, 4
"""Positions of short sequences, the most of long ones, and the most blocks of the model whose steps are measured."""

ROUNDS, LEAST_ROUNDS, PATIENCE = 21, 3, 20.0
"""Steps of each kind, and how many there are at least where all of them would take more than the seconds of patience."""

WITHIN = 2.0
"""Seconds that a step may take at the speed of products."""


def from_steps(devices: list[Any], model: TransformerConfig, here: Hardware, precision: str | None) -> Hardware:
    """The hardware with what steps of the model show beside products and sums.

    Three steps over `data`, of the model with at most `BLOCKS` blocks: MANY short sequences of a device in one microbatch, in
    MANY, and MANY long ones in one. What MANY - 1 microbatches more take is what blocks take however few tokens they have; what
    long sequences take longer, over their FLOPs, is the speed of products; the rest of the first comes with every step. Where
    the model's layers divide over `tensor`, a step over it shows how fast the layers' own collectives are there, with
    everything that its ranks compute alike, if they are slower than the link.

    Args:
      devices: all of them take part.
      model: without experts.
      here: what was measured of products, memory and sums.
      precision: of the steps, as of `ax.Plan`.

    Returns:
      `here` with `block_seconds`, `step_seconds`, `reached` and `layer_link`; as it is where a step would take more than
      `WITHIN` seconds at the speed of products, or fill more than a device's memory.
    """
    blocks, most = min(BLOCKS, model.num_layers), min(LONG, model.max_length)
    probed = replace(model, num_layers=blocks)
    tiny = replace(probed, attention="auto")  # no kernel takes so few positions
    short, data = min(SHORT, most), {"data": len(devices)}
    probe = partial(_Probe, devices=devices, precision=precision)
    probes = [
        probe(model=tiny, length=short, degrees=data),
        probe(model=tiny, length=short, degrees=data, microbatches=MANY),
        probe(model=probed, length=most, degrees=data),
    ]
    if split := _widest_split(probed, len(devices), most):
        probes.append(probe(model=probed, length=most, degrees=split))
    if any(each.is_too_much(here) for each in probes):
        return here
    few, parts, full, *of_split = _in_turns([each.prepared() for each in probes])
    more = probes[2].flops(here) - probes[0].flops(here)
    reached = min(more / max(full - few, 1e-9) / here.flops, 1.0)
    found = replace(here, reached=reached, block_seconds=max(parts - few, 0.0) / (MANY - 1) / blocks)
    found = replace(found, step_seconds=max(few - probes[0].seconds(found), 0.0))
    for seconds in of_split:
        found = replace(found, layer_link=found.link * min(1.0, _share(probes[-1], seconds, found)))
    return replace(found, step_seconds=found.step_seconds * model.num_layers / blocks)


def _share(probe: "_Probe", seconds: float, here: Hardware) -> float:
    """The link's speed in a step that took some seconds, over the one that `here` has."""
    known = probe.seconds(replace(here, layer_link=math.inf))
    return (probe.seconds(here) - known) / max(seconds - known, 1e-9)


def _widest_split(model: TransformerConfig, devices: int, length: int) -> dict[str, int]:
    """The mesh of these devices with most ranks of `tensor` that the model's layers divide over; none without any."""
    meshes = legal_meshes(model, devices, global_batch=MANY * devices, length=length, axes=("data", "tensor"))
    widest = max(meshes, key=lambda degrees: degrees.get("tensor", 1))
    return widest if "tensor" in widest else {}


@dataclass(frozen=True, kw_only=True)
class _Probe:
    """A step of a model.

    Attributes:
      devices: all of them take part.
      model: the transformer.
      length: of a sequence.
      degrees: of the mesh.
      precision: as of `ax.Plan`.
      microbatches: of a device's MANY sequences.
    """

    devices: list[Any]
    model: TransformerConfig
    length: int
    degrees: dict[str, int]
    precision: str | None
    microbatches: int = 1

    @property
    def candidate(self) -> Candidate:
        """As the planner has it."""
        return Candidate(degrees=tuple(self.degrees.items()), microbatches=self.microbatches)

    @property
    def _way(self) -> tuple[Plan, Any]:
        return self.candidate.plan(self.precision), self.candidate.model(self.model)

    @property
    def batch(self) -> int:
        """Sequences of the step."""
        return MANY * len(self.devices)

    def predicted(self, here: Hardware) -> Prediction:
        """What it holds, sends and computes."""
        plan, model = self._way
        return predict(
            plan, model, self.candidate.mesh, global_batch=self.batch, length=self.length, platform=here.platform
        )

    def flops(self, here: Hardware) -> float:
        """Of a device."""
        found = self.predicted(here)
        return found.tokens * found.flops_per_token / len(self.devices)

    def seconds(self, here: Hardware) -> float:
        """Its price."""
        return float(price(self.predicted(here), here, Assumptions.on(here)).time)

    def is_too_much(self, here: Hardware) -> bool:
        """Whether it takes too long, or fills more than a device's memory."""
        held = self.predicted(here).memory.total
        return self.flops(here) / here.flops > WITHIN or held > Assumptions.memory_margin * here.memory

    def prepared(self) -> Callable[[], None]:
        """The step, compiled and taken twice. Values are zeros, which take as long as others."""
        mesh = make_mesh(devices=self.devices, **self.candidate.mesh)
        plan, model = self._way
        step, shapes, batch = abstract_step(plan, model, mesh, self.batch, self.length)
        state, batch = jax.tree.map(_zeros, shapes), jax.tree.map(_zeros, batch)

        def take() -> None:
            nonlocal state
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))

        for _ in range(2):
            take()
        return take


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.device_put(jax.random.key(0), like.sharding)
    return jnp.zeros(like.shape, like.dtype, device=like.sharding)


def _in_turns(steps: list[Callable[[], None]]) -> list[float]:
    """Median seconds of each; a round takes one step of each, so that what the machine does meanwhile falls on all."""
    times: list[list[float]] = [[] for _ in steps]
    began = time.perf_counter()
    for done in range(ROUNDS):
        if done >= LEAST_ROUNDS and time.perf_counter() - began > PATIENCE:
            break
        for step, mine in zip(steps, times, strict=True):
            started = time.perf_counter()
            step()
            mine.append(time.perf_counter() - started)
    return [median(mine) for mine in times]
