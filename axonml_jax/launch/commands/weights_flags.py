"""The flags of `axonml-jax import` and `axonml-jax export`."""

import argparse
from pathlib import Path

from axonml_jax.launch.config.memory_size import memory_size
from axonml_jax.launch.config.own_flags import add_imports

DTYPES = ("float32", "bfloat16", "float16")


def import_parser() -> argparse.ArgumentParser:
    """The parser of `import`."""
    parser = argparse.ArgumentParser(
        prog="axonml-jax import",
        description="Make a folder to train from of a model that Hugging Face's save_pretrained wrote. Nothing is downloaded.",
        epilog="axonml-jax import Llama-3.2-1B runs/llama && axonml-jax train runs/llama/config.yaml",
    )
    parser.add_argument("source", type=Path, metavar="HF_FOLDER", help="with config.json and safetensors files")
    parser.add_argument("target", type=Path, metavar="RUN_FOLDER", help="new: gets config.yaml and weights/")
    return parser


def export_parser() -> argparse.ArgumentParser:
    """The parser of `export`."""
    parser = argparse.ArgumentParser(
        prog="axonml-jax export",
        description="Write the model of a checkpoint as Hugging Face's from_pretrained reads it.",
        epilog="axonml-jax export runs/llama-2 Llama-mine --dtype bfloat16",
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="CHECKPOINT",
        help="one of a run of axonml-jax train, or the run's folder: its newest",
    )
    parser.add_argument("target", type=Path, metavar="HF_FOLDER", help="new: gets config.json and safetensors files")
    add_imports(parser)
    parser.add_argument("--ema", action="store_true", help="write the moving average of the parameters (ema.decay)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the arrays (default: the model's)")
    parser.add_argument(
        "--shard-size", type=memory_size, default=5e9, metavar="SIZE", help="of a file at most (default: 5GB)"
    )
    return parser
