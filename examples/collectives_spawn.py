"""Every collective, called eagerly by four ranks as in PyTorch; ranks are threads with one simulated device each.

    python examples/collectives_spawn.py

Shows `ax.spawn`, collectives on one value per rank, subgroups, point to point, and the same code inside `ax.spmd`.
"""

import jax.numpy as jnp

import axonml_jax as ax

ax.fake_devices(4)


def program(world):
    group, rank = world.default_group(), world.rank
    mine = jnp.full((4,), float(rank))

    total = ax.all_reduce_sum(mine, group)
    biggest = ax.all_reduce_max(mine, group)
    everyone = ax.all_gather(mine[:1], group)
    part = ax.reduce_scatter_sum(jnp.arange(4.0), group)
    from_two = ax.broadcast(mine, group, src=2)

    pairs = world.new_group([0, 1]), world.new_group([2, 3])
    pair_sum = ax.all_reduce_sum(mine, pairs[rank // 2])

    if rank == 0:
        ax.send(jnp.array([42.0]), 3, group)
    received = ax.recv(0, group, like=jnp.zeros(1)) if rank == 3 else None
    ax.barrier(group)
    ax.print0(f"{world.world_size} ranks; sum {total}, gathered {everyone}")
    return total, biggest, everyone, part, from_two, pair_sum, received


for rank, result in enumerate(ax.spawn(program, world_size=4)):
    total, biggest, everyone, part, from_two, pair_sum, received = result
    assert total.tolist() == [6.0] * 4 and biggest.tolist() == [3.0] * 4 and from_two.tolist() == [2.0] * 4
    assert everyone.tolist() == [0.0, 1.0, 2.0, 3.0] and part.tolist() == [4.0 * rank]
    assert pair_sum.tolist() == [1.0 if rank < 2 else 5.0] * 4
    assert (received is not None) == (rank == 3) and (received is None or received.tolist() == [42.0])

# Inside one compiled program: the same names, the group's axis instead of a world; dim 0 is the rank.
group = ax.ProcessGroup(ax.make_mesh(data=4), axes=("data",))
stacked = ax.spmd(lambda x: ax.all_reduce_mean(x, group), group)(jnp.arange(4.0))
assert stacked.tolist() == [1.5] * 4
