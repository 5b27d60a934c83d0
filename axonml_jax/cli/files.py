"""`import` and `export`: Hugging Face weights into a run's folder, and a checkpoint's model into Hugging Face files."""

import argparse
import os
import shutil
from contextlib import closing
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import jax
import yaml
from flax import nnx

from axonml_jax.checkpoint import format as arrays
from axonml_jax.checkpoint.format import NAME, Team, newest_below
from axonml_jax.checkpoint.manager import checked_manifest, load
from axonml_jax.cli.flags import require_folder
from axonml_jax.cli.saved import place_said, require_average
from axonml_jax.cli.tasks import adapted
from axonml_jax.config.config import NEWEST, ConfigError, RunConfig, TrainConfig, read_config
from axonml_jax.config.sections import BYTES, DataConfig
from axonml_jax.data.documents import load_tokenizer, tokenizer_file, vocabulary_offenders
from axonml_jax.facade.trainer import AveragedParams, ParallelModel
from axonml_jax.layers.options import LatentConfig, RopeScaling
from axonml_jax.mesh.shape import make_mesh
from axonml_jax.model.safetensors import safetensors_files
from axonml_jax.models.config import ExpertsConfig, TransformerConfig
from axonml_jax.models.families.known import family_of
from axonml_jax.models.transformer import Transformer
from axonml_jax.models.weights import check_pretrained, pretrained_config, write_pretrained
from axonml_jax.parallel.plan import Plan
from axonml_jax.sharding.layout import AVERAGE, MODEL

# --------------------------------------------------------------------------------------------------
# `axonml-jax import`: a run's folder from published weights, after checking that every weight has its place in the model.
# --------------------------------------------------------------------------------------------------

WEIGHTS = "weights"
"""The subfolder of the run's folder that holds the weights."""

TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""Files that are copied with the weights, if they are there; only the first is read here."""


def import_weights(chosen: argparse.Namespace) -> int:
    """Make a run folder from a folder of Hugging Face weights; the files are linked, or copied where links cannot be made.

    Args:
      chosen: `source` and `target`.

    Raises:
      ValueError: for weights that the library's transformer cannot hold, or a target that is not empty or cannot be made.
    """
    source, target = chosen.source, chosen.target
    require_folder("RUN_FOLDER", target)
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"{target} has files already: give a new folder, so that nothing of another run is lost")
    try:
        config = pretrained_config(source, **_in_one_loop(pretrained_config(source)))
        check_pretrained(config, source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"import {source}: {error}") from error
    weights = (target / WEIGHTS).absolute()
    tokens, why_bytes = _tokenizer(source, weights, config)
    content = _content(target.absolute().name, config, weights, tokens)
    (target / WEIGHTS).mkdir(parents=True)
    index = [path for path in [source / "model.safetensors.index.json"] if path.is_file()]
    for path in [source / "config.json", *safetensors_files(source), *index, *_there(source)]:
        _put(path, weights)
    (target / NEWEST).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    size = sum(path.stat().st_size for path in safetensors_files(weights))
    print(f"model      {config.num_params:,} parameters, {config.num_layers} layers, width {config.hidden_size}")
    print(f"weights    {weights}, {size / 1e9:.3g} GB")
    print(f"tokens     {tokens.get('tokenizer') or f'text is read as bytes: {why_bytes}'}")
    print(f"train it   axonml-jax train {target / NEWEST}{' --data.path TEXT' * bool(tokens)}")
    return 0


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer's files into another folder; returns their names."""
    for path in _there(source):
        _put(path, target)
    return [path.name for path in _there(source)]


def _there(source: Path) -> list[Path]:
    return [path for path in (source / name for name in TOKENIZER) if path.is_file()]


def _put(path: Path, folder: Path) -> None:
    """Link a file into a folder if the file system can, else copy it."""
    try:
        os.link(path.resolve(), folder / path.name)
    except OSError:
        shutil.copy2(path, folder / path.name)


def _tokenizer(source: Path, weights: Path, config: TransformerConfig) -> tuple[dict[str, str], str]:
    """The tokenizer settings of the section `data`, or, if there are none, the reason."""
    if not (source / TOKENIZER[0]).is_file():
        return {}, f"{source} has no {TOKENIZER[0]}"
    try:
        wrong = vocabulary_offenders(load_tokenizer(source / TOKENIZER[0]), config.vocab_size, "model.vocab_size")
    except (ImportError, ValueError) as error:
        wrong = [str(error)]
    return ({}, wrong[0]) if wrong else ({"tokenizer": str(weights / TOKENIZER[0])}, "")


def _in_one_loop(config: TransformerConfig) -> dict[str, bool]:
    """Set `scan_layers` if all blocks are alike, which compiles in the same time for any number of them."""
    return {"scan_layers": config.full_every is None and (config.experts is None or config.experts.alike)}


