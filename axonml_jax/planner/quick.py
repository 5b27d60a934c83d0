"""A first price of every way to run on one mesh, in arrays: good enough to choose which ways are priced exactly."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.cost.activations import block_activations, compute_dtype
from axonml_jax.cost.cuts import stage_costs, stages_of
from axonml_jax.cost.layer_flows import Layers, layer_flows
from axonml_jax.cost.wire import wire_elements
from axonml_jax.mesh.axes import LAYER_AXES, batch_axes
from axonml_jax.model.precision import Precision
from axonml_jax.models.config import TransformerConfig
from axonml_jax.parallel.fsdp import Shard
from axonml_jax.parallel.pipeline.policy import Pipelined
from axonml_jax.parallel.pipeline.schedule import PipelineSchedule
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.strategy import AbstractStrategy
from axonml_jax.planner.assumptions import Assumptions
from axonml_jax.planner.hardware import Hardware
from axonml_jax.planner.legal import Way
from axonml_jax.planner.phases import inner_product
from axonml_jax.sharding.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
      model: the transformer.
      num_devices: how many.
      hardware: of which kind.
      global_batch: sequences per update.
      length: of a sequence.
      moments: optimizer values per parameter.
      precision: the policy's name, or a `Precision`.
      compute: the dtype that activations have.
      assumptions: of the cost model.
      memory: bytes that a plan may fill on a device.
      strategy: one of the user's own along `fsdp`; None: the stages of ZeRO.
    """

    model: TransformerConfig
    num_devices: int
    hardware: Hardware
    global_batch: int
    length: int
    moments: int
    precision: Any
    compute: str | None
    assumptions: Assumptions
    memory: float
    strategy: AbstractStrategy | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of an activation's element."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def resting(self) -> int:
        """Bytes of a parameter between steps."""
        return jnp.dtype(Precision.of(self.precision).param or self.model.param_dtype).itemsize

    @property
    def summed(self) -> int:
        """Bytes of a gradient while it is accumulated and reduced."""
        policy = Precision.of(self.precision)
        return policy.reduce_dtype(policy.param or self.model.param_dtype).itemsize

    @property
    def dtype(self) -> str:
        """The dtype that activations have."""
        model: Any = self.model
        return compute_dtype(model, self.compute)


class _Columns:
    """Ways as arrays, one entry per way."""

    def __init__(self, ways: tuple[Way, ...]):
        column = lambda values, kind=float: np.array(list(values), kind)
        self.count = column(way.microbatches for way in ways)
        self.remat = column((way.remat is not None for way in ways), bool)
        self.full = column((way.remat == "full" for way in ways), bool)
        self.stage, self.chunks = column(way.stage for way in ways), column(way.chunks for way in ways)
        self.sequence = column((way.sequence_parallel for way in ways), bool)
        self.gpipe = column((way.schedule is PipelineSchedule.GPIPE for way in ways), bool)
        self.cuts = sorted({(way.chunks, way.remat or "") for way in ways})
        self.cut = column((self.cuts.index((way.chunks, way.remat or "")) for way in ways), int)
        self.kinds = sorted({(way.sequence_parallel, way.remat or "") for way in ways})
        self.kind = column((self.kinds.index((way.sequence_parallel, way.remat or "")) for way in ways), int)


@lru_cache(maxsize=1024)
def _columns(ways: tuple[Way, ...]) -> _Columns:
    return _Columns(ways)


