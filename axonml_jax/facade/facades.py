"""`DDP`, `FSDP`, `Pipeline`, `TensorParallel`, `ContextParallel`, `parallelize`: each names a plan."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import jax
import optax
from flax import linen, nnx
from jax.sharding import Mesh

from axonml_jax.base import LossFn, PyTree, is_choice, warn
from axonml_jax.collectives.gradients import CommHook, GradSyncStrategy
from axonml_jax.facade.trainer import ParallelModel
from axonml_jax.mesh.axes import PARTITIONED, STAGES, as_axes
from axonml_jax.mesh.shape import make_mesh
from axonml_jax.mesh.world import ProcessGroup, World, as_mesh
from axonml_jax.model.loss import Precision
from axonml_jax.model.view import Trainable
from axonml_jax.parallel.context import Context
from axonml_jax.parallel.plan import CPUOffload, Kernels, Memory, Partition, Plan, Remat, Rules, in_words
from axonml_jax.sharding.layout import Order, as_spec, replicated
from axonml_jax.strategies.replicate import Replicate
from axonml_jax.strategies.shard import ReduceWire, Shard, ShardingStrategy, Wire
from axonml_jax.strategies.strategy import Method, Wrap
from axonml_jax.training.state import TrainState

if TYPE_CHECKING:  # what only some facades answer is imported when they are asked
    from axonml_jax.facade.trainer import Trainer
    from axonml_jax.ledger.compiled import PartitionedTraffic, PositionTraffic
    from axonml_jax.ledger.memory import FSDPMemoryStats, MemoryStats
    from axonml_jax.pipeline.schedules import Pipelined, PipelineSchedule
    from axonml_jax.pipeline.simulate import PipelineMemoryStats
    from axonml_jax.pipeline.timetable import Timetable
    from axonml_jax.training.step import TrainStep

# --------------------------------------------------------------------------------------------------
# `ContextParallel`: sequences split over devices.
# --------------------------------------------------------------------------------------------------

CONTEXT = "context"


class ContextParallel(ParallelModel):
    """Every device holds other positions of the same sequences, and the whole model or a part of it.

    The code of a model that is written for it sees the positions of one device, and says so by the class attribute
    `splits_positions = True`; what goes across positions is `ax.context_attention` (Liu et al. 2023; Jacobs et al. 2023). The
    code of any other model sees whole sequences; the attention in it is recognised and computed so.

    Args:
      model: an NNX module, a function without arguments that makes one, or a Linen module with `params=`.
      mesh: a Mesh with a `context` axis, a World, a ProcessGroup, or None: then all devices split sequences. Other axes
        combine: `data`, `fsdp` (parameters sharded, gathered unit by unit), and those of parallel layers.
      method: how attention reads the keys and values of other ranks: "auto", "gather", "ulysses", "ring", or (U, "ring") or
        (U, "gather"), Ulysses among U ranks (see `ax.context_attention`).
      order: in which order ranks hold positions (see `ax.sequence_order`); "auto" is "zigzag", which balances causal attention.
        Batches are given and outputs come back in the sequence's own.
      sees: what positions the model's code sees: "own", those of its device; "whole", those of all; "auto": as the model says.
      allow_communication: what code that sees whole sequences may send across positions besides attention (see `ax.Context`).
      shard: parameters rest sharded over `fsdp` and `context` together, and are gathered over both at once (ZeRO-3).
      params: a Linen module's variables.
      bucket_size_mb, gradient_as_bucket_view, comm_dtype, comm_hook: see `ax.DDP`.
      remat, memory, batch_stats, precision, trainable, check_vma, kernels, draws, seed: see `ax.DDP`.
      sync_strategy: OVERLAPPED or SYNCHRONOUS (see `ax.GradSyncStrategy`).

    Raises:
      TypeError, ValueError: for anything that cannot work, before anything is allocated.
    """

    def __init__(
        self,
        model: Any,
        mesh: Any = None,
        *,
        method: Method = "auto",
        order: Order | Literal["auto"] = "auto",
        sees: Literal["auto", "own", "whole"] = "auto",
        allow_communication: bool | int = False,
        shard: bool = False,
        params: PyTree | None = None,
        bucket_size_mb: float = 25,
        remat: Remat = None,
        memory: Memory = None,
        batch_stats: Literal["global", "local"] = "global",
        gradient_as_bucket_view: bool | None = None,
        sync_strategy: GradSyncStrategy | str = GradSyncStrategy.OVERLAPPED,
        comm_dtype: Any = None,
        comm_hook: CommHook | None = None,
        precision: Precision | str | None = None,
        trainable: Trainable = None,
        check_vma: bool = False,
        kernels: Kernels = "auto",
        draws: Literal["shards", "rows"] = "shards",
        seed: int = 0,
    ):
        reducing: dict[str, Any] = {
            "sync_strategy": sync_strategy,
            "bucket_size_mb": bucket_size_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "comm_dtype": comm_dtype,
            "comm_hook": comm_hook,
        }
        own: dict[str, Any] = {"sees": sees, "allow_communication": allow_communication, "shard": shard}
        plan = Plan(
            context=Context(method=method, order=order, **own, **reducing),
            data=Replicate(**reducing),
            precision=Precision.of(precision),
            remat=remat,
            memory=memory,
            batch_stats=batch_stats,
            check_vma=check_vma,
            kernels=kernels,
            draws=draws,
        )
        super().__init__(model, _context_mesh(mesh, shard), plan, params=params, trainable=trainable, seed=seed)

    def context_traffic(self, trainer: "Trainer", batch: PyTree) -> "PositionTraffic":
        """What a step of a model that sees whole sequences sends along `context`, counted in the compiled program.

        Args:
          trainer: one of this model.
          batch: arrays or shapes of a global batch; nothing runs.

        Raises:
          ValueError: for a model that sees its device's positions: `ax.explain` counts what it sends.
        """
        if "context" not in self._placement.automatic:
            raise ValueError(
                "the model's code sees its device's positions, and nothing is left to the partitioner: use ax.explain"
            )
        from axonml_jax.ledger.memory import traffic_along

        return traffic_along(self._placement, trainer.trace(batch).lower().compile(), "context")


def _context_mesh(given: Any, shard: bool) -> Mesh:
    """The mesh with a `context` axis that the user means."""
    mesh = as_mesh(given)
    if given is None or isinstance(given, World | ProcessGroup):
        devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else None
        return make_mesh(context=-1, devices=devices, **({"fsdp": 1} if shard else {}))
    if CONTEXT not in mesh.axis_names:
        raise ValueError(
            f"ContextParallel splits sequences over the mesh axis {CONTEXT!r}, which {dict(mesh.shape)} lacks: use "
            "ax.make_mesh(context=-1), ax.make_mesh(data=..., context=...), or leave the mesh out"
        )
    return mesh  # pyright: ignore[reportReturnType]  # ParallelModel refuses meshes without devices


# --------------------------------------------------------------------------------------------------
# `DDP`: distributed data parallelism, named as in PyTorch.
# --------------------------------------------------------------------------------------------------


class DDP(ParallelModel):
    """Every device holds the whole model; the batch is split, gradients are averaged (Li et al. 2020).

    Args:
      model: an NNX module, or a Linen module with `params=`.
      mesh: a Mesh, a World, a ProcessGroup, or None for all devices; the batch is split over its `data` axis.
      params: a Linen module's variables.
      bucket_size_mb: gradients are reduced in buckets of this many MiB.
      remat: what the backward recomputes, unit by unit: None, "full", "selective" (all but weight multiplications), or all but
        what regular expressions, or a policy, name (see `ax.Plan`).
      memory: bytes of a device for a step, as "76GiB", or a share of it, as 0.9: what is recomputed is found so that it fits.
      batch_stats: "global": BatchNorm statistics of the global batch; "local": each rank's own, as in PyTorch.
      broadcast_buffers: with "local": give every rank the first rank's buffers each step.
      gradient_as_bucket_view: True: no flat copy; False: one flat buffer per bucket; None: the faster on the backend.
      sync_strategy: OVERLAPPED, SYNCHRONOUS or NO_SYNC (see `ax.GradSyncStrategy`).
      comm_dtype: the dtype in which gradients travel ("bfloat16", "float16"), None as they are.
      comm_hook: `hook(flat_bucket, axes) -> summed flat bucket` in the place of the all-reduce.
      precision: "float32", "bf16", or an `ax.Precision`.
      trainable: which parameters train: regular expressions, a predicate of the path name, or an NNX variable type.
      check_vma: let JAX check varying types (see `ax.Plan`).
      kernels: "xla" leaves out this library's kernels on GPUs (see `ax.Plan`).
      draws: "rows" makes dropout's masks those of one device, row by row (see `ax.Plan`).
      seed: of dropout and other random streams.

    Raises:
      TypeError, ValueError: for anything that cannot work, before anything is allocated.
    """

    def __init__(
        self,
        model: Any,
        mesh: Any = None,
        *,
        params: PyTree | None = None,
        bucket_size_mb: float = 25,
        remat: Remat = None,
        memory: Memory = None,
        batch_stats: Literal["global", "local"] = "global",
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool | None = None,
        sync_strategy: GradSyncStrategy | str = GradSyncStrategy.OVERLAPPED,
        comm_dtype: Any = None,
        comm_hook: CommHook | None = None,
        precision: Precision | str | None = None,
        trainable: Trainable = None,
        check_vma: bool = False,
        kernels: Kernels = "auto",
        draws: Literal["shards", "rows"] = "shards",
        seed: int = 0,
    ):
        if batch_stats == "global" and not broadcast_buffers:
            warn(
                'broadcast_buffers=False has no effect with batch_stats="global", where buffers are equal by construction: '
                'give batch_stats="local" to keep buffers local, or leave the flag out'
            )
        data = Replicate(
            sync_strategy=sync_strategy,  # pyright: ignore[reportArgumentType]  # Replicate checks and converts names
            bucket_size_mb=bucket_size_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            comm_dtype=comm_dtype,
            comm_hook=comm_hook,
        )
        plan = Plan(
            data=data,
            precision=Precision.of(precision),
            remat=remat,
            memory=memory,
            batch_stats=batch_stats,
            broadcast_buffers=broadcast_buffers,
            check_vma=check_vma,
            kernels=kernels,
            draws=draws,
        )
        mesh = as_mesh(mesh)
        if mesh.shape.get("fsdp", 1) > 1:
            raise ValueError(
                f"mesh axes {{'fsdp': {mesh.shape['fsdp']}}} have no strategy in DDP, which replicates along 'data': use "
                "ax.FSDP, or a mesh with these devices on `data`"
            )
        super().__init__(model, mesh, plan, params=params, trainable=trainable, seed=seed)


# --------------------------------------------------------------------------------------------------
# `FSDP`: fully sharded data parallelism, named as in PyTorch and AxonML.
# --------------------------------------------------------------------------------------------------


class FSDP(ParallelModel):
    """Every device holds a part of parameters, gradients and optimizer state (ZeRO, Rajbhandari et al. 2020; PyTorch FSDP).

    Args:
      model: an NNX module or a function without arguments that makes one (then no device ever holds the whole model), or
        a Linen module with `params=`.
      mesh: a Mesh with an `fsdp` axis, a World, a ProcessGroup, or None for all devices; the batch is split over `fsdp` and
        `data`. HYBRID_SHARD without a Mesh shards over each host's devices and replicates over hosts.
      params: a Linen module's variables, or a function without arguments that makes them.
      sharding_strategy: what is sharded during a step (see `ax.ShardingStrategy`).
      cpu_offload: what rests in host memory (see `ax.CPUOffload`).
      mixed_precision: "float32", "bf16", "fp16" (with a dynamic loss scale), or an `ax.Precision`: shards are cast, then
        gathered, so that half the bytes travel.
      precision: another name for mixed_precision.
      wrap: which parts are gathered together (FULL_SHARD) and recomputed together (`remat`): None finds repeated blocks;
        module types, regular expressions of module paths, or a predicate of the path.
      prefetch: units gathered ahead while one computes; each costs a unit of memory.
      wire: parameters are gathered as "int8" or "fp8" with a scale per block of at most 256 elements; the
        model computes with what was sent. None: as they are.
      reduce_wire: parts of gradients travel as "bf16" or "int8" to the device that sums them, in float32 (as in `ax.Shard`);
        "int8-feedback" adds what rounding left out of a device's gradients to its next ones (SHARD_OPTIMIZER).
        None: a reduce-scatter in the dtype of gradients.
      update: "shards", or "whole": every rank gathers whole arrays, for optimizers that are refused on shards.
      remat: what the backward recomputes, unit by unit: None, "full", "selective" (all but weight multiplications), or all but
        what regular expressions, or a policy, name (see `ax.Plan`).
      memory: bytes of a device for a step, as "76GiB", or a share of it, as 0.9: what is recomputed is found so that it fits.
      batch_stats, trainable, check_vma, kernels, draws, seed: see `ax.DDP`.

    Raises:
      TypeError, ValueError: for anything that cannot work, before anything is allocated.
    """

    def __init__(
        self,
        model: Any,
        mesh: Any = None,
        *,
        params: PyTree | None = None,
        sharding_strategy: ShardingStrategy | str = ShardingStrategy.FULL_SHARD,
        cpu_offload: CPUOffload | str = CPUOffload.NONE,
        mixed_precision: Precision | str | None = None,
        precision: Precision | str | None = None,
        wrap: Wrap = None,
        prefetch: int = 0,
        wire: Wire | None = None,
        reduce_wire: ReduceWire | None = None,
        update: Literal["shards", "whole"] = "shards",
        remat: Remat = None,
        memory: Memory = None,
        batch_stats: Literal["global", "local"] = "global",
        trainable: Trainable = None,
        check_vma: bool = False,
        kernels: Kernels = "auto",
        draws: Literal["shards", "rows"] = "shards",
        seed: int = 0,
    ):
        strategy = _strategy(sharding_strategy)
        if mixed_precision is not None and precision is not None:
            raise ValueError("mixed_precision= and precision= are two names for the same policy: give one")
        plan = Plan(
            fsdp=strategy.on_axis(wrap=wrap, prefetch=prefetch, wire=wire, reduce_wire=reduce_wire),
            precision=Precision.of(mixed_precision if precision is None else precision),
            offload=cpu_offload,  # pyright: ignore[reportArgumentType]  # Plan checks and converts names
            update=update,
            remat=remat,
            memory=memory,
            batch_stats=batch_stats,
            check_vma=check_vma,
            kernels=kernels,
            draws=draws,
        )
        self.strategy, mesh = strategy, _fsdp_mesh(mesh, strategy)
        idle = {name: sent for name, sent in {"wire": wire, "reduce_wire": reduce_wire}.items() if sent is not None}
        if idle and mesh.shape["fsdp"] == 1:
            raise ValueError(
                f"FSDP({', '.join(f'{name}={sent!r}' for name, sent in idle.items())}) says how arrays travel, "
                f"and along fsdp of the mesh {dict(mesh.shape)} there is one rank, to which nothing travels: leave "
                f"{' and '.join(idle)} out, or give fsdp more ranks"
            )
        super().__init__(model, mesh, plan, params=params, trainable=trainable, seed=seed)

    def gather_parameters(self) -> PyTree:
        """The trained parameters, whole on every device. Nothing here holds them: they are freed with the last reference."""
        return replicated(self.parameters(), self.mesh)

    def reshard_parameters(self, params: PyTree | None = None) -> None:
        """Take whole parameters (as `gather_parameters` gave them, changed or not) and keep this device's parts.

        Args:
          params: whole parameters; None changes nothing, since resting parameters are always sharded.

        Raises:
          ValueError: listing every missing, unexpected and mismatched parameter, before anything is changed.
        """
        if params is not None:
            self.set_parameters(params)

    @contextmanager
    def whole_parameters(self) -> Iterator[PyTree]:
        """Within this context a nest of dicts with whole parameters; what is changed in it is written back at the end.

        Like PyTorch's `summon_full_params(writeback=True)`. After an exception nothing is written back.
        """
        params = jax.tree.map(lambda x: x, self.gather_parameters())
        yield params
        self.reshard_parameters(params)

    def memory_estimate(self, moments: int = 2) -> "FSDPMemoryStats":
        """Bytes per device by formula, padding included, without activations.

        Args:
          moments: arrays the optimizer keeps per parameter: 2 for Adam, 1 for momentum or Lion, 0 for SGD.
        """
        from axonml_jax.ledger.memory import estimate

        return estimate(self._placement, moments, self._functional)

    def memory_stats(self) -> "MemoryStats":
        """Measured memory of the fullest device: current allocation, and the peak."""
        from axonml_jax.ledger.memory import measure

        return measure(self.mesh, self._newest_trainer)


def _strategy(given: ShardingStrategy | str) -> ShardingStrategy:
    names = [each.value for each in ShardingStrategy]
    if not is_choice(ShardingStrategy, given):
        raise ValueError(f"sharding_strategy={given!r} must be an ax.ShardingStrategy or one of {names}")
    return ShardingStrategy(given)


def _fsdp_mesh(given: Any, strategy: ShardingStrategy) -> Any:
    """The mesh with an `fsdp` axis that the user means."""
    if given is None and strategy is ShardingStrategy.HYBRID_SHARD:
        hosts = len({device.process_index for device in jax.devices()})
        return make_mesh(data=hosts, fsdp=-1)
    if given is None or isinstance(given, World | ProcessGroup):
        mesh = as_mesh(given)
        devices = mesh.devices if isinstance(mesh, Mesh) else None
        return make_mesh(fsdp=-1, devices=None if devices is None else list(devices.flat))
    mesh = as_mesh(given)
    if "fsdp" not in mesh.axis_names:
        raise ValueError(
            f"FSDP shards over the mesh axis 'fsdp', which {dict(mesh.shape)} lacks: use ax.make_mesh(fsdp=-1), "
            "ax.make_mesh(data=..., fsdp=...) for HYBRID_SHARD, or leave the mesh out"
        )
    return mesh


# --------------------------------------------------------------------------------------------------
# `parallelize`: any plan on any mesh; what every facade is made of. `make_train_step`: the same without objects.
# --------------------------------------------------------------------------------------------------


def parallelize(
    model: Any,
    mesh: Any = None,
    plan: Plan | None = None,
    *,
    params: PyTree | None = None,
    trainable: Trainable = None,
    seed: int = 0,
) -> ParallelModel:
    """A model on a mesh under a plan.

    Args:
      model: an NNX module or a function without arguments that makes one (then parameters are made where they will
        rest), or a Linen module with `params=`.
      mesh: a Mesh, a World, a ProcessGroup, or None: the plan's own degrees, or all devices on `data`.
      plan: how the model is spread and stepped; None: as the model's annotations say (`ax.Plan.from_annotations`), where
        they name axes of the mesh; else data parallelism.
      params: a Linen module's variables, or a function without arguments that makes them.
      trainable: which parameters train.
      seed: of dropout and other random streams.

    Raises:
      TypeError, ValueError: for anything that cannot work, before anything is allocated.
    """
    return ParallelModel(model, mesh, plan, params=params, trainable=trainable, seed=seed)


def place(
    model: Any, mesh: Any = None, plan: Plan | None = None, *, params: PyTree | None = None, seed: int = 0
) -> Any:
    """A model whose arrays lie on a mesh as a plan lets them rest, for a training loop of your own.

    It is a Flax model as before, which `nnx.Optimizer`, `nnx.value_and_grad`, `nnx.jit` and `jax.jit` train; its parameters and
    the optimizer's moments stay split as they lie. XLA's partitioner then chooses what is sent, and nothing of the plan but
    where arrays rest takes part: prefer `model.trainer(...)`, which communicates as the plan says. Split batches yourself,
    `jax.device_put(batch, jax.NamedSharding(mesh, P("data")))`.

    Args:
      model, mesh, plan, params, seed: see `parallelize`.

    Returns:
      An NNX module, or of a Linen module its variables: arrays on your mesh, by your names of its axes.

    Raises:
      TypeError, ValueError: as `parallelize`; before anything is allocated, for options that only a step of this library obeys.

    >>> import jax
    >>> import axonml_jax as ax
    >>> from flax import nnx
    >>> mesh = ax.make_mesh(fsdp=1, devices=jax.devices()[:1])
    >>> ax.place(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), mesh).kernel.sharding.mesh.axis_names
    ('data', 'fsdp')
    """
    if isinstance(plan, Plan):
        _refuse_idle(plan)
    parallel = parallelize(model, mesh, plan, params=params, seed=seed)
    if isinstance(model, linen.Module):
        return _named_as(parallel.module.variables, mesh)
    module = parallel.module
    with nnx.use_eager_sharding(False):
        nnx.update(module, _named_as(nnx.state(module), mesh))
    return module


def _refuse_idle(own: Plan) -> None:
    """Refuse what a plan says of a step and not of where arrays rest: a loop of the user's own would not do it."""
    idle = {
        "pipe": own.pipe is not None,
        "rounds, or ranks that train models of their own": bool(own.rounds) or own.independent,
        f"offload={own.offload.value!r}": own.offload is not CPUOffload.NONE,
        f"precision={own.precision}": own.precision != Precision(),
        f"accumulate={own.accumulate}": own.accumulate > 1,
        f"remat={own.remat!r}": own.remat is not None,
        f"memory={own.memory!r}": own.memory is not None,
        f"draws={own.draws!r}": own.draws != "shards",
        f"kernels={own.kernels!r}": own.kernels != "auto",
        f"batch_stats={own.batch_stats!r}": own.batch_stats != "global",
        f"update={own.update!r}": own.update != "shards",
        "check_vma=True": own.check_vma,
    }
    idle |= {f"{'*'.join(as_axes(axis))}={in_words(each)}": not each.exact for axis, each in own.strategies.items()}
    if asked := [name for name, there in idle.items() if there]:
        raise ValueError(
            f"ax.place says where arrays lie, and {', '.join(asked)} of the plan would have no effect in a loop of your "
            "own: leave it out, or train by parallelize(model, mesh, plan).trainer(tx, loss_fn)"
        )


