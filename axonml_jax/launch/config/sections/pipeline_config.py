"""The section `pipeline` of a configuration."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from axonml_jax.launch.config.sections.mesh_config import MeshConfig
from axonml_jax.launch.config.sections.plan_config import PlanConfig
from axonml_jax.models.config import TransformerConfig

if TYPE_CHECKING:
    from axonml_jax.parallel.pipeline.policy import Pipelined


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How microbatches pass through the stages along mesh.pipe (see `ax.Pipeline`).

    Attributes:
      schedule: gpipe, 1f1b, interleaved or zero-bubble.
      num_microbatches: into how many parts the rows of a batch shard are cut.
      chunks: stages per device; interleaved wants at least 2.
      gather: with mesh.fsdp, gather a device's stages once per step, when it turns to another (chunk), or whenever one is
        used (tick).
    """

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    num_microbatches: int = 8
    chunks: int = 1
    gather: Literal["step", "chunk", "tick"] = "step"

    def __post_init__(self):
        try:
            self.build()
        except ValueError as error:
            raise ValueError(f"pipeline: {error}") from error

    def build(self) -> "Pipelined":
        """The plan's part."""
        from axonml_jax.parallel.pipeline.policy import Pipelined

        return Pipelined(
            schedule=self.schedule,  # pyright: ignore[reportArgumentType]  # Pipelined converts names
            num_microbatches=self.num_microbatches,
            chunks=self.chunks,
            gather=self.gather,
        )

    def problems(self, mesh: MeshConfig, plan: PlanConfig, model: TransformerConfig | None) -> Iterator[str]:
        """What of it does not go with the rest of a configuration; no model: one's own, of which nothing is known."""
        ranks, stages = mesh.pipe, mesh.pipe * self.chunks
        if ranks == 1:
            if self != PipelineConfig():
                yield "the section pipeline has no effect while mesh.pipe=1: set mesh.pipe"
            return
        if ranks < 1:
            yield f"mesh.pipe={ranks}: must be a positive number of devices; -1 is for data and fsdp"
            return
        if model is not None and stages > model.num_layers:
            yield (
                f"mesh.pipe={ranks} x pipeline.chunks={self.chunks} are {stages} stages for model.num_layers="
                f"{model.num_layers} blocks: use fewer stages or more layers"
            )
        if plan.sync_strategy == "no_sync":
            yield f"plan.sync_strategy=no_sync trains a model per rank, but mesh.pipe={ranks} splits one model"
        try:
            self.build().timetable(ranks, self.num_microbatches * plan.accumulate)
        except ValueError as error:
            yield f"pipeline: {error}"
