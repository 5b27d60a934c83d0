"""`plan` and `explain`: what a plan costs, on paper."""

import argparse
import inspect
import json
import math
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import jax
import yaml

from axonml_jax.base import PyTree, folded, nearest
from axonml_jax.cli.flags import MEASURE, in_flags, require_writable
from axonml_jax.cli.run import RunSetup, check_sizes
from axonml_jax.cli.tasks import batch_words, loss_of, shapes_of
from axonml_jax.config.config import (
    Budget,
    ConfigError,
    Estimate,
    RunConfig,
    as_dict,
    named_paths,
    not_a_file,
    read_config,
    shipped_config,
)
from axonml_jax.config.objects import find, make_optimizer, moments, require_members
from axonml_jax.config.sections import (
    BYTES,
    NAMED_ONLY,
    REDUCING,
    ContextConfig,
    MeshConfig,
    OptimConfig,
    OwnModel,
    PipelineConfig,
    PlanConfig,
)
from axonml_jax.layers.adapters import layer_specs
from axonml_jax.layers.float8 import recorded_products
from axonml_jax.layers.kernels import target_platform
from axonml_jax.ledger.memory import FSDPMemoryStats, estimate
from axonml_jax.ledger.predict import Prediction, predict
from axonml_jax.ledger.report import explain
from axonml_jax.mesh.axes import AXES
from axonml_jax.mesh.shape import MeshShape
from axonml_jax.model.view import Functional, Variables, functionalize
from axonml_jax.models.config import PRESETS, TransformerConfig, preset
from axonml_jax.parallel.placement import Placement, bind_plan, check_model
from axonml_jax.parallel.plan import Plan
from axonml_jax.pipeline.assign import stage_assigner
from axonml_jax.planner.hardware import SEARCHED, Assumptions, Hardware, SaveAssumptions, hardware
from axonml_jax.planner.price import Timeline, price, timeline
from axonml_jax.planner.search import Answer, Candidate, draw, saving_of
from axonml_jax.planner.search import plan as find_plan
from axonml_jax.planner.verify import require_compiler, verify, verify_plan
from axonml_jax.strategies.shard import Shard
from axonml_jax.strategies.strategy import Fabric
from axonml_jax.training.budget import foreseen
from axonml_jax.training.compile import is_on_cpu
from axonml_jax.training.optimizer import averaging
from axonml_jax.training.run_state import abstract_state
from axonml_jax.training.step import TrainStep

# --------------------------------------------------------------------------------------------------
# A run in words: what is trained on what, what it holds, and what its step sends. From shapes alone: no array is made.
# --------------------------------------------------------------------------------------------------


def describe(config: RunConfig, ground: RunSetup) -> str:
    """Returns model, mesh, plan, memory, optimizer and batch of a run in words, a line each."""
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


def step_in_words(config: RunConfig, ground: RunSetup, *, compiles: bool = True) -> list[str]:
    """Returns the ledger of the run's training step, and its products in 8-bit floats if there are some.

    Args:
      config: the run's.
      ground: its devices, mesh and plan.
      compiles: if `plan.memory` is set, choose what is recomputed by compiling, and refuse a step that does not fit; false:
        choose it from a trace, as the machine that will train is another one.
    """
    view, shapes, placement = _placed(config, ground)
    tx = averaging(make_optimizer(config.optim, config.train.steps, view.stacked_dims), placement, config.ema.decay)
    more = {"max_grad_norm": config.optim.max_grad_norm, "layer_norms": config.train.layer_norms}
    given = abstract_state(shapes, tx, placement), ground.batch
    placement = placement if compiles else foreseen(placement, ground.mesh, given)
    step = TrainStep(view, placement, ground.mesh, loss_of(config), tx, **more)
    with recorded_products() as products:
        report = explain(step, *given)
    if not compiles and is_on_cpu(ground.mesh):
        report = replace(report, recompute=None)  # another machine's kernels keep other values, at other rates
    return [str(report), *(f"\nproducts of {config.plan.precision}\n{each}" for each in products)]


def memory(config: RunConfig, ground: RunSetup) -> FSDPMemoryStats:
    """Returns the bytes per device of parameters, gradients and optimizer state by formula, without activations."""
    view, shapes, placement = _placed(config, ground)
    return estimate(placement, _kept_copies(config, view, shapes), view)


