"""`axonml-jax train` and `axonml-jax explain`: where configuration, data, training and files meet."""

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import yaml

from axonml_jax.data.text import TextSplit
from axonml_jax.facade.parallel_model import ParallelModel
from axonml_jax.facade.trainer import Trainer
from axonml_jax.launch.config import RunConfig
from axonml_jax.launch.describe import describe, price
from axonml_jax.launch.fit import Record, evaluate, fit
from axonml_jax.launch.ground import Ground, all_or_refuse, lay_ground
from axonml_jax.launch.optimizer import make_optimizer
from axonml_jax.launch.peaks import peak_flops
from axonml_jax.launch.plot import plot_losses
from axonml_jax.launch.progress import progress
from axonml_jax.launch.read_config import as_dict
from axonml_jax.launch.records import JsonLines, Recorder, TensorBoard, tensorboard_writer
from axonml_jax.launch.text_task import (
    TextData,
    build_model,
    load_data,
    loss_fn,
    read_text,
    valid_batches,
    write_samples,
)
from axonml_jax.launch.trace import traced
from axonml_jax.logging import print0
from axonml_jax.training.agreement import check_same, program_hash
from axonml_jax.training.metrics import Throughput

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def explain(config: RunConfig) -> int:
    """Print what a run would do and what its step would send. Nothing is trained or allocated.

    Raises:
      ConfigError: for a mesh or a batch that does not fit the devices.
    """
    [ground] = all_or_refuse(partial(lay_ground, config))
    print0(describe(config, ground), price(config, ground), sep="\n\n")
    return 0


def train(config: RunConfig) -> int:
    """Train, validate, sample, and leave records, configuration and picture in the run's folder.

    Returns:
      0, or 130 when stopped by Ctrl-C; what was recorded until then is kept.

    Raises:
      ConfigError: with everything that cannot work, before anything is allocated.
    """
    if config.output.tensorboard:
        tensorboard_writer()
    ground, text = all_or_refuse(partial(lay_ground, config), partial(read_text, config.data))
    all_or_refuse(partial(check_same, "configuration", _shared_settings(config, text), ground.world))
    [data] = all_or_refuse(partial(load_data, config, text, ground.mesh))
    print0(describe(config, ground), _about(config, data), "", price(config, ground), "", sep="\n", flush=True)
    folder = new_folder(config) if ground.world.is_main_process else None
    records: list[Record] = []
    trainer = _trainer(config, ground)
    if ground.world.num_processes > 1:
        program = {"traced program": program_hash(trainer.train_step, trainer.state, ground.batch)}
        all_or_refuse(partial(check_same, "training step", program, ground.world))
    try:
        _run(config, ground, data, trainer, folder, records)
        status = 0
    except KeyboardInterrupt:
        print0(f"\nstopped by Ctrl-C after step {records[-1].step if records else 0}; what was recorded is kept")
        status = INTERRUPTED
    _report(config, data, records, folder)
    if status == 0:
        _print_samples(config, trainer.model)
    return status


def new_folder(config: RunConfig) -> Path:
    """A new folder for a run: its name, or its name with the first free number; its configuration is written there."""
    root = Path(config.output.dir)
    root.mkdir(parents=True, exist_ok=True)
    number, folder = 1, root / config.name
    while folder.exists():
        number += 1
        folder = root / f"{config.name}-{number}"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(as_dict(config), sort_keys=False), encoding="utf-8")
    return folder


def _shared_settings(config: RunConfig, text: TextSplit) -> dict[str, Any]:
    """What all processes must agree on; each machine may keep its files elsewhere."""
    sections = {key: value for key, value in as_dict(config).items() if key not in ("name", "output", "profile")}
    values = {f"{section}.{name}": value for section, names in sections.items() for name, value in names.items()}
    del values["data.path"], values["data.num_workers"]
    checksums = {f"checksum of data.{part}": zlib.crc32(content) for part, content in text._asdict().items()}
    return {"jax version": jax.__version__, "flax version": version("flax")} | values | checksums


