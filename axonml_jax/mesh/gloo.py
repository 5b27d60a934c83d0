"""Which of this machine's addresses gloo (CPU processes) uses: the one on the way to the coordinator.

Left alone, it takes the address of the machine's own name, which on Debian is 127.0.1.1 or 127.0.0.1: processes of other
machines cannot reach that, and the first collective fails with "Connection refused".
"""

import functools
import os
import socket

INTERFACE = "GLOO_SOCKET_IFNAME"
"""PyTorch's variable for the network interface; it wins."""


def use_route_to(host: str, port: int) -> None:
    """Make gloo listen on the address from which this process reaches the coordinator. Call it before JAX's devices start."""
    # JAX has no public option for it: its CPU client calls this function with the coordinator's client only.
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    make = _jax.make_gloo_tcp_collectives
    make = make.func if isinstance(make, functools.partial) else make
    interface = os.environ.get(INTERFACE)
    where = {"interface": interface} if interface else {"hostname": address_towards(host, port)}
    _jax.make_gloo_tcp_collectives = functools.partial(make, **where)  # pyright: ignore[reportAttributeAccessIssue]


def address_towards(host: str, port: int) -> str:
    """This machine's address on the route to a host; nothing is sent.

    Raises:
      OSError: when the host does not resolve or there is no route.

    >>> address_towards("127.0.0.1", 1)
    '127.0.0.1'
    """
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])