def kept_values(config: RunConfig) -> int:
    """Returns how many values per parameter of the transformer the optimizer keeps; a moving average counts as one more."""
    return _kept_copies(config, *_shapes(config))


def _kept_copies(config: RunConfig, view: Functional, shapes: Variables) -> int:
    return moments(config.optim, config.train.steps, shapes.params, view.stacked_dims) + (config.ema.decay is not None)


def check_optimizer(config: RunConfig) -> None:
    """Refuse an optimizer that cannot be made, or groups without a parameter, before anything is allocated.

    Groups are checked here for the library's transformer alone; `check_own` checks them for a model of the user's own.

    Raises:
      ValueError: with what is wrong.
    """
    make_optimizer(config.optim, config.train.steps)
    if not isinstance(config.model, OwnModel):
        require_members(config.optim, _shapes(config)[1].params)


def check_own(config: RunConfig, ground: RunSetup) -> None:
    """Refuse a user's model or loss that cannot be made, or cannot run as the plan says, before anything is allocated.

    Raises:
      ValueError, TypeError: with what is wrong.
    """
    loss_of(config)
    if isinstance(config.model, OwnModel):
        view, shapes, placement = _placed(config, ground)
        check_model(placement, view)
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
    """Describe what a device holds; an upper bound ("at most") where a model is only traced, as a stack is then one unit."""
    held = memory(config, ground)
    known = not isinstance(config.model, OwnModel) and config.finetune.lora.rank is None
    if known and held.gathered_bytes:
        held = replace(held, gathered_bytes=predicted(config, ground).memory.gathered)
    parts = {
        "parameters": held.param_bytes,
        "gradients": held.grad_bytes,
        "optimizer": held.optim_bytes,
        "gathered": held.gathered_bytes,
        "on the host": held.host_bytes,
    }
    words = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in parts.items() if size)
    bound = "at most " * (held.gathered_bytes > 0 and not known)
    return f"{bound}{held.total_memory_mb:.1f} MB per device without activations ({words})"


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
    """Returns the plan's settings in words, the sharding strategy with its ZeRO stage."""
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


# --------------------------------------------------------------------------------------------------
# `explain --hardware` and `--picture`: how long a step would take on a kind of hardware, printed and drawn.
# --------------------------------------------------------------------------------------------------


def show(found: Prediction, asked: Estimate, model: str, budget: float | None) -> str:
    """Returns a step's time and timeline in words if a kind of hardware is asked for, and draws the picture if one is.

    Args:
      found: what the plan holds and sends.
      asked: the kind of hardware and the picture's path.
      model: the model's name.
      budget: bytes of a device that the picture marks; None: all that the hardware has, if it is given.

    Raises:
      ConfigError: for a picture that cannot be drawn.
    """
    kind, lines = asked.kind, []
    line = None if kind is None else timeline(found, kind)
    if kind is not None:
        cost = price(found, kind)
        lines += [f"{1e3 * cost.time:,.1f} ms/step, MFU {cost.mfu:.1%} on {kind.name}", str(line)]
    if asked.picture is not None:
        most = kind.memory if budget is None and kind is not None else budget
        lines.append(drawn(found, line, asked.picture, model, most))
    return "\n\n".join(lines)


def drawn(found: Prediction, line: Timeline | None, path: Path, model: str, budget: float | None) -> str:
    """Draw a prediction, with its timeline if there is one; returns a line that names the file.

    Raises:
      ConfigError: for a picture that cannot be drawn.
    """
    try:
        if line is None:
            found.save_picture(path, model=model, budget=budget)
        else:
            draw(found, line, path, model=model, budget=budget)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        raise ConfigError(f"--picture {path}: {error}") from error
    return f"picture   {path}"


# --------------------------------------------------------------------------------------------------
# What a step may cost: `explain --check` and `--max-memory` for CI, and `train`'s refusal of what cannot fit.
# --------------------------------------------------------------------------------------------------

OVER_BUDGET = 4
"""Exit status of `explain` and `plan --as-written` when a step costs more memory or traffic than it may."""


