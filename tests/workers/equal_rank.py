"""A launched process that holds training under each kind of parallelism to one device: `python equal_rank.py [options]`.

Prints a line of JSON per kind: what equals one device, where this process is, and who started it. `--processes` is their number
where the launcher does not say it (Kubernetes); `--raise-on` names the rank that fails in the end, while the others go on.
"""

import argparse
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from workers.launch import QUICK

if __name__ == "__main__":  # programs that run a few times: compiling them well costs more than it gives
    os.environ["XLA_FLAGS"] = QUICK

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import axonml_jax as ax
from axonml_jax.cli.tasks import loss_fn
from axonml_jax.mesh.launchers import launch_environment
from axonml_jax.model.loss import Precision
from axonml_jax.model.view import functionalize
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.sharding.layout import to_host
from axonml_jax.testing.equality import Oracle, OracleParts, assert_trees_close

STEPS, ROWS = 2, 4
TX = optax.adamw(1e-2)
KINDS = {  # the mesh axis that all processes lie on, and the plan (a pipeline's depends on the model)
    "ddp": ("data", ax.Plan()),
    "fsdp": ("fsdp", ax.Plan()),
    "tensor": ("tensor", ax.Plan()),
    "pipeline": ("pipe", None),
}


class Net(nnx.Module):
    """Column- and row-parallel layers in turn."""

    def __init__(self, size):
        make = {"rngs": nnx.Rngs(0), "use_bias": False, "param_dtype": np.float64}
        kinds = [(ax.ColumnParallelLinear, 4, 8), (ax.RowParallelLinear, 8, 4)] * (size // 2)
        self.layers = nnx.List([kind(*widths, **make) for kind, *widths in kinds])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(jnp.tanh(x))
        return x


def net(size):
    """A small model, its loss and its batches, and where stages of a pipeline begin."""
    rows = np.random.default_rng(0).normal(size=(STEPS, ROWS, 4))
    split = tuple(f"layers/{i}" for i in range(1, size))
    return Net(size), lambda model, batch: jnp.mean((model(batch) - batch[:, ::-1]) ** 2), list(rows), split


def transformer(size):
    """The reference transformer."""
    config = TransformerConfig(
        vocab_size=16, num_layers=size, hidden_size=8, num_heads=4, max_length=8, mlp_hidden_size=8, param_dtype="float64",
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(0, 16, (STEPS, ROWS, 7)).astype(np.int32)
    batches = [{"tokens": each[:, :-1], "targets": each[:, 1:]} for each in ids]
    return Transformer(config, rngs=nnx.Rngs(0)), loss_fn, batches, None


def alone(model, loss, batches):
    """What one device computes: losses, gradient norms, and parameters in the end."""
    view, variables = functionalize(model)
    run = Oracle(view, loss, TX, OracleParts(1), precision=Precision()).run(variables, batches, jax.random.key(0))
    return {"loss": run.losses, "grad_norm": run.norms, "parameters": jax.tree.leaves(to_host(run.variables.params))}


def check(kind, model, loss, batches, split, wanted):
    """All processes together compute the same to 1e-9."""
    axis, plan = KINDS[kind]
    plan = plan or ax.Plan(pipe=ax.Pipelined(num_microbatches=ROWS, split=split))
    parallel = ax.parallelize(model, ax.make_mesh(**{axis: -1}), plan)
    trainer = parallel.trainer(TX, loss)
    metrics = [to_host(trainer.step(batch)) for batch in batches]
    got = {name: [each[name] for each in metrics] for name in ("loss", "grad_norm")}
    got["parameters"] = jax.tree.leaves(to_host(parallel.parameters()))
    assert_trees_close(got, to_host(wanted), kind)


def main():
    """Check all kinds, or those that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["net", "transformer"], default="net")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--raise-on", type=int)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    launch = launch_environment(os.environ, num_processes=options.processes)
    world = ax.init(num_processes=options.processes, timeout=120)
    place = {"rank": world.rank, "size": world.world_size, "local": world.local_rank, "by": launch and launch.launcher}
    model, loss, batches, split = {"net": net, "transformer": transformer}[options.model](world.world_size)
    wanted = alone(model, loss, batches)
    for kind in KINDS:
        check(kind, model, loss, batches, split, wanted)
        print(json.dumps({"equal": kind, **place}), flush=True)
    if options.raise_on is not None:
        if world.rank == options.raise_on:
            raise ValueError("boom")
        ax.barrier(world.default_group())
    ax.shutdown()


if __name__ == "__main__":
    main()
