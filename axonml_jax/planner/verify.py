"""A plan's real training step compiled for TPU chips that need not be here, or for CPUs: memory and collectives beside what is
predicted."""

import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh

from axonml_jax._types import PyTree
from axonml_jax.ledger.compiled import collectives_in_compiled, device_peak
from axonml_jax.ledger.compiled_schedule import Moved, moved, moved_table
from axonml_jax.ledger.predict.difference import MemoryDifference, difference, memory_difference
from axonml_jax.ledger.predict.predict import predict
from axonml_jax.ledger.predict.prediction import Prediction
from axonml_jax.ledger.table import aligned
from axonml_jax.ledger.traced import collectives_in
from axonml_jax.mesh.axes import AXES
from axonml_jax.mesh.fake_devices import fake_devices
from axonml_jax.model.functionalize import functionalize
from axonml_jax.model.loss import WeightedMean
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.router_metrics import router_metrics
from axonml_jax.models.transformer import Transformer
from axonml_jax.parallel.bind import bind_plan
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.tensor.specs import tensor_specs
from axonml_jax.planner.answer import Answer
from axonml_jax.training.state.first_state import abstract_state, resting_shapes
from axonml_jax.training.step import TrainStep

CPU = "cpu"
"""The topology of as many simulated devices of this machine as a plan has."""


@dataclass(frozen=True)
class Verification:
    """What a compiler for the topology made of a plan.

    Attributes:
      topology: which chips.
      memory: bytes per chip, predicted and planned.
      peak: bytes per chip at the fullest moment as planned; 0 where the compiler does not say.
      predicted_peak: as predicted.
      traffic: what the traced step sends otherwise than predicted; nothing where they agree.
      collectives: (kind, asynchronous, in a loop) -> instructions of the compiled program.
      moved: kind -> what the compiled schedule moves per step, loops times their trips, and which share of it runs behind
        compute.
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


def topology_devices(topology: str) -> list[Any]:
    """The devices of a TPU topology such as "v5p:8x8x8"; none of them is here.

    Raises:
      ModuleNotFoundError: without libtpu, which the `tpu` extra installs.
    """
    # No chip is touched: nothing to ask the cloud about, and nothing that a second process could not do meanwhile.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")
    require_compiler(topology)
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(topology_name=topology, platform="tpu").devices)


def require_compiler(topology: str) -> None:
    """Refuse early what cannot be compiled here.

    Raises:
      ModuleNotFoundError: without libtpu, which the `tpu` extra installs.
    """
    if topology != CPU and find_spec("libtpu") is None:
        raise ModuleNotFoundError(
            f"compiling for TPU needs libtpu: pip install 'axonml-jax[tpu]'; {CPU} compiles for simulated devices"
        )


def verify(answer: Answer, topology: str) -> Verification:
    """Compile an answer's plan for a topology, with abstract parameters only.

    Args:
      answer: the planner's.
      topology: as "v5p:8x8x8", as many chips as the plan has devices; "cpu": so many simulated ones, which must not have
        started as others.

    Raises:
      ValueError: for another number of chips.
    """
    asked = answer.asked
    return verify_plan(
        answer.plan, answer.model, answer.prediction, topology, asked.global_batch, asked.length, asked.documents
    )


def verify_plan(
    plan: Plan,
    config: TransformerConfig,
    prediction: Prediction,
    topology: str,
    global_batch: int,
    length: int,
    documents: bool = False,
) -> Verification:
    """Compile one plan for a topology (see `verify`)."""
    assert plan.mesh is not None
    degrees = {axis: size for axis, size in plan.mesh.degrees.items() if axis in AXES}
    if topology == CPU:  # which has other kernels, and no torus
        fake_devices(math.prod(degrees.values()))
        decoder: Any = config
        sizes = {"global_batch": global_batch, "length": length}
        prediction = predict(plan, decoder, degrees, **sizes, platform=CPU, documents=documents)
    devices = jax.devices() if topology == CPU else topology_devices(topology)
    if math.prod(degrees.values()) != len(devices):
        raise ValueError(f"{topology} has {len(devices)} chips, the plan {math.prod(degrees.values())} devices")
    mesh = Mesh(
        np.array(devices).reshape(tuple(degrees.values())), tuple(degrees), axis_types=(AxisType.Auto,) * len(degrees)
    )
    started = time.perf_counter()
    step, state, batch = abstract_step(plan, config, mesh, global_batch, length, documents)
    traced = step.trace(state, batch)
    compiled: Any = traced.lower().compile()
    seconds = time.perf_counter() - started
    found = collectives_in_compiled(compiled)
    costs = compiled.cost_analysis() or {}
    memory = memory_difference(prediction, compiled)
    return Verification(
        topology=topology,
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
    """The library's training step with AdamW, and the shapes of its state and batch where they rest.

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
