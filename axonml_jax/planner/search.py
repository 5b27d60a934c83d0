"""`plan`: the best way to run a model on a number of devices, with the runners-up, the reasons and the sensitivity."""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from axonml_jax.ledger.predict.predict import predict
from axonml_jax.model.precision import Precision
from axonml_jax.models.config import TransformerConfig
from axonml_jax.parallel.offload import CPUOffload
from axonml_jax.parallel.strategies.strategy import AbstractStrategy
from axonml_jax.planner.answer import Answer, Priced
from axonml_jax.planner.assumptions import Assumptions
from axonml_jax.planner.candidate import Candidate, Question
from axonml_jax.planner.goodput.save_advice import SaveAssumptions
from axonml_jax.planner.hardware import Hardware, hardware
from axonml_jax.planner.legal import REMATS, Way, candidate, legal_meshes, stage_of, ways_on
from axonml_jax.planner.price import price
from axonml_jax.planner.quick import quick
from axonml_jax.planner.searched_axes import SEARCHED

EXACTLY, DOUBTFUL, LEAN = 48, 24, 8
"""How many ways the ledger prices exactly: the fastest that fit by the first price, of those that it finds slightly too
large, and those that need least memory."""

PER_MESH = 3
"""How many of them at most are of one mesh."""

MARGINS = {False: 1.0, True: 1.13}
"""The first price is rough: what it finds this much too large may still fit, without a pipeline and with one."""

_TOO_LARGE = "does not fit in a device's memory"


def plan(
    model: TransformerConfig | Any,
    *,
    num_devices: int,
    hardware: str | Hardware = "v5p",
    global_batch: int,
    length: int | None = None,
    precision: str | Precision | None = "bf16",
    moments: int = 2,
    max_memory: float | None = None,
    axes: tuple[str, ...] = SEARCHED,
    remats: Sequence[str | None] = REMATS,
    offload: bool = False,
    strategies: Sequence[AbstractStrategy] = (),
    runners_up: int = 5,
    assumptions: Assumptions | None = None,
    saves: SaveAssumptions | None = None,
    documents: bool = False,
) -> Answer:
    """Find the fastest plan that fits, on paper: no devices, no trace.

    Every legal mesh (data, pipe, fsdp with a ZeRO stage, expert with a dispatch, context with a method of attention, tensor
    with or without sequence parallelism, or AxoNN's depth, row and col), schedule, number of chunks and of microbatches, and
    recomputation gets a first price; the best of them are priced exactly by the ledger.

    Args:
      model: a transformer's configuration, or a model with one as its attribute `config`.
      num_devices: all of them are used.
      hardware: a name of the table, or `ax.Hardware`.
      global_batch: sequences per update.
      length: of a sequence; None: the model's longest.
      precision: dtypes, as of `ax.Plan`.
      moments: values that the optimizer keeps per parameter (Adam 2).
      max_memory: bytes that a device may use; None: the hardware's, less a margin.
      axes: mesh axes that may have more than one rank.
      remats: kinds of recomputation to consider.
      offload: whether optimizer states may rest in host memory where nothing fits otherwise.
      strategies: strategies of your own that may take the place of `ax.Shard` along `fsdp`.
      runners_up: how many of the next best to keep.
      assumptions: of the cost model.
      saves: what `answer.saving` assumes of failures, restarts and checkpoints; it has no part in the choice.
      documents: whether rows hold several documents, which some kernels of attention do not keep apart.

    Returns:
      An `Answer`; `print` it.

    Raises:
      ValueError: when nothing is legal or nothing fits, with the reasons and what would help.
    """
    asked = _question(model, num_devices, hardware, global_batch, length, precision, moments, max_memory, assumptions)
    asked = replace(asked, saves=saves or SaveAssumptions(), documents=documents)
    illegal, dropped, allowed = Counter(), Counter(), (axes, tuple(remats))
    if others := [axis for axis in axes if axis not in SEARCHED]:
        raise ValueError(
            f"axes={list(axes)}: {', '.join(others)} is none of the axes that are searched, {', '.join(SEARCHED)}; "
            "ax.explain(plan, model=...) prices a plan on any mesh"
        )
    if unknown := set(remats) - set(REMATS):
        raise ValueError(f"remats={list(remats)}: {unknown} is no kind of recomputation; there are {REMATS}")
    found = _search(asked, *allowed, CPUOffload.NONE, illegal, dropped)
    for each in strategies:
        stage_of(each)
        found += _search(replace(asked, strategy=each), *allowed, CPUOffload.NONE, Counter(), dropped)
    if not found and offload:
        found = _search(asked, *allowed, CPUOffload.OPTIMIZER_STATES, Counter(), dropped)
    found = _in_order(found)
    if not found:
        raise ValueError(_nothing(asked, illegal, dropped))
    best, *rest = found
    return Answer(
        asked=asked, best=best, runners_up=tuple(rest[:runners_up]), illegal=dict(illegal), dropped=dict(dropped),
        sensitivity=_sensitivity(asked, found),
    )  # fmt: skip


