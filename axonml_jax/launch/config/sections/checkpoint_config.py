"""The section `checkpoint` of a configuration."""

from dataclasses import dataclass

from axonml_jax.checkpoint.keeping.retention import Retention, seconds_of
from axonml_jax.checkpoint.places.object_store import ObjectStore
from axonml_jax.launch.config.lowest import at_least


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What a run keeps of itself, in the folder `checkpoints` of its own folder.

    Attributes:
      every: save every this many steps, after the last, and when SIGTERM asks the run to stop; null saves nothing.
      keep: how many of the newest checkpoints to keep; null keeps all.
      keep_every: keep those too whose step is a multiple of this, for ever; a multiple of every.
      keep_for: keep those too that are younger than this: seconds, or a text such as 90m, 12h, 7d or 2w.
      best: keep the one with the lowest validation loss too; every must then be a multiple of train.eval_every.
      verify: read every checkpoint again from its disk before it counts and an older one is deleted.
      max_failures: that many saves in a row that a full, read-only or failing disk spoils end the run; fewer are passed over
        with a warning, and the next step that is due is saved; 1 ends it at the first.
      mirror: an object store's URL for this run, s3://bucket/path or gs://bucket/path: checkpoints are copied there, and
        resume=auto goes on from there where the run's folder is gone; null copies nothing.
      url: where the checkpoints are instead of in the run's folder: an object store's URL for this run, as of mirror; null: in
        the run's folder.
      staging: with url, the folder in which a checkpoint is made before it is sent, which all processes see; null: one below
        ~/.cache/axonml_jax.
      asynchronous: write to disk while the training goes on.
      memory_every: copy the state every this many steps to memory that outlives the processes, from which restarted ones go on;
        needs axonml-jax launch --max-restarts. null: no copies.
    """

    every: int | None = 500
    keep: int | None = 3
    keep_every: int | None = None
    keep_for: float | str | None = None
    best: bool = False
    verify: bool = False
    max_failures: int = 1
    mirror: str | None = None
    url: str | None = None
    staging: str | None = None
    asynchronous: bool = True
    memory_every: int | None = None

    def __post_init__(self):
        at_least("checkpoint", self, self._problems(), every=1, max_failures=1, memory_every=1)

    def _problems(self) -> list[str]:
        problems = []
        if self.every and self.keep_every and self.keep_every % self.every:
            problems.append(f"keep_every={self.keep_every} is no multiple of checkpoint.every={self.every}")
        try:
            seconds = None if self.keep_for is None else seconds_of(self.keep_for)
            Retention(keep=self.keep, every=self.keep_every, seconds=seconds)
        except ValueError as error:
            problems.append(str(error))
        for name, url in (("mirror", self.mirror), ("url", self.url)):
            try:
                _ = url is None or ObjectStore(url)
            except ValueError as error:
                problems.append(f"{name}: {error}")
        if self.mirror is not None and self.url is not None:
            problems.append(
                f"mirror={self.mirror} copies the run's folder, and url={self.url} keeps none there: give one"
            )
        if self.staging is not None and self.url is None:
            problems.append(f"staging={self.staging} has no effect without checkpoint.url")
        return problems

    @property
    def store(self) -> str | None:
        """The URL under which the run's checkpoints, or copies of them, are."""
        return self.url or self.mirror

    def without_saves(self, resume: str | None) -> list[str]:
        """What has no effect as nothing is saved. A mirror has one where a run is gone on with, which may come back from it."""
        if self.every is not None:
            return []
        copied = self.store if resume is not None else None
        given = {"best": self.best, "verify": self.verify, "max_failures": self.max_failures != 1}
        given |= {name: copied is None and getattr(self, name) for name in ("mirror", "url", "keep_every", "keep_for")}
        found = ", ".join(f"checkpoint.{name}={getattr(self, name)}" for name, there in given.items() if there)
        rule = "no effect while checkpoint.every=null saves nothing: set checkpoint.every, or leave out what has none"
        return [f"{found}: {rule}"] if found else []

    def against_validation(self, eval_every: int | None) -> list[str]:
        """What is wrong beside `train.eval_every`."""
        if not self.best or self.every is None or (eval_every and self.every % eval_every == 0):
            return []
        return [
            f"checkpoint.best=True compares validation losses, but checkpoint.every={self.every} is no multiple of "
            f"train.eval_every={eval_every}"
        ]

    def against_replicas(self, compare_replicas: int | None, replicas_differ: str) -> list[str]:
        """What is wrong beside `train.compare_replicas`."""
        every = self.memory_every
        if every is None or compare_replicas is None or replicas_differ == "warn" or every % compare_replicas == 0:
            return []
        return [
            f"checkpoint.memory_every={every} is no multiple of train.compare_replicas={compare_replicas}: a copy in memory "
            "may be of replicas that differ and were not compared, and a restart would go on from it; compare before every copy"
        ]
