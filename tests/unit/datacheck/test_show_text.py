"""How rows of each objective look in a pipe, word for word, and on a terminal."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pretrain.config.prepare import PrepareConfig
from pretrain.datacheck.show import ReadingOptions, print_rows, show
from pretrain.errors import ConfigError
from pretrain.preparation.prepare import prepare
from tests.unit.report.data_folders import make_folder
from tests.unit.report.marked_folders import ALL, make_marked_folder

TEXTS = ["the quick brown fox", "jumps over", "a lazy dog again"] * 4

CAUSAL = """
position 1   sample 1   causal   40 tokens: 4 documents, 0 padding   37 targets
1               tokens 0-7, positions 0-7; began in an earlier row
              | own fox<|endoftext|>
2               tokens 8-18, positions 0-10
              | jumps over<|endoftext|>
3               tokens 19-35, positions 0-16
              | a lazy dog again<|endoftext|>
4               tokens 36-39, positions 0-3; continues after this row
              | the_
                the last token predicts 'q'
"""
MASKED = """
{truth -> what stands there}: predicted; {truth}: predicted, and left as it is
position 2   sample 2   masked   40 tokens: 3 documents, 0 padding   7 targets
1               tokens 0-15, positions 0-15; began in an earlier row
              |  lazy {do -> [MASK][MASK]}{g} again<|endoftext|>
2               tokens 16-35, positions 0-19
              | {t -> [MASK]}h{e} q{u -> A}ick brown fo{x -> [MASK]}<|endoftext|>
3               tokens 36-39, positions 0-3; continues after this row
              | jump
"""
SPAN = """
position 1   sample 1   span   source 40 and target 10 tokens: 4 documents, 0 padding   10 targets
                the decoder reads <pad> before each target
1               source tokens 0-3, positions 0-3; began in an earlier row
       source | fox<|endoftext|>
2               source tokens 4-14, positions 0-10
       source | jumps over<|endoftext|>
3               source tokens 15-31, positions 0-16
       source | a lazy dog again<|endoftext|>
4               source tokens 32-39, positions 0-7; target tokens 0-9, positions 0-9; continues after this row
       source | t<extra_id_0>quic<extra_id_1><|endoftext|>
       target | <extra_id_0>he <extra_id_1>k br<|endoftext|>
"""
PREFIX = """
position 1   sample 1   prefix   40 tokens: 4 documents, 0 padding   10 targets
1               tokens 0-7, positions 0-7; began in an earlier row
       prefix | own_
      learned | fox<|endoftext|>
2               tokens 8-18, positions 0-10
       prefix | jumps over
      learned | <|endoftext|>
3               tokens 19-35, positions 0-16
       prefix | a lazy dog aga
      learned | in<|endoftext|>
4               tokens 36-39, positions 0-3; continues after this row
       prefix | the
      learned | _
                the last token predicts 'q'
"""
FIM = """
position 1   sample 1   fim   40 tokens: 2 documents, 6 padding   32 targets
1               tokens 0-22, positions 0-22
       prefix | <|fim_prefix|>t
       suffix | <|fim_suffix|>own fox
       middle | <|fim_middle|>he quick br<|endoftext|>
2               tokens 23-33, positions 0-10; continues after this row
       prefix | <|fim_prefix|>jum
       suffix | <|fim_suffix|>v
       middle | <|fim_middle|>ps o
                6 tokens of padding
"""
UL2 = """
documents see each other: data.document_mask is off
position 1   sample 1   ul2   source 80 and target 60 tokens: 1 document, 50 padding   23 targets
                denoiser [S2S]: prefix, the last 25%
                the decoder reads <pad> before each target
1               source tokens 0-66, positions 0-66; target tokens 0-22, positions 0-22; began in an earlier row; continues after this row
       source | [S2S]rown fox<|endoftext|>jumps over<|endoftext|>a lazy dog again<|endoftext|>the quick brown fox<|endoftext|>jumps ov<|endoftext|>
       target | er<|endoftext|>a lazy dog again<|endoftext|>th<|endoftext|>
                13 tokens of padding in the source row
                37 tokens of padding in the target row
