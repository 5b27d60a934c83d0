"""Whether stages, timetable, buffers and microbatches that are to run together have sizes that agree."""

from collections.abc import Mapping

import jax.numpy as jnp

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.parallel.pipeline.resting.packing import Buffers
from axonml_jax.parallel.pipeline.resting.stage_buffers import StageBuffers
from axonml_jax.parallel.pipeline.schedules.timetable import Timetable


def refuse_disagreement(
    timetable: Timetable,
    num_stages: int,
    num_ranks: int,
    buffers: Mapping[str, tuple[StageBuffers, Buffers]],
    microbatches: Mapping[str, PyTree],
    keep_read: bool,
) -> None:
    """Name everything that does not fit the timetable.

    Args:
      timetable: what is to run.
      num_stages: how many stages were given.
      num_ranks: size of the pipeline's axis.
      buffers: by name a layout and this rank's buffers.
      microbatches: by name a tree whose leaves are [M, ...].
      keep_read: whether weights are kept while a rank stays with a stage.

    Raises:
      ValueError: with all of it.
    """
    found = []
    if num_stages != timetable.num_stages:
        found.append(f"{num_stages} stages were given, and the timetable has {timetable.num_stages}")
    if num_ranks != timetable.num_ranks:
        found.append(f"the axis has {num_ranks} ranks, and the timetable {timetable.num_ranks}")
    for name, (layout, given) in buffers.items():
        found += _wrong_layout(name, layout, given, timetable)
    for name, tree in microbatches.items():
        count = timetable.num_microbatches
        wrong = {path: jnp.shape(leaf) for path, leaf in named_leaves(tree).items() if jnp.shape(leaf)[:1] != (count,)}
        found += [
            f"{name} {path or 'leaf'} of shape {shape} must begin with M = {count}" for path, shape in wrong.items()
        ]
    if keep_read and timetable.weight is not None:
        found.append("keep_read=True takes whole backwards, and the timetable splits them: read in every tick")
    if found:
        raise ValueError("the pipeline does not fit its timetable: " + "; ".join(found))


def _wrong_layout(name: str, layout: StageBuffers, given: Buffers, timetable: Timetable) -> list[str]:
    ours, theirs = (layout.num_ranks, len(layout.packings)), (timetable.num_ranks, timetable.num_stages)
    found = [] if ours == theirs else [f"the layout of {name} is of (ranks, stages) {ours}, the timetable of {theirs}"]
    shapes = {tuple(group): jnp.shape(buffer) for group, buffer in given.items()}
    wanted = {tuple(group): (size,) for group, size in layout.sizes.items()}
    if shapes != wanted:
        found.append(f"the buffers of {name} are {shapes}, and their layout has {wanted}: pack them with pack_rank")
    return found
