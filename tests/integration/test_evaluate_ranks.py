"""Two ranks find what one finds: bit for bit where rows are compared, and in float64 where they are added up."""

import pytest

from pretrain.evaluation.translation import read_texts
from tests.helpers.ranks import run_in_ranks
from tests.integration.evaluate_workers import measure
from tests.unit.artifact.runs import TEXTS, write_run, write_text_run, write_texts
from tests.unit.evaluation.label_runs import CLASSES, write_label_run, write_labelled
from tests.unit.evaluation.task_files import NAMES, write_tasks
from tests.unit.evaluation.test_held_out import write_given


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A translator, two decoders and two classifiers with random weights, and what they are measured on."""
    folder = tmp_path_factory.mktemp("ranks")
    write_run(folder / "mt", steps=[1])
    texts = [" ".join(text.split()[shift:] + text.split()[:shift]) for text in TEXTS for shift in range(3)]
    write_texts(folder / "texts", texts)
    write_given(folder / "more", folder / "texts", [text.upper() for text in TEXTS])
    for number, name in enumerate(("gpt", "gpt2"), start=1):
        write_text_run(folder / name, folder / "texts", "llama-tiny", "causal", steps=[number])
    write_labelled(folder / "classes", "classes", CLASSES)
    for number, name in enumerate(("bert", "bert2"), start=1):
        write_label_run(folder / name, folder / "classes", "classes", step=number)
    (folder / "test.en").write_text("".join(f"{text}\n" for text in texts))
    (folder / "test.de").write_text("".join(f"{text.swapcase()}\n" for text in texts))
    return folder


@pytest.mark.long
def test_two_ranks_find_what_one_finds(folder, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    expected = measure(folder)
    translated = read_texts(folder / "out.txt")
    (folder / "out.txt").unlink()
    both = run_in_ranks("tests.integration.evaluate_workers:evaluations", 2, {"folder": str(folder)})
    assert both[0] == both[1], "all ranks know the result"
    for name in ("compared", "labels", "translated"):
        assert both[0][name] == expected[name], name
    assert read_texts(folder / "out.txt") == translated
    for source, found in both[0]["loss"]["sources"].items():
        one = expected["loss"]["sources"][source]
        assert (found["targets"], found["correct"]) == (one["targets"], one["correct"])
        assert found["loss"] == pytest.approx(one["loss"], rel=1e-14)  # float64, added in another order


@pytest.mark.long
def test_a_task_at_which_one_rank_fails_has_no_score_and_the_next_has(folder):
    write_tasks(folder / "tasks")
    arguments = {"folder": str(folder), "names": list(NAMES)}
    main, other = run_in_ranks("tests.integration.evaluate_workers:scores_after_a_failure", 2, arguments)
    for names in main:
        assert {name.split("/")[1] for name in names} == set(NAMES[1:])
    assert other == [[], []]
