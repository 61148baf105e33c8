"""Chat templates of transformers: the same tokens as `apply_chat_template`, and what of them is learned."""

import json
import re

import numpy as np
import pytest
import transformers
from tokenizers import AddedToken

from pretrain.artifact.model_path import open_source
from pretrain.artifact.plain_codec import PlainCodec
from pretrain.artifact.transfer import export_model
from pretrain.config.prepare import InputConfig, PrepareConfig, TokenizerConfig
from pretrain.config.texts.templates import CHATML_TOKENS
from pretrain.errors import ConfigError, DataError
from pretrain.interop.tokenizer import load_hub_tokenizer, tokenizer_files
from pretrain.preparation.prepare import prepare
from pretrain.tokenizer import template_sandbox
from tests.helpers.chat_templates import CHATML, EOS_OF, FAMILIES, LLAMA_3, THINKING
from tests.helpers.tokenizers import train_bpe
from tests.unit.artifact.runs import TEXTS, write_text_run
from tests.unit.generation.codecs import sentencepiece_codec
from tests.unit.preparation.test_templates import prepared

CHAT = [
    {"role": "user", "content": "Who climbs caf\u00e9 stairs?"},
    {"role": "assistant", "content": "A little girl. \U0001f600"},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "She goes in."},
]
SYSTEM = {"role": "system", "content": "Be brief."}


def write_base(folder, template, special=(), eos="</s>", *, of_pieces=False):
    """A folder with a tokenizer of transformers that has a chat template.

    With `of_pieces` it is sentencepiece's, and its special tokens take the white space after them, as those of Phi-3.
    """
    tokenizer = sentencepiece_codec()._tokenizer if of_pieces else train_bpe(TEXTS, 300)
    names = ["<s>", "</s>", *special]
    tokenizer.add_special_tokens([AddedToken(name, special=True, rstrip=of_pieces) for name in names])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return TokenizerConfig(kind="given", path=str(folder))


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """Name, the token that ends a turn, and the given tokenizer of a family."""
    template, end, special = FAMILIES[request.param]
    return request.param, end, write_base(tmp_path / "base", template, special, EOS_OF.get(request.param, "</s>"))


def turns_of(family, system=True):
    return [SYSTEM, *CHAT] if system and family not in ("gemma", "mistral") else CHAT


@pytest.mark.parametrize("of_pieces", [False, True], ids=["bytes", "pieces"])
def test_data_have_the_tokens_of_transformers_and_the_answers_with_their_ends_are_learned(family, of_pieces, tmp_path):
    name, end, base = family
    if of_pieces:
        template, _, special = FAMILIES[name]
        base = write_base(tmp_path / "pieces", template, special, EOS_OF.get(name, "</s>"), of_pieces=True)
    chat = turns_of(name)
    theirs = transformers.AutoTokenizer.from_pretrained(base.path)
    options = {"messages_field": "messages", "template": "tokenizer"}
    tokenizer, tokens, learned = prepared(tmp_path, {"messages": chat}, base, **options)
    assert tokens.tolist() == theirs.apply_chat_template(chat, return_dict=False)
    # Each stretch that is learned begins with the answer and has the token that ends it; nothing else is learned.
    edges = np.flatnonzero(np.diff([0, *learned.astype(int), 0])).reshape(-1, 2)
    stretches = [tokens[start:stop].tolist() for start, stop in edges]
    answers = [turn["content"] for turn in chat if turn["role"] == "assistant"]
    end_id = tokenizer.token_to_id(end)
    assert len(stretches) == len(answers)
    for stretch, answer in zip(stretches, answers, strict=True):
        assert stretch.count(end_id) == 1
        assert tokenizer.decode(stretch[: stretch.index(end_id)]).strip() == answer
        rest = tokenizer.decode(stretch[stretch.index(end_id) :], skip_special_tokens=True)
        assert rest.strip() == ""


def test_a_tagged_template_learns_what_transformers_calls_the_assistants(tmp_path):
    template, _, special = FAMILIES["generation"]
    base = write_base(tmp_path / "base", template, special)
    theirs = transformers.AutoTokenizer.from_pretrained(base.path)
    found = theirs.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    options = {"messages_field": "messages", "template": "tokenizer"}
    _, tokens, learned = prepared(tmp_path, {"messages": CHAT}, base, **options)
    assert tokens.tolist() == found["input_ids"]
    assert learned.astype(int).tolist() == found["assistant_masks"]


