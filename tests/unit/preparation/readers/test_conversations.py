"""Preferences of all spellings: what is learned of each side, in templates of ours and of transformers."""

import pytest

from pretrain.config.prepare import FilterConfig, InputConfig
from pretrain.preparation.filters import EMPTY_ANSWER, Document, refuse
from pretrain.preparation.readers.record_fields import RecordError
from pretrain.preparation.readers.records import ReadRule
from tests.helpers.chat_templates import CHATML, GENERATION, LLAMA_3, THINKING

ASKED = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Who?"},
]
CHOSEN, REJECTED = ({"role": "assistant", "content": text} for text in ("Ada.", "No."))
SPELLINGS = {
    "prompt and answers": {"prompt": ASKED, "chosen": [CHOSEN], "rejected": [REJECTED]},
    "whole conversations": {"chosen": [*ASKED, CHOSEN], "rejected": [*ASKED, REJECTED]},
    "a prompt that is repeated": {"prompt": "Hi", "chosen": [*ASKED, CHOSEN], "rejected": [*ASKED, REJECTED]},
    "answers as texts": {"prompt": ASKED, "chosen": "Ada.", "rejected": "No."},
}


def read(record: dict, **options: object) -> Document:
    return ReadRule(InputConfig(**options), "preferences").build(record, 7)


def learned(document: Document) -> str:
    return "".join(text for text, is_learned in document.segments if is_learned)


@pytest.mark.parametrize("record", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize(
    ("template", "end"),
    [
        ({"jinja": CHATML}, "<|im_end|>\n"),
        ({"jinja": GENERATION}, "<|im_end|>"),
        ({"jinja": LLAMA_3, "bos_token": "<s>", "date": "2024-07-26"}, "<|eot_id|>"),
        ("chatml", "<|im_end|>\n"),
        (None, ""),
    ],
    ids=["chatml", "generation", "llama-3", "of ours", "none"],
)
def test_only_the_answers_that_differ_are_learned(record, template, end):
    found = read(record, template=template)
    assert learned(found) == "Ada." + end and learned(found.rejected) == "No." + end
    assert found.text.count("Yes?") == found.rejected.text.count("Yes?") == 1
    assert (found.consumed_bytes, found.rejected.consumed_bytes) == (7, 0)


def test_a_template_that_writes_earlier_answers_otherwise_has_places_for_the_last():
    found = read(SPELLINGS["whole conversations"], template={"jinja": THINKING})
    assert learned(found) == "<think>\n\n</think>\n\nAda.<|im_end|>\n"


def test_a_text_prompt_belongs_to_answers_that_are_messages_without_one():
    record = {"prompt": "Who?", "chosen": [CHOSEN], "rejected": [REJECTED]}
    assert read(record).text == "Who?Ada." and read(record).rejected.text == "Who?No."
    renamed = {"question": "Who?", "good": "Ada.", "bad": "No."}
    found = read(renamed, prompt_field="question", chosen_field="good", rejected_field="bad")
    assert (found.text, learned(found.rejected)) == ("Who?Ada.", "No.")


def test_an_answer_without_text_is_left_out():
    found = read({"prompt": "Who?", "chosen": "Ada.", "rejected": " "})
    assert refuse(found, FilterConfig()) == EMPTY_ANSWER
    assert refuse(read(SPELLINGS["answers as texts"]), FilterConfig()) is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "Who?", "chosen": "Ada."}, "field 'rejected' is absent"),
        ({"prompt": "Who?", "chosen": "a", "rejected": 3}, "field 'rejected' is a number, not a string"),
        ({"prompt": "Who?", "chosen": [CHOSEN], "rejected": [CHOSEN]}, "are the same answer"),
        ({"chosen": [*ASKED, CHOSEN], "rejected": [*ASKED]}, "nothing"),
    ],
)
def test_what_is_no_preference_is_refused(record, message):
    if message == "nothing":  # one side is the beginning of the other: its last turn is the user's
        assert refuse(read(record), FilterConfig()) == "no_assistant_turn"
        return
    with pytest.raises(RecordError, match=message):
        read(record)
