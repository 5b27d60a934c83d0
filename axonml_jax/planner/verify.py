"""Measures this machine's devices, and compares a plan's price with real or compiled steps."""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from axonml_jax.base import PyTree, aligned
from axonml_jax.collectives.primitives import sum_over
from axonml_jax.compat.processes import backend_started
from axonml_jax.layers.kernels import target_platform
from axonml_jax.layers.whole import tensor_specs
from axonml_jax.ledger.compiled import Moved, collectives_in_compiled, device_peak, moved, moved_table
from axonml_jax.ledger.count import collectives_in
from axonml_jax.ledger.predict import MemoryDifference, Prediction, difference, memory_difference, predict
from axonml_jax.mesh.axes import AXES
from axonml_jax.mesh.shape import make_mesh, order_devices
from axonml_jax.mesh.simulate import fake_devices
from axonml_jax.model.loss import WeightedMean
from axonml_jax.model.view import functionalize
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer, router_metrics
from axonml_jax.parallel.placement import bind_plan
from axonml_jax.parallel.plan import Plan
from axonml_jax.planner.hardware import Assumptions, Hardware
from axonml_jax.planner.price import price
from axonml_jax.planner.search import Answer, Candidate, legal_meshes
from axonml_jax.strategies.strategy import Fabric
from axonml_jax.training.run_state import abstract_state, resting_shapes
from axonml_jax.training.step import TrainStep

# --------------------------------------------------------------------------------------------------
# A plan's real training step compiled for TPU chips that need not be present, or for CPUs: memory and collectives beside
# what is predicted.
# --------------------------------------------------------------------------------------------------

CPU = "cpu"
"""The name of the topology of simulated CPU devices, as many as a plan has."""


@dataclass(frozen=True)
class Verification:
    """The comparison of a plan with what a topology's compiler made of it.

    Attributes:
      topology: the chips compiled for.
      memory: bytes per chip, predicted and planned by the compiler.
      peak: peak bytes per chip as planned; 0 if the compiler reports none.
      predicted_peak: peak bytes per chip as predicted.
      traffic: differences between the traced step's collectives and the predicted ones; empty where they agree.
      collectives: (kind, asynchronous, in a loop) -> instructions of the compiled program.
      moved: kind -> the bytes that the compiled schedule moves per step, loops times their trips, and the share that runs
        behind compute.
      flops: of a step on one chip, a loop's body counted once.
      optimal_seconds: the compiler's own estimate of a step, a loop's body counted once; None where it has none.
      seconds: that tracing and compiling took.
    """

    topology: str
    memory: MemoryDifference
    peak: int
    predicted_peak: int
    traffic: tuple[str, ...]
    collectives: dict[tuple[str, bool, bool], int]
    moved: Mapping[str, Moved]
    flops: float
    optimal_seconds: float | None
    seconds: float

    def __str__(self) -> str:
        rows = [
            [kind, "asynchronous" if later else "synchronous", "in a loop" if loop else "once", f"{count}"]
            for (kind, later, loop), count in sorted(self.collectives.items())
        ]
        peak = f"peak         predicted {self.predicted_peak / 2**20:,.1f} MiB, planned {self.peak / 2**20:,.1f} MiB"
        estimate = (
            "" if self.optimal_seconds is None else f", the compiler's estimate {1e3 * self.optimal_seconds:,.1f} ms"
        )
        parts = [f"compiled for {self.topology} in {self.seconds:,.0f} s", f"{self.memory}\n{peak}"]
        parts.append(
            aligned(["compiled to", "how", "where", "instructions"], rows, left=3) if rows else "no collectives"
        )
        if self.moved:
            parts.append(moved_table(self.moved))
        parts.append(f"{self.flops:,.0f} FLOPs per chip{estimate} (a loop's body counted once)")
        agrees = "traffic of the traced step is what was predicted"
        return "\n\n".join([*parts, "\n".join(["traffic differs:", *self.traffic]) if self.traffic else agrees])


def topology_devices(topology: str, slices: int = 1) -> list[Any]:
    """The devices of a TPU topology such as "v5p:8x8x8", or of several slices of it; none has to be present.

    Raises:
      ModuleNotFoundError: without libtpu, which the `tpu` extra installs.
    """
    # No chip is used, so that neither the cloud's metadata nor libtpu's lock on the chips is needed.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")
    require_compiler(topology)
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(topology_name=topology, platform="tpu", num_slices=slices).devices)