def baseline(budget: Budget) -> dict[str, float]:
    """Returns the memory and traffic in bytes per device of the baseline `--check`; empty without one.

    Raises:
      ConfigError: for a file that is missing or is no baseline.
    """
    if budget.check is None:
        return {}
    try:
        content = json.loads(budget.check.read_text("utf-8"))
        return {name: float(content[name]) for name in ("memory", "traffic")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        write = f"axonml-jax explain CONFIG --write-baseline {budget.check}"
        raise ConfigError(f"--check {budget.check}: no baseline ({error}); write one with {write}") from error


def predicted(config: RunConfig, ground: RunSetup, kind: Hardware | None = None) -> Prediction:
    """The ledger's prediction of a run's step, on the mesh's devices or on others of a kind."""
    platform = target_platform(ground.mesh) if kind is None else kind.platform
    torus = Fabric.of(list(ground.mesh.devices.flat)).torus if kind is None else kind.torus
    return predicted_on(config, ground.plan, dict(ground.mesh.shape), platform, torus)


def predicted_on(
    config: RunConfig, plan: Plan, degrees: dict[str, int], platform: str | None, torus: int
) -> Prediction:
    """Returns the ledger's prediction of a run's step for mesh sizes and a kind of devices that need not be here.

    Raises:
      ConfigError: for a model of the user's own, or one with adapters.
    """
    flags = "--check, --max-memory, --hardware, --picture"
    model: Any = config.transformer_for(f"a prediction ({flags})")
    config.require_whole(f"a prediction ({flags})")
    return predict(
        plan,
        model,
        degrees,
        global_batch=config.train.global_batch_size,
        length=config.data.length,
        moments=kept_values(config),
        documents=config.data.documents,
        platform=platform,
        torus=torus,
    )


def over_budget(found: Prediction, budget: Budget) -> list[str]:
    """Returns a line for each cost that is over its limit, and writes the new baseline if one is asked for.

    Raises:
      ConfigError: for a baseline that is missing or is no baseline.
    """
    costs, before = {"memory": found.memory.total, "traffic": float(found.total_bytes)}, baseline(budget)
    if budget.write_baseline is not None:  # it may be the file that is checked
        budget.write_baseline.write_text(json.dumps(costs, indent=2) + "\n", encoding="utf-8")
    wrong = []
    if budget.max_memory is not None and found.memory.total > budget.max_memory:
        wrong.append(f"memory {found.memory.total:,} bytes per device, at most {budget.max_memory:,.0f} are allowed")
    for name, allowed in before.items():
        if costs[name] > allowed * (1 + budget.tolerance):
            wrong.append(f"{name} {costs[name]:,.0f} bytes per device, {allowed:,.0f} in {budget.check}")
    return wrong


def require_fit(config: RunConfig, ground: RunSetup, budget: Budget) -> None:
    """Refuse a plan that needs more than `--max-memory`, or else than a device says that it has.

    Without either, and with `--force`, nothing is refused.

    Raises:
      ConfigError: with the bytes by kind and the remedies.
    """
    limit = budget.max_memory or device_memory()
    if limit is None or budget.force:
        return
    if isinstance(config.model, OwnModel) or config.finetune.lora.rank is not None:
        return _require_resting(config, ground, limit)
    found = predicted(config, ground)
    if found.memory.total > limit:
        kinds = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in found.memory.by_kind().items())
        raise ConfigError(
            f"this plan needs {found.memory.total / 2**20:,.1f} MiB on each device ({kinds}), and there are "
            f"{limit / 2**20:,.1f} MiB: let axonml-jax plan find one that fits, take more microbatches (plan.accumulate), "
            "plan.remat or mesh.fsdp, or add --force"
        )


def _require_resting(config: RunConfig, ground: RunSetup, limit: float) -> None:
    """Refuse a user's own model, or one with adapters, that does not fit even without activations, which are not predicted.

    If units are gathered at their use, gathered bytes are left out too: a stack of layers counts as one unit here, and a step
    may gather it layer by layer.
    """
    held = memory(config, ground)
    held = replace(held, gathered_bytes=0) if _placed(config, ground)[2].at_use is not None else held
    if held.total_bytes > limit:
        raise ConfigError(
            f"this plan needs {held.total_memory_mb:,.1f} MiB on each device without activations, and there "
            f"are {limit / 2**20:,.1f} MiB: take more of mesh.fsdp, or add --force"
        )