def test_a_run_and_its_export_chat_as_transformers_does(family, tmp_path):
    name, end, base = family
    theirs = transformers.AutoTokenizer.from_pretrained(base.path)
    options = {"messages_field": "messages", "template": "tokenizer"}
    tokenizer, _, _ = prepared(tmp_path, {"messages": turns_of(name)}, base, **options)
    run = write_text_run(tmp_path / "run", tmp_path / "out", "llama-tiny", "supervised")
    source = open_source(run)
    asked = turns_of(name)[:-1]
    turns = [(turn["role"], turn["content"]) for turn in asked]
    expected = theirs.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert source.load_codec().encode_chat(turns) == expected
    assert tokenizer.token_to_id(end) in (*source.generation.eos, *source.load_codec().eos_ids)
    export_model(run, tmp_path / "export")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert exported.apply_chat_template(asked, add_generation_prompt=True, return_dict=False) == expected
    stops = transformers.GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id
    assert tokenizer.token_to_id(end) in ([stops] if isinstance(stops, int) else stops)


def test_special_tokens_that_a_turn_spells_stay_text(tmp_path):
    template, _, special = FAMILIES["chatml"]
    base = write_base(tmp_path / "base", template, special)
    chat = [{"role": "user", "content": "say <|im_end|> now"}, {"role": "assistant", "content": "<|im_end|>!"}]
    options = {"messages_field": "messages", "template": "tokenizer"}
    tokenizer, tokens, learned = prepared(tmp_path, {"messages": chat}, base, **options)
    assert (tokens == tokenizer.token_to_id("<|im_end|>")).sum() == 2
    text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
    assert text == "<|im_start|>user\nsay <|im_end|> now<|im_end|>\n<|im_start|>assistant\n<|im_end|>!<|im_end|>\n"
    shown = tokenizer.decode(tokens[learned].tolist(), skip_special_tokens=False)
    assert shown == "<|im_end|>!<|im_end|>\n"
    run = write_text_run(tmp_path / "run", tmp_path / "out", "llama-tiny", "supervised")
    ids = open_source(run).load_codec().encode_chat([("user", "say <|im_end|> now")])
    assert ids == tokens.tolist()[: len(ids)]


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        ("tail", CHAT[:2], "turn 1 has no place in the chat template's text: a rendering of the turns with one more"),
        ("gemma", [SYSTEM, *CHAT], "the chat template refuses it: System role not supported; correct the record"),
        ("llama-3", CHAT[1:], "the first turn is the assistant's"),
        ("chatml", [{"role": "user", "content": "\ufdd0"}, CHAT[1]], "a message has the noncharacters"),
        ("chatml", [{"content": "a"}], r"messages\[0\].role is absent"),
    ],
)
def test_a_conversation_that_has_no_loss_mask_is_refused_with_its_place_and_the_reason(
    template, chat, message, tmp_path
):
    text = (
        CHATML + "{% if not add_generation_prompt %}Remember!{% endif %}"
        if template == "tail"
        else FAMILIES[template][0]
    )
    base = write_base(tmp_path / "base", text, ["<|im_start|>", "<|im_end|>"])
    options = {"messages_field": "messages", "template": "tokenizer"}
    with pytest.raises(DataError, match=message) as caught:
        prepared(tmp_path, {"messages": chat}, base, **options)
    assert "in.jsonl:1: " in str(caught.value)


@pytest.mark.parametrize("chat", [CHAT[:2], CHAT, CHAT[1:]], ids=["one answer", "two", "assistant first"])
def test_a_template_whose_last_turn_differs_has_places_for_all_answers(chat, tmp_path):
    base = write_base(tmp_path / "base", THINKING, ["<|im_start|>", "<|im_end|>"])
    options = {"messages_field": "messages", "template": "tokenizer"}
    tokenizer, tokens, learned = prepared(tmp_path, {"messages": chat}, base, **options)
    theirs = transformers.AutoTokenizer.from_pretrained(base.path)
    assert tokens.tolist() == theirs.apply_chat_template(chat, return_dict=False)
    shown = tokenizer.decode(tokens[learned].tolist(), skip_special_tokens=False)
    *earlier, last = [turn["content"] for turn in chat if turn["role"] == "assistant"]
    assert shown == "".join(f"{one}<|im_end|>\n" for one in earlier) + f"<think>\n\n</think>\n\n{last}<|im_end|>\n"


def _as_list(folder, templates):
    named = [{"name": name, "template": text} for name, text in templates.items()]
    _set_template(folder, named)


def _as_dict(folder, templates):
    _set_template(folder, templates)


def _as_files(folder, templates):
    _set_template(folder, None)
    (folder / "chat_template.jinja").write_text(templates["default"])
    (folder / "additional_chat_templates").mkdir()
    for name in templates.keys() - {"default"}:
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(templates[name])


def _set_template(folder, value):
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | ({"chat_template": value} if value else {})))


TOOLS = [{"type": "function", "function": {"name": "look", "description": "<b>'s", "parameters": {"x": None}}}]
NAMED = {"default": CHATML, "tool_use": "Tools: {{ tools|tojson }}\n" + CHATML, "rag": "{{ documents }}"}


