"""A process's place in its job, and collectives in a world of one. Those of several ranks: tests/integration."""

import ipaddress
import os
import socket
import subprocess
import sys

import psutil
import pytest
import torch
import torch.distributed as td

from pretrain import dist
from pretrain.dist import World, ranks_of_node, read_world
from pretrain.errors import ConfigError
from pretrain.utils.net import reserved_port

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_started_alone_a_process_is_a_world_of_one_that_others_understand():
    assert read_world() == World(0, 1, 0)
    assert {name: os.environ[name] for name in NAMES[:5]} == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    assert 1024 < int(os.environ["MASTER_PORT"]) < 65536
    assert read_world() == World(0, 1, 0)


def test_the_ranks_of_a_node_are_those_that_the_launcher_says_or_all(monkeypatch):
    assert ranks_of_node(World(3, 8, 1)) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ranks_of_node(World(3, 8, 1)) == 4


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, World(3, 8, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, World(3, 8, 3)),
    ],
)
def test_a_launchers_environment_is_read(monkeypatch, environment, world):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **environment}.items():
        monkeypatch.setenv(name, value)
    assert read_world() == world
    assert world.is_main == (world.rank == 0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "incomplete: 'WORLD_SIZE'; start with `pretrain launch` or torchrun"),
        ({"WORLD_SIZE": "2"}, "incomplete: 'RANK'"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "incomplete: invalid literal"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": ""}, "incomplete: invalid literal"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": ""},
            "incomplete: no MASTER_PORT; start with `pretrain launch`",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not within WORLD_SIZE=2; correct the launcher's environment"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 is not within WORLD_SIZE=2"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(monkeypatch, environment, message):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        read_world()


def listening_at(port: int) -> list[str]:
    """Returns the addresses at which this process listens on a port."""
    found = psutil.Process().net_connections("tcp")
    return [one.laddr.ip for one in found if (one.status, one.laddr.port) == (psutil.CONN_LISTEN, port)]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_store_of_ranks_of_one_machine_is_not_on_the_network(monkeypatch, address):
    with reserved_port(None) as port:
        monkeypatch.setenv("MASTER_ADDR", address)
        monkeypatch.setenv("MASTER_PORT", str(port))
        with dist.loopback_store(World(0, 1, 0)):
            td.init_process_group("gloo", rank=0, world_size=1)
    try:
        td.TCPStore(address, port, is_master=False).set("met", "yes")
        assert [ipaddress.ip_address(ip).is_loopback for ip in listening_at(port)] == [True]
    finally:
        td.destroy_process_group()


def test_a_store_that_other_machines_need_is_left_to_torch(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", socket.gethostname())  # which may stand for 127.0.1.1
    with reserved_port(None) as port:
        monkeypatch.setenv("MASTER_PORT", str(port))
        with dist.loopback_store(World(0, 1, 0)):
            assert listening_at(port) == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port is chosen, and not kept")
def test_a_world_of_one_keeps_its_port():
    read_world()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))


def test_collectives_of_one_return_what_they_were_given():
    assert not dist.is_distributed()
    values = torch.tensor([1.0, 2.0])
    assert dist.all_reduce_sum(values).tolist() == [1.0, 2.0]
    assert dist.gather_objects({"a": [1, None]}) == [{"a": [1, None]}]
    assert dist.broadcast_object("x") == "x"
    assert dist.start_all_reduce_sum(values)().tolist() == [1.0, 2.0]
    assert dist.start_copy_to_host(values)() is values


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_sums_are_read_without_waiting_for_what_is_queued_after_them():
    values = torch.tensor([1.0, 2.0], device="cuda")
    waits = [dist.start_all_reduce_sum(values), dist.start_copy_to_host(values)]
    torch.cuda._sleep(10**10)  # cycles: some seconds, of which nothing is waited for
    assert [wait().tolist() for wait in waits] == [[1.0, 2.0], [1.0, 2.0]]
    assert not torch.cuda.current_stream().query()


def test_objects_travel_as_json_alone():
    with pytest.raises(TypeError, match="not JSON serializable"):
        dist.gather_objects(object())
    assert dist.gather_objects((1, 2)) == [[1, 2]]


def test_a_process_leaves_at_once_with_its_code_and_its_output(tmp_path):
    program = (
        "import atexit, logging, sys\n"
        "from pretrain.dist import leave\n"
        f"logging.basicConfig(filename={str(tmp_path / 'log')!r})\n"
        "atexit.register(lambda: print('too late'))\n"
        "logging.warning('logged')\n"
        "sys.stdout.write('printed')\n"
        "leave(75)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (75, "printed")
    assert "logged" in (tmp_path / "log").read_text()