def _trainer(config: RunConfig, ground: Ground) -> Trainer:
    model = build_model(config.model, config.train.seed)
    parallel = ParallelModel(model, ground.mesh, ground.plan, seed=config.train.seed)
    tx = make_optimizer(config.optim, config.train.steps)
    return parallel.trainer(tx, loss_fn, max_grad_norm=config.optim.max_grad_norm)


def _run(
    config: RunConfig, ground: Ground, data: TextData, trainer: Trainer, folder: Path | None, records: list[Record]
) -> None:
    """Train, appending to `records` and to the files in `folder` (None in all processes but the main one)."""
    with ExitStack() as stack:
        sinks = [stack.enter_context(closing(recorder)) for recorder in _recorders(config, folder)]
        show = stack.enter_context(progress(config.train.steps)) if folder else lambda record: None
        batches: Iterator = stack.enter_context(closing(iter(data.train)))  # pyright: ignore[reportArgumentType]
        if config.profile and folder:
            wait = lambda: jax.block_until_ready(trainer.state.step)
            batches = stack.enter_context(closing(traced(batches, folder / "trace", wait)))  # pyright: ignore
        for record in fit(
            trainer,
            batches,
            steps=config.train.steps,
            throughput=_throughput(config, ground),
            validate=lambda: {**evaluate(trainer, valid_batches(data)), "bigram": data.bigram},
            validate_every=config.train.eval_every,
            log_every=config.train.log_every,
        ):
            records.append(record)
            for sink in sinks:
                sink.write(record)
            show(record)


def _recorders(config: RunConfig, folder: Path | None) -> Iterator[Recorder]:
    if folder is not None:
        yield JsonLines(folder / "metrics.jsonl")
    if folder is not None and config.output.tensorboard:
        yield TensorBoard(folder / "tensorboard")


def _throughput(config: RunConfig, ground: Ground) -> Throughput:
    return Throughput(
        tokens_per_step=config.train.global_batch_size * config.data.length,
        flops_per_token=config.model.flops_per_token(config.data.length),
        num_devices=ground.mesh.size,
        peak_flops=peak_flops(ground.mesh.devices.flat[0].device_kind),
    )


def _about(config: RunConfig, data: TextData) -> str:
    source = config.data.path or "the standard library of this Python"
    trained, valid = data.sizes
    epochs = config.train.steps / len(data.train)
    return (
        f"{'data':<10} {source}: {trained:,} bytes to train on ({epochs:.2g} epochs), {valid:,} to validate on, of which "
        f"{data.valid_bytes:,} are used"
    )


def _report(config: RunConfig, data: TextData, records: list[Record], folder: Path | None) -> None:
    """The last validation beside the bigram model, and where the files are."""
    last = next((record for record in reversed(records) if "valid_loss" in record.metrics), None)
    if last is not None:
        loss = last.metrics["valid_loss"]
        print0(f"\nvalidation loss {loss:.4f} nats per byte after step {last.step}, over {data.valid_bytes:,} bytes")
        below = f"{abs(data.bigram - loss):.4f} {'below' if loss < data.bigram else 'above'}"
        print0(f"bigram model    {data.bigram:.4f} on the same bytes: the transformer is {below} it")
    if folder is None or not records:
        return
    files = "metrics.jsonl, config.yaml"
    if config.output.plot:
        note = plot_losses(records, folder / "loss.png", title=config.name, baseline=data.bigram)
        files += ", loss.png" if note is None else f" ({note})"
    files += ", tensorboard" * config.output.tensorboard + ", trace" * (folder / "trace").exists()
    print0(f"files           {folder}: {files}")


def _print_samples(config: RunConfig, model: ParallelModel) -> None:
    if not config.sample.count:
        return
    texts = write_samples(model.module, config.sample, config.data.length, config.train.seed)
    for number, text in enumerate(texts, start=1):
        print0(f"\n--- sample {number} " + "-" * 60)
        print0(text)
