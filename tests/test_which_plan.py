"""What the page "Which plan do I want?" says of memory, sending and axes, held to predictions from shapes."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import axonml_jax as ax
from axonml_jax.__main__ import main
from axonml_jax.mesh.axes import AXES
from axonml_jax.models.config import preset

PAGE = (Path(__file__).parents[1] / "docs" / "which-plan.md").read_text("utf-8")
NAMES = {"GPT-2": "gpt2-small", "GPT-2 XL": "gpt2-xl", "Llama 3 8B": "llama3-8b", "Llama 3 70B": "llama3-70b"}


def explained(name="llama3-8b", batch=8, length=1024, plan=None, **degrees):
    mesh = degrees or {"data": 1}
    model = replace(preset(name), scan_layers=False) if "pipe" in degrees else preset(name)
    return ax.explain(plan or ax.Plan(), model=model, mesh=mesh, global_batch=batch, length=length, platform="cuda")


def states(found):
    """Bytes of parameters, moments and gradients."""
    return found.memory.parameters + found.memory.optimizer + found.memory.gradients


def sent(found, label):
    return float(sum(flow.wire_bytes for flow in found.traffic if flow.label == label))


def test_memory_of_parameters_is_what_the_table_says():
    rows = re.findall(
        r"^\| ([\d.]+ (?:m|b)illion) \(([^)]+)\) \| ([\d.]+) (GB|TB) \| (none|\d+ GB) \|", PAGE, re.MULTILINE
    )
    assert [name for _, name, *_ in rows] == list(NAMES)
    for count, name, size, unit, fits in rows:
        found = explained(NAMES[name], batch=1)
        told, power = count.split()
        assert float(f"{found.params / {'million': 1e6, 'billion': 1e9}[power]:.2g}") == pytest.approx(
            float(told), rel=0.05
        )
        assert (
            states(found) == 16 * found.params and found.memory.parameters + found.memory.optimizer == 12 * found.params
        )
        held = states(found) / {"GB": 1e9, "TB": 1e12}[unit]
        assert held == pytest.approx(float(size), rel=0.03), name
        if fits == "none":
            assert states(found) > 80e9
        else:
            assert states(found) < 1e9 * int(fits.split()[0])


def test_bf16_leaves_these_bytes_and_microbatches_and_recomputation_make_activations_less():
    whole = explained()
    assert states(explained(plan=ax.Plan(precision="bf16"))) == states(whole)
    assert explained(plan=ax.Plan(accumulate=8)).memory.activations < whole.memory.activations / 7
    again = explained(plan=ax.Plan(remat="full"))
    assert again.memory.activations < whole.memory.activations / 4
    logits = 2 * 4096 * 128_256  # computed again, as words are taken some at a time
    assert again.recomputed_flops_per_token - logits == pytest.approx(again.flops_per_token / 3, rel=0.01)


def test_fsdp_divides_what_is_held_and_zero_1_and_2_split_less_and_gather_less():
    zero = {stage: explained(fsdp=8, plan=ax.Plan(fsdp=ax.Shard(stage=stage))) for stage in (1, 2, 3)}
    assert states(zero[3]) == pytest.approx(16e9, rel=0.01)  # "8 billion parameters on 8 devices: 16 GB of each"
    held = [each.memory.total for each in (zero[3], zero[2], zero[1], explained(plan=ax.Plan(), data=8))]
    assert held == sorted(held) and held[0] < held[1] and held[2] < held[3]
    assert sent(zero[3], "parameters") > sent(zero[2], "parameters") == sent(zero[1], "parameters")


def test_hybrid_sharding_gathers_within_a_machine_only():
    found = explained(batch=16, data=2, fsdp=8)
    assert {flow.axes for flow in found.traffic if flow.label == "parameters"} == {("fsdp",)}
    assert found.bytes_by_axes["data",] < found.bytes_by_axes["fsdp",]


def test_each_axis_does_what_the_table_adds_it_for():
    with pytest.raises(ValueError, match="1 sequences do not divide into 4 shards"):
        explained(batch=1, fsdp=4)
    one = explained(batch=1, tensor=4)  # several devices work on one sequence
    assert states(one) < states(explained(batch=1)) / 3.5
    assert sent(explained(fsdp=8, tensor=2), "parameters") == pytest.approx(
        sent(explained(fsdp=8), "parameters") / 2, rel=0.01
    )
    split = explained(batch=1, length=8192, context=8)
    assert split.memory.activations < explained(batch=1, length=8192).memory.activations / 6
    assert {flow.label for flow in split.traffic if flow.axes == ("context",)} >= {"attention", "gradients"}
    staged = explained(pipe=4, plan=ax.Plan(pipe=ax.Pipelined(num_microbatches=8)))
    crossing = {flow.label for flow in staged.traffic if flow.axes == ("pipe",)}
    assert {"activations", "cotangents"} <= crossing and not crossing & {"parameters", "gradients", "layers"}
    experts = explained("mixtral-8x7b", expert=8)
    assert states(experts) < states(explained("mixtral-8x7b", data=8)) / 6 and sent(experts, "experts") > 0
    offloaded = explained(fsdp=8, plan=ax.Plan(offload="optimizer_states"))
    assert offloaded.memory.host == offloaded.memory.optimizer > 0


def test_tensor_is_the_last_axis_of_a_mesh_and_pipe_and_data_the_first():
    assert AXES[-1] == "tensor" and AXES[:2] == ("data", "pipe")
    assert ax.MeshShape(fsdp=8, tensor=4).size == 32


def test_the_commands_of_the_page_answer(tmp_path, capsys):
    assert main(["plan", "llama2-7b", "--devices", "8", "--hardware", "h100", "--batch", "64"]) == 0
    assert "best: " in capsys.readouterr().out
    mine, planned = tmp_path / "mine.yaml", tmp_path / "planned.yaml"
    mine.write_text(
        "name: mine\ntrain: {global_batch_size: 64}\ndata: {length: 128}\n"
        "model: {vocab_size: 256, num_layers: 2, hidden_size: 192, num_heads: 3, max_length: 128}\n",
        "utf-8",
    )
    assert main(["plan", str(mine), "--devices", "8", "--hardware", "a100", "--write", str(planned)]) == 0
    assert planned.exists() and f"axonml-jax train {planned}" in capsys.readouterr().out
