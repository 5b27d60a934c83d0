"""Scripts as users of JAX and Flax have them, under their own meshes, with one changed line: equal to one device."""

import warnings

import pytest
from user_scripts import IDIOMS, PLANS, compared


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("idiom", IDIOMS)
def test_a_users_script_trains_as_its_own_loop_does(idiom, plan):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # `with mesh:`
        assert compared(idiom, plan) == "equal"
