"""A port that is kept for those who were told of it."""

import socket
import sys

import pytest

from pretrain.errors import LaunchError
from pretrain.utils.net import reserved_port


def test_a_port_in_use_is_refused_by_name():
    with reserved_port(None) as port:  # nobody else gets it while we are here
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", port))
            other.listen()
            message = f"--port: port {port} cannot be used: Address already in use; give another"
            with pytest.raises(LaunchError, match=message), reserved_port(port):
                raise AssertionError("it is in use")
        with reserved_port(port) as same, reserved_port(None) as any_port:
            assert same == port != any_port != 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port is chosen, and not kept")
def test_a_port_is_kept_for_the_rank_that_listens_there():
    with reserved_port(None) as port, socket.socket() as other, socket.socket() as rank:
        with pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", port))
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank.bind(("", port))
        rank.listen()
        socket.create_connection(("127.0.0.1", port)).close()


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_cannot_be_is_refused(port):
    message = f"port {port} cannot be used: it must be 0 to 65535"
    with pytest.raises(LaunchError, match=message), reserved_port(port):
        raise AssertionError("there is none")
