"""One piece of a pipeline's work, printed as papers and PyTorch print it: `2F0` is stage 2's forward of microbatch 0."""

import functools
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

Work = Literal["F", "B", "I", "W"]
PATTERN = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """What a rank does to one microbatch in one stage.

    >>> str(Action(2, "F", 0)), Action.parse("2F0") == Action(2, "F", 0)
    ('2F0', True)

    Attributes:
      stage: which stage, counted over the whole model from 0.
      work: "F" forward; "B" the whole backward; "I" the gradient of the input alone, "W" of the weights alone (B = I + W).
      microbatch: which microbatch, from 0.
    """

    stage: int
    work: Work
    microbatch: int

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action that prints as `text`.

        Raises:
          ValueError: for anything that is not stage, one of F, B, I, W, and microbatch.
        """
        found = PATTERN.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no action: write stage, one of F, B, I, W, and microbatch, as in 2F0")
        stage, work, microbatch = found.groups()
        return cls(int(stage), work, int(microbatch))  # pyright: ignore[reportArgumentType]

    def __str__(self):
        return f"{self.stage}{self.work}{self.microbatch}"

    def needs(self, num_stages: int) -> tuple["Action", ...]:
        """What must be done before: a `B` here stands for whatever gives the gradient of the input (`B` or `I`).

        >>> [str(action) for action in Action(1, "B", 0).needs(4)]
        ['1F0', '2B0']
        """
        return _needs(self, num_stages)

    def gives(self) -> "Action":
        """The action under which others wait for this one: `I` gives what `B` gives, except the gradient of the weights."""
        return Action(self.stage, "B", self.microbatch) if self.work == "I" else self


@functools.lru_cache(maxsize=2**14)  # a simulation asks for the same few over and over
def _needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    stage, work, microbatch = action
    if work == "F":
        return (Action(stage - 1, "F", microbatch),) if stage else ()
    if work == "W":
        return (Action(stage, "B", microbatch),)
    own = Action(stage, "F", microbatch)
    return (own,) if stage == num_stages - 1 else (own, Action(stage + 1, "B", microbatch))


def format_orders(orders: Sequence[Sequence[Action]]) -> str:
    """Orders as text: a line per rank, actions separated by spaces.

    >>> print(format_orders([parse_orders("0F0 0B0")[0], ()]))
    0F0 0B0
    -
    """
    return "\n".join(" ".join(map(str, order)) or "-" for order in orders)


def parse_orders(text: str) -> tuple[tuple[Action, ...], ...]:
    """The orders that print as `text`: a line per rank, "-" for a rank without work; blank lines are skipped.

    Raises:
      ValueError: for anything that is no action, naming the line.
    """
    orders = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            orders.append(tuple(Action.parse(word) for word in line.split() if word != "-"))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    return tuple(orders)
