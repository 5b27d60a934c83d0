"""Where process 0 listens for the others: on loopback or on the one address that was named, never on all unasked."""

import os
import socket

from axonml_jax.mesh.job.gloo import address_towards

ASKED = "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's own variable; set it (to `0.0.0.0:PORT`, say) where the named address is not this machine's, as behind NAT."""

_LOOPBACK_NAMES = ("localhost", "ip6-localhost")
_ELSEWHERE = ("192.0.2.1", 9)  # RFC 5737: nobody's address; connecting a UDP socket to it sends nothing


def bind_address(coordinator: str, one_host: bool = False) -> tuple[str, int]:
    """The address and port that process 0 listens on.

    Args:
      coordinator: `host:port` as every process knows it.
      one_host: whether all processes run on this machine.

    Returns:
      An IP address of this machine and the port.

    Raises:
      ValueError: for a variable `JAX_COORDINATOR_BIND_ADDRESS` that is no host and port.
      OSError: when the host's name does not resolve and this machine has no network.
    """
    if asked := os.environ.get(ASKED):
        return split_address(asked, ASKED)
    host, port = split_address(coordinator, "the coordinator")
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror:
        # Kubernetes publishes a pod's name only once the pod is ready, and it is not before this.
        if (address := outward_address()) is None:
            raise
    by_name = host not in _LOOPBACK_NAMES and address != host
    if by_name and not one_host and _is_loopback(address):
        # Debian gives a machine's own name the address 127.0.1.1, which no other machine can reach.
        address = outward_address() or address
    return address, port


def split_address(text: str, what: str) -> tuple[str, int]:
    """The host and the port of an address.

    Args:
      text: `host:port`; an IPv6 host stands in brackets.
      what: the address is of, for the error.

    Raises:
      ValueError: when there is no host, when the host cannot be a name, or when the port is none.

    >>> split_address("[::1]:80", "the coordinator"), split_address("node0:29500", "the coordinator")
    (('::1', 80), ('node0', 29500))
    """
    host, _, port = text.rpartition(":")
    rule = f"{what} is {text!r}, which is no address"
    if not host.strip("[]"):
        raise ValueError(f"{rule}: give it as 'host:port'")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"{rule}: port {port or repr(port)} must be a number from 1 to 65535")
    check_host(host.strip("[]"), rule)
    return host.strip("[]"), int(port)


def check_host(host: str, rule: str) -> None:
    """Refuse what no machine can be called, before Python's resolver fails with an error about an encoding.

    Raises:
      ValueError: beginning with `rule`.
    """
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(
            f"{rule}: {host!r} cannot be the name of a machine (a part of it is empty or too long)"
        ) from None


def unresolved(host: str) -> str:
    """Why a machine's name leads to no address here, in words; empty where it does."""
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        return f"the name {host!r} does not resolve on this machine: {error.strerror}"
    return ""


def outward_address() -> str | None:
    """This machine's address on its default route, or None without one."""
    try:
        return address_towards(*_ELSEWHERE)
    except OSError:
        return None


def listen(address: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens on one address.

    Raises:
      OSError: saying what to do, when the port is taken or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=backlog)
    except OSError as error:
        raise OSError(
            error.errno,
            f"process 0 cannot listen on {address}:{port}: {error.strerror}. The coordinator's host must be the machine of "
            f"process 0 and its port free there; where it is reached by another address, set {ASKED}=0.0.0.0:{port}",
        ) from error


def host_port(address: str, port: int) -> str:
    """Address and port in one, as URLs have it.

    >>> host_port("::1", 80), host_port("10.0.0.1", 80)
    ('[::1]:80', '10.0.0.1:80')
    """
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")
