"""Checks of the network, the data and trackers."""

import logging
import os
import socket
import threading
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Literal
from urllib.parse import urlparse

from pretrain.config.data import DataConfig
from pretrain.config.tracking import TrackingConfig
from pretrain.doctor.check import Check, Status
from pretrain.errors import EXIT_DATA, LaunchError, PretrainError
from pretrain.utils.log import WANDB_HOST
from pretrain.utils.net import usable_addresses

RESOLVE_WITHIN_S = 3.0
REACH_WITHIN_S = 5.0


def check_name(host: str, is_alone: bool) -> Check:
    """Checks that the name of this host stands for an address that other hosts can use."""
    bad: Status = "warn" if is_alone else "fail"
    fix = f"have {host} in DNS or in every /etc/hosts, with its address in the nodes' network"
    hosts = resolve(host)
    if hosts is None:
        text = f"{host} is not looked up within {RESOLVE_WITHIN_S:.0f} s"
        return Check("hostname", bad, text, f"fix the name servers, or {fix}")
    if not hosts:
        return Check("hostname", bad, f"{host} does not resolve", fix)
    text = f"{host} is {', '.join(hosts)}"
    if not is_alone and all(ip_address(address.partition("%")[0]).is_loopback for address in hosts):
        return Check("hostname", "warn", f"{text}: other nodes cannot reach a loopback", fix)
    return Check("hostname", "pass", text)


def resolve(host: str) -> list[str] | None:
    """Returns the addresses of a name, empty if it has none; None if no server answers in time."""
    addresses: list[list[str]] = []

    def look() -> None:
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            addresses.append(list(dict.fromkeys(str(info[4][0]) for info in infos)))
        except (OSError, UnicodeError):
            addresses.append([])

    # The timeout of the library is a minute with two dead servers.
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(RESOLVE_WITHIN_S)
    return addresses[0] if addresses else None


def check_interfaces(is_alone: bool) -> Check:
    """Lists addresses for other hosts, and checks the interfaces that variables name."""
    usable = usable_addresses()
    if not usable and not is_alone:
        text = "no address but the loopback's"
        return Check("interfaces", "fail", text, "bring the network of the nodes up")
    there = {name for name, _ in usable} | {name for _, name in socket.if_nameindex()}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(name, "")
        wanted = value.lstrip("=").split(",")[0]
        # `^` excludes interfaces.
        if value and not value.startswith("^") and not any(one.startswith(wanted) for one in there):
            fix = f"name one of {', '.join(sorted(there))}, or unset it"
            return Check("interfaces", "fail", f"{name}={value}, and there is no such interface", fix)
    text = ", ".join(f"{name} {address}" for name, address in usable)
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


def check_data(data: DataConfig, *, is_quick: bool) -> list[Check]:
    """Checks that every source exists, is complete and readable; `is_quick` skips servers."""
    checks = []
    for path in data.paths:
        try:
            detail = _look_at_server(data, path, is_quick) if "://" in path else _look_at_folder(Path(path))
            checks.append(Check("data", "pass", f"{path}: {detail}"))
        except PretrainError as error:
            text = f"{error.where or path}: {error.what}"
            checks.append(Check("data", "fail", text, error.fix, EXIT_DATA))
        except OSError as error:
            text = f"{path}: {error.strerror or error}"
            fix = "correct data.path, mount it, or fix permissions"
            checks.append(Check("data", "fail", text, fix, EXIT_DATA))
    return checks


def _look_at_folder(folder: Path) -> str:
    """Checks index and sizes, and reads the first bytes of some shards."""
    from pretrain.shards.index import check_shards, load_index

    index = load_index(folder)
    check_shards(folder, index)
    shards = [shard for split in index.splits.values() for shard in split.shards]
    for shard in shards[:8]:
        with (folder / shard.name).open("rb") as file:
            file.read(4096)
    tokens = sum(split.num_tokens for split in index.splits.values())
    return f"{tokens:,} tokens in {len(shards)} shards"


def _look_at_server(data: DataConfig, path: str, is_quick: bool) -> str:
    """Checks index and shards on a server. Raises: DataError."""
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


def check_wandb(wanted: Literal["auto", "online", "offline", "off"], *, is_quick: bool) -> Check:
    """Names the mode of Weights & Biases, and tries its server unless `is_quick`."""
    from pretrain.tracking.wandb_tracker import choose_mode

    logger = logging.getLogger("pretrain.tracking.wandb_tracker")
    was_disabled = logger.disabled
    logger.disabled = True  # the check says the same
    try:
        mode = choose_mode(wanted)
    finally:
        logger.disabled = was_disabled
    if mode == "off":
        return Check("wandb", "pass", "off; metrics.jsonl has every row")
    if mode == "offline":
        detail = "offline: `wandb sync` sends it later"
        if wanted == "online":
            fix = "set WANDB_API_KEY, or run `wandb login`"
            return Check("wandb", "warn", f"no key, so {detail}", fix)
        return Check("wandb", "pass", detail)
    address = urlparse(os.environ.get("WANDB_BASE_URL") or f"https://{WANDB_HOST}")
    host = address.hostname or WANDB_HOST
    port = address.port or (80 if address.scheme == "http" else 443)
    if is_quick:
        return Check("wandb", "pass", f"there is a key for {host}")
    try:
        socket.create_connection((host, port), timeout=REACH_WITHIN_S).close()
    except OSError as error:
        fix = "set WANDB_MODE=offline on nodes without internet access, and `wandb sync` later"
        text = f"there is a key, but {host}:{port} does not answer: {error}"
        return Check("wandb", "warn", text, fix)
    return Check("wandb", "pass", f"there is a key, and {host}:{port} answers")


def check_tracker_packages(tracking: TrackingConfig) -> Check | None:
    """Looks for the packages of the other trackers; None: the config has none that needs one."""
    from pretrain.tracking.run_output import check_trackers

    try:
        used = check_trackers(tracking)
    except LaunchError as error:
        return Check("trackers", "fail", error.what, error.fix)
    return Check("trackers", "pass", f"installed: {', '.join(used)}") if used else None
