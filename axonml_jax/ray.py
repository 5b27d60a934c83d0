"""Training under Ray Train, which starts, watches and restarts the workers.

Needs the extra `ray`. `ax.init()` in a worker finds its rank by itself; this module reports checkpoints and metrics to Ray.
"""

import argparse
import sys
import tempfile
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from axonml_jax.base import TERMINATED
from axonml_jax.config.config import ConfigError, RunConfig, add_imports, as_dict, read_config
from axonml_jax.training.callbacks import Callback, TrainingEvent, as_floats

if TYPE_CHECKING:
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # pyright: ignore[reportMissingImports]

_ON_DEVICE = 256
"""Steps whose metrics may be on the devices: older ones have finished, and reading those waits for nothing."""

_MOST_STEPS = 100_000
"""Steps whose metrics are kept: among several processes a checkpoint is reported at the next save."""


def trainer(
    loop: Callable[..., Any],
    num_workers: int,
    *,
    use_gpu: bool = False,
    resources_per_worker: Mapping[str, float] | None = None,
    max_failures: int = 3,
    num_to_keep: int | None = 3,
    config: Mapping[str, Any] | None = None,
    **run: Any,
) -> "DataParallelTrainer":
    """Make Ray's trainer of a loop that calls `ax.init()`; `.fit()` runs it.

    One worker per machine with all its GPUs is best: `resources_per_worker={"GPU": 8}`. A worker that is lost costs one of
    `max_failures`; all workers start again, and the loop goes on from its newest checkpoint.

    Args:
      loop: what every worker runs; called with `config` where it takes an argument.
      num_workers: processes of the job.
      use_gpu: whether workers get GPUs, one each unless `resources_per_worker` says more.
      resources_per_worker: of Ray, such as `{"GPU": 8}`.
      max_failures: how often the workers start again.
      num_to_keep: how many of the newest reported checkpoints Ray keeps; it deletes the others. None keeps all.
      config: given to the loop.
      **run: further arguments of `ray.train.RunConfig`: `name`, `storage_path` (which all machines share), ...

    Returns:
      A `DataParallelTrainer`, whose `fit()` returns Ray's `Result`.

    Raises:
      ImportError: when Ray Train is not installed.
    """
    ray_train = _ray_train()
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # pyright: ignore[reportMissingImports]

    resources = None if resources_per_worker is None else dict(resources_per_worker)
    return DataParallelTrainer(
        loop,
        train_loop_config=None if config is None else dict(config),
        scaling_config=ray_train.ScalingConfig(
            num_workers=num_workers, use_gpu=use_gpu, resources_per_worker=resources
        ),
        run_config=ray_train.RunConfig(
            failure_config=ray_train.FailureConfig(max_failures=max_failures),
            checkpoint_config=ray_train.CheckpointConfig(num_to_keep=num_to_keep),
            **run,
        ),
    )


def train(
    config: str,
    num_workers: int,
    overrides: Sequence[str] = (),
    *,
    allow_imports: Sequence[str] = (),
    **options: Any,
) -> "DataParallelTrainer":
    """Make Ray's trainer of a configuration, as `axonml-jax train` runs it; `.fit()` runs it.

    The file is read and checked here, and its text goes to the workers, without `devices.simulated`. The run's folder is below
    Ray's, unless checkpoints are at a URL, and a restarted run goes on from its newest checkpoint. `checkpoint.keep` becomes
    Ray's `num_to_keep`.

    Args:
      config: the path of a file, or the name of a configuration that comes with the package.
      num_workers: processes of the job.
      overrides: flags, as on the command line: `["--train.steps", "100"]`.
      allow_imports: packages that the configuration may import.
      **options: those of `trainer`.

    Raises:
      ConfigError: for a configuration that cannot be read, or settings by which the library would delete checkpoints that
        Ray lists.
    """
    flags = ["--devices.simulated", "null"]
    given = read_config("train", [config, *overrides, *flags], imports=allow_imports)
    _refuse_other_keepers(given)
    kept = given.checkpoint.keep
    if given.checkpoint.url is None:
        given = replace(given, checkpoint=replace(given.checkpoint, keep=None))
    settings = as_dict(replace(given, resume=given.resume or "auto"))
    sent = {"text": yaml.safe_dump(settings, sort_keys=False), "imports": list(allow_imports)}
    return trainer(_run, num_workers, config=sent, **{"num_to_keep": kept, **options})  # pyright: ignore[reportArgumentType]


