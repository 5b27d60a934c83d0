"""What a run says of its data before it begins, and of its outcome at the end."""

from pathlib import Path

from axonml_jax.facade.parallel_model import ParallelModel
from axonml_jax.launch.config.run_checkpoints import CHECKPOINT_FOLDER
from axonml_jax.launch.config.run_config import RunConfig
from axonml_jax.launch.job.fit import Record
from axonml_jax.launch.job.plot import plot_expert_loads, plot_losses
from axonml_jax.launch.job.text_task import TextData, write_samples
from axonml_jax.logging import print0


def about(config: RunConfig, data: TextData) -> str:
    """What is trained and validated on."""
    if data.unit == "sample":
        trained, valid = (f"{size:,} samples" if size else "unknown" for size in data.sizes)
        seen = "nothing" if data.valid is None else valid
        return f"{'data':<10} {config.data.class_path}: {trained} to train on, {seen} to validate on"
    assert data.valid_targets is not None
    source = config.data.path or ", ".join(config.data.mixture or ()) or "the standard library of this Python"
    trained, valid = data.sizes
    epochs = config.train.steps / len(data.train)
    return (
        f"{'data':<10} {source}: {trained:,} {data.unit}s to train on ({epochs:.2g} epochs), {valid:,} to validate on, "
        f"of which {sum(data.valid_targets):,} are used"
    )


def report(config: RunConfig, data: TextData, records: list[Record], folder: Path | None) -> None:
    """The last validation beside the bigram model, and where the files are."""
    last = next((record for record in reversed(records) if "valid_loss" in record.metrics), None)
    if last is not None:
        loss = last.metrics["valid_loss"]
        over = f", over {sum(data.valid_targets):,} {data.unit}s" if data.valid_targets else ""
        print0(f"\nvalidation loss {loss:.4f}{data.loss_unit} after step {last.step}{over}")
        if data.bigram is not None:
            below = f"{abs(data.bigram - loss):.4f} {'below' if loss < data.bigram else 'above'}"
            print0(f"bigram model    {data.bigram:.4f} on the same bytes: the transformer is {below} it")
    if folder is None or not records:
        return
    files = "metrics.jsonl, config.yaml"
    if config.output.plot:
        unit = f"loss ({data.loss_unit[1:]})" if data.loss_unit else "loss"
        note = plot_losses(records, folder / "loss.png", title=config.name, unit=unit, baseline=data.bigram)
        files += ", loss.png" if note is None else f" ({note})"
        if config.experts.num_experts:
            note = plot_expert_loads(records, folder / "experts.png", title=f"{config.name}: load of each expert")
            files += ", experts.png" if note is None else f" ({note})"
    files += ", checkpoints" * (folder / CHECKPOINT_FOLDER).exists()
    files += ", metrics.csv" * config.output.csv + ", wandb" * (config.output.wandb is not None)
    files += ", mlflow.id" * (config.output.mlflow is not None)
    files += ", tensorboard" * config.output.tensorboard + ", trace" * (folder / "trace").exists()
    print0(f"files           {folder}: {files}")


def print_samples(config: RunConfig, model: ParallelModel) -> None:
    """What the transformer writes, where it was trained on text; every process must call this."""
    if not config.sample.count or config.own:
        return
    section, data = config.sample, config.data
    texts = write_samples(model, section, data.length, config.train.seed, data.tokenizer, data.end)
    for number, text in enumerate(texts, start=1):
        print0(f"\n--- sample {number} " + "-" * 60)
        print0(text)
