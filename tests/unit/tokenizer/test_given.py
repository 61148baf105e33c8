"""Tokenizers that are given: a file, a folder of Hugging Face, a name on the hub."""

import io
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pretrain.config.prepare import TokenizerConfig
from pretrain.errors import DataError
from pretrain.tokenizer.file import dump_tokenizer, load_tokenizer, read_given
from pretrain.tokenizer.roles import sentinel_ids, special_tokens_of
from tests.helpers.warm_python import run_python
from tests.unit.interop.hub_server import Hub
from tests.unit.tokenizer.test_kinds import LICENSE, train

LINES = LICENSE[0].splitlines()


def given(path, **options):
    return read_given(TokenizerConfig(kind="given", path=str(path), **options)).content


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(dump_tokenizer(train("bpe", LICENSE)))
    return tmp_path


@pytest.fixture(scope="module")
def sentencepiece_model():
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, vocab_size=200, minloglevel=2,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, pad_piece="<pad>",
    )  # fmt: skip
    return model.getvalue()


def test_a_file_is_taken_as_it_is(folder):
    # Not as `tokenizers` would write it, and still to the byte.
    path = folder / "mine.json"
    path.write_text(json.dumps(json.loads((folder / "tokenizer.json").read_bytes())))
    assert given(path) == path.read_bytes()
    assert given(folder) == (folder / "tokenizer.json").read_bytes()
    step = folder / "run" / "checkpoints" / "step-00000010"
    for place, inside in ((folder / "model", folder / "model" / "tokenizer"), (step, folder / "run")):
        inside.mkdir(parents=True, exist_ok=True)
        place.mkdir(parents=True, exist_ok=True)
        (inside / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        if place == step:
            (step / "manifest.json").write_text("{}")
        assert given(place) == given(folder)


def test_special_tokens_are_added_at_the_end_and_the_vocabulary_is_filled_up(folder):
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    content = given(folder, special_tokens=["<|user|>", "<|endoftext|>", "[MASK]"], vocab_multiple=64)
    tokenizer = Tokenizer.from_buffer(content)
    assert [tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|user|>", "[MASK]", "<unused_0>")] == [
        *(0, size, size + 1, size + 2)
    ]
    assert tokenizer.get_vocab_size() == size + (-size % 64)
    assert special_tokens_of(tokenizer).mask == size + 1
    assert content == given(folder, special_tokens=["<|user|>", "<|endoftext|>", "[MASK]"], vocab_multiple=64)
    # What is filled up once is filled up.
    (folder / "full.json").write_bytes(content)
    assert given(folder / "full.json", vocab_multiple=64) == content


def test_a_vocabulary_that_was_filled_up_grows_under_further_names(folder):
    (folder / "full.json").write_bytes(given(folder, vocab_multiple=64))
    content = given(folder / "full.json", special_tokens=["<|user|>"], vocab_multiple=64)
    before, after = Tokenizer.from_file(str(folder / "full.json")), Tokenizer.from_buffer(content)
    assert after.get_vocab_size() == before.get_vocab_size() + 64
    assert after.get_vocab().items() >= before.get_vocab().items()


def test_a_sentencepiece_model_is_converted(sentencepiece_model, tmp_path):
    (tmp_path / "spiece.model").write_bytes(sentencepiece_model)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    path = tmp_path / "out.json"
    path.write_bytes(given(tmp_path))
    tokenizer = load_tokenizer(path)
    special = special_tokens_of(tokenizer)
    assert (special.pad, special.eos, special.start) == (0, 1, 0)
    assert len(sentinel_ids(tokenizer)) == 100
    ids = tokenizer.encode("the terms of this License", add_special_tokens=False).ids
    assert tokenizer.decode(ids) == "the terms of this License"
    assert given(tmp_path) == path.read_bytes()


def test_a_translator_with_two_vocabularies_is_refused(sentencepiece_model, tmp_path):
    for name in ("source.spm", "target.spm"):
        (tmp_path / name).write_bytes(sentencepiece_model)
    (tmp_path / "vocab.json").write_text('{"</s>": 0, "<unk>": 1, "<pad>": 2}')
    (tmp_path / "tokenizer_config.json").write_text('{"source_lang": "en", "target_lang": "it"}')
    (tmp_path / "config.json").write_text('{"model_type": "marian"}')
    with pytest.raises(
        DataError, match=r"its tokenizer, MarianTokenizer, cannot be made one of `tokenizers`; give a to"
    ):
        given(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    what = r"has no tokenizer: no tokenizer.json, no vocab.\*, no .*; give a folder with a tokenizer.json \(--tok"
    with pytest.raises(DataError, match=what):
        given(tmp_path)
    (tmp_path / "vocab.txt").write_text("a\n")
    with pytest.raises(DataError, match=r"its tokenizer cannot be read: .+[^:]; fetch the folder again"):
        given(tmp_path)


def test_a_vocabulary_in_a_model_folder_is_converted(tmp_path):
    inside = tmp_path / "model" / "tokenizer"
    inside.mkdir(parents=True)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "there", "##abouts"]
    (inside / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    (inside / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (tmp_path / "model" / "model.json").write_text("{}")
    (tmp_path / "model" / "manifest.json").write_text("{}")
    tokenizer = Tokenizer.from_buffer(given(tmp_path / "model"))
    assert tokenizer.encode("Hello thereabouts", add_special_tokens=False).tokens == ["hello", "there", "##abouts"]


def test_code_that_lies_in_the_folder_is_not_run(folder):
    settings = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.Theirs", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "theirs.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Theirs: pass\n")
    assert given(folder) == (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"has no tokenizer: no tokenizer\.json"):
        given(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", ["none.json", "no/such/folder", "../none"])
def test_a_path_that_is_not_there_is_named(name):
    with pytest.raises(DataError, match=rf"{name}: cannot read the tokenizer: No such file.*; give a tokenizer.json"):
        given(name)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"not a tokenizer: .*; give a tokenizer.json"):
        given(tmp_path)


PROGRAM = """
import hashlib, sys
from pretrain.config.prepare import TokenizerConfig
from pretrain.tokenizer.file import read_given
from pretrain.errors import PretrainError
for name in sys.argv[1:]:
    try:
        print(hashlib.sha256(read_given(TokenizerConfig(kind="given", path=name)).content).hexdigest())
    except PretrainError as error:
        print(type(error).__name__, error.line())
"""


def fetch(home: Path, url: str, *names: str, **env: str) -> list[str]:
    """huggingface_hub reads its endpoint when it is imported, so each case is a process that imports it anew."""
    plain = {"HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "", "NO_PROXY": "127.0.0.1"}
    plain |= {"HF_HUB_ETAG_TIMEOUT": "100", "HF_HUB_DOWNLOAD_TIMEOUT": "100"}  # the server may be slow
    ran = run_python(PROGRAM, *names, anew=["huggingface_hub"], **(plain | env))
    assert ran.code == 0, ran.stderr
    return ran.stdout.splitlines()


def test_a_name_on_the_hub_is_fetched_its_tokenizer_only(folder, tmp_path):
    content = (folder / "tokenizer.json").read_bytes()
    wanted = {"tokenizer.json": content, "tokenizer_config.json": b"{}", "config.json": b'{"model_type": "gpt2"}'}
    others = {"model.safetensors": b"weights", "pytorch_model.bin": b"pickle", "tokenizer.py": b"raise SystemExit"}
    files = wanted | others
    with Hub({"lab/model": files, "lab/gated": files}, gated=("lab/gated",)) as hub:
        found, missing, gated = fetch(tmp_path / "home", hub.url, "lab/model", "lab/nothing", "lab/gated")
        assert set(hub.asked) == set(wanted)
    path = tmp_path / "same.json"
    path.write_bytes(content)
    assert [found] == fetch(tmp_path / "home", "http://127.0.0.1:9", str(path))
    refused = "no such file or folder, and no such model on the hub; check it, or set HF_TOKEN"
    assert missing == f"ConfigError lab/nothing: {refused}"
    assert gated == "ConfigError lab/gated: gated model; accept its licence on the hub and set HF_TOKEN"
    # The cache has it; what it has not cannot be fetched.
    again, other = fetch(tmp_path / "home", "http://127.0.0.1:9", "lab/model", "lab/other", HF_HUB_OFFLINE="1")
    assert again == found
    assert other.startswith("LaunchError lab/other: no such file or folder, and the Hugging Face hub cannot be reached")
