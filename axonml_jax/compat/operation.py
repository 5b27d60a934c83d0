"""`Operation`: a typed view of one equation of a jaxpr, and how it is run again; nobody else reads an equation's fields."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import PurePath
from typing import Any, NamedTuple

from jax.extend import source_info_util

from axonml_jax.compat.jaxpr import jaxprs_among, opened
from axonml_jax.compat.varying_types import varying_alike, varying_axes


class Scan(NamedTuple):
    """A scan, whose operands are constants, then the carry, then what is scanned over.

    Attributes:
      num_consts, num_carry: how many of each; the rest is scanned over.
      body: the jaxpr of one trip.
      options: `length`, `reverse` and `unroll`, as `jax.lax.scan` takes them.
    """

    num_consts: int
    num_carry: int
    body: Any
    options: Mapping[str, Any]

    @property
    def first_scanned(self) -> int:
        """The position of the first operand that is scanned over."""
        return self.num_consts + self.num_carry


class While(NamedTuple):
    """A while loop, whose operands are the condition's constants, the body's, then the carry."""

    condition: Any
    body: Any
    num_condition_consts: int
    num_body_consts: int


class Checkpointed(NamedTuple):
    """A call under `jax.checkpoint`.

    Attributes:
      body: its jaxpr.
      options: those that `jax.checkpoint` takes.
      in_backward: whether it computes again in a backward; it is then lowered with a barrier.
    """

    body: Any
    options: Mapping[str, Any]
    in_backward: bool


class Mapped(NamedTuple):
    """A `shard_map`: its jaxpr, the sizes of its mesh's axes, those that it makes manual, and all but the function itself."""

    body: Any
    axis_sizes: Mapping[str, int]
    manual: frozenset[str]
    options: Mapping[str, Any]


class Contraction(NamedTuple):
    """The dims of a product's two operands that are summed over, and those that are paired."""

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    batched: tuple[tuple[int, ...], tuple[int, ...]]


_CALLS = frozenset(("jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2"))


