"""The addresses of this machine, as other machines may use them."""

import ipaddress
import socket

import psutil


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
