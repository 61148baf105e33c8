"""Tokenizers of strangers: patterns that take too much, and chat templates, rendered as transformers does."""

import re

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from pretrain.config.prepare import TokenizerConfig
from pretrain.errors import DataError
from pretrain.interop.tokenizer import load_hub_tokenizer
from pretrain.tokenizer import release_probe
from pretrain.tokenizer.file import check_template_of, read_given
from pretrain.tokenizer.release_probe import CONVERSATION, TOOLS, check_patterns, check_renderings
from pretrain.utils.process import start_program
from tests.helpers.chat_templates import CHATML, FAMILIES
from tests.unit.preparation.readers.test_messages import TOOL_USE
from tests.unit.tokenizer.test_released import FAST, trained, written

GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = GPT_4.replace("{1,3}", "")
PANICS = "end in Onig: Regex search error: retry-limit-in-match over"
BOMBS = {
    "nested": ("(a+)+b", PANICS),
    "of its own letters": ("(ab|ba)*c|(x+x+)+y", PANICS),
    "looks ahead": ("(?:(?=z+)z)+b", "take more than 0.2 s of CPU"),
}
WHERE = {
    "pre_tokenizer": lambda one, pattern: setattr(
        one, "pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated")])
    ),
    "normalizer": lambda one, pattern: setattr(one, "normalizer", normalizers.Replace(Regex(pattern), "c")),
}


def with_pattern(place, pattern):
    tokenizer = Tokenizer.from_buffer(trained("bpe"))
    WHERE[place](tokenizer, pattern)
    return tokenizer.to_str().encode()


@pytest.mark.parametrize("place", WHERE)
@pytest.mark.parametrize("pattern", [GPT_4, GPT_4O, r"\d{3}(?=(?:\d{3})*\b)", r" ?[^(\s|[.,!?])]+"])
def test_patterns_of_releases_pass(place, pattern):
    check_patterns(with_pattern(place, pattern), "x")


@pytest.mark.parametrize("place", WHERE)
@pytest.mark.parametrize("case", BOMBS)
def test_a_pattern_that_takes_too_much_is_refused_wherever_it_is_read(case, place, tmp_path, monkeypatch):
    monkeypatch.setattr(release_probe, "CPU_S", 0.2)
    pattern, reason = BOMBS[case]
    file = tmp_path / "tokenizer.json"
    file.write_bytes(with_pattern(place, pattern))
    said = f"its regular expressions ({pattern.encode().decode()!r}) cannot be run: over 4,096 characters, "
    message = f"^{re.escape(str(file))}: {re.escape(said)}'.+'..., they {reason}; choose another tokenizer"
    for read, path in ((given, file), (given, tmp_path), (load_hub_tokenizer, tmp_path)):
        with pytest.raises(DataError, match=message) as caught:
            read(path)
        assert "\n" not in caught.value.line()


def given(path):
    return read_given(TokenizerConfig(kind="given", path=str(path)))


def release(folder, template, kind="bpe", **files):
    settings = FAST | {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    return written(folder, kind, **({"tokenizer_config__json": settings} | files))


@pytest.mark.parametrize("family", ["llama-3", "generation", "tools"])
def test_a_conversation_of_a_family_is_that_of_transformers(family, tmp_path):
    template = TOOL_USE if family == "tools" else FAMILIES[family][0]
    found = given(release(tmp_path, template))
    value = {"jinja": template, "bos_token": "<s>", "eos_token": "</s>"}
    texts = check_renderings(value, found.theirs, "x")
    check_template_of(found, value, TokenizerConfig(kind="given", path=str(tmp_path)))
    turns = [*CONVERSATION[:2]]
    if family != "llama-3":  # which has the date of today
        for tools in (None, TOOLS):
            assert found.theirs.apply_chat_template(turns, tools=tools, tokenize=False) in texts
    if family == "tools":
        assert any('"description": "Looks <up>"' in text for text in texts), "tools are written"


THERE = "{% if 'cached' in strftime_now|string %}"
"""True in transformers alone."""
OTHERWISE = {
    "a text": (THERE + "b{% else %}a{% endif %}", "for 1 turn: 'a' here, and 'b' in"),
    "with tools": (
        "{% if tools and add_generation_prompt %}" + THERE + "b{% endif %}{% endif %}ac",
        "for 1 turn with tools and a generation prompt: 'ac' here, and 'bac' in",
    ),
    "of two turns": (
        "a{% if messages|length > 1 %}" + THERE + "{{ messages[1].content|upper }}{% endif %}{% endif %}",
        f"for 2 turns: '' here, and {CONVERSATION[1]['content'].upper()!r} in",
    ),
    "a refusal": (THERE + "{{ raise_exception('no') }}{% endif %}a", "for 1 turn: 'a' here, and refused (no) in"),
    "CPU": (
        "{% set n = 10 %}" + THERE + "{{ n ** (n ** 8) }}{% endif %}a",
        "for 1 turn: 'a' here, and refused (it would take more than 0.2 s of CPU) in",
    ),
    "memory": (
        "{% set n = 10 %}" + THERE + "{{ ('a' * n ** 10)|length }}{% endif %}a",
        "for 1 turn: 'a' here, and refused (it would take more than 512 MiB of memory) in",
    ),
}


def test_the_program_itself_says_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(release_probe, "start_program", start_program)  # which forks stand for
    template, said = OTHERWISE["CPU"]
    value = {"jinja": template, "bos_token": "<s>", "eos_token": "</s>"}
    monkeypatch.setattr(release_probe, "CPU_S", 0.3)
    with pytest.raises(DataError, match=re.escape(said.replace("0.2", "0.3"))):
        check_renderings(value, given(release(tmp_path, template)).theirs, "x", tools=[None])
    check_patterns(with_pattern("normalizer", r"\d{3}(?=(?:\d{3})*\b)\d"), "x")


@pytest.mark.parametrize(("template", "said"), OTHERWISE.values(), ids=OTHERWISE)
def test_a_template_that_transformers_renders_otherwise_is_refused_with_the_difference(
    template, said, tmp_path, monkeypatch
):
    monkeypatch.setattr(release_probe, "CPU_S", 0.2)
    config = TokenizerConfig(kind="given", path=str(release(tmp_path, template)))
    message = f"^{tmp_path}: its chat template, {re.escape(said)} transformers; correct a copy of it"
    with pytest.raises(DataError, match=message):
        check_template_of(read_given(config), {"jinja": template}, config)
    if "tools" not in template:  # which no prompt of ours has
        with pytest.raises(DataError, match=message):
            load_hub_tokenizer(tmp_path).check_chat_template()


def test_a_conversation_with_other_ids_is_refused_unless_tokens_are_added(tmp_path):
    # As AutoTokenizer builds Qwen2's, but for a rule that no text of the first probe meets.
    tokenizer = Tokenizer.from_buffer(trained("bpe"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("assistant", "x")])
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(Regex(QWEN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_alone])
    files = {"config__json": {"model_type": "qwen2"}, "tokenizer_config__json": {"chat_template": CHATML}}
    written(tmp_path, **files)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    config = TokenizerConfig(kind="given", path=str(tmp_path))
    found = read_given(config)
    value = {"jinja": CHATML}
    with pytest.raises(DataError, match=r"a conversation, '.+', is \[.+\], and in transformers \[.+\]; give its"):
        check_template_of(found, value, config)
    check_template_of(found, value, config.model_copy(update={"special_tokens": ["<|im_end|>"]}))
