"""Reserved free ports, and the addresses of this machine."""

import contextlib
import ipaddress
import socket
import sys
from collections.abc import Iterator

import psutil

from pretrain.errors import LaunchError


@contextlib.contextmanager
def reserved_port(port: int | None) -> Iterator[int]:
    """Reserves a free TCP port (`port`, if given) of the loopback interface until the ranks bind it.

    Rank 0 does once it has imported torch; until then the kernel assigns it to no other process.
    Raises: LaunchError: `port` is in use.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reserved.bind(("127.0.0.1", port or 0))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "it must be 0 to 65535"
            raise LaunchError(
                f"port {port} cannot be used: {reason}",
                where="--port",
                fix="give another one, or none to have one chosen",
            ) from None
        chosen = int(reserved.getsockname()[1])
        # Elsewhere, this socket would refuse the connections to the port.
        if sys.platform != "linux":
            reserved.close()
        yield chosen


def refuse_used_port(host: str, port: int) -> None:
    """Refuses a port at which a server could not listen. Raises: LaunchError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise LaunchError(
            f"port {port} of {host} cannot be used: {error.strerror}",
            where="--port",
            fix="give another one",
        ) from None


def listen_on_loopback(host: str, port: int) -> socket.socket | None:
    """Listens on the loopback interface; returns None where `host` is not of it. Raises: OSError.

    Other names than localhost are not resolved: a node's own may stand for 127.0.1.1 on that node
    alone.
    """
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        return None
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN)


def interface_addresses() -> list[tuple[str, str]]:
    """Returns every (interface, address) of this machine, loopback included, IPv4 before IPv6."""
    pairs = [
        (name, entry.address.partition("%")[0], entry.family)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
    ]
    wanted = (socket.AF_INET, socket.AF_INET6)
    return [(name, address) for family in wanted for name, address, its in pairs if its == family]


def usable_addresses() -> list[tuple[str, str]]:
    """Returns the addresses that other machines could reach: neither loopback nor link-local."""
    usable = []
    for name, address in interface_addresses():
        parsed = ipaddress.ip_address(address)
        is_local = parsed.is_loopback or parsed.is_link_local
        if not (is_local or parsed.is_unspecified or parsed.is_multicast):
            usable.append((name, address))
    return usable