def folder(name: str = "checkpoints") -> str:
    """Returns a folder below the run's folder in Ray's storage; checkpoints in it are listed by Ray without a copy.

    Raises:
      ValueError: for a storage that is no file system of this machine.
    """
    import pyarrow.fs

    storage = _ray_train().get_context().get_storage()
    if not isinstance(storage.storage_filesystem, pyarrow.fs.LocalFileSystem):
        raise ValueError(
            f"axonml_jax.ray.folder: Ray's storage {storage.storage_fs_path} is no disk: give storage_path, a folder that all "
            "machines share, or keep checkpoints at a URL (CheckpointManager(url), checkpoint.url), of which Ray is not told"
        )
    return f"{storage.experiment_fs_path}/{name}"


class RayReport(Callback):
    """Tells Ray Train of every checkpoint below `folder()`, with the metrics of its step; nothing is copied.

    Ray alone may delete what it lists: give `CheckpointManager(keep=None)`, and `num_to_keep` to `trainer`. A report waits
    until Ray's controller has looked, which takes up to two seconds. Metrics of the newest 100,000 steps are kept: a checkpoint
    that is reported later comes with its step alone.

    Args:
      every: report metrics without a checkpoint too, every so many steps; None: with checkpoints alone.
    """

    def __init__(self, every: int | None = None):
        if every is not None and every < 1:
            raise ValueError(f"RayReport(every={every}): must be at least 1")
        self._every = every
        self._seen: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._unread: deque[int] = deque()  # steps whose metrics are still arrays
        self._listed: list[str] = []

    def on_step(self, event: TrainingEvent) -> None:
        """Keep the step's metrics until a checkpoint of this step, or of a later one, is reported."""
        self._seen[event.step] = dict(event.metrics)
        self._seen.move_to_end(event.step)
        self._unread.append(event.step)
        if len(self._unread) >= _ON_DEVICE:
            for step in [self._unread.popleft() for _ in range(_ON_DEVICE // 2)]:
                if step in self._seen:
                    self._seen[step] = as_floats(self._seen[step])
        while len(self._seen) > _MOST_STEPS:
            self._seen.popitem(last=False)
        if self._every is not None and event.step % self._every == 0:
            _ray_train().report({"step": event.step, **as_floats(self._seen[event.step])})

    def on_eval(self, event: TrainingEvent) -> None:
        """Keep the validation's means as `valid_*` of the step."""
        self._seen.setdefault(event.step, {}).update({f"valid_{name}": each for name, each in event.metrics.items()})

    def on_save(self, event: TrainingEvent) -> None:
        """Report the checkpoint to Ray, with the metrics of its own step; one at a URL is not reported."""
        metrics = as_floats(self._seen.get(event.step, {}))
        self._seen = OrderedDict((step, each) for step, each in self._seen.items() if step > event.step)
        if "://" in str(event.path):  # Ray lists what is in its own storage alone
            return
        from ray.train.v2.api.report_config import CheckpointUploadMode  # pyright: ignore[reportMissingImports]

        if event.is_main_process:
            self._require_listed()
        self._listed.append(str(event.path))
        _ray_train().report(
            {"step": event.step, **metrics},
            checkpoint=_ray_train().Checkpoint(str(event.path)),
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )

    def _require_listed(self) -> None:
        """Refuse to go on if a checkpoint that Ray lists was deleted: a restarted driver would look for it."""
        kept = _num_to_keep()
        listed = self._listed if kept is None else self._listed[-kept:]
        if gone := [path for path in listed if not Path(path).is_dir()]:
            raise ValueError(
                f"Ray lists {', '.join(gone)}, which was deleted: a driver that is started again would refuse this run. Let "
                "Ray alone delete: CheckpointManager(keep=None), and axonml_jax.ray.trainer(num_to_keep=3)"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m axonml_jax.ray CONFIG --num-workers N`: a driver, such as the entry point of a Ray job.

    Returns:
      0; a training that fails raises Ray's error, with the workers' texts.
    """
    parser = argparse.ArgumentParser(prog="python -m axonml_jax.ray", allow_abbrev=False)
    parser.add_argument("config", help="a configuration, as for axonml-jax train; flags that change it may follow")
    parser.add_argument("--num-workers", type=int, required=True, metavar="N", help="processes, one a machine")
    parser.add_argument("--gpus-per-worker", type=float, default=0, metavar="N", help="GPUs of each")
    parser.add_argument("--storage", required=True, metavar="DIR", help="a folder that all machines share")
    named = "of the run there and in its configuration; the same name goes on with it"
    parser.add_argument("--name", metavar="NAME", help=named)
    parser.add_argument("--max-failures", type=int, default=3, metavar="N", help="how often all workers start again")
    add_imports(parser)
    given, overrides = parser.parse_known_args(argv)
    result = train(
        given.config,
        given.num_workers,
        overrides if given.name is None else [*overrides, "--name", given.name],
        allow_imports=given.allow_imports,
        use_gpu=given.gpus_per_worker > 0,
        resources_per_worker={"GPU": given.gpus_per_worker} if given.gpus_per_worker else None,
        max_failures=given.max_failures,
        storage_path=given.storage,
        name=given.name,
    ).fit()
    print(f"checkpoint {result.checkpoint and result.checkpoint.path}", flush=True)
    return 0


def _run(sent: Mapping[str, Any]) -> None:
    """Run a configuration in a worker of `train`."""
    from axonml_jax.cli.train import train as run

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "config.yaml"
        path.write_text(sent["text"], encoding="utf-8")
        config = read_config("train", [str(path)], imports=sent["imports"])
    if config.checkpoint.url is None:
        config = replace(config, output=replace(config.output, dir=folder("runs")))
    if status := run(config, more=[RayReport()]):
        raise RuntimeError(f"the training of {config.name} has ended with status {status}: {_STATUS.get(status, '')}")


_STATUS = {
    TERMINATED: "stopped by SIGTERM and saved; started again, it goes on from there",
    3: "too many updates in a row were not finite, or the loss spiked too often (spikes.limit)",
    5: "a first batch differs from one device's (train.check)",
}


def _refuse_other_keepers(config: RunConfig) -> None:
    checkpoint = config.checkpoint
    given = {name: getattr(checkpoint, name) for name in ("keep_every", "keep_for", "best", "memory_every")}
    wrong = [f"checkpoint.{name}={value}" for name, value in given.items() if value not in (None, False)]
    if wrong and checkpoint.url is None:
        raise ConfigError(
            f"{', '.join(wrong)}: Ray deletes the checkpoints that it lists, by their number (checkpoint.keep), and starts "
            "processes anew; leave these out, or keep checkpoints at a URL (checkpoint.url), of which Ray is not told"
        )


def _num_to_keep() -> int | None:
    """Returns how many checkpoints Ray keeps of this run; None: all."""
    from ray.train.v2._internal.execution.context import get_train_context  # pyright: ignore[reportMissingImports]

    return get_train_context().train_run_context.run_config.checkpoint_config.num_to_keep


def _ray_train() -> Any:
    try:
        import ray.train  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("axonml_jax.ray needs Ray Train: pip install 'axonml-jax[ray]'") from error
    return ray.train


if __name__ == "__main__":
    from axonml_jax.ray import main as driver  # so that workers find what they run by its name

    sys.exit(driver())
