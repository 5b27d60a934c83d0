"""`axonml-jax export`: the model of a checkpoint as files that Hugging Face's `from_pretrained` reads."""

import argparse
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import jax
from flax import nnx

from axonml_jax.checkpoint import arrays
from axonml_jax.checkpoint.contents import AVERAGE, MODEL
from axonml_jax.checkpoint.manifest import NAME
from axonml_jax.checkpoint.names import newest_below
from axonml_jax.checkpoint.store import checked_manifest, load
from axonml_jax.checkpoint.team import Team
from axonml_jax.data.documents.tokenizer import tokenizer_file
from axonml_jax.facade.parallel_model import ParallelModel
from axonml_jax.facade.saved_model import AveragedParams
from axonml_jax.launch.commands.import_command import TOKENIZER, copy_tokenizer
from axonml_jax.launch.commands.saved.saved_run import require_average
from axonml_jax.launch.commands.writable import require_folder
from axonml_jax.launch.config.read_config import read_config
from axonml_jax.launch.config.run_config import ConfigError, RunConfig
from axonml_jax.launch.config.sections.data_config import BYTES
from axonml_jax.launch.config.stretches import NEWEST
from axonml_jax.launch.own.subject import adapted
from axonml_jax.mesh.shape import make_mesh
from axonml_jax.models.families.known import family_of
from axonml_jax.models.huggingface import write_pretrained
from axonml_jax.models.transformer import Transformer
from axonml_jax.parallel.plan import Plan


def export_weights(chosen: argparse.Namespace) -> int:
    """Read a checkpoint's model, sharded over all devices here, and write it array by array, with its adapters in it.

    Args:
      chosen: `source`, `target`, `ema`, `dtype`, `shard_size` and `allow_imports`.

    Raises:
      ConfigError: for a folder without a checkpoint, a model of none of the families, or a folder with something in it.
    """
    source, target = _checkpoint(chosen.source), chosen.target
    require_folder("HF_FOLDER", target)
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"{target} has files already: give a new folder")
    if chosen.ema:
        require_average(source)
    run = _configuration(source, chosen.allow_imports)
    # The parameters are the same whatever splits the layers: here only fsdp does.
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
    """Put a run's tokenizer beside its weights: that of its data, else that of the weights it began with; what was done."""
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
        raise ConfigError(
            f"{path} holds no checkpoint: give one of a run (step_00000100), or the folder of a run that has one"
        )
    return newest.absolute()


def _configuration(checkpoint: Path, imports: list[str]) -> RunConfig:
    """Of the run that a checkpoint belongs to."""
    for folder in checkpoint.parents[:2]:
        if (folder / NEWEST).is_file():
            return read_config("train", [str(folder / NEWEST)], imports=imports)
    raise ConfigError(
        f"{checkpoint} is in no run's folder: its {NEWEST}, which describes the model, must be one or two folders up"
    )


def _restore(folder: Path, model: ParallelModel, *, ema: bool) -> None:
    """The model alone, or with its moving average; what else the checkpoint holds stays there."""
    team = Team()
    with closing(arrays.checkpointer(team)) as saver:
        manifest = checked_manifest(folder, team)
        own = {name: entry for name, entry in manifest.entries.items() if name.startswith(MODEL)}
        load(folder, replace(manifest, entries=own), model, saver, team)
        if ema:
            load(folder, manifest, AveragedParams(model), saver, team, part=AVERAGE)
