"""`train` and `explain`: from flags and files to a run."""

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import jax

from axonml_jax.base import INTERRUPTED, TERMINATED, folded, print0
from axonml_jax.checkpoint.format import Team
from axonml_jax.cli.flags import in_flags, require_folder, require_writable
from axonml_jax.cli.loop import NONFINITE, Preemption, Record, ReplicasCompared, Saves, Spikes, fit, run_watchdog
from axonml_jax.cli.plan import (
    OVER_BUDGET,
    baseline,
    check_optimizer,
    check_own,
    describe,
    over_budget,
    predicted,
    require_fit,
    show,
    step_in_words,
)
from axonml_jax.cli.records import (
    about,
    begin_mlflow,
    check_mlflow,
    files,
    mlflow_module,
    print_samples,
    progress,
    read_records,
    report,
    services,
    tensorboard_writer,
    throughput,
    traced,
    wandb_module,
)
from axonml_jax.cli.run import (
    RunFolder,
    RunSetup,
    all_or_refuse,
    check_weights,
    earlier_folder,
    on_machines,
    resumed,
    set_up_run,
    simulated_where_few,
    unchanged,
)
from axonml_jax.cli.run import compiled_in_words as in_words
from axonml_jax.cli.tasks import (
    DocumentSplit,
    OwnSplit,
    TextData,
    check_tokenizer,
    check_validation,
    load_data,
    loss_of,
    model_of,
    own_callbacks,
    read_data,
    shapes_of,
    valid_batches,
)
from axonml_jax.compat.versions import installed
from axonml_jax.config.config import Budget, Estimate, RunConfig, as_dict
from axonml_jax.config.objects import learning_rate, make_optimizer
from axonml_jax.config.sections import OwnModel
from axonml_jax.data.sources import TextSplit
from axonml_jax.facade.trainer import ParallelModel, Trainer
from axonml_jax.mesh.watch import Watchdog
from axonml_jax.mesh.world import World
from axonml_jax.models.weights import load_pretrained
from axonml_jax.training.callbacks import Callback
from axonml_jax.training.same_everywhere import check_same, program_hash

DIVERGED = 3
"""Exit status when too many updates in a row were not finite, or the loss spiked once more than `spikes.limit` allows."""

DIFFERS = 5
"""Exit status when the first batch gives other numbers under the plan than on one device (`train.check`)."""


def explain(config: RunConfig, budget: Budget | None = None, estimate: Estimate | None = None) -> int:
    """Print what a run would do, hold and send, without training or allocating; missing devices are simulated.

    Args:
      config: the run's.
      budget: the limits of a step's memory and traffic.
      estimate: what to print or draw besides: the time on a kind of hardware, a picture.

    Returns:
      0; 4 when a step costs more than the budget allows.

    Raises:
      ConfigError: for a mesh or a batch that does not fit the devices, or a picture that cannot be drawn.
    """
    budget, estimate = budget or Budget(), estimate or Estimate()
    files = {"--picture": estimate.picture, "--write-baseline": budget.write_baseline}
    [config] = all_or_refuse(partial(simulated_where_few, config))
    ground, *_ = all_or_refuse(
        partial(set_up_run, config),
        partial(check_tokenizer, config),
        partial(require_writable, files),
        partial(baseline, budget),
        partial(check_optimizer, config),
    )
    all_or_refuse(partial(check_own, config, ground))
    all_or_refuse(partial(Team().decide, "find the run to go on with", partial(earlier_folder, config)))
    print0(folded(describe(config, ground)), "", *step_in_words(config, ground, compiles=False), sep="\n")
    if budget == Budget() and estimate == Estimate():
        return 0
    [found] = all_or_refuse(partial(predicted, config, ground, estimate.kind))
    print0("", found, show(found, estimate, config.name, budget.max_memory), sep="\n")
    wrong = over_budget(found, budget)
    print0("", *(f"over budget: {line}" for line in wrong), sep="\n")
    return OVER_BUDGET if wrong else 0


