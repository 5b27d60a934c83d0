"""`eval`, `generate`, `runs`: commands on the folders of runs."""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from axonml_jax.base import aligned, print0
from axonml_jax.checkpoint.format import Manifest, Team, checkpoints_in
from axonml_jax.checkpoint.manager import restore
from axonml_jax.cli.flags import SORTED_BY, require_writable
from axonml_jax.cli.loop import Record
from axonml_jax.cli.records import flat, json_values, plot_runs, read_records
from axonml_jax.cli.run import (
    CHECKPOINT_FOLDER,
    RunSetup,
    all_or_refuse,
    best_checkpoint,
    checkpoints_of,
    place_said,
    set_up_run,
    start_devices,
)
from axonml_jax.cli.tasks import check_tokenizer, from_start, load_data, loss_of, read_data, shapes_of
from axonml_jax.config.config import NEWEST, ConfigError, RunConfig, keys_given, nearest_file, read_config, yaml_in
from axonml_jax.data.documents import TextSoFar, Tokenizer, load_tokenizer
from axonml_jax.data.loader import DataLoader
from axonml_jax.facade.generate import generate
from axonml_jax.facade.trainer import AveragedParams, ParallelModel
from axonml_jax.models.generate import Sampling
from axonml_jax.models.transformer import counted
from axonml_jax.sharding.layout import AVERAGE, to_host
from axonml_jax.training.callbacks import as_floats

# --------------------------------------------------------------------------------------------------
# A run's folder, opened to read: its configuration, and the model of one of its checkpoints on the devices of this job.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A run to inspect; nothing in its folder is changed.

    Attributes:
      folder: the run's.
      config: its configuration, with the flags that were given.
      checkpoint: the checkpoint that was chosen: a folder, or a URL.
      step: its step.
      ema: whether to take the moving average in the place of the parameters.
    """

    folder: Path
    config: RunConfig
    checkpoint: Path | str
    step: int
    ema: bool = False

    def open(self) -> tuple[RunSetup, ParallelModel]:
        """Start the devices, and put the checkpoint's model on them under the configuration's plan.

        All processes take the main one's choice of checkpoint: a run that is still training writes and removes some meanwhile.

        Raises:
          ConfigError: for a mesh that does not fit the devices, or a checkpoint of another model.
        """
        [ground] = all_or_refuse(partial(set_up_run, self.config))
        [made] = all_or_refuse(partial(shapes_of, self.config, ground.batch))  # no process holds more than its part
        seed = self.config.train.seed
        model = ParallelModel(made.model, ground.mesh, ground.plan, params=made.params, seed=seed)
        own = self.checkpoint if isinstance(self.checkpoint, str) else str(self.checkpoint.absolute())
        checkpoint = Team().decide("choose a checkpoint", lambda: own)
        all_or_refuse(partial(restore, checkpoint, model))
        if self.ema:
            all_or_refuse(partial(restore, checkpoint, AveragedParams(model), part=AVERAGE))
        return ground, model


_OF_TRAINING = (
    "name",
    "profile",
    "resume",
    "callbacks",
    "optim",
    "ema",
    "train",
    "spikes",
    "checkpoint",
    "sample",
    "output",
)
_READ = ("train.global_batch_size", "train.eval_batches", "train.seed", "output.dir", "output.compiled")


def saved_run(command: str, given: argparse.Namespace, flags: Sequence[str]) -> SavedRun:
    """Find the run that the arguments name.

    Args:
      command: for messages.
      given: `run`, `step`, `ema` and `allow_imports`.
      flags: keys that replace those of the run's configuration, such as `--mesh.fsdp 4`.

    Raises:
      ConfigError: for a folder that is no run's, a step that has no checkpoint or is not that of the checkpoint that is given,
        or keys that only a training reads.
    """
    folder, step, named = Path(given.run), given.step, None
    if folder.parent.name == CHECKPOINT_FOLDER:  # a checkpoint in its run
        there = {path.name: number for number, path in checkpoints_in(folder.parent).items()}
        named = str(there.get(folder.name, folder.name))
        folder = folder.parent.parent
    if not (folder / NEWEST).is_file():
        near = None if folder.is_dir() else nearest_file(folder)
        hint = f"; did you mean {near}?" if near else "; axonml-jax runs FOLDER lists those of a folder"
        raise ConfigError(f"{given.run}: there is no {NEWEST} in it, so it is no run's folder{hint}")
    config = read_config(command, [str(folder / NEWEST), *flags], imports=given.allow_imports)
    idle = [key for key in keys_given(flags) if key.partition(".")[0] in _OF_TRAINING and key not in _READ]
    if idle:
        raise ConfigError(
            f"--{', --'.join(idle)}: {command} trains nothing, so this would change nothing: leave it out"
        )
    checkpoints = _checkpoints(folder)
    number = _chosen(folder, list(checkpoints), named if step is None else step)
    if named is not None and named != str(number):
        raise ConfigError(
            f"--step {step}: {given.run} is the checkpoint of step {named}: leave --step out, or give the run's folder "
            f"{folder}"
        )
    checkpoint = checkpoints[number]
    if given.ema and isinstance(checkpoint, Path):  # of one at a URL it is seen when it is restored
        require_average(checkpoint)
    return SavedRun(
        folder=folder, config=replace(config, resume=None), checkpoint=checkpoint, step=number, ema=given.ema
    )


def require_average(checkpoint: Path) -> None:
    """Refuse a checkpoint that has no moving average.

    Raises:
      ConfigError: when it has none.
    """
    if not any(name.startswith(AVERAGE) for name in Manifest.read(checkpoint).entries):
        raise ConfigError(
            f"--ema: {checkpoint} holds no moving average of the parameters; a run with ema.decay keeps one"
        )


def _chosen(folder: Path, steps: Sequence[int], step: str | None) -> int:
    """The chosen one of a run's steps; reads only files or a store, because devices may not be started yet."""
    listed = ", ".join(map(str, steps[-8:])) or "none"
    if not steps:
        raise ConfigError(f"{place_said(folder) or folder / CHECKPOINT_FOLDER} has no checkpoints")
    if step in (None, "last"):
        return steps[-1]
    if step == "best":
        if (best := best_checkpoint(folder, "valid_loss")) is None:
            raise ConfigError(f"--step best: no checkpoint of {folder} was saved with a valid_loss; there are {listed}")
        return best
    if not str(step).isdecimal() or int(step) not in steps:
        raise ConfigError(f"--step {step}: {folder} has no such checkpoint; there are {listed}, or give last or best")
    return int(step)


