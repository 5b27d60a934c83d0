"""What DiLoCo does not go with is refused by name, in Python and in configurations; plans say what their replicas do."""

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from diloco_runs import INNER, Net, loss_fn
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.config.config import ConfigError, read_config
from axonml_jax.models.config import TransformerConfig
from axonml_jax.parallel.plan import Partition

TINY = {"vocab_size": 16, "num_layers": 1, "hidden_size": 8, "num_heads": 2, "mlp_hidden_size": 8, "max_length": 8}
QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"


class Normed(nnx.Module):
    """Has running averages."""

    def __init__(self):
        self.norm, self.last = nnx.BatchNorm(6, rngs=nnx.Rngs(0)), nnx.Linear(6, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.last(self.norm(x))


def plan(**options):
    return ax.Plan(data=ax.DiLoCo(every=2), **options)


REFUSED = {
    "every=0 must be a positive whole number": lambda: ax.DiLoCo(every=0),
    "every=2147483648 must be a positive whole number of steps below 2": lambda: ax.DiLoCo(every=2**31),
    "lr=0, the outer learning rate": lambda: ax.DiLoCo(every=1, lr=0),
    "momentum=1 must be a number of at least 0 and below 1": lambda: ax.DiLoCo(every=1, momentum=1),
    "wire='fp8' must be None, 'bf16' or 'int8'": lambda: ax.DiLoCo(every=1, wire="fp8"),
    "DiLoCo: a pipeline's stages rest in buffers": lambda: plan(pipe=ax.Pipelined(num_microbatches=2)),
    "DiLoCo: partition leaves an axis": lambda: plan(partition=Partition.of({"kernel": PartitionSpec(None, "tensor")})),
    "DiLoCo: offload='params' brings": lambda: plan(offload="params"),
    "DiLoCo: float16 would need a loss scale for each replica": lambda: plan(precision="fp16"),
    "DiLoCo: NO_SYNC on another axis": lambda: plan(axes={"island": ax.Replicate(sync_strategy="no_sync")}),
    "island, data have rounds each|data, island have rounds each": lambda: plan(axes={"island": ax.DiLoCo(every=3)}),
    'DiLoCo: batch_stats="local"': lambda: plan(batch_stats="local"),
    "DiLoCo puts its replicas along data, which the mesh": lambda: ax.parallelize(
        Net(), Mesh(np.array(jax.devices()[:2]), ("fsdp",)), plan()
    ),
    "DiLoCo: this model has state that a step changes": lambda: ax.parallelize(Normed(), mesh_of(data=1), plan()),
    "ema=0.9: each replica trains its own parameters": lambda: ax.parallelize(Net(), mesh_of(data=2), plan()).trainer(
        INNER, loss_fn, ema=0.9
    ),
    "DiLoCo.* trains replicas": lambda: ax.testing.check_strategy(ax.DiLoCo(every=1), ranks=2),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_work_is_refused_by_name(said):
    with pytest.raises(ValueError, match=said):
        REFUSED[said]()


def test_a_plan_says_what_its_replicas_do():
    said = "DiLoCo over data: 50 steps alone, then one outer step as int8 (lr 0.7, momentum 0.9)"
    assert ax.DiLoCo(every=50, wire="int8").in_words("data") == said
    model, given = TransformerConfig(**TINY), {"mesh": {"data": 4}, "global_batch": 4}
    ours, theirs = (
        ax.explain(ax.Plan(data=data), model=model, **given) for data in (ax.DiLoCo(every=50), ax.Replicate())
    )
    assert ours.plan.startswith("DiLoCo over data: 50 steps alone, then one outer step (lr")
    assert ours.bytes_by_axes["data",] * 50 == theirs.minimum["gradients+parameters"]
    assert ours.memory.optimizer == 2 * theirs.memory.optimizer  # a replica's own, the outer momentum, Adam's two
    assert "DiLoCo(every=50)" in ax.Plan(data=ax.DiLoCo(every=50))._repr_html_()
    assert dataclasses.replace(ax.DiLoCo(every=50), lr=1.0) != ax.DiLoCo(every=50)


CONFIGURATIONS = {
    "rounds that do not end": (
        {"plan": {"diloco": {"every": 7}}},
        "train.steps=600 is no multiple of plan.diloco.every=7",
    ),
    "an outer step without rounds": ({"plan": {"diloco": {"lr": 0.5}}}, "plan.diloco.lr has no effect without every"),
    "reductions within rounds": (
        {"plan": {"diloco": {"every": 10}, "comm_dtype": "bfloat16"}},
        "plan.comm_dtype=bfloat16: no gradient is reduced beside plan.diloco",
    ),
    "an average of replicas": (
        {"plan": {"diloco": {"every": 10}}, "ema": {"decay": 0.9}},
        "would average each replica",
    ),
    "replicas of stages": ({"plan": {"diloco": {"every": 10}}, "mesh": {"pipe": 2}}, "no place for outer parameters"),
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_what_a_configuration_cannot_mean_is_refused(case, tmp_path):
    content, said = CONFIGURATIONS[case]
    whole = yaml.safe_load(QUICKSTART.read_text("utf-8"))
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**whole, **{name: whole.get(name, {}) | keys for name, keys in content.items()}}))
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_config("train", [str(file)])


def test_a_configuration_becomes_the_strategy():
    flags = ["--plan.diloco.every=50", "--plan.diloco.lr=1", "--plan.diloco.wire=int8"]
    config = read_config("train", [str(QUICKSTART), *flags])
    assert config.build_plan().data == ax.DiLoCo(every=50, lr=1.0, wire="int8")
    assert read_config("train", [str(QUICKSTART)]).build_plan().data == ax.Replicate()
