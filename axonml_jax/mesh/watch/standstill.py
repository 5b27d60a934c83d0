"""A job that stands still, in words: who is missing, and where everybody is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_SHOWN = 8


@dataclass(frozen=True)
class Said:
    """What a process says of itself once a second.

    Attributes:
      count: how often it has said something.
      begun, done: the newest step that it has dispatched, and the newest that its devices have finished.
      at: where its main thread is.
      doing: what that does for long, as "compiling"; empty: nothing of the kind.
      marks: how often it has got on while doing it.
      still: seconds since it last got on.
      pace: what its newest steps took (see `Pace`).
    """

    count: int
    begun: int
    done: int
    at: str
    doing: str = ""
    marks: int = 0
    still: float = 0.0
    pace: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """What it does and where."""
        return f"{self.doing}, {self.at}" if self.doing else self.at


@dataclass(frozen=True)
class Standstill:
    """What one process makes of what all have said.

    Attributes:
      text: in words.
      missing: the ranks that the others wait for; empty: nobody is behind.
      alike: what all are doing for long, where nobody is behind; else empty.
      speaker: the rank that tells people, lest all say the same.
    """

    text: str
    missing: tuple[int, ...] = ()
    alike: str = ""
    speaker: int = 0


def standstill(
    rank: int, size: int, before: Mapping[int, Said] | None, now: Mapping[int, Said] | None, own: Said
) -> Standstill:
    """Who is missing.

    Args:
      rank, size: of the process that asks.
      before, now: what all processes said, a few seconds apart; None: the coordinator did not answer.
      own: what the process that asks would say now.
    """
    head = (
        f"rank {rank} has made no progress for {own.still:.0f} s (step {own.begun} begun, {own.done} done, {own.place})"
    )
    if before is None or now is None:
        why = "process 0, which holds the coordinator, does not answer; it is stopped or cut off"
        return Standstill(f"{head}: rank(s) [0] are missing: {why}", (0,), speaker=rank)
    heard = {**now, rank: own}
    silent = [r for r in range(size) if r != rank and _count(now, r) == _count(before, r)]
    talking = {r: said for r, said in sorted(heard.items()) if r not in silent}
    behind = _behind(talking)
    missing = tuple(sorted([*silent, *behind]))
    speaker = min((r for r in talking if r not in missing), default=rank)
    if not missing:
        doing = {said.doing for said in talking.values()}
        why = f"all ranks have begun the same step, so it takes this long, or the network or a device hangs: {_places(talking)}"
        return Standstill(f"{head}: {why}", alike=doing.pop() if len(doing) == 1 else "", speaker=speaker)
    lines = [_silent(r, heard.get(r)) for r in silent] + [behind[r] for r in sorted(behind)]
    left = len(lines) - _SHOWN
    lines = [*lines[:_SHOWN], f"and {left} more"] if left > 0 else lines
    return Standstill(f"{head}: rank(s) {list(missing)} are missing: " + "; ".join(lines), missing, speaker=speaker)


def _count(said: Mapping[int, Said], rank: int) -> int | None:
    return said[rank].count if rank in said else None


def _behind(talking: Mapping[int, Said]) -> dict[int, str]:
    """Those that have not begun the newest step, or not come as far in what all are doing."""
    newest = max(said.begun for said in talking.values())
    found = {
        r: f"rank {r} has begun step {said.begun} only and is {said.place}"
        for r, said in talking.items()
        if said.begun < newest
    }
    doing = {said.doing for said in talking.values()}
    if not found and len(doing) == 1 and "" not in doing:
        most = max(said.marks for said in talking.values())
        found = {
            r: f"rank {r} has come to {said.marks} of {most} and is {said.place}"
            for r, said in talking.items()
            if said.marks < most
        }
    return found


def _silent(rank: int, last: Said | None) -> str:
    text = f"rank {rank} says nothing any more: it is stopped, overloaded or cut off"
    return text if last is None else f"{text}; when it last spoke it had begun step {last.begun} and was {last.place}"


def _places(talking: Mapping[int, Said]) -> str:
    """Who is where, the ranks of one place together."""
    by_place: dict[str, list[int]] = {}
    for r, said in talking.items():
        by_place.setdefault(said.place, []).append(r)
    return "; ".join(f"{ranks_in_words(ranks)} {place}" for place, ranks in list(by_place.items())[:_SHOWN])


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks as the subject of a sentence.

    >>> ranks_in_words([3]), ranks_in_words([0, 1, 2, 5])
    ('rank 3 is', 'ranks 0, 1, 2, 5 are')
    >>> ranks_in_words(range(64))
    '64 ranks (0, 1, ...) are'
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    if len(ranks) > _SHOWN:
        return f"{len(ranks)} ranks ({ranks[0]}, {ranks[1]}, ...) are"
    return f"ranks {', '.join(map(str, ranks))} are"