def _checkpoints(folder: Path) -> Mapping[int, Path | str]:
    try:
        return checkpoints_of(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: {error}") from error


# --------------------------------------------------------------------------------------------------
# `axonml-jax runs`: runs side by side, from what they have written. No device is started.
# --------------------------------------------------------------------------------------------------

RECORDS = "metrics.jsonl"
_WITHOUT_EFFECT = ("name", "profile", "resume", "output")


@dataclass(frozen=True)
class Found:
    """What a run has written into its folder.

    Attributes:
      folder: the run's.
      settings: every key of its configuration, with dots.
      records: what it measured.
      checkpoints: steps of the checkpoints in its folder; those at a URL are not listed.
    """

    folder: Path
    settings: Mapping[str, Any]
    records: Sequence[Record]
    checkpoints: Sequence[int]

    def last(self, metric: str) -> float | None:
        """The newest value of a metric."""
        return next((each.metrics[metric] for each in reversed(self.records) if metric in each.metrics), None)

    def best(self, metric: str, *, highest: bool = False) -> float | None:
        """The lowest finite value of a metric, or the highest."""
        values = [each.metrics[metric] for each in self.records if math.isfinite(each.metrics.get(metric, math.nan))]
        return (max if highest else min)(values, default=None)


def runs(given: argparse.Namespace) -> int:
    """Print a table of runs, sorted by a metric, and what else is asked for.

    Args:
      given: the arguments of `runs_parser`.

    Returns:
      0.

    Raises:
      ConfigError: when there is no run, a run cannot be read, or no run has the metric that is asked for.
    """
    require_writable({"--plot": given.plot})
    found = [run for given_path in given.runs or ["runs"] for run in _below(Path(given_path))]
    known = sorted({name for run in found for record in run.records for name in record.metrics})
    asked = given.plot is not None or given.metric != SORTED_BY
    if asked and known and given.metric not in known:
        raise ConfigError(f"--metric {given.metric}: no run has it; there are {', '.join(known)}")
    best = {id(run): run.best(given.metric, highest=given.highest) for run in found}
    sign = -1 if given.highest else 1
    found.sort(key=lambda run: (best[id(run)] is None, sign * (best[id(run)] or 0.0)))
    different = differences(found)
    if given.json:
        print(json.dumps({"runs": [_plain(run, given) for run in found], "differences": different}, indent=2))
    else:
        print(_table(found, given))
        if given.differences:
            print("", _settings(found, different), sep="\n")
    if given.plot is not None:
        series = dict(zip(_names(found), (run.records for run in found), strict=True))
        try:
            note = plot_runs(series, given.plot, metric=given.metric)
        except (OSError, ValueError) as error:  # an ending that matplotlib does not know
            raise ConfigError(f"--plot {given.plot}: {error}") from error
        if note:
            raise ConfigError(f"--plot {given.plot}: {note}")
        if not given.json:
            print(f"\nwritten   {given.plot}")
    return 0


def differences(found: Sequence[Found]) -> dict[str, list[Any]]:
    """Every setting that is not the same in all runs, with its value in each."""
    keys = dict.fromkeys(key for run in found for key in run.settings)
    values = {key: [run.settings.get(key) for run in found] for key in keys if key.split(".")[0] not in _WITHOUT_EFFECT}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each)}


