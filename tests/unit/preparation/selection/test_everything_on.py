"""All rules over inputs of many formats: killed anywhere, on any number of machines, the same bytes."""

import json
import random
from pathlib import Path

import pytest

from pretrain.preparation.input_parts import parse_share
from pretrain.preparation.inputs.opening import zstd
from pretrain.preparation.prepare import prepare
from tests.helpers.corpus import digests
from tests.helpers.killed import count_writes, run_killed, start_child
from tests.helpers.prepare_config import prepare_config
from tests.helpers.waiting import wait_until
from tests.unit.data.prepared import draw_nothing
from tests.unit.preparation.inputs.test_hub_datasets import save
from tests.unit.preparation.readers.test_warc import page, response
from tests.unit.preparation.readers.test_warc import write as write_archive
from tests.unit.preparation.selection.test_judge import GERMAN

NUM_KILLS = 100
NOUNS = ["river", "house", "window", "garden", "table", "bridge", "street", "school", "winter", "market", "doctor"]


def text(rng):
    """A text that no rule leaves out."""
    lines = []
    for _ in range(8):
        first, second, third = rng.choices(NOUNS, k=3)
        lines.append(f"The {first} of the {second} is a {third} that we have near {rng.randrange(99)}.\n")
    return "".join(lines)


def make_inputs(root):
    """Writes archives, JSON lines in zstd, a saved data set and an evaluation set, with texts for every rule."""
    rng = random.Random(0)
    texts = [text(rng) for _ in range(60)]
    near = [one.replace("near", "by", 1) for one in texts[::4]]
    wrong = [
        (GERMAN + "\n") * 3,
        "too short",
        "Lorem ipsum is here. " + texts[0],
        "same words here \n" * 30,
        texts[1],
        texts[2],
    ]
    mixed = rng.sample(texts + near + wrong, len(texts + near + wrong))
    root.mkdir()
    archive = [response(page("<p>" + one.replace("\n", "</p><p>")).encode()) for one in mixed[:30]]
    write_archive(root / "a.warc.gz", [*archive, response(b"GIF89a", "image/gif")])
    lines = "".join(json.dumps({"text": one}) + "\n" for one in mixed[30:60]).encode()
    (root / "b.jsonl.zst").write_bytes(zstd.compress(lines))
    save(root / "c", *mixed[60:], shards=2)
    (root / "tests.jsonl").write_text(json.dumps({"q": " ".join(texts[7].split()[:20])}) + "\n")


def everything(folder, name):
    """A config with all rules."""
    root = Path(folder, "in")
    filters = {
        "deduplicate": True,
        "near_duplicates": {"threshold": 0.7},
        "language": {"keep": ["en"], "min_score": 0.3},
        "c4": {"min_sentences": 2},
        "gopher_repetition": {"top_ngrams": {}, "ngrams": {}},
        "gopher_quality": {"min_words": 10},
        "fineweb": {"max_short_lines": 0.9},
        "decontaminate": {"inputs": [{"path": str(root / "tests.jsonl"), "text_field": "q"}]},
    }
    inputs = [root / "a.warc.gz", root / "b.jsonl.zst", root / "c"]
    return prepare_config(Path(folder, name), inputs, vocab_size=300, split="hash:0.2", part_bytes=6000, filter=filters)


def prepare_folder(folder, name, share="1/1"):
    """What a process does."""
    draw_nothing()
    prepare(everything(folder, name), share=parse_share(share), processes=1)


@pytest.fixture
def whole(tmp_path):
    """The digests of one run, in which every rule has left something out."""
    make_inputs(tmp_path / "in")
    prepare(everything(tmp_path, "whole"), processes=1)
    left = json.loads((tmp_path / "whole/statistics.json").read_text())["left_out"]
    found = {reason for reason, count in left.items() if count}
    needed = {"not_a_page", "duplicate", "near_duplicate", "language", "contaminated", "c4_lorem_ipsum"}
    assert needed <= found
    assert left["near_duplicate"] >= 10
    return digests(tmp_path / "whole")


def test_two_processes_write_the_bytes_of_one(tmp_path, whole):
    prepare(everything(tmp_path, "two"), processes=2)
    assert digests(tmp_path / "two") == whole


@pytest.mark.long
@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("seed", range(NUM_KILLS // 20))
def test_killed_twenty_times_at_any_write_it_gives_the_same_bytes(tmp_path, seed):
    num_writes = count_writes(prepare_folder, tmp_path, "counted")
    expected = digests(tmp_path / "counted")
    rng = random.Random(seed)
    for number in range(5):
        name = f"killed{number}"
        left = num_writes
        for _ in range(4):
            kill_at = rng.randint(1, max(1, left))
            run_killed(prepare_folder, tmp_path, name, kill_at=kill_at)
            # What the next start has to do at least.
            left = (left - kill_at) // 2
        code, _, errors = start_child(prepare_folder, tmp_path, name).end()
        assert code == 0, errors
        assert digests(tmp_path / name) == expected


@pytest.mark.long
@pytest.mark.usefixtures("whole")
def test_two_machines_that_are_killed_write_the_bytes_of_one(tmp_path):
    start_child(prepare_folder, tmp_path, "alone").end()
    rng = random.Random(1)
    for _ in range(4):
        kills = [rng.randint(5, 40) for _ in range(2)]
        children = [
            start_child(prepare_folder, tmp_path, "out", f"{number}/2", kill_at=kill_at)
            for number, kill_at in zip((1, 2), kills, strict=True)
        ]
        wait_until(lambda pair=children: any(child.poll() is not None for child in pair), "the end of a share")
        for child in children:  # the other one may wait for what the killed one has not done
            child.kill()
            child.end()
    children = [start_child(prepare_folder, tmp_path, "out", f"{number}/2") for number in (2, 1)]
    results = [child.end() for child in children]
    assert [code for code, _, _ in results] == [0, 0], results
    assert digests(tmp_path / "out") == digests(tmp_path / "alone")
