"""Templates of conversations: what is written around the words, what of it is learned, and which tokens are meant."""

import io
import json
import tarfile

import numpy as np
import pytest

from pretrain.config.prepare import InputConfig, PrepareConfig, TokenizerConfig
from pretrain.errors import DataError
from pretrain.prepare.prepare import prepare
from pretrain.tokenizer import load_tokenizer

CHAT = [{"role": "user", "content": "say <|im_end|> now"}, {"role": "assistant", "content": "It is done."}]


OURS = TokenizerConfig(vocab_size=300, special_tokens=["<|im_start|>", "<|im_end|>"])


def prepared(folder, record, tokenizer=OURS, **options):
    """Tokens and what is learned of them, of one record."""
    (folder / "in.jsonl").write_text(json.dumps(record) + "\n")
    config = PrepareConfig(
        output=str(folder / "out"),
        kind="records",
        inputs=[InputConfig(path=str(folder / "in.jsonl"), **options)],
        tokenizer=tokenizer,
        split="hash:0",
    )
    prepare(config)
    members = members_of(folder / "out")
    return load_tokenizer(folder / "out/tokenizer.json"), members["tokens.npy"], members["loss.npy"].astype(bool)


def members_of(data):
    """Arrays of a shard folder of one member, by their kind."""
    members = {}
    for path in (data / "train").glob("*.tar"):
        with tarfile.open(path) as tar:
            for member in tar:
                members[member.name.split(".", 1)[1]] = np.load(io.BytesIO(tar.extractfile(member).read()))
    return members


def test_markers_become_special_tokens_and_the_same_words_of_a_user_do_not(tmp_path):
    tokenizer, tokens, learned = prepared(tmp_path, {"messages": CHAT}, messages_field="messages", template="chatml")
    start, end = (tokenizer.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    assert ((tokens == start).sum(), (tokens == end).sum()) == (2, 2)
    text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
    assert text.startswith(
        "<|im_start|>user\nsay <|im_end|> now<|im_end|>\n<|im_start|>assistant\nIt is done.<|im_end|>"
    )
    shown = tokenizer.decode(tokens[learned].tolist(), skip_special_tokens=False)
    assert shown.startswith("It is done.<|im_end|>\n")
    assert learned[-1], "the end of the document is learned too"


def test_a_prompt_is_the_users_turn_and_the_response_alone_is_learned(tmp_path):
    record = {"prompt": "Add 1 and 2.", "response": "3"}
    tokenizer, tokens, learned = prepared(
        tmp_path, record, template={"user": "Q: {content}\n", "assistant": "A:{content}\n"}
    )
    assert tokenizer.decode(tokens[~learned].tolist()) == "Q: Add 1 and 2.\nA:"
    assert tokenizer.decode(tokens[learned].tolist()) == "3\n"


def test_a_role_without_a_template_is_refused_with_its_place(tmp_path):
    chat = [{"role": "tool", "content": "42"}, *CHAT]
    with pytest.raises(DataError, match="role 'tool' is not in the template; add it to system, user, assistant"):
        prepared(tmp_path, {"messages": chat}, messages_field="messages", template="instruction")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("chatlm", "'chatlm' is unknown; use instruction, chatml, tokenizer, auto or a .jinja file"),
        ({"user": "Q"}, "template.user='Q' must have {content} once"),
    ],
)
def test_a_template_that_is_none_is_refused(template, message):
    with pytest.raises(ValueError, match=message):
        InputConfig(template=template)


def test_a_template_goes_with_records_only():
    with pytest.raises(ValueError, match=r"inputs\.0\.template goes with kind=records or preferences, not text"):
        PrepareConfig(output="x", kind="text", inputs=[InputConfig(template="chatml")])
