"""Retention: which of a run's checkpoints are kept."""

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axonml_jax.checkpoint.format import Manifest


_HIGHER = (
    "acc|accuracy|auc|auroc|ap|auprc|bleu|chrf|cider|correlation|dice|em|f1|f2|fbeta|iou|jaccard|kappa|map|mcc|meteor|miou|mrr|"
    "ndcg|pearson|precision|psnr|r2|recall|return|reward|rouge|score|sensitivity|spearman|specificity|ssim|top|winrate"
)
_LOWER = "cer|entropy|err|error|loss|losses|mae|mse|nll|perplexity|ppl|rmse|wer"

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Rules for the checkpoints of a run; one is deleted only when no rule keeps it.

    Args:
      keep: how many of the newest stay; None: all.
      every: those whose step is a multiple stay for ever; None: no step does.
      seconds: those that are younger stay, by the times that their manifests say; None: none stays for its age.
      best: the best by this metric stays; None: none does.
      mode: whether that is the lowest or the highest, `"min"` or `"max"`; None: the lowest.

    Raises:
      TypeError: for numbers that are not whole, and a metric that is no name.
      ValueError: for values that are not positive, for rules beside `keep=None`, which keeps all, for another mode, and for a
        metric of which more is better by its name, without a mode.
    """

    keep: int | None = 3
    every: int | None = None
    seconds: float | None = None
    best: str | None = None
    mode: str | None = None

    def __post_init__(self):
        for name, value in (("keep", self.keep), ("keep_every", self.every)):
            if value is not None:
                require_count(name, value, ", or None")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"keep_for={self.seconds} must be more than 0 seconds, or None")
        if self.keep is None and (self.every, self.seconds) != (None, None):
            rule = "keep_every" if self.every is not None else "keep_for"
            raise ValueError(
                f"keep=None keeps all, and {rule} adds nothing: give a number, keep=1 for the newest alone"
            )
        if self.best is not None and not (isinstance(self.best, str) and self.best):
            raise TypeError(f"best={self.best!r} must be the name of a metric that `save` is given, or None")
        if self.mode is None and self.best is not None and means_higher(self.best):
            raise ValueError(
                f"best={self.best!r} without mode would keep the lowest, and its name says that more is better: give "
                "mode='max', or mode='min' where it is less"
            )
        if self.mode is not None and not (isinstance(self.mode, str) and self.mode in ("min", "max")):
            raise ValueError(f"mode={self.mode!r} must be 'min' or 'max'")

    def deletes_of(
        self, read: Callable[[], Mapping[int, "Manifest"]], spared: Collection[int | None] = ()
    ) -> list[int]:
        """`deletes`, from manifests that are read only if something may be deleted."""
        found = read() if self.keep is not None else {}
        best = None if self.best is None else best_of(found, self.best, self.mode or "min")
        return self.deletes({step: said.saved_at for step, said in found.items()}, {*spared, best})

    def deletes(self, times: Mapping[int, float | None], spared: Collection[int | None] = ()) -> list[int]:
        """The steps whose checkpoints go.

        >>> day = 86_400.0
        >>> saved = {step: step * day for step in range(1, 11)}  # one a day
        >>> Retention(keep=2, every=4, seconds=3 * day).deletes(saved, spared=[3])
        [1, 2, 5, 6, 7]

        Args:
          times: when each step's checkpoint was saved, in seconds of any clock; None where it is not known.
          spared: steps that stay in any case: the one just committed, the best.
        """
        if self.keep is None:
            return []
        steps = sorted(times)
        stay = {*steps[-self.keep :], *spared}
        if self.every is not None:
            stay |= {step for step in steps if step % self.every == 0}
        if self.seconds is not None:
            ages = _ages(times, most=self.seconds / 2)
            stay |= {step for step in steps if ages[step] < self.seconds}
        return [step for step in steps if step not in stay]


def best_of(found: Mapping[int, "Manifest"], metric: str, mode: str) -> int | None:
    """The step whose checkpoint is the best by a metric, of equal ones the last; None where none has it.

    Args:
      found: what checkpoints say, by step.
      metric: its name.
      mode: `"min"` or `"max"`.
    """
    sign = 1 if mode == "min" else -1
    values = {step: sign * said.metrics.get(metric, math.nan) for step, said in found.items()}
    known = [step for step, value in values.items() if math.isfinite(value)]
    return min(known, key=lambda step: (values[step], -step), default=None)


def means_higher(metric: str) -> bool:
    """Whether a metric's name says that a higher value is better, as `accuracy` does.

    >>> [means_higher(name) for name in ("valid/top-5-accuracy", "evalF1", "rougeL", "valid_loss", "score_error", "x")]
    [True, True, True, False, False, False]
    """
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+\d*|[A-Z]+\d*", metric)}
    any_of = lambda names: any(re.fullmatch(rf"({names})\d*", word) for word in words)
    return any_of(_HIGHER) and not any_of(_LOWER)


def require_count(name: str, value: Any, otherwise: str = "") -> None:
    """Check that a setting is a whole number of at least 1; NumPy and JAX integers are accepted.

    Raises:
      TypeError: when it is no whole number.
      ValueError: when it is below 1.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name}={value!r} must be a whole number of at least 1{otherwise}")
    if number < 1:
        raise ValueError(f"{name}={value} must be at least 1{otherwise}")


def seconds_of(duration: float | str) -> float:
    """A duration in seconds: a number of them, or a number with a unit, `s`, `m`, `h`, `d` or `w`.

    >>> seconds_of("7d"), seconds_of("1.5h"), seconds_of("90"), seconds_of(90)
    (604800.0, 5400.0, 90.0, 90.0)

    Raises:
      ValueError: for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([smhdw]?)", str(duration).strip())
    if isinstance(duration, bool) or match is None:
        raise ValueError(f'keep_for={duration!r} must be seconds, or a text such as "90m", "12h", "7d" or "2w"')
    return float(match[1]) * _UNITS[match[2] or "s"]


def _ages(times: Mapping[int, float | None], most: float) -> dict[int, float]:
    """The age of each checkpoint in seconds relative to the newest: sums of the times between neighbours, so clocks may jump.

    One that is negative counts as nothing (the clock was set back), and each counts for `most` at most (the clock was set
    forward, or the run has lain for a month). So no clock is asked now, and one jump alone makes no checkpoint old. One that
    says no time is as old as the next newer one that does.
    """
    ages: dict[int, float] = {}
    age, newer = 0.0, None
    for step in sorted(times, reverse=True):
        time = times[step]
        if time is not None and newer is not None:
            age += min(max(newer - time, 0.0), most)
        newer = newer if time is None else time
        ages[step] = age
    return ages
