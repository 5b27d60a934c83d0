"""One GPU, one command, five minutes: GPT-2 small in bfloat16 against `torch.compile`, eight layers of Llama 3 8B, flags.

Run: python benchmarks/peers/gpu_speed.py --output gpu.json (jax with CUDA, flax, optax; PyTorch too where it is to be compared)
  --torch-python PATH: the Python that has torch, default this one; --minutes 5; --tiny tries the script on any machine
Shows: tokens/s, MFU and memory of a training step of GPT-2 (12 layers unrolled, cuDNN's attention, vocabulary padded to
50,304, AdamW, all logits), with and without this library's kernels, and of PyTorch's from the same weights and batch; the slice
of Llama in bf16 and fp8; the times of GPT-2's kernels and its program (gpu.tsv, gpu.hlo.txt); where minutes are left the step
written by hand in JAX, the same model in Flax's own modules, logits in chunks, flags of XLA, batches of other sizes. Every
configuration runs in a process of its own, the main ones several times in turns, and is in the file as soon as it ends. What
was not measured has its reason there.
Bars: 1.1 times `torch.compile`, MFU 50%, of the slice 60%, fp8 1.25 times bf16.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share


HERE = Path(__file__).parent
LEARNING_RATE = 1e-3  # small_gpt.py's
CHUNK = 16_768  # a third of the padded vocabulary, in lanes of 128
FLAGS = {
    "latency hiding": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "no command buffers": "--xla_gpu_enable_command_buffer=",
    "no Triton products": "--xla_gpu_enable_triton_gemm=false",
    "exhaustive tiling": "--xla_gpu_exhaustive_tiling_search=true",
}
PUBLISHED = {
    "GPT-2 124M, one GPU, tokens/s": "JAX 130,000 and PyTorch 150,000 in one engineer's comparison",
    "Llama 3 8B, tokens/s per H100": "torchtitan 6,667 (8 GPUs, FSDP, torch.compile)",
}
LLAMA = {"layers": 8, "length": 8192, "rows": 2}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="the file of results")
    parser.add_argument("--torch-python", default=sys.executable, help="the Python that has torch")
    parser.add_argument("--minutes", type=float, default=5, help="nothing begins that might end later")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each of the main sides, in turns")
    parser.add_argument("--tiny", action="store_true", help="a very small model, to try the script anywhere")
    return parser.parse_args()


class Session:
    """Measurements in processes of their own, written down one by one until the time is over."""

    def __init__(self, options):
        self.options, self.end = options, time.monotonic() + 60 * options.minutes
        self.slowest = 0.0
        self.found: dict = {"tiny": options.tiny, "published": PUBLISHED, "ratio_to_torch": None, "best_mfu": None}
        self.found |= {part: {} for part in ("sides", "llama3_8b", "profile", "ways", "flags", "rows")}

    def write(self) -> None:
        """The file, whole or as before."""
        part = self.options.output.with_suffix(".part")
        part.write_text(json.dumps(self.found, indent=1) + "\n")
        os.replace(part, self.options.output)

    def measure(self, command: list[str], flags: str = "") -> dict:
        """What a process printed last, or `{"error": why not}`."""
        left = self.end - time.monotonic()
        if left < 1.2 * self.slowest + 5:
            return {"error": f"not measured: {left:.0f} s were left, and another took {self.slowest:.0f} s"}
        environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", "PYTHONPATH": str(HERE.parents[1])}
        if flags:
            environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags}".strip()
        began = time.monotonic()
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=max(left, 1))
        except subprocess.TimeoutExpired:
            return {"error": "not measured: the time was over"}
        self.slowest = max(self.slowest, time.monotonic() - began)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip() and "Traceback" not in line]
            unknown = [line for line in said if "nknown flag" in line]
            return {"error": (unknown or said or [f"exit code {done.returncode}"])[-1][:300]}
        return json.loads(done.stdout.strip().splitlines()[-1])

    def note(self, part: str, name: str, found: dict) -> None:
        """Write one measurement down and print it."""
        self.found[part][name] = found
        self.write()
        print(f"{part}: {name}: {said(found)}", flush=True)

    def ours(self, *words: str, flags: str = "", attention: str | None = None) -> dict:
        """One run of gpu_side.py."""
        tiny = ["--tiny", "--steps", "2", "--groups", "2", "--length", "64"] if self.options.tiny else []
        chosen = attention or ("auto" if self.options.tiny else "cudnn")
        return self.measure([sys.executable, str(HERE / "gpu_side.py"), "--attention", chosen, *tiny, *words], flags)


def sides(session: Session, file: str) -> dict:
    """The main sides, as calls."""
    options = session.options
    short = ["--steps", "2", "--groups", "2"] if options.tiny else []
    torch = [options.torch_python, str(HERE / "torch_gpu.py"), file, "--rate", str(LEARNING_RATE), *short]
    return {
        "ours": lambda: session.ours(),
        "ours, without kernels": lambda: session.ours("--kernels", "xla"),
        "torch.compile": lambda: session.measure(torch),
    }


def in_turns(session: Session, file: str) -> None:
    """Each of the main sides `rounds` times; a side that failed once is not tried again."""
    for turn in range(session.options.rounds):
        for name, run in sides(session, file).items():
            before = session.found["sides"].get(name)
            if before and "error" in before:
                continue
            found = joined(before, run())
            session.found["sides"][name] = found
            session.write()
            print(f"round {turn}: {name}: {said(found)}", flush=True)


def joined(before: dict | None, found: dict) -> dict:
    """One side's processes as one measurement: the medians are over the groups of all of them."""
    if before is None:
        return found
    if "error" in found:
        return before
    seconds = before["step_s"] + found["step_s"]
    faster = statistics.median(found["step_s"]) / statistics.median(seconds)
    rates = {name: found[name] * faster for name in ("tokens_per_s", "mfu") if found.get(name) is not None}
    return {**found, "step_s": seconds, **rates}