def require_compiler(topology: str) -> None:
    """Refuses a topology for which this machine has no compiler.

    Raises:
      ModuleNotFoundError: without libtpu, which the `tpu` extra installs.
    """
    if topology != CPU and find_spec("libtpu") is None:
        raise ModuleNotFoundError(
            f"compiling for TPU needs libtpu: pip install 'axonml-jax[tpu]'; {CPU} compiles for simulated devices"
        )


def verify(answer: Answer, topology: str, slices: int = 1) -> Verification:
    """Compile an answer's plan for a topology, with abstract parameters.

    Args:
      answer: the planner's.
      topology: as "v5p:8x8x8", with as many chips as the plan has devices; "cpu": as many simulated devices, for which JAX must
        not have started with others.
      slices: number of such topologies, which the data-center network joins.

    Raises:
      ValueError: if the topology has another number of chips than the plan has devices.
      ModuleNotFoundError: for TPUs without libtpu.
    """
    asked = answer.asked
    return verify_plan(
        answer.plan,
        answer.model,
        answer.prediction,
        topology,
        asked.global_batch,
        asked.length,
        asked.documents,
        slices,
    )


def verify_plan(
    plan: Plan,
    config: TransformerConfig,
    prediction: Prediction,
    topology: str,
    global_batch: int,
    length: int,
    documents: bool = False,
    slices: int = 1,
) -> Verification:
    """Compile one plan for a topology (see `verify`)."""
    assert plan.mesh is not None
    degrees = {axis: size for axis, size in plan.mesh.degrees.items() if axis in AXES}
    if topology == CPU:  # which has other kernels, and no torus
        fake_devices(math.prod(degrees.values()))
        decoder: Any = config
        sizes = {"global_batch": global_batch, "length": length}
        prediction = predict(plan, decoder, degrees, **sizes, platform=CPU, documents=documents)
    devices = jax.devices() if topology == CPU else topology_devices(topology, slices)
    where = topology if slices == 1 else f"{slices} x {topology}"
    if math.prod(degrees.values()) != len(devices):
        raise ValueError(
            f"{where} has {len(devices)} chips, the plan {math.prod(degrees.values())} devices: give one of as many chips"
        )
    in_order = order_devices(tuple(degrees.values()), devices)
    mesh = Mesh(in_order, tuple(degrees), axis_types=(AxisType.Auto,) * len(degrees))
    started = time.perf_counter()
    step, state, batch = abstract_step(plan, config, mesh, global_batch, length, documents)
    traced = step.trace(state, batch)
    compiled: Any = traced.lower().compile()
    seconds = time.perf_counter() - started
    found = collectives_in_compiled(compiled)
    costs = compiled.cost_analysis() or {}
    memory = memory_difference(prediction, compiled)
    return Verification(
        topology=where,
        memory=memory,
        peak=memory.arguments[1] + memory.temporaries[1] if topology == CPU else device_peak(compiled),
        predicted_peak=prediction.memory.total,
        traffic=tuple(map(str, difference(prediction, collectives_in(traced.jaxpr)))),
        collectives=dict(Counter((each.kind, each.asynchronous, each.in_loop) for each in found)),
        moved=moved(compiled),
        flops=costs.get("flops", 0.0),
        optimal_seconds=estimate if (estimate := costs.get("optimal_seconds", -1.0)) >= 0 else None,
        seconds=seconds,
    )


def abstract_step(
    plan: Plan, config: TransformerConfig, mesh: Mesh, global_batch: int, length: int, documents: bool = False
) -> tuple[TrainStep, Any, PyTree]:
    """The library's training step with AdamW, and the shapes of its state and batch with their shardings.

    Args:
      plan: how the step runs.
      config: of the model, its layers split as the mesh needs.
      mesh: of the devices.
      global_batch: sequences per update.
      length: of a sequence.
      documents: whether rows hold several documents.
    """
    module = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    view, shapes = functionalize(module)
    placement = bind_plan(
        plan.for_model(view), shapes, mesh, tensor_specs(module, mesh.shape), stacks=view.stacked_dims
    )
    tx = optax.adamw(1e-3)
    step = TrainStep(view, placement, mesh, _loss, tx)
    state = resting_shapes(abstract_state(shapes, tx, placement), placement, tx, mesh)
    rows = jax.ShapeDtypeStruct((global_batch, length), jnp.int32)
    names = ("tokens", "targets", *(("segment_ids", "positions") if documents else ()))
    return step, state, dict.fromkeys(names, rows)


