"""Tokenizers of released models: how their documents begin and end, in the data, a run and its export."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from tokenizers import processors

from pretrain.artifact.lora import check_tokens
from pretrain.artifact.model_path import open_source
from pretrain.artifact.open import open_artifact
from pretrain.artifact.transfer import export_model
from pretrain.config.data import DataConfig
from pretrain.config.prepare import PrepareConfig, TokenizerConfig
from pretrain.errors import ConfigError, DataError
from pretrain.generation.command import run_generate
from pretrain.generation.generation_options import Options
from pretrain.interop.tokenizer import load_hub_tokenizer, tokenizer_files
from pretrain.preparation.prepare import prepare
from pretrain.shards.dataset import open_dataset
from pretrain.shards.index import load_index
from pretrain.tokenizer.file import dump_tokenizer, load_tokenizer
from pretrain.tokenizer.roles import start_id
from tests.helpers.tokenizers import train_bpe
from tests.unit.artifact.runs import TEXTS, write_text_run
from tests.unit.preparation.test_templates import members_of, prepared

MARKS = ["<s>", "<|im_start|>", "<|im_end|>"]
RECORD = {"prompt": "Who climbs into it?", "response": "A little girl."}
TURNS = [("user", RECORD["prompt"])]


def write_released(folder: Path, eos: str = "<|im_end|>", *, begins: bool = False) -> Path:
    """Writes a folder as transformers does, with a tokenizer that ends texts by `eos`; it `begins` them by <s>."""
    tokenizer = train_bpe(TEXTS, 300)
    tokenizer.add_special_tokens(MARKS)
    if begins:
        first = [("<s>", tokenizer.token_to_id("<s>"))]
        template = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=first)
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos)
    fast.save_pretrained(folder)
    return folder


def given(folder: Path, **options) -> TokenizerConfig:
    return TokenizerConfig(kind="given", path=str(folder), **options)


def eos_of_export(folder: Path) -> tuple[str, int | list[int]]:
    """The end token by the tokenizer, and by what `generate` of transformers stops at."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer.eos_token, transformers.GenerationConfig.from_pretrained(folder).eos_token_id


def test_the_eos_token_of_a_folder_ends_documents_and_stays_in_the_export(tmp_path):
    released = write_released(tmp_path / "released")
    tokenizer, tokens, learned = prepared(tmp_path, RECORD, given(released), template="chatml")
    data, end = tmp_path / "out", tokenizer.token_to_id("<|im_end|>")
    assert load_index(data).eos_id == end
    assert (tokens[-1], learned[-1]) == (end, True)
    run = write_text_run(tmp_path / "run", data, "llama-tiny", "supervised")
    assert open_source(run).load_codec().eos_ids == (end,)
    export_model(run, tmp_path / "export")
    assert eos_of_export(tmp_path / "export") == ("<|im_end|>", end)


