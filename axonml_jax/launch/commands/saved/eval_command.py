"""`axonml-jax eval RUN`: loss, perplexity and speed of a checkpoint, on any part of any text, under any plan."""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import optax

from axonml_jax.data.loader import DataLoader
from axonml_jax.launch.commands.saved.saved_run import saved_run
from axonml_jax.launch.config.run_config import ConfigError
from axonml_jax.launch.job.document_task import check_tokenizer
from axonml_jax.launch.job.fit import evaluate
from axonml_jax.launch.job.run_setup import all_or_refuse
from axonml_jax.launch.job.text_task import from_start, load_data, read_data
from axonml_jax.launch.own.subject import loss_of
from axonml_jax.logging import print0
from axonml_jax.models.lm_loss import counted
from axonml_jax.sharding.place import to_host


def eval_run(given: argparse.Namespace, flags: Sequence[str]) -> int:
    """Print a checkpoint's loss in nats per token, its perplexity, and the speed of evaluating it.

    Args:
      given: the arguments of `eval_parser`.
      flags: keys of the configuration, such as `--data.path other.txt`.

    Returns:
      0.

    Raises:
      ConfigError: for a run without checkpoints, or a text of too few examples.
    """
    if given.batches is not None and given.batches < 1:
        raise ConfigError(f"--batches {given.batches}: must be at least 1")
    run = saved_run("eval", given, flags)
    config = run.config
    text, _ = all_or_refuse(partial(read_data, config.data, config.output.dir), partial(check_tokenizer, config))
    ground, model = run.open()
    [data] = all_or_refuse(partial(load_data, config, ground.own or text, ground.mesh))
    loader = data.valid if given.split == "valid" else data.train
    if loader is None:
        raise ConfigError(
            "there is nothing to validate on, as data of no known length is not divided: give --split train"
        )
    count = _batches(loader, given, config.train.eval_batches)
    trainer = model.trainer(optax.sgd(0.0), loss_of(config))  # keeps no state
    with closing(iter(loader)) as batches:  # pyright: ignore[reportArgumentType]
        first = next(batches)
        trainer.evaluate(first)  # compiles
        from_start(loader)
    own, targets, started = ground.own is not None, [], time.perf_counter()
    metrics = evaluate(trainer, _counted(islice(loader, count), targets, own), targets)
    jax.block_until_ready(model.variables)
    seconds = time.perf_counter() - started
    units, total = "examples" if own else "tokens", int(sum(targets))
    more = {"step": run.step, "split": given.split, "batches": len(targets), units: total}
    if not own and config.loss.class_path is None:
        more["perplexity"] = math.exp(min(metrics["loss"], 700.0))
    more[f"{units}_per_second"] = total / seconds
    _print(given, metrics, more, f"{run.folder}, step {run.step}, on {ground.device_words}", units)
    return 0


def _batches(loader: DataLoader, given: argparse.Namespace, usual: int | None) -> int:
    """How many batches to take.

    Raises:
      ConfigError: of data that can only be iterated over, which has no end that is known, where nothing says it.
    """
    try:
        return min(given.batches or len(loader), len(loader))
    except TypeError:
        if count := given.batches or (usual if given.split == "valid" else None):
            return count
        raise ConfigError("--batches: say how many, as nobody knows how long this data is") from None


def _counted(batches: Iterator[Any], targets: list[float], own: bool) -> Iterator[Any]:
    """The batches, whose numbers of targets (of one's own data: of examples) are added to a list: packed documents differ."""

    def number(batch: Any) -> Any:
        return len(jax.tree.leaves(batch)[0]) if own else jnp.sum(counted(batch["targets"]))

    count = jax.jit(number)
    for batch in batches:
        targets.append(float(to_host(count(batch))))
        yield batch


def _print(given: argparse.Namespace, metrics: dict[str, float], more: dict, where: str, units: str) -> None:
    if given.json:
        print0(json.dumps(more | metrics))
        return
    print0(where)
    print0(f"{given.split:<12} {more['batches']:,} batches, {more[units]:,} {units}")
    print0(f"{'loss':<12} {metrics['loss']:.4f}{' nats per token' * ('perplexity' in more)}")
    if "perplexity" in more:
        print0(f"{'perplexity':<12} {more['perplexity']:,.4f}")
    for name in sorted(set(metrics) - {"loss"}):
        print0(f"{name:<12} {metrics[name]:.4f}")
    print0(f"{'speed':<12} {more[f'{units}_per_second']:,.0f} {units} per second")
