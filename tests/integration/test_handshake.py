"""Ranks that do not run the same packages are told so before they train (fault 28), each with host and package."""

import re
import socket

import numpy
import pytest

from tests.helpers.forked import RankServer


@pytest.fixture(scope="module")
def ranks():
    with RankServer() as server:
        yield server


def test_a_rank_with_another_package_is_named_by_every_rank(ranks):
    """The package is one that Python finds on one rank only; real ranks over gloo. About 5 s, most of them imports."""
    said = ranks("tests.integration.handshake_workers:agree", 2, {"packages": {"numpy": "1.0.999"}})
    for line, code in said:
        assert code == "69"
        here = re.escape(socket.gethostname())
        assert re.search(rf"numpy is {re.escape(numpy.__version__)} on {here}, 1\.0\.999 on n2", line)
        assert line.endswith("install the same packages on every node, or one environment on a shared file system")


def test_a_rank_with_another_wandb_trains(ranks):
    assert ranks("tests.integration.handshake_workers:agree", 2, {"packages": {"wandb": "0.0.1"}}) == [[], []]