def _below(path: Path) -> Iterator[Found]:
    """Yield the run in a folder, or the runs inside it."""
    if (path / NEWEST).is_file():
        yield _read(path)
        return
    inside = sorted(each for each in path.iterdir() if (each / NEWEST).is_file()) if path.is_dir() else []
    if not inside:
        raise ConfigError(f"{path}: no run has written there ({NEWEST} is missing)")
    yield from map(_read, inside)


def _read(folder: Path) -> Found:
    try:
        content = yaml_in(folder / NEWEST)
        records = read_records(folder / RECORDS) if (folder / RECORDS).is_file() else []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: cannot be read ({' '.join(str(error).split())})") from error
    settings = {key: value for key, value in flat(content) if value != {}} if isinstance(content, Mapping) else {}
    return Found(folder, settings, records, list(checkpoints_in(folder / CHECKPOINT_FOLDER)))


def _names(found: Sequence[Found]) -> list[str]:
    """The names of the runs' folders; full paths if several have the same name."""
    names = [run.folder.name for run in found]
    return names if len(set(names)) == len(names) else [run.folder.as_posix() for run in found]


def _table(found: Sequence[Found], given: argparse.Namespace) -> str:
    metric = given.metric
    columns = ["run", "steps", "loss", metric, f"best {metric}", "tokens/s", "minutes", "checkpoints"]
    rows = []
    for run in found:
        of = f"{run.records[-1].step if run.records else 0:,} of {run.settings.get('train.steps', 0):,}"
        seconds = run.last("wall_time")
        rows.append([
            run.folder.as_posix(), of, _number(run.last("loss")), _number(run.last(metric)),
            _number(run.best(metric, highest=given.highest)),
            _speed(run), "-" if seconds is None else f"{seconds / 60:.1f}",
            ", ".join(map(str, run.checkpoints[-3:])) or run.settings.get("checkpoint.url") or "-",
        ])  # fmt: skip
    return aligned(columns, rows, left=1, spare=("minutes", "checkpoints", "tokens/s"))


def _speed(run: Found) -> str:
    """Returns the newest speed in tokens per second, or in examples if the run's data is the user's own."""
    tokens, examples = run.last("tokens_per_second"), run.last("examples_per_second")
    if tokens is None:
        return "-" if examples is None else f"{examples:,.0f} examples/s"
    return f"{tokens:,.0f}"


def _settings(found: Sequence[Found], different: Mapping[str, list[Any]]) -> str:
    if not different:
        return "the settings of all runs are the same"
    rows = [[key, *("-" if value is None else str(value) for value in values)] for key, values in different.items()]
    return aligned(["setting", *_names(found)], rows, left=1)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _plain(run: Found, given: argparse.Namespace) -> dict[str, Any]:
    """Returns the run's values for JSON."""
    metric = given.metric
    return json_values({
        "run": run.folder.as_posix(),
        "step": run.records[-1].step if run.records else 0,
        "loss": run.last("loss"),
        metric: run.last(metric),
        f"best_{metric}": run.best(metric, highest=given.highest),
        "checkpoints": list(run.checkpoints),
    })  # fmt: skip


# --------------------------------------------------------------------------------------------------
# `axonml-jax eval RUN`: loss, perplexity and speed of a checkpoint, on any part of any text, under any plan.
# --------------------------------------------------------------------------------------------------