def _named_as(tree: PyTree, mesh: Any) -> PyTree:
    """Arrays on this library's mesh as they lie, but on the user's mesh of the same devices, by its names of axes."""
    if not isinstance(mesh, Mesh):
        return tree

    def moved(leaf: Any) -> Any:
        at = getattr(leaf, "sharding", None)
        if not isinstance(at, jax.sharding.NamedSharding):
            return leaf
        theirs = dict(zip(at.mesh.axis_names, mesh.axis_names, strict=True))
        entries = [tuple(theirs[axis] for axis in as_axes(entry or ())) for entry in at.spec]
        spec = as_spec(entries)
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))

    return jax.tree.map(moved, tree)


def make_train_step(
    model: Any,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    mesh: Any = None,
    plan: Plan | None = None,
    *,
    params: PyTree | None = None,
    trainable: Trainable = None,
    max_grad_norm: float | None = None,
    norm_type: float = 2.0,
    max_nonfinite: int | None = None,
    seed: int = 0,
) -> "tuple[TrainState, TrainStep]":
    """The pure, functional way: a first state and a compiled step.

    Args:
      model, mesh, plan, params, trainable, seed: see `parallelize`.
      tx: the optimizer.
      loss_fn: `loss_fn(model, batch) -> loss` or `(loss, metrics)`.
      max_grad_norm: clip gradients to this global norm.
      norm_type: of that norm: 1, 2 or `math.inf`.
      max_nonfinite: see `ParallelModel.trainer`.

    Returns:
      `(state, step)` with `state, metrics = step(state, batch)`; the state given to `step` is donated.

    Raises:
      TypeError, ValueError: for anything that cannot work, before anything is allocated.
    """
    parallel = parallelize(model, mesh, plan, params=params, trainable=trainable, seed=seed)
    trainer = parallel.trainer(
        tx, loss_fn, max_grad_norm=max_grad_norm, norm_type=norm_type, max_nonfinite=max_nonfinite
    )
    return trainer.state, trainer.train_step


