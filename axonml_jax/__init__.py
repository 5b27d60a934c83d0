"""Parallel training for any Flax model in JAX: sharding specs over a mesh, explicit collectives, PyTorch-like facades."""
