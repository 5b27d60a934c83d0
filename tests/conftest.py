"""The strict test world: simulated devices (pyproject's `fake_devices`), float64 allowed, warnings are errors."""

import jax
import pytest

jax.config.update("jax_enable_x64", True)


@pytest.fixture(scope="module")
def compiled_fast():
    """Programs compiled with few optimizations: for tables whose rows each compile once and run for milliseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
