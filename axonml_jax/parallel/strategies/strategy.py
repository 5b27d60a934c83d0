"""The contract of every strategy."""

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import jax
import jax.numpy as jnp

from axonml_jax._types import PyTree
from axonml_jax.mesh.axes import AxisNames, as_axes
from axonml_jax.model.functional import Functional
from axonml_jax.parallel.context.context_split import ContextSplit
from axonml_jax.parallel.fabric import Fabric
from axonml_jax.parallel.strategies.local_rounds import LocalRounds
from axonml_jax.parallel.strategies.role import Role
from axonml_jax.parallel.strategies.transfer import Transfer
from axonml_jax.parallel.units.wrap import Wrap
from axonml_jax.sharding.batch import second_dim
from axonml_jax.sharding.layout import Layout
from axonml_jax.sharding.sequence_order import Order

MIB = 2**20


class AbstractStrategy(abc.ABC):
    """How parameters live on one mesh axis (or on several that one strategy owns together), and how they are read.

    Law: `sync` is the transpose of `gather`: it sums. The division by the total weight happens once, in `training/`.

    `gather` and `sync` run inside `shard_map` with `axis` bound: a mesh axis's name, or a tuple of the names of those that
    the strategy owns together. Their `layout` is the leaf's final one; a strategy looks only at what it put there itself.
    A strategy is a frozen, hashable value.

    Attributes:
      wrap: which parts of the model are units (see `units/wrap.py`), for a role that reads parameters at their "use".
      prefetch: how many units ahead they are gathered, for such a role.
    """

    wrap: Wrap = None
    prefetch: int = 0

    @property
    @abc.abstractmethod
    def role(self) -> Role:
        """What the axis does to the batch and to parameters."""

    @abc.abstractmethod
    def spec(self, layout: Layout, axis: AxisNames, axis_size: int) -> Layout:
        """Where a parameter lives between steps.

        Args:
          layout: of the whole array, as the model's layers split it.
          axis: a mesh axis's name, or a tuple of those that the strategy owns together.
          axis_size: R, their ranks.

        Returns:
          The layout refined by this axis (`Layout.on`), or as it is.
        """

    @abc.abstractmethod
    def gather(self, shard: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """The array that the forward pass reads.

        Args:
          shard: as it rests, [*layout.shard], in the dtype in which the model computes.
          layout: the leaf's.
          axis: as for `spec`.

        Returns:
          The array whole along this axis, without padding; where nothing splits it, [*layout.shape].
        """

    @abc.abstractmethod
    def sync(self, grad: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """The gradient of the shard, summed over the axis.

        Args:
          grad: this rank's gradient of what `gather` returned, shaped alike, in the dtype in which gradients are reduced.
          layout, axis: as for `gather`.

        Returns:
          The sum's part that belongs to this rank's shard.
        """

    def position_dim(self, path: str, shape: tuple[int, ...]) -> int | None:
        """The dim of a leaf of the batch that holds positions, for a role that splits them: dim 1 of leaves that have one.

        Args:
          path: of the leaf in the batch, "tokens" or "0/mask"; of a call's argument its number or name.
          shape: the whole leaf's.

        Returns:
          A dim after 0, which holds rows; None: every rank has all of the leaf's rows as they are.
        """
        return second_dim(path, shape)

    @property
    def position_order(self) -> Order:
        """In which order ranks hold positions, for a role that splits them; batches and outputs keep the sequence's."""
        return "contiguous"

    def position_split(self, axis: AxisNames) -> ContextSplit | None:
        """How `context_attention` reads positions of other ranks, which the ledger then prices; None: it does not."""
        return None

    @property
    def left_to_partitioner(self) -> bool:
        """Whether a step leaves its axes to XLA's partitioner: none is bound, and the model's code sees whole sequences."""
        return False

    def for_model(self, model: Functional) -> Self:
        """Itself with the defaults decided that depend on the model."""
        return self

    def rewritten(self, fun: Callable[..., Any], axis: AxisNames, check_vma: bool) -> Callable[..., Any]:
        """For axes that are left to the partitioner: what a step traces in the place of the model's code.

        Args:
          fun: takes pytrees and returns one; it sees whole sequences.
          axis: the strategy's.
          check_vma: the plan's.
        """
        return fun

    def partitioner_budget(self, attention: float) -> float:
        """For axes that are left to the partitioner: bytes per rank and step that the model's code may send along them, besides
        sums and the attention that was recognised, which sends so many."""
        return math.inf

    def inside(self, axis: AxisNames) -> AbstractContextManager:
        """What holds while the model's code is traced inside `shard_map`: entered around every call of it, and of the loss."""
        return nullcontext()

    def model_problems(self, model: Functional, axis: AxisNames, degrees: Mapping[str, int]) -> list[str]:
        """Why a model cannot run under the strategy, with the remedy: asked, and refused, before anything is allocated.

        Args:
          model: the pure view of the user's; its modules are known where it is an NNX module.
          axis: the strategy's, of more than one rank.
          degrees: of the mesh.
        """
        return []

    def with_fsdp(self, fsdp: "AbstractStrategy") -> "AbstractStrategy | None":
        """The strategy that owns `fsdp` and `context` together, asked of a plan's `context`; None: each keeps its own.

        Args:
          fsdp: the plan's.
        """
        return None

    def sync_bucket(self, grads: Sequence[jax.Array], layouts: Sequence[Layout], axis: AxisNames) -> list[jax.Array]:
        """`sync` of several leaves that travel together."""
        return [self.sync(grad, layout, axis) for grad, layout in zip(grads, layouts, strict=True)]

    def gather_bucket(self, shards: Sequence[jax.Array], layouts: Sequence[Layout], axis: AxisNames) -> list[jax.Array]:
        """`gather` of several leaves that travel together."""
        return [self.gather(shard, layout, axis) for shard, layout in zip(shards, layouts, strict=True)]

    @abc.abstractmethod
    def gather_flows(
        self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any
    ) -> Sequence[Transfer]:
        """What one `gather` of a leaf sends: the ledger and the planner price it.

        The planner prices many meshes at once: then `elements` and the sizes of the layout are arrays, with an entry for
        each mesh, and so are those of the transfers.

        Args:
          elements: of the shard that is gathered.
          layout: the leaf's.
          axis: the strategy's.
          ranks: of the axis.
          dtype: of the shard.

        Returns:
          One `ax.Transfer` for every collective; nothing where nothing is sent.
        """

    @abc.abstractmethod
    def sync_flows(self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any) -> Sequence[Transfer]:
        """What one `sync` of a gradient of so many elements sends; its arguments are those of `gather_flows`."""

    @property
    def exact(self) -> bool:
        """Whether what is read is what rests, and what is reduced the sum; False declares a lossy strategy."""
        return True

    @property
    def reads_exactly(self) -> bool:
        """Whether what is read is what rests; to be said by a lossy strategy of which only the sums are rounded."""
        return self.exact

    def round_trip(self, shard: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """What ranks read of a shard once it has been gathered: itself, unless the strategy is lossy."""
        return shard

    def sum_round_trip(self, part: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """What `sync` adds of a part of one rank's gradient: itself, unless the strategy is lossy.

        Args:
          part: [*layout.shard], with its padding: what one rank sends another.
          layout, axis: as for `sync`.
        """
        return part

    @property
    def feeds_back(self) -> bool:
        """Whether what `sum_round_trip` takes from a rank's gradient is added to its gradient in the next step.

        For a role that reduces once a step (Seide et al. 2014). A trainer keeps it, of every rank (`TrainState.left_out`).
        """
        return False

    def init_state(self, param: jax.Array) -> PyTree:
        """What the strategy keeps between steps for one trained parameter, given whole; None: nothing.

        Arrays of the parameter's shape rest as it does, others whole on every rank. Checkpoints keep them.
        """
        return None

    def to_read(self, shard: jax.Array, state: PyTree, layout: Layout, axis: AxisNames) -> jax.Array:
        """What a training step gathers in the place of a resting shard, given the state: for instance with its error added."""
        return shard

    def after_update(
        self, shard: jax.Array, state: PyTree, layout: Layout, axis: AxisNames, *, before: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        """The shard and the state after an update, once per step whose update is not skipped, inside `shard_map`.

        Args:
          shard: as the optimizer made it.
          state: as it was in this step.
          layout, axis: as for `gather`.
          before: the shard before the update.

        Returns:
          The shard and the state that the next step begins with, shaped and typed as they were.
        """
        return shard, state

    @property
    def acts_between_steps(self) -> bool:
        """Whether it has an `init_state` or an `after_update` of its own."""
        own, contract = type(self), AbstractStrategy
        return own.init_state is not contract.init_state or own.after_update is not contract.after_update

    @property
    def rounds(self) -> LocalRounds | None:
        """The rounds in which its ranks train parameters of their own; None: they agree on parameters after every step."""
        return None

    def within_round(self) -> "AbstractStrategy":
        """What stands in its place in a training step, for one with `rounds`: a strategy that never reduces."""
        return self

    def reducing(self) -> Self:
        """Itself, but reducing gradients where its role never does: what `sync_gradients` asks for."""
        return self

    def decided(self, fabric: Fabric, ranks: int) -> Self:
        """Itself with the defaults decided that depend on the devices.

        Args:
          fabric: what connects the mesh's devices.
          ranks: of the axis.
        """
        return self

    def in_words(self, axis: AxisNames) -> str:
        """What it does to parameters, in a few words: what summaries of plans say."""
        return f"{type(self).__name__} over {'*'.join(as_axes(axis))}"

    def wire_dtype(self, dtype: Any) -> Any:
        """The dtype in which a gradient of `dtype` travels."""
        return jnp.dtype(dtype)

    @property
    def bucket_bytes(self) -> int:
        """Capacity in bytes of what is reduced together; that of `Placement.reducer` counts for the whole plan."""
        return 25 * MIB

    @property
    def overlaps(self) -> bool:
        """Whether gradients are reduced inside the backward; that of `Placement.reducer` counts for the whole plan."""
        return True
