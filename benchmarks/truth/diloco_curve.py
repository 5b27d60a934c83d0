"""Loss curves of DiLoCo beside those of data parallelism on the quickstart's text, at equal steps, with the bytes of a step.

    python benchmarks/truth/diloco_curve.py --steps 600 --picture diloco.svg

Every row is a run of `axonml-jax train configs/quickstart.yaml` on simulated devices with other keys of the section plan. It
prints a table in Markdown: the validation loss on the way and at the end, and the bytes that a rank sends per step on average,
of parameters or their gradients, as the ledger counts them.
"""

import argparse
import contextlib
import io
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLANS = {
    "DDP": {},
    "DiLoCo, H = 10": {"every": 10},
    "DiLoCo, H = 50": {"every": 50},
    "DiLoCo, H = 50, bf16": {"every": 50, "wire": "bf16"},
    "DiLoCo, H = 50, int8": {"every": 50, "wire": "int8"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="of every run; a multiple of 50")
    parser.add_argument("--replicas", type=int, default=4, help="simulated devices")
    parser.add_argument("--picture", type=Path, help="where to draw the curves")
    options = parser.parse_args()
    curves, bytes_of = {}, {}
    for name, diloco in PLANS.items():
        curves[name], bytes_of[name] = run(options.steps, options.replicas, diloco)
        print(f"{name}: {curves[name][options.steps]:.3f}", flush=True)
    shown = [step for step in sorted(curves["DDP"]) if step * 3 % options.steps == 0]
    print(f"\n| plan | {' | '.join(f'loss after {step}' for step in shown)} | bytes per rank and step | of DDP's |")
    print("| --- " * (len(shown) + 3) + "|")
    for name, curve in curves.items():
        losses = " | ".join(f"{curve[step]:.3f}" for step in shown)
        print(f"| {name} | {losses} | {bytes_of[name]:,.0f} | {bytes_of[name] / bytes_of['DDP']:.2%} |")
    if options.picture:
        draw(curves, options.picture)
    assert all(curve[options.steps] < 2.6 for curve in curves.values()), "a run has not learned"


def run(steps: int, replicas: int, diloco: dict) -> tuple[dict[int, float], float]:
    """(validation loss by step, bytes per rank and step)."""
    from axonml_jax.cli.plan import price
    from axonml_jax.cli.records import read_records
    from axonml_jax.cli.run import set_up_run
    from axonml_jax.cli.train import train
    from axonml_jax.config.config import read_config

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        keys = {"devices.simulated": replicas, "train.steps": steps, "train.eval_every": max(50, steps // 6)}
        keys |= {"output.dir": folder, "sample.count": 0, "output.plot": "false", "train.eval_batches": 25}
        keys |= {"checkpoint.every": "null"} | {f"plan.diloco.{name}": value for name, value in diloco.items()}
        flags = [f"--{key}={value}" for key, value in keys.items()]
        config = read_config("train", [str(ROOT / "configs" / "quickstart.yaml"), *flags])
        assert train(config) == 0
        [metrics] = Path(folder).glob("*/metrics.jsonl")
        losses = {
            each.step: each.metrics["valid_loss"] for each in read_records(metrics) if "valid_loss" in each.metrics
        }
        sent = price(config, set_up_run(config)).bytes_by_label["gradients"]
    return losses, float(sent)


def draw(curves: dict[str, dict[int, float]], path: Path) -> None:
    """The validation losses of all runs."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), label=name)
    axes.set(xlabel="steps", ylabel="validation loss, nats per byte")
    axes.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
