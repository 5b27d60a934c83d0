"""The edge of JAX: the only folder that touches what JAX does not promise to keep.

Its functions hide `jax._src`, `jax.extend`, `jax.interpreters`, undocumented attributes and orders, and differences between
versions. Where a change in JAX would be silent, a canary fails (`compat/canaries.py`).
"""
