"""Schedules of a pipeline: GPipe, 1F1B, interleaved, zero bubble; their tables, and the policy that names one; no JAX here."""

import abc
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from axonml_jax.base import is_choice, is_one_of, member
from axonml_jax.mesh.axes import STAGES
from axonml_jax.pipeline.timetable import Action, Buffer, StageCosts, Ticks, Timetable, trace_orders

# --------------------------------------------------------------------------------------------------
# The names of the pipeline schedules, and what every schedule can say about itself.
# --------------------------------------------------------------------------------------------------


class PipelineSchedule(enum.Enum):
    """The order in which microbatches pass through a pipeline. It changes time and memory, never what is computed.

    Attributes:
      GPIPE: all forwards, then all backwards (Huang et al. 2019); with several chunks, PyTorch's looped BFS.
      ONE_F_ONE_B: forwards and backwards alternate; memory does not grow with the microbatches (PipeDream-Flush, 2021).
      INTERLEAVED_ONE_F_ONE_B: 1F1B with several chunks of layers per rank and a smaller bubble (Narayanan et al. 2021).
      ZERO_BUBBLE: 1F1B whose weight gradients wait until a rank would be idle (Qi et al. 2024).
    """

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED_ONE_F_ONE_B = "interleaved"
    ZERO_BUBBLE = "zero-bubble"

    @classmethod
    def of(cls, schedule: "PipelineSchedule | str") -> "PipelineSchedule":
        """Looks up a schedule by itself, its value or its name.

        >>> PipelineSchedule.of("1f1b") is PipelineSchedule.of("one_f_one_b") is PipelineSchedule.ONE_F_ONE_B
        True

        Raises:
          ValueError: for anything else.
        """
        if is_choice(cls, schedule):
            return cls(schedule)
        names = ", ".join(f"{known} ({known.value!r})" for known in cls)
        raise ValueError(f"schedule={schedule!r} is none of {names}")

    @classmethod
    def _missing_(cls, value: object) -> "PipelineSchedule | None":
        return member(cls, "schedule", value)

    def __str__(self):
        return self.name


@dataclass(frozen=True)
class AbstractSchedule(abc.ABC):
    """One schedule for one size of pipeline. Stage p of the S*V stages lives on rank p mod S.

    Attributes:
      num_ranks: S, ranks of the pipeline axis.
      num_microbatches: M.
      num_chunks: V, stages per rank.
    """

    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1

    name: ClassVar[PipelineSchedule]

    def __post_init__(self):
        sizes = {name: getattr(self, name) for name in ("num_ranks", "num_microbatches", "num_chunks")}
        problems = [
            f"{name}={value!r} must be a positive whole number"
            for name, value in sizes.items()
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1
        ]
        problems = problems or list(self.problems())
        if problems:
            raise ValueError(f"{self.name}: {'; '.join(problems)}")

    @property
    def num_stages(self) -> int:
        """S*V, stages of the whole model."""
        return self.num_ranks * self.num_chunks

    @property
    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """The classic order of every rank."""
        return tuple(self.order(rank) for rank in range(self.num_ranks))

    def stages(self, rank: int) -> range:
        """The stages that live on a rank."""
        return range(rank, self.num_stages, self.num_ranks)

    def order_problems(self) -> Sequence[str]:
        """Why this size has no classic order, though fused rows execute it; empty when it has one."""
        return []

    def require_order(self) -> None:
        """Refuse a size that has no classic order.

        Raises:
          ValueError: with the rule and the remedy.
        """
        if problems := self.order_problems():
            raise ValueError(f"{self.name}: {'; '.join(problems)}")

    @abc.abstractmethod
    def problems(self) -> Sequence[str]:
        """Why this size is refused, each with its remedy; empty when it is accepted."""

    @abc.abstractmethod
    def order(self, rank: int) -> tuple[Action, ...]:
        """The classic order: what papers and PyTorch print, each rank starting an action as soon as it can.

        Raises:
          ValueError: for a size that `order_problems` refuses.
        """

    @abc.abstractmethod
    def ticks(self) -> Ticks:
        """The fused rows that are executed: at most one forward and one backward per rank and tick."""

    def _repr_html_(self) -> str:
        chunks = f" x {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        title = f"{self.name}: {self.num_ranks} ranks{chunks}, {self.num_microbatches} microbatches"
        return Timetable.of(self.num_ranks, self.ticks())._repr_html_(title)

    @abc.abstractmethod
    def ideal_makespan(self, forward: float, input_gradient: float, weight_gradient: float) -> float | None:
        """Published time of the classic order when every stage costs the same and sending is free.

        Args:
          forward: time of F of one stage.
          input_gradient: time of I.
          weight_gradient: time of W.

        Returns:
          The time, or None where the published formula does not hold.
        """


