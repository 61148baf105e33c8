"""Files of a dialogue: what is pretrained on, conversations, and questions with one right answer.

    documentation, plain conversations  ->  texts.jsonl          {"text": ...}
    conversations with roles            ->  conversations.jsonl  {"messages": [...]}
    single questions of the training    ->  practice.jsonl       {"kind": ..., "messages": [...]}
    questions that are held out         ->  held_out.jsonl       the same

A function of the seed and of the documentation that this machine has. A held-out sum has other
numbers than any of the training, a held-out text is another text, a held-out fact is trained on
under other phrasings alone.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from random import Random

from pretrain.errors import DataError
from pretrain.preparation.dialogue.documented import read_texts
from pretrain.preparation.dialogue.question import UNKNOWN, Question
from pretrain.preparation.dialogue.questions import Knowledge, ask_number
from pretrain.preparation.dialogue.stories import NAMES, Signature, Story
from pretrain.utils.io import check_new_folder, new_folder, write_file

HELD_OUT = {"number": 50, "text": 70, "fact": 40, "unknown": 40}
"""Held-out questions of each kind."""
SORTS = {"number": 3, "story": 4, "signature": 1, "fact": 4, "unknowable": 1}
"""Weights of what a conversation is about."""
PLAIN_SHARE = 1 / 8
"""Conversations without roles among the texts, over those with roles."""
PRACTICE_SHARE = 1 / 20
SMALL_TALK = (
    ("Hello.", "Hello. What would you like to know?"),
    ("Hi!", "Hello. What would you like to know?"),
    ("Good morning.", "Good morning. What would you like to know?"),
    ("Who are you?", "I am a small model that was trained on this machine."),
    ("What are you?", "I am a small model that was trained on this machine."),
    (
        "What can you do?",
        "I answer short questions about numbers, Python, commands, and your texts.",
    ),
    ("Help", "I answer short questions about numbers, Python, commands, and your texts."),
    ("How are you?", "I am well, thank you."),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Bye.", "Goodbye."),
)

Message = dict[str, str]


def write_dialogue(folder: Path, num_conversations: int, seed: int = 0) -> list[str]:
    """Writes the files to a new folder; returns a line about each.

    Raises:
        ConfigError: The folder is there.
        DataError: A held-out question is in the training.
    """
    check_new_folder(folder)
    maker = DialogueMaker()
    questions = maker.held_out(Random(f"{seed} held out"))
    keys = {one.key for one in questions}
    conversations = maker.conversations(Random(f"{seed} conversations"), keys)
    num_plain, num_practice = (int(num_conversations * share) for share in (PLAIN_SHARE, PRACTICE_SHARE))
    files = {
        "texts": maker.texts(Random(f"{seed} texts"), num_plain, keys),
        "conversations": islice(conversations, num_conversations),
        "practice": maker.practice(Random(f"{seed} practice"), num_practice, keys),
        "held_out": map(_record, questions),
    }
    lines = []
    with new_folder(folder) as made:
        for name, records in files.items():
            rows = [json.dumps(record) for record in records]
            write_file(made / f"{name}.jsonl", "".join(f"{row}\n" for row in rows).encode())
            lines.append(f"{folder / name}.jsonl: {len(rows):,} records")
    return lines


class DialogueMaker:
    """Draws questions, and makes conversations of them."""

    def __init__(self) -> None:
        self._knowledge = Knowledge()

    def draw(self, random: Random) -> list[Question]:
        """Returns some questions about one text, or one question without a text."""
        (sort,) = random.choices(tuple(SORTS), tuple(SORTS.values()))
        if sort in ("story", "signature"):
            text = Story(random) if sort == "story" else Signature(random)
            asked = [text.ask() for _ in range(random.choice((1, 1, 2, 3)))]
            return list({one.asked: one for one in asked}.values())
        if sort == "number":
            return [ask_number(random)]
        ask = self._knowledge.ask if sort == "fact" else self._knowledge.ask_unknowable
        return [ask(random)]

    def held_out(self, random: Random) -> list[Question]:
        """Returns HELD_OUT questions, all different."""
        room = dict(HELD_OUT)
        questions: dict[str, Question] = {}
        while any(room.values()):
            one = random.choice(self.draw(random))
            if one.is_held_out and room[one.kind] and one.key not in questions:
                room[one.kind] -= 1
                questions[one.key] = one
        return list(questions.values())

    def trained(self, random: Random, held_out: set[str]) -> Iterator[list[Question]]:
        """Yields what `draw` returns, without what is held out.

        Raises: DataError: A question is in `held_out` nevertheless.
        """
        while True:
            questions = [one for one in self.draw(random) if not one.is_held_out]
            if leaked := held_out & {one.key for one in questions}:
                text = f"a held-out question is in the training: {min(leaked)}"
                raise DataError(text, fix="report it, as a defect")
            if questions:
                yield questions

    def conversations(self, random: Random, held_out: set[str]) -> Iterator[dict[str, list[Message]]]:
        """Yields conversations of one to three subjects; one in ten begins by small talk."""
        drawn = self.trained(random, held_out)
        while True:
            messages = _small_talk(random) if random.random() < 1 / 10 else []
            for questions in islice(drawn, random.choice((1, 1, 2, 3))):
                is_unknowable = questions[0].answer == UNKNOWN and not questions[0].text
                if not (messages and is_unknowable):  # after a text it may be known
                    messages += _turns(questions, at_first=not messages and random.random() < 1 / 4)
            yield {"messages": messages}

    def texts(self, random: Random, num_plain: int, held_out: set[str]) -> Iterator[dict[str, str]]:
        """Yields documentation, then conversations with a turn a line."""
        yield from ({"text": text} for text in read_texts())
        for one in islice(self.conversations(random, held_out), num_plain):
            yield {"text": "\n".join(message["content"] for message in one["messages"])}

    def practice(self, random: Random, count: int, held_out: set[str]) -> Iterable[dict[str, object]]:
        """Yields single questions of the training."""
        return (_record(questions[0]) for questions in islice(self.trained(random, held_out), count))


def _record(question: Question) -> dict[str, object]:
    return {"kind": question.kind, "messages": _turns([question], at_first=False)}


def _turns(questions: list[Question], at_first: bool) -> list[Message]:
    """Returns the turns of questions about a text, which the first one has, or the system's."""
    text = questions[0].text
    messages = [_turn("system", text)] if text and at_first else []
    for number, one in enumerate(questions):
        begins = number == 0 and text and not at_first
        messages += _exchange(f"{text} {one.asked}" if begins else one.asked, one.answer)
    return messages


def _small_talk(random: Random) -> list[Message]:
    if random.random() < 1 / 2:
        return _exchange(*random.choice(SMALL_TALK))
    name = random.choice(NAMES)
    introduced = _exchange(f"My name is {name}.", f"Hello, {name}.")
    asked = _exchange("What is my name?", name)
    return random.choice((introduced, introduced + asked, _exchange("What is my name?", UNKNOWN)))


def _exchange(asked: str, answer: str) -> list[Message]:
    return [_turn("user", asked), _turn("assistant", answer)]


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}
