"""Addresses of this machine, and ways from it to others."""

import contextlib
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from pretrain.errors import LaunchError
from pretrain.utils.net import interface_addresses, usable_addresses


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
    """Returns the interface that has an address of this machine; None where that is unknown."""
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


# Finds an address and a port of the first node that every node can reach, or says within a minute
# who cannot.
#
#     a free port, drawn by the job's number  ->  a listener on all addresses
#     ->  pretrain_launch.reach on every node, by srun  ->  the first address that all have reached
#
# A name says little: it may stand for 127.0.1.1, or for one network of several, or for none. So it
# is tried out.


PORTS = range(15_000, 32_000)

"""Below those that the kernel gives to connections by itself."""

TRIES = 64

LIMIT_S = 45.0


def ports_of(job: str, attempt: int) -> list[int]:
    """Returns the ports to try, in order: others for each job and each attempt, so that jobs of a node seldom meet."""
    return random.Random(f"{job}/{attempt}").sample(PORTS, TRIES)


def open_port(job: str, attempt: int) -> socket.socket:
    """Returns a listener on the first port that is free. Raises: LaunchError, where none is."""
    reason = ""
    for port in ports_of(job, attempt):
        try:
            return listen(port)
        except OSError as error:
            reason = error.strerror or str(error)
    raise LaunchError(f"none of {TRIES} ports is free: {reason}", where=socket.gethostname(), fix="see `ss -ltn`")


def choose_address(
    first: str, nodes: Sequence[str], port: int, addresses: Sequence[str], answers: Mapping[str, Mapping[str, str]]
) -> str:
    """Returns the first address that every node has reached. Pure.

    Args:
        first: Host name of the first node, which has the addresses.
        nodes: Nodes that must reach it.
        port: Port that was tried.
        addresses: Addresses in order of preference.
        answers: Error of each node at each address; empty text: reached.

    Raises:
        LaunchError: None was reached by all; names who cannot reach what, and why.
    """
    for address in addresses:
        if all(answers.get(node, {}).get(address, "silent") == "" for node in nodes):
            return address
    silent = [node for node in nodes if node not in answers]
    if silent:
        what = f"{', '.join(silent[:8])} gave no answer within {LIMIT_S:.0f} s"
    elif not addresses:
        what = f"{first} has no address that other nodes could reach"
    else:
        best = max(addresses, key=lambda one: sum(answers[node].get(one) == "" for node in nodes))
        failed = [(node, answers[node].get(best)) for node in nodes if answers[node].get(best)]
        shown = f"[{best}]:{port}" if ":" in best else f"{best}:{port}"
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        tried = f"; tried too: {', '.join(one for one in addresses if one != best)}" if len(addresses) > 1 else ""
        what = f"{failed[0][0]} cannot reach {first} ({shown}): {failed[0][1]}{others}{tried}"
    raise LaunchError(what, where="rendezvous", fix="name the network in the cluster's file (interface: ...)")


def find_meeting_point(
    job: str, attempt: int, first: str, nodes: Sequence[str], interface: str | None, step: Sequence[str]
) -> tuple[str, int]:
    """Returns address and port. Must run on the first node.

    Args:
        job: Number of the job: seeds the choice of the port.
        attempt: Number of this start.
        first: Host name of this node.
        nodes: All nodes, this one included.
        interface: Network interface to use; None: any.
        step: Arguments of srun, up to the program that runs once per node.

    Raises:
        LaunchError: No port is free, or no address is reached by all.
    """
    with open_port(job, attempt) as listener:
        port = int(listener.getsockname()[1])
        if len(nodes) == 1:
            return "127.0.0.1", port
        addresses, nonce = own_addresses(interface), secrets.token_hex(16)
        threading.Thread(target=_greet, args=(listener, nonce), daemon=True).start()
        answers = _ask_nodes([*step, sys.executable, "-m", "pretrain_launch.reach", nonce, str(port), *addresses])
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        return choose_address(first, nodes, port, addresses, answers), port


def _greet(listener: socket.socket, nonce: str) -> None:
    while True:
        try:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(f"{nonce}\n".encode())
        except ConnectionError:
            continue
        except OSError:
            return


def _ask_nodes(command: Sequence[str]) -> dict[str, dict[str, str]]:
    """Runs `pretrain_launch.reach` on every node; returns what each has said in time."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=os.environ, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate()
    answers: dict[str, dict[str, str]] = {}
    for line in output.splitlines():
        try:
            row = json.loads(line)
            answers.setdefault(str(row["node"]), {}).update([row["tried"]] if "tried" in row else [])
        except (ValueError, KeyError, TypeError):
            continue  # what a site prints at the beginning of a step
    return answers
