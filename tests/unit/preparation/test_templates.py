"""Templates of conversations: what is written around the words, what of it is learned, and which tokens are meant."""

import io
import json
import tarfile

import numpy as np
import pytest
from rich.console import Console

from pretrain.config.prepare import InputConfig, PrepareConfig, TokenizerConfig
from pretrain.datacheck.show import ReadingOptions, print_rows, show
from pretrain.errors import DataError
from pretrain.preparation.filters import MAX_UNUSED
from pretrain.preparation.prepare import prepare, run_prepare
from pretrain.shards.index import load_index
from pretrain.tokenizer.file import load_tokenizer

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
    with pytest.raises(ValueError, match=r"0\.template goes with kind=records, preferences or feedback, not text"):
        PrepareConfig(output="x", kind="text", inputs=[InputConfig(template="chatml")])


def write_conversations(folder, count, **flags):
    """Conversations with keys that nothing uses, in the file of `config_of`."""
    asked = {"role": "user", "content": "Who?", "foo": 1}
    chats = [[asked, {"role": "assistant", "content": f"She {number}.", **flags}] for number in range(count)]
    lines = [json.dumps({"messages": chat, "lang": "en", "id": number}) for number, chat in enumerate(chats)]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")


def config_of(folder, **options):
    inputs = [InputConfig(path=str(folder / "in.jsonl"), messages_field="messages", template="chatml")]
    options = {"tokenizer": OURS, "split": "hash:0.2", "part_bytes": 2000} | options
    return PrepareConfig(output=str(folder / "out"), kind="records", inputs=inputs, **options)


def test_keys_that_nothing_used_are_named_once_with_their_count_over_all_processes(tmp_path, caplog):
    write_conversations(tmp_path, 100)
    prepare(config_of(tmp_path), processes=2)
    unused = json.loads((tmp_path / "out/statistics.json").read_text())["unused_keys"]
    assert unused == {"id": 100, "lang": 100, "messages[].foo": 100}
    warnings = [record.getMessage() for record in caplog.records if "not used" in record.getMessage()]
    assert warnings == [
        "keys of records: id: 100 times, not used; lang: 100 times, not used; messages[].foo: 100 times, not used"
    ]
    assert "| `messages[].foo` | 100 |" in (tmp_path / "out/data_card.md").read_text()
    assert len(list((tmp_path / "out/parts").iterdir())) > 1


def test_many_keys_are_counted_together(tmp_path):
    rows = [{"messages": CHAT, f"key{number}": 1, "x" * 500: 1} for number in range(100)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    prepare(config_of(tmp_path, part_bytes=None), processes=1)
    unused = json.loads((tmp_path / "out/statistics.json").read_text())["unused_keys"]
    assert len(unused) == MAX_UNUSED + 1 and sum(unused.values()) == 200 and unused["x" * 80] == 100


def test_the_share_that_is_learned_is_said_and_nothing_learned_is_refused(tmp_path, monkeypatch):
    write_conversations(tmp_path, 30)
    config = config_of(tmp_path)
    line = run_prepare(config, "1/1", 1)
    index = load_index(tmp_path / "out")
    statistics = json.loads((tmp_path / "out/statistics.json").read_text())
    share = statistics["splits"]["train"]["num_learned_tokens"] / index.splits["train"].num_tokens
    assert 0.1 < share < 0.9 and line.endswith(f", {share:.1%} of these learned")
    shown = show(str(tmp_path / "out"), [], ReadingOptions())
    console = Console(file=io.StringIO(), width=200)
    print_rows(shown, console)
    assert console.file.getvalue().startswith(f"{share:.1%} of the tokens of train are learned\n")
    assert shown.facts()["learned"] == share
    assert show(str(tmp_path / "out"), [], ReadingOptions(objective="causal")).learned is None
    statistics["splits"]["train"]["num_learned_tokens"] = 0
    (tmp_path / "out/statistics.json").write_text(json.dumps(statistics))
    with pytest.raises(DataError, match="no token of the split train is learned; give answers"):
        show(str(tmp_path / "out"), [], ReadingOptions())


def test_data_of_which_nothing_is_learned_are_refused(tmp_path):
    write_conversations(tmp_path, 5, weight=0)
    with pytest.raises(DataError, match=r"no text to train on.* no assistant turn 5"):
        prepare(config_of(tmp_path), processes=1)
