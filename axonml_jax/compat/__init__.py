"""The edge of JAX: the only folder that touches what JAX does not promise to keep.

Behind functions with contracts stand `jax._src`, `jax.extend`, `jax.interpreters`, attributes and orders that are documented
nowhere, and what differs by version. Where a change in JAX would be silent, a canary sings (`compat/canaries.py`).
"""