def one_chunk(schedule: AbstractSchedule) -> list[str]:
    """The problem of a schedule that has one stage per rank, where there are several chunks."""
    if schedule.num_chunks == 1:
        return []
    return [
        f"num_chunks={schedule.num_chunks} must be 1, one stage per rank; take "
        f"{PipelineSchedule.INTERLEAVED_ONE_F_ONE_B} for several"
    ]


# --------------------------------------------------------------------------------------------------
# The timetable as integers [tick, rank]: all that an executor which scans over ticks needs to know.
# --------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """One kind of work, each field int32 [tick, rank].

    Attributes:
      stage: which stage; `num_stages` when the rank is idle.
      microbatch: which microbatch; 0 when idle.
      source: received slot that is read: an activation by forwards (trash in stage 0, which reads the batch), a cotangent by
        backwards (trash in the last stage, which starts from the loss).
      slot: residual slot, written by forwards and read by backwards; trash when idle.
    """

    stage: np.ndarray
    microbatch: np.ndarray
    source: np.ndarray
    slot: np.ndarray


class Turns(NamedTuple):
    """The ticks in which ranks turn to another of their stages, each field int32 [tick, rank]; `num_stages` elsewhere.

    Attributes:
      forward, backward: the stage that forwards, or backwards, begin; None: forwards only.
      left: the stage that backwards leave.
    """

    forward: np.ndarray
    backward: np.ndarray | None
    left: np.ndarray | None


class Table(NamedTuple):
    """The work of every rank at every tick. A buffer's trash slot is the one behind its last, index `Buffer.size`.

    One tick on every rank: (1) `forward`; (2) `backward`, which may read what (1) wrote; (3) `weight`; (4) shift the
    forward's output to the next rank of the ring and the backward's cotangent to the previous one; (5) store what comes
    in by `activation_arrival` and `cotangent_arrival`. A tick reads only slots that earlier ticks stored.

    Attributes:
      forward: forwards.
      backward: whole backwards, or gradients of inputs alone where `weight` is there; None: forwards only.
      weight: gradients of weights; None where backwards are whole.
      activation_arrival: slot for what comes from the previous rank, int32 [tick, rank]; trash for what nobody awaits.
      cotangent_arrival: slot for what comes from the next rank; None: forwards only.
      turns: where ranks change stages; None where nobody asks.
    """

    forward: Work
    backward: Work | None
    weight: Work | None
    activation_arrival: np.ndarray
    cotangent_arrival: np.ndarray | None
    turns: Turns | None = None


def make_table(timetable: Timetable, with_turns: bool = False) -> Table:
    """Builds the table of a timetable.

    Args:
      timetable: the timetable.
      with_turns: also where ranks turn to another stage.
    """
    ticks, activations, cotangents = timetable.ticks, timetable.activations, timetable.cotangents
    forward = _work(timetable, ticks.forward, activations)
    backward = None if ticks.backward is None else _work(timetable, ticks.backward, cotangents)
    there = (None, None) if backward is None else turns(backward.stage, timetable.num_stages)
    return Table(
        forward,
        backward,
        None if ticks.weight is None else _work(timetable, ticks.weight, cotangents),
        _arrivals(timetable, ticks.forward, activations, step=1),
        None if ticks.backward is None else _arrivals(timetable, ticks.backward, cotangents, step=-1),
        Turns(turns(forward.stage, timetable.num_stages)[0], *there) if with_turns else None,
    )


def turns(stage: np.ndarray, num_stages: int) -> tuple[np.ndarray, np.ndarray]:
    """The ticks in which every rank begins one of its stages, and in which it leaves one.

    Args:
      stage: `Work.stage`.
      num_stages: what stands for idle there, and in the results for neither.

    Returns:
      The stage that a rank begins in a tick, and the one it has done for the last time before another, [tick, rank].

    >>> begins, ends = turns(np.array([[0], [0], [4], [0], [2], [2]]), 4)
    >>> begins[:, 0].tolist(), ends[:, 0].tolist()
    ([0, 4, 4, 4, 2, 4], [4, 4, 4, 0, 4, 2])
    """

    def begins(grid: np.ndarray) -> np.ndarray:
        found, before = np.full_like(grid, num_stages), np.full(grid.shape[1], num_stages)
        for tick, row in enumerate(grid):
            new = (row != num_stages) & (row != before)
            found[tick, new] = row[new]
            before = np.where(row != num_stages, row, before)
        return found

    return begins(stage), begins(stage[::-1])[::-1]


def _work(timetable: Timetable, tick: np.ndarray, received: Buffer) -> Work:
    stage, microbatch = np.arange(tick.shape[0])[:, None], np.arange(tick.shape[1])
    where = (tick, stage % timetable.num_ranks)
    residuals = timetable.residuals
    return Work(
        _spread(timetable, where, stage, idle=timetable.num_stages),
        _spread(timetable, where, microbatch, idle=0),
        _spread(timetable, where, np.where(received.slots < 0, received.size, received.slots), idle=received.size),
        _spread(timetable, where, residuals.slots, idle=residuals.size),
    )


def _arrivals(timetable: Timetable, sent: np.ndarray, received: Buffer, *, step: int) -> np.ndarray:
    """The slots of arrivals: what stage p sends arrives in the same tick on the rank of stage p + step."""
    stage = np.arange(timetable.num_stages)[:, None]
    senders = slice(None, -1) if step == 1 else slice(1, None)
    receivers = slice(1, None) if step == 1 else slice(None, -1)
    where = (sent[senders], stage[receivers] % timetable.num_ranks)
    return _spread(timetable, where, received.slots[receivers], idle=received.size)


def _spread(timetable: Timetable, where: tuple[np.ndarray, np.ndarray], values: np.ndarray, *, idle: int) -> np.ndarray:
    grid = np.full((timetable.num_ticks, timetable.num_ranks), idle, np.int32)
    grid[where] = values
    return grid


# --------------------------------------------------------------------------------------------------
# GPipe: all forwards, then all backwards; the simplest order, whose memory grows with the microbatches.
# --------------------------------------------------------------------------------------------------


class GPipe(AbstractSchedule):
    """GPipe (Huang et al. 2019). With V chunks each chunk takes all microbatches before the next: PyTorch's looped BFS.

    Bubble: (S-1)/(VM) of the useful time. Activations in flight: VM.
    """

    name: ClassVar = PipelineSchedule.GPIPE

    def problems(self) -> list[str]:
        """No problems: every size works."""
        return []

    def order(self, rank: int) -> tuple[Action, ...]:
        """All forwards chunk by chunk, then all backwards from the last chunk to the first."""
        stages, microbatches = self.stages(rank), range(self.num_microbatches)
        forwards = [Action(stage, "F", m) for stage in stages for m in microbatches]
        return (*forwards, *(Action(stage, "B", m) for stage in reversed(stages) for m in microbatches))

    def ticks(self) -> Ticks:
        """Chunk v's forward of m on rank r at r + v*max(M, S) + m; backwards mirror it from the last forward's tick."""
        stride = max(self.num_microbatches, self.num_ranks)  # a chunk's first microbatch must have come round the ring
        chunk, rank = np.divmod(np.arange(self.num_stages)[:, None], self.num_ranks)
        microbatch = np.arange(self.num_microbatches)[None, :]
        forward = rank + chunk * stride + microbatch
        last = forward.max()
        back = (self.num_ranks - 1 - rank) + (self.num_chunks - 1 - chunk) * stride + microbatch
        return Ticks(forward, last + back)

    def ideal_makespan(self, forward: float, input_gradient: float, weight_gradient: float) -> float | None:
        """The classic order takes (VM + S-1)(F+B); None for M < S with several chunks."""
        if self.num_chunks > 1 and self.num_microbatches < self.num_ranks:
            return None
        steps = self.num_chunks * self.num_microbatches + self.num_ranks - 1
        return steps * (forward + input_gradient + weight_gradient)


# --------------------------------------------------------------------------------------------------
# Interleaved 1F1B: several chunks of layers per rank, so that the pipeline fills V times faster.
# --------------------------------------------------------------------------------------------------


class Interleaved(AbstractSchedule):
    """Megatron's virtual pipeline (Narayanan et al. 2021): rank r holds stages r, S+r, 2S+r and so on.

    Microbatches go in groups of S; a group passes all chunks before the next group starts. Bubble: (S-1)/(VM) of the useful
    time. The classic order and its formulas are of whole groups; the fused rows take any M, and a last group that is not
    whole leaves its missing microbatches' ticks idle.
    """

    name: ClassVar = PipelineSchedule.INTERLEAVED_ONE_F_ONE_B

    def problems(self) -> list[str]:
        """Requires two ranks and two chunks at least."""
        ranks, chunks = self.num_ranks, self.num_chunks
        found = []
        if ranks < 2:
            found.append(f"num_ranks={ranks} must be at least 2; one rank has no bubble to shrink: take GPIPE")
        if chunks < 2:
            found.append(f"num_chunks={chunks} must be at least 2; with one chunk take ONE_F_ONE_B, which is the same")
        return found

    def order_problems(self) -> list[str]:
        """Requires whole groups of S microbatches."""
        ranks, microbatches = self.num_ranks, self.num_microbatches
        if microbatches % ranks == 0:
            return []
        below, above = microbatches // ranks * ranks, -(-microbatches // ranks) * ranks
        near = f"{below} or {above}" if below else f"{above}"
        return [
            f"num_microbatches={microbatches} must be a multiple of num_ranks={ranks} in the classic order, because chunks "
            f"change every {ranks} microbatches; take {near}, or fused rows, which take any number"
        ]

    def warmup(self, rank: int) -> int:
        """Megatron's number of forwards before the first backward: 2(S-r-1) + (V-1)S, or all there are."""
        rounds = 2 * (self.num_ranks - rank - 1) + (self.num_chunks - 1) * self.num_ranks
        return min(rounds, self.num_chunks * self.num_microbatches)

    def order(self, rank: int) -> tuple[Action, ...]:
        """The warm-up's forwards, then forward and backward in turn, then the remaining backwards."""
        self.require_order()
        total, warmup = self.num_chunks * self.num_microbatches, self.warmup(rank)
        actions = [self._forward(rank, k) for k in range(warmup)]
        for k in range(warmup, total):
            actions += [self._forward(rank, k), self._backward(rank, k - warmup)]
        return (*actions, *(self._backward(rank, k) for k in range(total - warmup, total)))

    def ticks(self) -> Ticks:
        """A rank's k-th forward on rank r at r + k, its k-th backward at (V+1)S - 2 - r + k."""
        ranks, chunks = self.num_ranks, self.num_chunks
        chunk, rank = np.divmod(np.arange(self.num_stages)[:, None], ranks)
        group, member = np.divmod(np.arange(self.num_microbatches)[None, :], ranks)
        first = group * ranks * chunks + member
        forward = rank + first + chunk * ranks
        return Ticks(forward, (chunks + 1) * ranks - 2 - rank + first + (chunks - 1 - chunk) * ranks)

    def ideal_makespan(self, forward: float, input_gradient: float, weight_gradient: float) -> float | None:
        """The classic order takes (VM + S-1)(F+B), in times of one chunk; None without whole groups of microbatches."""
        if self.order_problems():
            return None
        steps = self.num_chunks * self.num_microbatches + self.num_ranks - 1
        return steps * (forward + input_gradient + weight_gradient)

    def _forward(self, rank: int, k: int) -> Action:
        chunk, microbatch = self._place(k)
        return Action(chunk * self.num_ranks + rank, "F", microbatch)

    def _backward(self, rank: int, k: int) -> Action:
        chunk, microbatch = self._place(k)
        return Action((self.num_chunks - 1 - chunk) * self.num_ranks + rank, "B", microbatch)

    def _place(self, k: int) -> tuple[int, int]:
        """(chunk, microbatch) of a rank's k-th pass: groups outermost, then chunks, then the group's microbatches."""
        group, rest = divmod(k, self.num_ranks * self.num_chunks)
        chunk, member = divmod(rest, self.num_ranks)
        return chunk, group * self.num_ranks + member


