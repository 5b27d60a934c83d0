"""`axonml-jax plan`: the best plan for a number of devices, printed, drawn, and written as a configuration to train with."""

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from axonml_jax.launch.commands.describe import kept_values
from axonml_jax.launch.commands.estimate import drawn
from axonml_jax.launch.commands.plan_flags import MEASURE
from axonml_jax.launch.commands.writable import require_writable
from axonml_jax.launch.config.nearest_file import not_a_file, shipped_config
from axonml_jax.launch.config.read_config import as_dict, read_config
from axonml_jax.launch.config.run_config import ConfigError, RunConfig
from axonml_jax.launch.config.sections.mesh_config import ContextConfig, MeshConfig
from axonml_jax.launch.config.sections.pipeline_config import PipelineConfig
from axonml_jax.launch.config.sections.plan_config import PlanConfig
from axonml_jax.ledger.predict.predict import predict
from axonml_jax.mesh.axes import AXES
from axonml_jax.mesh.shape import MeshShape
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.presets import PRESETS, preset
from axonml_jax.parallel.strategies.shard import Shard
from axonml_jax.planner.answer import Answer, saving_of
from axonml_jax.planner.assumptions import Assumptions
from axonml_jax.planner.candidate import Candidate
from axonml_jax.planner.goodput.save_advice import SaveAssumptions
from axonml_jax.planner.hardware import Hardware, hardware
from axonml_jax.planner.price import price
from axonml_jax.planner.search import plan as find_plan
from axonml_jax.planner.searched_axes import SEARCHED
from axonml_jax.planner.timeline import timeline
from axonml_jax.planner.verify import require_compiler, verify, verify_plan
from axonml_jax.synonyms import nearest

_STAGES = {0: None, 1: "shard_optimizer", 2: "shard_grad_op", 3: "full_shard"}


def plan(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Plan from the command line. Starts no devices, but for `--hardware measure`.

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
    print(answer.to_json() if chosen.json else answer)
    if chosen.ledger:
        print("", answer.prediction, "", answer.timeline, sep="\n")
    if chosen.picture is not None:
        print(
            "",
            drawn(answer.prediction, answer.timeline, chosen.picture, _name(chosen, base), answer.asked.memory),
            sep="\n",
        )
    if chosen.write is not None:
        chosen.write.write_text(config_text(answer, base, arguments), encoding="utf-8")
        print(f"\nwritten   {chosen.write}: axonml-jax train {chosen.write}")
    return _verified(chosen.verify, lambda: verify(answer, chosen.verify)) if chosen.verify else 0


def _as_written(base: RunConfig | None, chosen: argparse.Namespace) -> int:
    """What a configuration's own mesh and plan cost, and what a compiler makes of them."""
    if base is None:
        raise ValueError("--as-written wants a configuration file, whose mesh and plan it takes")
    searched = {"axes": SEARCHED, "remat": ["none", "selective", "full"], "json": False, "offload": False}
    searched |= dict.fromkeys(("batch", "length", "precision", "write"))
    if given := [f"--{name}" for name, default in searched.items() if getattr(chosen, name) != default]:
        raise ValueError(
            f"{', '.join(given)}: --as-written prices the file's own mesh, plan and sizes: leave them out, or change the file"
        )
    shape = MeshShape(**base.degrees).resolve(chosen.devices)
    own, batch, length = replace(base.build_plan(), mesh=shape), base.train.global_batch_size, base.data.length
    model: Any = base.transformer_for("plan --as-written")
    kind = _hardware(chosen, model)
    base.require_whole("plan --as-written")
    sizes = {"global_batch": batch, "length": length, "moments": kept_values(base)}
    packed = base.data.documents
    found = predict(own, model, shape.degrees, **sizes, platform=kind.platform, torus=kind.torus, documents=packed)
    given = Assumptions.on(kind, chosen.efficiency, overlap=chosen.overlap)
    cost = price(found, kind, given)
    line = timeline(found, kind, given)
    print(found, f"\n{1e3 * cost.time:,.1f} ms/step, MFU {cost.mfu:.1%} on {chosen.devices:,} x {kind.name}", sep="\n")
    print("", saving_of(found, cost, chosen.devices, given, _saves(chosen)), "", line, sep="\n")
    if chosen.picture is not None:
        print("", drawn(found, line, chosen.picture, base.name, chosen.max_memory or kind.memory), sep="\n")
    compiling = lambda: verify_plan(own, model, found, chosen.verify, batch, length, packed)
    return _verified(chosen.verify, compiling) if chosen.verify else 0


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
    """The model, and how much of it is trained at once: a preset's, or a configuration file's."""
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
        "global_batch": chosen.batch or config.train.global_batch_size,
        "length": chosen.length or config.data.length,
        "precision": chosen.precision or config.plan.precision,
        "moments": kept_values(config),
    }
    return config, model, sizes


def _long_enough(config: TransformerConfig, length: int) -> TransformerConfig:
    """A published model for longer sequences than it was trained on, where no table of positions ends."""
    longer = max(length, config.max_length) if config.position == "rotary" else config.max_length
    return replace(config, max_length=longer)


def _hardware(chosen: argparse.Namespace, model: TransformerConfig) -> Hardware:
    if chosen.hardware != MEASURE:
        return hardware(chosen.hardware)
    from axonml_jax.planner.measure.this_machine import measure

    found = measure(chosen.devices, model=model)
    print(f"measured  {found}\n")
    return found


def _verified(topology: str, compiling: Callable[[], Any]) -> int:
    try:
        print("", compiling(), sep="\n")
    except (RuntimeError, ValueError, ModuleNotFoundError) as error:
        raise ConfigError(f"--verify {topology}: {error}") from error
    return 0


def config_text(answer: Answer, base: RunConfig | None = None, arguments: Sequence[str] = ()) -> str:
    """A configuration file that trains the answer's plan.

    Args:
      answer: the planner's.
      base: settings to keep; None: the defaults, on the built-in text.
      arguments: of the command line that asked, noted at the head of the file without `--write` and `--verify`.
    """
    found, model = answer.best.candidate, answer.model
    length = answer.asked.length
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
    return head + yaml.safe_dump(values, sort_keys=False)


def _changed(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    """What of a configuration's values is not as it is by default."""
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
    """What `plan.gather` and `plan.reduce` ask to be considered too: shards and gradients that travel packed."""
    if base is None or not (base.plan.gather or base.plan.reduce):
        return []
    stages = (1,) if base.plan.reduce == "int8-feedback" else (1, 2, 3)
    return [Shard(stage=stage, wire=base.plan.gather, reduce_wire=base.plan.reduce) for stage in stages]


def _plan_config(base: PlanConfig, found: Candidate, precision: Any) -> PlanConfig:
    return replace(
        base,
        sharding_strategy=_STAGES[found.stage],  # pyright: ignore[reportArgumentType]
        prefetch=base.prefetch if found.stage == 3 else 0,
        gather=base.gather if found.strategy is not None else None,
        reduce=base.reduce if found.strategy is not None else None,
        precision=precision,
        products_kept=None,  # the search prices no products that are rounded
        accumulate=1 if found.schedule else found.microbatches,
        remat=found.remat,  # pyright: ignore[reportArgumentType]
        offload=found.offload.value,
    )


def _pipeline(found: Candidate) -> PipelineConfig:
    if found.schedule is None:
        return PipelineConfig()
    schedule: Any = found.schedule.value
    return PipelineConfig(schedule=schedule, num_microbatches=found.microbatches, chunks=found.chunks)
