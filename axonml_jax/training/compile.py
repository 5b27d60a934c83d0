"""Compiling a step: its objective, metrics and norm, passes for XLA:CPU, errors in the user's words."""

import abc
import functools
import math
import os
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import flax
import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from axonml_jax.base import LossFn, PyTree, named_leaves
from axonml_jax.collectives.primitives import axis_index, max_over, sum_over
from axonml_jax.compat.jaxpr import constants_within, trace, traced_with
from axonml_jax.compat.order import (
    callers_line,
    placements_read,
    platform_around,
    refuses_placement,
    together,
    trace_settings,
)
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.compat.versions import CPU_BARRIER_OPTIONS
from axonml_jax.model.loss import TRACED, UNREAD, Loss, of_arrays, parse_loss
from axonml_jax.model.view import Functional, Mode, Variables, merge, noting_written
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.batch import several_batches
from axonml_jax.sharding.layout import is_layout, to_host
from axonml_jax.strategies.shard import Feedback

if TYPE_CHECKING:
    from axonml_jax.meaning.whole_batch import WholeBatch
    from axonml_jax.training.outside import Outside

# --------------------------------------------------------------------------------------------------
# How a step is compiled: what XLA must be told, and what must be added, for the program to do what it says.
# --------------------------------------------------------------------------------------------------


_TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"
_TRIED_FROM = 50_000_000


def compiler_options(placement: Placement, mesh: Mesh) -> dict[str, str] | None:
    """Options of `jax.jit` for steps under a plan, or None.

    On CPU: without them XLA of jax 0.10 gathers every unit once and keeps it, as if parameters were whole during the step, and
    keeps what was to be recomputed.

    On GPU XLA compiles and times dozens of Triton kernels for each product of another shape, beside cuBLASLt's. That takes tens
    of seconds before the first step, and of products of 8 bits minutes. It pays for large products in 16 bits alone
    (docs/performance.md), so it is left out for models below 50 million parameters and in 8 bits. Who names the flag in
    `XLA_FLAGS` decides.
    """
    if platform_around(mesh) == "gpu":
        size = sum(math.prod(layout.shape) for layout in jax.tree.leaves(placement.params, is_leaf=is_layout))
        few = size < _TRIED_FROM or placement.plan.precision.products is not None
        return {_TRITON_PRODUCTS: "False"} if few and _TRITON_PRODUCTS not in os.environ.get("XLA_FLAGS", "") else None
    barriers = placement.at_use or placement.plan.remat is not None or placement.plan.memory is not None
    return CPU_BARRIER_OPTIONS if is_on_cpu(mesh) and barriers else None


