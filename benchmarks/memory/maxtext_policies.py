"""What MaxText's policies of recomputation keep and repeat, beside what is chosen within as much, for chips of a TPU v5p.

Nothing runs (pip install '.[tpu]'). MaxText has a name for each set of a block's values that it keeps
(`remat_policy` of its configurations); here the same products are kept in this package's Llama 3, blocks in one loop, under
FSDP. A row per policy: bytes live at the fullest moment of the backward and FLOPs done twice as they are priced on the trace,
then the same of what is chosen within these bytes. Ends with an error where the choice repeats more, or holds more.

    python benchmarks/memory/maxtext_policies.py                              # Llama 3 8B and 70B, priced on the trace
    python benchmarks/memory/maxtext_policies.py --compile save_qkv_proj full # and compiled: the peak that XLA plans
"""

import argparse
import sys
from dataclasses import replace

import jax

jax.config.update("jax_platforms", "cpu")

from jax.sharding import AxisType, Mesh

import axonml_jax as ax
from axonml_jax.ledger.compiled import device_peak
from axonml_jax.mesh.shape import order_devices
from axonml_jax.models.config import PRESETS
from axonml_jax.parallel.recompute import Recompute, UnitChoice, WithinBytes
from axonml_jax.planner.verify import abstract_step, topology_devices
from axonml_jax.program.program import read_program
from axonml_jax.program.recompute import KERNELS, Rates, choose, graph_of, peak, work_of

GIB = 2**30
QKV = ("attention/query", "attention/key", "attention/value")
ATTENTION, INNER = (*QKV, "attention/out"), ("mlp/gate", "mlp/up")
CONTEXT = (KERNELS,)  # the results of attention's kernel
POLICIES = {
    "minimal_with_context": (*ATTENTION, *INNER, "mlp/down", *CONTEXT),
    "minimal": (*ATTENTION, *INNER, "mlp/down"),
    "save_dot_with_context_except_mlp": (*ATTENTION, *CONTEXT),
    "save_dot_except_mlpwi": (*ATTENTION, "mlp/down"),
    "save_dot_except_mlp": ATTENTION,
    "save_qkv_proj": QKV,
    "save_out_proj": ("attention/out",),
    "full": (),
}
"""MaxText's names (nnx_decoders.py, get_remat_policy) that keep on the device -> the products of a block."""

RATES = Rates(459e12, 2.765e12, 9e10)
"""Of a v5p chip: the planner's figures, with one direction of a link."""

MODELS = {"llama3-8b": ("v5p:2x2x2", 16), "llama3-70b": ("v5p:4x4x4", 64)}
"""Chips, and sequences of all of them together."""


class Policy:
    """A policy of MaxText's as what a plan recomputes; it remembers the units of the trace."""

    def __init__(self, name: str):
        self.name, self.units = name, []

    def choice(self, units) -> Recompute:
        """What each unit keeps."""
        self.units = list(units)
        keeps = [kept(unit, self.name) for unit in units]
        return Recompute(
            tuple(UnitChoice(u.name, None if k is None else (*k,)) for u, k in zip(units, keeps, strict=True))
        )


def kept(unit, policy: str) -> frozenset[str] | None:
    """Labels of a unit that a policy keeps: of a block; outside of the loop MaxText recomputes nothing (None)."""
    if unit.plain:
        return None
    names = POLICIES[policy]
    return frozenset(
        label
        for label in (*unit.labels, KERNELS)
        if label in names or any(label.startswith(f"{name}/") for name in names)
    )


def step_of(model: str, **plan):
    """A step for the chips, and shapes of its arguments."""
    topology, rows = MODELS[model]
    devices = topology_devices(topology)
    mesh = Mesh(order_devices((1, len(devices)), devices), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    config = replace(PRESETS[model], scan_layers=True, loss_chunk=2048)
    return abstract_step(ax.Plan(precision="bf16", **plan), config, mesh, rows, config.max_length)


def priced(model: str, policies) -> list[str]:
    """Prints a row per policy; returns those in which the choice repeats or holds more."""
    chooser, worse = WithinBytes(0, RATES), []
    step, *args = step_of(model, remat=chooser)
    step.trace(*args)
    pieces, asked = chooser.found.pieces, Policy("full")
    step_of(model, remat=asked)[0].trace(*args)
    graphs = [graph_of(*unit.work) for unit in asked.units]
    for policy in policies:
        own = [graph.price(kept(unit, policy), RATES) for graph, unit in zip(graphs, asked.units, strict=True)]
        live, again = peak(pieces, own), flops(pieces, own)
        found = choose(pieces, live)
        line = f"{model}  {policy}  {live / GIB:,.2f} GiB  {again / 1e12:,.2f} TFLOPs"
        if found is None:
            line, ours = f"{line}  none within", None
        else:
            ours = (peak(pieces, found), flops(pieces, found))
            line += f"  chosen {ours[0] / GIB:,.2f} GiB  {ours[1] / 1e12:,.2f} TFLOPs"
        if ours is None or ours[0] > live or ours[1] > again:
            worse.append(line)
            line += "  WORSE"
        print(line, flush=True)
    return worse


def flops(pieces, chosen) -> int:
    """FLOPs of products that are done twice, on a chip."""
    return sum(piece.trips * price.flops for piece, price in zip(pieces, chosen, strict=True))


def compiled(model: str, policies) -> list[str]:
    """Prints what the compiler plans for policies, and for what is chosen within as much."""
    worse = []
    for policy in policies:
        theirs = measured(model, remat=Policy(policy))
        ours = measured(model, memory=theirs[0])
        line = f"{model}  {policy}  {theirs[0] / GIB:,.2f} GiB  {theirs[1] / 1e12:,.1f} TFLOPs of a step"
        line += f"  chosen {ours[0] / GIB:,.2f} GiB  {ours[1] / 1e12:,.1f} TFLOPs"
        print(line, flush=True)
        worse += [line] * (ours[0] > theirs[0] or ours[1] > theirs[1])
    return worse


def measured(model: str, **plan) -> tuple[int, int]:
    """A chip's peak as it is planned, and FLOPs of products on the traced program."""
    step, *args = step_of(model, **plan)
    traced = step.trace(*args)
    return device_peak(traced.lower().compile()), sum(map(work_of, read_program(traced.jaxpr).equations))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--compile", nargs="+", default=[], choices=POLICIES)
    given = parser.parse_args()
    print(f"jax {jax.__version__}; live bytes of a chip, FLOPs done twice")
    worse = [line for model in given.models for line in priced(model, given.policies)]
    worse += [line for model in given.models for line in compiled(model, given.compile)]
    sys.exit("\n".join(worse) or None)


if __name__ == "__main__":
    main()
