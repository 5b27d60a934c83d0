"""Memory of FSDP's training step: ZeRO's formula, our estimate, and what the compiled step plans, per device.

Run: python benchmarks/memory/fsdp_memory.py [--models mlp gpt] [--plot FILE.svg]; --topology v5e:2x4 compiles for TPU chips
that need not be there (pip install '.[tpu]'). Shows, for Adam in float32 on 8 simulated devices, resting bytes
(arguments) and temporaries of every strategy, FLOPs against plain autodiff, and the bars: arguments within 2% of 12P/N,
temporaries of FULL_SHARD at most activations + gradient shards + 2.5 units. Nothing is allocated.
"""

import argparse
from dataclasses import dataclass

import jax

jax.config.update("jax_platforms", "cpu")

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import optax
from deep_models import CASES, Case
from jax.sharding import AxisType, Mesh
from paired import machine

import axonml_jax as ax
from axonml_jax.ledger.compiled import Moved, device_peak, moved
from axonml_jax.ledger.memory import FSDPMemoryStats, estimate
from axonml_jax.model.view import functionalize
from axonml_jax.parallel.placement import bind_plan
from axonml_jax.planner.verify import topology_devices
from axonml_jax.training.run_state import abstract_state, resting_shapes

MIB = 2**20
PLANS = {
    "NO_SHARD": ax.Plan(fsdp=ax.Replicate()),
    "ZeRO-1": ax.Plan(fsdp=ax.Shard(stage=1)),
    "ZeRO-2": ax.Plan(fsdp=ax.Shard(stage=2)),
    "ZeRO-3": ax.Plan(fsdp=ax.Shard(stage=3)),
    "ZeRO-3, prefetch": ax.Plan(fsdp=ax.Shard(stage=3, prefetch=1)),
    "ZeRO-3, optimizer offloaded": ax.Plan(fsdp=ax.Shard(stage=3), offload=ax.CPUOffload.OPTIMIZER_STATES),
    "ZeRO-3, all offloaded": ax.Plan(fsdp=ax.Shard(stage=3), offload=ax.CPUOffload.FULL),
}


@dataclass(frozen=True)
class Measured:
    """What the compiled step of one plan plans for a device, in bytes, beside the estimate.

    Attributes:
      stats: our estimate.
      arguments: resting arrays on the device, the batch not counted.
      host: resting arrays in host memory, where the compiler counts them apart.
      temporaries: what the step needs more.
      peak: on the device at the fullest moment, where the compiler says (0 elsewhere).
      flops: of a step, on one device.
      overlap: gathers behind compute in the schedule, on TPU.
    """

    stats: FSDPMemoryStats
    arguments: int
    host: int
    temporaries: int
    peak: int
    flops: float
    overlap: Moved | None


def measure(case: Case, plan: ax.Plan, mesh: Mesh) -> Measured:
    """Compile a step for the mesh's devices, which need not exist, and read its plan of memory."""
    view, shapes = functionalize(case.model)
    placement, tx = bind_plan(plan, shapes, mesh), optax.adam(1e-3)
    step = ax.TrainStep(view, placement, mesh, case.loss, tx)
    state = resting_shapes(abstract_state(shapes, tx, placement), placement, tx, mesh)
    compiled = step.lower(state, case.batch(case.rows * mesh.size)).compile()
    batch = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(case.batch(case.rows)))
    planned, tpu = compiled.memory_analysis(), mesh.devices.flat[0].platform == "tpu"
    return Measured(
        stats=estimate(placement, 2, view),
        arguments=planned.argument_size_in_bytes - batch,
        host=planned.host_argument_size_in_bytes,
        temporaries=planned.temp_size_in_bytes,
        peak=device_peak(compiled) if tpu else 0,
        flops=compiled.cost_analysis()["flops"],
        overlap=moved(compiled).get("all_gather") if tpu else None,
    )


def paper(name: str, params: int, ranks: int) -> float:
    """Model states of float32 Adam (Rajbhandari et al. 2020): parameters, gradients, and 8 bytes of moments."""
    shards = {"NO_SHARD": (1, 1, 1), "ZeRO-1": (1, 1, ranks), "ZeRO-2": (1, ranks, ranks)}
    parameter, gradient, optimizer = shards.get(name, (ranks, ranks, ranks))
    return params * (4 / parameter + 4 / gradient + 8 / optimizer)


def report(name: str, case: Case, mesh: Mesh, chosen: list[str]) -> dict[str, Measured]:
    """Print one model's table."""
    measured = {plan: measure(case, PLANS[plan], mesh) for plan in chosen}
    params, ranks, activations = next(iter(measured.values())).stats.total_params, mesh.size, case.residual_bytes()
    print(f"\n{name}: {params:,} parameters on {ranks} devices; activations {activations / MIB:.1f} MB per device")
    print(
        "| strategy | ZeRO's formula | estimate + activations | measured | ratio | resting | / 12P/N | temporaries | FLOPs |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    plain = measured.get("ZeRO-2")  # gathers at the start, and plain autodiff
    for plan, own in measured.items():
        resting = 12 * params / (1 if plan == "NO_SHARD" else ranks)
        whole, expected = own.peak or own.arguments + own.temporaries, own.stats.total_bytes + activations
        if not own.host:
            expected += own.stats.host_bytes  # XLA:CPU books host arguments as device ones
        cells = [mb(paper(plan, params, ranks)), mb(expected), mb(whole), f"{whole / expected:.2f}"]
        cells += [mb(own.arguments) + (f" + {mb(own.host)} host" if own.host else "")]
        cells += [f"{(own.arguments + own.host) / resting:.4f}", mb(own.temporaries)]
        print(f"| {plan} | {' | '.join(cells)} | {f'{own.flops / plain.flops:.5f}' if plain else ''} |")
    for plan, own in measured.items():
        if own.overlap and own.overlap.count:
            print(f"{plan}: {own.overlap}")
    if "ZeRO-3" in measured:
        bar(measured["ZeRO-3"], activations, case.stacked)
    return measured


def mb(size: float) -> str:
    """Bytes as MB of 2**20."""
    return f"{size / MIB:,.1f}"


def bar(own: Measured, activations: int, stacked: int) -> None:
    """Print the issue's bar on FULL_SHARD's temporaries."""
    unit = own.stats.gathered_bytes // 2 // stacked  # the estimate has the largest unit's weights and gradients
    allowed = activations + own.stats.grad_bytes + 2.5 * unit
    verdict = "met" if own.temporaries <= allowed else "MISSED"
    print(
        f"temporaries of FULL_SHARD {mb(own.temporaries)} MB, allowed {mb(allowed)} (activations + gradient shards "
        f"{mb(own.stats.grad_bytes)} + 2.5 units of {mb(unit)}): {verdict}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--plans", nargs="*", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--topology", help="compile for these TPU chips instead of simulated devices")
    parser.add_argument("--plot", metavar="FILE", help="draw the first model's estimates")
    options = parser.parse_args()
    if options.topology:
        devices = topology_devices(options.topology)
    else:
        ax.fake_devices(8)
        devices = jax.devices()
    mesh = Mesh(devices, ("fsdp",), axis_types=(AxisType.Auto,))
    print(f"{machine('jax', 'flax')}; {options.topology or 'simulated devices'}; MB of 2**20 bytes per device")
    tables = {name: report(name, CASES[name](), mesh, options.plans) for name in options.models}
    if options.plot:
        first = next(iter(tables.values()))
        ax.plot_memory({plan: own.stats for plan, own in first.items()}, options.plot)


if __name__ == "__main__":
    main()
