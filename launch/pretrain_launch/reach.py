"""Runs on every node: which addresses of the first one can be reached from here; a line of JSON for each.

python -m pretrain_launch.reach NONCE PORT ADDRESS ...

Short lines: srun cuts longer ones, of 1 KiB, into pieces, and those of several nodes come mixed.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pretrain.utils.process import guard_streams

CONNECT_S = 4.0
PATIENCE_S = 20.0


def try_address(address: str, port: int, nonce: str) -> str:
    """Returns empty if the one who listens at an address is the one we look for, else what happened instead."""
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


def reach(addresses: Sequence[str], port: int, nonce: str) -> dict[str, str]:
    """Tries all at once; returns what `try_address` does, by address."""
    with ThreadPoolExecutor(max_workers=max(1, len(addresses))) as pool:
        tried = [pool.submit(try_address, address, port, nonce) for address in addresses]
    return {address: one.result() for address, one in zip(addresses, tried, strict=True)}


def main() -> None:
    """Prints the lines."""
    guard_streams()  # the process that asked may have timed out
    nonce, port, *addresses = sys.argv[1:]
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    lines = [json.dumps({"node": node})]
    lines += [json.dumps({"node": node, "tried": pair}) for pair in reach(addresses, int(port), nonce).items()]
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
