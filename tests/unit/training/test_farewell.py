"""The record and the lease after a process that ends at once."""

from types import SimpleNamespace

import pytest

from pretrain.errors import LockedError
from pretrain.run.folder import RunDir, begin_attempt
from pretrain.run.lease import Lease, refuse_if_owned
from pretrain.training.run import _say_farewell


def test_an_outcome_is_noted_and_the_lease_given_back(tmp_path):
    run = RunDir(tmp_path)
    claim = SimpleNamespace(folder=run, lease=Lease(run.lease))
    begin_attempt(run, "run", {})
    with pytest.raises(LockedError):
        refuse_if_owned(run.lease)
    _say_farewell(claim, 76, "rank 1 hangs")
    assert run.read_record()["attempts"][-1]["reason"] == "rank 1 hangs"
    refuse_if_owned(run.lease)  # raises LockedError while a process owns the run


def test_an_outcome_that_cannot_be_noted_does_not_keep_the_lease(tmp_path):
    run = RunDir(tmp_path)
    claim = SimpleNamespace(folder=run, lease=Lease(run.lease))
    run.record.write_text("{damaged")
    _say_farewell(claim, 76, "rank 1 hangs")
    refuse_if_owned(run.lease)
