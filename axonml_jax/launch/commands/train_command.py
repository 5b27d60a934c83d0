"""`axonml-jax train` and `axonml-jax explain`: where configuration, data, training and files meet."""

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from axonml_jax.checkpoint.team import Team
from axonml_jax.data.text import TextSplit
from axonml_jax.facade.parallel_model import ParallelModel
from axonml_jax.facade.trainer import Trainer
from axonml_jax.launch.commands.budget import OVER_BUDGET, baseline, over_budget, predicted, require_fit
from axonml_jax.launch.commands.describe import check_optimizer, describe, price
from axonml_jax.launch.commands.estimate import show
from axonml_jax.launch.commands.writable import require_folder, require_writable
from axonml_jax.launch.config.own_flags import Budget, Estimate
from axonml_jax.launch.config.read_config import as_dict
from axonml_jax.launch.config.run_config import RunConfig
from axonml_jax.launch.job import resume
from axonml_jax.launch.job.document_task import DocumentSplit, check_tokenizer
from axonml_jax.launch.job.fit import Record, evaluate, fit
from axonml_jax.launch.job.peaks import peak_flops
from axonml_jax.launch.job.plot import plot_expert_loads, plot_losses
from axonml_jax.launch.job.preemption import Preemption
from axonml_jax.launch.job.profile import traced
from axonml_jax.launch.job.progress import progress
from axonml_jax.launch.job.records import (
    Csv,
    JsonLines,
    Recorder,
    TensorBoard,
    Wandb,
    read_records,
    tensorboard_writer,
    wandb_module,
)
from axonml_jax.launch.job.run_folder import CHECKPOINT_FOLDER, RunFolder, earlier_folder
from axonml_jax.launch.job.run_setup import RunSetup, all_or_refuse, check_weights, lay_ground
from axonml_jax.launch.job.saves import NONFINITE, Saves
from axonml_jax.launch.job.text_task import (
    TextData,
    build_model,
    load_data,
    loss_fn,
    read_data,
    valid_batches,
    write_samples,
)
from axonml_jax.launch.objects.make_optimizer import learning_rate, make_optimizer
from axonml_jax.logging import print0
from axonml_jax.mesh.job.watchdog import Watchdog
from axonml_jax.models.huggingface import load_pretrained
from axonml_jax.training.metrics import Throughput
from axonml_jax.training.same_everywhere import check_same, program_hash

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""

TERMINATED = 143
"""Exit status after SIGTERM, as shells have it: the run is saved and not at its end."""

DIVERGED = 3
"""Exit status when too many updates in a row were not finite."""


def explain(config: RunConfig, budget: Budget | None = None, estimate: Estimate | None = None) -> int:
    """Print what a run would do, hold and send. Nothing is trained or allocated.

    Args:
      config: the run's.
      budget: what a step may cost.
      estimate: what else to say of it: its time on a kind of hardware, a picture.

    Returns:
      0; 4 when that costs more than the budget allows.

    Raises:
      ConfigError: for a mesh or a batch that does not fit the devices, or a picture that cannot be drawn.
    """
    budget, estimate = budget or Budget(), estimate or Estimate()
    files = {"--picture": estimate.picture, "--write-baseline": budget.write_baseline}
    ground, *_ = all_or_refuse(
        partial(lay_ground, config),
        partial(check_tokenizer, config),
        partial(require_writable, files),
        partial(baseline, budget),
        partial(check_optimizer, config),
    )
    all_or_refuse(partial(Team().decide, "find the run to go on with", partial(earlier_folder, config)))
    print0(describe(config, ground), price(config, ground), sep="\n\n")
    if budget == Budget() and estimate == Estimate():
        return 0
    [found] = all_or_refuse(partial(predicted, config, ground, estimate.kind))
    print0("", found, show(found, estimate, config.name, budget.max_memory), sep="\n")
    wrong = over_budget(found, budget)
    print0("", *(f"over budget: {line}" for line in wrong), sep="\n")
    return OVER_BUDGET if wrong else 0