class Operation:
    """One equation.

    Args:
      eqn: JAX's own.
      around: the name scopes of the calls that it was taken out of.

    Attributes:
      name: the primitive's.
      operands: what it reads: variables and literals.
      results: the variables that it defines.
    """

    def __init__(self, eqn: Any, around: Any = None):
        self.eqn, self.around = eqn, around
        self.name: str = eqn.primitive.name
        self.operands: Sequence[Any] = eqn.invars
        self.results: Sequence[Any] = eqn.outvars

    @property
    def given(self) -> list[Any]:
        """The abstract values of its operands."""
        return [atom.aval for atom in self.eqn.invars]

    @property
    def made(self) -> list[Any]:
        """The abstract values of its results."""
        return [var.aval for var in self.eqn.outvars]

    @property
    def options(self) -> Mapping[str, Any]:
        """The primitive's parameters by name; those of `jax.lax` operations are its own arguments."""
        return self.eqn.params

    @property
    def label(self) -> str:
        """The name that a `jit` or a `checkpoint_name` gives; "" for all others."""
        return str(self.eqn.params.get("name", "")) if self.name in ("jit", "name") else ""

    @property
    def has_effects(self) -> bool:
        """Whether JAX knows of an effect, a collective's mesh axes among them."""
        return bool(self.eqn.effects)

    @property
    def acts(self) -> bool:
        """Whether it does something besides making its results, such as printing."""
        return any(type(effect).__name__ != "NamedAxisEffect" for effect in self.eqn.effects)

    # Inner programs

    @cached_property
    def bodies(self) -> tuple[Any, ...]:
        """All jaxprs among its parameters; closed ones stay closed."""
        return jaxprs_among(self.eqn.params)

    @property
    def called(self) -> Any | None:
        """The jaxpr that it merely calls (`jit`), whose body may stand in its place; None for all others."""
        return self.eqn.params["jaxpr"] if self.name == "jit" else None

    @property
    def call(self) -> Any | None:
        """The jaxpr that it calls once on the same operands, derivatives of its own or not; None for all others."""
        if self.name not in _CALLS:
            return None
        params = self.eqn.params
        inner = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
        return inner if inner is not None and len(opened(inner).inputs) == len(self.operands) else None

    @property
    def scan(self) -> Scan | None:
        """It as a scan; None for all others."""
        if self.name != "scan":
            return None
        params = self.eqn.params
        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        if "num_consts" in params:  # jax < 0.12
            return Scan(params["num_consts"], params["num_carry"], params["jaxpr"], options)
        consts, carry, _ = params["ft_in"].unpack()
        return Scan(len(consts), len(carry), params["jaxpr"], options)

    @property
    def loop(self) -> While | None:
        """It as a while loop; None for all others."""
        if self.name != "while":
            return None
        params = self.eqn.params
        return While(params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"], params["body_nconsts"])

    @property
    def branches(self) -> Sequence[Any] | None:
        """The jaxprs of which a conditional runs one, on all operands but the first; None for all others."""
        return self.eqn.params["branches"] if self.name == "cond" else None

    @property
    def chooses_by_platform(self) -> bool:
        """Whether it is a conditional of which the compiler takes the branch for its platform."""
        return self.eqn.params.get("branches_platforms") is not None

    @property
    def checkpointed(self) -> Checkpointed | None:
        """It as a checkpointed call; None for all others."""
        if self.name != "remat2":
            return None
        params = self.eqn.params
        options = {key: params[key] for key in ("prevent_cse", "policy")}
        return Checkpointed(params["jaxpr"], options, params["differentiated"])

    @property
    def mapped(self) -> Mapped | None:
        """It as a `shard_map`; None for all others."""
        if self.name != "shard_map":
            return None
        params = self.eqn.params
        manual = frozenset(params["newly_manual_axes"])
        options = {key: params[key] for key in ("mesh", "in_specs", "out_specs", "check_vma")} | {"axis_names": manual}
        return Mapped(params["jaxpr"], dict(params["mesh"].shape), manual, options)

    # What it does

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes that it names; positional ones (ints, as in `reduce_sum`) are none."""
        axes = self.eqn.params.get("axis_name", self.eqn.params.get("axes", ()))
        axes = axes if isinstance(axes, (tuple, list)) else (axes,)
        return tuple(axis for axis in axes if isinstance(axis, str))

    @property
    def groups(self) -> Sequence[Sequence[int]] | None:
        """The groups of ranks that a collective is done in; None: all of its axes."""
        return self.eqn.params.get("axis_index_groups")

    @property
    def contraction(self) -> Contraction:
        """The dims of a `dot_general`."""
        contracted, batched = self.eqn.params["dimension_numbers"]
        pair = lambda dims: (tuple(dims[0]), tuple(dims[1]))
        return Contraction(pair(contracted), pair(batched))

    def does_the_same(self, other: "Operation") -> bool:
        """Whether another equation is of the same primitive with the same parameters."""
        return self.is_alike(other) and str(self.eqn.params) == str(other.eqn.params)

    def is_alike(self, other: "Operation") -> bool:
        """Whether another equation is of the same primitive."""
        return self.eqn.primitive is other.eqn.primitive

    # Running it

    def bind(self, values: Sequence[Any], **changed: Any) -> list[Any]:
        """Run it on `values`, with some parameters changed, keeping its source line and name scopes; returns its results."""
        primitive = self.eqn.primitive
        values = values if self.bodies else varying_alike(values, self.given)
        if self.name == "pvary":  # of what varies over more axes than when it was traced
            changed = {"axes": tuple(axis for axis in self.options["axes"] if axis not in varying_axes(values[0]))}
            if not changed["axes"]:
                return list(values)
        params = primitive.get_bind_params({**self.eqn.params, **changed})
        if isinstance(params, tuple):  # jax < 0.11 returned (functions, params) for call-like primitives
            functions, params = params
            values = [*functions, *values]
        with self.scope(), self.eqn.ctx.manager:
            results = primitive.bind(*values, **params)
        return list(results) if primitive.multiple_results else [results]

    def bind_in_backward(self, values: Sequence[Any]) -> list[Any]:
        """Run a call under `jax.checkpoint` as one that computes again in a backward; returns its results."""
        return self.bind(values, differentiated=True)

    def scope(self) -> Any:
        """A context in which new equations carry its source line and name scopes."""
        stack = source_info_util.current_name_stack()
        stack = stack + self.scopes
        return source_info_util.user_context(self.eqn.source_info.traceback, name_stack=stack)

    # Where it comes from

    @property
    def scopes(self) -> Any:
        """Its name scopes, those of the calls around it first; prints as a path."""
        own = self.eqn.source_info.name_stack
        return own if self.around is None else self.around + own

    @property
    def traceback(self) -> Any:
        """Where it was traced; None where JAX does not say."""
        return self.eqn.source_info.traceback

    @property
    def functions(self) -> list[str]:
        """Names of the functions that were called when it was traced, innermost first."""
        traceback = self.traceback
        return [frame.function_name for frame in traceback.frames] if traceback is not None else []

    @property
    def line(self) -> str:
        """The user's line that it comes from, for messages; "" where JAX does not say."""
        found = re.fullmatch(r"(.*?):(\d+)(?::\d+)? \((.*)\)", source_info_util.summarize(self.eqn.source_info))
        return f"line {found[2]} of {PurePath(found[1]).name}, {found[3]}" if found else ""
