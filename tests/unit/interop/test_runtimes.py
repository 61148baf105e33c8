"""What other programs do not compute is refused by its key, and a tokenizer that they do not have by its part."""

import json

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from pretrain.artifact.runtime_export import export_for_runtime
from pretrain.config.model import SpecialTokens
from pretrain.errors import ConfigError, LaunchError
from pretrain.families import FAMILIES
from pretrain.interop.runtimes import Exported, find_runtime
from pretrain.interop.runtimes.gguf_vocabulary import read_vocabulary
from pretrain.interop.write import About
from pretrain.tokenizer.file import dump_tokenizer
from tests.helpers.tokenizers import train_bpe, train_char, train_sentencepiece
from tests.unit.interop.releases import tiny
from tests.unit.interop.test_card import card

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = ["a small text, and a small text"]
WORDS = ["a small text, and smaller texts", "aaa aaaaa aaaaaa aaaaaaa aaaaaaaa"]


def check(to, preset, **model):
    """Checks the model alone."""
    config = tiny(preset, **model)
    find_runtime(to).check_model(config, FAMILIES[preset.removesuffix("-tiny")])


@pytest.mark.parametrize(
    ("to", "preset", "stack", "message"),
    [
        ("gguf", "llama-tiny", {"activation": "relu"}, "decoder.activation=relu: llama.cpp computes silu in a llama"),
        ("gguf", "llama-tiny", {"rope_scaling": {"kind": "yarn", "factor": 2}}, "decoder.rope_scaling.kind=yarn: "),
        ("gguf", "mistral-tiny", {"window": 8}, "decoder.window=8: llama.cpp computes null in a mistral"),
        ("gguf", "bert-tiny", {}, "bert is not exported for llama.cpp, only gemma, gemma2, "),
        ("onnx", "mixtral-tiny", {}, "mixtral is not exported for ONNX Runtime, only bart"),
        ("onnx", "lfm2-tiny", {}, "lfm2 is not exported for ONNX Runtime, only bart"),
        ("gguf", "qwen3_next-tiny", {}, "qwen3_next is not exported for"),
        ("ctranslate2", "llama-tiny", {"rope_scaling": {"kind": "llama3", "factor": 2}}, "decoder.rope_scaling.kind"),
        ("ctranslate2", "gpt2-tiny", {"norm_eps": 1e-3}, "decoder.norm_eps=0.001: CTranslate2 computes 1e-05"),
        ("ctranslate2", "bert-tiny", {}, "head.kind=lm: CTranslate2 computes none in a bert"),
        ("ctranslate2", "bart-tiny", {"activation": "relu2"}, "decoder.activation=relu2: CTranslate2 computes gelu or"),
    ],
)
def test_a_key_that_is_not_computed_is_named(to, preset, stack, message):
    place = "encoder" if preset.startswith("bert") else "decoder"
    with pytest.raises(ConfigError) as error:
        check(to, preset, **{place: stack})
    assert str(error.value).startswith(f"model: {message}") and "export to hf" in str(error.value)


def test_a_head_over_labels_has_no_graph():
    with pytest.raises(ConfigError, match=r"head\.kind=labels: ONNX Runtime computes lm or none in a bert"):
        check("onnx", "bert-tiny", head={"kind": "labels", "labels": ["a", "b"]}, tied_embeddings=False)


@pytest.mark.parametrize("to", ["gguf", "onnx", "ctranslate2"])
@pytest.mark.parametrize("preset", ["gpt2-tiny", "llama-tiny"])
def test_usual_models_are_computed(to, preset):
    check(to, preset)


def test_what_several_keys_decide_is_refused_too():
    for values, message in (({"head_width": 8}, "head_width=8"), ({"score_factor": 0.5}, "score_factor=0.5")):
        config = tiny("qwen2-tiny", decoder=values)
        exported = Exported(None, "x", config, "qwen2", {}, "fp32")
        with pytest.raises(ConfigError, match=f"decoder.{message}.*: llama.cpp has another value built into a qwen2"):
            find_runtime("gguf").check(exported)


def vocabulary(tokenizer, special=None, vocab_size=300, **settings):
    files = {"tokenizer.json": dump_tokenizer(tokenizer), "tokenizer_config.json": json.dumps(settings).encode()}
    return read_vocabulary(files, special or SpecialTokens(eos=0), vocab_size)


def test_a_tokenizer_of_prepare_is_one_of_llama_cpp():
    tokenizer = train_bpe(TEXTS, 280)
    found = vocabulary(tokenizer, chat_template="{{ x }}")
    size = tokenizer.get_vocab_size()
    assert found["ggml.pre"] == "gpt-2" and found["chat_template"] == "{{ x }}"
    assert found["ggml.tokens"][:2] == ["<|endoftext|>", "!"]
    assert found["ggml.tokens"][size] == f"[PAD{size}]" and len(found["ggml.tokens"]) == 300
    assert found["ggml.token_type"] == [3] + [1] * (size - 1) + [5] * (300 - size)
    assert len(found["ggml.merges"]) == size - 257 and all(merge.count(" ") == 1 for merge in found["ggml.merges"])
    assert not found["ggml.add_bos_token"] and not found["ggml.add_eos_token"]