def _loss(model: Any, batch: PyTree) -> WeightedMean | tuple[WeightedMean, dict[str, WeightedMean]]:
    total, weight, routers = model.loss_and_routers(**batch)
    loss = WeightedMean(total, weight)
    return loss if routers is None else (loss, router_metrics(routers))


# --------------------------------------------------------------------------------------------------
# Measures of this machine from a few real steps of a model: fixed times, the share of the peak that products reach, and the
# speed of layers' collectives.
# --------------------------------------------------------------------------------------------------

MANY = 4
"""Sequences of a device in a probe, in one microbatch or in as many microbatches."""

SHORT, LONG, BLOCKS = 8, 512, 4
"""Positions of short sequences, the most positions of long ones, and the most blocks of the probed model."""

ROUNDS, LEAST_ROUNDS, PATIENCE = 21, 3, 20.0
"""Measured steps of each probe; and their least number, once the measuring has taken `PATIENCE` seconds."""

WITHIN = 2.0
"""Most seconds of a probe's step at the measured speed of products; above it no step is measured."""


def from_steps(devices: list[Any], model: TransformerConfig, here: Hardware, precision: str | None) -> Hardware:
    """Refines measured hardware by real steps of a model.

    Three steps over `data` are measured, of the model with at most `BLOCKS` blocks: MANY short sequences of a device in one
    microbatch, the same in MANY microbatches, and MANY long sequences in one. The time of the MANY - 1 additional microbatches
    is the blocks' fixed time; the additional time of long sequences, over their FLOPs, is the speed of products; the rest of
    the first step is the fixed time of a step. Where the model's layers divide over `tensor`, a step over it measures how fast
    the layers' collectives are, redundant compute included, if that is slower than the link.

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
    """The link's speed in a step that took `seconds`, relative to that of `here`."""
    known = probe.seconds(replace(here, layer_link=math.inf))
    return (probe.seconds(here) - known) / max(seconds - known, 1e-9)


def _widest_split(model: TransformerConfig, devices: int, length: int) -> dict[str, int]:
    """The mesh of these devices with the largest `tensor` degree that the model's layers divide over; empty if none."""
    meshes = legal_meshes(model, devices, global_batch=MANY * devices, length=length, axes=("data", "tensor"))
    widest = max(meshes, key=lambda degrees: degrees.get("tensor", 1))
    return widest if "tensor" in widest else {}


@dataclass(frozen=True, kw_only=True)
class _Probe:
    """A step of a model, to be predicted and measured.

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
        """The step as a planner's candidate."""
        return Candidate(degrees=tuple(self.degrees.items()), microbatches=self.microbatches)

    @property
    def _way(self) -> tuple[Plan, Any]:
        return self.candidate.plan(self.precision), self.candidate.model(self.model)

    @property
    def batch(self) -> int:
        """The number of sequences in the step."""
        return MANY * len(self.devices)

    def predicted(self, here: Hardware) -> Prediction:
        """The prediction of what the step holds, sends and computes."""
        plan, model = self._way
        return predict(
            plan, model, self.candidate.mesh, global_batch=self.batch, length=self.length, platform=here.platform
        )

    def flops(self, here: Hardware) -> float:
        """Model FLOPs of one device in the step."""
        found = self.predicted(here)
        return found.tokens * found.flops_per_token / len(self.devices)

    def seconds(self, here: Hardware) -> float:
        """The step's price in seconds."""
        return float(price(self.predicted(here), here, Assumptions.on(here)).time)

    def is_too_much(self, here: Hardware) -> bool:
        """Whether the step takes too long, or exceeds a device's memory."""
        held = self.predicted(here).memory.total
        return self.flops(here) / here.flops > WITHIN or held > Assumptions.memory_margin * here.memory

    def prepared(self) -> Callable[[], None]:
        """Compiles the step, runs it twice on zeros, and returns a function that runs it once more."""
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
    """Median seconds of each step; rounds run one step of each, so that disturbances hit all alike."""
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


