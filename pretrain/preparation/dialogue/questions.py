"""Questions without a text: sums, documented facts in several phrasings, and what has no answer."""

import re
from dataclasses import dataclass
from http import HTTPStatus
from random import Random

from pretrain.preparation.dialogue.documented import read_commands, read_definitions, read_functions
from pretrain.preparation.dialogue.question import UNKNOWN, Question
from pretrain.preparation.dialogue.stories import FOODS, NAMES, PLACES, THINGS, invent

MOST_WORDS = 6
"""Words of an answer by heart."""
_PLAIN = re.compile(r"[\w ,'/-]+", re.ASCII)
_NUMBERS = {
    "plus": ("What is {a} plus {b}?", "What is {b} + {a}?", "Add {a} and {b}.", "{a} + {b} = ?"),
    "minus": (
        "What is {b} minus {a}?",
        "What is {b} - {a}?",
        "Take {a} from {b}.",
        "{b} - {a} = ?",
    ),
    "larger": ("Which is larger, {a} or {b}?", "Which is larger, {b} or {a}?"),
    "next": ("What comes after {b}?", "Which number comes after {b}?"),
}
_HOME = (
    "Which module has the function {}?",
    "In which module is the function {}?",
    "Where in Python is {}?",
    "Which module must I import to call {}?",
)
_FIRST = (
    "What is the first argument of {}?",
    "Which argument of {} comes first?",
    "Name the first argument of {}.",
)
_PURPOSE = ("What does {} do?", "What is {} for?", "What is the purpose of {}?", "Explain {}.")
_WORD = ("What does the word {} mean?", "What is the meaning of the word {}?", "Define {}.")
_STATUS = (
    "What does HTTP status {} mean?",
    "What is HTTP status {}?",
    "What is the meaning of HTTP status {}?",
)
_UNKNOWABLE = (
    "Which module has the function {word}?",
    "In which module is the function {word}?",
    "What does the command {word} do?",
    "What is the first argument of {word}?",
    "What is the weather in {place}?",
    "How many people live in {place}?",
    "What did {name} eat yesterday?",
    "Who is the mother of {name}?",
    "Where is my {thing}?",
    "What colour is the {thing} of {name}?",
    "How much does a {thing} cost in {place}?",
    "When did {name} buy {food}?",
    "Who has the {thing}?",
    "Where does {name} live?",
    "How old is {name}?",
)


def ask_number(random: Random) -> Question:
    """Asks for a sum or difference of numbers up to 99, the larger one, or the next one."""
    a, b = sorted((random.randrange(100), random.randrange(100)))
    sort = random.choice(("plus", "plus", "minus", "minus", "larger", "next"))
    answer = {"plus": a + b, "minus": b - a, "larger": b, "next": b + 1}[sort]
    key = f"next {b}" if sort == "next" else f"{sort} {a} {b}"
    asked = random.choice(_NUMBERS[sort]).format(a=a, b=b)
    return Question("number", key, asked, str(answer))


@dataclass(frozen=True, slots=True)
class Fact:
    """Documented fact: phrasings of the question for it, with a place for its subject, and the answer."""

    subject: str
    phrasings: tuple[str, ...]
    answer: str

    def ask(self, random: Random) -> Question:
        """Returns the question in a phrasing."""
        asked = random.choice(self.phrasings).format(self.subject)
        return Question("fact", asked, asked, self.answer)


class Knowledge:
    """All facts that a machine documents briefly, and questions for what it does not."""

    def __init__(self) -> None:
        functions = read_functions()
        commands = read_commands()
        facts = [Fact(one.name, _HOME, one.module) for one in functions]
        with_arguments = [one for one in functions if one.arguments]
        facts += [Fact(one.full_name, _FIRST, one.arguments[0]) for one in with_arguments]
        facts += [Fact(one.full_name, _PURPOSE, one.purpose) for one in functions]
        facts += [Fact(f"the command {name}", _PURPOSE, purpose) for name, purpose in commands]
        facts += [Fact(word, _WORD, meaning) for word, meaning in read_definitions()]
        facts += [Fact(str(status.value), _STATUS, status.phrase) for status in HTTPStatus]
        self.facts = [one for one in facts if _is_brief(one.answer)]
        self._names = {one.name for one in functions} | {name for name, _ in commands}

    def ask(self, random: Random) -> Question:
        """Returns a question for a fact."""
        return random.choice(self.facts).ask(random)

    def ask_unknowable(self, random: Random) -> Question:
        """Returns a question that nothing answers, at the beginning of a conversation."""
        word = invent(random)
        while word in self._names:
            word = invent(random)
        pools = {"name": NAMES, "thing": THINGS, "place": PLACES, "food": FOODS}
        asked = random.choice(_UNKNOWABLE).format(
            word=word, **{key: random.choice(pool) for key, pool in pools.items()}
        )
        return Question("unknown", asked, asked, UNKNOWN)


def _is_brief(answer: str) -> bool:
    return len(answer.split()) <= MOST_WORDS and _PLAIN.fullmatch(answer) is not None
