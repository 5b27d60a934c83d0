"""Whatever a user calls a mesh (a Mesh, a World, a group, nothing) as one with the library's axis names, all Auto."""

from collections.abc import Iterable, Mapping

from jax.sharding import AbstractMesh, AxisType, Mesh

from axonml_jax.mesh.axes import AXES, AxisNames, flat_axes
from axonml_jax.mesh.group import ProcessGroup
from axonml_jax.mesh.shape import make_mesh
from axonml_jax.mesh.world import World
from axonml_jax.synonyms import AXES as SYNONYMS


def as_mesh(
    target: Mesh | AbstractMesh | World | ProcessGroup | None = None,
    rename: Mapping[str, str] | None = None,
    *,
    own: Iterable[AxisNames] = (),
) -> Mesh | AbstractMesh:
    """The mesh that `target` means.

    Args:
      target: a mesh of yours (returned as it is where its names and types are ours), a World, a group (its mesh; only
        the members' devices where it is part of its axes), or None for all devices along `data`.
      rename: your axis names to ours, on top of the synonyms (synonyms.py).
      own: names of axes of your own, to which a plan gives a strategy (`Plan(axes=...)`); they stay as they are.

    Raises:
      ValueError: naming every axis that is not in `AXES` nor mapped to it, or that would double another.
      TypeError: for anything else.

    >>> import jax
    >>> as_mesh(jax.make_mesh((1, 1), ("dp", "model"))).axis_names
    ('data', 'tensor')
    """
    if target is None:
        return make_mesh(data=-1)
    if isinstance(target, World):
        return target.mesh
    if isinstance(target, ProcessGroup):
        return as_mesh(target.sub_mesh if target.members else target.mesh, rename, own=own)
    if not isinstance(target, Mesh | AbstractMesh):
        raise TypeError(f"{target!r} is no mesh: give a jax.sharding.Mesh, a World, a ProcessGroup, or None")
    kept = flat_axes(own)
    names = tuple(_renamed(target.axis_names, {name: name for name in kept} | dict(rename or {}), {*AXES, *kept}))
    types = (AxisType.Auto,) * len(names)
    if names == target.axis_names and target.axis_types == types:
        return target
    if isinstance(target, AbstractMesh):
        return AbstractMesh(target.axis_sizes, names, axis_types=types)
    return Mesh(target.devices, names, axis_types=types)


def _renamed(names, rename, known) -> list[str]:
    ours = [rename.get(name, SYNONYMS.get(name, name)) for name in names]
    unknown = [name for name, our in zip(names, ours, strict=True) if our not in known]
    doubled = [name for name, our in zip(names, ours, strict=True) if our in known and ours.count(our) > 1]
    if unknown or doubled:
        parts = [f"axes {unknown} are unknown"] if unknown else []
        parts += [f"axes {doubled} would share a name"] if doubled else []
        example = f"rename={{{(unknown + doubled)[0]!r}: 'data'}}"
        raise ValueError(
            f"mesh with axes {tuple(names)}: {' and '.join(parts)}. An axis must be, or be renamed to, one of "
            f"{', '.join(AXES)} (known synonyms: {', '.join(SYNONYMS)}): pass {example}, or give an axis of "
            f"your own a strategy, ax.Plan(axes={{{(unknown + doubled)[0]!r}: ...}})"
        )
    return ours