# --------------------------------------------------------------------------------------------------
# 1F1B: a rank alternates forward and backward, so that memory does not grow with the microbatches.
# --------------------------------------------------------------------------------------------------


class OneFOneB(AbstractSchedule):
    """PipeDream-Flush, the default of PyTorch and Megatron (Narayanan et al. 2021).

    Bubble: (S-1)/M of the useful time. Activations in flight on rank r: min(M, S-r), with fused rows min(M, 2(S-r)-1).
    """

    name: ClassVar = PipelineSchedule.ONE_F_ONE_B

    def problems(self) -> list[str]:
        """Requires one chunk per rank."""
        return one_chunk(self)

    def order(self, rank: int) -> tuple[Action, ...]:
        """min(M, S-r) forwards to warm up, then backward and forward in turn, then the remaining backwards."""
        warmup = min(self.num_microbatches, self.num_ranks - rank)
        actions = [Action(rank, "F", m) for m in range(warmup)]
        for done in range(self.num_microbatches):
            actions.append(Action(rank, "B", done))
            if done + warmup < self.num_microbatches:
                actions.append(Action(rank, "F", done + warmup))
        return tuple(actions)

    def ticks(self) -> Ticks:
        """Forward of m on rank r at r + m, backward at 2(S-1) - r + m."""
        rank, microbatch = np.arange(self.num_ranks)[:, None], np.arange(self.num_microbatches)[None, :]
        return Ticks(rank + microbatch, 2 * (self.num_ranks - 1) - rank + microbatch)

    def ideal_makespan(self, forward: float, input_gradient: float, weight_gradient: float) -> float:
        """The classic order takes (M + S-1)(F+B)."""
        return (self.num_microbatches + self.num_ranks - 1) * (forward + input_gradient + weight_gradient)


