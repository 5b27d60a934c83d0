"""Collectives: every communicating primitive of JAX that this library calls is called here.

A public collective has one name and two contexts: traced inside `shard_map`, where a group may be given as axis names,
and eager, called by every rank of a process group with its own value.

Gradients. The result of a reduction feeds every rank's own loss, and each rank's loss counts: the gradient is that of
the sum of the losses over the ranks. So that this holds with `check_vma=True` as with False, every result is typed as
varying over the group's axes, even where its value is the same on all ranks: a loss computed from it is then one loss
per rank in both modes, and a result leaves `shard_map` under `out_specs` that name the axes. Where a value is to be
typed as the same on all ranks, as in one step of training, use the pairs of `gradients.py` or the bare `primitives.py`.
"""

from axonml_jax.compat.order import reduce_without_constraints

reduce_without_constraints()  # before any sum of bfloat16 beside an axis of XLA's partitioner is compiled on CPU
