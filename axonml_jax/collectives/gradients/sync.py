"""Gradients averaged over a group after the backward pass, leaf by leaf; `buckets.py` packs them first."""

import jax
from jax.typing import ArrayLike

from axonml_jax.collectives.ops import ReduceOp, check_op
from axonml_jax.collectives.reduce import all_reduce_mean, reduced
from axonml_jax.collectives.scope import Group, Scope, run_collective


def sync_gradient(gradient: ArrayLike, group: Group) -> jax.Array:
    """The mean of one gradient over the group's ranks; traced, ranks outside the group keep theirs.

    Communicates: one all-reduce.
    """
    return all_reduce_mean(gradient, group)


def sync_gradients(gradients, group: Group):
    """The mean of every gradient over the group's ranks.

    Args:
      gradients: a pytree of floating arrays; None leaves (frozen parameters) stay None.
      group: the ranks that take part; axis names inside `shard_map`.

    Returns:
      A pytree of the same structure; traced, ranks outside the group keep their gradients.

    Raises:
      TypeError: when leaves have a dtype that has no mean; all of them are named by path.

    Communicates: one all-reduce per leaf, none depending on another.
    """
    _check_floating(gradients)
    return run_collective("sync_gradients", _averaged, gradients, group)


def _averaged(gradients, scope: Scope, name: str):
    return jax.tree.map(lambda leaf: reduced(leaf, scope, name, ReduceOp.AVERAGE), gradients)


def _check_floating(gradients) -> None:
    offenders = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        try:
            check_op("sync_gradients", ReduceOp.AVERAGE, jax.numpy.result_type(leaf))
        except TypeError:
            offenders.append(f"  {jax.tree_util.keystr(path)}: {jax.numpy.result_type(leaf).name}")
    if offenders:
        raise TypeError(
            "sync_gradients: these leaves have no mean over ranks:\n"
            + "\n".join(offenders)
            + "\ncast them to a floating dtype, or leave them out (buffers are no gradients)"
        )
