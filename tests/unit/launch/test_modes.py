"""What starts the ranks of a node, where they meet, and what is known of how they ended."""

import json
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from pretrain.config.engine import JOB_GPUS
from pretrain.errors import EXIT_HANG, ConfigError, HangError, LaunchError
from pretrain_launch import node
from pretrain_launch.exits import note_exit, noted_ranks, read_ending
from pretrain_launch.job_start import find_spec, read_start
from pretrain_launch.modes import Meeting, hostfile_text, launcher_command, rank_variables
from pretrain_launch.node import node_environment, run_node
from pretrain_launch.rendezvous import (
    choose_address,
    find_meeting_point,
    interface_of,
    open_port,
    own_addresses,
    ports_of,
    route_to,
    try_address,
)
from tests.unit.launch.test_submit import spec

MEETING = Meeting("198.18.0.1", 20_000, ("n1", "n2"), 4, "7-0-0")
SIX = Meeting("fd00::1", 20_000, ("n1", "n2"), 4, "7-0-0")


def test_torchrun_is_told_who_keeps_the_store_and_never_restarts():
    first = launcher_command("torchrun", MEETING, 0, "198.18.0.1", "hosts")
    second = launcher_command("torchrun", MEETING, 1, "198.18.0.2", "hosts")
    assert first[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert {"--nnodes=2", "--nproc-per-node=4", "--max-restarts=0", "--rdzv-backend=c10d", "--rdzv-id=7-0-0"} <= set(
        first
    )
    assert any(option.startswith("--rdzv-conf=is_host=1,") for option in first)
    assert any(option.startswith("--rdzv-conf=is_host=0,") for option in second)
    assert "--local-addr=198.18.0.2" in second
    assert "--rdzv-endpoint=198.18.0.1:20000" in first
    assert "--rdzv-endpoint=[fd00::1]:20000" in launcher_command("torchrun", SIX, 0, "fd00::1", "hosts")


def test_accelerate_and_deepspeed_start_their_own_node_only():
    accelerate = launcher_command("accelerate", MEETING, 1, "x", "hosts")
    assert {"--num_machines=2", "--machine_rank=1", "--num_processes=8", "--main_process_port=20000"} <= set(accelerate)
    deepspeed = launcher_command("deepspeed", MEETING, 1, "x", "hosts")
    assert {"--hostfile=hosts", "--no_ssh", "--node_rank=1", "--master_addr=198.18.0.1"} <= set(deepspeed)
    assert accelerate[-1] == deepspeed[-1] == "--module"
    assert hostfile_text(MEETING) == "n1 slots=4\nn2 slots=4\n"


def test_ranks_started_by_slurm_have_the_variables_of_torchrun():
    assert rank_variables(MEETING, 1, 2) == {
        "RANK": "6", "LOCAL_RANK": "2", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "198.18.0.1", "MASTER_PORT": "20000",
    }  # fmt: skip


def test_what_the_user_has_set_stays():
    one = spec(ranks_per_node=1024, gpus_per_node=0)
    found = node_environment({"NCCL_SOCKET_IFNAME": "mine"}, one, "eth0")
    assert found == {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "mine"}
    assert "GLOO_SOCKET_IFNAME" not in node_environment({}, one, None)


def test_ranks_are_given_the_number_of_gpus_of_their_job():
    assert node_environment({}, spec(gpus_per_node=4), None)[JOB_GPUS] == "4"


def test_a_port_in_use_is_passed_over():
    job = str(os.getpid())  # the same tests may be under way beside us, and take the ports of another number
    taken = open_port(job, 0)
    with taken, open_port(job, 0) as other:
        assert taken.getsockname()[1] == ports_of(job, 0)[0]
        assert other.getsockname()[1] == ports_of(job, 0)[1]


def test_jobs_and_attempts_draw_different_ports():
    assert ports_of("7", 0) == ports_of("7", 0)
    assert len({ports_of(job, attempt)[0] for job in "123456" for attempt in range(3)}) == 18


def test_the_first_address_that_all_have_reached_is_taken():
    answers = {"n1": {"a": "", "b": "", "c": ""}, "n2": {"a": "timed out", "b": "", "c": ""}}
    assert choose_address(["n1", "n2"], 20_000, ["a", "b", "c"], answers) == "b"


@pytest.mark.parametrize(
    ("addresses", "answers", "message"),
    [
        (
            ["198.18.0.1"],
            {"n1": {"198.18.0.1": ""}, "n2": {"198.18.0.1": "timed out"}},
            r"n2 cannot reach n1 \(198.18.0.1:20000\): timed out; name the network in the cluster's file",
        ),
        (
            ["fd00::1", "10.0.0.1"],
            {"n1": {"fd00::1": "", "10.0.0.1": ""}, "n2": {"fd00::1": "No route", "10.0.0.1": "No route"}},
            r"n2 cannot reach n1 \(\[fd00::1\]:20000\): No route; tried too: 10.0.0.1",
        ),
        (["10.0.0.1"], {"n1": {"10.0.0.1": ""}}, "n2 gave no answer within 45 s"),
        ([], {"n1": {}, "n2": {}}, "n1 has no address that other nodes could reach"),
    ],
)
def test_who_cannot_reach_what_is_named(addresses, answers, message):
    with pytest.raises(LaunchError, match=message):
        choose_address(["n1", "n2"], 20_000, addresses, answers)


def test_one_node_meets_on_the_loopback():
    address, port = find_meeting_point("7", 0, ["n1"], None, ["srun"])
    assert (address, port in ports_of("7", 0)) == ("127.0.0.1", True)


def test_nodes_try_every_address_and_know_the_one_they_look_for():
    """The program that a node runs, without srun: `env` starts it."""
    step = ["env", "SLURMD_NODENAME=n1"]
    address, _ = find_meeting_point("8", 0, ["n1", "n1"], None, step)
    assert address in own_addresses()


def test_a_node_on_which_slurm_starts_no_step_is_a_lost_one_that_a_restart_replaces():
    """The step fails at once: it is no network without an answer, which ends the job."""
    with pytest.raises(
        HangError, match="rendezvous: Slurm could not start a step on n1, n2; see `scontrol show node n1`"
    ) as raised:
        find_meeting_point("8", 0, ["n1", "n2"], None, ["false"])
    assert raised.value.exit_code == EXIT_HANG


def test_a_stranger_at_the_port_is_not_taken_for_the_first_node():
    with open_port("9", 0) as listener:

        def answer() -> None:
            with suppress(OSError):  # it is shut down
                while True:
                    connection, _ = listener.accept()
                    connection.sendall(b"HTTP/1.1 400\n")
                    connection.close()

        threading.Thread(target=answer, daemon=True).start()
        assert try_address("127.0.0.1", listener.getsockname()[1], "nonce") == "another program answers"
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread


def test_addresses_of_this_machine_have_interfaces():
    for address in own_addresses():
        assert interface_of(address) in {name for _, name in socket.if_nameindex()}
        assert own_addresses(interface_of(address))
        assert route_to(address, 20_000) is not None
    assert "127.0.0.1" not in own_addresses()
    assert own_addresses("nowhere") == []


def end_rank(folder: Path, rank: int, host: str, code: int, said: str) -> None:
    note_exit(folder, "rank", rank, rank=rank, host=host, code=code, said=said)


def test_how_ranks_ended_is_read_from_their_notes(tmp_path):
    assert read_ending(tmp_path, 143).reason == "the ranks ended without a word (srun: exit code 143)"
    note_exit(tmp_path, "node", 1, host="n2", said="torchrun ended with exit code 1 before its ranks")
    ending = read_ending(tmp_path, 1)
    assert (ending.code, ending.ranks_began) == (69, False)
    assert ending.reason == "on n2: torchrun ended with exit code 1 before its ranks"
    end_rank(tmp_path, 0, "n1", 76, "")
    end_rank(tmp_path, 1, "n2", -9, "")
    assert noted_ranks(tmp_path) == {0: 76, 1: -9}
    ending = read_ending(tmp_path, 1)
    assert (ending.code, ending.ranks_began) == (137, True)
    assert ending.reason.startswith("rank 1 on n2 was killed by SIGKILL")
    assert sorted(json.loads((tmp_path / "rank-00001.json").read_text())) == ["code", "host", "rank", "said"]


def test_ranks_that_were_stopped_or_done_end_the_start_so(tmp_path):
    end_rank(tmp_path / "stopped", 0, "n1", 75, "")
    end_rank(tmp_path / "stopped", 1, "n2", 75, "")
    assert read_ending(tmp_path / "stopped", 0).code == 75
    end_rank(tmp_path / "done", 0, "n1", 0, "")
    assert read_ending(tmp_path / "done", 0).code == 0
    end_rank(tmp_path / "bad", 0, "n1", 76, "")
    end_rank(tmp_path / "bad", 1, "n2", 65, "a shard is damaged")
    assert (read_ending(tmp_path / "bad", 1).code, read_ending(tmp_path / "bad", 1).reason) == (
        65,
        "a shard is damaged",
    )


def test_a_rank_that_ended_well_does_not_hide_that_its_step_failed(tmp_path):
    end_rank(tmp_path, 0, "n1", 0, "")
    assert read_ending(tmp_path, 137).code == 137


@pytest.mark.parametrize(
    ("ended", "code"), [({1: -9}, 137), ({0: 76, 1: -9}, 137), ({0: 76, 1: 65}, 65), ({}, 69), ({0: 75}, 75)]
)
def test_a_task_whose_launcher_failed_ends_as_the_rank_that_caused_it(tmp_path, monkeypatch, ended, code):
    """Srun prints that code; 69 is that of a launcher without ranks."""
    for rank, end in ended.items():
        end_rank(tmp_path / "exits", rank, "n1", end, "")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(node, "launcher_command", lambda *_: [sys.executable, "-c", "raise SystemExit(1)"])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        meeting = Meeting("127.0.0.1", 20_000, ("n1",), 8, "7-0-0")
        assert run_node(spec(run=str(tmp_path / "run")), meeting, tmp_path / "exits") == code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_the_spec_of_an_element_of_an_array_is_its_own(tmp_path):
    target = tmp_path / "array.json"
    target.write_text(json.dumps({"specs": ["/a", "/b"]}))
    assert find_spec(target, {}) == target
    assert str(find_spec(target, {"SLURM_ARRAY_TASK_ID": "1"})) == "/b"
    with pytest.raises(ConfigError, match="lists no element 2; submit the array again"):
        find_spec(target, {"SLURM_ARRAY_TASK_ID": "2"})


def test_outside_of_a_job_there_is_nothing_to_drive():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    with pytest.raises(LaunchError, match="not a Slurm job; submit it with `pretrain launch slurm`"):
        read_start(environment)
