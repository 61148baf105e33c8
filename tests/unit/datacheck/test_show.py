"""Rows of folders, configs and runs, and how they look on a terminal and in a pipe."""

import io
import json
from itertools import groupby

import pytest
import yaml
from rich.console import Console

from pretrain.datacheck.show import ReadingOptions, print_rows, show
from pretrain.datacheck.stats import count_data
from pretrain.errors import ConfigError, DataError
from tests.unit.report.data_folders import make_folder, make_texts

TEXTS = make_texts(60)
CONFIG = {
    "seed": 5,
    "run": {"name": "a"},
    "model": {"preset": "llama-tiny", "max_seq_len": 512},
    "batch": {"global_tokens": 256, "seq_len": 32, "micro": 2},
    "optim": {"lr": 1e-3},
    "train": {"steps": 500},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    make_folder(path / "text", TEXTS, validation=TEXTS[:20])
    make_folder(path / "other", make_texts(60, 1))
    make_folder(path / "pairs", list(zip(TEXTS, make_texts(60, 1), strict=True)), kind="pairs", validation=None)
    make_folder(path / "records", [[(text, False), (text[::-1], True)] for text in TEXTS], kind="records")
    return path


@pytest.fixture
def config(root, tmp_path):
    """Writes a config with a data section."""

    def write(**data) -> str:
        path = tmp_path / "a.yaml"
        path.write_text(yaml.safe_dump({**CONFIG, "data": data}))
        return str(path)

    return write


def printed(shown, **options):
    console = Console(file=io.StringIO(), highlight=False, **options)
    print_rows(shown, console)
    return console.file.getvalue()


def stretches(rows):
    """Of all rows, in order."""
    parts = [part for row in rows for document in row.documents for part in (document.source, document.target)]
    return [stretch for part in parts if part is not None for stretch in part.stretches]


def test_rows_of_a_config_are_those_of_its_run(root, config):
    from pretrain.config.load import load_config
    from pretrain.data.stream import TokenStream
    from pretrain.shards.index import load_index

    path = config(path=str(root / "text"), lanes=3, block_samples=4)
    shown = show(path, ["seed=7"], ReadingOptions(position=13, rows=4))
    stream = TokenStream(
        root / "text", load_index(root / "text"), "train", seq_len=32, seed=7, lanes=3, block_samples=4
    )
    assert [row.sample_id for row in shown.rows] == stream.read(range(13, 17)).sample_ids_B.tolist()
    assert load_config(path).seed == 5
    assert shown.numbers == tuple(row.sample_id for row in shown.rows)


def test_a_run_is_shown_by_its_own_config(root, config, tmp_path):
    path = config(path=str(root / "text"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_bytes((tmp_path / "a.yaml").read_bytes())
    assert show(str(run), [], ReadingOptions()).facts()["rows"] == show(path, [], ReadingOptions()).facts()["rows"]


def test_options_go_before_the_config(root, config):
    path = config(path=str(root / "text"))
    shown = show(path, [], ReadingOptions(seq_len=48, packing="bins", seed=1))
    folder = show(str(root / "text"), [], ReadingOptions(seq_len=48, packing="bins", seed=1))
    assert shown.rows == folder.rows and shown.rows[0].num_tokens == 48


def test_another_length_leaves_a_step_its_number_of_rows(root, config):
    """On which the order of padded rows depends."""
    path = config(path=str(root / "text"), packing="padded")
    whole = show(path, ["batch.seq_len=48", "batch.global_tokens=384"], ReadingOptions(rows=12))
    assert show(path, [], ReadingOptions(rows=12, seq_len=48)).rows == whole.rows
    uneven = [
        "batch.short_windows=[{until_tokens: 960, window: 48}]",
        "batch.seq_len=96",
        "batch.global_tokens=768",
        "train.steps=20",
        "optim.schedule={kind: wsd, warmup_tokens: 7680, cooldown_tokens: 7680}",
    ]
    assert show(path, uneven, ReadingOptions(rows=12, seq_len=48)).rows == whole.rows
    other = show(path, ["batch.seq_len=48", "batch.global_tokens=96"], ReadingOptions(rows=12))
    assert other.rows != whole.rows


@pytest.mark.parametrize(("kind", "kinds"), [("text", {"text"}), ("pairs", {"source", "target"}),
                                                 ("records", {"context", "learned"})])  # fmt: skip
def test_a_folder_is_packed_as_its_kind_wants(root, kind, kinds):
    shown = show(str(root / kind), [], ReadingOptions(rows=3))
    assert {stretch.kind for stretch in stretches(shown.rows)} == kinds
    assert {row.num_tokens for row in shown.rows} == {512}


def test_rows_of_a_mixture_name_their_sources(root, config):
    mixture = [{"name": name, "path": str(root / name), "weight": 1} for name in ("text", "other")]
    shown = show(config(mixture=mixture), [], ReadingOptions(rows=6))
    assert sorted(shown.sources) == ["other"] * 3 + ["text"] * 3
    assert all(0 <= number < 1000 for number in shown.numbers), "of the source"
    assert f"sample {shown.numbers[0]:,} of {shown.sources[0]} " in printed(shown)
    facts = json.loads(json.dumps(shown.facts()))
    assert [row["source"] for row in facts["rows"]] == list(shown.sources)


def test_validation_is_shown_in_its_fixed_order(root, config):
    one, other = (show(str(root / "text"), [], ReadingOptions(split="validation", seed=seed)) for seed in (1, 2))
    assert one.rows == other.rows
    said = "".join(stretch.text for stretch in stretches(one.rows))
    assert said.startswith(TEXTS[0] + "<|endoftext|>" + TEXTS[1])
    mixture = [{"name": name, "path": str(root / name), "weight": 1} for name in ("other", "text")]
    held = show(config(mixture=mixture), [], ReadingOptions(split="validation", seq_len=512))
    assert held.rows == one.rows, "the first source that has any"
    with pytest.raises(ConfigError, match=r"--source: 'other' is no source with a validation split; use text"):
        show(config(mixture=mixture), [], ReadingOptions(split="validation", source="other"))


@pytest.mark.parametrize(
    ("what", "overrides", "choice", "error", "words"),
    [
        ("text", ["seed=1"], {}, ConfigError, "seed=1: a shard folder has no config to lay this over"),
        ("text", [], {"packing": "tight"}, ConfigError, "--packing: data.packing='tight': input should be 'conca"),
        (
            "text",
            [],
            {"split": "validation", "position": 99},
            ConfigError,
            r"there is no row 99, the split has 2; lower",
        ),
        ("other", [], {"split": "validation"}, DataError, "there is no split 'validation'; show --split train"),
        (".", [], {}, DataError, "holds no index.json"),
        ("nope.yaml", [], {}, ConfigError, "nope.yaml: no such config file"),
    ],
)
def test_what_cannot_be_shown_is_refused(root, what, overrides, choice, error, words):
    with pytest.raises(error, match=words):
        show(str(root / what), overrides, ReadingOptions(**choice))


@pytest.mark.parametrize("look", [lambda path: show(path, [], ReadingOptions()), count_data], ids=["show", "stats"])
def test_tokens_are_not_spelt_by_another_tokenizer(tmp_path, look):
    make_folder(tmp_path / "text", TEXTS)
    path = tmp_path / "text/tokenizer.json"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DataError, match=r"tokenizer\.json: sha256 is \w{12}, the index says \w{12}; copy it again"):
        look(str(path.parent))
    path.unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read: No such file"):
        look(str(path.parent))


def test_a_split_that_there_is_not_is_refused_before_anything_is_read():
    with pytest.raises(ConfigError, match="--split: there is no split 'test'; use train or validation"):
        ReadingOptions(split="test")


def test_a_packing_for_a_config_is_checked_too(root, config):
    with pytest.raises(ConfigError, match=r"data.packing=tight': input should be 'concat', 'bins' or 'padded'"):
        show(config(path=str(root / "text")), [], ReadingOptions(packing="tight"))


def test_in_a_pipe_a_row_is_plain_text_with_borders_and_padding(root):
    text = printed(show(str(root / "pairs"), [], ReadingOptions(rows=2, seq_len=150)))
    head, *lines = text.splitlines()
    assert head.startswith("position 0   sample ") and "\x1b" not in text
    assert lines[0].strip() == "the decoder reads <|endoftext|> before each target"
    assert lines[1].startswith("1               source tokens 0-") and "; target tokens 0-" in lines[1]
    assert lines[2].startswith("       source | ") and lines[3].startswith("       target | ")
    assert sum(line.endswith("of padding in the source row") for line in lines) >= 1
    assert text.count("\nposition 1 ") == 1


def test_on_a_terminal_documents_alternate_in_colour_and_long_lines_keep_the_rule(root):
    shown = show(str(root / "text"), [], ReadingOptions(rows=1, seq_len=200))
    text = printed(shown, force_terminal=True, width=40, color_system="standard")
    gutters = [line[: line.index("m") + 1] for line in text.splitlines() if "\u2502" in line]
    colours = [colour for colour, _ in groupby(gutters)]
    num_documents = len(shown.rows[0].documents)
    assert num_documents > 3 and colours == (["\x1b[36m", "\x1b[35m"] * num_documents)[:num_documents]
    plain = [
        line
        for line in printed(shown, width=40, force_terminal=True, color_system=None).splitlines()
        if "\u2502" in line
    ]
    assert all(len(line) <= 40 for line in plain)
    words = "".join(line[16:] for line in plain).replace(" ", "")
    assert words == "".join(stretch.text for stretch in stretches(shown.rows)).replace(" ", "")


def test_a_terminal_is_told_nothing_by_a_text(tmp_path):
    make_folder(tmp_path / "data", ["a\x1b[2Jb\nc\u00e9"])
    text = printed(show(str(tmp_path / "data"), [], ReadingOptions(rows=1, seq_len=9, packing="bins")))
    assert "\x1b" not in text and r"\x1b" in text and "\u00e9" in text


def test_documents_that_see_each_other_are_said_to(root, config):
    shown = show(config(path=str(root / "text"), document_mask=False), [], ReadingOptions())
    assert printed(shown).startswith("documents see each other: data.document_mask is off\n")
