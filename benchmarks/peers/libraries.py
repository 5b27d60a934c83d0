"""What libraries would do in the place of ours, by running both: policies, paths, mixtures, packing, configurations.

    python benchmarks/peers/libraries.py

Every line is a promise and what became of it; an assertion fails once a library keeps a promise for which ours stands
(docs/adr/0027). A minute on one core.
"""

import datetime
import itertools
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import grain
import numpy as np
from etils import epath
from jsonargparse import ArgumentError, ArgumentParser
from orbax.checkpoint import checkpoint_managers as orbax

from axonml_jax.checkpoint.retention import Retention, best_of
from axonml_jax.data.documents import Document, PackedDocuments
from axonml_jax.data.streams import mix

DAY = 86_400.0
LENGTH = 128


def kept(policy, saved, metrics=None):
    """The steps that a policy of Orbax keeps of checkpoints saved at these times, seconds."""
    when = lambda seconds: datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)
    infos = [SimpleNamespace(step=k, time=when(t), metrics=(metrics or {}).get(k)) for k, t in saved.items()]
    chosen = policy.should_preserve(infos, context=orbax.PreservationContext())
    return [step for step, stays in zip(saved, chosen, strict=True) if stays]


def stays(rules, saved):
    """The same of ours."""
    return sorted(set(saved) - set(rules.deletes(saved)))


def preservation():
    """Orbax's preservation policies beside `Retention`."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        saved = {step: step * DAY for step in sorted(set(rng.integers(1, 60, 15).tolist()))}
        newest, every = int(rng.integers(1, 6)), int(rng.integers(2, 9))
        policy = orbax.AnyPreservationPolicy([orbax.LatestN(newest), orbax.EveryNSteps(every)])
        assert kept(policy, saved) == stays(Retention(keep=newest, every=every), saved)
    print("newest and every n steps: the same, 100 of 100; ours are two lines")
    last_month = time.time() - 30 * DAY
    saved = {step: last_month + step * DAY for step in range(1, 11)}
    theirs = kept(orbax.LatestDuration(datetime.timedelta(days=3)), saved)
    ours = stays(Retention(keep=1, seconds=3 * DAY), saved)
    assert (theirs, ours) == ([], [8, 9, 10])
    print(f"those of three days, of a run that lay for weeks: Orbax keeps {theirs}, ours {ours}")
    lowest, wrong = orbax.BestN(get_metric_fn=lambda of: of["loss"], reverse=True, n=1), 0
    orders = list(itertools.permutations((0.5, 1.0, 2.0, math.nan)))
    for losses in orders:
        metrics = {step: {"loss": loss} for step, loss in enumerate(losses)}
        right = losses.index(0.5)
        assert best_of({step: SimpleNamespace(metrics=of) for step, of in metrics.items()}, "loss", "min") == right
        wrong += kept(lowest, dict.fromkeys(metrics, 0.0), metrics) != [right]
    assert wrong
    print(f"the lowest loss where one is NaN: Orbax keeps another in {wrong} of {len(orders)} orders, ours in none")


def paths():
    """etils' paths beside `ObjectStore` and files that are written once."""
    with tempfile.TemporaryDirectory() as folder:
        code = "from etils import epath; import sys; epath.Path(sys.argv[1]).exists()"
        done = subprocess.run(
            [sys.executable, "-c", code, "s3://bucket/run"], capture_output=True, text=True, cwd=folder
        )
    assert done.returncode != 0
    print(f"s3://bucket/run, with what is installed here: {done.stderr.strip().splitlines()[-1]}")
    source = Path(epath.backend.__file__).read_text("utf-8")
    assert "fsync" not in source and "O_EXCL" not in source
    print("a file that is on disk before it is named, and one that only one process may make: not in etils' backends")


