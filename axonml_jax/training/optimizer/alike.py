"""Whether an update of slices is the slices of an update, seen in the two traced programs.

Stricter than what lets an optimizer see shards (`elementwise`): a wrong answer there is refused, here it would be silent.
"""

from axonml_jax.program.atoms import is_constant
from axonml_jax.program.program import Equation, Program
from axonml_jax.program.rules import is_elementwise


def alike(whole: Program, sliced: Program) -> bool:
    """Whether `sliced`, traced on slices of some arguments, does to them what `whole` does.

    Equation by equation: the same operations with the same constants; what meets a slice is another of the same shape or one
    number for all elements; and nothing made without a slice has its shape but one number spread out.
    """
    if len(whole.equations) != len(sliced.equations):
        return False
    marked = {
        n for n, m in zip(sliced.inputs, whole.inputs, strict=True) if sliced.avals[n].shape != whole.avals[m].shape
    }
    uniform: set[int] = set()  # of one number
    for ours, theirs in zip(whole.equations, sliced.equations, strict=True):
        if not _same(ours, theirs):
            return False
        name, shapes = theirs.name, [sliced.avals[number].shape for number in theirs.outputs]
        spread = name == "broadcast_in_dim" and all(not sliced.avals[n].shape or n in uniform for n in theirs.read)
        if not marked.intersection(theirs.read):
            if (is_elementwise(name) and all(n in uniform or not sliced.avals[n].shape for n in theirs.read)) or spread:
                uniform.update(theirs.outputs)
            elif shapes != [whole.avals[number].shape for number in ours.outputs]:
                return False
            continue
        own = [sliced.avals[n].shape for n in theirs.read if n in marked]
        others = [n for n in theirs.read if n not in marked and n not in uniform and sliced.avals[n].shape]
        kept = name == "broadcast_in_dim" and shapes == own
        if not (is_elementwise(name) or kept) or others or {*own, *shapes} != {own[0]}:
            return False
        marked.update(theirs.outputs)
    return True


def _same(ours: Equation, theirs: Equation) -> bool:
    """Whether two equations are the same operation with the same constants, shapes aside."""
    if not ours.op.is_alike(theirs.op) or theirs.op.acts:
        return False
    constants = [[str(atom.val) if is_constant(atom) else None for atom in each.inputs] for each in (ours, theirs)]
    if constants[0] != constants[1]:
        return False
    return ours.name == "broadcast_in_dim" or ours.op.does_the_same(theirs.op) or ours.inputs == theirs.inputs == ()