class Compiled:
    """A jitted function that on CPUs is run as XLA:CPU needs it.

    The ranks' collectives cannot overtake each other (`program/on_cpu.py`): where they could, on several
    devices, what was traced is run in an order. And gradients of kernels are multiplied fast
    (`program/on_cpu.py`).

    Args:
      fun: the function.
      mesh: that it runs on.
      accept: called with every program compiled for a call before it first runs; it may refuse it.
      reads: the user's function in it; what that reads outside must stay as it is (`Outside`).
      options: of `jax.jit`; arguments by keyword are static.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        mesh: Mesh,
        accept: Callable[[Any], None] | None = None,
        *,
        reads: Callable[..., Any] | None = None,
        **options: Any,
    ):
        self._fun, self._options = fun, options
        self._plain: Any = jax.jit(fun, **options)
        self._mesh = mesh
        self._on_cpu, self._several = is_on_cpu(mesh), mesh.size > 1
        self._known: dict[Any, Any] = {}
        self._written: dict[Any, Any] = {}  # what was traced for them, as it was written
        self._accept = accept
        self._accepted: dict[Any, Any] = {}
        self._inner: Compiled | None = None  # the same as a part of other programs
        self._reading: Callable[[], AbstractContextManager] = nullcontext
        self._reads, self._traces = reads, 0
        self._outside: Outside | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        while True:
            try:
                with self._reading():
                    run = self._choose(args, kwargs)
                    if self._accept is not None:
                        return self._accepted_for(run, args, kwargs)(*args)
                    made = run(*args, **kwargs)
                    if not self._on_cpu and (traces := self._plain._cache_size()) != self._traces:
                        self._traces = traces
                        self._note(self._plain.trace(*args, **kwargs))
                    return made
            except Exception as error:
                if not self._reads_placements(error):
                    raise

    def inlined(self, *args: Any) -> Any:
        """Run it on arrays that JAX traces, as a part of the program around it, whose options count and which donates.

        Raises:
          TypeError: where the compiled program is to be accepted first.
        """
        if self._accept is not None:
            raise TypeError(
                "what XLA's partitioner sends in this plan's step is read from its own compiled program, which is none "
                "inside of jax.jit or jax.lax.scan: call the step as it is, in a Python loop"
            )
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), args)
        if self._inner is None:
            self._inner = Compiled(self._fun, self._mesh, reads=self._reads)
        return self._inner._again("__call__", shapes, {}, args)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit`'s."""
        return self._again("trace", args, kwargs)

    def as_written(self, *args: Any) -> Any:
        """As `trace`, without what CPUs need: what was traced for a call on arguments like these."""
        with self._reading():
            kept = self._written.get(self._like(args, {}))
        return self.trace(*args) if kept is None else kept

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit`'s."""
        return self._again("lower", args, kwargs)

    def _again(self, name: str, args: tuple, kwargs: dict, given: tuple | None = None) -> Any:
        """A method of the function for arguments like these, called on these or on those that are given."""
        while True:
            try:
                with self._reading():
                    run = self._choose(args, kwargs)
                    if not self._on_cpu and name != "__call__":
                        self._note(run.trace(*args, **kwargs))
                    return getattr(run, name)(*(args if given is None else given), **kwargs)
            except Exception as error:
                if not self._reads_placements(error):
                    raise

    def _reads_placements(self, error: Exception) -> bool:
        """Whether JAX has refused that code places arrays over the user's axes: what is traced from now on may do so."""
        anew = self._reading is not placements_read and refuses_placement(error)
        self._reading = placements_read if anew else self._reading
        return anew

    def compile(self, *args: Any) -> Any:
        """The program that a call with such arguments runs; of one that has `accept`."""
        self.trace(*args)  # says how placements are read
        with self._reading():
            return self._accepted_for(self._choose(args, {}), args, {})

    @property
    def compilations(self) -> int:
        """How many programs were compiled for calls."""
        return len(self._accepted) + sum(each._cache_size() for each in {self._plain, *self._known.values()})

    def _accepted_for(self, run: Any, args: tuple, kwargs: dict) -> Any:
        """The program compiled for arrays like these, once it is accepted."""
        assert self._accept is not None
        leaves, treedef = jax.tree.flatten(args)
        like = (trace_settings(), treedef, *((x.shape, x.dtype, x.sharding) for x in leaves), *kwargs.items())
        if like not in self._accepted:
            traced = run.trace(*args, **kwargs)
            if not self._on_cpu:
                self._note(traced)
            compiled = traced.lower().compile()
            self._accept(compiled)
            self._accepted[like] = compiled
        return self._accepted[like]

    def _choose(self, args: tuple, kwargs: dict) -> Any:
        """The function for arguments like these under JAX's settings around the call.

        All arguments but the first are looked at, which is a run's state or variables.

        Raises:
          ValueError: where a program has constants that the user's function would read otherwise now.
        """
        if self._outside is not None:
            self._outside.refuse_changed()
        if not self._on_cpu:
            return self._plain
        from axonml_jax.program.on_cpu import may_overlap, with_transposed_operands

        like = self._like(args, kwargs)
        if like not in self._known:
            traced = self._plain.trace(*args, **kwargs)
            self._note(traced)
            jaxpr = with_transposed_operands(traced.jaxpr)
            overlaps = self._several and may_overlap(jaxpr)
            changes = overlaps or jaxpr is not traced.jaxpr
            self._known[like] = self._changed(traced, _types(args), overlaps) if changes else self._plain
            self._written[like] = traced
        return self._known[like]

    def changed(self) -> list[str]:
        """What its programs have as constants and the user's function would read otherwise now, by name."""
        return [] if self._outside is None else self._outside.changed()

    def _note(self, traced: Any) -> None:
        """Know of what was traced just now, and of its constants."""
        if self._reads is None or not (constants := constants_within(traced.jaxpr)):
            return
        from axonml_jax.training.outside import Outside

        self._outside = self._outside or Outside(self._reads)
        self._outside.note(constants)

    def _like(self, args: tuple, kwargs: dict) -> Any:
        return trace_settings(), _types(args[1:]), *kwargs.items()

    def _changed(self, traced: Any, types: Any, overlaps: bool) -> Any:
        """What was traced on arguments of some types, as a jitted function that does it as XLA:CPU needs it."""

        from axonml_jax.program.on_cpu import collectives_in_order, with_transposed_operands
        from axonml_jax.program.program import read_program, run_program

        @functools.wraps(self._fun)
        def whole(*args: Any, **kwargs: Any) -> Any:
            run = traced if _types(args) == types else self._plain.trace(*args, **kwargs)
            jaxpr, values = with_transposed_operands(run.jaxpr), jax.tree.leaves(args)
            made = collectives_in_order(jaxpr, values) if overlaps else run_program(read_program(jaxpr), values)
            return jax.tree.unflatten(jax.tree.structure(run.out_info), made)

        return jax.jit(whole, **self._options)


def _types(args: Any) -> Any:
    """The structure of arguments, and their leaves' shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(args)
    return treedef, *((jax.numpy.shape(x), getattr(x, "dtype", type(x))) for x in leaves)


def is_on_cpu(mesh: Mesh) -> bool:
    """Whether a program for a mesh runs on CPUs."""
    return mesh.devices.flat[0].platform == "cpu"


# --------------------------------------------------------------------------------------------------
# The user's loss as a pure function of what one rank reads, for one microbatch.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """The parts of a step that are differentiated one by one.

    Attributes:
      count: number of (rank, microbatch) parts over which a plain mean is taken; each part's loss is divided by it. A
        WeightedMean is divided by its total weight after the sum.
      scale: the loss scale, or None.
    """

    count: int
    scale: jax.Array | None = None


@dataclass(frozen=True)
class Objective:
    """`loss_fn` on a model, without side effects.

    Attributes:
      model: the model.
      loss_fn: the user's.
      mode: how the model runs.
      positions: the mesh axes that split positions: a loss must then say over which it is a mean.
      inside: entered around the model's code while it is traced (see `Placement.inside`).
      reading: what is traced in its place (see `reading` of `parallel/placement.py`).
      whole: what the loss means on the whole batch, of which ranks have parts; None: it is that of a rank's rows.
      trains: it is refused where nothing that is trained reaches it.
      placed: what is traced in the place of functions that trace the user's code by themselves (`reading_users`).
    """

    model: Functional
    loss_fn: LossFn
    mode: Mode
    positions: tuple[str, ...] = ()
    inside: Callable[[], AbstractContextManager] = nullcontext
    reading: Callable[..., Callable] = lambda fun, **_: fun
    whole: "WholeBatch | None" = None
    trains: bool = False
    placed: Callable[[Callable], Callable] = lambda fun: fun

    def __post_init__(self):
        if not callable(self.loss_fn):
            raise TypeError(f"loss_fn={self.loss_fn!r} cannot be called: give a function loss_fn(model, batch) -> loss")

    def __call__(self, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, PyTree]:
        """The loss of one microbatch on one rank, and the model's state after it."""
        return self.reading(self._evaluated if self.mode.training is False else self._of)(variables, key, batch)

    def _evaluated(self, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, PyTree]:
        loss, state = self._of(variables, key, batch)
        again = lambda state: self._of(replace(variables, state=state), key, batch)[1]
        refuse_moved(self.model, variables.state, state, again)
        return loss, state

    def _of(self, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, PyTree]:
        on_rows = partial(self._on_rows, variables, key)
        with noting_written() as written:
            if self.whole is None:
                made = on_rows(batch)
            else:
                with self.inside():
                    made = self.whole(self.model, self._explained, self.mode, variables, key, batch, on_rows)
        if written.found and self.mode.training is not False:
            runs = (self._on_rows, getattr(batch, "rows", batch)), (self._on_whole, batch)
            refuse_written(list(written.found), runs, variables, key)
        return made

    def _on_whole(self, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, PyTree]:
        assert self.whole is not None
        on_rows = partial(self._on_rows, variables, key)
        with self.inside():
            return self.whole(self.model, self._explained, self.mode, variables, key, batch, on_rows)

    def microbatches(self, variables: Variables, key: jax.Array, rows: PyTree, batches: PyTree) -> PyTree:
        """A rank's microbatches, stacked, as the loss takes them.

        Args:
          variables: their shapes, as read.
          key: of one of them; its shape counts.
          rows: all rows of this rank.
          batches: the same as microbatches.
        """
        if self.whole is None:
            return batches
        from axonml_jax.layers.whole import whole_allowed

        whole, shape = self.whole, jax.ShapeDtypeStruct(key.shape, key.dtype)

        def split(variables: Variables, rows: PyTree, batches: PyTree) -> PyTree:
            asked = self.model, self._explained, self.mode, self._as_read(variables, shape, rows), shape
            with self.inside(), whole_allowed():
                return whole.microbatches(asked, rows, batches)

        return self.placed(split)(variables, rows, batches)

    def _as_read(self, variables: Variables, key: Any, rows: PyTree) -> Variables:
        """The shapes of variables that the loss's own code sees: without adapters, and with what layers split whole."""
        seen: list[Variables] = []

        def note(variables: Variables, key: jax.Array, rows: PyTree) -> jax.Array:
            seen.append(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), variables))
            return jnp.zeros(())

        without_products = replace(self.mode.precision, products=None)  # `note` has none that could be rounded
        trace(self.reading(note, precision=without_products), variables, key, rows)
        return seen[-1]

    def swept(
        self,
        each: Callable[[Callable, PyTree], list[jax.Array]],
        variables: Variables,
        key: jax.Array,
        rows: PyTree,
        batches: PyTree,
    ) -> PyTree:
        """Microbatches after a first sweep, where the loss needs one (`meaning/two_sweeps.py`).

        Args:
          each: `each(fun, batches)`: of every microbatch `fun(variables, key, batch) -> (arrays, state)`, its arrays stacked.
          variables: their shapes.
          key: what the loss itself draws with.
          rows: all rows of this rank.
          batches: what `microbatches` returned.
        """
        if self.whole is None or not self.sweeps(batches):
            return batches
        whole, asked = self.whole, (self.model, self._explained, self.mode)

        def results(variables: Variables, key: jax.Array, batch: PyTree) -> tuple[list[jax.Array], PyTree]:
            with self.inside():
                return whole.results(*asked, variables, key, batch)

        def joined(variables: Variables, key: jax.Array, rows: PyTree, stacks: list, batches: PyTree) -> PyTree:
            return whole.of_all_rows((*asked, self._as_read(variables, key, rows), key), rows, stacks, batches)

        stacks = each(self.reading(results), batches)
        return self.placed(joined)(variables, key, rows, stacks, batches)

    def sweeps(self, batches: PyTree) -> bool:
        """Whether microbatches are gone over twice."""
        if self.whole is None:
            return False
        from axonml_jax.meaning.microbatches import Microbatch

        return isinstance(batches, Microbatch) and batches.plan.sweeps

    def swept_loss(self, batches: PyTree) -> Loss:
        """After a first sweep the loss of this rank's rows, as what ranks sum."""
        assert self.whole is not None
        return self.whole.loss_of(batches)

    def finish(self, batches: PyTree) -> Callable | None:
        """What is done after all microbatches with the sums of losses and metrics; None: nothing (`WholeBatch.finish`)."""
        return None if self.whole is None else self.whole.finish(batches)

    def _on_rows(self, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, PyTree]:
        with self.inside():
            bound = self.model.bind(variables, key, self.mode)
            loss = parse_loss(self._explained(bound, batch), self.positions)
            return loss, self.model.state_of(bound)

    def _explained(self, bound: Any, batch: PyTree) -> Any:
        try:
            return self.loss_fn(bound, batch)
        except flax.errors.ApplyScopeInvalidVariablesTypeError as error:
            said = TypeError(
                "the loss gave module.apply something else than variables. A loss gets the model with its variables in it: "
                "call it, model(x), in the place of module.apply(variables, x)"
            )
            raise said.with_traceback(error.__traceback__) from None
        except flax.errors.TraceContextError as error:
            said = TypeError(
                f"the loss changes an object of the script's own, outside of the model ({error}). Random streams and "
                "metrics that a step changes belong into the model: self.rngs = nnx.Rngs(0), self.metrics = "
                "nnx.MultiMetric(...), both used as attributes of the model that the loss gets; or return what is measured, "
                'loss, {"logits": logits}'
            )
            raise said.with_traceback(error.__traceback__) from None
        except Exception as error:
            if "should match the mesh passed to shard_map" in str(error):
                said = ValueError(
                    "the code of the model or of the loss maps itself over a mesh (jax.shard_map), but runs inside of "
                    "this plan's own shard_map, on one rank's rows already: call what it maps directly where there is no "
                    "such mesh around, or train this model by XLA's partitioner alone, in your own loop (ax.place). JAX "
                    f"says: {error}"
                )
                raise said.with_traceback(error.__traceback__) from None
            if note := several_batches(batch):
                error.add_note(note)
            if note := of_arrays(self.loss_fn):
                error.add_note(note)
            if isinstance(error, jax.errors.JAXTypeError):
                error.add_note(TRACED)
            raise

    def trained_read(self, read: Variables, key: jax.Array, batch: PyTree) -> set[str]:
        """The paths of trained parameters that, as read, reach the loss but through `stop_gradient`: of the traced program."""
        of = lambda params: self(replace(read, params=params), key, batch)[0].total
        from axonml_jax.program.program import reached, read_program

        program = read_program(trace(of, read.params).jaxpr)
        reaching = reached(program, program.outputs)
        return {
            name for name, number in zip(named_leaves(read.params), program.inputs, strict=True) if number in reaching
        }

    def refuse_unread(self, total: jax.Array, by: PyTree, read: Variables, key: jax.Array, batch: PyTree) -> None:
        """Refuse to train by a loss that nothing trained reaches, while it is traced.

        Args:
          total: the loss.
          by: what it is differentiated by.
          read: the variables as read.

        Raises:
          ValueError: where the traced program shows it.
        """
        if self.trains and not traced_with(total, by) and not self.trained_read(read, key, batch):
            raise ValueError(UNREAD)

    def differentiable(self, parts: Parts, frozen: PyTree) -> Callable:
        """The loss as JAX differentiates it.

        Args:
          parts: how each part's loss is made smaller or larger, so that gradients need only be summed.
          frozen: the frozen parameters as read.

        Returns:
          `f(params, state, key, batch) -> (scalar, (Loss, state))`.
        """

        return partial(self._part, frozen=frozen, parts=parts)

    def differentiable_with_frozen(self, parts: Parts) -> Callable:
        """`differentiable` of read frozen parameters too: `f(params, frozen, state, key, batch)`."""
        return lambda params, frozen, *args: self._part(params, *args, frozen=frozen, parts=parts)

    def _part(self, params: PyTree, state: PyTree, key: jax.Array, batch: PyTree, *, frozen: PyTree, parts: Parts):
        before = Variables(params, frozen, state)
        loss, state = self(before, key, batch)
        self.refuse_unread(loss.total, params, before, key, batch)
        total = loss.total / parts.count if loss.weight is None else loss.total
        return (total if parts.scale is None else total * parts.scale), (loss, state)


NO_SCALE = (
    'the loss takes two sweeps over the microbatches, which a loss scale does not go with: take precision="bf16", or all rows '
    "at once (accumulate=1, num_microbatches=1)"
)


def shard_key(key: jax.Array, microbatch: int | jax.Array, shard: int | jax.Array) -> jax.Array:
    """The randomness of one microbatch on one batch shard: masks differ per shard, so they depend on its degree."""
    return jax.random.fold_in(jax.random.fold_in(key, microbatch), shard)


def part_keys(placement: Placement, key: jax.Array, rows: PyTree, count: int) -> list[jax.Array]:
    """The randomness of each of this rank's microbatches, whose draws are its rows of those of one device (`draws="rows"`).

    Args:
      placement: the plan on its mesh.
      key: the step's.
      rows: all of this rank's rows.
      count: the number of microbatches.
    """
    from axonml_jax.compat.row_keys import row_key

    axes, whole = placement.batch_layout.rows, shard_key(key, 0, 0)
    if (parts := placement.ranks(axes) * count) == 1:
        return [whole]
    rank = axis_index(axes) if axes else 0
    own = next(jnp.shape(x)[0] for x in jax.tree.leaves(rows) if jnp.ndim(x)) // count
    return [row_key(whole, rank * count + number, own, parts) for number in range(count)]


def refuse_written(
    names: list[str], runs: Iterable[tuple[Callable, PyTree]], variables: Variables, key: jax.Array
) -> None:
    """Refuse a loss whose code, or the model's, writes into parameters: a step would drop that.

    Args:
      names: parameters that are others afterwards.
      runs: `run(variables, key, batch)`, with its batch: the first that can be traced tells what is really written, as loops
        and `jax.checkpoint` hand values on as new ones.

    Raises:
      ValueError: naming every parameter, and the remedy.
    """
    params = named_leaves(merge(variables.params, variables.frozen))

    def after(run: Callable, batch: PyTree, leaves: list[Any]) -> list[Any]:
        given = jax.tree.unflatten(jax.tree.structure(merge(variables.params, variables.frozen)), leaves)
        with noting_written() as written:
            run(replace(variables, params=given, frozen={}), key, batch)
        return [written.found.get(name, leaf) for name, leaf in zip(params, leaves, strict=True)]

    really = names
    for run, batch in runs:
        try:
            ends = _handed_on(partial(after, run, batch), list(params.values()))
        except Exception:  # such as the five largest of four rows
            continue
        really = [name for k, (name, end) in enumerate(zip(params, ends, strict=True)) if end != k and name in names]
        break
    if not really:
        return
    raise ValueError(
        f"the model or the loss writes into parameters, and a step would drop what it writes: {', '.join(really)}. Parameters "
        "are changed by the optimizer alone. What follows other parameters, such as a target network, is state: "
        "ax.as_state(model.target) before the model is wrapped. Weights that are normalized (nnx.WeightNorm, nnx.SpectralNorm) "
        "or limited: compute with the new array without writing it back, or limit them in the optimizer"
    )


def _handed_on(fun: Callable[[Any], Any], given: PyTree) -> list[int | None]:
    """Of each result of a function which leaf that it is given it is; None: none."""
    from axonml_jax.program.program import is_constant, read_program
    from axonml_jax.program.values import nested

    program = read_program(trace(fun, given).jaxpr)
    whole = nested(program)
    places = {value: k for k, value in enumerate(whole.top.of(program.inputs))}

    def origin(atom: Any) -> Any:
        order: tuple[int, ...] | None = None
        while (node := whole.maker(atom := whole.handed_on(atom))) is not None and node.name == "transpose":
            swapped = tuple(node.equation.op.options["permutation"])
            order = swapped if order is None else tuple(swapped[k] for k in order if k < len(swapped))
            (atom,) = node.inputs
        return atom if order is None or order == tuple(range(len(order))) else None

    ends = [origin(atom) for atom in whole.results]
    return [None if end is None or is_constant(end) else places.get(end) for end in ends]


def refuse_moved(model: Functional, before: PyTree, after: PyTree, again: Callable[[PyTree], PyTree]) -> None:
    """Refuse an evaluation that changes statistics of batches: its figures would depend on what else is in the batch.

    Args:
      model: whose state it is.
      before, after: its state, while the evaluation is traced.
      again: the state after, of a state before: traced where loops and `jax.checkpoint` hand values on as new ones.

    Raises:
      ValueError: naming every statistic that changes, and the remedy.
    """
    statistic, old, new = model.batch_statistics(), named_leaves(before), named_leaves(after)
    moved = [name for name, leaf in new.items() if statistic(name) and leaf is not old[name]]
    if moved:
        ends = dict(zip(old, enumerate(_handed_on(again, before)), strict=True))
        moved = [name for name in moved if ends[name][0] != ends[name][1]]
    if moved:
        raise ValueError(
            "evaluation changes these statistics of batches, so a module in it runs in training mode: "
            f"{', '.join(moved)}. Let the loss say which it is, model(x, train=model.is_training) of a Linen module whose call "
            "takes `train`; an NNX module's eval() sees to it where no call gives use_running_average=False"
        )


# --------------------------------------------------------------------------------------------------
# What was measured, as numbers, and how fast a run is: tokens or examples per second, time per step, share of the peak.
# --------------------------------------------------------------------------------------------------


def as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as floats; the mean over models where there are several (NO_SYNC). Every process must call it."""
    return {name: float(np.mean(value, dtype=np.float64)) for name, value in to_host(dict(metrics)).items()}


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What turns a step's duration into speeds.

    Attributes:
      tokens_per_step: tokens (or other units) of a global batch.
      flops_per_token: model FLOPs of one training token (see `TransformerConfig.flops_per_token`); None where it is not known,
        and then there is no MFU.
      num_devices: devices that share the work.
      peak_flops: peak FLOP/s of one device; None where it is not known, and then there is no MFU.
      unit: what is counted: "tokens", or "examples".
      before: how many more of them the first steps had, of batches of another size.

    >>> speed = Throughput(tokens_per_step=1000, flops_per_token=6e9, num_devices=2, peak_flops=12e12)
    >>> speed.of(num_steps=10, seconds=5.0)
    {'step_time': 0.5, 'tokens_per_second': 2000.0, 'mfu': 0.5}
    """

    tokens_per_step: int
    flops_per_token: float | None
    num_devices: int
    peak_flops: float | None = None
    unit: str = "tokens"
    before: int = 0

    def total(self, step: int) -> int:
        """Tokens of all steps up to one."""
        return self.before + step * self.tokens_per_step

    def of(self, *, num_steps: int, seconds: float) -> dict[str, float]:
        """Metrics of steps that took `seconds` together.

        Returns:
          `step_time` (seconds), `tokens_per_second` (all devices; or `examples_per_second`) and, where the peak is known,
          `mfu`: model FLOPs per second over peak FLOP/s (Chowdhery et al. 2022).
        """
        tokens_per_second = num_steps * self.tokens_per_step / seconds
        speeds = {"step_time": seconds / num_steps, f"{self.unit}_per_second": tokens_per_second}
        if self.peak_flops is not None and self.flops_per_token is not None:
            speeds["mfu"] = self.flops_per_token * tokens_per_second / (self.num_devices * self.peak_flops)
        return speeds


# --------------------------------------------------------------------------------------------------
# The norm of gradients that rest anyhow, and clipping by it.
# --------------------------------------------------------------------------------------------------

Part = tuple[jax.Array, Any, tuple[str, ...]]
"""An array of gradients, its parameters' dtype, and the mesh axes over which it is split."""


def norm(parts: Iterable[Part], p: float = 2.0) -> jax.Array:
    """The p-norm of all gradients on all ranks, each element counted once, in at least float32; p may be infinite.

    Communicates: inside `shard_map` one small all-reduce for every set of axes that splits parts.
    """
    infinite, totals = p == math.inf, {}
    for grad, dtype, axes in vectors_together(parts) if platform_around() == "gpu" else parts:
        size = jnp.abs(grad).astype(jnp.promote_types(jnp.finfo(dtype).dtype, jnp.float32))
        if infinite:
            totals[axes] = jnp.maximum(totals.get(axes, 0.0), jnp.max(size, initial=0))
        else:
            totals[axes] = totals.get(axes, 0.0) + jnp.sum(jnp.square(size) if p == 2 else size**p)
    join = max_over if infinite else sum_over
    with jax.named_scope("axonml.norm"):
        wholes = [join(total, axes) if axes else total for axes, total in totals.items()]
    if infinite:
        return functools.reduce(jnp.maximum, wholes, jnp.zeros(()))
    return sum(wholes, jnp.zeros(())) ** (1 / p) if p != 2 else jnp.sqrt(sum(wholes, jnp.zeros(())))


def vectors_together(parts: Iterable[Part]) -> list[Part]:
    """The same elements, all vectors of a kind in one.

    XLA makes of each vector's update and of its share of the norm one kernel of several results, each too small for a GPU;
    apart the updates run together, and so do the squares.
    """
    kinds, found = {}, []
    for grad, dtype, axes in parts:
        if grad.ndim == 1:
            kinds.setdefault((jnp.dtype(grad.dtype), jnp.dtype(dtype), axes, varying_axes(grad)), []).append(grad)
        else:
            found.append((grad, dtype, axes))
    return found + [(jnp.concatenate(together(some)), dtype, axes) for (_, dtype, axes, _), some in kinds.items()]


def clipped(grads: PyTree, norm: jax.Array, max_norm: Any) -> PyTree:
    """Gradients scaled by min(1, max_norm / (norm + 1e-6)), PyTorch's rule."""
    scale = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)


# --------------------------------------------------------------------------------------------------
# What users read of errors in their models and losses: the scan that `check_vma=True` refuses, no frames of ours above
# it.
# --------------------------------------------------------------------------------------------------

_INSIDE = tuple(str(Path(str(module.__file__)).parent) for module in (jax, flax))
_OURS = str(Path(__file__).parents[1]) + "/"
_STANDARD = sysconfig.get_path("stdlib") + "/"
_NOTE = "axonml_jax has left its own frames out above code that it called; JAX_TRACEBACK_FILTERING=off shows them."


class _Folding:
    """Within this context errors in code that is called back, such as a loss, lose this library's frames above it.

    As JAX's traceback filtering does, and switched off as that is (`jax_traceback_filtering`). Errors of the library itself
    keep all their frames. It is no decorator, whose own frame would stand between a step and its loss.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, frames: Any) -> None:
        shown = jax.config.jax_traceback_filtering == "off"  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(error, Exception) and not shown:
            _fold(error)


folding = _Folding()


def _fold(error: Exception) -> None:
    frames = list(_frames(error))
    theirs = [i for i, each in enumerate(frames) if _is_theirs(_file(each))]
    if not theirs:
        return
    last, kept = theirs[-1], None
    for i, each in reversed(list(enumerate(frames))):
        if i > last or not _file(each).startswith(_OURS):
            kept = types.TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    error.__traceback__ = kept
    if _NOTE not in getattr(error, "__notes__", ()):
        error.add_note(_NOTE)


def _frames(error: Exception) -> Iterator[types.TracebackType]:
    each = error.__traceback__
    while each is not None:
        yield each
        each = each.tb_next


def _file(each: types.TracebackType) -> str:
    return each.tb_frame.f_code.co_filename


def _is_theirs(filename: str) -> bool:
    """Whether code is neither this library's, nor JAX's or Flax's, nor Python's own."""
    standard = filename.startswith(_STANDARD) and "site-packages" not in filename
    return not (standard or filename.startswith((_OURS, *_INSIDE, "<")))


_UNLIKE_TYPES = {
    "branches must have equal": (
        "one branch of the conditional at {} gives a value that is the same on every rank, and another one that differs from "
        "rank to rank",
        "make the first from a value that differs, such as x * 0 for zeros",
    ),
    "carry": (
        "the loop at {} starts from a value that is the same on every rank (such as plain zeros) but carries one that differs "
        "from rank to rank",
        "start the loop from a value derived from its input, such as jnp.zeros_like(x[0])",
    ),
}
"""Words of JAX's error -> what is refused, and the remedy besides `check_vma=False`."""


@contextmanager
def explain_types(check_vma: bool) -> Iterator[None]:
    """Turn JAX's error about varying types that a loop or a conditional mixes into one that names its line and the remedy."""
    try:
        yield
    except TypeError as error:
        text = str(error)
        found = next((said for words, said in _UNLIKE_TYPES.items() if words in text), None)
        if not check_vma or found is None or "varying" not in text:
            raise
        raise ValueError(
            f"check_vma=True: {found[0].format(callers_line(error))}, which typed mode refuses. Use check_vma=False (the "
            f"default; the result is the same), or {found[1]}. JAX says: {text}"
        ) from error


# --------------------------------------------------------------------------------------------------
# The interface of every gradient engine.
# --------------------------------------------------------------------------------------------------


class Differentiated(NamedTuple):
    """What an engine gives on one rank, before anything is divided.

    Attributes:
      grads: gradients of the resting parameters, summed over ranks and microbatches, in the dtype in which they accumulate.
      losses: this rank's, with a dim 0 of microbatches, or of one that is their sum.
      state: the model's state after the last microbatch.
      left_out: what the sums lack of this rank's gradients, where the plan feeds it back.
      finish: what is done with the losses' sums over ranks (`Objective.finish`); None: nothing.
    """

    grads: PyTree
    losses: Loss
    state: PyTree
    left_out: PyTree = None
    finish: Callable | None = None


@dataclass(frozen=True, eq=False)
class GradientEngine(abc.ABC):
    """How the loss of all microbatches of a step is differentiated, inside `shard_map`.

    Attributes:
      objective: the loss of one microbatch.
      placement: how parameters are read and gradients reduced.
      parts: what a microbatch's loss is divided by, and the loss scale.
      sync: False leaves gradients each rank's own.
      left_out: what the last step's sums lacked of this rank's gradients, which joins them; None: nothing is fed back.
    """

    objective: Objective
    placement: Placement
    parts: Parts
    sync: bool
    left_out: PyTree = None

    @property
    def feedback(self) -> Feedback | None:
        """Of the plan's sums, where there is something to begin with."""
        precision = self.placement.plan.precision
        return None if self.left_out is None else Feedback.of(self.placement.strategies, precision)

    @abc.abstractmethod
    def differentiate(self, variables: Variables, key: jax.Array, batch: PyTree) -> Differentiated:
        """Of resting variables, the step's randomness and this rank's rows."""