def _question(model, num_devices, kind, global_batch, length, precision, moments, max_memory, assumptions) -> Question:
    config = model if isinstance(model, TransformerConfig) else getattr(model, "config", None)
    if not isinstance(config, TransformerConfig):
        raise TypeError(f"model={type(model).__name__}: give a TransformerConfig, or a model that has one as `config`")
    chosen = hardware(kind)
    given = assumptions or Assumptions.on(chosen)
    sizes = {"num_devices": num_devices, "global_batch": global_batch, "length": 1 if length is None else length}
    if wrong := ", ".join(f"{name}={value}" for name, value in sizes.items() if value < 1):
        raise ValueError(f"{wrong}: each must be at least 1")
    if Precision.of(precision).products is not None:
        raise ValueError(
            f"precision={precision!r}: the search prices products in the compute dtype, and not all plans that it tries may "
            "round them to 8 bits: search with precision='bf16', which sends and holds the same, and train what it finds "
            "with 'fp8'"
        )
    return Question(
        model=config,
        num_devices=num_devices,
        hardware=chosen,
        global_batch=global_batch,
        length=config.max_length if length is None else length,
        moments=moments,
        precision=precision,
        compute=Precision.of(precision).compute or config.dtype,
        assumptions=given,
        memory=chosen.memory * given.memory_margin if max_memory is None else max_memory,
    )


def _search(
    asked: Question, axes: tuple[str, ...], remats: tuple, offload: CPUOffload, illegal: Counter, dropped: Counter
) -> list[Priced]:
    """The exactly priced ways that fit, fastest first."""
    fitting, doubtful, lean = _Best(EXACTLY), _Best(DOUBTFUL), _Best(LEAN)
    meshes = _meshes(asked, axes, remats, offload, illegal)
    for (degrees, ways), (seconds, sizes) in zip(meshes, quick(meshes, asked, offload), strict=True):
        limit = MARGINS["pipe" in degrees] * asked.memory
        dropped[_TOO_LARGE] += int((sizes > limit).sum())
        make = partial(_candidate, degrees, ways, offload, asked)
        for best, among in ((fitting, sizes <= asked.memory), (doubtful, (sizes > asked.memory) & (sizes <= limit))):
            for i in _fastest(np.flatnonzero(among), seconds, sizes):
                best.keep(float(seconds[i]), partial(make, i))
        leanest = int(sizes.argmin())
        if sizes[leanest] <= limit:
            lean.keep(float(sizes[leanest]), partial(make, leanest))
    return _exactly(asked, list(dict.fromkeys([*fitting.found, *doubtful.found, *lean.found])), dropped)


def _candidate(
    degrees: dict[str, int], ways: tuple[Way, ...], offload: CPUOffload, asked: Question, i: int
) -> Candidate:
    return candidate(degrees, ways[i], offload, asked.strategy)


def _meshes(asked: Question, axes: tuple[str, ...], remats: tuple, offload: CPUOffload, illegal: Counter) -> list:
    """Every legal mesh with the ways to run on it."""
    found, sizes = [], {"global_batch": asked.global_batch, "length": asked.length}
    for degrees in legal_meshes(asked.model, asked.num_devices, axes=axes, illegal=illegal, **sizes):
        if offload is not CPUOffload.NONE and "pipe" in degrees:
            continue
        ways = ways_on(asked.model, degrees, remats=remats, **sizes)
        if asked.strategy is not None:
            ways = tuple(way for way in ways if way.stage == stage_of(asked.strategy) and not way.shared)
        if ways:
            found.append((degrees, ways))
        elif asked.strategy is None:  # else a mesh without fsdp
            illegal["fewer sequences than a pipeline needs"] += 1
    return found