def device_memory() -> float | None:
    """Returns the bytes that a device of this process may hold; None if it does not say (CPU devices)."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit")


# --------------------------------------------------------------------------------------------------
# `axonml-jax plan`: the best plan for a number of devices, printed, drawn, and written as a configuration to train
# with.
# --------------------------------------------------------------------------------------------------

_NO_DATA = "# set data.path and data.tokenizer: without them it trains on the bytes of Python's standard library\n"
"""A comment in files that are made from a preset's name alone."""

_STAGES = {0: None, 1: "shard_optimizer", 2: "shard_grad_op", 3: "full_shard"}


def plan(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Plan from the command line. Starts no devices, but for `--hardware measure`.

    With `--json` standard output has the answer alone, and all other words go to standard error.

    Args:
      chosen: the flags' values.
      arguments: of the command line, after `plan`.

    Raises:
      ValueError: for wrong arguments, or when no plan fits; with the reasons.
    """
    require_writable({"--picture": chosen.picture, "--write": chosen.write})
    if chosen.verify:
        require_compiler(chosen.verify)
    base, model, sizes = _subject(chosen)
    if chosen.as_written:
        return _as_written(base, chosen)
    kind = _hardware(chosen, model)
    answer = find_plan(
        model,
        num_devices=chosen.devices,
        hardware=kind,
        axes=tuple(chosen.axes),
        remats=[None if each == "none" else each for each in chosen.remat],
        max_memory=chosen.max_memory,
        offload=chosen.offload,
        strategies=_packed(base),
        assumptions=Assumptions.on(kind, chosen.efficiency, overlap=chosen.overlap),
        saves=_saves(chosen),
        documents=base is not None and base.data.documents,
        **sizes,
    )
    print(answer.to_json() if chosen.json else folded(str(answer)))
    if chosen.ledger:
        _say(chosen, "", answer.prediction, "", answer.timeline)
    if chosen.picture is not None:
        most, name = answer.asked.memory, _name(chosen, base)
        _say(chosen, "", drawn(answer.prediction, answer.timeline, chosen.picture, name, most))
    if chosen.write is not None:
        chosen.write.write_text(config_text(answer, base, arguments), encoding="utf-8")
        first = ", once data.path and data.tokenizer are set" if base is None else ""
        _say(chosen, f"\nwritten   {chosen.write}: axonml-jax train {chosen.write}{first}")
    if chosen.verify:
        _verified(chosen, lambda: verify(answer, chosen.verify, chosen.slices))
    return 0


def _say(chosen: argparse.Namespace, *lines: object) -> None:
    """Print lines beside the answer: on standard error with `--json`, so that standard output can be read as JSON."""
    print(*lines, sep="\n", file=sys.stderr if chosen.json else sys.stdout)


def _as_written(base: RunConfig | None, chosen: argparse.Namespace) -> int:
    """Print what a configuration's own mesh and plan cost, and with `--verify` what the compiler says of them.

    Returns:
      0, or `OVER_BUDGET` for a plan that fills more of a device than `--max-memory`, or than the search would fill.
    """
    if base is None:
        raise ValueError("--as-written wants a configuration file, whose mesh and plan it takes")
    searched = {"axes": SEARCHED, "remat": ["none", "selective", "full"], "json": False, "offload": False}
    searched |= dict.fromkeys(("batch", "length", "precision", "write"))
    if given := [f"--{name}" for name, default in searched.items() if getattr(chosen, name) != default]:
        raise ValueError(
            f"{', '.join(given)}: --as-written prices the file's own mesh, plan and sizes: leave them out, or change the file"
        )
    try:
        shape = MeshShape(**base.degrees).resolve(chosen.devices)
    except ValueError as error:
        raise ValueError(in_flags(str(error), "--devices {}")) from error
    own, batch, length = replace(base.build_plan(), mesh=shape), base.train.global_batch_size, base.data.length
    model: Any = base.transformer_for("plan --as-written")
    kind, packed = _hardware(chosen, model), base.data.documents
    base.require_whole("plan --as-written")
    sizes = {"global_batch": batch, "length": length, "moments": kept_values(base)}
    found = predict(own, model, shape.degrees, **sizes, platform=kind.platform, torus=kind.torus, documents=packed)
    given = Assumptions.on(kind, chosen.efficiency, overlap=chosen.overlap)
    cost = price(found, kind, given)
    line = timeline(found, kind, given)
    print(found, f"\n{1e3 * cost.time:,.1f} ms/step, MFU {cost.mfu:.1%} on {chosen.devices:,} x {kind.name}", sep="\n")
    print("", saving_of(found, cost, chosen.devices, given, _saves(chosen)), "", line, sep="\n")
    if chosen.picture is not None:
        print("", drawn(found, line, chosen.picture, base.name, chosen.max_memory or kind.memory), sep="\n")
    compiling = lambda: verify_plan(own, model, found, chosen.verify, batch, length, packed, chosen.slices)
    if chosen.verify:
        _verified(chosen, compiling)
    wrong = over_budget(found, Budget(max_memory=chosen.max_memory or kind.memory * given.memory_margin))
    if wrong:
        print("", *(f"over budget: {line}" for line in wrong), sep="\n")
    return OVER_BUDGET if wrong else 0


def _saves(chosen: argparse.Namespace) -> SaveAssumptions:
    return SaveAssumptions(
        failures_per_device_hour=chosen.failures_per_device_hour,
        mtbf=chosen.mtbf,
        checkpoint_bandwidth=chosen.checkpoint_bandwidth,
        restart_seconds=chosen.restart_seconds,
    )


def _name(chosen: argparse.Namespace, base: RunConfig | None) -> str:
    return chosen.model if base is None else base.name


def _subject(chosen: argparse.Namespace) -> tuple[RunConfig | None, TransformerConfig, dict[str, Any]]:
    """Returns the configuration (None for a preset), the model, and the planner's sizes: batch, length, precision, moments."""
    sizes: dict[str, Any] = {
        "global_batch": chosen.batch,
        "length": chosen.length,
        "precision": chosen.precision or "bf16",
    }
    if chosen.model in PRESETS:
        if chosen.batch is None:
            raise ValueError("give --batch, the sequences per update")
        return None, _long_enough(preset(chosen.model), chosen.length or 0), sizes
    if Path(chosen.model).suffix == ".py":
        raise ValueError(
            f"{chosen.model}: the planner prices the library's transformer, by the name of a preset or a configuration file. "
            "For a model of your own, print(ax.explain(trainer, batch)) counts what a plan sends, and "
            "trainer.compiled_memory() what it holds"
        )
    named = Path(chosen.model)
    if not named.suffix and shipped_config(chosen.model) is None and not_a_file(named) is None:
        near = nearest(chosen.model, PRESETS)
        raise ValueError(
            f"model {chosen.model!r} is neither a configuration file nor one of {', '.join(PRESETS)}"
            + (f"; did you mean {near}?" if near else "")
        )
    config = read_config("plan", [chosen.model], imports=chosen.allow_imports)
    model = config.transformer_for("plan")
    if config.plan.diloco.every is not None and not chosen.as_written:
        raise ConfigError(
            f"{chosen.model}: plan.diloco.every={config.plan.diloco.every}: the search prices no outer steps: price the file's "
            "own plan with --as-written, or leave plan.diloco out"
        )
    config.require_whole("plan")
    sizes = {
        "global_batch": config.train.global_batch_size if chosen.batch is None else chosen.batch,
        "length": config.data.length if chosen.length is None else chosen.length,
        "precision": chosen.precision or config.plan.precision,
        "moments": kept_values(config),
    }
    return config, model, sizes


def _long_enough(config: TransformerConfig, length: int) -> TransformerConfig:
    """Returns a preset whose `max_length` is at least a length; unchanged without rotary positions, whose table ends."""
    longer = max(length, config.max_length) if config.position == "rotary" else config.max_length
    return replace(config, max_length=longer)


def _hardware(chosen: argparse.Namespace, model: TransformerConfig) -> Hardware:
    if chosen.hardware != MEASURE:
        return hardware(chosen.hardware).in_slices(chosen.devices, chosen.slices)
    if chosen.slices != 1:
        raise ValueError(f"--slices {chosen.slices}: --hardware {MEASURE} takes this machine's devices as they are")
    from axonml_jax.planner.verify import measure

    found = measure(chosen.devices, model=model)
    _say(chosen, f"measured  {found}\n")
    return found


def _verified(chosen: argparse.Namespace, compiling: Callable[[], Any]) -> None:
    try:
        _say(chosen, "", compiling())
    except (RuntimeError, ValueError, ModuleNotFoundError) as error:
        raise ConfigError(f"--verify {chosen.verify}: {error}") from error


def config_text(answer: Answer, base: RunConfig | None = None, arguments: Sequence[str] = ()) -> str:
    """A configuration file that trains the answer's plan.

    Args:
      answer: the planner's.
      base: settings to keep; None: the defaults, on the built-in text.
      arguments: of the command line that asked, noted at the head of the file without `--write` and `--verify`.
    """
    found, model = answer.best.candidate, answer.model
    length, given = answer.asked.length, base is not None
    if base is None:
        base = RunConfig(name="planned", model=replace(model, max_length=max(model.max_length, length)))
    nested = (each.name for each in fields(model) if "section" in each.metadata)
    sections: dict[str, Any] = {name: getattr(model, name) or getattr(base, name) for name in nested}
    config = replace(
        base,
        devices=replace(base.devices, simulated=base.devices.simulated and answer.asked.num_devices),
        model=model,
        **sections,
        mesh=MeshConfig(**{axis: found.mesh.get(axis, 1) for axis in AXES}),
        plan=_plan_config(base.plan, found, answer.asked.precision),
        context=ContextConfig(method=found.method, shard=found.shared) if found.method else ContextConfig(),
        pipeline=_pipeline(found),
        data=replace(base.data, length=length),
        train=replace(base.train, global_batch_size=answer.asked.global_batch),
    )
    values = _changed(config, as_dict(config))
    head = f"# {found}\n# found for {answer.asked.num_devices:,} x {answer.asked.hardware.name}"
    head += f" by:\n#   axonml-jax plan {shlex.join(_without_outputs(arguments))}\n" if arguments else "\n"
    head += "" if given else _NO_DATA
    return head + yaml.safe_dump(values, sort_keys=False)


def _changed(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a configuration that differ from their defaults, by section."""
    kept = {}
    for field in fields(config):
        if field.name not in values:  # a section of its own
            continue
        value, default = getattr(config, field.name), field.default
        if is_dataclass(value):
            if inside := _changed(value, values[field.name]):
                kept[field.name] = inside
        elif default is MISSING or value != default:
            kept[field.name] = values[field.name]
    return kept


def _without_outputs(arguments: Sequence[str]) -> list[str]:
    """The arguments that decide the answer."""
    outputs = ("--write", "--verify", "--picture")
    kept = [each for before, each in zip(("", *arguments), arguments, strict=False) if before not in outputs]
    return [each for each in kept if each.split("=")[0] not in (*outputs, "--json", "--ledger")]


def _packed(base: RunConfig | None) -> list[Shard]:
    """Returns the strategies that send shards or gradients packed, for the search to consider beside its own."""
    if base is None or not (base.plan.wire or base.plan.reduce_wire):
        return []
    stages = (1,) if base.plan.reduce_wire == "int8-feedback" else (1, 2, 3)
    return [Shard(stage=stage, wire=base.plan.wire, reduce_wire=base.plan.reduce_wire) for stage in stages]


def _plan_config(base: PlanConfig, found: Candidate, precision: Any) -> PlanConfig:
    return replace(
        base,
        sharding_strategy=_STAGES[found.stage],  # pyright: ignore[reportArgumentType]
        prefetch=base.prefetch if found.stage == 3 else 0,
        wire=base.wire if found.strategy is not None else None,
        reduce_wire=base.reduce_wire if found.strategy is not None else None,
        precision=precision,
        products_kept=None,  # the search prices no products that are rounded
        accumulate=1 if found.schedule else found.microbatches,
        remat=found.remat,  # pyright: ignore[reportArgumentType]
        memory=None if found.memory is None else _size_below(found.memory),
        offload=found.offload.value,
    )


def _size_below(size: int) -> str | int:
    """A size as people write it that is not above this one, and hardly below it.

    >>> _size_below(72_000_000_000), _size_below(13 * 2**20 + 5), _size_below(5000)
    ('67GiB', '13MiB', 5000)
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= 10 * unit:
            return f"{math.floor(10 * size / unit) / 10:g}{name}"
    return size


def _pipeline(found: Candidate) -> PipelineConfig:
    if found.schedule is None:
        return PipelineConfig()
    schedule: Any = found.schedule.value
    return PipelineConfig(schedule=schedule, num_microbatches=found.microbatches, chunks=found.chunks)