def eval_run(given: argparse.Namespace, flags: Sequence[str]) -> int:
    """Print a checkpoint's loss, its perplexity if the loss is the library's own, and the speed of evaluating it.

    Args:
      given: the arguments of `eval_parser`.
      flags: keys of the configuration, such as `--data.path other.txt`.

    Returns:
      0.

    Raises:
      ConfigError: for a run without checkpoints, a text of too few examples, or no validation data.
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
            "there is no validation data, because data of unknown length is not split: give --split train"
        )
    count = _batches(loader, given, config.train.eval_batches)
    whole = given.split == "valid" and bool(data.rest) and (given.batches is None or given.batches > count)
    rest = [make() for _, make in data.rest] if whole else []
    trainer = model.trainer(optax.sgd(0.0), loss_of(config))  # keeps no state
    with closing(iter(loader)) as batches:  # pyright: ignore[reportArgumentType]
        for batch in (next(batches), *rest):
            trainer.evaluate(batch)  # compiles
        from_start(loader)
    own, targets, started = ground.own is not None, [], time.perf_counter()
    weights = targets if config.data.documents else None
    metrics = as_floats(trainer.validate(_counted(chain(islice(loader, count), rest), targets, own), weights))
    jax.block_until_ready(model.variables)
    seconds = time.perf_counter() - started
    units, total = "examples" if own else "tokens", int(sum(targets))
    more = {"step": run.step, "split": given.split, "batches": len(targets) - len(rest) + bool(rest), units: total}
    if not own and config.loss.class_path is None:
        more["perplexity"] = math.exp(min(metrics["loss"], 700.0))
    more[f"{units}_per_second"] = total / seconds
    size = data.sizes[given.split == "valid"]
    of = f" of {size:,}" if own and size is not None and total < size else ""
    _print(given, metrics, more, f"{run.folder}, step {run.step}, on {ground.device_words}", units, of)
    return 0


def _batches(loader: DataLoader, given: argparse.Namespace, usual: int | None) -> int:
    """The number of batches to take.

    Raises:
      ConfigError: for data of unknown length, if neither `--batches` nor, on the validation part, `usual` is given.
    """
    try:
        return min(given.batches or len(loader), len(loader))
    except TypeError:
        if count := given.batches or (usual if given.split == "valid" else None):
            return count
        raise ConfigError("--batches: give a number, because the length of this data is unknown") from None


def _counted(batches: Iterator[Any], targets: list[float], own: bool) -> Iterator[Any]:
    """Pass batches through, and append each one's number of counted targets (own data: examples) to a list."""

    def number(batch: Any) -> Any:
        return len(jax.tree.leaves(batch)[0]) if own else jnp.sum(counted(batch["targets"]))

    count = jax.jit(number)
    for batch in batches:
        targets.append(float(to_host(count(batch))))
        yield batch


def _print(
    given: argparse.Namespace, metrics: dict[str, float], more: dict, where: str, units: str, of: str = ""
) -> None:
    if given.json:
        print0(json.dumps(json_values(more | metrics)))
        return
    print0(where)
    print0(f"{given.split:<12} {more['batches']:,} batches, {more[units]:,}{of} {units}")
    print0(f"{'loss':<12} {metrics['loss']:.4f}{' nats per token' * ('perplexity' in more)}")
    if "perplexity" in more:
        print0(f"{'perplexity':<12} {more['perplexity']:,.4f}")
    for name in sorted(set(metrics) - {"loss"}):
        print0(f"{name:<12} {metrics[name]:.4f}")
    print0(f"{'speed':<12} {more[f'{units}_per_second']:,.0f} {units} per second")


# --------------------------------------------------------------------------------------------------
# `axonml-jax generate RUN`: text from a trained run, written as it comes.
# --------------------------------------------------------------------------------------------------

_PATIENCE = 86_400.0
"""Seconds that the other processes wait for a prompt that is typed in the main one."""


def generate_text(given: argparse.Namespace, flags: Sequence[str]) -> int:
    """Continue a prompt: `--prompt`, a file, piped input, or lines typed one by one.

    Args:
      given: the arguments of `generate_parser`.
      flags: keys of the configuration, such as `--mesh.fsdp 4`.

    Returns:
      0.

    Raises:
      ConfigError: for a run without checkpoints, options that cannot work, or an empty prompt.
    """
    sampling = Sampling(temperature=given.temperature, top_k=given.top_k, top_p=given.top_p)
    if problems := [*sampling.problems(), *_problems(given)]:
        raise ConfigError("; ".join(problems))
    run = saved_run("generate", given, flags)
    run.config.transformer_for("generate")
    all_or_refuse(partial(check_tokenizer, run.config))
    all_or_refuse(partial(start_devices, run.config.devices.simulated))  # the processes that read a file together
    [prompts] = all_or_refuse(partial(_given, given))
    ground, model = run.open()
    if ground.world.is_main_process:
        print(f"{run.folder}, step {run.step}, on {ground.device_words}", file=sys.stderr)
    for number, prompt in enumerate(prompts or _heard(given)):
        key = jax.random.fold_in(jax.random.key(given.seed), number)
        _continue(run, model, prompt, given, sampling, key)
    return 0


