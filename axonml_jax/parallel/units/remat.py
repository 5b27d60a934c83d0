"""Recomputing activations in the backward, unit by unit: less memory for more work (Chen et al. 2016)."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.compat.checkpoint_policy import SaveWhere, require_policies
from axonml_jax.model.functional import Functional
from axonml_jax.parallel.units.gathered import Slices
from axonml_jax.parallel.units.loop import UnitLoop
from axonml_jax.parallel.units.parts import part_of
from axonml_jax.parallel.units.remat_policy import Remat
from axonml_jax.parallel.units.wrap import Wrap, units
from axonml_jax.program.atoms import results_of
from axonml_jax.program.recomputed import PRODUCT_PARTS, PRODUCTS, all_but_elementwise
from axonml_jax.program.segments import cut


def transform_of(remat: Remat, *, apart: bool = False) -> Callable[[Callable], Callable]:
    """What a policy makes of the function of a unit.

    Args:
      remat: the policy.
      apart: whether the backward is in another branch or loop than the forward. Then every value between them is an array in
        memory, and even with None elementwise work is redone, as XLA does by itself where it sees both.
    """
    if remat is None and not apart:
        return lambda work: work
    if remat is None:
        require_policies()
    products = jax.checkpoint_policies.save_only_these_names(PRODUCTS, PRODUCT_PARTS)
    policy = {None: SaveWhere(all_but_elementwise), "selective": products, "full": None}[remat]
    return lambda work: jax.checkpoint(work, policy=policy, prevent_cse=not apart)


def recomputed(loss: Callable, model: Functional, wrap: Wrap, remat: Remat, params: PyTree, args: tuple) -> Callable:
    """A loss whose backward recomputes its units; with None the loss itself.

    Args:
      loss: `loss(read_params, *args)`.
      model: names its modules.
      wrap: which parts are units.
      remat: what is recomputed.
      params: the parameters as read; only shapes and types count.
      args: the loss's other arguments; only shapes and types count.
    """
    if remat is None:
        return loss
    leaves, treedef = jax.tree.flatten(params)
    names = list(named_leaves(params))

    def flat(weights: Sequence[Any], *args):
        return loss(treedef.unflatten(weights), *args)

    groups = lambda: list(units(names, wrap, model.module_types()).values())
    pieces = cut(flat, leaves, args, units=groups, trained=len(leaves), sliceable=range(len(leaves)))
    parts = [part_of(segment, pieces) for segment in pieces.segments]
    whole = Slices(lambda weights, shards, tie: (list(shards), tie), lambda weights, grads: list(grads))
    number = pieces.program.inputs

    def run_units(params: PyTree, *args):
        weights = jax.tree.leaves(params)
        env = dict(pieces.program.constants)
        env |= zip(number[len(weights) :], jax.tree.leaves(args), strict=True)
        for segment, part in zip(pieces.segments, parts, strict=True):
            own = {number[w]: weights[w] for w in segment.weights}
            inputs = {n: env[n] for n in segment.inputs}
            transform = transform_of(remat, apart=isinstance(part, UnitLoop))
            if isinstance(part, UnitLoop):
                stacks = {w: weights[w] for w in segment.scanned.values()}
                env |= part.apply(own, inputs, stacks, whole, transform)
            else:
                env |= transform(part.apply)(own, inputs)
        results = results_of(pieces.program.outputs, env)
        return pieces.out_tree.unflatten(results)

    return run_units
