"""A config of `prepare`, from a file, from overrides and from the short form."""

import pytest

from pretrain.config.load import load_section, short_prepare
from pretrain.config.prepare import InputConfig, PrepareConfig, TokenizerConfig
from pretrain.errors import ConfigError

FILE = """\
output: data/mine
kind: pairs
inputs:
- path: a.jsonl
  source_field: en
tokenizer: {kind: unigram, vocab_size: 4000}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "a.yaml").write_text(text)
        return "a.yaml"

    return write


def test_a_file_and_overrides_give_a_config(write):
    assert load_section(
        PrepareConfig, write(FILE), ["tokenizer.vocab_size=5000", "filter={deduplicate: true}"]
    ) == PrepareConfig(
        output="data/mine",
        kind="pairs",
        inputs=[InputConfig(path="a.jsonl", source_field="en")],
        tokenizer=TokenizerConfig(kind="unigram", vocab_size=5000),
        filter={"deduplicate": True},
    )


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "source_field",
            "sourcefield",
            "a.yaml:5:3: unknown key 'inputs.0.sourcefield'; did you mean 'inputs.so",
        ),
        ("vocab_size", "vocabsize", "a.yaml:6:28: unknown key 'tokenizer.vocabsize'; did you mean 'tokenizer.vocab_si"),
        ("output", "outputs", "a.yaml:1:1: unknown key 'outputs'; did you mean 'output'?"),
        ("output: data/mine", "", "a.yaml: output is required; add it, or pass output=..."),
        ("pairs", "fours", "a.yaml:2:1: kind='fours': input should be 'text', 'pairs', 'records', 'preferences',"),
        ("kind: unigram", "kind: char", "a.yaml:6:25: tokenizer: vocab_size=4000 does not go with kind=char"),
        ("kind: unigram", "kind: given", "a.yaml:6:13: tokenizer: path belongs to kind=given, and is needed there"),
    ],
)
def test_what_is_wrong_is_named_with_its_place_and_the_nearest_key(write, old, new, line):
    with pytest.raises(ConfigError) as caught:
        load_section(PrepareConfig, write(FILE.replace(old, new)))
    assert any(found.startswith(line) for found in str(caught.value).splitlines()), str(caught.value)


def test_an_override_reaches_one_input_by_its_number(write):
    config = load_section(
        PrepareConfig, write(FILE), ["inputs.0.path=[b.jsonl, c.jsonl]", "inputs.0.normalize={steps: [lowercase]}"]
    )
    (one,) = config.inputs
    assert (one.paths, one.source_field) == (["b.jsonl", "c.jsonl"], "en")
    assert one.normalize is not None and one.normalize.steps == ["lowercase"]


@pytest.mark.parametrize("recipe", ["stdlib_bert", "stdlib_t5", "text"])
def test_the_first_input_of_a_recipe_is_given_whether_it_has_one_or_not(recipe):
    config = load_section(PrepareConfig, f"configs/prepare/{recipe}.yaml", ["inputs.0.path=corpus/*.txt"])
    assert [one.paths for one in config.inputs] == [["corpus/*.txt"]]
    empty = load_section(PrepareConfig, f"configs/prepare/{recipe}.yaml", ["inputs=[]", "inputs.0.path=a.txt"])
    assert [one.paths for one in empty.inputs] == [["a.txt"]]


@pytest.mark.parametrize("override", ["inputs.1.path=b.jsonl", "inputs.path=b.jsonl"])
def test_an_override_of_an_input_that_is_not_there_is_named(write, override):
    with pytest.raises(ConfigError, match=rf"override '{override}': .*; name an item by its number, from 0"):
        load_section(PrepareConfig, write(FILE), [override])


def test_a_bad_override_is_named(write):
    with pytest.raises(ConfigError, match="override 'shard_tokens=0': input should be greater than or"):
        load_section(PrepareConfig, write(FILE), ["shard_tokens=0"])


def test_the_short_form_is_a_config():
    config = short_prepare("out", ["a.txt", "b"], tokenizer="my.json", text_field="body", split="tail:0.1",
                           max_document_bytes=9)  # fmt: skip
    assert config == PrepareConfig(
        output="out",
        inputs=[InputConfig(path=["a.txt", "b"], text_field="body", max_document_bytes=9)],
        tokenizer=TokenizerConfig(kind="given", path="my.json"),
        split="tail:0.1",
    )
    assert short_prepare("out") == PrepareConfig(output="out")


@pytest.mark.parametrize("tokenizer", ["char", "my.json"])
def test_a_size_is_refused_where_a_tokenizer_has_its_own(tokenizer):
    with pytest.raises(ConfigError, match=rf"vocab_size=9 does not go with tokenizer={tokenizer}; leave it out"):
        short_prepare("out", tokenizer=tokenizer, vocab_size=9)


def test_a_size_that_cannot_be_is_named_by_its_option():
    with pytest.raises(ConfigError, match=r"--vocab-size: tokenizer\.vocab_size=1: input should be greater"):
        short_prepare("out", vocab_size=1)
