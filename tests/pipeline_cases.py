"""Every accepted size of pipeline up to a bound, and what a correct execution of its table looks like."""

from collections.abc import Iterator

from axonml_jax.pipeline.schedules import AbstractSchedule, GPipe, Interleaved, OneFOneB, Table, Work, ZeroBubble
from axonml_jax.pipeline.timetable import Timetable


def one_chunk_schedules(ranks: int, microbatches: int) -> list[AbstractSchedule]:
    """GPipe, 1F1B, ZB-H1 and ZB-H2, which take every size."""
    h1, h2 = ZeroBubble(ranks, microbatches), ZeroBubble(ranks, microbatches, 1, "H2")
    return [GPipe(ranks, microbatches), OneFOneB(ranks, microbatches), h1, h2]


def interleaved_schedules(ranks: int, microbatches: int, chunks: int) -> Iterator[Interleaved]:
    """Interleaved schedules of up to so many microbatches and chunks."""
    for m in range(ranks, microbatches + 1, ranks):
        yield from (Interleaved(ranks, m, v) for v in range(2, chunks + 1) if ranks > 1)


def accepted(ranks: int, microbatches: int, chunks: int) -> Iterator[AbstractSchedule]:
    """Every accepted schedule on exactly `ranks` ranks."""
    for m in range(1, microbatches + 1):
        yield from one_chunk_schedules(ranks, m)
        yield from (GPipe(ranks, m, v) for v in range(2, chunks + 1))
    yield from interleaved_schedules(ranks, microbatches, chunks)


class PaperExecutor:
    """Runs a table with names instead of numbers, as the executor would: every read must find the value that belongs there.

    Nothing but the table says where a value goes; idle work writes and sends poison.
    """

    def __init__(self, timetable: Timetable, table: Table):
        self.ranks, self.stages, self.table = timetable.num_ranks, timetable.num_stages, table
        sizes = {
            "activation": timetable.activations.size,
            "cotangent": timetable.cotangents.size,
            "residual": timetable.residuals.size,
        }
        self.slots = {name: [["empty"] * (size + 1) for _ in range(self.ranks)] for name, size in sizes.items()}
        self.done: list[tuple] = []

    def run(self) -> list[tuple]:
        """All ticks; returns (work, stage, microbatch) of everything done, in order."""
        for tick in range(len(self.table.forward.stage)):
            activations = [self._forward(tick, rank) for rank in range(self.ranks)]
            cotangents = [self._backward(tick, rank) for rank in range(self.ranks)]
            for rank in range(self.ranks):
                self._weight(tick, rank)
            for rank in range(self.ranks):
                came = activations[(rank - 1) % self.ranks]
                self.slots["activation"][rank][self.table.activation_arrival[tick, rank]] = came
                if self.table.cotangent_arrival is not None:
                    came = cotangents[(rank + 1) % self.ranks]
                    self.slots["cotangent"][rank][self.table.cotangent_arrival[tick, rank]] = came
        return self.done

    def _forward(self, tick, rank):
        stage, microbatch, source, slot = (int(field[tick, rank]) for field in self.table.forward)
        if stage == self.stages:
            assert slot == len(self.slots["residual"][rank]) - 1
            self.slots["residual"][rank][slot] = "poison"
            return "poison"
        assert stage % self.ranks == rank
        if stage > 0:
            assert self.slots["activation"][rank][source] == ("output", stage - 1, microbatch)
        self.slots["residual"][rank][slot] = ("residual", stage, microbatch)
        self.done.append(("F", stage, microbatch))
        return "output", stage, microbatch

    def _backward(self, tick, rank):
        if self.table.backward is None:
            return None
        work = self._read(self.table.backward, tick, rank)
        if work is None:
            return "poison"
        self.done.append(("B", *work))
        return "cotangent", work[0] - 1, work[1]

    def _weight(self, tick, rank):
        work = None if self.table.weight is None else self._read(self.table.weight, tick, rank)
        if work is not None:
            assert ("B", *work) in self.done
            self.done.append(("W", *work))

    def _read(self, work: Work, tick: int, rank: int):
        stage, microbatch, source, slot = (int(field[tick, rank]) for field in work)
        if stage == self.stages:
            return None
        assert stage % self.ranks == rank
        assert self.slots["residual"][rank][slot] == ("residual", stage, microbatch)
        if stage < self.stages - 1:
            assert self.slots["cotangent"][rank][source] == ("cotangent", stage, microbatch)
        return stage, microbatch
