"""Rank-aware messages and seeds."""

import logging
import random

import jax
import numpy as np
import pytest

from axonml_jax.base import logger, print0, seed
from axonml_jax.mesh.world import spawn


def test_print0_prints_once(capsys):
    print0("alone", end="!")
    spawn(lambda world: print0("rank", world.rank), 3)
    assert capsys.readouterr().out == "alone!rank 0\n"


def test_messages_carry_the_rank_only_where_there_are_several(caplog):
    with caplog.at_level(logging.INFO, "axonml_jax"):
        logger.info("alone %d%%", 5)
        spawn(lambda world: logger.info("hello %s", "you"), 2)
    assert caplog.messages[0] == "alone 5%"
    assert sorted(caplog.messages[1:]) == ["[0/2] hello you", "[1/2] hello you"]


def test_a_seed_is_the_same_everywhere():
    def draw():
        key = seed(7)
        return random.random(), np.random.rand(), jax.random.key_data(key).tolist()

    assert draw() == draw()
    assert draw()[2] == jax.random.key_data(jax.random.key(7)).tolist()


@pytest.mark.parametrize("n", [-1, 2**32])
def test_seeds_that_numpy_refuses_are_refused(n):
    with pytest.raises(ValueError, match="2\\*\\*32"):
        seed(n)