def train(config: RunConfig, budget: Budget | None = None, more: Sequence[Callback] = ()) -> int:
    """Train, validate, sample, and leave records, checkpoints, configuration and picture in the run's folder.

    Args:
      config: the run's.
      budget: `max_memory` and `force` alone count.
      more: callbacks beside those of the configuration.

    Returns:
      0; 130 after Ctrl-C and 143 after SIGTERM, once a step has ended and, with `checkpoint.every`, is saved; 3 when too many
      updates in a row were not finite, or the loss spiked too often (`spikes.limit`); 5 when `train.check` finds that the
      plan computes something else than one device.

    Raises:
      ConfigError: with everything that cannot work, before anything is allocated.
    """
    out = config.output
    needed = {tensorboard_writer: out.tensorboard, wandb_module: out.wandb, mlflow_module: out.mlflow}
    config, *_ = all_or_refuse(partial(on_machines, config), *(needs for needs, wanted in needed.items() if wanted))
    ground, text, *_ = all_or_refuse(
        partial(set_up_run, config),
        partial(read_data, config.data, config.output.dir),
        partial(check_tokenizer, config),
        partial(check_optimizer, config),
    )
    [callbacks, _] = all_or_refuse(partial(own_callbacks, config.callbacks, more), partial(check_own, config, ground))
    text = ground.own or text
    all_or_refuse(partial(check_same, "configuration", _shared_settings(config, text), ground.world))
    folder = partial(require_folder, "output.dir", Path(config.output.dir))
    all_or_refuse(partial(Team().decide, "look at output.dir", folder))
    [run] = all_or_refuse(partial(RunFolder, config))
    with run:
        if out.mlflow:
            known = run.path if run.resumed else None
            all_or_refuse(partial(Team().decide, "reach MLflow", partial(check_mlflow, out.mlflow, known)))
        [data, new] = all_or_refuse(partial(load_data, config, text, ground.mesh), run.begins)
        all_or_refuse(partial(check_validation, config, data), *([partial(check_weights, config)] if new else []))
        require_fit(config, ground, budget or Budget())
        said = _launched(ground.world), describe(config, ground), about(config, data), f"compiled   {in_words()}"
        step = ["step       as before the restart"] if unchanged(os.environ) else ["", *step_in_words(config, ground)]
        print0(*map(folded, said), *step, "", sep="\n", flush=True)
        trainer = _trainer(config, ground, callbacks, new=new, loads=not new or run.left_copies)
        if ground.world.num_processes > 1:
            program = {"traced program": program_hash(trainer.train_step, trainer.state, ground.batch)}
            all_or_refuse(partial(check_same, "training step", program, ground.world))
        all_or_refuse(run.make)
        start, saved = resumed(run, config, trainer, data)
        if trainer.model.hollow:  # it has shapes alone, and there was nothing to load
            trainer = _trainer(config, ground, callbacks, new=new)
        if config.train.check and not _is_as_on_one_device(trainer, data):
            return DIFFERS
        if out.mlflow:
            begin = partial(begin_mlflow, out.mlflow, run.path, as_dict(config))
            all_or_refuse(partial(Team().decide, "begin the run of MLflow", begin))
        return _train(config, ground, data, trainer, run, start, saved)


def _launched(world: World) -> str:
    """Describe which launcher determined this process's rank."""
    count = world.num_processes
    return f"launcher   {world.launcher}: {f'{count} processes' if count > 1 else 'one process'}"


def _is_as_on_one_device(trainer: Trainer, data: TextData) -> bool:
    """Print how the next batch under the plan differs from one device; returns whether nothing does.

    The loader goes back, so that the batch is trained on too.
    """
    position = data.train.state_dict()
    with closing(iter(data.train)) as batches:  # pyright: ignore[reportArgumentType]
        batch = next(batches)
    data.train.load_state_dict(position)
    found = trainer.check(batch)
    print0(f"check      {in_flags(str(found))}", "", sep="\n", flush=True)
    return not found.differs


def _train(
    config: RunConfig,
    ground: RunSetup,
    data: TextData,
    trainer: Trainer,
    run: RunFolder,
    start: int,
    saved: dict[str, Any],
) -> int:
    """Train from a step to the end, and print how it went; `saved` is what that step's checkpoint says about itself."""
    mine, manager = run.path if run.leads else None, run.manager if config.checkpoint.every else None
    metrics = run.path / "metrics.jsonl"
    records = [r for r in read_records(metrics) if r.step <= start] if mine and start and metrics.exists() else []
    status = 0
    with trainer, Preemption() as preemption, ExitStack() as stack:
        spikes = Spikes(config, trainer, data.train, run.manager, saved) if config.spikes.factor else None
        saves = Saves(manager, trainer, data.train, config, preemption, run.path / NONFINITE, spikes, run.memory)
        elsewhere = [stack.enter_context(each).write for each in services(config, mine, lambda: saves.reason)]
        _run(config, ground, data, trainer, run, records, start, saves, spikes, elsewhere)
        while spikes is not None and saves.goes_back:
            start = spikes.roll_back()
            records[:] = [record for record in records if record.step <= start]
            _run(config, ground, data, trainer, run, records, start, saves, spikes, elsewhere)
        if manager is not None:
            manager.wait()
        trainer.finish(saves.reason)
    if saves.stopped is not None:
        cause, status = ("Ctrl-C", INTERRUPTED) if preemption.interrupted else ("SIGTERM", TERMINATED)
        kept = "saved; --resume auto goes on from here" if manager else "nothing was saved (checkpoint.every=null)"
        if spikes is not None and spikes.found is not None:
            kept = f"not saved, as {spikes.found}; --resume auto goes on from before"
        print0(f"\nstopped by {cause} after step {saves.stopped}; {kept}", flush=True)
    if saves.diverged is not None:
        print0(f"\n{saves.diverged}", flush=True)
        status = DIVERGED
    report(config, data, records, mine)
    if status == 0:
        print_samples(config, data, trainer.model)
    return status


