"""The line a user sees, and the exit code of each error."""

import errno
import inspect
import re

import numpy as np
import pytest
import torch

from pretrain import errors
from pretrain.errors import OutOfMemoryError, PretrainError, disk_fix

CODES = {
    "ConfigError": 64,
    "DataError": 65,
    "CheckpointError": 66,
    "LaunchError": 69,
    "LockedError": 73,
    "DiskError": 74,
    "HangError": 76,
    "DivergedError": 77,
    "UnreadError": 141,
    "PretrainError": 70,
}


def test_every_class_has_its_documented_exit_code():
    classes = {name: cls.exit_code for name, cls in inspect.getmembers(errors, inspect.isclass)}
    assert {name: code for name, code in classes.items() if name in CODES} == CODES
    assert all(issubclass(getattr(errors, name), PretrainError) for name in classes)


def test_exit_codes_are_distinct():
    codes = [value for name, value in vars(errors).items() if name.startswith("EXIT_")]
    assert len(codes) == len(set(codes)) == 12


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2**45),
        lambda: np.zeros(2**50),
        lambda: bytearray(2**50),
    ],
)
def test_memory_that_is_too_small_is_told_in_a_line(allocate):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    line = OutOfMemoryError.of(caught.value).line()
    assert re.fullmatch("memory is too small: .*; use a smaller model or batch, or another machine", line)
    assert OutOfMemoryError.of(RuntimeError("other")) is OutOfMemoryError.of(ValueError("allocate memory")) is None


@pytest.mark.parametrize(
    ("where", "fix", "line"),
    [
        ("", "", "it broke"),
        ("a.yaml:3:5", "", "a.yaml:3:5: it broke"),
        ("", "mend it", "it broke; mend it"),
        ("a.yaml:3:5", "mend it", "a.yaml:3:5: it broke; mend it"),
    ],
)
def test_the_line_says_where_what_and_how_to_fix(where, fix, line):
    error = PretrainError("it broke", where=where, fix=fix)
    assert error.line() == str(error) == line
    assert (error.what, error.where, error.fix) == ("it broke", where, fix)


def test_where_and_fix_are_keywords_so_that_they_cannot_be_swapped():
    with pytest.raises(TypeError):
        PretrainError("it broke", "a.yaml")


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "free space, or raise the quota"),
        (errno.EACCES, "fix permissions"),
        (errno.EROFS, "mount it for writing, or use another folder"),
        (errno.ENOTDIR, "check the path"),
        (errno.EIO, "see to the file system"),
        (None, "see to the file system"),
    ],
)
def test_the_remedy_of_a_refused_write_is_that_of_its_cause(number, fix):
    assert disk_fix(OSError(number, "refused") if number else OSError("refused")) == fix
