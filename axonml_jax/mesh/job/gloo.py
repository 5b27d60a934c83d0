"""Which of this machine's addresses gloo (CPU processes) uses: the one on the way to the coordinator.

Left alone, it takes the address of the machine's own name, which on Debian is 127.0.1.1 or 127.0.0.1: processes of other
machines cannot reach that, and the first collective fails with "Connection refused".
"""

import os
import socket

from axonml_jax.compat.processes.platform import let_gloo_listen_on

INTERFACE = "GLOO_SOCKET_IFNAME"
"""PyTorch's variable for the network interface; it wins."""


def use_route_to(host: str, port: int) -> None:
    """Make gloo listen on the address from which this process reaches the coordinator. Call it before JAX's devices start."""
    interface = os.environ.get(INTERFACE)
    if interface:
        let_gloo_listen_on(interface=interface)
    else:
        let_gloo_listen_on(hostname=address_towards(host, port))


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