# --------------------------------------------------------------------------------------------------
# Zero-bubble: weight gradients are work that nobody waits for, so they fill the time in which a rank would be idle.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ZeroBubble(AbstractSchedule):
    """ZB-H1 and ZB-H2 (Qi et al. 2024), by their handcrafted orders. B is split into I, which others wait for, and W.

    Bubble: (S-1)(F+I-W) for H1 and (S-1)(F+I-2W) for H2. Activations in flight: min(M, S) and min(M, 2S-1) on every rank.
    In H2's order ranks end one after another: its time is that of each rank, and a step gains it only if the next
    step may start before the last rank has ended.

    Attributes:
      num_ranks: S.
      num_microbatches: M.
      num_chunks: 1.
      variant: "H1" keeps 1F1B's memory, "H2" takes about twice as much and has the smaller bubble.
    """

    variant: Literal["H1", "H2"] = "H1"

    name: ClassVar = PipelineSchedule.ZERO_BUBBLE

    def problems(self) -> list[str]:
        """Requires one chunk per rank, and a known variant."""
        known = [] if self.variant in ("H1", "H2") else [f"variant={self.variant!r} must be 'H1' or 'H2'"]
        return one_chunk(self) + known

    def order(self, rank: int) -> tuple[Action, ...]:
        """Warm up, then I, W and F in turn, where W comes `lag` microbatches after its I; then the remaining W."""
        late = 1 if self.variant == "H1" else 2
        warmup = min(self.num_microbatches, late * (self.num_ranks - rank - 1) + 1)
        lag = late * rank
        actions = [Action(rank, "F", m) for m in range(warmup)]
        for done in range(self.num_microbatches):
            actions.append(Action(rank, "I", done))
            if done >= lag:
                actions.append(Action(rank, "W", done - lag))
            if done + warmup < self.num_microbatches:
                actions.append(Action(rank, "F", done + warmup))
        rest = range(max(0, self.num_microbatches - lag), self.num_microbatches)
        return (*actions, *(Action(rank, "W", m) for m in rest))

    def ticks(self) -> Ticks:
        """F and I as in 1F1B; W of m at 2(S-1) + m on every rank, the latest that the first rank's I allows.

        All ranks do W in the same ticks, so that the ticks before have none: (S-1)(F+I) of bubble instead of (S-1)(F+I+W),
        with the 2S-1 residuals of fused 1F1B.
        """
        rank, microbatch = np.arange(self.num_ranks)[:, None], np.arange(self.num_microbatches)[None, :]
        latest = 2 * (self.num_ranks - 1)
        return Ticks(rank + microbatch, latest - rank + microbatch, latest + 0 * rank + microbatch)

    def ideal_makespan(self, forward: float, input_gradient: float, weight_gradient: float) -> float | None:
        """The time M(F+I+W) and the bubble; None unless M fills the warm-up and W is no longer than F and I, which hide it."""
        late = 1 if self.variant == "H1" else 2
        if self.num_microbatches <= late * (self.num_ranks - 1) or weight_gradient > min(forward, input_gradient):
            return None
        bubble = (self.num_ranks - 1) * (forward + input_gradient - late * weight_gradient)
        return self.num_microbatches * (forward + input_gradient + weight_gradient) + bubble


