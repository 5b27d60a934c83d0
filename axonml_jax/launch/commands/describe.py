"""A run in words: what is trained on what, what it holds, and what its step sends. From shapes alone: no array is made."""

import inspect
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from flax import nnx

from axonml_jax.facade.device_memory import FSDPMemoryStats, estimate
from axonml_jax.launch.config.read_config import as_dict
from axonml_jax.launch.config.run_config import RunConfig
from axonml_jax.launch.config.sections.optim_config import NAMED_ONLY, OptimConfig
from axonml_jax.launch.job.run_setup import RunSetup
from axonml_jax.launch.job.text_task import build_model, loss_fn
from axonml_jax.launch.objects.import_rules import named_paths
from axonml_jax.launch.objects.make_optimizer import make_optimizer, moments, require_members
from axonml_jax.launch.objects.named_object import find
from axonml_jax.ledger.explain import explain
from axonml_jax.ledger.report import Report
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.model.functionalize import functionalize
from axonml_jax.models.config import TransformerConfig
from axonml_jax.parallel.bind import bind_plan
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.tensor.specs import tensor_specs
from axonml_jax.training.state.first_state import abstract_state
from axonml_jax.training.step import TrainStep


def describe(config: RunConfig, ground: RunSetup) -> str:
    """Model, mesh, plan, memory and batch, a line each."""
    model, train = config.model, config.train
    tokens = train.global_batch_size * config.data.length
    rows = {
        "model": f"{model.num_params:,} parameters: {model.num_layers} layers, width {model.hidden_size}, "
        f"{model.num_heads} heads, {model.norm}, {model.activation}, {model.position} positions",
        **({} if model.experts is None else {"experts": _experts(model)}),
        "mesh": f"{', '.join(f'{axis}={size}' for axis, size in ground.mesh.shape.items())} on {ground.device_words}",
        "plan": _settings(config.plan),
        **({"context": _settings(config.context)} if ground.mesh.shape.get("context", 1) > 1 else {}),
        "memory": _memory(config, ground),
        "optimizer": _optimizer(config.optim),
        **_imports(config),
        "batch": f"{train.global_batch_size} examples of {config.data.length} {_unit(config)}, {tokens:,} tokens, per update; "
        f"{train.steps} updates",
    }
    return "\n".join(f"{name:<10} {text}" for name, text in rows.items())


def price(config: RunConfig, ground: RunSetup) -> Report:
    """The ledger of the run's training step."""
    view, shapes, placement = _placed(config, ground)
    tx = make_optimizer(config.optim, config.train.steps)
    step = TrainStep(view, placement, ground.mesh, loss_fn, tx, max_grad_norm=config.optim.max_grad_norm)
    return explain(step, abstract_state(shapes, tx, placement), ground.batch)


def memory(config: RunConfig, ground: RunSetup) -> FSDPMemoryStats:
    """Bytes per device of parameters, gradients and optimizer state, by formula."""
    view, shapes, placement = _placed(config, ground)
    return estimate(placement, moments(config.optim, config.train.steps, shapes.params), view)


def kept_values(config: RunConfig) -> int:
    """Values that the run's optimizer keeps per parameter."""
    return moments(config.optim, config.train.steps, _shapes(config)[1].params)


def check_optimizer(config: RunConfig) -> None:
    """Refuse an optimizer that cannot be made, or groups without a parameter, before anything is allocated.

    Raises:
      ValueError: with what is wrong.
    """
    make_optimizer(config.optim, config.train.steps)
    require_members(config.optim, _shapes(config)[1].params)


def _shapes(config: RunConfig) -> tuple[Functional, Variables]:
    return functionalize(nnx.eval_shape(lambda: build_model(config.model, config.train.seed)))


def _placed(config: RunConfig, ground: RunSetup) -> tuple[Functional, Variables, Placement]:
    view, shapes = _shapes(config)
    split = tensor_specs(view.abstract_module, ground.mesh.shape)
    return view, shapes, bind_plan(ground.plan.for_model(view), shapes, ground.mesh, split)


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


def _settings(section: Any, without: Collection[str] = ()) -> str:
    return ", ".join(
        f"{name}={value}" for name, value in asdict(section).items() if value is not None and name not in without
    )


def _unit(config: RunConfig) -> str:
    return "tokens" if config.data.documents else "bytes"
