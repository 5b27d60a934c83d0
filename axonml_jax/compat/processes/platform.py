"""How JAX starts its devices: whether it has, and where gloo, which connects CPU processes, listens."""

import functools
import importlib.util
from importlib.metadata import entry_points


def backend_started() -> bool:
    """Whether JAX has started a backend, which fixes the devices of this process."""
    # JAX has no public way to ask without starting one.
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def only_cpu() -> bool:
    """Whether JAX will start on CPUs: its options say so, or no accelerator's plugin is installed."""
    import jax  # the launcher reads this file and must not wait for JAX

    if jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        return jax.config.jax_platforms.split(",")[0] == "cpu"  # pyright: ignore[reportAttributeAccessIssue]
    found = (importlib.util.find_spec(name) for name in ("libtpu", "jax_plugins"))
    return not any(found) and not entry_points(group="jax_plugins")


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