def _fastest(among: np.ndarray, seconds: np.ndarray, held: np.ndarray) -> list[int]:
    """The fastest of these ways, one of those that time and memory cannot tell apart."""
    found: dict[tuple[float, float], int] = {}
    for i in among[np.argsort(seconds[among], kind="stable")].tolist():
        found.setdefault((float(f"{seconds[i]:.6g}"), float(f"{held[i]:.6g}")), i)
        if len(found) == PER_MESH:
            break
    return list(found.values())


class _Best:
    """The smallest by a measure, so many of them; names decide between equals."""

    def __init__(self, count: int):
        self.count, self._heap = count, []

    def keep(self, measure: float, make: Callable[[], Candidate]) -> None:
        """Among the best so far; what is too bad is not even made."""
        if len(self._heap) == self.count and -measure < self._heap[0][0]:
            return
        found = make()
        entry = (-measure, str(found), found)
        if len(self._heap) < self.count:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    @property
    def found(self) -> list[Candidate]:
        """All that are kept."""
        return [found for _, _, found in self._heap]


def _exactly(asked: Question, ways: list[Candidate], dropped: Counter) -> list[Priced]:
    found = []
    for each in ways:
        try:
            one = exactly(asked, each)
        except ValueError as error:
            dropped[str(error)] += 1
            continue
        if one.price.memory > asked.memory:
            dropped[_TOO_LARGE] += 1
        else:
            found.append(one)
    return found


def _in_order(found: list[Priced]) -> list[Priced]:
    """The fastest first."""
    # Of plans that take the same time the one that sends least: less hangs on what overlaps.
    digits = lambda one: float(f"{one.price.time:.9g}")
    return sorted(found, key=lambda one: (digits(one), one.prediction.total_bytes, one.price.memory))


def exactly(asked: Question, found: Candidate) -> Priced:
    """A candidate priced by the ledger.

    Raises:
      ValueError: when it turns out illegal (stages that do not balance, sizes that a schedule refuses).
    """
    model: Any = found.model(asked.model)
    own = found.plan(asked.precision)
    prediction = predict(
        own, model, found.mesh, global_batch=asked.global_batch, length=asked.length, moments=asked.moments,
        platform=asked.hardware.platform, torus=asked.hardware.torus, documents=asked.documents,
    )  # fmt: skip
    return Priced(found, prediction, price(prediction, asked.hardware, asked.assumptions))


def _sensitivity(asked: Question, found: list[Priced]) -> dict[str, tuple[float, str]]:
    """How much longer the best step takes, and which plan would then be best, when an assumption is worse."""
    given, kind = asked.assumptions, asked.hardware
    worse = {
        "links half as fast": (replace(kind, link=kind.link / 2, cross=kind.cross / 2), given),
        "nothing overlaps": (kind, replace(given, overlap=0.0)),
        "efficiency a quarter lower": (kind, replace(given, efficiency=given.efficiency * 0.75)),
        "attention across ranks half as fast": (kind, replace(given, blocks=given.blocks / 2)),
        "experts twice as uneven": (kind, replace(given, imbalance=2 * given.imbalance)),
        "delays ten times longer": (
            replace(kind, latency=10 * kind.latency, cross_latency=10 * kind.cross_latency),
            given,
        ),
    }
    if found[0].prediction.expert_flops_per_token == 0:
        worse.pop("experts twice as uneven")
    result = {}
    for name, (other, assumed) in worse.items():
        times = [price(one.prediction, other, assumed).time for one in found]
        first = min(range(len(found)), key=times.__getitem__)
        result[name] = (times[0] / found[0].price.time, "the same" if first == 0 else str(found[first].candidate))
    return result


def _nothing(asked: Question, illegal: Counter, dropped: Counter) -> str:
    reasons = [f"{count:,} times: {reason}" for reason, count in (illegal + dropped).most_common()]
    return (
        f"no plan of {asked.model.num_params:,} parameters on {asked.num_devices} x {asked.hardware.name} with "
        f"{asked.global_batch} sequences of {asked.length} fits in {asked.memory / 2**30:.1f} GiB per device: "
        f"{'; '.join(reasons) or 'no mesh is legal'}. Use more devices, shorter sequences, another batch (a multiple of the "
        "devices), offload=True, or a model whose sizes divide (heads and inner widths above all)"
    )
