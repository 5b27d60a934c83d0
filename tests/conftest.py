"""The strict test world: simulated devices (pyproject's `fake_devices`), float64 allowed, warnings are errors."""

import jax

jax.config.update("jax_enable_x64", True)
