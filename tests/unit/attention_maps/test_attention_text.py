"""From text to maps: what each stack reads, what is refused, and the command line."""

import json
from pathlib import Path

import pytest
import torch

from pretrain.artifact import Artifact
from pretrain.artifact.open import NORMALIZE_KEY
from pretrain.artifact.plain_codec import PlainCodec
from pretrain.attention_maps.figure_layout import MAX_TOKENS
from pretrain.attention_maps.terminal import AttentionRequest, see_attention
from pretrain.checkpoint.format import MODEL_FILE
from pretrain.cli import run
from pretrain.config.model import RecurrentConfig, SpecialTokens
from pretrain.errors import EXIT_OK, EXIT_USAGE, ConfigError
from pretrain.generation.constraints import Constraints
from pretrain.generation.sampling import generate
from pretrain.tokenizer.special_tokens import EOS
from pretrain.types import GenerationDefaults
from tests.helpers.lent import quiet_transformers
from tests.helpers.tokenizers import train_char
from tests.unit.model.tiny import build, encoder_config, tiny_config, two_stacks_config

CODEC = PlainCodec(train_char(["abcdefghij klmnopqrstuvwxyz.\n"]))
(END,) = CODEC.eos_ids
START = 0


def opened(config):
    special = config.special_tokens.model_copy(update={"eos": END, "start": START})
    config = config.model_copy(update={"special_tokens": special})
    return Artifact(build(config), CODEC, config, GenerationDefaults(), Path("nowhere"))


DECODER, ENCODER = opened(tiny_config()), opened(encoder_config())
TWO_STACKS = opened(two_stacks_config())


def test_a_decoder_reads_the_text():
    facts = see_attention(DECODER, AttentionRequest("a cab.\n"))
    assert facts["tokens"] == {"decoder": list("a cab.\n")}
    assert [(head["layer"], head["head"]) for head in facts["heads"]] == [(i, j) for i in range(2) for j in range(4)]
    assert facts["out"] is None


def test_an_encoder_reads_the_text():
    assert see_attention(ENCODER, AttentionRequest("cab"))["tokens"] == {"encoder": list("cab")}


def test_two_stacks_read_source_and_target_behind_the_start_token():
    facts = see_attention(TWO_STACKS, AttentionRequest("a cab", "bad"))
    assert facts["tokens"] == {"encoder": list("a cab"), "decoder": [*CODEC.tokens([START]), *"bad"]}
    assert {head["kind"] for head in facts["heads"]} == {"cross"}
    strongest = facts["heads"][0]["strongest_key"]
    assert strongest["token"] == "a cab"[strongest["index"]]


def test_the_alignment_of_a_recurrent_translator_is_drawn_over_its_own_answer(tmp_path):
    stack = {"layers": 1, "width": 16}
    values = {"encoder": stack, "decoder": stack, "vocab_size": 61, "attention": "bahdanau"}
    artifact = opened(RecurrentConfig.model_validate({"kind": "recurrent", **values}))
    facts = see_attention(artifact, AttentionRequest("a cab", out=tmp_path / "aligned.svg"))
    assert facts["tokens"]["encoder"] == list("a cab") and len(facts["tokens"]["decoder"]) > 1
    assert [(head["kind"], head["layer"], head["head"]) for head in facts["heads"]] == [("cross", 0, 0)]
    assert "cross-attention" in (tmp_path / "aligned.svg").read_text()


def test_an_end_that_the_tokenizer_adds_to_the_target_is_not_read(monkeypatch):
    monkeypatch.setattr(PlainCodec, "encode_target", lambda self, text: [*self.encode(text), END], raising=False)
    assert see_attention(TWO_STACKS, AttentionRequest("cab", "bad"))["tokens"]["decoder"][1:] == list("bad")


def test_without_a_target_the_decoder_reads_what_the_model_says():
    said = generate(TWO_STACKS.model, [CODEC.encode("a cab")], Constraints(2 * 5 + 8, eos_ids=(END,)))[0].tokens
    assert len(said) > 0
    facts = see_attention(TWO_STACKS, AttentionRequest("a cab"))
    assert facts["tokens"]["decoder"] == CODEC.tokens([START, *said])


