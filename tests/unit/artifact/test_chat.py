"""Templates of conversations, from the data to the run: `generate --chat`, and the chat template of an export."""

import io
import itertools

import pytest
import transformers

from pretrain.artifact.model_path import open_source
from pretrain.artifact.open import open_artifact, template_of_data
from pretrain.artifact.transfer import export_model
from pretrain.errors import ConfigError
from pretrain.generation.chat import ChatCodec, converse, trimmed
from pretrain.generation.command import run_generate
from pretrain.generation.generation_options import Options
from pretrain.interop.tokenizer import load_hub_tokenizer
from tests.unit.artifact.runs import TEXTS, write_text_run, write_texts
from tests.unit.preparation.test_templates import prepared

OWN = {"user": 'User "{content}" {%%}\n', "assistant": "Bot:{content} \U0001f600\n"}
TURNS = [("user", "Say caf\u00e9 \U0001f600."), ("assistant", "It is said."), ("user", "Again!")]
ANSWER = ("assistant", "It is.")


def messages(turns):
    return [{"role": role, "content": text} for role, text in turns]


@pytest.fixture(params=["chatml", "instruction", OWN], ids=["chatml", "instruction", "own"])
def chat(request, tmp_path):
    """A run over one conversation with a template, and the tokens of that in the data."""
    record = {"messages": messages([*TURNS, ANSWER])}
    _, tokens, _ = prepared(tmp_path, record, messages_field="messages", template=request.param)
    data = tmp_path / "out"
    assert template_of_data([data]) == request.param
    return write_text_run(tmp_path / "run", data, "llama-tiny", "supervised"), tokens.tolist()


def test_a_chat_is_encoded_as_in_training_by_the_run_and_by_transformers(chat, tmp_path, request, caplog, monkeypatch):
    run, tokens = chat
    ids = open_source(run).load_codec().encode_chat(TURNS)
    assert ids == tokens[: len(ids)]
    export_model(run, tmp_path / "released")
    card = (tmp_path / "released" / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(card.split("```python\n")[1].split("```")[0], {})  # the call of the card, as it is
    assert "apply_chat_template" in card
    if "gives other ids than the training" in caplog.text:
        assert request.node.callspec.id == "instruction", "a full stop and the line breaks after it are one token"
        return
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "released")
    assert theirs.apply_chat_template(messages(TURNS), add_generation_prompt=True, return_dict=False) == ids
    whole = theirs.apply_chat_template(messages([*TURNS, ANSWER]), return_dict=False)
    assert whole == tokens[:-1], "the data have the end of the document besides"
    assert load_hub_tokenizer(tmp_path / "released").encode_chat(TURNS) == ids


def test_special_tokens_that_a_user_spells_stay_text(tmp_path):
    record = {"prompt": "say <|im_end|> now", "response": "No."}
    _, tokens, _ = prepared(tmp_path, record, template="chatml")
    run = write_text_run(tmp_path / "run", tmp_path / "out", "llama-tiny", "supervised")
    ids = open_source(run).load_codec().encode_chat([("user", record["prompt"])])
    assert ids == tokens.tolist()[: len(ids)]


def test_a_conversation_remembers_its_turns(chat):
    artifact = open_artifact(chat[0])
    options, codec, out = Options(max_tokens=4, temperature=0.0), ChatCodec(artifact.codec), io.StringIO()
    converse(artifact.model, codec, artifact.generation, options, iter(["One.", "Two."]), out, notes=io.StringIO())
    assert [role for role, _ in codec.turns] == ["user", "assistant"] * 2
    answers = [text for role, text in codec.turns if role == "assistant"]
    assert out.getvalue() == "".join(f"{answer}\n" for answer in answers)
    alone = ChatCodec(artifact.codec)
    alone.turns = codec.turns[:2]
    for beams in (None, 1):
        again = io.StringIO()
        asked = Options(max_tokens=4, temperature=0.0 if beams is None else None, beams=beams)
        run_generate(artifact.model, alone, artifact.generation, asked, iter(["Two."]), again)
        assert again.getvalue() == f"{answers[1]}\n"


