"""Tokenizers of released models: how their documents end, in the data, a run and its export."""

import json
from pathlib import Path

import pytest
import transformers
from tokenizers import processors

from pretrain.artifact.model_path import open_source
from pretrain.artifact.open import open_artifact
from pretrain.artifact.transfer import export_model
from pretrain.config.prepare import TokenizerConfig
from pretrain.errors import DataError
from pretrain.generate.generation_options import Options
from pretrain.shards.index import load_index
from tests.helpers.tokenizers import train_bpe
from tests.unit.artifact.runs import TEXTS, write_text_run
from tests.unit.prepare.test_templates import prepared

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
