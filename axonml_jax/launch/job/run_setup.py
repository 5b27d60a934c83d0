"""Devices, mesh and plan of a run, checked before anything is allocated."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from axonml_jax._types import PyTree
from axonml_jax.launch.commands.compiled_programs import keep_compiled
from axonml_jax.launch.commands.refusals import refusal
from axonml_jax.launch.config.machines import for_world, machines_of
from axonml_jax.launch.config.run_config import ConfigError, RunConfig
from axonml_jax.launch.config.sections.own_config import OwnModel
from axonml_jax.launch.own.own_data import OwnSplit, read_own
from axonml_jax.logging import print0
from axonml_jax.mesh.fake_devices import fake_devices
from axonml_jax.mesh.job.environment import launch_environment
from axonml_jax.mesh.job.init import init
from axonml_jax.mesh.shape import make_mesh
from axonml_jax.mesh.world import World
from axonml_jax.models.huggingface import check_pretrained
from axonml_jax.parallel.plan import Plan
from axonml_jax.sharding.check_batch import check_batch


@dataclass(frozen=True)
class RunSetup:
    """What a run stands on.

    Attributes:
      world: the processes and their devices.
      mesh: where the model lives.
      plan: how its step runs.
      batch: shapes of a global batch.
      own: the data, where it is one's own.
    """

    world: World
    mesh: Mesh
    plan: Plan
    batch: PyTree
    own: OwnSplit | None = None

    @property
    def device_words(self) -> str:
        """The mesh's devices in words."""
        device = self.mesh.devices.flat[0]
        simulated = "simulated " if device.platform == "cpu" and self.mesh.size > self.world.num_processes else ""
        processes = f" in {self.world.num_processes} processes" if self.world.num_processes > 1 else ""
        return f"{self.mesh.size} {simulated}{device.device_kind} device{'s' * (self.mesh.size > 1)}{processes}"


def lay_ground(config: RunConfig) -> RunSetup:
    """Start the devices, and check that mesh and batch fit them. Call it before anything touches a JAX device.

    Raises:
      ValueError: for degrees whose product is not the number of devices, a batch that does not divide, or a folder of compiled
        programs that cannot be written.
    """
    keep_compiled(config.output.compiled)  # JAX asks for the folder once, when it compiles for the first time
    world = start_devices(config.devices.simulated)
    try:
        mesh = make_mesh(devices=None, **config.degrees)
    except ValueError as error:
        raise ValueError(f"mesh: {error}") from error
    own = None if config.data.class_path is None else read_own(config.data, config.train.global_batch_size)
    batch, plan = _of_tokens(config) if own is None else own.batch, config.build_plan()
    ground = RunSetup(world, mesh, plan, batch, own)
    # In which order ranks hold positions a model of one's own decides, which is made later: see `check_own`.
    any_order = replace(plan, context=replace(config.context, order="contiguous").build())
    check_sizes(config, ground, any_order if isinstance(config.model, OwnModel) else plan)
    return ground


def on_machines(config: RunConfig, environ: Mapping[str, str] = os.environ) -> RunConfig:
    """A run's configuration for the machines that are there, where they may come and go. Starts the devices.

    Raises:
      ConfigError: with everything for which the run could not go on with another number of machines.
    """
    found = machines_of(environ)
    if found is None:
        return config
    keep_compiled(config.output.compiled)
    machines, now = found
    here = for_world(config, machines, now, start_devices(config.devices.simulated).world_size)
    size, accumulate = here.train.global_batch_size, here.plan.accumulate
    print0(f"machines   {now} of {machines.largest}: train.global_batch_size={size}, plan.accumulate={accumulate}")
    return here


def check_sizes(config: RunConfig, ground: RunSetup, plan: Plan) -> None:
    """Refuse a batch that does not split over the mesh as a plan says.

    Raises:
      ValueError: naming the configuration's sizes and the nearest that do.
    """
    length = "" if ground.own is not None else f", data.length={config.data.length}"
    try:
        check_batch(plan.batch_layout(dict(ground.mesh.shape)), ground.batch, plan.microbatches)
    except (TypeError, ValueError) as error:
        raise ValueError(f"train.global_batch_size={config.train.global_batch_size}{length}: {error}") from error


def _of_tokens(config: RunConfig) -> PyTree:
    """Shapes of a batch of text or documents."""
    rows = jax.ShapeDtypeStruct((config.train.global_batch_size, config.data.length), np.int32)
    of_documents = {"segment_ids": rows, "positions": rows} if config.data.documents else {}
    return {"tokens": rows, "targets": rows, **of_documents}


def start_devices(simulated: int | None) -> World:
    """The world of simulated CPU devices, or of those that JAX finds.

    Raises:
      ValueError: for simulated devices in one of several launched processes, or a platform that JAX does not have.
    """
    if simulated is not None:
        launched = launch_environment(os.environ)
        if launched is not None and launched.num_processes > 1:
            raise ValueError(
                f"devices.simulated={simulated}: this is one of {launched.num_processes} launched processes, and simulated "
                "devices are all in one; add --devices.simulated null to use the processes' own devices, or start "
                "axonml-jax train without a launcher"
            )
        fake_devices(simulated)
    try:
        return init()
    except RuntimeError as error:
        if "Unable to initialize backend" not in str(error):
            raise
        raise ValueError(f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: {error}") from error


def all_or_refuse(*attempts: Callable[[], Any]) -> list[Any]:
    """The results of all attempts.

    Raises:
      ConfigError: with every attempt's refusal (see refusals.py).
    """
    results, problems = [], {}
    for attempt in attempts:
        try:
            results.append(attempt())
        except Exception as error:
            if (said := refusal(error)) is None:
                raise
            problems[said] = error
    if problems:
        raise ConfigError("\n".join(problems)) from next(iter(problems.values()))
    return results


def check_weights(config: RunConfig) -> None:
    """Look whether the weights that a new run starts from are of its model, and whether adapters have some to adapt.

    Raises:
      ConfigError: when they are not, or are missing.
    """
    if (
        config.finetune.lora.rank is not None
        and config.train.weights is None
        and not isinstance(config.model, OwnModel)
    ):
        raise ConfigError(
            f"finetune.lora.rank={config.finetune.lora.rank}: adapters alone train, and without train.weights the transformer "
            "that they adapt is random. Give train.weights, a folder of Hugging Face weights (axonml-jax export writes one of "
            "a run of yours), or go on with a run that has adapters: --resume FOLDER"
        )
    try:
        if config.train.weights is not None:
            check_pretrained(config.transformer_for("train.weights"), config.train.weights)
    except (OSError, ValueError) as error:
        raise ConfigError(f"train.weights: {error}") from error
