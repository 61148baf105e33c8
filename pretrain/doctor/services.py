"""Checks of the network, the data and wandb."""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlparse

from pretrain.config.data import DataConfig
from pretrain.config.tracking import TrackingConfig
from pretrain.doctor.check import Check, Status
from pretrain.errors import EXIT_DATA, PretrainError
from pretrain.utils.log import WANDB_HOST
from pretrain.utils.net import usable_addresses

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
        return Check("hostname", bad, text, f"fix the name servers, or {fix}")
    if not found:
        return Check("hostname", bad, f"{host} does not resolve", fix)
    if all(ip_address(address.partition("%")[0]).is_loopback for address in found):
        text = f"{host} is {', '.join(found)}, which is this machine to everybody"
        return Check("hostname", "pass", text) if is_alone else Check("hostname", "warn", text, fix)
    return Check("hostname", "pass", f"{host} is {', '.join(found)}")


def resolve(host: str) -> list[str] | None:
    """Returns the addresses of a name, empty where it has none; None where no server answers in time."""
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


# What a run takes from outside of its machine: data, and Weights & Biases.


REACH_WITHIN_S = 5.0

_FIRST_BYTES = 4096


def check_data(data: DataConfig, *, is_quick: bool) -> list[Check]:
    """Sees that every source is there, whole by its index, and can be read.

    Args:
        data: Data section of the config.
        is_quick: Leaves out what is on a server.
    """
    found = []
    for path in data.paths:
        try:
            detail = _look_at_server(data, path, is_quick) if "://" in path else _look_at_folder(Path(path))
            found.append(Check("data", "pass", f"{path}: {detail}"))
        except PretrainError as error:
            found.append(Check("data", "fail", f"{error.where or path}: {error.what}", error.fix, EXIT_DATA))
        except OSError as error:
            text = f"{path}: {error.strerror or error}"
            found.append(Check("data", "fail", text, "correct data.path, mount it, or fix permissions", EXIT_DATA))
    return found


def _look_at_folder(folder: Path) -> str:
    """Checks index and sizes, and reads the first bytes of each shard. Raises: DataError, OSError."""
    from pretrain.shards.index import check_shards, load_index

    index = load_index(folder)
    check_shards(folder, index)
    shards = [shard for split in index.splits.values() for shard in split.shards]
    for shard in shards[:8]:
        with (folder / shard.name).open("rb") as file:
            file.read(_FIRST_BYTES)
    tokens = sum(split.num_tokens for split in index.splits.values())
    return f"{tokens:,} tokens in {len(shards)} shards"


def _look_at_server(data: DataConfig, path: str, is_quick: bool) -> str:
    if is_quick:
        return "on a server: not looked at with --quick"
    from pretrain.data.stream import open_stores

    one = data.model_copy(update={"path": path, "mixture": []})
    stores = open_stores(one, lambda: False)
    try:
        for store in stores:
            store.check()
    finally:
        for store in stores:
            store.close()
    return "index and shards are there"


def check_wandb(tracking: TrackingConfig | None, *, is_quick: bool) -> Check:
    """Says in what mode Weights & Biases will run, and whether its server answers; it never stops a run.

    Args:
        tracking: Tracking section of the config; None without a config.
        is_quick: Leaves the server out.
    """
    from pretrain.tracking.wandb_tracker import choose_mode

    with _quiet("pretrain.tracking.wandb_tracker"):
        mode = choose_mode(tracking.wandb if tracking else "auto")
    if mode == "off":
        return Check("wandb", "pass", "off; metrics.jsonl has every row")
    if mode == "offline":
        detail = "offline: `wandb sync` sends it later"
        if tracking is not None and tracking.wandb == "online":
            return Check("wandb", "warn", f"no key, so {detail}", "set WANDB_API_KEY, or run `wandb login`")
        return Check("wandb", "pass", detail)
    address = urlparse(os.environ.get("WANDB_BASE_URL", "")) if os.environ.get("WANDB_BASE_URL") else None
    host = (address and address.hostname) or WANDB_HOST
    port = (address and address.port) or (80 if address and address.scheme == "http" else 443)
    if is_quick:
        return Check("wandb", "pass", f"there is a key for {host}")
    try:
        socket.create_connection((host, port), timeout=REACH_WITHIN_S).close()
    except OSError as error:
        fix = "set WANDB_MODE=offline on nodes without a way out, and `wandb sync` later"
        return Check("wandb", "warn", f"there is a key, but {host}:{port} does not answer: {error}", fix)
    return Check("wandb", "pass", f"there is a key, and {host}:{port} answers")


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was
