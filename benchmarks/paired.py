"""Timing that survives a noisy machine: alternating runs, the ratio of medians, its bootstrap 95% interval.

Imported by the other benchmarks. Sides take turns within every round and the order of a round is shuffled, so that a slow
minute of the machine falls on all of them; a round's times are kept together when rounds are resampled.
"""

import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True)
class Ratio:
    """The median of one side's times over the median of another's.

    Attributes:
      value: the ratio.
      low, high: its bootstrap 95% interval over rounds.
      rounds: number of rounds.
    """

    value: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def alternate(sides: Mapping[str, Callable[[], object]], rounds: int, seed: int = 0) -> dict[str, list[float]]:
    """Seconds of every side in every round.

    Args:
      sides: what to time, by name; a call returns when its work is done, and what it returns is not looked at.
      rounds: each side runs once per round, in an order drawn anew (alike in every process for the same `seed`).
    """
    rng = np.random.default_rng(seed)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name in rng.permutation(list(sides)):
            start = time.perf_counter()
            sides[name]()
            times[name].append(time.perf_counter() - start)
    return times


def ratio(times: Sequence[float], base: Sequence[float], seed: int = 0) -> Ratio:
    """The ratio of medians of two sides timed in the same rounds."""
    pairs = np.stack([np.asarray(times), np.asarray(base)], axis=1)
    picked = np.random.default_rng(seed).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    medians = np.median(pairs[picked], axis=1)
    low, high = np.percentile(medians[:, 0] / medians[:, 1], [2.5, 97.5])
    value = np.median(pairs[:, 0]) / np.median(pairs[:, 1])
    return Ratio(float(value), float(low), float(high), len(pairs))


def table(times: Mapping[str, Sequence[float]], base: str) -> str:
    """A Markdown table: median and fastest of every side in milliseconds, and its ratio to `base`."""
    rows = ["| side | median ms | fastest ms | ratio of medians to " + base + " |", "| --- | --- | --- | --- |"]
    for name, seconds in times.items():
        shown = "1" if name == base else str(ratio(seconds, times[base]))
        rows.append(f"| {name} | {np.median(seconds) * 1e3:.1f} | {min(seconds) * 1e3:.1f} | {shown} |")
    return "\n".join(rows)


def verdict(measured: Ratio, bar: float) -> str:
    """Whether the ratio is within a bar; "within the noise" when its interval has the bar inside."""
    word = "met" if measured.value <= bar else "missed"
    sure = measured.high <= bar or measured.low > bar
    return f"{measured}, bar {bar}: {word}" + ("" if sure else ", within the noise")


def machine(*packages: str) -> str:
    """One line on where and when this ran: processor, cores, load, versions."""
    load = f"load {os.getloadavg()[0]:.1f}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    python = f"Python {platform.python_version()}"
    return f"{cores}-core {platform.machine()} {sys.platform}, {load}, {python}" + (f", {versions}" if packages else "")
