"""DistributedSampler against PyTorch's rules written out by hand."""

import itertools
import math

import jax
import numpy as np
import pytest

from axonml_jax.data.sampler import DistributedSampler, epoch_order

SIZES = list(itertools.product((0, 1, 2, 3, 5, 8, 17, 24), (1, 2, 3, 8), (False, True)))


def torch_rules(order, num_replicas, rank, drop_last):
    """torch.utils.data.DistributedSampler.__init__ and __iter__, line for line, without its random generator."""
    indices = list(order)
    if drop_last and len(indices) % num_replicas != 0:
        num_samples = math.ceil((len(indices) - num_replicas) / num_replicas)
    else:
        num_samples = math.ceil(len(indices) / num_replicas)
    total_size = num_samples * num_replicas
    if not drop_last:
        padding_size = total_size - len(indices)
        if padding_size <= len(indices):
            indices += indices[:padding_size]
        else:
            indices += (indices * math.ceil(padding_size / len(indices)))[:padding_size]
    else:
        indices = indices[:total_size]
    return indices[rank:total_size:num_replicas]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size,num_replicas,drop_last", SIZES)
def test_indices_equal_pytorchs_rules(size, num_replicas, drop_last, shuffle):
    order = epoch_order(size, shuffle=shuffle, seed=3, epoch=2).tolist()
    for rank in range(num_replicas):
        sampler = DistributedSampler(size, num_replicas, rank, shuffle=shuffle, seed=3, drop_last=drop_last)
        sampler.set_epoch(2)
        expected = torch_rules(order, num_replicas, rank, drop_last)
        assert list(sampler) == expected
        assert len(sampler) == len(expected)


def test_a_known_case():
    assert list(DistributedSampler(3, 8, 7, shuffle=False)) == [1]  # 0 1 2 | 0 1 2 0 1
    assert list(DistributedSampler(10, 4, 1, shuffle=False)) == [1, 5, 9]
    assert list(DistributedSampler(10, 4, 3, shuffle=False)) == [3, 7, 1]
    assert list(DistributedSampler(10, 4, 3, shuffle=False, drop_last=True)) == [3, 7]


def test_every_epoch_and_seed_has_its_own_permutation_and_repeats_it():
    def draw(seed, epoch):
        sampler = DistributedSampler(range(50), 1, 0, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    drawn = {(seed, epoch): draw(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len({tuple(order) for order in drawn.values()}) == 9
    assert all(sorted(order) == list(range(50)) for order in drawn.values())
    assert draw(1, 2) == drawn[1, 2]


def test_the_permutation_stays_what_it_is():
    assert epoch_order(8, shuffle=True, seed=0, epoch=0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]


def test_all_indices_are_drawn_equally_often_in_each_place():
    first = [epoch_order(10, shuffle=True, seed=7, epoch=epoch)[0] for epoch in range(2000)]
    assert np.abs(np.bincount(first, minlength=10) - 200).max() < 60


def test_ranks_default_to_the_processes_and_indices_are_python_integers():
    sampler = DistributedSampler(np.zeros(4))
    assert (sampler.num_replicas, sampler.rank) == (jax.process_count(), jax.process_index())
    assert all(type(index) is int for index in sampler)


def test_everything_out_of_range_is_refused_at_once():
    with pytest.raises(ValueError) as caught:
        DistributedSampler(-1, 2, 2, seed=-3)
    for named in ("length -1", "rank=2", "seed=-3"):
        assert named in str(caught.value)
    with pytest.raises(ValueError, match="num_replicas=0"):
        DistributedSampler(4, 0, 0)
    with pytest.raises(ValueError, match="epochs count from 0"):
        DistributedSampler(4, 1, 0).set_epoch(-1)
    with pytest.raises(TypeError, match="generator has none"):
        DistributedSampler((i for i in range(3)), 1, 0)