# --------------------------------------------------------------------------------------------------
# How a schedule becomes ticks: fused rows, a forward and a backward in each, or alternating rows, one of them in each.
# --------------------------------------------------------------------------------------------------

Rows = Literal["fused", "alternating"]


def make_timetable(schedule: AbstractSchedule, rows: Rows = "fused") -> Timetable:
    """The timetable that executes a schedule.

    Args:
      schedule: which, for which size.
      rows: "fused": a tick holds a forward and a backward, so that neighbours who wait for each other at the end of every
        tick lose nothing in the steady state. "alternating": a tick holds one action, in the classic order and with its
        memory, and costs the longest of them.

    Raises:
      ValueError: for other rows.
    """
    if rows == "fused":
        return Timetable.of(schedule.num_ranks, schedule.ticks())
    if rows != "alternating":
        raise ValueError(f"rows={rows!r} must be 'fused' or 'alternating'")
    return Timetable.of(schedule.num_ranks, _classic_ticks(schedule))


def _classic_ticks(schedule: AbstractSchedule) -> Ticks:
    """The ticks of the classic order, in which every action is a tick long."""
    split = any(action.work == "W" for action in schedule.order(0))
    each = StageCosts(1, 1, 1) if split else StageCosts(1, 1, 0)
    grids = {work: np.zeros((schedule.num_stages, schedule.num_microbatches), np.int64) for work in "FBIW"}
    for event in chain(*trace_orders(schedule.orders, each)):
        grids[event.action.work][event.action.stage, event.action.microbatch] = event.start
    return Ticks(grids["F"], grids["I" if split else "B"], grids["W"] if split else None)