def test_a_bare_file_ends_documents_by_a_usual_name_or_by_that_of_the_config(tmp_path):
    file = write_released(tmp_path / "released") / "tokenizer.json"
    for number, (options, name) in enumerate([({}, "<|endoftext|>"), ({"eos": "<|im_end|>"}, "<|im_end|>")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        tokenizer, tokens, _ = prepared(folder, RECORD, given(file, **options), template="chatml")
        assert tokens[-1] == load_index(folder / "out").eos_id == tokenizer.token_to_id(name)
    with pytest.raises(DataError, match=r"no end-of-document token </s>; its special tokens are .*tokenizer.eos"):
        prepared(tmp_path, RECORD, given(file, eos="</s>"), template="chatml")


def test_a_token_that_the_folder_alone_calls_special_is_marked(tmp_path):
    released = write_released(tmp_path / "released")
    content = json.loads((released / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = token["content"] != "<|im_end|>"
    (released / "tokenizer.json").write_text(json.dumps(content))
    tokenizer, tokens, _ = prepared(tmp_path, RECORD, given(released), template="chatml")
    assert tokens[-1] == tokenizer.token_to_id("<|im_end|>")
    assert (tokens == tokens[-1]).sum() == 3, "two turns and the document"


def test_a_run_on_conversations_stops_at_the_end_of_a_turn_as_does_its_export(tmp_path):
    released = write_released(tmp_path / "released", "<|endoftext|>")
    tokenizer, _, _ = prepared(tmp_path, RECORD, given(released), template="chatml")
    run = write_text_run(tmp_path / "run", tmp_path / "out", "llama-tiny", "supervised")
    ends = [tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|im_end|>")]
    export_model(run, tmp_path / "export")
    assert eos_of_export(tmp_path / "export") == ("<|endoftext|>", ends)
    for path in (run, tmp_path / "export"):
        artifact = open_artifact(path)
        constraints = Options().constraints(artifact.model, artifact.codec, artifact.generation)
        assert constraints.eos_ids == tuple(ends)


def prepared_texts(folder: Path, tokenizer: TokenizerConfig, kind: str = "text") -> Path:
    """A shard folder of TEXTS, one long."""
    texts = [*TEXTS, " ".join(TEXTS * 20)]
    (folder.parent / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    inputs = [{"path": str(folder.parent / "texts.jsonl")}]
    prepare(PrepareConfig(output=str(folder), kind=kind, inputs=inputs, tokenizer=tokenizer, split="hash:0"))
    return folder


def continued(path: Path) -> str:
    artifact, out = open_artifact(path), io.StringIO()
    options = Options(max_tokens=8, temperature=0.0)
    run_generate(artifact.model, artifact.codec, artifact.generation, options, iter(TEXTS), out)
    return out.getvalue()


@pytest.mark.parametrize(("adds", "begin"), [(True, None), (True, False), (False, None), (False, True)])
def test_a_run_and_its_export_continue_a_prompt_alike_as_its_documents_began(tmp_path, adds, begin):
    """The post-processor of the given folder begins texts with <s> or not, and the config may say otherwise."""
    released = write_released(tmp_path / "released", begins=adds)
    data = prepared_texts(tmp_path / "data", given(released, begin=begin))
    begins = adds if begin is None else begin
    bos = load_tokenizer(data / "tokenizer.json").token_to_id("<s>")
    facts = json.loads((data / "index.json").read_text())
    assert facts.get("begin_id") == (bos if begins else None) == load_index(data).begin_id
    assert ("begin_id" in facts) == begins
    if begin is None:
        assert (data / "tokenizer.json").read_bytes() == (released / "tokenizer.json").read_bytes()
    tokens = members_of(data)["tokens.npy"]
    ends = tokens == load_index(data).eos_id
    assert ends.sum() == len(TEXTS) + 1
    assert (tokens == bos).sum() == (ends.sum() if begins else 0)
    if begins:
        assert tokens[0] == bos and (tokens[1:][ends[:-1]] == bos).all()
    run = write_text_run(tmp_path / "run", data, "llama-tiny", "causal", seq_len=64)
    export_model(run, tmp_path / "export")
    ids = open_source(run).load_codec().encode(TEXTS[0])
    assert ids == tokens[: len(ids)].tolist() == load_hub_tokenizer(tmp_path / "export").encode(TEXTS[0])
    assert continued(run) == continued(tmp_path / "export")


def test_data_from_before_begin_with_nothing_in_the_run_and_its_export(tmp_path):
    data = prepared_texts(tmp_path / "data", given(write_released(tmp_path / "released", begins=True)))
    index = json.loads((data / "index.json").read_text())
    assert index.pop("begin_id") is not None
    (data / "index.json").write_text(json.dumps(index))
    run = write_text_run(tmp_path / "run", data, "llama-tiny", "causal", seq_len=64)
    export_model(run, tmp_path / "export")
    assert open_source(run).load_codec().encode("") == load_hub_tokenizer(tmp_path / "export").encode("") == []
    assert continued(run) == continued(tmp_path / "export")


def test_a_conversation_begins_once_in_the_data_the_run_and_its_export(tmp_path):
    released = write_released(tmp_path / "released", begins=True)
    tokenizer, tokens, learned = prepared(tmp_path, RECORD, given(released), template="chatml")
    bos = tokenizer.token_to_id("<s>")
    assert (tokens == bos).tolist() == [True, *[False] * (len(tokens) - 1)]
    assert not learned[0]
    run = write_text_run(tmp_path / "run", tmp_path / "out", "llama-tiny", "supervised")
    ids = open_source(run).load_codec().encode_chat(TURNS)
    assert ids == tokens[: len(ids)].tolist()
    export_model(run, tmp_path / "export")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    messages = [{"role": "user", "content": RECORD["prompt"]}]
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == ids
    messages.append({"role": "assistant", "content": RECORD["response"]})
    assert theirs.apply_chat_template(messages, return_dict=False) == tokens[:-1].tolist()


def test_sources_that_begin_otherwise_are_not_mixed(tmp_path):
    released = write_released(tmp_path / "released", begins=True)
    one = prepared_texts(tmp_path / "one", given(released))
    index = json.loads((one / "index.json").read_text())
    other = prepared_texts(tmp_path / "other", given(released))
    (other / "index.json").write_text(json.dumps({key: index[key] for key in index if key != "begin_id"}))
    mixture = [{"name": path.name, "path": str(path), "weight": 1} for path in (one, other)]
    with pytest.raises(DataError, match="begin_id of 'other' is None, that of 'one' is"):
        open_dataset(DataConfig.model_validate({"mixture": mixture}))


def test_a_start_that_is_not_there_and_other_kinds_are_refused(tmp_path):
    file = tmp_path / "plain.json"
    train_bpe(TEXTS, 300).save(str(file))
    with pytest.raises(ConfigError, match=r"plain.json: tokenizer.begin=true: the tokenizer has no start token"):
        prepared_texts(tmp_path / "data", given(file, begin=True))
    with pytest.raises(ValueError, match=r"begin goes with kind=text or records or preferences or feedback, not pairs"):
        prepared_texts(tmp_path / "data", given(file, begin=True), "pairs")
    with pytest.raises(ValueError, match="begin goes with kind=given, not bpe"):
        TokenizerConfig(begin=True)


def test_a_post_processor_that_ends_texts_too_begins_no_documents(tmp_path):
    tokenizer = train_bpe(TEXTS, 300)
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", ends)
    tokenizer.save(str(tmp_path / "bert.json"))
    assert start_id(tokenizer) is None
    data = prepared_texts(tmp_path / "data", given(tmp_path / "bert.json"))
    assert load_index(data).begin_id is None
    assert (data / "tokenizer.json").read_bytes() == (tmp_path / "bert.json").read_bytes()


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZE = 280


def write_settings_apart(folder: Path) -> Path:
    """Writes a folder whose marks are in tokenizer_config.json alone, <think> no special one."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(dump_tokenizer(train_bpe(TEXTS, SIZE)))
    tokens = {
        str(SIZE + number): {"content": content, "special": content != "<think>", "normalized": False}
        for number, content in enumerate(("<|im_start|>", "<|im_end|>", "<think>"))
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"added_tokens_decoder": tokens}))
    return folder


def test_tokens_beside_tokenizer_json_are_those_of_data_run_and_export(tmp_path):
    released = write_settings_apart(tmp_path / "released")
    theirs = transformers.AutoTokenizer.from_pretrained(released)
    turns = [{"role": "user", "content": "who <think>"}, {"role": "assistant", "content": "It is."}]
    _, tokens, _ = prepared(
        tmp_path, {"messages": turns}, given(released), template="tokenizer", messages_field="messages"
    )
    ids = theirs.apply_chat_template(turns, return_dict=False)
    assert tokens.tolist() == ids
    assert {SIZE, SIZE + 1, SIZE + 2} <= set(ids)
    run = write_text_run(tmp_path / "run", tmp_path / "out", "llama-tiny", "supervised")
    prompt = theirs.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
    export_model(run, tmp_path / "export")
    for path in (run, tmp_path / "export"):
        assert open_source(path).load_codec().encode_chat([("user", "who <think>")]) == prompt


def test_data_without_the_tokens_of_a_model_are_refused(tmp_path):
    released = write_settings_apart(tmp_path / "released")
    model = SimpleNamespace(path=released, load_tokenizer_files=lambda: tokenizer_files(released))
    (tmp_path / "alone.json").write_bytes((released / "tokenizer.json").read_bytes())
    with pytest.raises(
        DataError, match=r"'<\|im_start\|>' has the number 280 in .*released and none in .*, and 2 others"
    ):
        check_tokens(model, tmp_path / "alone.json")
    prepared_texts(tmp_path / "data", given(released))
    check_tokens(model, tmp_path / "data/tokenizer.json")


def test_data_whose_tokenizer_splits_otherwise_are_refused_with_the_text(tmp_path):
    released = write_settings_apart(tmp_path / "released")
    model = SimpleNamespace(path=released, load_tokenizer_files=lambda: tokenizer_files(released))
    content = json.loads(dict(tokenizer_files(released))["tokenizer.json"])
    content["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "lower.json").write_text(json.dumps(content))
    what = r"\"It's 2017: .*\" is \[41, .*\] in .*released and \[73, .*\] in "
    with pytest.raises(DataError, match=what):
        check_tokens(model, tmp_path / "lower.json")
