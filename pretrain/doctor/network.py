"""Whether this host can be found and can speak: its name, its addresses, a port of the loopback."""

import array
import fcntl
import os
import socket
import struct
import threading
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from pretrain.doctor.check import Check, Status

RESOLVE_WITHIN_S = 3.0
_SIOCGIFCONF = 0x8912


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


def addresses() -> list[tuple[str, str]]:
    """Returns (interface, address) of this host, without the loopback and link-local ones. Empty where unknown."""
    found: list[tuple[str, str]] = []
    with suppress(OSError, AttributeError):
        found += _addresses_v4()
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            number, _, _, _, _, name = line.split()
            found.append((name, str(ip_address(bytes.fromhex(number)))))
    return [(name, text) for name, text in found if not _is_local(text)]


def _is_local(text: str) -> bool:
    address = ip_address(text)
    return address.is_loopback or address.is_link_local


def _addresses_v4() -> list[tuple[str, str]]:
    """Asks the kernel (SIOCGIFCONF; 40 bytes an interface on 64-bit Linux): the library has no such call."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        names = array.array("B", bytes(40 * 256))
        location, _ = names.buffer_info()
        request = struct.pack("iL", len(names), location)
        used, _ = struct.unpack("iL", fcntl.ioctl(asked.fileno(), _SIOCGIFCONF, request))
    content, found = names.tobytes()[:used], []
    for start in range(0, used, 40):
        name = content[start : start + 16].split(b"\0")[0].decode()
        found.append((name, socket.inet_ntoa(content[start + 20 : start + 24])))
    return found


def check_interfaces(is_alone: bool) -> Check:
    """Lists the addresses that other hosts may use."""
    found = addresses()
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
