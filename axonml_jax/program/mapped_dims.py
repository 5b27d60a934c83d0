"""Which dim of a value a `shard_map` in its program leaves split over an axis: as its specs say."""

from typing import Any

from axonml_jax.mesh.axes import as_axes
from axonml_jax.program.atoms import Atom, aval_of, is_constant
from axonml_jax.program.program import Program
from axonml_jax.program.rules import rule_of


def mapped_dim(program: Program, atom: Atom, axis: str) -> int | None:
    """The dim of a value that is split so; None: it comes out of no such `shard_map`, but for what keeps its shape.

    Args:
      program: a traced program.
      atom: one of its values.
      axis: the mesh axis.
    """
    if is_constant(atom):
        return None
    maker = next((equation for equation in program.equations if atom in equation.outputs), None)
    if maker is None:
        return None
    place = maker.outputs.index(atom)
    if (mapped := maker.op.mapped) is not None:
        return _dim(mapped.options["out_specs"][place], axis)
    if (scan := maker.op.scan) is not None and maker.body is not None:
        inside = mapped_dim(maker.body, maker.body.outputs[place], axis)
        return inside if inside is None or place < scan.num_carry else inside + 1
    if (inner := maker.called or maker.body) is not None:
        return mapped_dim(inner, inner.outputs[place], axis) if len(inner.outputs) == len(maker.outputs) else None
    rule = rule_of(maker.name)
    given = (
        maker.inputs[place : place + 1]
        if rule.passes
        else maker.inputs * (rule.kind == "elementwise" or maker.name == "name")
    )
    shape = program.avals[atom].shape
    alike = (other for other in given if aval_of(other, program.avals).shape == shape)
    return next((dim for other in alike if (dim := mapped_dim(program, other, axis)) is not None), None)


def _dim(spec: Any, axis: str) -> int | None:
    return next((dim for dim, entry in enumerate(spec) if axis in as_axes(entry or ())), None)
