"""Every capability that fits one device, once on a GPU and once on CPU, and what differs.

    python benchmarks/truth/gpu_truth.py                   # a few minutes; needs jax with CUDA
    python benchmarks/truth/gpu_truth.py --against cpu     # CPU against CPU, to try the script anywhere

Two processes, one on each platform, run the checks below from the same seeds at the same time, and print their numbers; a line
for each check says the largest relative difference and the bar. What one platform cannot do has its reason there. Exit status 1
where something differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
BARS = {"bf16": 2e-2, "float16": 1e-2}
USUAL = 2e-4  # float32
EXACT = ("memory_predicted", "generated", "collectives", "checkpoint")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="cuda", help="the platform that is held against CPU")
    parser.add_argument("--on", help=argparse.SUPPRESS)  # what a process of its own runs
    parser.add_argument(
        "--only", default="", help="checks, with commas between them; a semicolon stands for one in a name"
    )
    options = parser.parse_args()
    if options.on:
        return checks([each.replace(";", ",") for each in options.only.split(",") if each])
    found = {}
    runs = {on: started(platform, on, options.only) for on, platform in (("cpu", "cpu"), ("other", options.against))}
    for on, run in runs.items():
        said, errors = run.communicate()
        found[on] = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        if run.returncode:
            print(f"{on} ended with status {run.returncode}: {errors[-2000:]}")
    return compared(*({each["name"]: each for each in found[on]} for on in ("cpu", "other")))


def started(platform: str, on: str, only: str):
    environment = {**os.environ, "JAX_PLATFORMS": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, "--on", on, "--only", only]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def compared(cpu: dict, other: dict) -> int:
    """A line for each check; 1 where something differs."""
    wrong = 0
    for name in {**cpu, **other}:
        a, b = cpu.get(name, {"error": "not reached"}), other.get(name, {"error": "not reached"})
        if "error" in a or "error" in b:
            wrong += 1
            print(f"{name:28s} cpu: {a.get('error', 'well')}; other: {b.get('error', 'well')}")
            continue
        bar = 0.0 if name in EXACT else next((bar for word, bar in BARS.items() if word in name), USUAL)
        gaps = [abs(x - y) / max(abs(x), 1e-6) for x, y in zip(a["numbers"], b["numbers"], strict=True)]
        most = max(gaps, default=0.0)
        wrong += (failed := not most <= bar)
        more = f"  {b['said']}" if b.get("said") else ""
        print(
            f"{name:28s} {'DIFFERS' if failed else 'equal':8s} {most:.1e} (bar {bar:.0e}) {b['seconds']:5.1f} s{more}"
        )
    print(f"{wrong} of {len({**cpu, **other})} differ")
    return int(wrong > 0)


def checks(only: list[str]) -> int:
    """Run them all, a line of JSON for each."""
    for name, check in table().items():
        if only and name not in only:
            continue
        began = time.perf_counter()
        try:
            numbers, said = check()
            line = {"numbers": [float(x) for x in numbers], "said": said}
        except Exception as error:
            line = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps({"name": name, **line, "seconds": time.perf_counter() - began}), flush=True)
    return 0


def table():
    import dataclasses

    import jax
    import numpy as np
    import optax
    from flax import nnx

    sys.path.insert(0, str(HERE.parent))  # what all folders share
    from small_gpt import FlaxGPT, flax_loss

    import axonml_jax as ax
    from axonml_jax.models.config import ExpertsConfig, TransformerConfig
    from axonml_jax.models.transformer import Transformer

    sizes = TransformerConfig(
        vocab_size=256, num_layers=2, hidden_size=128, num_heads=4, max_length=128, mlp_hidden_size=512
    )
    tokens = np.random.default_rng(0).integers(0, 256, (8, 129)).astype(np.int32)
    batch = {"x": tokens[:, :-1], "y": tokens[:, 1:]}

    def loss_fn(model, batch):
        return ax.WeightedMean(*model.loss(batch["x"], batch["y"]))

    def model_of(**options):
        return Transformer(dataclasses.replace(sizes, **options), rngs=nnx.Rngs(0))

    def trained(make, plan, axes=None, steps=3, tx=None):
        mesh = ax.make_mesh(**(axes or {"data": 1}))
        trainer = ax.parallelize(make, mesh, plan).trainer(tx or optax.adamw(1e-3), loss_fn)
        return [np.ravel(trainer.step(batch)["loss"])[0] for _ in range(steps)], trainer

    def plan_of(axes=None, model=None, **options):
        return lambda: (trained(model() if model else model_of(), ax.Plan(**options), axes)[0], "")

    def in_bf16(**options):
        return lambda: (trained(model_of(dtype="bfloat16", **options), ax.Plan(precision="bf16"))[0], "")

    def of_others(kernels):
        theirs = {"tokens": batch["x"], "targets": batch["y"]}
        shape = dataclasses.replace(sizes, dtype="bfloat16")
        model = ax.DDP(FlaxGPT(shape, nnx.Rngs(0)), ax.make_mesh(data=1), kernels=kernels)
        trainer = model.trainer(optax.adamw(1e-3), flax_loss)
        return [np.ravel(trainer.step(theirs)["loss"])[0] for _ in range(3)], ""

    def float16():
        found, trainer = trained(model_of(dtype="float16"), ax.Plan(precision="float16"), steps=12)
        return found, f"state {sorted(trainer.state.extras)}"

    def generated():
        model = ax.DDP(model_of(), ax.make_mesh(data=1))
        found = ax.generate(model, tokens[:2, :8], 24, jax.random.key(0), temperature=0.0)
        return np.asarray(found).ravel(), "32 tokens, greedily, with a cache"

    def collectives():
        world = ax.init()
        group = world.default_group()  # eagerly, in this process alone
        mine = np.arange(6, dtype=np.float32)
        eager = [ax.all_reduce(mine, group).sum(), ax.all_gather(mine, group).sum(), ax.broadcast(mine, group, 0)[5]]
        along = ax.ProcessGroup(ax.make_mesh(data=1), axes=("data",))
        inside = ax.spmd(lambda x: ax.reduce_scatter(x, along) + ax.all_reduce_max(x, along), along)(mine[None])
        return [*eager, np.asarray(inside).sum(), ax.all_gather_object(3, group)[0]], ""

    def memory_stats():
        fsdp = ax.FSDP(model_of(), ax.make_mesh(fsdp=1))
        trainer = fsdp.trainer(optax.adamw(1e-3), loss_fn)
        loss = trainer.step(batch)["loss"]
        return [loss], str(fsdp.memory_stats())[:200]

    def memory_predicted():
        _, trainer = trained(model_of(dtype="bfloat16"), ax.Plan(precision="bf16"), steps=1)
        planned = trainer.trace(batch).lower().compile().memory_analysis()
        trainer.step(batch)
        measured = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        shape = dataclasses.replace(sizes, dtype="bfloat16")
        mesh = {"data": 1}
        told = ax.explain(ax.Plan(precision="bf16"), model=shape, global_batch=8, mesh=mesh, platform="cuda").memory
        words = f"predicted {told.temporaries / 2**20:.1f} MiB of temporaries and {told.arguments / 2**20:.1f} of arguments, "
        words += (
            f"planned by XLA {planned.temp_size_in_bytes / 2**20:.1f} and {planned.argument_size_in_bytes / 2**20:.1f}"
        )
        return [], words + ("" if measured is None else f", the most so far in this process {measured / 2**20:.1f}")

    def checkpoint():
        with tempfile.TemporaryDirectory() as folder:
            _, trainer = trained(model_of(), ax.Plan(), {"fsdp": 1}, steps=2)
            ax.save(folder + "/one", trainer.state)
            after = trainer.step(batch)["loss"]
            _, again = trained(model_of(), ax.Plan(), {"fsdp": 1}, steps=0)
            again.state = ax.restore(folder + "/one", again.state)
            return [float(again.step(batch)["loss"] - after)], "a step after restoring less the same step before"

    def lora(base):
        def run():
            model = ax.lora(
                model_of(dtype="bfloat16"), rank=4, alpha=8, targets="kernel$", **({"base": base} if base else {})
            )
            return trained(model, ax.Plan(precision="bf16"))[0], ""

        return run

    def watched():
        found, said = [], []
        _, trainer = trained(model_of(), ax.Plan(), steps=0)
        with ax.Watchdog(600, warning=60) as watchdog:
            for step in range(3):
                metrics = trainer.step(batch)
                watchdog.began(step, metrics["loss"])
                found.append(metrics["loss"])
        return found, "".join(said)

    def command_line():
        config = str(HERE.parents[1] / "configs" / "quickstart.yaml")
        if not Path(config).exists():
            raise FileNotFoundError(f"{config}: run this from a checkout")
        with tempfile.TemporaryDirectory() as folder:

            def run(*words):
                command = [sys.executable, "-m", "axonml_jax", *words]
                done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
                if done.returncode:
                    raise RuntimeError(f"{words[0]}: status {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
                return done.stdout

            own = ["--devices.simulated", "null", "--output.dir", folder + "/run"]
            run("train", config, "--train.steps", "8", "--train.eval_every", "4", *own)
            losses = [
                json.loads(line)
                for line in (Path(folder) / "run" / "quickstart" / "metrics.jsonl").read_text().splitlines()
            ]
            run("eval", folder + "/run/quickstart")
            said = run("generate", folder + "/run/quickstart", "--prompt", "def ", "--length", "16")
            return [line["loss"] for line in losses if "loss" in line][
                :3
            ], f"train, eval, generate: {said.strip()[-40:]!r}"

    experts = ExpertsConfig(num_experts=4)
    return {
        "DDP": plan_of(),
        "FSDP": plan_of({"fsdp": 1}),
        "FSDP, recomputed": plan_of({"fsdp": 1}, remat="full"),
        "one loop": plan_of({"fsdp": 1}, model=lambda: model_of(scan_layers=True)),
        "accumulated": plan_of(accumulate=2),
        "context": plan_of({"context": 1, "data": 1}),
        "tensor": plan_of({"tensor": 1, "data": 1}),
        "experts": plan_of({"expert": 1, "data": 1}, model=lambda: model_of(experts=experts)),
        "window": plan_of(model=lambda: model_of(window=32)),
        "bf16": in_bf16(),
        "bf16 without kernels": lambda: (
            trained(model_of(dtype="bfloat16"), ax.Plan(precision="bf16", kernels="xla"))[0],
            "",
        ),
        "bf16, Flax's modules": lambda: of_others("auto"),
        "bf16, Flax's modules plainly": lambda: of_others("xla"),
        "bf16, in chunks": in_bf16(loss_chunk=64),
        "bf16, Llama": in_bf16(norm="rmsnorm", activation="swiglu", position="rotary", use_bias=False, num_kv_heads=2),
        "float16": float16,
        "fp8 (bf16)": lambda: (trained(model_of(dtype="bfloat16"), ax.Plan(precision="fp8"))[0], ""),
        "offloaded optimizer": plan_of({"fsdp": 1}, offload="optimizer_states"),
        "offloaded, all": plan_of({"fsdp": 1}, offload="full"),
        "DiLoCo": plan_of(data=ax.DiLoCo(every=2)),
        "LoRA (bf16)": lora(None),
        "LoRA on int8 (bf16)": lora("int8"),
        "generated": generated,
        "collectives": collectives,
        "checkpoint": checkpoint,
        "memory_stats": memory_stats,
        "memory_predicted": memory_predicted,
        "watched": watched,
        "command_line": command_line,
    }


if __name__ == "__main__":
    sys.exit(main())