def quick(degrees: dict[str, int], ways: tuple[Way, ...], asked: Question) -> tuple[np.ndarray, np.ndarray]:
    """(seconds, bytes) of ways on one mesh."""
    mesh, of_way = _Mesh.of(degrees, asked), _columns(ways)
    count, chunks = of_way.count, of_way.chunks
    each = np.array([mesh.layers(asked, sequence, remat or None) for sequence, remat in of_way.kinds]).T
    seconds, delays, *kept = each[:, of_way.kind]
    again = np.where(of_way.full, 1 / 3, np.where(of_way.remat, mesh.attention / 3, 0.0))
    compute = mesh.compute * (1 + again)
    layers = seconds * mesh.rows * asked.length + delays * count
    layers = layers + mesh.depth_seconds(asked) * count * (1 + of_way.remat / 3)
    layers = np.maximum(0.0, layers - asked.assumptions.layer_overlap * compute)
    tokens = mesh.rows * asked.length / count
    if mesh.pipe == 1:
        held = _held(mesh, asked, of_way, [each * tokens for each in kept])
        return compute + _exposed(mesh, asked, of_way, compute) + layers, held
    cuts = np.array([_cut(asked.model, mesh.pipe, *key, asked.length) for key in of_way.cuts]).T[:, of_way.cut]
    slowest, stage, blocks = cuts
    # Every tick waits for its slowest stage; the first and the last ticks fill and drain.
    spent = (count * slowest + (mesh.pipe - 1) / (mesh.pipe * chunks)) * mesh.pipe / count
    ticks = np.where(of_way.gpipe, 2 * count + 2 * mesh.pipe - 3, count * chunks + _depth(mesh, of_way) - 1)
    passing = 2 * ticks * mesh.pipe_seconds(asked, tokens / np.where(of_way.sequence, mesh.degrees.get("tensor", 1), 1))
    held = _held_by_ticks(mesh, asked, of_way, [each * tokens for each in kept], stage, blocks)
    return compute * spent + sum(mesh.weights_seconds(asked)) + mesh.tied_seconds(asked) + layers + passing, held


@lru_cache(maxsize=4096)
def _cut(model: TransformerConfig, pipe: int, chunks: int, remat: str, length: int) -> tuple[float, float, float]:
    """Of a cut into pipe x chunks stages: the slowest stages' part of all work, the most blocks of a stage, and of a rank."""
    decoder: Any = model
    policy = Pipelined(schedule=PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, num_microbatches=pipe, chunks=chunks)
    if chunks == 1:
        policy = Pipelined(num_microbatches=pipe)
    plan: Any = Plan(pipe=policy, remat=remat or None)  # pyright: ignore[reportArgumentType]
    stages = stages_of(decoder, plan, {"pipe": pipe})
    costs = stage_costs(decoder, plan, stages, length).tables(len(stages.blocks))
    work = np.add(costs["F"], costs["B"]).reshape(chunks, pipe)
    most = max(stages.on_rank(rank) for rank in range(pipe))
    return float(work.max(axis=1).sum() / work.sum()), float(max(stages.blocks)), float(most)


def _depth(mesh: "_Mesh", of_way: "_Columns") -> np.ndarray:
    """Activations that a schedule other than GPipe keeps of long runs (docs/guides/pipeline-schedules.md)."""
    return 2 * (mesh.pipe - 1) + (of_way.chunks - 1) * mesh.pipe + 1


def _held(mesh: "_Mesh", asked: Question, of_way: "_Columns", kept: list[np.ndarray]) -> np.ndarray:
    """Bytes of everything without a pipeline; gradients grow while activations go."""
    own, rebuilt, _, head = kept
    fsdp, count, stage = mesh.degrees.get("fsdp", 1), of_way.count, of_way.stage
    grads = mesh.params * asked.summed * np.where((count > 1) & (stage < 2), 1.0, 1 / fsdp)
    activations = mesh.blocks * own + np.maximum(head, rebuilt)
    gathered = np.where(stage == 3, mesh.unit * (asked.itemsize + asked.summed), mesh.params * asked.itemsize)
    return mesh.resting(asked, mesh.params) + np.maximum(activations, grads) + gathered * (fsdp > 1)


