"""What is known of JAX's primitives: the library's one table of them.

A primitive without a rule is opaque: its results are kept for the backward, it is not done twice, no program is cut through it,
and nothing is known of the dims of its results. That is always right; a rule makes programs smaller or proves more.
"""

import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from axonml_jax.compat.barrier import PRIMITIVE as BARRIER
from axonml_jax.compat.operation import Operation
from axonml_jax.compat.varying_types import CASTS
from axonml_jax.compat.waiting import PRIMITIVE as WAITING
from axonml_jax.program.dims import DIMS, Follow, same
from axonml_jax.program.program import Equation

Kind = typing.Literal[
    "elementwise", "placing", "selecting", "random", "heavy", "call", "branch", "loop", "collective", "opaque"
]


@dataclass(frozen=True)
class Rule:
    """What is known of a primitive.

    Attributes:
      kind: "elementwise": every element of its result is made of the like elements of its operands; "placing": it copies or
        moves elements; "selecting": it goes over its operands once, as slices, lookups and sums do; "random": it makes random
        bits of keys; "heavy": products, sorts, factorizations; "call", "branch", "loop": what its inner programs do;
        "collective": ranks exchange values, or a rank learns its index; "opaque": nothing is known.
      compares: it is a comparison.
      costly: it is a long series for each element, and its results are kept.
      casts: it changes JAX's varying type of a value, names mesh axes, and sends nothing.
      total: how it joins the elements that it reduces: "sum", "max" or "min"; "" for all others.
      passes: each of its results is the operand in the same place.
      sends: of a collective, what it does (a kind of `ledger.Collective`) and how it reduces; None: it sends nothing.
      follow: how dims of results follow those of operands (`dims.py`); None: not known.
    """

    kind: Kind
    compares: bool = False
    costly: bool = False
    casts: bool = False
    total: str = ""
    passes: bool = False
    sends: tuple[str, str] | None = None
    follow: Follow | None = None

    @property
    def joins(self) -> bool:
        """Whether a collective's result is the same on all ranks of its axes."""
        return self.sends is not None and self.sends[0] in ("all_reduce", "all_gather")


OPAQUE = Rule("opaque")

_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp clz complex conj
convert_element_type copy cos cosh digamma div erf erf_inv erfc exp exp2 expm1 floor imag integer_pow is_finite lgamma
log log1p log2 logistic max min mul mulhi neg nextafter not one_minus_square or population_count pow real
reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
square stop_gradient sub tan tanh xor
"""
_SERIES = "bessel_i0e bessel_i1e igamma igammac polygamma regularized_incomplete_beta zeta"
_COMPARING = "eq ge gt le lt ne"
_PLACING = "broadcast_in_dim concatenate iota name reshape rev split squeeze stack tile transpose unstack"
_SELECTING = """
argmax argmin cumlogsumexp cummax cummin cumprod cumsum device_put dynamic_slice dynamic_update_slice gather
layout_constraint pad reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_window
reduce_window_max reduce_window_min reduce_window_sum reduce_xor reshard scatter scatter-add scatter-max scatter-min
scatter-mul scatter-sub select_and_gather_add select_and_scatter select_and_scatter_add sharding_constraint slice
with_memory_space_constraint
"""
_RANDOM = """
iota_2x32_shape philox2x32 philox4x32 random_bits random_clone random_fold_in random_gamma random_seed random_split
random_unwrap random_wrap rng_bit_generator threefry2x32 threefry4x32
"""
_HEAVY = """
approx_top_k cholesky conv_general_dilated dot_general eig eigh fft geqrf householder_product lu qr ragged_dot_general
scaled_dot sort svd top_k triangular_solve tridiagonal_solve
"""
_CALLS = "closed_call custom_jvp_call custom_vjp_call jit remat2"

_TOTALS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_or": "max", "reduce_and": "min"}

_SENDS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("psum", "psum_invariant", "unreduced_psum"), ("all_reduce", "sum")),
    **dict.fromkeys(("pmax", "unreduced_pmax"), ("all_reduce", "max")),
    **dict.fromkeys(("pmin", "unreduced_pmin"), ("all_reduce", "min")),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), ("all_gather", "")),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), ("reduce_scatter", "sum")),
    "all_to_all": ("all_to_all", ""),
    "ragged_all_to_all": ("ragged_all_to_all", ""),
    "ppermute": ("permute", ""),
    **dict.fromkeys(("pbroadcast", "pbroadcast_dynamic"), ("broadcast", "")),
}


def _table() -> Iterable[tuple[str, Rule]]:
    for name in _ELEMENTWISE.split():
        yield name, Rule("elementwise", follow=same)
    for name in _SERIES.split():
        yield name, Rule("elementwise", costly=True, follow=same)
    for name in _COMPARING.split():
        yield name, Rule("elementwise", compares=True, follow=same)
    for name in CASTS:
        yield name, Rule("elementwise", casts=True, follow=same)
    kinds: Mapping[Kind, str] = {
        "placing": _PLACING,
        "selecting": _SELECTING,
        "random": _RANDOM,
        "heavy": _HEAVY,
        "call": _CALLS,
        "branch": "cond",
        "loop": "scan while",
    }
    for kind, names in kinds.items():
        for name in names.split():
            yield name, Rule(kind, total=_TOTALS.get(name, ""), follow=DIMS.get(name))
    for name, sends in _SENDS.items():
        yield name, Rule("collective", sends=sends)
    yield "axis_index", Rule("collective")
    yield BARRIER, Rule("selecting", passes=True)
    yield WAITING, Rule("selecting")


RULES: Mapping[str, Rule] = dict(_table())
"""By the primitive's name; names of all supported versions of JAX stand beside each other."""


def rule_of(name: str) -> Rule:
    """The rule of a primitive; asynchronous collectives have that of the collective, and what waits for one passes it on."""
    if (found := RULES.get(name)) is not None:
        return found
    base, done = RULES.get(name.removesuffix("_start")), RULES.get(name.removesuffix("_done"))
    if done is not None and done.sends is not None:
        return replace(done, sends=None, passes=True)
    return base if base is not None and base.sends is not None else OPAQUE


def is_elementwise(name: str) -> bool:
    """Whether a primitive treats every element alike."""
    return rule_of(name).kind == "elementwise"


def is_redone(name: str) -> bool:
    """Whether a primitive is so cheap that its results are made again rather than kept: elementwise, or merely placing."""
    rule = rule_of(name)
    return rule.kind in ("elementwise", "placing") and not rule.costly


def is_light(op: Operation) -> bool:
    """Whether it may be done twice for nothing: it goes over its operands once, makes no random bits and has no effect."""
    return rule_of(op.name).kind in ("elementwise", "placing", "selecting") and not op.has_effects


def is_repeatable(equation: Equation) -> bool:
    """Whether it may be done again on each of several ranks: it is light or makes random bits, all that it calls included."""
    kind = rule_of(equation.name).kind
    if equation.op.has_effects:
        return False
    if kind in ("call", "branch"):
        return all(is_repeatable(inner) for body in equation.bodies for inner in body.equations)
    return kind == "random" or is_light(equation.op)


def follow(op: Operation, k: int, dim: int, parts: int) -> int | None:
    """The dim of every result that follows `dim` of operand k, cut into `parts` equal parts (`dims.py`); None: none does."""
    rule = rule_of(op.name)
    return None if rule.follow is None else rule.follow(op, k, dim, parts)
