"""Questions about this rank and its group, traced or eager."""

import jax

from axonml_jax.collectives.scope import Group, bound_scope, require_eager


def get_rank(group: Group) -> int | jax.Array:
    """This rank's position in the group, counted from 0; traced inside `shard_map`, where outside the group it is -1.

    Raises:
      ValueError: when called eagerly by a rank that is no member, or with axis names that are not bound.
    """
    scope = bound_scope(group)
    if scope is None:
        return require_eager("get_rank", group).rank
    return scope.only_members(scope.index(), -1)


def get_world_size(group: Group) -> int:
    """The number of ranks in the group."""
    scope = bound_scope(group)
    return require_eager("get_world_size", group).size if scope is None else scope.size


def is_main_process(group: Group) -> bool | jax.Array:
    """Whether this rank is the group's first, the one that prints and writes; a traced boolean inside `shard_map`."""
    return get_rank(group) == 0