# --------------------------------------------------------------------------------------------------
# The class of each schedule, by its name.
# --------------------------------------------------------------------------------------------------

SCHEDULES: dict[PipelineSchedule, type[AbstractSchedule]] = {
    kind.name: kind for kind in (GPipe, OneFOneB, Interleaved, ZeroBubble)
}


def make_schedule(
    schedule: PipelineSchedule | str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    variant: Literal["H1", "H2"] | None = None,
) -> AbstractSchedule:
    """One schedule for one size of pipeline.

    >>> print(*make_schedule("1f1b", 2, 3).order(0))
    0F0 0F1 0B0 0F2 0B1 0B2

    Args:
      schedule: its name.
      num_ranks: S, ranks of the pipeline axis.
      num_microbatches: M.
      num_chunks: V, stages per rank.
      variant: the variant of ZERO_BUBBLE; None: "H1".

    Raises:
      ValueError: for a size that the schedule refuses, with the rule and the remedy, and for a variant of others.
    """
    kind = SCHEDULES[PipelineSchedule.of(schedule)]
    if variant is None:
        return kind(num_ranks, num_microbatches, num_chunks)
    if kind is not ZeroBubble:
        raise ValueError(
            f"variant={variant!r} is for {PipelineSchedule.ZERO_BUBBLE}; {kind.name} has none: leave it out"
        )
    return ZeroBubble(num_ranks, num_microbatches, num_chunks, variant)


# --------------------------------------------------------------------------------------------------
# What a plan says about its pipeline: the schedule, the microbatches, the stages per rank, and when weights are
# gathered.
# --------------------------------------------------------------------------------------------------

