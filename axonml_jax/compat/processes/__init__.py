"""Processes at the edge of JAX: how they start and meet, and the compiled programs that they keep."""