@pytest.mark.parametrize(
    ("artifact", "request_", "message"),
    [
        (DECODER, AttentionRequest("a", target="b"), "--target is for models of two stacks; leave it out"),
        (DECODER, AttentionRequest(""), "--text: the prompt has no tokens"),
        (DECODER, AttentionRequest("a" * 129), "--text: the prompt has 129 tokens, model.max_seq_len is 128"),
        (TWO_STACKS, AttentionRequest("a", target="b" * 128), "--target: the prompt has 129 tokens"),
        (DECODER, AttentionRequest("a", kind="cross"), "--kind cross: the model has no such attention"),
        (
            opened(tiny_config(model={"max_seq_len": 512})),
            AttentionRequest("a" * 401),
            "--text: 401 tokens cannot be read in one",
        ),
    ],
)
def test_what_cannot_be_seen_is_refused(artifact, request_, message):
    with pytest.raises(ConfigError) as error:
        see_attention(artifact, request_)
    assert str(error.value).startswith(message)
    assert MAX_TOKENS == 400


def test_a_decoder_of_two_stacks_without_a_start_token_is_refused():
    artifact = opened(two_stacks_config())
    artifact.model.special_tokens = SpecialTokens()
    with pytest.raises(ConfigError, match=r"first token is not known; set model\.special_tokens\.start"):
        see_attention(artifact, AttentionRequest("a", target="b"))


def test_a_picture_that_would_be_too_large_is_not_written(tmp_path):
    with pytest.raises(ConfigError, match=r"^120 tokens cannot be read in one picture of 2 x 4 maps, at most \d+ can"):
        see_attention(DECODER, AttentionRequest("a" * 120, out=tmp_path / "x.png"))
    assert list(tmp_path.iterdir()) == []
    see_attention(DECODER, AttentionRequest("a" * 120, layers="0", heads="0", out=tmp_path / "x.png"))
    assert (tmp_path / "x.png").is_file()


def test_a_text_that_is_not_utf8_is_refused():
    with pytest.raises(ConfigError, match=r"^--target: not UTF-8; check the terminal's encoding$"):
        AttentionRequest("a", target="b\udcff")


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A tiny GPT-2 with a tokenizer, as transformers saves them."""
    import transformers

    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = train_char(["abcdefghij klmnopqrstuvwxyz.\n"])
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, bos_token_id=END, eos_token_id=END)
    with quiet_transformers():
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS).save_pretrained(folder)
    return folder


def test_the_command_draws_and_says_where(released, tmp_path, capsys):
    out = tmp_path / "seen" / "x.svg"
    assert run(["attention", str(released), "--text", "a cab", "--output", str(out)]) == EXIT_OK
    assert capsys.readouterr().out == f"{out}: 8 maps\n"
    assert out.read_bytes().startswith(b"<?xml")


def test_the_command_prints_numbers_of_the_chosen_heads(released, capsys):
    arguments = ["--text", "cab", "--layer", "1", "--head", "0,2", "--kind", "self", "--json"]
    assert run(["attention", str(released), *arguments]) == EXIT_OK
    facts = json.loads(capsys.readouterr().out)
    assert facts["tokens"] == {"decoder": list("cab")}
    assert [(head["layer"], head["head"]) for head in facts["heads"]] == [(1, 0), (1, 2)]
    assert all(0 < head["entropy_bits"] < 1.59 for head in facts["heads"])


def test_a_text_is_normalised_as_the_data_of_the_model_were(released, tmp_path, capsys):
    assert run(["import", str(released), str(tmp_path / "model")]) == EXIT_OK
    file = tmp_path / "model" / MODEL_FILE
    facts = json.loads(file.read_text()) | {NORMALIZE_KEY: {"steps": ["lowercase"]}}
    file.write_text(json.dumps(facts))
    capsys.readouterr()
    assert run(["attention", str(tmp_path / "model"), "--text", "CaB", "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["tokens"] == {"decoder": list("cab")}


def test_the_command_wants_a_picture_or_numbers(released, capsys):
    assert run(["attention", str(released), "--text", "a"]) == EXIT_USAGE
    assert capsys.readouterr().err == "error: nothing to show; give --output x.png, or --json\n"


def test_an_unknown_format_is_refused_before_the_model_is_opened(tmp_path, capsys):
    assert run(["attention", str(tmp_path / "no such model"), "--text", "a", "--output", "x.jpg"]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("error: --output x.jpg: no picture format is called '.jpg'")