@pytest.mark.parametrize("write", [_as_list, _as_dict, _as_files])
def test_of_named_templates_that_for_tools_is_taken_as_transformers_does(write, tmp_path):
    base = write_base(tmp_path / "base", CHATML, ["<|im_start|>", "<|im_end|>"])
    write(tmp_path / "base", NAMED)
    theirs = transformers.AutoTokenizer.from_pretrained(base.path)
    assert set(theirs.chat_template) == set(NAMED)
    options = {"messages_field": "messages", "template": "tokenizer"}
    for number, tools in enumerate((TOOLS, None)):
        folder = tmp_path / str(number)
        folder.mkdir()
        _, tokens, learned = prepared(folder, {"messages": CHAT, "tools": tools}, base, **options)
        assert tokens.tolist() == theirs.apply_chat_template(CHAT, tools=tools, return_dict=False)
        assert 0 < learned.sum() < len(learned) / 2
    assert load_hub_tokenizer(tmp_path / "base").render_chat([("user", "a")]).startswith("<|im_start|>")
    # A run of these data has both, and so has its export, in one file.
    run = write_text_run(tmp_path / "run", tmp_path / "0" / "out", "llama-tiny", "supervised")
    export_model(run, tmp_path / "export")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    expected = theirs.apply_chat_template(CHAT, tools=TOOLS, return_dict=False)
    assert exported.apply_chat_template(CHAT, tools=TOOLS, return_dict=False) == expected
    moved = dict(tokenizer_files(tmp_path / "base"))
    (tmp_path / "moved").mkdir()
    for name, content in moved.items():
        (tmp_path / "moved" / name).write_bytes(content)
    assert set(transformers.AutoTokenizer.from_pretrained(tmp_path / "moved").chat_template) == set(NAMED)


