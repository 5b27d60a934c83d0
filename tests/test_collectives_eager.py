"""The eager cases under `spawn`: ranks are threads, one simulated device each."""

import pytest
from workers.eager_cases import CASES

import axonml_jax as ax

IN_AN_ODD_WORLD = [name for name in CASES if "group" in name or "product" in name or "fewer" in name]


@pytest.mark.parametrize(
    ("world_size", "name"),
    [(2, name) for name in CASES] + [(3, name) for name in IN_AN_ODD_WORLD] + [(8, name) for name in CASES],
)
def test_eager_case(world_size, name):
    ax.spawn(CASES[name], world_size, timeout=60)


def test_an_eager_call_of_a_process_that_holds_several_ranks_is_refused_with_the_remedy():
    group = ax.World.mock(4).default_group()
    with pytest.raises(ValueError, match=r"spawn.*spmd"):
        ax.all_reduce_sum(1.0, group)
