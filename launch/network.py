"""Addresses of this machine, and ways from it to others."""

import contextlib
import socket

from pretrain.utils.interfaces import interface_addresses, usable_addresses


def own_addresses(interface: str | None = None) -> list[str]:
    """Returns the addresses at which other nodes may reach this one, those of its own name first.

    Args:
        interface: Only its; None: of all.
    """
    known = usable_addresses()
    if interface is not None:
        return [address for name, address in known if name == interface]
    named: list[str] = []
    with contextlib.suppress(OSError):
        named = [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    own = [address for _, address in known]
    # A hosts file may name an address that this machine does not have.
    return list(dict.fromkeys([*(address for address in named if address in own), *own]))


def interface_of(address: str) -> str | None:
    """Returns the interface that has an address of this machine; None where that cannot be told."""
    return next((name for name, own in interface_addresses() if own == address), None)


def route_to(address: str, port: int) -> str | None:
    """Returns the address of this machine from which it reaches another; None where there is no way."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # sends nothing
        return str(probe.getsockname()[0])
    return None


def listen(port: int) -> socket.socket:
    """Returns a socket that listens on all addresses, IPv4 and IPv6. Raises: OSError, where the port is in use."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
    return socket.create_server(("", port), backlog=512)
