"""A run in words: what is trained on what, what it holds, and what its step sends. From shapes alone: no array is made."""

import inspect
import math
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import jax

from axonml_jax._types import PyTree
from axonml_jax.facade.device_memory import FSDPMemoryStats, estimate
from axonml_jax.facade.stages import stage_assigner
from axonml_jax.launch.config.read_config import as_dict
from axonml_jax.launch.config.run_config import RunConfig
from axonml_jax.launch.config.sections.data_config import BYTES
from axonml_jax.launch.config.sections.optim_config import NAMED_ONLY, OptimConfig
from axonml_jax.launch.config.sections.own_config import OwnModel
from axonml_jax.launch.config.sections.plan_config import REDUCING, PlanConfig
from axonml_jax.launch.job.run_setup import RunSetup, check_sizes
from axonml_jax.launch.objects.import_rules import named_paths
from axonml_jax.launch.objects.make_optimizer import make_optimizer, moments, require_members
from axonml_jax.launch.objects.named_object import find
from axonml_jax.launch.own.own_data import batch_words
from axonml_jax.launch.own.subject import loss_of, shapes_of
from axonml_jax.ledger.explain import explain
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.model.functionalize import functionalize
from axonml_jax.models.config import TransformerConfig
from axonml_jax.parallel.bind import bind_plan
from axonml_jax.parallel.float8.reading_float8 import recorded_products
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.tensor.adapter_specs import layer_specs
from axonml_jax.training.optimizer.checked_optimizer import averaging
from axonml_jax.training.state.first_state import abstract_state
from axonml_jax.training.step import TrainStep


def describe(config: RunConfig, ground: RunSetup) -> str:
    """Model, mesh, plan, memory and batch, a line each."""
    rows = {
        **_model(config, ground),
        **_lora(config, ground),
        "mesh": f"{', '.join(f'{axis}={size}' for axis, size in ground.mesh.shape.items())} on {ground.device_words}",
        "plan": _plan(config.plan, ground.mesh.shape.get("fsdp", 1) > 1 or config.context.shard),
        **({"context": _settings(config.context)} if ground.mesh.shape.get("context", 1) > 1 else {}),
        "memory": _memory(config, ground),
        "optimizer": _optimizer(config.optim),
        **(
            {} if config.ema.decay is None else {"ema": f"a moving average of the parameters, decay {config.ema.decay}"}
        ),
        **_imports(config),
        "batch": _batch(config, ground),
    }
    return "\n".join(f"{name:<10} {text}" for name, text in rows.items())


def _model(config: RunConfig, ground: RunSetup) -> dict[str, str]:
    model = config.model
    if isinstance(model, OwnModel):
        params = _shapes(config, ground.batch)[1].params
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
        return {"model": f"{count:,} parameters: {model.class_path}"} | _loss(config)
    said = (
        f"{model.num_params:,} parameters: {model.num_layers} layers, width {model.hidden_size}, {model.num_heads} heads, "
        f"{model.norm}, {model.activation}, {model.position} positions"
    )
    return {"model": said} | ({} if model.experts is None else {"experts": _experts(model)}) | _loss(config)


def _lora(config: RunConfig, ground: RunSetup) -> dict[str, str]:
    if (lora := config.finetune.lora).rank is None:
        return {}
    trained = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(_shapes(config, ground.batch)[1].params))
    said = f"{trained:,} parameters train: rank {lora.rank}, alpha {lora.alpha or lora.rank}, {', '.join(lora.targets)}"
    return {"lora": said + (f"; the base of these rests as {lora.base}" if lora.base else "")}


def _loss(config: RunConfig) -> dict[str, str]:
    path = config.loss.class_path
    return {} if path is None else {"loss": path + (f" with {config.loss.init_args}" if config.loss.init_args else "")}


def _batch(config: RunConfig, ground: RunSetup) -> str:
    rows, length = config.train.global_batch_size, config.data.length
    if ground.own is not None:
        return f"{rows} examples per update ({batch_words(ground.batch)}); {config.train.steps} updates"
    unit = "bytes" if config.data.tokenizer == BYTES and not config.data.documents else "tokens"
    return f"{rows} examples of {length} {unit}, {rows * length:,} tokens, per update; {config.train.steps} updates"


def step_in_words(config: RunConfig, ground: RunSetup) -> list[str]:
    """The ledger of the run's training step, and which of its products are of 8-bit floats where some are."""
    view, shapes, placement = _placed(config, ground)
    tx = averaging(make_optimizer(config.optim, config.train.steps, view.stacked_dims), placement, config.ema.decay)
    more = {"max_grad_norm": config.optim.max_grad_norm, "layer_norms": config.train.layer_norms}
    step = TrainStep(view, placement, ground.mesh, loss_of(config), tx, **more)
    with recorded_products() as products:
        report = explain(step, abstract_state(shapes, tx, placement), ground.batch)
    return [str(report), *(f"\nproducts of {config.plan.precision}\n{each}" for each in products)]