def train(config: RunConfig, budget: Budget | None = None) -> int:
    """Train, validate, sample, and leave records, checkpoints, configuration and picture in the run's folder.

    Returns:
      0; 130 when stopped by Ctrl-C, 143 when by SIGTERM, both after a step that is saved; 3 by updates that were not finite.

    Raises:
      ConfigError: with everything that cannot work, before anything is allocated.
    """
    needed = {tensorboard_writer: config.output.tensorboard, wandb_module: config.output.wandb}
    all_or_refuse(*(needs for needs, wanted in needed.items() if wanted))
    ground, text, *_ = all_or_refuse(
        partial(lay_ground, config),
        partial(read_data, config.data, config.output.dir),
        partial(check_tokenizer, config),
        partial(check_optimizer, config),
    )
    all_or_refuse(partial(check_same, "configuration", _shared_settings(config, text), ground.world))
    folder = partial(require_folder, "output.dir", Path(config.output.dir))
    all_or_refuse(partial(Team().decide, "look at output.dir", folder))
    [run] = all_or_refuse(partial(RunFolder, config))
    with run:
        [data, new] = all_or_refuse(partial(load_data, config, text, ground.mesh), run.begins)
        all_or_refuse(*([partial(check_weights, config)] if new else []))
        require_fit(config, ground, budget or Budget())
        print0(describe(config, ground), _about(config, data), "", price(config, ground), "", sep="\n", flush=True)
        trainer = _trainer(config, ground, new=new)
        if ground.world.num_processes > 1:
            program = {"traced program": program_hash(trainer.train_step, trainer.state, ground.batch)}
            all_or_refuse(partial(check_same, "training step", program, ground.world))
        all_or_refuse(run.make)
        return _train(config, ground, data, trainer, run, resume.begin(run, config, trainer, data))


def _train(config: RunConfig, ground: RunSetup, data: TextData, trainer: Trainer, run: RunFolder, start: int) -> int:
    """Train from a step to the end, and say how it went."""
    mine, manager = run.path if run.leads else None, run.manager if config.checkpoint.every else None
    metrics = run.path / "metrics.jsonl"
    records = [record for record in read_records(metrics) if record.step <= start] if mine and start else []
    status = 0
    with Preemption() as preemption:
        saves = Saves(manager, trainer, data.train, config, preemption, run.path / NONFINITE)
        _run(config, ground, data, trainer, mine, records, start, saves)
        if manager is not None:
            manager.wait()
    if saves.stopped is not None:
        cause, status = ("Ctrl-C", INTERRUPTED) if preemption.interrupted else ("SIGTERM", TERMINATED)
        kept = "saved; --resume auto goes on from here" if manager else "nothing was saved (checkpoint.every=null)"
        print0(f"\nstopped by {cause} after step {saves.stopped}; {kept}", flush=True)
    if saves.diverged is not None:
        print0(f"\n{saves.diverged}", flush=True)
        status = DIVERGED
    _report(config, data, records, mine)
    if status == 0:
        _print_samples(config, trainer.model)
    return status


def _shared_settings(config: RunConfig, text: TextSplit | DocumentSplit) -> dict[str, Any]:
    """What all processes must agree on; each machine may keep its files elsewhere."""
    sections = {
        key: value for key, value in as_dict(config).items() if key not in ("name", "output", "profile", "resume")
    }
    values = {f"{section}.{name}": value for section, names in sections.items() for name, value in names.items()}
    for each in ("data.path", "data.mixture", "data.tokenizer", "data.num_workers", "train.weights"):
        del values[each]
    known = (
        text.checksums() if isinstance(text, DocumentSplit) else {k: zlib.crc32(v) for k, v in text._asdict().items()}
    )
    checksums = {f"checksum of data.{part}": found for part, found in known.items()}
    return {"jax version": jax.__version__, "flax version": version("flax")} | values | checksums


def _trainer(config: RunConfig, ground: RunSetup, *, new: bool) -> Trainer:
    make, weights = partial(build_model, config.model, config.train.seed), config.train.weights
    # A model that gets weights is made where it rests, so that no process ever holds it whole.
    parallel = ParallelModel(make if weights else make(), ground.mesh, ground.plan, seed=config.train.seed)
    if weights and new:
        load_pretrained(parallel, weights)
    tx = make_optimizer(config.optim, config.train.steps)
    return parallel.trainer(
        tx, loss_fn, max_grad_norm=config.optim.max_grad_norm, max_nonfinite=config.train.max_nonfinite
    )


