"""`FoundAttention`: an attention of a program in one form, whatever its spelling; and what looks like one and is not."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from axonml_jax.program.attention.masks.mask_terms import Band, Term
from axonml_jax.program.attention.operand import Operand
from axonml_jax.program.nested import Nested


@dataclass(frozen=True)
class Scaled:
    """Scores multiplied, or divided, by a number or an array."""

    by: float | Operand
    divides: bool = False

    @property
    def factor(self) -> float | None:
        """What they are multiplied by, where it is a number."""
        return None if isinstance(self.by, Operand) else 1 / self.by if self.divides else self.by


@dataclass(frozen=True)
class Added:
    """A bias added to the scores, or subtracted.

    Attributes:
      by: the bias.
      subtracts: whether it is subtracted.
      hides: what it lets be seen as a mask does, where the array that it is made of holds zeros and ones alone.
    """

    by: float | Operand
    subtracts: bool = False
    hides: tuple[Term, ...] = ()

    def __str__(self) -> str:
        mask = " and ".join(map(str, self.hides))
        return f"bias {self.by}" + (f", of zeros and ones a mask of {mask}" if mask else "")


@dataclass(frozen=True)
class Tanh:
    """The hyperbolic tangent of the scores: between two scales a soft cap."""


@dataclass(frozen=True)
class Cast:
    """Scores cast to a dtype."""

    dtype: Any


@dataclass(frozen=True)
class Masked:
    """Scores of keys that are not seen replaced by a number, or a number added to them.

    Attributes:
      terms: what is seen: where all of them say so; () everything.
      fill: the number.
      adds: whether it is added.
    """

    terms: tuple[Term, ...]
    fill: float
    adds: bool = False


Change = Scaled | Added | Tanh | Cast | Masked
"""What is done to scores before the softmax."""


@dataclass(frozen=True)
class WeightsDrop:
    """Dropout of the weights.

    Attributes:
      rate: the probability of being dropped; None where it is no number.
      scale: what those that stay are multiplied by.
      keep: bool, which stay.
      key: the typed random key, as a value of the `Nested` program.
      bits: the shape in which random bits are drawn of the key.
      bit_dims: what the dims of the bits run over, as `Operand.indices`.
      bit_width: how many bits each element has.
    """

    rate: float | None
    scale: float
    keep: Operand
    key: int
    bits: tuple[int, ...]
    bit_dims: tuple[Any, ...]
    bit_width: int

    def __str__(self) -> str:
        dims = ", ".join("*".join(map(str, index)) or "1" for index in self.bit_dims)
        return f"dropout {'?' if self.rate is None else f'{self.rate:.3g}'} of bits ({dims})"


@dataclass(frozen=True)
class FoundAttention:
    """softmax(changes(q · k)) · v.

    Attributes:
      q, k, v: given as [batch, query, heads, size], [batch, key, kv heads, size] and [batch, key, kv heads, value]; query head
        i reads key head i // (heads / kv heads). A scale that is multiplied into q or k is part of it.
      out: the result, taken as [batch, query, heads, value].
      sizes: of each label of `operand.LABELS`.
      changes: of the scores, in order; what is the same for all keys of a query is left out, as the softmax leaves it out.
      scores_dtype, weights_dtype: of the product of q and k, and in which the weights meet v.
      precisions: of the two products.
      zero: of the rules of `mask` those outside which the weights are set to zero, too: what a query gets that sees no key.
      gates: arrays that the weights are multiplied with, and rules outside which they are set to zero, alike for all keys.
      dropout: of the weights.
      line: the user's line that computes the scores.
      scopes: the name scopes of the result, as a path.
      left: why it is left as it is; "" where it may be replaced.
      replaces: the primitives that go with it.
    """

    q: Operand
    k: Operand
    v: Operand
    out: Operand
    sizes: Mapping[str, int]
    changes: tuple[Change, ...]
    scores_dtype: Any
    weights_dtype: Any
    precisions: tuple[Any, Any]
    zero: tuple[Term, ...]
    gates: tuple[Operand | Term, ...]
    dropout: WeightsDrop | None
    line: str
    scopes: str
    left: str = ""
    replaces: tuple[str, ...] = ()

    @property
    def heads(self) -> int:
        """Of queries."""
        return self.sizes["head"] * self.sizes["member"]

    @property
    def kv_heads(self) -> int:
        """Of keys and values."""
        return self.sizes["head"]

    @property
    def mask(self) -> tuple[Term, ...]:
        """All rules of what is seen."""
        return tuple([term for change in self.changes if isinstance(change, Masked) for term in change.terms])

    @property
    def causal(self) -> bool:
        """Whether positions alone hide what comes after a query."""
        return any(isinstance(term, Band) and term.after == 0 for term in self.mask)

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        """How many positions before and after itself a query sees, where a rule bounds those before it."""
        bands = [term for term in self.mask if isinstance(term, Band) and term.before is not None]
        return (bands[0].before, bands[0].after) if bands else None

    @property
    def biases(self) -> tuple[Operand, ...]:
        """Arrays that are added to the scores."""
        return tuple([c.by for c in self.changes if isinstance(c, Added) and isinstance(c.by, Operand)])

    @property
    def scales(self) -> tuple[Operand, ...]:
        """Arrays that the scores are multiplied with."""
        return tuple([c.by for c in self.changes if isinstance(c, Scaled) and isinstance(c.by, Operand)])

    @property
    def cap(self) -> float | None:
        """The soft cap c of c · tanh(scale · q · k / c)."""
        steps = [change for change in self.changes if not isinstance(change, Cast)]
        places = [i for i, change in enumerate(steps) if isinstance(change, Tanh)]
        after = steps[places[0] + 1] if places and len(steps) > places[0] + 1 else None
        return after.factor if isinstance(after, Scaled) else None

    @property
    def scale(self) -> float | None:
        """Of q · k, before biases and masks, the soft cap taken into account; None where it is no number."""
        factors: list[float | None] = []
        for change in self.changes:
            if not isinstance(change, Scaled | Cast):
                break
            factors += [change.factor] if isinstance(change, Scaled) else []
        capped = [self.cap] if any(isinstance(change, Tanh) for change in self.changes) else []
        known = [factor for factor in (*factors, *capped) if factor is not None]
        return math.prod(known) if len(known) == len(factors) + len(capped) else None

    @property
    def regular(self) -> bool:
        """Whether scale, soft cap, biases and masks say all: scores = c tanh(scale q · k / c), then biases and masks; where
        `scale` is None, it is an array of `scales`."""
        kinds = "".join(_KIND[type(change)] for change in self.changes)
        return re.fullmatch("s*(ts)?b*", kinds) is not None

    def __str__(self) -> str:
        sizes = {label: size for label, size in self.sizes.items() if label != "member"}
        sizes["head"] = self.heads
        said = [f"{sizes['query']} queries, {sizes['key']} keys, {_heads(self)}, size {sizes['size']}"]
        said += [", ".join(map(str, self.mask)) or "every key"]
        said += [f"scale {self.scale:.3g}"] if self.scale not in (1, None) else []
        said += [f"scores times {scale}" for scale in self.scales]
        said += [f"soft cap {self.cap:.3g}"] if self.cap is not None else []
        said += [str(change) for change in self.changes if isinstance(change, Added) and isinstance(change.by, Operand)]
        said += [f"weights {'times' if isinstance(gate, Operand) else 'of'} {gate}" for gate in self.gates]
        said += [str(self.dropout)] if self.dropout is not None else []
        said += [] if self.regular else ["its scores are changed in an order of their own"]
        said += [f"left as it is: {self.left}"] if self.left else [f"in place of {len(self.replaces)} equations"]
        place = self.line or "an unknown line"
        return f"attention at {place}{f' ({self.scopes})' if self.scopes else ''}: " + "; ".join(said)


_KIND: Mapping[type, str] = {Scaled: "s", Tanh: "t", Added: "b", Masked: "b", Cast: ""}


def _heads(found: FoundAttention) -> str:
    return f"{found.heads} heads" + (f" ({found.kv_heads} of keys)" if found.kv_heads != found.heads else "")


@dataclass(frozen=True)
class Missed:
    """What looks like attention and is not recognised.

    Attributes:
      line: the user's line that computes the scores.
      why: the reason, a clause.
    """

    line: str
    why: str

    def __str__(self) -> str:
        return f"not recognised at {self.line or 'an unknown line'}: {self.why}"


@dataclass(frozen=True)
class Recognised:
    """The attention of a program.

    Attributes:
      attentions: those found, in the order of their results.
      missed: what looks like one and is not recognised.
      values: the program that they are in.
    """

    attentions: tuple[FoundAttention, ...]
    missed: tuple[Missed, ...]
    values: Nested = field(compare=False, repr=False)

    @property
    def replaceable(self) -> tuple[FoundAttention, ...]:
        """Those that may be replaced."""
        return tuple([found for found in self.attentions if not found.left])

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.attentions, *self.missed))) or "no attention"
