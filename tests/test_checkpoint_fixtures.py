"""Checkpoints that an earlier version wrote (tests/fixtures) restore under every plan, bit for bit."""

import numpy as np
import pytest
from fixtures.write_checkpoints import CHECKPOINTS, WRITTEN
from test_checkpoint_plans import PLANS, equal_bits, trainer, wholes

import axonml_jax as ax


def held(name):
    """The arrays that were saved, by name."""
    with np.load(CHECKPOINTS / f"{name}.npz") as arrays:
        return {key.replace("|", "/"): arrays[key] for key in arrays}


@pytest.mark.parametrize("plan", PLANS)
def test_checkpoints_of_an_earlier_version_restore_under_every_plan(plan):
    target = trainer(plan, first=5)
    for name in WRITTEN:
        ax.restore(CHECKPOINTS / name, target)
        assert target.state.step == 2
        equal_bits(wholes(target), held(name))
