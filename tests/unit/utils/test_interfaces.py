"""The addresses of this machine, and which of them others could use."""

import socket
from collections import namedtuple

import psutil

from pretrain.utils.net import interface_addresses, usable_addresses

Entry = namedtuple("Entry", ["family", "address"])


def test_the_loopback_is_an_interface_that_others_cannot_use():
    assert "127.0.0.1" in {address for _, address in interface_addresses()}
    assert all(not address.startswith(("127.", "fe80")) and address != "::1" for _, address in usable_addresses())


def test_every_address_of_an_interface_is_known_and_ipv4_comes_first(monkeypatch):
    known = {
        "lo": [Entry(socket.AF_INET, "127.0.0.1"), Entry(socket.AF_INET6, "::1")],
        "ib0": [
            Entry(psutil.AF_LINK, "00:16:3e:00:00:01"),
            Entry(socket.AF_INET6, "fe80::1%ib0"),
            Entry(socket.AF_INET6, "2001:db8::7"),
            Entry(socket.AF_INET, "10.0.0.7"),
            Entry(socket.AF_INET, "10.1.0.7"),
        ],
        "eth0": [Entry(socket.AF_INET, "169.254.3.4"), Entry(socket.AF_INET, "192.0.2.9")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    assert usable_addresses() == [
        ("ib0", "10.0.0.7"),
        ("ib0", "10.1.0.7"),
        ("eth0", "192.0.2.9"),
        ("ib0", "2001:db8::7"),
    ]
    assert ("ib0", "fe80::1") in interface_addresses()
