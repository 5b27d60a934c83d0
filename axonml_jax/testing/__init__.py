"""Testing for users: a pytest plugin and comparison with the single-device oracle."""

from axonml_jax.testing.equality import assert_equals_single_device as assert_equals_single_device
