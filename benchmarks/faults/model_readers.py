"""The same of documents around models and data: published configurations, tokenizers, records, variables of launchers."""

import contextlib
import json
import random
from pathlib import Path

import numpy as np
from input_readers import (
    NAMED,
    ROOT,
    Reader,
    checkpoint,
    configurations,
    index_of_files,
    listener,
    read_checkpoint,
    read_configuration,
    read_index,
    read_messages,
    read_safetensors,
    read_yaml,
    safetensors_file,
)
from mutations import TOKENS, as_json, of_bytes, of_values
from table_readers import parquet_files, read_parquet


def published(folder: Path):
    """Configurations of all families, and one model's weights."""
    from flax import nnx

    from axonml_jax.base import named_leaves
    from axonml_jax.models.config import PRESETS, TransformerConfig, preset
    from axonml_jax.models.families.known import family_of
    from axonml_jax.models.transformer import Transformer
    from axonml_jax.models.weights import write_pretrained

    config = TransformerConfig(
        vocab_size=11, num_layers=2, hidden_size=8, num_heads=2, max_length=6, mlp_hidden_size=12
    )
    shapes = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    named = named_leaves(nnx.to_pure_dict(nnx.state(shapes, nnx.Param)))
    write_pretrained(folder / "model", config, {name: np.zeros(leaf.shape, np.float32) for name, leaf in named.items()})
    others = []
    for name in PRESETS:
        with contextlib.suppress(ValueError):  # of a preset that is of no published family
            others.append(family_of(preset(name)).describe(preset(name)))
    return [json.loads((folder / "model" / "config.json").read_text())] * 3 + others


def read_published(folder: Path, prepared, draw: random.Random):
    from axonml_jax.models.weights import pretrained_config, read_pretrained

    described = draw.choice(prepared)
    text = of_bytes(as_json(described), draw)
    if draw.random() < 0.7:
        changed = of_values(described, draw, ("model_type", "rope_scaling", "num_hidden_layers", "num_experts"))
        if draw.random() < 0.3 and isinstance(changed, dict) and described.keys() & changed.keys():
            known = draw.choice(sorted(described.keys() & changed.keys()))
            changed[known] = draw.choice((None, True, "x", 0, -1, 1.5, 10**9, 2**31, 10**30, [], {}, float("nan")))
        with contextlib.suppress(ValueError, RecursionError):
            text = as_json(changed)
    (folder / "model" / "config.json").write_bytes(text)
    config = pretrained_config(folder / "model")
    assert config.num_params >= 0
    if config.num_layers < 100:
        read_pretrained(folder / "model")


def tokenizer(_: Path):
    """A small tokenizer's rules."""
    words = {"[UNK]": 0, "a": 1, "b": 2, "ab": 3, "##b": 4}
    special = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    pieces = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": words}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 0, "content": "[UNK]", **special}],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": pieces | {"max_input_chars_per_word": 100},
    }  # fmt: skip


def read_tokenizer(folder: Path, prepared, draw: random.Random):
    from axonml_jax.data.documents import load_tokenizer

    text = of_bytes(as_json(prepared), draw)
    if draw.random() < 0.7:
        with contextlib.suppress(ValueError, RecursionError):
            text = as_json(of_values(prepared, draw))
    (folder / "tokenizer.json").write_bytes(text)
    found = load_tokenizer(folder)
    assert found.vocab_size >= 0 and found.fingerprint


def lines(_: Path):
    return b"".join(as_json({"text": f"line {i}", "n": i, "more": [i, {"x": None}]}) + b"\n" for i in range(6))


def read_lines(folder: Path, prepared, draw: random.Random):
    from axonml_jax.data.sources import open_dataset

    (folder / "it.jsonl").write_bytes(of_bytes(prepared, draw))
    found = open_dataset(folder / "it.jsonl", fields=draw.choice((None, ["text"])))
    for number in range(len(found)):
        assert isinstance(found[number], dict)


def records(_: Path):
    return b"".join(as_json({"step": i, "loss": 1.0 / (1 + i), "wall_time": 0.5 * i}) + b"\n" for i in range(6))