# --------------------------------------------------------------------------------------------------
# Measures of this machine's devices: products, memory, collectives, and with a model its steps.
# --------------------------------------------------------------------------------------------------

UNKNOWN_MEMORY = 2.0**40
"""Bytes of a device that does not say how many it has; also the link's bytes per second where there is one device."""

CHAIN = 16
"""Sums that follow each other in the measure of one, as in a step: a single one would include waiting for other devices."""


def measure(
    num_devices: int | None = None,
    *,
    model: TransformerConfig | None = None,
    size: int = 512,
    elements: int = 2**20,
    dtype: str = "float32",
) -> Hardware:
    """Measures products, memory and sums with all devices at work, as in a step, so that shared cores and links are priced.

    Args:
      num_devices: number of JAX's devices to use, the first ones; None: all. On CPUs that many simulated devices are started,
        if JAX has not started.
      model: whose steps are measured too (see `from_steps`); None, or a model with experts: no steps are.
      size: of the square matrices that are multiplied.
      elements: of the array that is summed over the devices.
      dtype: of both.

    Raises:
      ValueError: when there are fewer devices than `num_devices`.
    """
    devices = _devices(num_devices)
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    flops = 2 * size**3 * 8 / _seconds(mesh, _products, (len(devices), size, size), dtype)
    single = Mesh(devices[:1], ("data",), axis_types=(AxisType.Auto,))
    alone = 2 * size**3 * 8 / _seconds(single, _products, (1, size, size), dtype)
    moved = 2 * elements * jnp.dtype(dtype).itemsize  # read and written
    bandwidth = moved / _seconds(mesh, lambda x: x * 2 + 1, (len(devices), elements), dtype)
    ranks = len(devices)
    usual = lambda body, width: _seconds(mesh, body, (ranks, width), dtype, rounds=21, of=median)
    call = usual(lambda x: x, 8)
    small, large = (max(usual(_summed, width) - call, 0.0) / CHAIN for width in (8, elements))
    latency = small / max(1.0, math.log2(ranks))  # as `Hardware.delay` takes it: of two devices
    wire = 2 * elements * jnp.dtype(dtype).itemsize * (ranks - 1) / ranks
    link = wire / max(large - small, 1e-9) if ranks > 1 else UNKNOWN_MEMORY
    stats, platform = devices[0].memory_stats() or {}, target_platform()
    here = Hardware(
        name=f"{devices[0].device_kind} (measured)",
        flops=flops,
        memory=float(stats.get("bytes_limit", UNKNOWN_MEMORY)),
        memory_bandwidth=bandwidth,
        link=link,
        island=max(ranks, 1),
        cross=link,
        platform=platform if platform in ("tpu", "cuda", "cpu") else None,
        torus=Fabric.of(devices).torus,
        latency=latency,
        cross_latency=latency,
        alone=max(alone / flops, 1.0),
        sources=dict.fromkeys(("flops", "memory_bandwidth", "link", "island", "cross"), "measured"),
    )
    if model is None or model.experts is not None:
        return here
    return from_steps(devices, model, here, "bf16" if dtype == "bfloat16" else None)


def _devices(num_devices: int | None) -> list[Any]:
    if num_devices is not None and jax.config.jax_platforms == "cpu" and not backend_started():
        fake_devices(num_devices)
    devices = jax.devices()[:num_devices]
    if num_devices is not None and len(devices) < num_devices:
        raise ValueError(f"--hardware measure: {num_devices} devices are asked for, this machine has {len(devices)}")
    return devices


def _products(x: jax.Array) -> jax.Array:
    y = x[0]
    for _ in range(8):
        y = y @ x[0]
    return y[None]


def _summed(x: jax.Array) -> jax.Array:
    for _ in range(CHAIN):
        x = sum_over(x, ("data",)) * 0.5
    return x


def _seconds(
    mesh: Mesh, body: Callable, shape: tuple[int, ...], dtype: str, rounds: int = 5, of: Callable = min
) -> float:
    """The shortest (or another) of a few runs of a function on all devices at once."""
    spec = PartitionSpec("data")
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jax.device_put(jnp.full(shape, 1e-3, dtype), NamedSharding(mesh, spec))
    jax.block_until_ready(run(x))
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        jax.block_until_ready(run(x))
        times.append(time.perf_counter() - started)
    return of(times)