def mixtures():
    """grain's mixtures beside `mix`."""
    few, many = grain.MapDataset.range(10), grain.MapDataset.range(1_000)
    theirs, ours = len(grain.MapDataset.mix([few, many])), len(mix({"few": few, "many": many}, {"few": 1, "many": 1}))
    assert (theirs, ours) == (20, 1_010)
    print(f"an epoch of 10 and 1,000 samples in equal shares: grain {theirs}, ours {ours}, the few begin again")
    mixed = grain.MapDataset.mix([few.repeat(), many.repeat()], weights=[0.7231, 0.2769])
    count = 102_400
    drawn = sum(mixed._selection_map[k][0] == 0 for k in range(count)) / count
    ours = mix({"few": few, "many": many}, {"few": 0.7231, "many": 0.2769})._shares.sources(np.arange(count))
    assert abs(drawn - 0.7231) > 5e-5 and abs((ours == 0).mean() - 0.7231) < 1e-5
    print(f"a share of 0.7231 over 102,400 samples: grain {drawn:.5f}, ours {(ours == 0).mean():.5f}")
    wide = [grain.MapDataset.range(10**6).shuffle(seed=k).repeat() for k in range(2)]
    mixed, arrays = grain.MapDataset.mix(wide, weights=[3, 1]), {"a": np.arange(10**6), "b": np.arange(10**6)}
    own = mix(arrays, {"a": 3, "b": 1})
    orders = lambda start: own.order_of(0, np.arange(start, start + 256), shuffle=True, seed=0)
    orders(0)
    speeds = [_per_second(lambda start: [mixed[k] for k in range(start, start + 256)]), _per_second(orders)]
    print(
        f"indices per second of two sources, shuffled: grain {speeds[0]:,.0f}, ours {speeds[1]:,.0f} and 16 bytes a sample"
    )


def _per_second(take, blocks=40):
    begin = time.perf_counter()
    for block in range(blocks):
        take(256 * block)
    return 256 * blocks / (time.perf_counter() - begin)


def packing():
    """grain's packing beside `PackedDocuments`."""
    sizes = np.clip(np.random.default_rng(0).lognormal(4, 0.9, 2_000).astype(int), 2, 600)
    documents = [np.arange(size, dtype=np.int32) for size in sizes]
    fitting = [each for each in documents if len(each) <= LENGTH]

    def packed(some, bins):
        rows = grain.MapDataset.source([{"tokens": each[:-1]} for each in some]).to_iter_dataset()
        fit = grain.experimental.FirstFitPackIterDataset(rows, length_struct={"tokens": LENGTH}, num_packing_bins=bins)
        return np.concatenate([row["tokens_segment_ids"] for row in fit])

    try:
        packed(documents, 64)
        raise AssertionError("grain packs documents longer than a row")
    except ValueError as error:
        print(f"a document longer than a row: grain refuses it ({str(error)[:40]}...), ours cuts it")
    ours = PackedDocuments([Document(each, 0) for each in fitting], LENGTH)
    theirs, own = float((packed(fitting, 64) > 0).mean()), ours.num_tokens / len(ours) / LENGTH
    assert own > theirs
    print(f"how full rows are: grain first fit, 64 bins, {theirs:.3f}; ours {own:.3f}, and row k is made by itself")


@dataclass
class Settings:
    """A section."""

    steps: int = 1
    rate: float = 0.1


def configurations():
    """jsonargparse's own errors and objects beside `read_config`."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Settings, "train")
    try:
        parser.parse_object({"train": {"stepz": 1, "rate": "fast", "more": 2}})
        raise AssertionError("jsonargparse takes unknown keys")
    except ArgumentError as error:
        named = [key for key in ("stepz", "rate", "more") if key in str(error)]
        assert len(named) < 3
        print(f"three wrong keys: jsonargparse names {len(named)}, ours all, with the nearest key that exists")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "their_module.py").write_text("print('code ran')\nclass Thing: pass\n")
        code = (
            "from jsonargparse import ArgumentParser; p = ArgumentParser(); p.add_argument('--x', type=object); "
            "p.parse_object({'x': {'class_path': 'their_module.Thing'}})"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert "code ran" in done.stdout
    print("a path in a configuration: jsonargparse imports it as it parses; ours reads it, and imports what is allowed")


if __name__ == "__main__":
    for trial in (preservation, paths, mixtures, packing, configurations):
        print(f"\n{trial.__doc__}")
        trial()
