"""What a step may cost: `explain --check` and `--max-memory` for CI, and `train`'s refusal of what cannot fit."""

import json
from typing import Any

import jax

from axonml_jax.launch.commands.describe import kept_values, memory
from axonml_jax.launch.config.own_flags import Budget
from axonml_jax.launch.config.run_config import ConfigError, RunConfig
from axonml_jax.launch.config.sections.own_config import OwnModel
from axonml_jax.launch.job.run_setup import RunSetup
from axonml_jax.ledger.predict.predict import predict
from axonml_jax.ledger.predict.prediction import Prediction
from axonml_jax.parallel.fabric import Fabric
from axonml_jax.parallel.tensor.megatron.fused_attention import target_platform
from axonml_jax.planner.hardware import Hardware

OVER_BUDGET = 4
"""Exit status of `explain` when a step costs more memory or traffic than it may."""


def baseline(budget: Budget) -> dict[str, float]:
    """What the baseline to check against allows; empty without one.

    Raises:
      ConfigError: for a file that is not there or is none.
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
    flags = "--check, --max-memory, --hardware, --picture"
    model: Any = config.transformer_for(f"a prediction ({flags})")
    config.require_whole(f"a prediction ({flags})")
    return predict(
        ground.plan,
        model,
        dict(ground.mesh.shape),
        global_batch=config.train.global_batch_size,
        length=config.data.length,
        moments=kept_values(config),
        documents=config.data.documents,
        platform=target_platform(ground.mesh) if kind is None else kind.platform,
        torus=Fabric.of(list(ground.mesh.devices.flat)).torus if kind is None else kind.torus,
    )


def over_budget(found: Prediction, budget: Budget) -> list[str]:
    """What costs more than it may; writes the baseline where asked to.

    Raises:
      ConfigError: for a baseline that is not there or is none.
    """
    costs = {"memory": found.memory.total, "traffic": float(found.total_bytes)}
    if budget.write_baseline is not None:
        budget.write_baseline.write_text(json.dumps(costs, indent=2) + "\n", encoding="utf-8")
    wrong = []
    if budget.max_memory is not None and found.memory.total > budget.max_memory:
        wrong.append(f"memory {found.memory.total:,} bytes per device, at most {budget.max_memory:,.0f} are allowed")
    for name, allowed in baseline(budget).items():
        if costs[name] > allowed * (1 + budget.tolerance):
            wrong.append(f"{name} {costs[name]:,.0f} bytes per device, {allowed:,.0f} in {budget.check}")
    return wrong


def require_fit(config: RunConfig, ground: RunSetup, budget: Budget) -> None:
    """Refuse a plan that a device's memory cannot hold, as far as the device says what it has.

    Raises:
      ConfigError: with the bytes by kind and the remedies, unless forced.
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
    """Of a model of one's own, and of one with adapters, only what rests is known."""
    held = memory(config, ground)
    if held.total_bytes > limit:
        raise ConfigError(
            f"this plan needs {held.total_memory_mb:,.1f} MB on each device without activations, and there are "
            f"{limit / 2**20:,.1f}: take more of mesh.fsdp, or add --force"
        )


def device_memory() -> float | None:
    """Bytes that a device of this process has, where it says so (CPU devices do not)."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit")
