"""How JAX starts its devices: whether it has, and where gloo, which connects CPU processes, listens."""

import functools


def backend_started() -> bool:
    """Whether JAX has started a backend, which fixes the devices of this process."""
    # JAX has no public way to ask without starting one.
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def let_gloo_listen_on(**where: str) -> None:
    """Choose where gloo listens. Call it before JAX's devices start; the last call counts.

    Args:
      **where: `interface`, a network interface's name, or `hostname`, an address of this machine.
    """
    # JAX has no public option for it: its CPU client calls this function with the coordinator's client only.
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    make = _jax.make_gloo_tcp_collectives
    make = make.func if isinstance(make, functools.partial) else make
    _jax.make_gloo_tcp_collectives = functools.partial(make, **where)  # pyright: ignore[reportAttributeAccessIssue]
