"""MaxText's published steps beside the planner's prices of the same layouts, at the efficiency of a published dense step.

    python benchmarks/peers/published_mfu.py             # layouts that were run, and the planner's own plans for the same chips
    python benchmarks/peers/published_mfu.py --long      # sequences of 65,536 to 4,194,304 tokens
    python benchmarks/peers/published_mfu.py --no-plans
    python benchmarks/peers/published_mfu.py --gpu       # GPUs: two steps of ours, and others' published ones

Of the peak the planner's products reach an assumed share. A published dense step says which it was: the one at which the price
of its layout is the time that it took. At that share mixtures of experts and long sequences are priced. What a layout computes
again follows the policy that was published with it (`Run.again`).

Sources, in MaxText's and tpu-recipes' repositories: docs/reference/models/tiering.md (Llama 2 70B, and Mixtral on 256 chips),
end_to_end/tpu/mixtral/Run_Mixtral.md (on 64: 251.94 TFLOP/s), training/v5p/Mixtral-8X7B-Maxtext (36 sequences a chip),
training/ironwood/README.md (tokens per second and chip), training/v5p/Llama3.1-8B-LongContext-Maxtext (seconds a step; heads of
256, a variant of Llama 3.1 8B).
On GPUs: docs/performance.md; Grattafiori et al., The Llama 3 Herd of Models (2024), table 4; torchtitan's
benchmarks/llama3_h100_202412_torchtitan.md, whose H100s have memory of 2.4 TB/s and a limit of 500 W.
"""

import argparse
import math
from dataclasses import dataclass, field, replace
from typing import Any

import axonml_jax as ax
from axonml_jax.ledger.predict import Prediction, predict
from axonml_jax.models.config import TransformerConfig, preset
from axonml_jax.planner.hardware import HARDWARE, Assumptions, Hardware
from axonml_jax.planner.price import price

