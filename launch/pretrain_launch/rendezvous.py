"""Rendezvous: an address and a port of the first node that every node can reach, or an error.

    a free port, drawn by the job's number  ->  a listener on all addresses
    ->  `python -m pretrain_launch.rendezvous NONCE PORT ADDRESS ...` on every node, by srun
    ->  the first address that all have reached

Addresses are tried, as a name may stand for 127.0.1.1, or for one network of several.
"""

import contextlib
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from pretrain.errors import HangError, LaunchError
from pretrain.utils.net import interface_addresses, usable_addresses
from pretrain.utils.process import guard_streams
from pretrain.utils.safe_read import parse_json
from pretrain_launch.modes import format_endpoint

PORTS = range(15_000, 32_000)  # below those that the kernel assigns to connections
TRIES = 64
LIMIT_S = 45.0
CONNECT_S = 4.0
PATIENCE_S = 20.0


def own_addresses(interface: str | None = None) -> list[str]:
    """Returns addresses for other nodes, first the ones of the host name."""
    usable = usable_addresses()
    if interface is not None:
        return [address for name, address in usable if name == interface]
    named: list[str] = []
    with contextlib.suppress(OSError):
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        named = [str(entry[4][0]) for entry in entries]
    numbers = [address for _, address in usable]
    # A hosts file may name an address that this machine does not have.
    return list(dict.fromkeys([*(address for address in named if address in numbers), *numbers]))


def interface_of(address: str) -> str | None:
    """Returns the interface that has an address of this machine; None if unknown."""
    return next((name for name, number in interface_addresses() if number == address), None)


def route_to(address: str, port: int) -> str | None:
    """Returns the address of this machine from which it reaches another; None without a route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # sends nothing
        return str(probe.getsockname()[0])
    return None


def _listen(port: int) -> socket.socket:
    """Listens on all addresses, IPv4 and IPv6. Raises: OSError if the port is in use."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
    return socket.create_server(("", port), backlog=512)


def ports_of(job: str, attempt: int) -> list[int]:
    """Returns ports to try, others for each job and attempt, as jobs may share a node."""
    return random.Random(f"{job}/{attempt}").sample(PORTS, TRIES)


def open_port(job: str, attempt: int) -> socket.socket:
    """Returns a listener on the first port that is free. Raises: LaunchError if none is."""
    reason = ""
    for port in ports_of(job, attempt):
        try:
            return _listen(port)
        except OSError as error:
            reason = error.strerror or str(error)
    raise LaunchError(
        f"none of {TRIES} ports is free: {reason}",
        where=socket.gethostname(),
        fix="see `ss -ltn`",
    )


def choose_address(
    nodes: Sequence[str], port: int, addresses: Sequence[str], answers: Mapping[str, Mapping[str, str]]
) -> str:
    """Returns the first address of the first node that all nodes have reached. Raises: LaunchError."""
    for address in addresses:
        if all(answers.get(node, {}).get(address, "silent") == "" for node in nodes):
            return address
    silent = [node for node in nodes if node not in answers]
    if silent:
        text = f"{', '.join(silent[:8])} gave no answer within {LIMIT_S:.0f} s"
    elif not addresses:
        text = f"{nodes[0]} has no address that other nodes could reach"
    else:
        best = max(addresses, key=lambda one: sum(answers[node].get(one) == "" for node in nodes))
        failed = [(node, answers[node].get(best)) for node in nodes if answers[node].get(best)]
        node, error = failed[0]
        text = f"{node} cannot reach {nodes[0]} ({format_endpoint(best, port)}): {error}"
        text += f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        if len(addresses) > 1:
            text += f"; tried too: {', '.join(one for one in addresses if one != best)}"
    raise LaunchError(
        text,
        where="rendezvous",
        fix="name the network in the cluster's file (interface: ...)",
    )


def find_meeting_point(
    job: str, attempt: int, nodes: Sequence[str], interface: str | None, step: Sequence[str]
) -> tuple[str, int]:
    """Returns address and port of the first node, which is this one.

    `step` is srun, up to the program that runs once per node; an `interface` of None means any.

    Raises:
        LaunchError: No address is reached by all nodes.
        HangError: Slurm cannot start the step on all of them: a node is lost that it still counts on.
    """
    with open_port(job, attempt) as listener:
        port = int(listener.getsockname()[1])
        if len(nodes) == 1:
            return "127.0.0.1", port
        addresses = own_addresses(interface)
        nonce = secrets.token_hex(16)
        threading.Thread(target=_greet, args=(listener, nonce), daemon=True).start()
        program = [sys.executable, "-m", "pretrain_launch.rendezvous", nonce, str(port)]
        answers, code = _ask_nodes([*step, *program, *addresses])
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        silent = [node for node in nodes if node not in answers]
        if code and silent:
            text = f"Slurm could not start a step on {', '.join(silent[:8])}"
            raise HangError(text, where="rendezvous", fix=f"see `scontrol show node {silent[0]}`")
        return choose_address(nodes, port, addresses, answers), port


def _greet(listener: socket.socket, nonce: str) -> None:
    """Sends the nonce to every connection, until the listener is shut down."""
    while True:
        try:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(f"{nonce}\n".encode())
        except ConnectionError:
            continue
        except OSError:
            return


def _ask_nodes(command: Sequence[str]) -> tuple[dict[str, dict[str, str]], int]:
    """Runs this module on every node; returns answers in time, and the code of srun (0: late)."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=os.environ, start_new_session=True
    )
    code = 0
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate()
    answers: dict[str, dict[str, str]] = {}
    for line in output.splitlines():
        try:
            row = parse_json(line)
            tried = [row["tried"]] if "tried" in row else []
            answers.setdefault(str(row["node"]), {}).update(tried)
        except (ValueError, KeyError, TypeError):
            continue  # a message of the site at the beginning of a step
    return answers, code


def try_address(address: str, port: int, nonce: str) -> str:
    """Returns an empty text if the first node listens at an address, else the error."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
                connection.settimeout(CONNECT_S)
                answer = connection.makefile("r").readline().strip()
            return "" if answer == nonce else "another program answers"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() + CONNECT_S > deadline or "unreachable" in reason.lower():
            return reason
        time.sleep(0.5)


def main() -> None:
    """Tries all addresses from this node at once; prints a line of JSON for each."""
    guard_streams()  # the process that asked may have timed out
    nonce, port, *addresses = sys.argv[1:]
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    # Short lines: srun cuts those of more than 1 KiB, and pieces of several nodes come mixed.
    print(json.dumps({"node": node}), flush=True)
    with ThreadPoolExecutor(max_workers=max(1, len(addresses))) as pool:
        errors = pool.map(lambda address: try_address(address, int(port), nonce), addresses)
        for address, error in zip(addresses, errors, strict=True):
            print(json.dumps({"node": node, "tried": [address, error]}), flush=True)


if __name__ == "__main__":
    main()
