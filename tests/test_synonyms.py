"""What others call our names is taken where it means one thing, in Python and configurations alike, and hinted at elsewhere."""

from pathlib import Path

import jax
import pytest

import axonml_jax as ax
from axonml_jax.cli.flags import plan_parser
from axonml_jax.config.config import read_config
from axonml_jax.models.config import TransformerConfig
from axonml_jax.pipeline.schedules import Pipelined
from axonml_jax.planner.hardware import hardware
from axonml_jax.strategies.replicate import Replicate

QUICKSTART = str(Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml")

SAME = {
    ("precision", "bf16"): ("bfloat16", "BF16", "bf16-mixed", "bf16_mixed"),
    ("precision", "float32"): ("fp32", "f32", "FLOAT32"),
    ("precision", "fp16"): ("float16", "half"),
    ("sharding_strategy", "full_shard"): ("FULL_SHARD", "ShardingStrategy.FULL_SHARD", "full-shard", "zero3", "ZeRO-3"),
    ("sharding_strategy", "shard_grad_op"): ("zero2", "SHARD_GRAD_OP"),
    ("sharding_strategy", "shard_optimizer"): ("zero1", "zero_1"),
    ("sharding_strategy", "hybrid_shard"): ("HYBRID_SHARD", "hsdp"),
    ("sync_strategy", "no_sync"): ("NO_SYNC", "GradSyncStrategy.NO_SYNC", "no-sync"),
    ("offload", "optimizer_states"): ("OPTIMIZER_STATES", "CPUOffload.OPTIMIZER_STATES"),
}
CASES = [(*ours, other) for ours, others in SAME.items() for other in others]

IN_PYTHON = {
    "precision": lambda name: ax.Precision.of(name),
    "sharding_strategy": lambda name: ax.ShardingStrategy(name),
    "sync_strategy": lambda name: Replicate(sync_strategy=name),
    "offload": lambda name: ax.Plan(offload=name),
}


@pytest.mark.parametrize(("setting", "ours", "other"), CASES)
def test_a_choice_is_taken_by_any_of_its_names(setting, ours, other, tmp_path):
    assert IN_PYTHON[setting](other) == IN_PYTHON[setting](ours)
    sharded = ["--mesh.data", "2", "--mesh.fsdp", "4"] if setting in ("sharding_strategy", "offload") else []
    config = read_config("train", [QUICKSTART, f"--plan.{setting}={other}", *sharded])
    assert getattr(config.plan, setting) == ours
    path = tmp_path / "run.yaml"
    path.write_text(Path(QUICKSTART).read_text() + "\npipeline: {}\ncheckpoint: {}\nresume: null\n")
    text = path.read_text().replace("sync_strategy: overlapped", f"{setting}: {other}")
    path.write_text(text)
    assert getattr(read_config("train", [str(path), *sharded]).plan, setting) == ours


@pytest.mark.parametrize(("other", "ours"), [("bf16", "bfloat16"), ("fp16", "float16"), ("FP32", "float32")])
def test_a_dtype_is_taken_by_any_of_its_names(other, ours):
    assert ax.Precision(compute=other) == ax.Precision(compute=ours)
    assert Replicate(comm_dtype=other).comm_dtype == ours
    sizes = {"vocab_size": 8, "num_layers": 1, "hidden_size": 8, "num_heads": 1, "max_length": 8}
    assert TransformerConfig(**sizes, dtype=other).dtype == ours


@pytest.mark.parametrize(
    ("other", "ours"),
    [("ONE_F_ONE_B", "1f1b"), ("1F1B", "1f1b"), ("Interleaved1F1B", "interleaved"), ("zero_bubble", "zero-bubble")],
)
def test_a_schedule_is_taken_by_any_of_its_names(other, ours):
    chunks = 2 if ours == "interleaved" else 1
    assert Pipelined(schedule=other, chunks=chunks) == Pipelined(schedule=ours, chunks=chunks)
    piped = ["--mesh.pipe", "2", "--mesh.data", "4", "--model.num_layers", "4", "--pipeline.microbatches", "2"]
    flags = [QUICKSTART, *piped, f"--pipeline.chunks={chunks}", f"--pipeline.schedule={other}"]
    assert read_config("train", flags).pipeline.schedule == ours


def test_axes_are_taken_by_the_names_of_the_trade():
    mesh = ax.make_mesh(dp=4, tp=2)
    assert dict(mesh.shape) == {"data": 4, "tensor": 2}
    assert (
        dict(ax.make_mesh(dp=2, cp=4).shape)
        == dict(ax.make_mesh(data=2, sequence=4).shape)
        == {"data": 2, "context": 4}
    )
    assert ax.ProcessGroup(mesh, "tp").axes == ("tensor",)
    chosen = plan_parser().parse_args(["gpt2-small", "--devices", "8", "--axes", "dp", "tp", "--precision", "bfloat16"])
    assert chosen.axes == ["data", "tensor"] and chosen.precision == "bf16"
    assert hardware("H100") is hardware("h100") and hardware("trillium") is hardware("v6e")


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"sp": 2}, "'sp' (sequence parallelism lies along 'tensor'"),
        ({"tensr": 2}, "'tensr' (did you mean 'tensor'?)"),
        ({"dp": 4, "data": 2}, "mesh axes ['dp', 'data'] are names of one axis, 'data'"),
    ],
)
def test_what_is_no_axis_is_said(axes, words):
    with pytest.raises(ValueError) as caught:
        ax.make_mesh(**axes, devices=jax.devices())
    assert words in str(caught.value)


def test_what_is_none_of_the_choices_is_refused_by_all():
    for setting, make in IN_PYTHON.items():
        with pytest.raises(ValueError, match="nothing"):
            make("nothing")
        with pytest.raises(ValueError, match=f"plan.{setting}=nothing: must be one of"):
            read_config("train", [QUICKSTART, f"--plan.{setting}=nothing"])