def _shared_settings(config: RunConfig, text: TextSplit | DocumentSplit | OwnSplit) -> dict[str, Any]:
    """The settings that all processes must agree on, without paths, which may differ between machines."""
    sections = {
        key: value
        for key, value in as_dict(config).items()
        if key not in ("name", "output", "profile", "resume", "callbacks")
    }
    values = {f"{section}.{name}": value for section, names in sections.items() for name, value in names.items()}
    for each in ("data.path", "data.mixture", "data.tokenizer", "data.num_workers", "train.weights"):
        del values[each]
    known = {k: zlib.crc32(v) for k, v in text._asdict().items()} if isinstance(text, TextSplit) else text.checksums()
    checksums = {f"checksum of data.{part}": found for part, found in known.items()}
    return {"jax version": jax.__version__, "flax version": installed("flax")} | values | checksums


def _trainer(
    config: RunConfig, ground: RunSetup, callbacks: Sequence[Callback], *, new: bool, loads: bool = False
) -> Trainer:
    """Make the run's trainer; with `loads` the model has shapes alone, as its values come from a checkpoint."""
    make, weights = shapes_of if loads else model_of, config.train.weights
    made = make(config, ground.batch)
    # A model that gets weights is made where it rests, so that no process ever holds it whole; so is one of one's own.
    rank = config.finetune.lora.rank
    whole = not loads and not weights and not isinstance(config.model, OwnModel) and rank is None
    module, seed = made.model() if whole else made.model, config.train.seed
    parallel = ParallelModel(module, ground.mesh, ground.plan, params=made.params, seed=seed)
    if weights and new and not loads:
        load_pretrained(parallel, weights)
    tx = make_optimizer(config.optim, config.train.steps, parallel.stacked_dims)
    return parallel.trainer(
        tx,
        loss_of(config),
        max_grad_norm=config.optim.max_grad_norm,
        max_nonfinite=config.train.max_nonfinite,
        callbacks=callbacks,
        ema=config.ema.decay,
        layer_norms=config.train.layer_norms,
    )


def _run(
    config: RunConfig,
    ground: RunSetup,
    data: TextData,
    trainer: Trainer,
    run: RunFolder,
    records: list[Record],
    start: int,
    saves: Saves,
    spikes: Spikes | None,
    elsewhere: Sequence[Callable[[Record], None]],
) -> None:
    """Train, appending to `records` and, in the main process, to the files in the run's folder and `elsewhere`."""
    folder = run.path if run.leads else None
    with ExitStack() as stack:
        dog = stack.enter_context(run_watchdog(config, ground, trainer, run.path))
        writes = [stack.enter_context(closing(recorder)).write for recorder in files(config, folder, start)]
        show = stack.enter_context(progress(config.train.steps)) if folder else lambda record: None
        batches: Iterator = stack.enter_context(closing(iter(data.train)))  # pyright: ignore[reportArgumentType]
        if config.profile and folder:
            wait = lambda: jax.block_until_ready(trainer.state.step)
            batches = stack.enter_context(closing(traced(batches, folder / "trace", wait)))  # pyright: ignore

        def validate() -> dict[str, float]:
            bigram = {} if data.bigram is None else {"bigram": data.bigram}
            # Rows of documents have different numbers of targets, and some rows are empty: batches count by their targets.
            weights = data.valid_targets if config.data.documents else None
            return trainer.validate(_watched(valid_batches(data), dog), weights) | bigram

        for record in fit(
            trainer,
            batches,
            steps=config.train.steps,
            throughput=throughput(config, ground, folder, start),
            validate=None if data.valid is None else validate,
            validate_every=config.train.eval_every,
            log_every=config.train.log_every,
            learning_rate=learning_rate(config.optim, config.train.steps),
            start=start,
            elapsed=records[-1].metrics.get("wall_time", 0.0) if records else 0.0,
            watchdog=dog,
            seen=None if spikes is None else spikes.seen,
            after=ReplicasCompared(config, trainer, saves, saves.ends_after),
        ):
            record.metrics.update(saves.failures | ({} if spikes is None else spikes.metrics()))
            records.append(record)
            for write in (*writes, *elsewhere):
                write(record)
            show(record)


def _watched(batches: Iterator, watchdog: Watchdog) -> Iterator:
    """Yield a validation's batches, and report each as progress."""
    for batch in batches:
        yield batch
        watchdog.moved()