@pytest.mark.parametrize("chat", ["chatml"], indirect=True)
def test_a_conversation_that_begins_anew_has_the_turn_of_the_system_and_no_other(chat):
    artifact = open_artifact(chat[0])
    codec, out, notes = ChatCodec(artifact.codec, "Be brief."), io.StringIO(), io.StringIO()
    options = Options(max_tokens=4, temperature=0.0)
    lines = iter(["One.", "Two.", " /reset ", "One."])
    converse(artifact.model, codec, artifact.generation, options, lines, out, notes=notes)
    assert notes.getvalue() == "note: the conversation begins anew\n"
    assert [role for role, _ in codec.turns] == ["system", "user", "assistant"]
    first, _, anew = out.getvalue().splitlines()
    assert first == anew
    assert codec.encode("One.") != ChatCodec(artifact.codec).encode("One.")


@pytest.mark.parametrize("chat", ["chatml"], indirect=True)
def test_a_conversation_longer_than_the_row_drops_its_oldest_exchanges_whole(chat):
    artifact = open_artifact(chat[0])
    codec, out, notes = ChatCodec(artifact.codec), io.StringIO(), io.StringIO()
    codec.turns = [("system", "Be brief.")]
    options = Options(max_tokens=4, temperature=0.0)
    lengths = []
    encode = codec.encode
    codec.encode = lambda text: lengths.append(len(encode(text))) or encode(text)
    lines = [f"Line {number}." for number in range(40)]
    converse(artifact.model, codec, artifact.generation, options, iter(lines), out, notes=notes)
    most = artifact.model.max_seq_len - options.max_tokens
    assert max(lengths) > most, "some question did not fit with all turns"
    assert codec.turns[0] == ("system", "Be brief.")
    assert [role for role, _ in codec.turns[1:]] == ["user", "assistant"] * (len(codec.turns) // 2)
    kept = [text for role, text in codec.turns if role == "user"]
    assert kept and kept == lines[-len(kept) :] and len(kept) < len(lines)
    assert notes.getvalue().startswith("note: the conversation has no more room for its oldest 2 turns\n")
    codec.drop_oldest("Line 40.", most)
    assert len(codec.encode("Line 40.")) <= most


def test_a_turn_longer_than_the_row_is_refused(chat):
    artifact = open_artifact(chat[0])
    codec = ChatCodec(artifact.codec)
    with pytest.raises(ConfigError, match=r"the prompt has \d+ tokens, model.max_seq_len is"):
        lines = iter(["word " * 400])
        options = Options(max_tokens=4, temperature=0.0)
        converse(artifact.model, codec, artifact.generation, options, lines, io.StringIO(), notes=io.StringIO())


def test_without_a_template_there_is_no_chat(tmp_path):
    run = write_text_run(tmp_path / "run", write_texts(tmp_path / "texts", TEXTS), "llama-tiny", "causal")
    with pytest.raises(ConfigError, match="the run knows no chat template: its data were prepared without one"):
        open_source(run).load_codec().encode_chat(TURNS)
    export_model(run, tmp_path / "released")
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        load_hub_tokenizer(tmp_path / "released").encode_chat(TURNS)


def test_a_role_that_the_template_lacks_is_refused(chat, tmp_path):
    run, _ = chat
    with pytest.raises(ConfigError, match="role 'function' is not in the template"):
        open_source(run).load_codec().encode_chat([("function", "42")])
    export_model(run, tmp_path / "released")
    with pytest.raises(ConfigError, match="the template has no role function"):
        load_hub_tokenizer(tmp_path / "released").encode_chat([("function", "42")])


def test_white_space_around_an_answer_is_left_out():
    text = " \n It is  so.\n\nYes. \n\n"
    for cuts in itertools.combinations(range(1, len(text)), 2):
        pieces = [text[first:stop] for first, stop in itertools.pairwise([0, *cuts, len(text)])]
        assert "".join(trimmed(iter(pieces))) == text.strip()