def _content(name: str, config: TransformerConfig, weights: Path, tokens: dict[str, str]) -> dict[str, Any]:
    """Returns the sections of the configuration, without keys that have their defaults.

    Raises:
      ConfigError: when the model makes no valid configuration.
    """
    length = min(DataConfig().length, config.max_length)
    try:
        RunConfig(model=config, data=DataConfig(length=length))
    except ValueError as error:
        raise ConfigError(f"import: {error}") from error
    sections = {
        "model": _given(config),
        "rope_scaling": _given(config.rope_scaling or RopeScaling()),
        "latent": _given(config.latent or LatentConfig()),
        "experts": _given(config.experts or ExpertsConfig()),
        "data": tokens | ({} if length == DataConfig().length else {"length": length}),
        "train": _given(TrainConfig(weights=str(weights))),
    }
    return {"name": name} | {section: values for section, values in sections.items() if values}


def _given(section: Any) -> dict[str, Any]:
    """The settings that differ from their defaults."""
    plain = {each.name: getattr(section, each.name) for each in fields(section) if "section" not in each.metadata}
    defaults = {each.name: each.default for each in fields(section)}
    return {name: value for name, value in plain.items() if defaults[name] is MISSING or value != defaults[name]}


# --------------------------------------------------------------------------------------------------
# `axonml-jax export`: the model of a checkpoint as files that Hugging Face's `from_pretrained` reads.
# --------------------------------------------------------------------------------------------------


def export_weights(chosen: argparse.Namespace) -> int:
    """Read a checkpoint's model, sharded over all devices here, and write it array by array, adapters merged.

    Args:
      chosen: `source`, `target`, `ema`, `dtype`, `shard_size` and `allow_imports`.

    Raises:
      ValueError: for a folder without a checkpoint, a model that no Hugging Face family describes, or a target that is not
        empty or cannot be made.
    """
    source, target = _checkpoint(chosen.source), chosen.target
    require_folder("HF_FOLDER", target)
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"{target} has files already: give a new folder")
    if chosen.ema:
        require_average(source)
    run = _configuration(source, chosen.allow_imports)
    # These settings change no parameter. Here fsdp alone shards the model.
    plain = {"split": "tensor", "sequence_parallel": False, "ring": False, "overlap": False, "prefetch": False}
    own = run.transformer_for("export")
    config = replace(own, **plain, param_dtype=chosen.dtype or own.param_dtype)
    try:
        family_of(config)
    except ValueError as error:
        raise ConfigError(f"export {source}: {error}") from error
    made = adapted(run, nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    model = ParallelModel(made, make_mesh(fsdp=jax.device_count()), Plan())
    _restore(source, model, ema=chosen.ema)
    write_pretrained(target, config, model, shard_bytes=int(chosen.shard_size))
    tokenizer = _with_tokenizer(run, target)
    print(f"model      {config.num_params:,} parameters of {source}, {config.param_dtype}")
    print(f"written    {', '.join(sorted(path.name for path in target.iterdir()))}")
    if tokenizer:
        print(f"tokenizer  {tokenizer}")
    return 0


def _with_tokenizer(run: RunConfig, target: Path) -> str:
    """Copy a run's tokenizer beside its weights (its data's, else its initial weights'); returns a description."""
    if run.data.class_path is not None or run.data.tokenizer == BYTES:
        kept = copy_tokenizer(Path(run.train.weights), target) if run.train.weights else []
        return f"as in {run.train.weights}" if kept else ""
    try:
        file = tokenizer_file(run.data.tokenizer)
    except ValueError as error:
        return f"left out, as there is {error}"
    if file.name == TOKENIZER[0]:
        copy_tokenizer(file.parent, target)
    else:
        shutil.copy2(file, target / TOKENIZER[0])
    return f"as in {run.data.tokenizer}"


def _checkpoint(path: Path) -> Path:
    if (path / NAME).is_file():
        return path.absolute()
    if (newest := newest_below(path)) is None:
        at = f" (ax.restore reads those at {url} in Python)" if (url := place_said(path)) else ""
        raise ConfigError(
            f"{path} holds no checkpoint{at}: give one of a run (step_00000100), or the folder of a run that has one"
        )
    return newest.absolute()


def _configuration(checkpoint: Path, imports: list[str]) -> RunConfig:
    """Read the configuration of the run that a checkpoint belongs to, from one or two folders above it."""
    for folder in checkpoint.parents[:2]:
        if (folder / NEWEST).is_file():
            return read_config("train", [str(folder / NEWEST)], imports=imports)
    raise ConfigError(
        f"{checkpoint} is in no run's folder: its {NEWEST}, which describes the model, must be one or two folders up"
    )


def _restore(folder: Path, model: ParallelModel, *, ema: bool) -> None:
    """Restore the model alone, or with its moving average, and nothing else of the checkpoint."""
    team = Team()
    with closing(arrays.checkpointer(team)) as saver:
        manifest = checked_manifest(folder, team)
        own = {name: entry for name, entry in manifest.entries.items() if name.startswith(MODEL)}
        load(folder, replace(manifest, entries=own), model, saver, team)
        if ema:
            load(folder, manifest, AveragedParams(model), saver, team, part=AVERAGE)