def test_pre_tokenizers_are_recognized():
    tokenizer = train_bpe(TEXTS, 280)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    assert vocabulary(tokenizer)["ggml.pre"] == "smollm"
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    assert vocabulary(tokenizer)["ggml.pre"] == "dbrx"
    tokenizer.model.ignore_merges = True
    assert vocabulary(tokenizer)["ggml.pre"] == "llama-bpe"


def test_a_bpe_of_sentencepiece_is_one_of_llama_cpp():
    tokenizer = train_sentencepiece(WORDS, 300)
    found = vocabulary(tokenizer, SpecialTokens(bos=1, eos=2), 310)
    assert found["ggml.model"] == "llama" and found["ggml.add_space_prefix"] and found["ggml.add_bos_token"]
    assert found["ggml.token_type"] == [3] * 3 + [6] * 256 + [1] * 41 + [5] * 10
    assert (found["ggml.unknown_token_id"], found["ggml.bos_token_id"], found["ggml.eos_token_id"]) == (0, 1, 2)
    # The first merge of SentencePiece is the first piece after the bytes.
    assert found["ggml.scores"][259:262] == [0.0, -1.0, -2.0] and len(found["ggml.scores"]) == 310
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    assert not vocabulary(tokenizer, SpecialTokens(bos=1, eos=2))["ggml.add_space_prefix"]


def take_a_merge(content):
    """Removes one of several pairs that make the same token."""
    merges = content["model"]["merges"]
    made = ["".join(pair) for pair in merges]
    return merges.pop(next(number for number, token in enumerate(made) if made.count(token) > 1))


def put_a_merge_last(content):
    content["model"]["merges"].append(take_a_merge(content))


def leave_out_a_byte(content):
    content["model"]["vocab"] = {name: n for name, n in content["model"]["vocab"].items() if name != "<0x41>"}


def normalize_an_added_token(content):
    content["added_tokens"][1]["normalized"] = True


def put_spaces_by_words(content):
    spaces = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": False}
    content |= {"normalizer": None, "pre_tokenizer": spaces}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (take_a_merge, "'.+' and '.+' are not merged, and make the token '.+'"),
        (put_a_merge_last, "merges that make '.+' are at several places"),
        (leave_out_a_byte, "its vocabulary lacks 1 of the 256 bytes"),
        (normalize_an_added_token, "'<s>' is normalized before it is found"),
        (put_spaces_by_words, "its normalizer and pre_tokenizer are not those of LLaMA 2 or Gemma"),
    ],
)
def test_a_bpe_with_bytes_that_is_not_one_of_sentencepiece_is_refused_by_its_part(change, message):
    content = json.loads(dump_tokenizer(train_sentencepiece(WORDS, 300)))
    change(content)
    with pytest.raises(ConfigError, match=message):
        read_vocabulary({"tokenizer.json": json.dumps(content).encode()}, SpecialTokens(bos=1, eos=2), 300)


def change_nothing(tokenizer):
    """Leaves a tokenizer as it is."""


def put_space_before(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def split_at_spaces(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()


def lower(tokenizer):
    tokenizer.normalizer = normalizers.Lowercase()


def compose(tokenizer):
    tokenizer.normalizer = normalizers.NFC()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (put_space_before, {}, "pre_tokenizer puts a space before a text"),
        (split_at_spaces, {}, "pre_tokenizer has Whitespace, and only those of GPT-2"),
        (lower, {}, r"it normalizes texts \(Lowercase\); export to hf$"),
        (compose, {}, r"it normalizes texts \(NFC\); export to hf; --no-check exports it"),
        (change_nothing, {"special": SpecialTokens(bos=0)}, "special_tokens.eos is not known"),
        (change_nothing, {"vocab_size": 200}, "it has the id [0-9]+, and the model 200 tokens"),
    ],
)
def test_another_tokenizer_is_refused_by_its_part(change, options, message):
    tokenizer = train_bpe(TEXTS, 280)
    change(tokenizer)
    with pytest.raises(ConfigError, match=message):
        vocabulary(tokenizer, **options)


def test_only_a_bpe_is_exported():
    with pytest.raises(ConfigError, match="its model is WordLevel, and only BPE is exported, of bytes or with byte"):
        vocabulary(train_char(TEXTS))
    with pytest.raises(ConfigError, match=r"llama.cpp needs a tokenizer.json"):
        read_vocabulary({}, SpecialTokens(eos=0), 300)


def test_an_unknown_format_and_a_missing_package_are_one_line(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="--to mlx is not known; use hf, gguf, onnx, ctranslate2"):
        export_for_runtime(tmp_path, tmp_path / "out", "mlx")
    monkeypatch.setattr("pretrain.interop.runtimes.runtime.find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"--to onnx needs onnx, onnxscript, onnxruntime.*\.\[onnx\]"):
        export_for_runtime(tmp_path, tmp_path / "out", "onnx")
    monkeypatch.setattr("pretrain.interop.runtimes.runtime.find_spec", lambda name: name)
    with pytest.raises(ConfigError, match="dtype='bf16' is not exported for ONNX Runtime; use fp32"):
        export_for_runtime(tmp_path, tmp_path / "out", "onnx", dtype="bf16")
    assert list(tmp_path.iterdir()) == []


def test_the_card_names_the_program():
    text = card(about=About(library="gguf", use=find_runtime("gguf").use(tiny("llama-tiny"))))
    assert text.startswith("---\nlibrary_name: gguf\n") and "```\nllama-cli -m model.gguf\n```" in text
    assert "from transformers" not in text
