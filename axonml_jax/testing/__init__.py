"""Testing for users: a pytest plugin and comparison with the single-device oracle."""
