"""Our FSDP step against JAX peers on the same machine: plain `jax.jit` with auto-sharding, and MaxText; 8 simulated devices.

Run: python benchmarks/peers/peers.py --maxtext-python PATH (a Python with `pip install maxtext`; without it MaxText is left
out)
Shows: for one Llama-like model (float32, layers in one loop, AdamW, a sequence per device) in fresh processes that take turns:
the median step, seconds to lower and compile, temporaries, FLOPs and bytes moved of the compiled program, and ratios with 95%
intervals. Plain jit recomputes nothing, and neither does our side beside it. MaxText 0.2.5 puts `jax.checkpoint` around every
layer of its loop, with `remat_policy=none` too, so the side beside it recomputes its layers. Bars: 1.0 of MaxText's; of plain
jit 1.02 in time, 1.0 in temporaries and bytes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import numpy as np
from paired import machine, ratio, table

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 2048,
    "num_layers": 8,
    "hidden_size": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_hidden_size": 704,
}
SIZES |= {"max_length": 256, "scan_layers": True}
STEP = re.compile(r"completed step: (\d+), seconds: ([\d.]+).*?loss: ([\d.]+)")
MEMORY = re.compile(r"Temp size: ([\d.]+) (\w+)|temp_size_in_bytes=(\d+)")
WARMUP = 2


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maxtext-python", help="the Python that has MaxText")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4, help="fresh processes of every side")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a process, after 2 more")
    return parser.parse_args()


def ours(way: str, options) -> dict:
    """One process of peers_side.py."""
    steps = options.steps + WARMUP
    words = [way, "--sizes", json.dumps(SIZES), "--devices", str(options.devices), "--steps", str(steps)]
    done = subprocess.run([sys.executable, str(HERE / "peers_side.py"), *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{way}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def maxtext(options) -> dict:
    """One process of MaxText's own trainer, read from what it logs."""
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "run_name": "peer", "base_output_directory": folder, "hardware": "cpu", "dataset_type": "synthetic",
            "enable_checkpointing": False, "steps": options.steps + WARMUP, "decoder_block": "llama2",
            "base_num_decoder_layers": SIZES["num_layers"], "base_emb_dim": SIZES["hidden_size"],
            "base_num_query_heads": SIZES["num_heads"], "base_num_kv_heads": SIZES["num_kv_heads"],
            "head_dim": SIZES["hidden_size"] // SIZES["num_heads"], "base_mlp_dim": SIZES["mlp_hidden_size"],
            "vocab_size": SIZES["vocab_size"], "max_target_length": SIZES["max_length"], "per_device_batch_size": 1,
            "ici_fsdp_parallelism": options.devices, "attention": "dot_product", "dtype": "float32", "weight_dtype": "float32",
            "scan_layers": True, "remat_policy": "full", "gradient_clipping_threshold": 0, "opt_type": "adamw",
            "learning_rate": 1e-3, "skip_jax_distributed_system": True, "enable_goodput_recording": False, "jax_cache_dir": "",
        }  # fmt: skip
        words = [f"{name}={value}" for name, value in given.items()]
        flags = f"--xla_force_host_platform_device_count={options.devices}"
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE"}
        command = [options.maxtext_python, str(HERE / "peers_maxtext.py"), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    said = done.stdout + done.stderr
    steps = STEP.findall(said)
    if done.returncode or len(steps) < options.steps:
        raise RuntimeError(f"MaxText: {said[-3000:]}")
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    return {
        **found,
        "step_s": [float(seconds) for _, seconds, _ in steps[WARMUP:]],
        "losses": [float(x[2]) for x in steps],
    }


def main():
    options = parse()
    sides = {"ours": lambda: ours("ours", options), "plain jit": lambda: ours("jit", options)}
    beside = {"plain jit": "ours"}
    if options.maxtext_python:
        sides |= {"ours, recomputed": lambda: ours("recomputed", options), "MaxText": lambda: maxtext(options)}
        beside["MaxText"] = "ours, recomputed"
    rng, found = np.random.default_rng(0), {name: [] for name in sides}
    for turn in range(options.rounds):
        for name in rng.permutation(list(sides)):
            found[name].append(sides[name]())
            print(f"round {turn}, {name}: {1e3 * np.median(found[name][-1]['step_s']):.0f} ms", flush=True)
    print(machine("jax", "flax", "optax") + f", {options.devices} simulated devices")
    np.testing.assert_allclose(found["ours"][0]["losses"], found["plain jit"][0]["losses"], rtol=1e-4)
    print(
        "\n| side | temporaries MB | arguments MB | bytes moved MB | MFLOP | lower and compile s |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    for name, runs in found.items():
        sizes = [f"{runs[0][key] / 1e6:.2f}" for key in ("temporaries", "arguments", "moved", "flops")]
        print(f"| {name} | {' | '.join(sizes)} | {np.median([run['compile_s'] for run in runs]):.1f} |")
    times = {name: [float(np.median(run["step_s"])) for run in runs] for name, runs in found.items()}
    for name, own in beside.items():
        print("\n" + table(times, name))
        print(f"time of {own} / {name}: {ratio(times[own], times[name])}")


if __name__ == "__main__":
    main()
