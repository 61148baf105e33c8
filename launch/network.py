"""Addresses and interfaces of this machine, by the standard library alone."""

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915


def _interface_addresses() -> list[tuple[str, str]]:
    """Returns (interface, address), IPv4 before IPv6; of each interface its first IPv4 address."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, _, _, name = line.split()
            found.append((name, str(ipaddress.ip_address(bytes.fromhex(digits)))))
    return found


def _is_usable(address: str) -> bool:
    """Whether another node could reach it: not loopback, nor one that means something on one link only."""
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified or parsed.is_multicast)


def own_addresses(interface: str | None = None) -> list[str]:
    """Returns the addresses at which other nodes may reach this one, those of its own name first.

    Args:
        interface: Only its; None: of all.
    """
    known = [(name, address) for name, address in _interface_addresses() if _is_usable(address)]
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
    return next((name for name, own in _interface_addresses() if own == address), None)


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