"""  # noqa: E501


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "data"
    make_marked_folder(folder, TEXTS)
    return folder


def printed(folder: Path, choice: ReadingOptions, **options) -> str:
    console = Console(file=io.StringIO(), highlight=False, **options)
    print_rows(show(str(folder), [], choice), console)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (CAUSAL, {"seed": 2}),
        (MASKED, {"objective": "masked", "seed": 9, "position": 2}),
        (SPAN, {"objective": "span", "seed": 2}),
        (PREFIX, {"objective": "prefix", "seed": 2}),
        (FIM, {"objective": "fim", "seed": 3}),
        (UL2, {"objective": "ul2", "seed": 2, "seq_len": 80}),
    ],
    ids=["causal", "masked", "span", "prefix", "fim", "ul2"],
)
def test_in_a_pipe_an_objective_is_told_in_words(data, text, options):
    """A `_` stands for a space at the end of a line."""
    choice = ReadingOptions(**({"rows": 1, "position": 1, "seq_len": 40} | options))
    assert printed(data, choice).replace(" \n", "_\n") == text.lstrip("\n")


def test_text_that_is_read_before_the_middle_has_no_border_to_the_model(data):
    shown = show(str(data), [], ReadingOptions(objective="fim", rows=12, seq_len=40))
    labels = {
        tuple(stretch.kind for stretch in document.target.stretches) for row in shown.rows for document in row.documents
    }
    assert labels == {("text",), ("prefix", "suffix", "middle"), ("suffix", "prefix+middle")}


def test_what_is_hidden_and_what_stands_there_have_colours_of_their_own(data):
    options = {"force_terminal": True, "width": 120, "color_system": "standard"}
    text = printed(data, ReadingOptions(objective="masked", rows=1, position=2, seq_len=40, seed=9), **options)
    assert "\x1b[1;32mu\x1b[0m\x1b[2m -> \x1b[0m\x1b[31mA\x1b[0m" in text, "green is the truth, red what is read"
    assert "\x1b[7;36m<|endoftext|>" in text, "special tokens are reversed"
    plain = printed(data, ReadingOptions(objective="masked", rows=1, position=2, seq_len=40, seed=9))
    assert "q{u -> A}ick" in plain and "\x1b" not in plain


def test_facts_of_a_document_are_wrapped_like_its_text(data):
    options = {"force_terminal": True, "width": 60, "color_system": None}
    text = printed(data, ReadingOptions(objective="span", rows=1, position=1, seq_len=40, seed=2), **options)
    head, *lines = text.splitlines()
    assert len(head) > 60 and all(len(line) <= 60 for line in lines)


def test_json_has_inputs_and_targets_of_each_stretch(data):
    choice = ReadingOptions(objective="masked", rows=1, position=2, seq_len=40, seed=9)
    (row,) = json.loads(json.dumps(show(str(data), [], choice).facts()))["rows"]
    (hidden,) = [
        stretch
        for document in row["documents"]
        for stretch in document["target"]["stretches"]
        if stretch["kind"] == "replaced"
    ]
    assert (hidden["text"], hidden["stands"]) == ("u", "A")
    assert len(hidden["inputs"]) == len(hidden["targets"]) == 1 and hidden["inputs"] != hidden["targets"]
    assert (row["objective"], row["denoiser"], row["num_targets"]) == ("masked", None, 7)


@pytest.mark.parametrize(
    ("objective", "missing", "words"),
    [
        ("masked", "[MASK]", r"objective.kind=masked needs a mask token, which the tokenizer does not have; prepare"),
        ("span", "<extra_id_0>", r"rows of 44 tokens lose 2 spans .* and the tokenizer has 0 sentinels; prepare with"),
        ("span", "<pad>", "the tokenizer has no token that a decoder reads first; prepare with a <pad> or <s> token"),
        ("ul2", "[NLG]", r"the tokenizer has no special token \[NLG\], the mode of a denoiser; prepare"),
        ("fim", "<|fim_middle|>", r"objective.kind=fim needs the special tokens <\|fim_middle\|>, which the tokenizer"),
    ],
)
def test_an_objective_whose_tokens_are_missing_is_refused_in_one_line(tmp_path, objective, missing, words):
    make_marked_folder(tmp_path / "data", TEXTS, [name for name in ALL if name != missing])
    seq_len = 80 if objective == "ul2" else 40
    with pytest.raises(ConfigError, match=words) as refused:
        show(str(tmp_path / "data"), [], ReadingOptions(objective=objective, seq_len=seq_len))
    assert "\n" not in refused.value.line()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "mask"}, r"^--objective: objective.kind: unknown name 'mask'; use masked"),
        ({"objective": "span", "packing": "bins"}, r"--objective: objective.kind=span needs full rows, .*; use data"),
        ({"objective": "seq2seq"}, "objective.kind=seq2seq learns from pairs, and the data are text; choose another"),
        ({"objective": "span", "seq_len": 1}, "--seq-len: batch.seq_len=1 is too short for objective.kind=span; raise"),
        ({"source_len": 4}, "batch.source_len needs objective.kind=seq2seq; leave it out"),
    ],
)  # fmt: skip
def test_an_objective_that_does_not_go_with_a_folder_is_refused(data, options, words):
    with pytest.raises(ConfigError, match=words):
        show(str(data), [], ReadingOptions(**options))


def test_a_config_has_its_own_objective(tmp_path):
    (tmp_path / "a.yaml").write_text("run: {name: a}\n")
    with pytest.raises(ConfigError, match=r"--objective: a config has an objective of its own; lay objective.kind"):
        show(str(tmp_path / "a.yaml"), [], ReadingOptions(objective="span"))


def test_pairs_are_shown_though_nothing_could_start_their_targets(tmp_path):
    """A run needs a token for it; who looks at its data does not."""
    make_folder(tmp_path / "data", [("abc", "de")], kind="pairs")
    (row,) = show(str(tmp_path / "data"), [], ReadingOptions(rows=1, seq_len=9)).rows
    assert row.starts_with == "<|endoftext|>"
    with pytest.raises(ConfigError, match="the tokenizer has no token that a decoder reads first"):
        show(str(tmp_path / "data"), [], ReadingOptions(objective="seq2seq"))


@pytest.mark.parametrize(
    ("kind", "rows", "fields", "line"),
    [
        ("classes", [{"text": "good film", "label": "pos"}, {"text": "bad film", "label": "neg"}], {}, "{[CLS]: pos}"),
        (
            "tags",
            [{"tokens": ["Anna", "saw", "Paris"], "tags": ["PER", "O", "LOC"]}],
            {"words_field": "tokens", "tags_field": "tags"},
            "[CLS] {Anna: PER} {saw: O} {Paris: LOC} [SEP]",
        ),
    ],
)  # fmt: skip
def test_labels_are_told_at_the_tokens_that_have_them(tmp_path, kind, rows, fields, line):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 20))
    values = {
        "output": str(tmp_path / "data"),
        "kind": kind,
        "inputs": [{"path": str(tmp_path / "a.jsonl"), **fields}],
        "split": "hash:0",
        "tokenizer": {"kind": "wordpiece", "vocab_size": 200, "roles": "bert"},
    }
    prepare(PrepareConfig.model_validate(values), processes=1)
    shown = show(str(tmp_path / "data"), [], ReadingOptions(rows=1, seq_len=32))
    assert line in printed(tmp_path / "data", ReadingOptions(rows=1, seq_len=32))
    names = [stretch.label for document in shown.rows[0].documents for stretch in document.target.stretches]
    assert len([name for name in names if name]) == shown.rows[0].num_targets > 0
