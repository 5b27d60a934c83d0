"""`axonml-jax import`: a folder to train from of published weights, all of which are found to have their place first."""

import argparse
import os
import shutil
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

from axonml_jax.data.documents.tokenizer import load_tokenizer, vocabulary_offenders
from axonml_jax.launch.commands.writable import require_folder
from axonml_jax.launch.config.run_config import ConfigError, DataConfig, RunConfig, TrainConfig
from axonml_jax.launch.config.stretches import NEWEST
from axonml_jax.model.safetensors import safetensors_files
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.experts_config import ExpertsConfig
from axonml_jax.models.huggingface import check_pretrained, pretrained_config
from axonml_jax.parallel.tensor.latent.latent_config import LatentConfig
from axonml_jax.parallel.tensor.megatron.rope_scaling import RopeScaling

WEIGHTS = "weights"
"""Where in the folder the weights are."""

TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""Files beside the weights that go with them wherever they go."""


def import_weights(chosen: argparse.Namespace) -> int:
    """Read what a folder holds, and make another one of it.

    Args:
      chosen: `source` and `target`.

    Raises:
      ConfigError: for weights that the transformer here cannot have, or a folder with something in it.
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
    """Put the tokenizer's files of one folder into another; their names."""
    for path in _there(source):
        _put(path, target)
    return [path.name for path in _there(source)]


def _there(source: Path) -> list[Path]:
    return [path for path in (source / name for name in TOKENIZER) if path.is_file()]


def _put(path: Path, folder: Path) -> None:
    """The same file under another name where the file system can do that, else a copy."""
    try:
        os.link(path.resolve(), folder / path.name)
    except OSError:
        shutil.copy2(path, folder / path.name)


def _tokenizer(source: Path, weights: Path, config: TransformerConfig) -> tuple[dict[str, str], str]:
    """What the section `data` says of the tokens that the model knows, and, where that is nothing, why."""
    if not (source / TOKENIZER[0]).is_file():
        return {}, f"{source} has no {TOKENIZER[0]}"
    try:
        wrong = vocabulary_offenders(load_tokenizer(source / TOKENIZER[0]), config.vocab_size, "model.vocab_size")
    except (ImportError, ValueError) as error:
        wrong = [str(error)]
    return ({}, wrong[0]) if wrong else ({"tokenizer": str(weights / TOKENIZER[0])}, "")


def _in_one_loop(config: TransformerConfig) -> dict[str, bool]:
    """Blocks that are alike run in a loop, which compiles in the same time for any number of them."""
    return {"scan_layers": config.full_every is None and (config.experts is None or config.experts.alike)}


def _content(name: str, config: TransformerConfig, weights: Path, tokens: dict[str, str]) -> dict[str, Any]:
    """The configuration, in which what is left out has its default.

    Raises:
      ConfigError: when nothing can be trained with it.
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
    """What differs from the defaults."""
    plain = {each.name: getattr(section, each.name) for each in fields(section) if "section" not in each.metadata}
    defaults = {each.name: each.default for each in fields(section)}
    return {name: value for name, value in plain.items() if defaults[name] is MISSING or value != defaults[name]}
