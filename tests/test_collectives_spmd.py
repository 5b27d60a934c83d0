"""`spmd`: one rank's function over values stacked by rank."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonml_jax as ax


def group(n=4, ranks=None):
    world = ax.World.mock(8)
    return world.new_group(range(n) if ranks is None else ranks)


@pytest.mark.parametrize("check_vma", [True, False])
def test_pytrees_in_and_out_one_entry_per_rank(check_vma):
    run = ax.spmd(
        lambda batch, scale: {
            "mean": ax.all_reduce_mean(batch["x"], group()),
            "rank": ax.get_rank(group()),
            "s": scale + 1,
        },
        group(),
        check_vma=check_vma,
    )
    out = run({"x": np.arange(8.0).reshape(4, 2)}, np.arange(4))
    np.testing.assert_array_equal(out["mean"], [[3, 4]] * 4)
    assert out["rank"].tolist() == [0, 1, 2, 3] and out["s"].tolist() == [1, 2, 3, 4]


def test_a_subgroup_runs_on_its_own_devices_alone():
    odd = group(ranks=[1, 3, 5])
    out = ax.spmd(lambda x: ax.all_reduce_sum(x, odd), odd)(jnp.arange(3.0))
    assert out.tolist() == [3, 3, 3]
    assert {device.id for device in out.devices()} == {1, 3, 5}


def test_a_group_of_two_axes_is_bound_too():
    mesh = ax.make_mesh(data=4, tensor=2)
    both = ax.ProcessGroup(mesh, ("data", "tensor"))
    assert ax.spmd(lambda x: ax.all_reduce_max(x, both), both)(jnp.arange(8)).tolist() == [7] * 8


def test_it_can_be_jitted_and_differentiated():
    run = ax.spmd(lambda x: ax.all_reduce_sum(x, group()) ** 2, group())
    grad = jax.jit(jax.grad(lambda x: run(x).sum()))(jnp.arange(4.0))
    assert grad.tolist() == [48] * 4  # 4 losses of 6**2: d/dx = 4 * 2 * 6


def test_leaves_without_one_entry_per_rank_are_all_named():
    run = ax.spmd(lambda a, b: a["x"], group())
    with pytest.raises(ValueError, match=r"(?s)4 ranks.*\[0\]\['x'\]: shape \(3, 2\).*\[1\]: shape \(\).*jnp.stack"):
        run({"x": jnp.zeros((3, 2)), "y": jnp.zeros(4)}, 1.0)


def test_a_collective_of_other_ranks_is_refused():
    other = group(ranks=[2, 3])
    run = ax.spmd(lambda x: ax.all_reduce_sum(x, other), group(ranks=[0, 1]))
    with pytest.raises(ValueError, match=r"names .*of other ranks: .*the group that ax.spmd was given"):
        run(jnp.arange(2.0))


@pytest.mark.parametrize("call", [ax.broadcast, ax.all_reduce_sum], ids=lambda call: call.__name__)
def test_integers_that_do_not_fit_are_refused_and_not_cut_off(call):
    with jax.enable_x64(False), pytest.raises(TypeError, match=r"int64 from 1099511627777 to .* do not fit int32"):
        call(np.array([2**40 + 1]), ax.ProcessGroup.mock())
