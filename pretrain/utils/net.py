"""A TCP port on which nobody else listens before those that were told of it do."""

import contextlib
import ipaddress
import socket
import sys
from collections.abc import Iterator

import psutil

from pretrain.errors import LaunchError


@contextlib.contextmanager
def reserved_port(port: int | None) -> Iterator[int]:
    """Keeps a free port of the loopback interface, `port` itself if it is given, for the ranks that will meet there.

    Rank 0 listens there, by its number, once it has imported torch; until then the kernel gives it to nobody else who
    asks for any.

    Raises:
        LaunchError: `port` is in use.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(("127.0.0.1", port or 0))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "it must be 0 to 65535"
            raise LaunchError(
                f"port {port} cannot be used: {reason}",
                where="--port",
                fix="give another one, or none to have one chosen",
            ) from None
        chosen = int(held.getsockname()[1])
        if sys.platform != "linux":  # there, what comes to the port would be refused in the name of this socket
            held.close()
        yield chosen


# The addresses of this machine, as other machines may use them.


def interface_addresses() -> list[tuple[str, str]]:
    """Returns (interface, address) of each, the loopback's too, IPv4 before IPv6."""
    found = [
        (name, entry.address.partition("%")[0], entry.family)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
    ]
    wanted = (socket.AF_INET, socket.AF_INET6)
    return [(name, address) for family in wanted for name, address, its in found if its == family]


def usable_addresses() -> list[tuple[str, str]]:
    """Returns those that other machines could reach: not loopback, nor such as mean something on one link only."""
    return [(name, address) for name, address in interface_addresses() if _is_usable(address)]


def _is_usable(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified or parsed.is_multicast)
