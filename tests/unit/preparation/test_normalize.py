"""What is done to the text of an input before anything else sees it, and inputs that are all one split."""

import gzip
import json

import pytest

from pretrain.config.load import load_section
from pretrain.config.prepare import NormalizeConfig, PrepareConfig
from pretrain.errors import ConfigError, LaunchError
from pretrain.preparation import normalize
from pretrain.preparation.filters import Document
from pretrain.preparation.normalize import build_normalizers, normalize_document
from pretrain.preparation.prepare import prepare
from pretrain.preparation.split import TRAIN, VALIDATION
from tests.helpers.corpus import digests
from tests.helpers.prepare_config import prepare_config
from tests.unit.preparation.test_prepare_kinds import read_texts, write_rows

EN_DE = {"language": "en", "target_language": "de"}
ENGLISH, GERMAN = 'Dr. No\u2019s "plan" (A&B).', "Nr. 5, z.B. \u201ePlan\u201c \u2013 \u00dcBEL."


def normalized(document, **rules):
    return normalize_document(document, *build_normalizers(NormalizeConfig(**rules)))


@pytest.mark.parametrize(
    ("steps", "source", "target"),
    [
        (["lowercase"], ENGLISH.lower(), GERMAN.lower()),
        # An abbreviation keeps its dot where the language has it; marks are parted, and not escaped.
        (
            ["moses"],
            'Dr. No \u2019 s " plan " ( A & B ) .',
            "Nr. 5 , z.B. \u201e Plan \u201c \u2013 \u00dcBEL .",
        ),
        (
            ["lowercase", "punctuation", "moses"],
            'dr. no \'s " plan " ( a & b ) .',
            'nr . 5 , z.b. " plan " - \u00fcbel .',
        ),
    ],
)
def test_each_side_of_a_pair_is_normalized_by_its_language(steps, source, target):
    found = normalized(Document(GERMAN, GERMAN.encode(), 7, source=ENGLISH), steps=steps, **EN_DE)
    assert (found.source, found.text, found.utf8) == (source, target, target.encode())
    assert found.consumed_bytes == 7


def test_lines_stay_lines_and_roles_stay_roles():
    text = "One, two.\n\nThree."
    document = Document(text, text.encode(), 0)
    assert normalized(document, steps=["moses"], language="en").text == "One , two .\n\nThree ."
    record = Document("A?B.", b"A?B.", 0, segments=(("A?", False), ("B.", True)))
    found = normalized(record, steps=["lowercase", "moses"], language="en")
    assert found.segments == (("a ?", False), ("b .", True))
    assert (found.text, found.utf8) == ("a ?b .", b"a ?b .")


def test_filters_duplicates_and_tokenizer_see_what_was_normalized(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in ("Ab", "aB", "C", "\u0130", "DE")])
    inputs = [{"path": str(path), "normalize": {"steps": ["lowercase"]}}]
    config = prepare_config(tmp_path / "out", inputs=[], tokenizer="char", split="hash:0", filter={"deduplicate": True})
    config = type(config).model_validate(config.model_dump() | {"inputs": inputs})
    index = prepare(config, processes=1)
    assert read_texts(tmp_path / "out") == ["ab", "c", "i\u0307", "de"]
    assert index.split(TRAIN).num_bytes_text == len("abci\u0307de".encode())


@pytest.fixture
def pairs(tmp_path):
    """Writes pairs as `multi30k.yaml` names them; returns the arguments that lead there."""
    for name, count in (("train", 60), ("val", 9)):
        for language in ("en", "de"):
            lines = "".join(f"{language} {name} No. {number}, (again).\n" for number in range(count))
            (tmp_path / f"{name}.{language}.gz").write_bytes(gzip.compress(lines.encode()))
    return [
        f"inputs.{number}.{key}={tmp_path}/{name}.{language}.gz"
        for number, name in enumerate(("train", "val"))
        for key, language in (("path", "en"), ("paired_path", "de"))
    ]


def test_the_recipe_of_pairs_holds_out_the_input_that_says_so_and_nothing_else(tmp_path, pairs):
    out = tmp_path / "out"
    overrides = [*pairs, f"output={out}", "tokenizer.vocab_size=300"]
    index = prepare(load_section(PrepareConfig, "configs/prepare/multi30k.yaml", overrides), processes=1)
    assert (index.kind, index.vocab_size) == ("pairs", 304)
    assert read_texts(out) == [f"de train no . {number} , ( again ) ." for number in range(60)]
    assert read_texts(out, VALIDATION) == [f"de val no . {number} , ( again ) ." for number in range(9)]
    prepare(
        load_section(PrepareConfig, "configs/prepare/multi30k.yaml", [*overrides, f"output={tmp_path}/two"]),
        processes=2,
    )
    assert digests(out) == digests(tmp_path / "two")
    assert json.loads((out / "prepare.json").read_text())["options"]["inputs.1.split"] == "validation"


def test_the_tokenizer_does_not_see_an_input_that_is_held_out(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "b.txt").write_text("xy")
    config = prepare_config(tmp_path / "out", inputs=[], tokenizer="char", split="hash:0")
    inputs = [{"path": f"{tmp_path}/a.txt"}, {"path": f"{tmp_path}/b.txt", "split": "validation"}]
    index = prepare(type(config).model_validate(config.model_dump() | {"inputs": inputs}), processes=1)
    assert index.vocab_size == len("ab") + 2
    assert index.split(VALIDATION).num_documents == 1


@pytest.mark.parametrize(
    ("rules", "kind", "message"),
    [
        ("{steps: [moses]}", "text", "punctuation and moses need a language, such as language: en"),
        ("{steps: [moses], language: en}", "pairs", r"inputs\.0\.normalize needs a target_language, such as target"),
        (
            "{steps: [lowercase], target_language: de}",
            "text",
            r"inputs\.0\.normalize\.target_language goes with kind=pairs, not text",
        ),
        ("{steps: []}", "text", r"inputs\.0\.normalize\.steps=\[\]: list should have at least 1 item"),
        ("{steps: [moses], language: English}", "text", r"normalize\.language='English': string should match pattern"),
    ],
)
def test_rules_that_cannot_be_are_refused(tmp_path, rules, kind, message):
    path = tmp_path / "a.yaml"
    path.write_text(f"output: x\nkind: {kind}\ninputs: [{{path: a.jsonl, normalize: {rules}}}]\n")
    with pytest.raises(ConfigError, match=message):
        load_section(PrepareConfig, path)


def test_a_package_that_is_not_installed_is_named_before_anything_is_written(tmp_path, monkeypatch, pairs):
    monkeypatch.setattr(normalize, "PACKAGE", "no_such_package")
    message = (
        r"normalize\.steps=\['lowercase', 'punctuation', 'moses'\] are done by no_such_package, which is not "
        r"installed; run in the clone of pretrain: python -m pip install -e \."
    )
    with pytest.raises(LaunchError, match=message):
        prepare(
            load_section(PrepareConfig, "configs/prepare/multi30k.yaml", [*pairs, f"output={tmp_path}/out"]),
            processes=1,
        )
    assert not (tmp_path / "out").exists()