def read_records_of(folder: Path, prepared, draw: random.Random):
    from axonml_jax.cli.records import read_records

    (folder / "metrics.jsonl").write_bytes(of_bytes(prepared, draw))
    for record in read_records(folder / "metrics.jsonl"):
        assert record.step + sum(record.metrics.values()) is not None


def owner(_: Path):
    from axonml_jax.checkpoint.ownership import Owner

    return json.loads(Owner.this_process().text())


def read_owner(_: Path, prepared, draw: random.Random):
    from axonml_jax.checkpoint.ownership import Owner

    text = of_bytes(as_json(prepared), draw).decode(errors="replace")
    if draw.random() < 0.7:
        with contextlib.suppress(ValueError, RecursionError):
            text = as_json(of_values(prepared, draw)).decode()
    found = Owner.parse(text)
    assert str(found) and found.lives() in (True, False, None)


TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}
SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77"}
VARIABLES = (
    TORCHRUN,
    {
        f"OMPI_COMM_WORLD_{name}": value
        for name, value in zip(("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"), "2112", strict=True)
    },
    SLURM
    | {"SLURM_STEP_NODELIST": "gpu[007-010,12],cpu1", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"},
    {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"},
)
NUMBERS = ("-1", "0", "1.5", "99999999999999999999", "9" * 5000, " 1", "\u00b2", "1(x99999999999)", "")


def read_variables(_: Path, prepared, draw: random.Random):
    from axonml_jax.mesh.init import describe_launch

    environ = dict(draw.choice(VARIABLES))
    for name in draw.sample(sorted(environ), draw.choice((1, 1, 2))):
        kind = draw.choice(("remove", "bytes", "token", "number"))
        if kind == "remove":
            del environ[name]
        elif kind == "bytes":
            environ[name] = of_bytes(environ[name].encode(), draw).decode(errors="replace")
        elif kind == "token":
            environ[name] = draw.choice(TOKENS).decode(errors="replace")
        else:
            environ[name] = draw.choice(NUMBERS)
    job = describe_launch(environ, None, None, None)
    assert job is None or 0 <= job.process_id < job.num_processes


def objects(_: Path):
    return {"a": [1, {"b": [None, "x"]}], "": 0}


def read_object(_: Path, prepared, draw: random.Random):
    from axonml_jax.collectives.eager import NO_PICKLE, decoded, encoded

    decoded(of_bytes(encoded(prepared, {}), draw), {NO_PICKLE: "1"})


def parsed_configurations(folder: Path):
    """The same, once one of them has been read, as that imports much."""
    from axonml_jax.config.config import read_config

    read_config("train", [str(ROOT / "configs" / "quickstart.yaml")])
    return configurations(folder)


def refusals() -> tuple[type[BaseException], ...]:
    """How the command line refuses a configuration."""
    from axonml_jax.config.config import ConfigError

    return (ConfigError,)


READERS = {
    "checkpoint manifests": Reader(16, checkpoint, read_checkpoint, says_where=True),
    "YAML": Reader(14, configurations, read_yaml),
    "configurations": Reader(6, parsed_configurations, read_configuration, refusals(), says_where=False),
    "messages of launchers and processes": Reader(14, listener, read_messages, ()),
    "safetensors files": Reader(16, safetensors_file, read_safetensors, says_where=True),
    "indices of safetensors files": Reader(7, index_of_files, read_index, says_where=True),
    "published models' configurations": Reader(13, published, read_published),
    "tokenizers": Reader(3, tokenizer, read_tokenizer),
    "JSON lines": Reader(3, lines, read_lines, says_where=True),
    "Parquet files": Reader(5, parquet_files, read_parquet, says_where=True),
    "records of runs": Reader(2, records, read_records_of, says_where=True),
    "owners of folders": Reader(2, owner, read_owner, ()),
    "variables of launchers": Reader(2, listener, read_variables),
    "objects between ranks": Reader(2, objects, read_object, NAMED),
}
"""By what they read."""