def _problems(given: argparse.Namespace) -> Iterator[str]:
    if given.length < 1:
        yield f"length={given.length} is below 1"
    if given.count < 1:
        yield f"--count {given.count}: is below 1"
    if not -(2**63) <= given.seed < 2**63:
        yield f"--seed {given.seed}: does not fit 64 bits"
    if "" in given.stop:
        yield "--stop '': every text ends with it at once: give at least one character"
    if given.prompt is not None and given.prompt_file is not None:
        yield "--prompt and --prompt-file both say how the text begins: give one"


def _continue(
    run: SavedRun, model: ParallelModel, prompt: str, given: argparse.Namespace, sampling: Sampling, key: jax.Array
) -> None:
    """Print a prompt and its continuation."""
    tokenizer = load_tokenizer(run.config.data.tokenizer)
    tokens = tokenizer.encode([prompt], special="before")[0][None]
    print0(prompt, end="", flush=True)
    end = None if run.config.data.end is None else tokenizer.id_of(run.config.data.end)
    show = Shown(tokens.shape[1], given.stop, lambda text: print0(text, end="", flush=True), tokenizer, end)
    window = min(run.config.transformer_for("generate").max_length, tokens.shape[1] + given.length)
    drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    generate(model, tokens, given.length, key, window=window, after_token=show, **drawn)
    show.finish()
    print0("", flush=True)


def _given(given: argparse.Namespace) -> list[str]:
    """The prompts given by flags; the main process reads a file, as it may be the only one that has it."""
    if given.prompt is None and given.prompt_file is None:
        return []
    text = given.prompt
    if given.prompt_file is not None:
        text = Team().decide("read --prompt-file", partial(_content, given.prompt_file))
    if not text:
        raise ConfigError("the prompt is empty: give at least one character")
    return [text] * given.count


def _content(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompt-file {path}: is no text in UTF-8 ({error})") from error


def _heard(given: argparse.Namespace) -> Iterator[str]:
    """Yield piped or typed prompts; the main process reads them, and sends them to the others."""
    team = Team(timeout=_PATIENCE)
    text = team.decide("read the prompt", lambda: None if sys.stdin.isatty() else sys.stdin.read())
    if text == "":
        raise ConfigError("no prompt: give --prompt, --prompt-file, or pipe a text in")
    if text is not None:
        yield from [text] * given.count
        return
    while (line := team.decide("read a prompt", _typed)) is not None:
        if line:
            yield line
    print0("")


def _typed() -> str | None:
    """Read a line; None at the end of the input."""
    try:
        return input("prompt> ")
    except EOFError:
        return None


class Shown:
    """Writes the text as its tokens come, until a stop word is complete or the end token comes, neither of which is written.

    Args:
      start: tokens of the prompt, which are not written.
      stop: words that end the text.
      write: takes the next piece.
      tokenizer: of the tokens; None: they are bytes.
      end: the token that ends a document; None: there is none.
    """

    def __init__(
        self,
        start: int,
        stop: Sequence[str],
        write: Callable[[str], None],
        tokenizer: Tokenizer | None = None,
        end: int | None = None,
    ):
        self._start, self._stop, self._write, self._end = start, tuple(stop), write, end
        self._text = TextSoFar(load_tokenizer() if tokenizer is None else tokenizer)
        self._seen, self._held = 0, ""

    def __call__(self, tokens: np.ndarray) -> bool:
        """Take all tokens so far, [1, n]; returns whether a stop word or the end token has come."""
        if not self._seen:  # decoders write a text's first word without the space before it
            self._text.add(tokens[0, : self._start].tolist())
            self._seen = self._start
        new, self._seen = tokens[0, self._seen :].tolist(), tokens.shape[1]
        ended = self._end in new
        self._held += self._text.add(new[: new.index(self._end)] if ended else new)
        ends = [at for word in self._stop if (at := self._held.find(word)) >= 0]
        if ends:
            self._write(self._held[: min(ends)])
            self._held = ""
            return True
        safe = len(self._held) - max((_begun(self._held, word) for word in self._stop), default=0)
        self._write(self._held[:safe])
        self._held = self._held[safe:]
        return ended

    def finish(self) -> None:
        """Write what was held back."""
        self._write(self._held + self._text.add([], final=True))
        self._held = ""


def _begun(text: str, word: str) -> int:
    """Returns how many characters at the end of a text are the beginning of a word.

    >>> _begun("it is the e", "end"), _begun("it is", "end")
    (1, 0)
    """
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)