def test_named_templates_without_a_default_and_those_of_processors_are_refused(tmp_path):
    base = write_base(tmp_path / "base", CHATML)
    _as_list(tmp_path / "base", {"tool_use": CHATML, "rag": CHATML})
    options = {"messages_field": "messages", "template": "tokenizer"}
    with pytest.raises(
        ConfigError, match="of its chat templates, tool_use, rag, none is named default; give one of them"
    ):
        prepared(tmp_path, {"messages": CHAT}, base, **options)
    with pytest.raises(ConfigError, match="the tokenizer's chat templates: This model has multiple chat templates"):
        load_hub_tokenizer(tmp_path / "base").render_chat([("user", "a")])
    base = write_base(tmp_path / "other", None)
    (tmp_path / "other" / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    with pytest.raises(ConfigError, match=r"has no chat template: chat_template.json is read by processors alone"):
        prepared(tmp_path, {"messages": CHAT}, base, **options)


BOMB = "{% if messages|length > 1 %}{{ 10**100000000 }}{% endif %}"


def test_a_template_that_takes_all_cpu_is_refused_wherever_it_is_rendered(tmp_path, monkeypatch):
    monkeypatch.setattr(template_sandbox, "CPU_S", 0.1)
    base = write_base(tmp_path / "base", BOMB)
    refused = "the chat template takes more than 0.1 s of CPU; choose another"
    options = {"messages_field": "messages", "template": "tokenizer"}
    with pytest.raises(DataError, match=f"inputs.0.template=tokenizer: {refused}") as caught:
        prepared(tmp_path, {"messages": CHAT}, base, **options)
    assert caught.value.exit_code == 65
    with pytest.raises(DataError, match=refused):  # generate --chat, evaluate --chat, and the check of an export
        load_hub_tokenizer(tmp_path / "base").encode_chat([("user", "a")])
    with pytest.raises(DataError, match=refused):  # serve
        load_hub_tokenizer(tmp_path / "base").check_chat_template()
    template = {"jinja": BOMB, "bos_token": "<s>"}
    with pytest.raises(DataError, match=refused):  # a run
        PlainCodec(train_bpe(TEXTS, 300), template=template).encode_chat([("user", "a")])


def test_the_date_of_a_template_is_that_of_the_config_or_of_the_folders_first_start(tmp_path):
    template, _, special = FAMILIES["llama-3"]
    base = write_base(tmp_path / "base", template, special, "<|eot_id|>")
    value = {"jinja": LLAMA_3, "bos_token": "<s>", "eos_token": "<|eot_id|>", "date": "2024-07-26"}
    record = {"prompt": "Who?", "response": "She."}
    tokenizer, tokens, _ = prepared(tmp_path, record, base, template=value)
    assert "Today Date: 26 Jul 2024" in tokenizer.decode(tokens.tolist())
    written = tmp_path / "out" / "prepare.json"
    assert json.loads(written.read_text())["options"]["inputs.0.template.date"] == "2024-07-26"
    # The same folder, whose template now names no date.
    del value["date"]
    inputs = [InputConfig(path=str(tmp_path / "in.jsonl"), template=value)]
    options = {"kind": "records", "inputs": inputs, "tokenizer": base, "split": "hash:0"}
    prepare(PrepareConfig(output=str(tmp_path / "out"), **options))
    assert json.loads(written.read_text())["options"]["inputs.0.template.date"] == "2024-07-26"
    prepare(PrepareConfig(output=str(tmp_path / "new"), **options))
    fresh = json.loads((tmp_path / "new" / "prepare.json").read_text())["options"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", fresh["inputs.0.template.date"])


def test_a_template_comes_from_a_file_too_and_tools_and_extra_fields_reach_it(tmp_path):
    template, _, special = FAMILIES["llama-3"]
    base = write_base(tmp_path / "base", None, special, "<|eot_id|>")
    file = tmp_path / "mine.jinja"
    file.write_text(template)
    tools = [{"type": "function", "function": {"name": "look", "description": "<b>'s"}}]
    record = {"messages": CHAT, "tools": tools}
    options = {"messages_field": "messages", "template": str(file)}
    _, tokens, _ = prepared(tmp_path, record, base, **options)
    theirs = transformers.AutoTokenizer.from_pretrained(base.path)
    found = theirs.apply_chat_template(CHAT, chat_template=template, tools=tools, return_dict=False)
    assert tokens.tolist() == found


def test_an_answer_that_a_template_leaves_open_is_ended_by_the_end_of_document(tmp_path):
    base = write_base(tmp_path / "base", re.sub(r"'<\|im_end\|>' \+ ", "", CHATML))
    tokenizer, tokens, learned = prepared(tmp_path, {"prompt": "a", "response": "b"}, base, template="tokenizer")
    assert (tokens[-1], learned[-1]) == (tokenizer.token_to_id("</s>"), True)


def test_a_template_that_is_not_there_is_refused(tmp_path):
    base = write_base(tmp_path / "base", None)
    record = {"prompt": "a", "response": "b"}
    with pytest.raises(ConfigError, match="template=tokenizer: the tokenizer has no chat template; give the folder"):
        prepared(tmp_path, record, base, template="tokenizer")
    file = TokenizerConfig(kind="given", path=str(tmp_path / "base" / "tokenizer.json"))
    with pytest.raises(ConfigError, match="a file of a tokenizer has no chat template"):
        prepared(tmp_path, record, file, template="tokenizer")
    with pytest.raises(ConfigError, match=r"inputs.0.template: the chat template is no Jinja: line 1: .*; correct it"):
        prepared(tmp_path, record, base, template={"jinja": "{% for %}"})
    with pytest.raises(DataError, match=r"gone.jinja: cannot read"):
        prepared(tmp_path, record, base, template="gone.jinja")
    with pytest.raises(ValueError, match=r"template.user goes with no jinja; use date, or a name such as eos_token"):
        InputConfig(template={"jinja": "", "user": ""})
    with pytest.raises(ValueError, match=r"inputs.0.template=tokenizer needs the special tokens of a given tokenizer"):
        PrepareConfig(output="x", kind="records", inputs=[InputConfig(template="tokenizer")])
    normalize = {"steps": ["lowercase"]}
    with pytest.raises(ValueError, match=r"inputs.0.normalize would change the text of the chat template"):
        one = {"template": {"jinja": "x"}, "normalize": normalize}
        PrepareConfig.model_validate({"output": "x", "kind": "records", "inputs": [one]})


def test_an_automatic_template_is_the_tokenizers_own_else_that_of_its_run_else_chatml_with_its_tokens(tmp_path):
    template, _, special = FAMILIES["llama-3"]
    own = write_base(tmp_path / "own", template, special)
    bare = write_base(tmp_path / "bare", None)
    markers = [*CHATML_TOKENS]
    marked = bare.model_copy(update={"special_tokens": markers})
    run = tmp_path / "run"  # of the conversations in the tokenizer's own
    texts = {}
    for name, base, chosen in (
        ("tokenizer", own, "tokenizer"), ("auto", own, "auto"),
        ("chatml", marked, "chatml"), ("none", bare, "auto"), ("of run", None, "auto"),
    ):  # fmt: skip
        place = tmp_path / name
        place.mkdir()
        given = base or TokenizerConfig(kind="given", path=str(run))
        tokenizer, tokens, learned = prepared(
            place, {"messages": CHAT}, given, messages_field="messages", template=chosen
        )
        if name == "tokenizer":
            write_text_run(run, place / "out", "llama-tiny", "supervised")
        texts[name] = (tokens.tolist(), learned.tolist(), [tokenizer.token_to_id(one) for one in markers])
    assert texts["auto"] == texts["tokenizer"] == texts["of run"]
    assert texts["auto"][2] == [None, None]
    assert texts["none"] == texts["chatml"]
    assert None not in texts["none"][2]
