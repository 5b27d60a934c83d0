"""The flags of `axonml-jax plan`."""

import argparse
from pathlib import Path

from axonml_jax.launch.config.memory_size import memory_size
from axonml_jax.launch.config.own_flags import add_imports
from axonml_jax.models.presets import PRESETS
from axonml_jax.planner.assumptions import Assumptions
from axonml_jax.planner.goodput.failure_rates import FAILURE_RATES, failure_rate
from axonml_jax.planner.goodput.save_advice import SaveAssumptions
from axonml_jax.planner.hardware import HARDWARE
from axonml_jax.planner.searched_axes import SEARCHED
from axonml_jax.synonyms import AXES as SYNONYMS
from axonml_jax.synonyms import meant

MEASURE = "measure"
"""The hardware that means the devices of this machine."""


def plan_parser() -> argparse.ArgumentParser:
    """The parser."""
    parser = argparse.ArgumentParser(
        prog="axonml-jax plan",
        description="Find the fastest plan that fits, on paper: no devices are needed.",
        epilog="axonml-jax plan llama3-8b --devices 512 --hardware v5p --batch 1024",
    )
    parser.add_argument("model", help=f"a configuration file, or {', '.join(PRESETS)}")
    parser.add_argument("--devices", type=int, required=True, metavar="N")
    names = ", ".join(HARDWARE)
    parser.add_argument(
        "--hardware", default="v5p", help=f"{names}, or {MEASURE}: this machine's devices (default: v5p)"
    )
    parser.add_argument("--batch", type=int, metavar="B", help="sequences per update (default: the configuration's)")
    parser.add_argument(
        "--length", type=int, metavar="S", help="of a sequence (default: the configuration's or the longest)"
    )
    precisions = ("float32", "bf16", "bf16-reduce", "bf16-reduce-float32", "fp16")
    parser.add_argument(
        "--precision", choices=precisions, type=lambda name: meant("precision", name, precisions),
        help="dtypes (default: the configuration's, or bf16)",
    )  # fmt: skip
    parser.add_argument("--max-memory", type=memory_size, metavar="SIZE", help="bytes of a device to use, as in 14GiB")
    named = lambda axis: SYNONYMS.get(axis.lower(), axis)
    parser.add_argument(
        "--axes", nargs="+", choices=SEARCHED, type=named, default=SEARCHED, help="mesh axes to take (default: all)"
    )
    parser.add_argument(
        "--remat", nargs="+", choices=["none", "selective", "full"], default=["none", "selective", "full"],
        help="kinds of recomputation to consider (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--as-written", action="store_true", help="take the configuration's own mesh and plan instead of searching"
    )
    parser.add_argument(
        "--offload", action="store_true", help="optimizer states may rest on the host if nothing fits else"
    )
    _add_assumptions(parser)
    _add_outputs(parser)
    add_imports(parser)
    return parser


def _add_assumptions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--efficiency",
        type=float,
        metavar="X",
        help=f"of the peak FLOP/s; as measured, or {Assumptions.efficiency}",
    )
    parser.add_argument(
        "--overlap", type=float, default=Assumptions.overlap, metavar="X", help="share of compute that hides traffic"
    )

    saves = SaveAssumptions()
    failing = parser.add_mutually_exclusive_group()
    failing.add_argument(
        "--failures-per-device-hour", type=_failures, default=saves.failures_per_device_hour, metavar="X",
        help=f"interruptions of a job, as a number or as published: {', '.join(FAILURE_RATES)} (default: llama3)",
    )  # fmt: skip
    failing.add_argument("--mtbf", type=float, metavar="HOURS", help="between two failures of the whole job, instead")
    parser.add_argument(
        "--checkpoint-bandwidth", type=memory_size, default=saves.checkpoint_bandwidth, metavar="SIZE",
        help=f"of a checkpoint per second and device (default: {saves.checkpoint_bandwidth / 1e6:.0f}MB)",
    )  # fmt: skip
    parser.add_argument(
        "--restart-seconds", type=float, default=saves.restart_seconds, metavar="S",
        help="from a failure until the job is back, but for reading its checkpoint (default: %(default)s)",
    )  # fmt: skip


def _failures(text: str) -> float:
    try:
        return failure_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--ledger", action="store_true", help="print the best plan's memory, traffic and timeline too")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the best plan's memory, traffic and timeline"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write a configuration that `axonml-jax train` runs")
    parser.add_argument(
        "--verify",
        metavar="TOPOLOGY",
        help="compile the step for TPU chips that need not be here, as v5p:8x8x8; cpu: for simulated devices",
    )
