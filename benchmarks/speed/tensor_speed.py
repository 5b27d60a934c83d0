"""Tensor parallelism against the same model hand-sharded with plain `jit`, and its memory against ledger and Korthikanti.

Run: python benchmarks/speed/tensor_speed.py [--data 2 --tensor 4] [--rounds 40]; --topology v5e:2x4 compiles for TPU chips that
     need not be there (`pip install '.[tpu]'`) and prints memory instead.
Shows: the ratio of medians of this library's step (explicit collectives in shard_map) to XLA's own partitioning of the same
plain model with the same shardings, losses beside each other (bar 1.05); for TPU, bytes that the compiled step plans beside the
ledger's prediction (bar 1.25) and Korthikanti's formula for the activations of the blocks.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from paired import alternate, machine, ratio, table, verdict
from small_gpt import Stepping, config, hand_written, loss_fn, make_batch, make_model, optimizer

import axonml_jax as ax
from axonml_jax.ledger.predict import memory_difference
from axonml_jax.model.view import functionalize
from axonml_jax.models.config import TransformerConfig
from axonml_jax.parallel.placement import bind_plan
from axonml_jax.planner.verify import topology_devices
from axonml_jax.training.run_state import abstract_state
from axonml_jax.training.step import TrainStep

BAR, MEMORY_BAR = 1.05, 1.25


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=int, default=2, help="ways in which the batch is split")
    parser.add_argument("--tensor", type=int, default=4, help="ways in which layers are split")
    parser.add_argument("--rounds", type=int, default=40, help="steps of each side that are timed")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--width", type=int, default=256, help="width of the residual stream")
    parser.add_argument("--rows", type=int, default=16, help="sequences in the global batch")
    parser.add_argument("--topology", help="compile for these TPU chips and print memory")
    return parser.parse_args()


def plain_jit(model, mesh, batch):
    """The step of a plain model, partitioned by XLA from the shardings of parameters and batch."""
    (number, params, _, key), step = hand_written(model, mesh, auto=True)
    specs = iter(jax.tree.leaves(ax.tensor_specs(model, mesh.shape), is_leaf=lambda x: isinstance(x, PartitionSpec)))
    params = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, next(specs))), params)
    state = (number, params, optimizer().init(params), key)
    return Stepping(state, step, batch)


def facade_step(trainer, batch):
    metrics = trainer.step(batch)
    return trainer.state, metrics


def speed(options):
    ax.fake_devices(options.data * options.tensor)
    shape = config(options.layers, options.width)
    mesh = ax.make_mesh(data=options.data, tensor=options.tensor)
    batch = jax.device_put(make_batch(options.rows, shape), NamedSharding(mesh, PartitionSpec("data")))
    trainer = ax.parallelize(make_model(shape), mesh).trainer(optimizer(), loss_fn)
    ours = Stepping(None, lambda _, given: facade_step(trainer, given), batch)
    sides = {"axonml_jax": ours, "plain jit": plain_jit(make_model(shape), mesh, batch)}
    losses = {name: [side() or float(side.metrics["loss"]) for _ in range(3)] for name, side in sides.items()}
    assert np.allclose(*losses.values(), rtol=1e-4), losses
    times = alternate(sides, options.rounds)
    print(
        f"{machine('jax', 'flax')}; data {options.data} x tensor {options.tensor}, {options.layers} blocks of {options.width}"
    )
    print(table(times, "plain jit"))
    print("step time:", verdict(ratio(times["axonml_jax"], times["plain jit"]), BAR))


def korthikanti(shape: TransformerConfig, rows: int, ranks: int, sequence: bool) -> float:
    """Bytes of the blocks' activations on one rank, 16-bit (Korthikanti et al. 2022, equations 2 and 4)."""
    s, h, a = shape.max_length, shape.hidden_size, shape.num_heads
    scores = 5 * a * s / h
    each = (34 + scores) / ranks if sequence else 10 + 24 / ranks + scores / ranks
    return shape.num_layers * s * rows * h * each


def memory(options):
    devices = topology_devices(options.topology)
    mesh = Mesh(np.array(devices).reshape(options.data, options.tensor), ("data", "tensor"))
    print(
        f"{machine('jax', 'libtpu')}; {options.topology}, MiB of one chip, {options.layers} blocks of {options.width}, bf16"
    )
    for sequence in (False, True):
        # Heads of 128 and attention weights in memory, as the formulas have them.
        own = {"num_heads": options.width // 128, "attention": "xla", "sequence_parallel": sequence}
        shape = dataclasses.replace(config(options.layers, options.width, 1024), **own)
        plan = ax.Plan(precision="bf16")
        compiled, prediction = compile_step(shape, mesh, plan, options.rows)
        peak = compiled.memory_analysis().peak_memory_in_bytes
        told = korthikanti(shape, options.rows // options.data, options.tensor, sequence)
        print(f"sequence parallelism {'on' if sequence else 'off'}\n{memory_difference(prediction, compiled)}")
        print(f"peak         predicted {prediction.memory.total / 2**20:,.1f} MiB, planned {peak / 2**20:,.1f} MiB")
        print(f"activations  predicted {prediction.memory.activations / 2**20:,.1f}, Korthikanti {told / 2**20:,.1f}")


def compile_step(shape, mesh, plan, rows):
    """The training step compiled for a mesh whose devices need not be there, and the ledger's prediction of it."""
    view, shapes = functionalize(lambda: make_model(shape))
    placement = bind_plan(plan, shapes, mesh, ax.tensor_specs(view.abstract_module, mesh.shape))
    step = TrainStep(view, placement, mesh, loss_fn, optimizer())
    batch = {name: jax.ShapeDtypeStruct((rows, shape.max_length), np.int32) for name in ("tokens", "targets")}
    compiled = step.lower(abstract_state(shapes, optimizer(), placement), batch).compile()
    return compiled, ax.explain(plan, model=shape, mesh=mesh, global_batch=rows)


if __name__ == "__main__":
    given = parse()
    memory(given) if given.topology else speed(given)
