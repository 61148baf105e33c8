"""Whether this host can be found and can speak: its name, its addresses, a port of the loopback."""

import os
import socket
import threading
from contextlib import suppress
from ipaddress import ip_address

from pretrain.doctor.check import Check, Status
from pretrain.utils.interfaces import usable_addresses

RESOLVE_WITHIN_S = 3.0


def check_name(host: str, is_alone: bool) -> Check:
    """Sees that the name of this host stands for an address that other hosts can use.

    Args:
        host: The name.
        is_alone: No other host takes part, so that it does not matter much.
    """
    bad: Status = "warn" if is_alone else "fail"
    fix = f"have {host} in DNS or in every /etc/hosts, with the address of the network that the nodes share"
    found = resolve(host)
    if found is None:
        text = f"{host} is not looked up within {RESOLVE_WITHIN_S:.0f} s"
        return Check("hostname", bad, text, f"mend the name servers, or {fix}")
    if not found:
        return Check("hostname", bad, f"{host} does not resolve", fix)
    if all(ip_address(address.partition("%")[0]).is_loopback for address in found):
        text = f"{host} is {', '.join(found)}, which is this machine to everybody"
        return Check("hostname", "pass", text) if is_alone else Check("hostname", "warn", text, fix)
    return Check("hostname", "pass", f"{host} is {', '.join(found)}")


def resolve(host: str) -> list[str] | None:
    """Returns the addresses of a name, empty where it has none; None where nobody answers in time."""
    found: list[list[str]] = []

    def look() -> None:
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found.append(list(dict.fromkeys(str(info[4][0]) for info in infos)))
        except (OSError, UnicodeError):
            found.append([])

    thread = threading.Thread(target=look, daemon=True)  # the library's own timeout is a minute with two dead servers
    thread.start()
    thread.join(RESOLVE_WITHIN_S)
    return found[0] if found else None


def check_interfaces(is_alone: bool) -> Check:
    """Lists the addresses that other hosts may use."""
    found = usable_addresses()
    text = ", ".join(f"{name} {address}" for name, address in found)
    if not found and not is_alone:
        return Check("interfaces", "fail", "no address but the loopback's", "bring the network of the nodes up")
    asked = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if os.environ.get(name)]
    there = {name for name, _ in found} | {name for _, name in socket.if_nameindex()}
    for name in asked:
        wanted = os.environ[name].lstrip("^=").split(",")[0]
        if not os.environ[name].startswith("^") and not any(one.startswith(wanted) for one in there):
            fix = f"name one of {', '.join(sorted(there))}, or unset it"
            return Check("interfaces", "fail", f"{name}={os.environ[name]}, and there is no such interface", fix)
    return Check("interfaces", "pass", text or "the loopback only")


def check_loopback() -> Check:
    """Listens on a port of the loopback, and connects to it: ranks of one machine meet there."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with suppress(OSError), socket.socket(family) as server, socket.socket(family) as client:
            server.bind((address, 0))
            server.listen(1)
            client.settimeout(2.0)
            client.connect(server.getsockname()[:2])
            return Check("loopback", "pass", f"{address} answers")
    return Check("loopback", "fail", "no port can be bound and reached", "bring the interface lo up")
