"""The state of a GPU in words, by a program in place of `nvidia-smi`."""

import pytest

from pretrain.doctor.gpu_state import describe_gpu, describe_row


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("1980, 1980, 54, 0x0000000000000000, 0", "1980 of 1980 MHz, 54 C"),
        ("345, 1980, 31, 0x0000000000000001, 0", "345 of 1980 MHz, 31 C"),  # idle
        ("1215, 1980, 87, 0x0000000000000044, 2", "1215 of 1980 MHz, 87 C, slowed down by the power limit and heat "
         "(hardware), 2 uncorrected memory errors"),
        ("[N/A], [N/A], 61, [N/A], [N/A]", "61 C"),
        ("No devices were found", ""),
    ],
)  # fmt: skip
def test_a_row_in_words(row, text):
    assert describe_row(f"{row}\n") == text


def test_the_driver_is_asked_about_one_gpu(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = --id=GPU-1 ] || exit 6\necho "1215, 1980, 87, 0x40, 0"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert describe_gpu("GPU-1") == "1215 of 1980 MHz, 87 C, slowed down by heat (hardware)"
    assert describe_gpu("GPU-2") == ""
    monkeypatch.setenv("PATH", "")
    assert describe_gpu("GPU-1") == ""