def memory(config: RunConfig, ground: RunSetup) -> FSDPMemoryStats:
    """Bytes per device of parameters, gradients and optimizer state, by formula."""
    view, shapes, placement = _placed(config, ground)
    return estimate(placement, _kept(config, view, shapes), view)


def kept_values(config: RunConfig) -> int:
    """Values that the run's optimizer keeps per parameter of the transformer, the moving average among them."""
    return _kept(config, *_shapes(config))


def _kept(config: RunConfig, view: Functional, shapes: Variables) -> int:
    return moments(config.optim, config.train.steps, shapes.params, view.stacked_dims) + (config.ema.decay is not None)


def check_optimizer(config: RunConfig) -> None:
    """Refuse an optimizer that cannot be made, or groups without a parameter, before anything is allocated.

    The parameters of a model of one's own are known later (see `check_own`).

    Raises:
      ValueError: with what is wrong.
    """
    make_optimizer(config.optim, config.train.steps)
    if not isinstance(config.model, OwnModel):
        require_members(config.optim, _shapes(config)[1].params)


def check_own(config: RunConfig, ground: RunSetup) -> None:
    """Refuse a model or a loss of one's own that cannot be made, or cannot run as the plan says, before anything is allocated.

    Raises:
      ValueError, TypeError: with what is wrong.
    """
    loss_of(config)
    if isinstance(config.model, OwnModel):
        view, shapes, placement = _placed(config, ground)
        placement.check_model(view)
        check_sizes(config, ground, placement.plan)
        require_members(config.optim, shapes.params)


def _shapes(config: RunConfig, batch: PyTree = None) -> tuple[Functional, Variables]:
    given = shapes_of(config, batch)
    return functionalize(given.model, given.params)


def _placed(config: RunConfig, ground: RunSetup) -> tuple[Functional, Variables, Placement]:
    given, pipe = shapes_of(config, ground.batch), ground.plan.pipe
    view, shapes = functionalize(given.model, given.params)
    split = layer_specs(view, ground.mesh.shape)
    stages = None if pipe is None else stage_assigner(given.model, view, pipe)
    return view, shapes, bind_plan(ground.plan.for_model(view), shapes, ground.mesh, split, stages, view.stacked_dims)


def _memory(config: RunConfig, ground: RunSetup) -> str:
    held = memory(config, ground)
    parts = {
        "parameters": held.param_bytes,
        "gradients": held.grad_bytes,
        "optimizer": held.optim_bytes,
        "gathered": held.gathered_bytes,
        "on the host": held.host_bytes,
    }
    words = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in parts.items() if size)
    return f"{held.total_memory_mb:.1f} MB per device without activations ({words})"


def _optimizer(config: OptimConfig) -> str:
    """The settings that have an effect."""
    return _settings(config, without=NAMED_ONLY if config.links else ())


def _imports(config: RunConfig) -> dict[str, str]:
    """What the configuration imports, and from which files."""
    paths = dict.fromkeys(path for _, path in named_paths(as_dict(config)))
    found = {path: find(path, "class_path") for path in paths}
    files = [f"{path} ({inspect.getsourcefile(inspect.unwrap(each)) or 'built in'})" for path, each in found.items()]
    return {"imports": ", ".join(files)} if files else {}


def _experts(model: TransformerConfig) -> str:
    experts = model.experts
    assert experts is not None
    chosen = f"{experts.top_k} of {experts.num_experts} by {experts.router}, {experts.dispatch} dispatch"
    limit = "no token dropped" if experts.capacity_factor is None else f"capacity factor {experts.capacity_factor}"
    return f"{chosen}, {limit}; {model.active_params:,} parameters are active"


def _plan(plan: PlanConfig, shards: bool) -> str:
    """The settings, and by ZeRO's name what is split."""
    words, without = [], ["diloco"]
    if plan.diloco.every is not None:
        words, without = [plan.diloco.build().in_words("data")], ["diloco", *REDUCING]
    if shards:
        strategy = plan.sharding_strategy or "full_shard"
        words, without = [*words, f"sharding_strategy={strategy} ({_ZERO[strategy]})"], [*without, "sharding_strategy"]
    return ", ".join([*words, _settings(plan, without=without)])


_ZERO = {
    "full_shard": "ZeRO-3",
    "shard_grad_op": "ZeRO-2",
    "shard_optimizer": "ZeRO-1",
    "no_shard": "DDP",
    "hybrid_shard": "ZeRO-3 along fsdp, copies along data",
}


def _settings(section: Any, without: Collection[str] = ()) -> str:
    return ", ".join(
        f"{name}={value}" for name, value in asdict(section).items() if value is not None and name not in without
    )
