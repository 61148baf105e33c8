"""What is run for a rank, as pure functions."""

import os
import sys

from pretrain_launch.local import rank_command, rank_environment


def test_a_rank_runs_train_with_the_same_python():
    command = rank_command("a b.yaml", ["run.name=x; rm -rf y", "optim.lr=1"])
    assert command == [sys.executable, "-m", "pretrain", "train", "a b.yaml", "run.name=x; rm -rf y", "optim.lr=1"]


def test_a_rank_has_the_variables_of_torchrun():
    environment = rank_environment({"PATH": "p", "RANK": "9"}, 1, 4, 29500)
    assert environment == {
        "OMP_NUM_THREADS": str(max(1, os.cpu_count() // 4)),
        "PYTHONFAULTHANDLER": "1",
        "PATH": "p",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def test_a_number_of_threads_that_the_user_chose_stays():
    assert rank_environment({"OMP_NUM_THREADS": "7"}, 0, 2, 1, threads=3)["OMP_NUM_THREADS"] == "7"
    assert rank_environment({}, 0, 2, 1, threads=3)["OMP_NUM_THREADS"] == "3"
    assert rank_environment({}, 0, 10**6, 1)["OMP_NUM_THREADS"] == "1"