# --------------------------------------------------------------------------------------------------
# `Pipeline`: pipeline parallelism, named as in AxonML.
# --------------------------------------------------------------------------------------------------


class Pipeline(ParallelModel):
    """Every device holds one part of the model's depth; microbatches pass from part to part (AxonML, AxoNN, Megatron).

    Args:
      stages_or_model: a model with repeated blocks, which is cut between them; or modules (or `ax.PipelineStage`s) that are
        applied in order, one per stage (see `from_modules`).
      mesh: a Mesh with a `pipe` axis, a World, a ProcessGroup, or None: then all devices are stages. Other axes combine:
        `data`, `fsdp` (parameters sharded inside a stage), and those of parallel layers.
      num_microbatches: into how many parts the rows of a batch shard are cut.
      schedule: an `ax.PipelineSchedule` or its name.
      chunks: stages per device; None: 2 for the interleaved schedule, else 1; given modules, as many as they make.
      split: module paths at which the second and later stages begin; the path of a module whose parameters are stacked along
        dim 0 for one loop (`nnx.scan`, `nn.scan`): every stage runs as many of its rows; None: by balanced cost.
      gather: with `fsdp`, "step" gathers a device's stages once per step, "chunk" when a device turns to another of its
        stages, "tick" whenever one is used.
      params: a Linen module's variables; of Linen modules given one by one a list of them.
      precision, remat, memory, trainable, check_vma, kernels, draws, seed: see `ax.DDP`.
      update: see `ax.FSDP`.
      accumulate: that many times more microbatches per update, in one pass.
      cpu_offload: what rests in host memory (see `ax.CPUOffload`).

    Raises:
      TypeError, ValueError: for anything that cannot work, before anything is allocated.
    """

    def __init__(
        self,
        stages_or_model: Any,
        mesh: Any = None,
        *,
        num_microbatches: int = 8,
        schedule: "PipelineSchedule | str" = "1f1b",
        chunks: int | None = None,
        split: str | Sequence[str] | None = None,
        gather: Literal["step", "chunk", "tick"] = "step",
        params: PyTree | None = None,
        precision: Precision | str | None = None,
        remat: Remat = None,
        memory: Memory = None,
        update: Literal["shards", "whole"] = "shards",
        accumulate: int = 1,
        cpu_offload: CPUOffload | str = CPUOffload.NONE,
        trainable: Trainable = None,
        check_vma: bool = False,
        kernels: Kernels = "auto",
        draws: Literal["shards", "rows"] = "shards",
        seed: int = 0,
    ):
        from axonml_jax.pipeline.assign import Chain, LinenChain
        from axonml_jax.pipeline.schedules import Pipelined, PipelineSchedule

        mesh = _pipe_mesh(mesh)
        model = stages_or_model
        if isinstance(model, Sequence):
            model, params = _chain(model, params, mesh.shape[STAGES])
        interleaved = PipelineSchedule.of(schedule) is PipelineSchedule.INTERLEAVED_ONE_F_ONE_B
        if chunks is None and isinstance(model, (Chain, LinenChain)):
            chunks = max(1, len(model.groups) // mesh.shape[STAGES])
        policy = Pipelined(
            schedule=schedule,  # pyright: ignore[reportArgumentType]  # Pipelined checks and converts names
            num_microbatches=num_microbatches,
            chunks=(2 if interleaved else 1) if chunks is None else chunks,
            split=split if split is None or isinstance(split, str) else tuple(split),
            gather=gather,
        )
        plan = Plan(
            pipe=policy,
            fsdp=Shard(stage=1),
            precision=Precision.of(precision),
            remat=remat,
            memory=memory,
            update=update,
            accumulate=accumulate,
            offload=cpu_offload,  # pyright: ignore[reportArgumentType]  # Plan checks and converts names
            check_vma=check_vma,
            kernels=kernels,
            draws=draws,
        )
        super().__init__(model, mesh, plan, params=params, trainable=trainable, seed=seed)

    @classmethod
    def from_modules(cls, modules: Sequence[Any], mesh: Any = None, **options: Any) -> "Pipeline":
        """A pipeline of modules that are applied in order: each takes what the one before returns, of any structure.

        Args:
          modules: NNX modules, Linen modules (with `params=`, a list of their variables), or `ax.PipelineStage`s. Module i is
            stage i and lies on device i mod S of the `pipe` axis.
          mesh: see `Pipeline`.
          **options: those of `Pipeline`.
        """
        return cls(list(modules), mesh, **options)

    @property
    def policy(self) -> "Pipelined":
        """The schedule and its options."""
        assert self.plan.pipe is not None
        return self.plan.pipe

    @property
    def num_stages(self) -> int:
        """Stages of the whole model: devices of the `pipe` axis times chunks."""
        return self.policy.num_stages(self.mesh.shape[STAGES])

    @property
    def schedule(self) -> "PipelineSchedule":
        """In which order microbatches pass."""
        return self.policy.schedule

    @property
    def timetable(self) -> "Timetable":
        """What a training step executes; it prints as a table of ticks."""
        return self.policy.timetable(self.mesh.shape[STAGES], self.plan.microbatches)

    @property
    def peak_activations(self) -> "PipelineMemoryStats":
        """Activations that ranks keep in a training step: as papers count them, as executed, and as allocated."""
        from axonml_jax.pipeline.simulate import PipelineMemoryStats

        shape = (self.mesh.shape[STAGES], self.plan.microbatches, self.policy.chunks)
        return PipelineMemoryStats.of(self.schedule, *shape)

    def memory_estimate(self, moments: int = 2) -> "FSDPMemoryStats":
        """Bytes per device of model states, padding included, without activations (see `peak_activations`).

        Args:
          moments: arrays the optimizer keeps per parameter: 2 for Adam, 1 for momentum or Lion, 0 for SGD.
        """
        from axonml_jax.ledger.memory import estimate

        return estimate(self._placement, moments, self._functional)

    @property
    def stage_of(self) -> dict[str, int]:
        """The stage of every parameter, by its path; of a stack every row's, with its number behind the stack's path."""
        staging = self._placement.stages
        assert staging is not None
        return {weight.name: weight.stage for weight in staging.weights}


def _pipe_mesh(given: Any) -> Mesh:
    """The mesh with a `pipe` axis that the user means."""
    mesh = as_mesh(given)
    if given is None or isinstance(given, World | ProcessGroup):
        devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else None
        return make_mesh(pipe=-1, devices=devices)
    if STAGES not in mesh.axis_names:
        raise ValueError(
            f"Pipeline lays stages along the mesh axis {STAGES!r}, which {dict(mesh.shape)} lacks: use ax.make_mesh(pipe=-1), "
            "ax.make_mesh(data=..., pipe=...), or leave the mesh out"
        )
    return mesh  # pyright: ignore[reportReturnType]  # ParallelModel refuses meshes without devices


def _chain(given: Sequence[Any], params: Any, num_ranks: int) -> tuple[Any, Any]:
    """One model from modules given one by one, and its variables."""
    from axonml_jax.pipeline.assign import Chain, LinenChain, PipelineStage, join_variables

    stages = [each if isinstance(each, PipelineStage) else None for each in given]
    if any(stages) and not all(stages):
        raise TypeError(
            "give either modules or ax.PipelineStages, not both: a PipelineStage says on which device it runs"
        )
    modules = [each.module if isinstance(each, PipelineStage) else each for each in given]
    groups = _groups([stage.device for stage in stages if stage], num_ranks) if any(stages) else [1] * len(modules)
    kinds = {next((kind for kind in (nnx.Module, linen.Module) if isinstance(m, kind)), None) for m in modules}
    if kinds not in ({nnx.Module}, {linen.Module}):
        found = [type(module).__name__ for module in modules]
        raise TypeError(
            f"a pipeline of modules takes NNX modules, or Linen modules, one or more, but {found} were given"
        )
    if kinds == {nnx.Module}:
        return Chain(modules, groups), params
    if not isinstance(params, Sequence) or len(params) != len(modules):
        raise ValueError(
            f"{len(modules)} Linen modules hold no arrays: give params=[...], the variables of each, in the same order"
        )
    return LinenChain(tuple(modules), tuple(groups)), join_variables(params)


def _groups(devices: Sequence[int], num_ranks: int) -> list[int]:
    """How many modules make each stage, from the device of every module."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and runs[-1][0] == device:
            runs[-1].append(device)
        else:
            runs.append([device])
    order = [run[0] for run in runs]
    if order != [i % num_ranks for i in range(len(order))] or len(order) % num_ranks:
        raise ValueError(
            f"PipelineStages on devices {list(devices)}: stages go round the {num_ranks} devices of the {STAGES!r} axis in "
            f"order (0 to {num_ranks - 1}, then from 0 again), each as often as the others; neighbours on one device are one "
            "stage"
        )
    return [len(run) for run in runs]


# --------------------------------------------------------------------------------------------------
# `TensorParallel`: any Flax model split by path rules over axes that are left to XLA's partitioner.
# --------------------------------------------------------------------------------------------------


class TensorParallel(ParallelModel):
    """Parameters of a model written by others are split over `tensor`, or `expert`, by their names; its code is not touched.

    The batch is split over `data` by explicit collectives as everywhere, and its rows over `expert`; what is sent along
    `tensor` and `expert` XLA's partitioner chooses (`tensor_traffic` counts it in the compiled program). Models of this
    library's layers, and those that `ax.auto_parallelize` can swap, communicate explicitly there too: prefer them.

    Args:
      model: an NNX module, or a Linen module with `params=`.
      mesh: a Mesh with `tensor` or `expert`, and perhaps `data` and `fsdp`, over which parameters then rest sharded (ZeRO-3)
        on dims that no rule splits.
      rules: required: pairs of a regular expression and a PartitionSpec over "tensor" and "expert" (or your mesh's own names of
        these), in order, or a mapping of them. With "fsdp" a rule names the dim on which a leaf rests sharded over it. The
        first that matches a parameter's whole path name (`blocks/0/up/kernel`) holds. Every parameter must match, and every
        rule be used: `(".*", PartitionSpec())` as the last keeps the rest whole.
      params: a Linen module's variables.
      precision, remat, memory, batch_stats, sync_strategy, trainable, check_vma, kernels, draws, seed: see `ax.DDP`.

    Raises:
      TypeError, ValueError: for anything that cannot work, with every offender, before anything is allocated.

    >>> import jax
    >>> import axonml_jax as ax
    >>> from flax import nnx
    >>> from jax.sharding import PartitionSpec as P
    >>> model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    >>> mesh = ax.make_mesh(tensor=1, devices=jax.devices()[:1])
    >>> ax.TensorParallel(model, mesh, rules={"kernel": P(None, "tensor"), "bias": P("tensor")})(jax.numpy.ones((2, 4))).shape
    (2, 8)
    """

    def __init__(
        self,
        model: Any,
        mesh: Any = None,
        *,
        rules: Rules | None = None,
        params: PyTree | None = None,
        precision: Precision | str | None = None,
        remat: Remat = None,
        memory: Memory = None,
        batch_stats: Literal["global", "local"] = "global",
        sync_strategy: GradSyncStrategy | str = GradSyncStrategy.OVERLAPPED,
        trainable: Trainable = None,
        check_vma: bool = False,
        kernels: Kernels = "auto",
        draws: Literal["shards", "rows"] = "shards",
        seed: int = 0,
    ):
        if rules is None:
            raise TypeError(
                "ax.TensorParallel splits a model by path rules, through XLA's partitioner: give rules={'.*/kernel': "
                "PartitionSpec(None, 'tensor'), ...}. For Megatron's layers, with explicit "
                "collectives: ax.auto_parallelize(model, mesh), then ax.FSDP(model, mesh)"
            )
        given, mesh = mesh, as_mesh(mesh)
        names = dict(zip(getattr(given, "axis_names", mesh.axis_names), mesh.axis_names, strict=True))
        if not set(PARTITIONED) & set(mesh.shape):
            raise ValueError(
                f"TensorParallel splits parameters over the mesh axis 'tensor' or 'expert', and the mesh has "
                f"{dict(mesh.shape)}: make one with ax.make_mesh(tensor=..., data=...)"
            )
        plan = Plan(
            data=Replicate(sync_strategy=sync_strategy),  # pyright: ignore[reportArgumentType]  # it checks and converts names
            partition=Partition.of(rules, names),
            precision=Precision.of(precision),
            remat=remat,
            memory=memory,
            batch_stats=batch_stats,
            check_vma=check_vma,
            kernels=kernels,
            draws=draws,
        )
        super().__init__(model, mesh, plan, params=params, trainable=trainable, seed=seed)

    def tensor_traffic(self, trainer: "Trainer", batch: PyTree, axis: str = "tensor") -> "PartitionedTraffic":
        """What a step sends along an axis of the rules, counted in the compiled program; `ax.explain` counts what `data` sends.

        Args:
          trainer: one of this model.
          batch: arrays or shapes of a global batch; nothing runs.
          axis: "tensor" or "expert".

        Raises:
          ValueError: for an axis that the mesh or the rules do not have.
        """
        left = self._placement.automatic.intersection(self.mesh.shape)
        if axis not in left:
            raise ValueError(
                f"tensor_traffic: axis={axis!r} must be one that rules split over: {', '.join(sorted(left))}"
            )
        compiled = trainer.trace(batch).lower().compile()
        from axonml_jax.ledger.compiled import partitioned_traffic

        return partitioned_traffic(compiled, dict(self.mesh.shape), axis)