def _held_by_ticks(
    mesh: "_Mesh", asked: Question, of_way: "_Columns", kept: list[np.ndarray], stage: np.ndarray, blocks: np.ndarray
) -> np.ndarray:
    """The same of a pipeline: slots of stages, and what passes through a tick."""
    own, rebuilt, boundary, head = kept
    count, chunks = of_way.count, of_way.chunks
    params = mesh.block * blocks + mesh.table
    slots = np.where(of_way.gpipe, count, np.minimum(count * chunks, _depth(mesh, of_way)))
    slot = stage * (own - boundary) + boundary
    tick = stage * np.where(rebuilt > 0, rebuilt, own) + head
    fsdp = mesh.degrees.get("fsdp", 1)
    read = params * asked.itemsize * (fsdp > 1 or asked.itemsize != asked.resting)
    return mesh.resting(asked, params) + params * asked.summed + (slots + 1) * slot + tick + 4 * boundary + read


def _exposed(mesh: "_Mesh", asked: Question, of_way: "_Columns", compute: np.ndarray) -> np.ndarray:
    """What of parameters and gradients nothing hides, phase by phase (see `phases`)."""
    count, stage, share = of_way.count, of_way.stage, asked.assumptions.overlap
    gather, scatter, across = mesh.weights_seconds(asked)
    used, summed = stage == 3, stage >= 2
    forward = share * mesh.compute / 3 / count
    backward = share * compute / count - forward
    last = across + np.where(summed, 0.0, scatter)
    each = np.where(used, gather, 0.0) + np.where(summed, scatter, 0.0)
    exposed = np.maximum(0.0, gather - forward) + np.where(used, (count - 1) * np.maximum(0.0, gather - forward), 0.0)
    return exposed + (count - 1) * np.maximum(0.0, each - backward) + np.maximum(0.0, each + last - backward)


@lru_cache(maxsize=4096)
def _along_fsdp(strategy: AbstractStrategy, ranks: int, read: str, summed: int) -> tuple[float, float]:
    """Bytes per parameter that a rank sends for one gather and for one reduction."""
    shard = 2**16  # so large that scales and the like do not count
    layout = strategy.spec(Layout.whole(jax.ShapeDtypeStruct((ranks * shard,), jnp.dtype(read))), "fsdp", ranks)
    reduced = jnp.dtype("bfloat16" if summed == 2 else "float32" if summed == 4 else "float64")
    gathers = strategy.gather_flows(shard, layout, "fsdp", ranks, jnp.dtype(read))
    scatters = strategy.sync_flows(shard * ranks, layout, "fsdp", ranks, reduced)
    size = lambda sent: float(wire_elements(sent.kind, sent.elements, sent.ranks)) * jnp.dtype(sent.dtype).itemsize
    return sum(map(size, gathers)) / (ranks * shard), sum(map(size, scatters)) / (ranks * shard)


