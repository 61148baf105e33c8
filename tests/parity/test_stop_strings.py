"""Stop strings against `generate` of transformers: rows end at the same token, and the text before it is the same."""

import random

import pytest
import torch
import transformers

from pretrain.generation.beam import Beams
from pretrain.generation.constraints import Constraints
from pretrain.generation.sampling import GREEDY
from pretrain.generation.text import generate_text, stream_text
from tests.helpers.lent import lend
from tests.unit.generation.codecs import byte_codec, sentencepiece_codec

PROMPTS = ["The cat", "the dog sat on", "cat and the mat, and", "Na"]
NEW_TOKENS = 20


def their_text(theirs, tokenizer, codec, prompt, stops, num_beams):
    """Text up to the first stop string, and new tokens, those of the stop string included."""
    ids = codec.encode(prompt)
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, num_beams=num_beams, stop_strings=list(stops)
    )
    (row,) = theirs.generate(torch.tensor([ids]), generation_config=settings, tokenizer=tokenizer).tolist()
    text = codec.decode(row)[len(codec.decode(ids)) :]
    return text[: min((text.find(stop) for stop in stops if stop in text), default=None)], len(row) - len(ids)


@pytest.mark.parametrize("make_codec", [byte_codec, sentencepiece_codec])
def test_rows_of_a_batch_end_where_theirs_end_alone(tmp_path, make_codec):
    torch.manual_seed(0)
    codec = make_codec()
    config = transformers.LlamaConfig(
        vocab_size=codec.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    lent = lend(transformers.LlamaForCausalLM(config), tmp_path)
    lent.theirs.generation_config = transformers.GenerationConfig()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=codec._tokenizer)

    def ours(method, stops):
        found = generate_text(lent.ours, codec, PROMPTS, Constraints(NEW_TOKENS, stop_strings=stops), method)
        return [(one.text, one.num_tokens) for (one, *_) in found]

    draw = random.Random(1)
    whole = [text for text, _ in ours(GREEDY, ())]
    num_stopped = 0
    for _ in range(12):  # parts of the texts, across tokens or within one
        text = draw.choice(whole)
        first = draw.randrange(len(text) - 1)
        stop = text[first : first + draw.randint(1, 5)]
        if "\ufffd" in stop:
            continue
        stops = (stop, "zq")
        for method, num_beams in ((GREEDY, 1), (Beams(2), 2)):
            found = ours(method, stops)
            assert found == [their_text(lent.theirs, tokenizer, codec, one, stops, num_beams) for one in PROMPTS], stop
        num_stopped += sum(num_tokens < NEW_TOKENS for _, num_tokens in found)
        constraints = Constraints(NEW_TOKENS, stop_strings=stops)
        for prompt, (text, _) in zip(PROMPTS, ours(GREEDY, stops), strict=True):
            streamed = "".join(stream_text(lent.ours, codec, prompt, constraints, GREEDY))
            assert streamed == text or make_codec is sentencepiece_codec, "but for bytes that are no UTF-8"
    assert num_stopped
