"""A plan as HTML, for notebooks: what is chosen, what is left at its default, and the pipeline's timetable."""

import enum
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from axonml_jax.markup import lines, section, table
from axonml_jax.parallel.pipeline.policy import AXIS


def plan_html(plan: Any, title: str, degrees: Mapping[str, int] | None) -> str:
    """The fields of a plan, those that are chosen before those that are not.

    Args:
      plan: an `ax.Plan`.
      title: above the table.
      degrees: of the mesh that it runs on; None: those of the plan's own mesh, if it has one.
    """
    own = None if plan.mesh is None else plan.mesh.degrees
    degrees = own if degrees is None else degrees
    chosen = {name for name, _ in _chosen(plan)}
    names = sorted((each.name for each in fields(plan) if each.name != "mesh"), key=lambda name: name not in chosen)
    cells = [[name, in_words(getattr(plan, name))] for name in names]
    quiet = [row for row, name in enumerate(names) if name not in chosen]
    mesh = "any mesh" if degrees is None else " x ".join(f"{axis} {ranks}" for axis, ranks in degrees.items() if ranks)
    parts = [lines(f"on {mesh or 'one device'}"), table(["field", "value"], cells, left=2, quiet=quiet)]
    if plan.pipe is not None and AXIS in (degrees or {}):
        parts.append(plan.pipe.timetable((degrees or {})[AXIS], plan.microbatches)._repr_html_())
    return section(title, *parts)


def in_words(value: Any) -> str:
    """A value of a plan as one would write it, without what is a default.

    >>> from axonml_jax.parallel.strategies.shard import Shard
    >>> in_words(Shard(stage=2)), in_words(Shard()), in_words(None)
    ('Shard(stage=2)', 'Shard()', 'None')
    """
    if isinstance(value, enum.Enum):
        return repr(value.value)
    if not is_dataclass(value):
        return repr(value)
    return f"{type(value).__name__}({', '.join(f'{name}={in_words(one)}' for name, one in _chosen(value))})"


def _chosen(value: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a dataclass that are not at their defaults."""
    for each in fields(value):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if each.repr and (found := getattr(value, each.name)) != default:
            yield each.name, found