ASSUMED = Assumptions().efficiency
V5P = HARDWARE["v5p"]
# Google Cloud's page on TPU7x: a chip of two cores, links of 100 GB/s one way.
IRONWOOD = replace(
    V5P, name="tpu7x", flops=2307e12, memory=192e9, memory_bandwidth=7380e9, link=200e9, island=9216, sources={}
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published step in bf16, parameters sharded over all chips.

    Attributes:
      name: of the model and chips.
      model: its configuration.
      hardware: the chips.
      degrees: of the mesh.
      rows: sequences of a step.
      length: of a sequence.
      again: what the backward computes again: "full", all of a forward; "inner", the feed-forward part's products into its
        inner width; "inner, scores", and attention's; "all but scores".
      mfu: published, attention's masked scores counted; or
      tokens: per second and chip; or
      seconds: of a step.
    """

    name: str
    model: TransformerConfig
    hardware: Hardware = V5P
    degrees: dict[str, int] = field(hash=False)
    rows: int
    length: int
    again: str
    mfu: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def chips(self) -> int:
        return self.degrees.get("fsdp", 1) * self.degrees.get("context", 1)


def fsdp(name: str, model: TransformerConfig, chips: int, each: int, length: int, again: str, **told: Any) -> Run:
    """So many sequences on each of the chips."""
    return Run(name=name, model=model, degrees={"fsdp": chips}, rows=chips * each, length=length, again=again, **told)


LLAMA2_70B = replace(preset("llama3-70b"), vocab_size=32_000, max_length=4096)
DENSE = fsdp("Llama 2 70B, 512 v5p", LLAMA2_70B, 512, 4, 4096, "inner, scores", mfu=0.654)
MIXTURES = (
    fsdp("Mixtral 8x7B, 64 v5p", preset("mixtral-8x7b"), 64, 36, 4096, "full", mfu=0.5489),
    fsdp("Mixtral 8x7B, 256 v5p", preset("mixtral-8x7b"), 256, 36, 4096, "full", mfu=0.5256),
)
DENSE_7 = fsdp("Llama 3.1 70B, 64 tpu7x", preset("llama3-70b"), 64, 4, 8192, "inner", hardware=IRONWOOD, tokens=2686.98)
MIXTURES_7 = (
    fsdp("Qwen3-235B, 256 tpu7x", preset("qwen3-235b-a22b"), 256, 32, 4096, "full", hardware=IRONWOOD, tokens=4245.89),
)
WIDE_HEADS = replace(preset("llama3-8b"), num_heads=16, num_kv_heads=4, head_dim=256)
LONG = tuple(
    Run(
        name=f"{length:,}",
        model=replace(WIDE_HEADS, max_length=length),
        degrees={"fsdp": 64 // ranks, "context": ranks},
        rows=rows,
        length=length,
        again="all but scores",
        seconds=seconds,
    )
    for length, ranks, rows, seconds in (
        (65_536, 4, 32, 10.25),
        (262_144, 16, 8, 26.31),
        (1_048_576, 64, 2, 95.73),
        (2_097_152, 64, 2, 357.68),
        (4_194_304, 64, 2, 1373.73),
    )
)
ASKED = (("mixtral-8x7b", 64, 2304), ("qwen3-235b-a22b", 512, 4096), ("deepseek-v3", 2048, 16_384))
"""Models, v5p chips and sequences of 4,096 for which the planner's own plan is shown."""


def predicted(run: Run) -> Prediction:
    """What the run's step holds, sends and computes."""
    plan = ax.Plan(precision="bf16", remat="full")
    if "context" in run.degrees:
        plan = replace(plan, context=ax.Context(method="ring", shard=True))
    sizes: dict[str, Any] = {"global_batch": run.rows, "length": run.length, "platform": "tpu", "torus": 3}
    found = predict(plan, run.model, {"data": 1, **run.degrees}, **sizes)
    inner = 2 * run.model.num_layers * 2 * run.model.hidden_size * run.model.mlp_size
    again = {
        "full": found.recomputed_flops_per_token,
        "inner": inner,
        "inner, scores": inner + scores(run) // 3,
        "all but scores": found.recomputed_flops_per_token - scores(run) // 3,
    }[run.again]
    return replace(found, recomputed_flops_per_token=again, attention_again=run.again in ("full", "inner, scores"))


def scores(run: Run) -> int:
    """FLOPs per token of attention's scores, forward and backward, those that a mask hides among them."""
    return 6 * run.model.num_layers * run.model.attention_shape.pair_products * run.length


def mfu_at(run: Run, found: Prediction, efficiency: float) -> float:
    """The price's MFU at an efficiency."""
    return float(price(found, run.hardware, Assumptions(efficiency=efficiency)).mfu)


def published(run: Run, found: Prediction) -> float:
    """The published MFU; of tokens by the same count of FLOPs as the price."""
    return run.mfu or run.tokens * found.flops_per_token / run.hardware.flops


def calibrated(run: Run) -> float:
    """The efficiency at which the price is the published step."""
    found, low, high = predicted(run), 0.05, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if mfu_at(run, found, middle) < published(run, found) else (low, middle)
    return low


def compared(dense: Run, runs: tuple[Run, ...]) -> None:
    """Published mixtures at the efficiency of a dense model on the same chips."""
    efficiency = calibrated(dense)
    print(f"\n{dense.name}: its MFU asks for an efficiency of {efficiency:.3f}\n")
    print(
        f"| step | published MFU | predicted at {ASSUMED} | at {efficiency:.3f} | of the published |\n|{' --- |' * 5}"
    )
    for run in (dense, *runs):
        found = predicted(run)
        ours, told = mfu_at(run, found, efficiency), published(run, found)
        print(f"| {run.name} | {told:.1%} | {mfu_at(run, found, ASSUMED):.1%} | {ours:.1%} | {ours / told:.2f} |")


def long() -> None:
    """Long sequences: memory, and seconds as the planner takes them, by the kernel and by blocks that XLA computes."""
    efficiency = calibrated(DENSE)
    heads = f"s at {efficiency:.3f}, splash", "blocks"
    print(f"\n| positions, mesh | published s | GiB of a chip | {' | '.join(heads)} |\n|{' --- |' * 5}")
    for run in LONG:
        found = predicted(run)
        blocks = predicted(replace(run, model=replace(run.model, attention="blocks")))
        times = (price(each, run.hardware, Assumptions(efficiency=efficiency)).time for each in (found, blocks))
        mesh = " x ".join(f"{axis} {ranks}" for axis, ranks in run.degrees.items() if ranks > 1)
        held = found.memory.total / 2**30
        print(
            f"| {run.rows} x {run.name}, {mesh} | {run.seconds:,} | {held:.0f} | {' | '.join(f'{t:,.1f}' for t in times)} |"
        )


LLAMA3_405B = replace(
    preset("llama3-70b"),
    num_layers=128,
    hidden_size=16_384,
    mlp_hidden_size=53_248,
    num_heads=128,
    sequence_parallel=True,
    scan_layers=False,
)
"""Of 126 blocks; 128 divide over 16 stages of 8 chunks."""


def gpus() -> None:
    """Steps on GPUs: seconds as measured, as the planner has them where nobody measured, and by the rates of one step."""
    h100, h200 = HARDWARE["h100"], HARDWARE["h200"]
    slower = replace(h100, memory_bandwidth=2.4e12)
    gpt2, llama = replace(preset("gpt2-small"), vocab_size=50_304), preset("llama3-8b")
    kept, eighth = {"remat": "selective"}, replace(llama, num_layers=8)
    stages = lambda count: {"pipe": ax.Pipelined(schedule="interleaved", chunks=8, num_microbatches=count)}
    split, both = {"pipe": 16, "tensor": 8}, (2048, 8192)
    steps: tuple[tuple[str, Any, Hardware, dict, dict, tuple[int, int], float], ...] = (
        ("GPT-2 small, one H200 (ours)", gpt2, h200, {}, {}, (16, 1024), 0.0304),
        ("8 layers of Llama 3 8B, one H200 (ours)", eighth, h200, kept, {}, (2, 8192), 0.460),
        ("Llama 3 405B, 8,192 H100", LLAMA3_405B, h100, stages(32), {"data": 64, **split}, both, 430e12),
        ("Llama 3 405B, 16,384 H100", LLAMA3_405B, h100, stages(16), {"data": 128, **split}, both, 400e12),
        ("Llama 3.1 8B, 8 H100 of 500 W", llama, slower, kept, {"fsdp": 8}, (16, 8192), 16 * 8192 / 8 / 6667),
    )  # fmt: skip
    print(f"\n| step | measured s | at {ASSUMED} | by parts | of the measured |\n|{' --- |' * 5}")
    for name, model, hardware, plan, degrees, (rows, length), told in steps:
        sizes: dict[str, Any] = {"global_batch": rows, "length": length, "platform": "cuda"}
        found = predict(ax.Plan(precision="bf16", **plan), model, {"data": 1, **degrees}, **sizes)
        if told > 1e9:  # FLOP/s of a device
            told = found.tokens * found.flops_per_token / math.prod(degrees.values()) / told
        assumed, parts = (float(price(found, hardware, given).time) for given in (Assumptions(), None))
        print(f"| {name} | {told:.4g} | {assumed:.4g} | {parts:.4g} | {parts / told:.2f} |")


def plans() -> None:
    """The planner's own plans."""
    print(f"\n| model, v5p, sequences of 4,096 | efficiency | plan | ms a step | MFU | GiB |\n|{' --- |' * 6}")
    for name, chips, batch in ASKED:
        for share in (ASSUMED, calibrated(DENSE)):
            given: dict[str, Any] = {"num_devices": chips, "hardware": "v5p", "global_batch": batch, "length": 4096}
            best = ax.plan(preset(name), assumptions=Assumptions(efficiency=share), **given).best
            own = best.price
            row = f"{name}, {chips:,}, {batch:,}", f"{share:.3f}", f"{best.candidate}", f"{1e3 * own.time:,.0f}"
            print(f"| {' | '.join(row)} | {own.mfu:.1%} | {own.memory / 2**30:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-plans", action="store_true", help="leave out the planner's own plans")
    parser.add_argument("--long", action="store_true", help="long sequences alone")
    parser.add_argument("--gpu", action="store_true", help="GPUs alone")
    given = parser.parse_args()
    if given.long or given.gpu:
        return long() if given.long else gpus()
    compared(DENSE, MIXTURES)
    compared(DENSE_7, MIXTURES_7)
    if not given.no_plans:
        plans()


if __name__ == "__main__":
    main()
