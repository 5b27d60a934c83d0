"""What this machine's own devices do, measured: products, memory, collectives, and steps of a model."""

from axonml_jax.planner.measure.this_machine import measure

__all__ = ["measure"]
