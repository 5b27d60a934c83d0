"""Testing for users: a pytest plugin, comparison with the single-device oracle, and a check of strategies."""

from axonml_jax.testing.check_strategy import check_strategy as check_strategy
from axonml_jax.testing.equality import assert_equals_single_device as assert_equals_single_device