@dataclass(frozen=True)
class _Mesh:
    """What of one mesh does not depend on how the step runs."""

    degrees: dict[str, int]
    rows: int
    pipe: int
    blocks: float
    block: float
    table: float
    params: float
    compute: float
    attention: float

    @classmethod
    def of(cls, degrees: dict[str, int], asked: Question) -> "_Mesh":
        model, size = asked.model, lambda axis: degrees.get(axis, 1)
        rows = asked.global_batch // math.prod(degrees[axis] for axis in batch_axes(degrees))
        cut = math.prod(size(axis) for axis in ("tensor", "row", "col", "depth"))
        tables = model.vocab_size * model.hidden_size
        places = model.max_length * model.hidden_size * (model.position == "learned")
        block = (model.num_params - places - tables * (1 if model.tie_embeddings else 2)) / model.num_layers / cut
        blocks = -(-model.num_layers // size("pipe"))
        ends = (places + tables * (1 if model.tie_embeddings or size("pipe") > 1 else 2)) / cut
        flops = model.flops_per_token(asked.length)
        compute = asked.global_batch * asked.length * flops / asked.num_devices
        compute /= asked.hardware.flops * asked.assumptions.efficiency
        attention = 6 * model.num_layers * model.num_heads * 2 * model.head_size * asked.length / flops
        table = tables / cut
        return cls(degrees, rows, size("pipe"), blocks, block, table, blocks * block + ends, compute, attention)

    @property
    def unit(self) -> float:
        """Parameters of the largest unit that is whole at once: a block, or a table of words."""
        return max(self.block, self.table)

    def resting(self, asked: Question, params: float | np.ndarray) -> Any:
        """Bytes of parameters and optimizer between steps."""
        return params * asked.resting * (1 + asked.moments) / self.degrees.get("fsdp", 1)

    def _seconds(self, asked: Question, axis: str, sent: Any) -> Any:
        ranks = self.degrees.get(axis, 1)
        return sent / asked.hardware.bandwidth(ranks, inner_product(self.degrees, axis)) if ranks > 1 else 0.0 * sent

    def weights_seconds(self, asked: Question) -> tuple[float, float, float]:
        """Of one gather and one reduce-scatter of all weights along fsdp, and of their reduction along data."""
        fsdp, data = self.degrees.get("fsdp", 1), self.degrees.get("data", 1)
        outside = 2 * (data - 1) / data * self.params / fsdp * asked.summed
        gather, scatter = _along_fsdp(asked.strategy or Shard(), fsdp, asked.dtype, asked.summed)
        own = lambda axis, sent: self._seconds(asked, axis, sent)
        return own("fsdp", gather * self.params), own("fsdp", scatter * self.params), own("data", outside)

    def tied_seconds(self, asked: Question) -> float:
        """Of a table of words that the first and the last stage share: its gradients are summed, its parameters sent."""
        sent = 2 * (self.pipe - 1) / self.pipe * self.table * (asked.summed + asked.itemsize)
        return self._seconds(asked, "pipe", sent * asked.model.tie_embeddings)

    def depth_seconds(self, asked: Question) -> float:
        depth = self.degrees.get("depth", 1)
        return self._seconds(asked, "depth", 3.0 * (depth - 1) * self.params * asked.itemsize)

    def pipe_seconds(self, asked: Question, tokens: np.ndarray) -> np.ndarray:
        sent = self._seconds(asked, "pipe", tokens * asked.model.hidden_size * asked.itemsize)
        return sent + asked.hardware.delay(self.pipe, inner_product(self.degrees, "pipe"))

    def layers(self, asked: Question, sequence: bool, remat: str | None) -> tuple[float, ...]:
        """Per token of a rank: seconds of what layers send; per microbatch their delays; and the bytes of `_layers`."""
        own = tuple((axis, self.degrees[axis]) for axis in LAYER_AXES if axis in self.degrees)
        apart = self.pipe > 1 or asked.model.scan_layers
        block, ends = (_layers(own, blocks, sequence, remat, apart, asked) for blocks in (True, False))
        return block[0] * self.blocks + ends[0], block[1] * self.blocks + ends[1], *block[2:]


@lru_cache(maxsize=8192)
def _layers(
    degrees: tuple[tuple[str, int], ...], blocks: bool, sequence: bool, remat: str | None, apart: bool, asked: Question
) -> tuple[float, ...]:
    """The same of one block, or of embedding and head; and bytes per token of a block: kept, rebuilt, its boundary, the head's.

    The axes of layers are the innermost: no others matter.
    """
    sizes, length = dict(degrees), asked.length
    grid = any(axis in sizes for axis in ("row", "col", "depth"))
    model: Any = replace(asked.model, split="grid" if grid else "tensor", sequence_parallel=sequence)
    layers = Layers(
        config=model, degrees=sizes, tokens=length, length=length, dtype=asked.compute or "float32", blocks=int(blocks),
        first=not blocks, last=not blocks, times=1, remat=remat,
    )  # fmt: skip
    seconds = delays = 0.0
    for flow in layer_flows(layers, ()):
        if flow.group_size > 1 and flow.launches:
            inner = inner_product(sizes, flow.axes[0])
            seconds += float(flow.wire_bytes) / asked.hardware.bandwidth(flow.group_size, inner)
            delays += asked.hardware.delay(flow.group_size, inner) * flow.launches
    kept = block_activations(model, sizes, length, length, asked.dtype, remat, asked.hardware.platform, apart=apart)
    held = (kept.kept, kept.rebuilt, kept.boundary, kept.head)
    return seconds / length, delays, *(size / length for size in held)