AXIS = STAGES
"""The mesh axis along which the stages lie."""


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """The policy of a pipelined plan: how the model is cut into stages along `pipe`, and how microbatches pass through them.

    Communicates: per tick one collective-permute of activations and one of their gradients (per dtype); per step one
    all-reduce over `pipe` of the loss, one per metric and per parameter that several stages read, and one per changed
    buffer of the model.

    Attributes:
      schedule: the order in which microbatches pass: an `ax.PipelineSchedule`, its name or its value.
      num_microbatches: into how many parts a rank's rows are cut; with `Plan.accumulate` that many times more pass.
      chunks: stages per rank; stage p lies on rank p mod S.
      split: module paths at which the second and later stages begin, in order; the path of a module whose parameters are
        stacked along dim 0 (`nnx.scan`, `nn.scan`): every stage has as many of its rows; None: between repeated blocks, by
        balanced cost, or between the rows of the largest stack.
      gather: along `fsdp`: "step" gathers a rank's stages once per step (their memory is that of the whole stages), "chunk"
        whenever a rank turns to another of its stages (two are whole, a forward's and a backward's, and one's gradients;
        with one stage per rank the same as "step"), "tick" in every forward and backward.

    Raises:
      ValueError: with everything that is wrong.
    """

    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    num_microbatches: int = 8
    chunks: int = 1
    split: str | tuple[str, ...] | None = None
    gather: Literal["step", "chunk", "tick"] = "step"

    def __post_init__(self):
        problems = list(self._problems())
        if problems:
            raise ValueError(f"Pipelined: {'; '.join(problems)}")
        object.__setattr__(self, "schedule", PipelineSchedule.of(self.schedule))
        if self.split is not None and not isinstance(self.split, str):
            object.__setattr__(self, "split", tuple(self.split))

    def _problems(self) -> Iterator[str]:
        try:
            PipelineSchedule.of(self.schedule)
        except ValueError as error:
            yield str(error)
        for name in ("num_microbatches", "chunks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                yield f"{name}={value!r} must be a positive whole number"
        if not is_one_of(self.gather, ("step", "chunk", "tick")):
            yield f"gather={self.gather!r} must be 'step', 'chunk' or 'tick'"
        paths = self.split if isinstance(self.split, (tuple, list)) else () if self.split is None else (self.split,)
        if not all(isinstance(path, str) for path in paths):
            yield (
                f"split={self.split!r} must be module paths such as ('blocks/2', 'blocks/4'), or that of one module whose "
                "parameters are stacked, such as 'layers'"
            )

    def num_stages(self, num_ranks: int) -> int:
        """Stages of the whole model on so many ranks."""
        return num_ranks * self.chunks

    @property
    def turns(self) -> bool:
        """Whether weights are gathered when a rank turns to another of its stages."""
        return self.gather == "chunk" and self.chunks > 1

    @property
    def in_ticks(self) -> bool:
        """Whether weights are gathered in the loop over ticks, not before it."""
        return self.gather == "tick" or self.turns

    def gathers(self, num_ranks: int, num_microbatches: int) -> int | None:
        """How many times a step gathers all stages of a rank for forwards, and again for backwards; None: once for both.

        >>> Pipelined(schedule="interleaved", chunks=2, gather="chunk").gathers(4, 10)
        3
        """
        if self.gather == "tick":
            return num_microbatches
        return -(-num_microbatches // num_ranks) if self.turns else None

    @property
    def in_words(self) -> str:
        """A description for tables."""
        return f"{self.schedule}{f' x {self.chunks} chunks' if self.chunks > 1 else ''}"

    def timetable(self, num_ranks: int, num_microbatches: int) -> Timetable:
        """The timetable that is executed and priced; a schedule of your own comes in here (docs/guides/extending.md).

        Raises:
          ValueError: for sizes that the schedule refuses, with the rule and the remedy.
        """
        try:
            schedule = make_schedule(self.schedule, num_ranks, num_microbatches, self.chunks)
        except ValueError as error:
            raise ValueError(f"on a mesh with {AXIS}={num_ranks}: {error}") from error
        return make_timetable(schedule)