def _run(
    config: RunConfig,
    ground: RunSetup,
    data: TextData,
    trainer: Trainer,
    folder: Path | None,
    records: list[Record],
    start: int,
    saves: Saves,
) -> None:
    """Train, appending to `records` and to the files in `folder` (None in all processes but the main one)."""
    with ExitStack() as stack:
        dog = stack.enter_context(Watchdog(config.train.stuck_timeout)) if config.train.stuck_timeout else None
        sinks = [stack.enter_context(closing(recorder)) for recorder in _recorders(config, folder, start)]
        show = stack.enter_context(progress(config.train.steps)) if folder else lambda record: None
        batches: Iterator = stack.enter_context(closing(iter(data.train)))  # pyright: ignore[reportArgumentType]
        if config.profile and folder:
            wait = lambda: jax.block_until_ready(trainer.state.step)
            batches = stack.enter_context(closing(traced(batches, folder / "trace", wait)))  # pyright: ignore
        bigram = {} if data.bigram is None else {"bigram": data.bigram}
        for record in fit(
            trainer,
            batches,
            steps=config.train.steps,
            throughput=_throughput(config, ground),
            validate=lambda: evaluate(trainer, _watched(valid_batches(data), dog), data.valid_targets) | bigram,
            validate_every=config.train.eval_every,
            log_every=config.train.log_every,
            learning_rate=learning_rate(config.optim, config.train.steps),
            start=start,
            elapsed=records[-1].metrics.get("wall_time", 0.0) if records else 0.0,
            watchdog=dog,
            after=saves,
        ):
            records.append(record)
            for sink in sinks:
                sink.write(record)
            show(record)


def _watched(batches: Iterator, watchdog: Watchdog | None) -> Iterator:
    """The batches of a validation, each of which is progress."""
    for batch in batches:
        yield batch
        if watchdog is not None:
            watchdog.moved()


def _recorders(config: RunConfig, folder: Path | None, start: int) -> Iterator[Recorder]:
    if folder is not None:
        yield JsonLines(folder / "metrics.jsonl", start)
    if folder is not None and config.output.tensorboard:
        yield TensorBoard(folder / "tensorboard", start)
    if folder is not None and config.output.csv:
        yield Csv(folder / "metrics.csv", start)
    if folder is not None and config.output.wandb:
        yield Wandb(folder, as_dict(config), config.output.wandb)


def _throughput(config: RunConfig, ground: RunSetup) -> Throughput:
    return Throughput(
        tokens_per_step=config.train.global_batch_size * config.data.length,
        flops_per_token=config.model.flops_per_token(config.data.length),
        num_devices=ground.mesh.size,
        peak_flops=peak_flops(ground.mesh.devices.flat[0].device_kind),
    )


def _about(config: RunConfig, data: TextData) -> str:
    source = config.data.path or ", ".join(config.data.mixture or ()) or "the standard library of this Python"
    trained, valid = data.sizes
    epochs = config.train.steps / len(data.train)
    return (
        f"{'data':<10} {source}: {trained:,} {data.unit}s to train on ({epochs:.2g} epochs), {valid:,} to validate on, "
        f"of which {sum(data.valid_targets):,} are used"
    )


def _report(config: RunConfig, data: TextData, records: list[Record], folder: Path | None) -> None:
    """The last validation beside the bigram model, and where the files are."""
    last = next((record for record in reversed(records) if "valid_loss" in record.metrics), None)
    if last is not None:
        loss = last.metrics["valid_loss"]
        over = f"over {sum(data.valid_targets):,} {data.unit}s"
        print0(f"\nvalidation loss {loss:.4f} nats per {data.unit} after step {last.step}, {over}")
        if data.bigram is not None:
            below = f"{abs(data.bigram - loss):.4f} {'below' if loss < data.bigram else 'above'}"
            print0(f"bigram model    {data.bigram:.4f} on the same bytes: the transformer is {below} it")
    if folder is None or not records:
        return
    files = "metrics.jsonl, config.yaml"
    if config.output.plot:
        note = plot_losses(records, folder / "loss.png", title=config.name, baseline=data.bigram)
        files += ", loss.png" if note is None else f" ({note})"
        if config.model.experts is not None:
            note = plot_expert_loads(records, folder / "experts.png", title=f"{config.name}: load of each expert")
            files += ", experts.png" if note is None else f" ({note})"
    files += ", checkpoints" * (folder / CHECKPOINT_FOLDER).exists()
    files += ", metrics.csv" * config.output.csv + ", wandb" * (config.output.wandb is not None)
    files += ", tensorboard" * config.output.tensorboard + ", trace" * (folder / "trace").exists()
    print0(f"files           {folder}: {files}")


def _print_samples(config: RunConfig, model: ParallelModel) -> None:
    if not config.sample.count:
        return
    texts = write_samples(model, config.sample, config.data.length, config.train.seed, config.data.tokenizer)
    for number, text in enumerate(texts, start=1):
        print0(f"\n--- sample {number} " + "-" * 60)
        print0(text)
