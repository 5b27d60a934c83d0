"""How much of DDP's communication XLA:TPU runs behind compute, read off the schedule of a step compiled without a TPU.

    pip install '.[tpu]' && python benchmarks/speed/tpu_overlap.py [--topology v5e:2x4] [--layers 4] [--bucket-mb 25]

Compiles the real training step of a small GPT for a TPU topology and prints, for OVERLAPPED and SYNCHRONOUS, how many bytes
its schedule moves and which share of them with products scheduled between a collective's start and its end.
"""

import argparse

import jax

jax.config.update("jax_platforms", "cpu")

import optax
from flax import nnx
from jax.sharding import AxisType, Mesh

import axonml_jax as ax
from axonml_jax.ledger.compiled import moved
from axonml_jax.model.view import functionalize
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer, cross_entropy
from axonml_jax.parallel.placement import bind_plan
from axonml_jax.planner.verify import topology_devices
from axonml_jax.training.run_state import abstract_state

OPTIONS = {"xla_enable_async_all_reduce": "true", "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true"}


def loss_fn(model, batch):
    return ax.WeightedMean(*cross_entropy(model(batch["tokens"]), batch["targets"]))


def compile_step(strategy, mesh, layers, bucket_mb, options):
    """The optimized program of one step for the mesh's devices, which need not exist."""
    config = TransformerConfig(vocab_size=32000, num_layers=layers, hidden_size=1024, num_heads=16, max_length=1024)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    view, shapes = functionalize(model)
    data = ax.Replicate(sync_strategy=strategy, bucket_size_mb=bucket_mb)
    placement = bind_plan(ax.Plan(data=data, precision="bf16"), shapes, mesh)
    tx = optax.adamw(3e-4)
    step = ax.TrainStep(view, placement, mesh, loss_fn, tx)
    tokens = jax.ShapeDtypeStruct((mesh.size * 4, 1024), "int32")
    lowered = step.lower(abstract_state(shapes, tx, placement), {"tokens": tokens, "targets": tokens})
    return lowered.compile(compiler_options=options).as_text()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--bucket-mb", type=float, default=25)
    parser.add_argument("--dump", help="write the programs' texts under this prefix")
    args = parser.parse_args()
    devices = topology_devices(args.topology)
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    print(f"jax {jax.__version__}, {args.topology}, {args.layers} layers")
    for options in ({}, OPTIONS):
        for strategy in ("overlapped", "synchronous"):
            text = compile_step(strategy, mesh, args.layers, args.bucket_mb, options)
            if args.dump:
                with open(f"{args.dump}_{strategy}_{len(options)}.txt", "w") as file:
                    file.write(text)
            kind = "async options" if options else "default options"
            print(f"{strategy:12} {kind:16} {moved(text)['all']}")


if __name__ == "__main__":
    main()
