"""`on_error: skip` over a whole preparation: counts, places, and the limit, for any processes and after kills."""

import json
import logging
import re
from pathlib import Path

import pytest

from pretrain.preparation.filters import TooManyBadError
from pretrain.tokenizer.file import dump_tokenizer
from tests.helpers.corpus import digests
from tests.helpers.killed import run_killed
from tests.helpers.tokenizers import train_bpe
from tests.unit.data.prepared import draw_nothing, options, prepare

pytestmark = pytest.mark.usefixtures("pictures")

NUM_LINES = 400


def write(folder, *bad):
    """Writes lines, of which the ones with these numbers are no records."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"text": f"the text {number} of some words"}) for number in range(NUM_LINES)]
    for number in bad:
        lines[number] = '{"text": null}' if number % 2 else "oops"
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")


def skipping(tmp_path, name="out", **changes):
    return options(tmp_path, name, **{"on_error": "skip", "part_bytes": 4000, **changes})


def test_bad_records_are_counted_and_the_first_ones_named(tmp_path, caplog):
    write(tmp_path / "in", 3, 200, 201, 399)
    with caplog.at_level(logging.INFO):
        prepare(skipping(tmp_path))
    facts = json.loads((tmp_path / "out/statistics.json").read_text())
    counts = {reason: count for reason, count in facts["left_out"].items() if count}
    assert counts == {"not_json": 1, "bad_field": 3}
    assert (facts["skipped"]["num_read"], facts["skipped"]["num_bad"]) == (NUM_LINES, 4)
    assert "| not json | 1 | 0 |" in (tmp_path / "out/data_card.md").read_text()
    path = tmp_path / "in/a.jsonl"
    named = [re.escape(f"left out: {path}:{line}: field 'text' is null, not a string") for line in (4, 202, 400)]
    assert re.search(".*\n.*".join(["skipped 3 documents: bad field", *named]), caplog.text), caplog.text


@pytest.mark.parametrize("processes", [1, 2])
def test_more_than_the_limit_ends_it_and_a_higher_limit_continues(tmp_path, processes):
    write(tmp_path / "in", 7, 8, 9, 110, 399)
    (tmp_path / "tokenizer.json").write_bytes(dump_tokenizer(train_bpe(["the text of some words"], 270)))
    given = {"tokenizer": str(tmp_path / "tokenizer.json"), "vocab_size": None, "processes": processes}
    message = rf"5 of 400 records are bad.*, more than max_skipped_share=0\.01; the first: {tmp_path}/in/a\.jsonl:8: "
    with pytest.raises(TooManyBadError, match=f"{message}.*; correct the input, or raise it .*finished parts are kept"):
        prepare(skipping(tmp_path, **given))
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/parts").iterdir()}
    assert len(kept) > 2 and not (tmp_path / "out/index.json").exists()
    prepare(skipping(tmp_path, max_skipped_share=0.02, **given))
    assert kept == {path: path.stat().st_mtime_ns for path in kept}


def test_what_is_hopeless_ends_early(tmp_path):
    write(tmp_path / "in", *range(NUM_LINES))
    message = r"(\d+) of \1 records are bad, (\d+)\.\d% of the input's bytes, more than max_skipped_share=0\.05; "
    with pytest.raises(TooManyBadError, match=message) as caught:
        prepare(skipping(tmp_path, part_bytes=500, max_skipped_share=0.05))
    assert int(re.search(message, str(caught.value))[2]) < 30


def skip_folder(folder: str, name: str) -> None:
    """What a process does that is killed."""
    draw_nothing()
    prepare(skipping(Path(folder), name))


def test_processes_and_kills_change_nothing(tmp_path):
    write(tmp_path / "in", 3, 200, 399)
    prepare(skipping(tmp_path, "whole"))
    prepare(skipping(tmp_path, "two", processes=2))
    assert digests(tmp_path / "two") == digests(tmp_path / "whole")
    run_killed(skip_folder, tmp_path, "killed", kill_at=30)
    assert not (tmp_path / "killed/index.json").exists()
    prepare(skipping(tmp_path, "killed"))
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")


def test_a_folder_that_was_begun_with_the_old_key_is_continued(tmp_path):
    write(tmp_path / "in")
    prepare(options(tmp_path))
    identity = json.loads((tmp_path / "out/prepare.json").read_text())
    identity["options"]["inputs.0.undecodable"] = "stop"
    (tmp_path / "out/prepare.json").write_text(json.dumps(identity))
    assert prepare(options(tmp_path)) is not None
    assert prepare(skipping(tmp_path, part_bytes=1500)) is not None