def said(found: dict) -> str:
    """A measurement in a line."""
    if "error" in found:
        return found["error"]
    mfu, peak = found.get("mfu"), found.get("peak_bytes")
    words = [
        f"{found['tokens_per_s']:,.0f} tokens/s",
        f"MFU {mfu:.1%}" if mfu else "",
        f"first step {found['first_step_s']:.0f} s",
    ]
    return ", ".join(each for each in [*words, f"{peak / 2**30:.1f} GiB" if peak else ""] if each)


def compare(session: Session) -> None:
    """The ratio of medians of the best of ours to PyTorch's, with its interval."""
    import numpy as np
    from paired import ratio

    measured = {name: found for name, found in session.found["sides"].items() if "error" not in found}
    for name, found in measured.items():
        np.testing.assert_allclose(found["losses"], measured["ours"]["losses"], rtol=2e-2, err_msg=name)  # bfloat16
    ours = [name for name in measured if name.startswith("ours")]
    if not ours:
        return
    best = min(ours, key=lambda name: float(np.median(measured[name]["step_s"])))
    session.found |= {"best": best, "best_mfu": measured[best]["mfu"]}
    if "torch.compile" in measured:
        count = min(len(measured[name]["step_s"]) for name in (best, "torch.compile"))
        found = ratio(*(measured[name]["step_s"][:count] for name in (best, "torch.compile")))
        session.found["ratio_to_torch"] = {"time": found.value, "low": found.low, "high": found.high}
        print(f"time of {best} / torch.compile: {found}; bar 1.1 times its speed: {1 / 1.1:.3f}")


def sweep(session: Session) -> None:
    """Other ways of the same step, what flags change, and batches of other sizes."""
    chunk = "128" if session.options.tiny else str(CHUNK)
    ways = {"hand-written JAX": ("--way", "hand-written"), "logits in chunks": ("--loss-chunk", chunk)}
    ways["Flax's own modules"] = ("--way", "flax")  # their norms and loss are found, and are kernels
    ways["Flax's own modules, without kernels"] = ("--way", "flax", "--kernels", "xla")
    for name, words in ways.items():
        session.note("ways", name, session.ours(*words))
    for name, flags in FLAGS.items():
        session.note("flags", name, {"flags": flags, **session.ours(flags=flags)})
    for rows in ("8", "32", "64"):
        session.note("rows", rows, session.ours("--rows", rows))


def slice_of_llama(session: Session) -> None:
    """The first eight layers of Llama 3 8B in bf16 and fp8."""
    if session.options.tiny:
        session.found["llama3_8b"]["error"] = "not measured: too large for a machine that tries the script"
        return
    words = [word for name, value in LLAMA.items() for word in (f"--{name}", str(value))]
    for precision in ("bf16", "fp8"):
        own = ("--precision", precision, "--steps", "3", "--groups", "4")
        session.note("llama3_8b", precision, session.ours(*words, *own))


def profile(session: Session) -> None:
    """Where the time of GPT-2's step goes, kernel by kernel."""
    file = str(session.options.output.with_suffix(".tsv"))
    session.note("profile", file, session.ours("--groups", "1", "--profile", file))


def main():
    session = Session(parse())
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "weights.npz")
        wrote = session.ours("--write", file)
        if "error" in wrote:
            raise SystemExit(f"the weights could not be written: {wrote['error']}")
        in_turns(session, file)
    compare(session)
    slice_of_llama(session)
    profile(session)
    sweep(session)
    session.write()
    print(f"written to {session.options.output}")


if __name__ == "__main__":
    main()
