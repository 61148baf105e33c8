"""Short texts with questions about them: the answer stands in the text, or nowhere."""

from random import Random
from typing import NamedTuple

from pretrain.preparation.dialogue.question import UNKNOWN, Question, words

NAMES = words(
    "Ada Alan Alice Anna Ben Bob Carl Cleo Dan Dora Ella Emil Eva Finn Flora Fred Gina Grace "
    "Hana Hugo Ida Ivan Jack Jane Jim Julia Karl Kate Kim Lara Leo Lily Lucy Mara Mark Max "
    "Mia Mona Nils Nina Noah Nora Olga Omar Oscar Paul Peter Pia Rita Rob Rosa Ruth Sam Sara "
    "Sofia Stan Tara Theo Tim Tina Tom Uma Vera Victor Wanda Will Yara Zoe"
)
THINGS = words(
    "apple bag ball basket bell bike boat book bottle bowl box brush candle car chair clock "
    "coat cup desk doll drum flag flute fork glass guitar hammer hat jar kettle key kite "
    "knife ladder lamp map mirror mug needle pan pen pencil phone piano pillow plate radio "
    "ring rope ruler scarf ship shoe spoon stone table tent ticket towel train tray umbrella "
    "vase violin wallet watch wheel whistle"
)
COLOURS = words("black blue brown green grey orange pink purple red silver white yellow")
PLACES = words(
    "Athens Berlin Boston Cairo Chicago Delhi Dublin Geneva Hamburg Helsinki Istanbul Kyoto "
    "Lagos Lima Lisbon London Madrid Milan Moscow Nairobi Oslo Paris Prague Quito Rome Seoul "
    "Sydney Tokyo Toronto Vienna Warsaw Zurich"
)
FOODS = words(
    "bananas beans bread butter cake carrots cheese cherries eggs fish grapes honey lemons "
    "melons mushrooms noodles nuts olives onions pasta peas plums potatoes rice salad soup "
    "tea tomatoes"
)
JOBS = words("baker barber cook dentist doctor driver farmer gardener judge lawyer nurse painter pilot singer teacher")
ARGUMENTS = words(
    "alpha base body code count data depth end field file flag first head index item key last "
    "left length limit line mode name node offset path point rate right root rows seed size "
    "start step text total value width"
)
ORDINALS = ("first", "second", "third", "fourth")
UNKNOWN_SHARE = 0.25
INVENTED_SHARE = 0.25
"""Share of names that no list has, so that names are copied rather than known."""
_MOST = 4

Asked = list[tuple[str, str]]
"""Questions with their answers."""


class _Sort(NamedTuple):
    """Sentence in several phrasings, and the questions that it answers, with their answers."""

    phrasings: tuple[str, ...]
    asked: tuple[tuple[str, str], ...]


_OWN = _Sort(
    (
        "{name} has {article} {colour} {thing}.",
        "{name} owns {article} {colour} {thing}.",
        "{name} bought {article} {colour} {thing}.",
    ),
    (
        ("Who has the {thing}?", "{name}"),
        ("What does {name} have?", "{article} {colour} {thing}"),
        ("What colour is the {thing}?", "{colour}"),
    ),
)
_SORTS = (
    _OWN,
    _Sort(
        ("{name} lives in {place}.", "{name}'s home is in {place}.", "{name} moved to {place}."),
        (("Where does {name} live?", "{place}"), ("Who lives in {place}?", "{name}")),
    ),
    _Sort(
        ("{name} likes {food}.", "{name} likes to eat {food}.", "{name} always buys {food}."),
        (("What does {name} like?", "{food}"), ("Who likes {food}?", "{name}")),
    ),
    _Sort(
        ("{name} is {age} years old.", "{name} is {age}."),
        (("How old is {name}?", "{age}"), ("Who is {age} years old?", "{name}")),
    ),
    _Sort(
        ("{name} is a {job}.", "{name} works as a {job}."),
        (("What is the job of {name}?", "{job}"), ("Who is the {job}?", "{name}")),
    ),
    _Sort(
        ("The {thing} is in {place}.", "The {thing} was found in {place}."),
        (("Where is the {thing}?", "in {place}"), ("What is in {place}?", "the {thing}")),
    ),
)


def invent(random: Random) -> str:
    """Returns a word that no list has."""
    word = ""
    for _ in range(random.choice((2, 3))):
        word += random.choice("bdfgklmnprstvz") + random.choice("aeiou")
    return word + random.choice("klmnrst")


class Story:
    """Sentences of at most two sorts, so that what they do not say resembles what they say."""

    def __init__(self, random: Random) -> None:
        self._random = random
        count = _MOST + 1  # one that the text does not name
        self._names = random.sample(NAMES, count)
        for place in range(count):
            if random.random() < INVENTED_SHARE:
                self._names[place] = invent(random).capitalize()
        self._things = random.sample(THINGS, count)
        self._places = random.sample(PLACES, count)
        self._foods = random.sample(FOODS, count)
        self._jobs = random.sample(JOBS, count)
        self._ages = random.sample(range(5, 90), count)
        chosen = random.sample(_SORTS, 2)
        sentences = [self._tell(random.choice(chosen), number) for number in range(random.randint(2, _MOST))]
        self._known = [one for _, asked in sentences for one in asked]
        self._unknown = [asked for sort in chosen for asked, _ in self._tell(sort, _MOST)[1]]
        chosen_phrasings = [random.choice(phrasings) for phrasings, _ in sentences]
        random.shuffle(chosen_phrasings)
        self.text = " ".join(chosen_phrasings)

    def ask(self) -> Question:
        """Returns a question that the text answers, or one of UNKNOWN_SHARE about what is not in it."""
        if self._random.random() < UNKNOWN_SHARE:
            return about(self.text, self._random.choice(self._unknown), UNKNOWN)
        return about(self.text, *self._random.choice(self._known))

    def _tell(self, sort: _Sort, number: int) -> tuple[list[str], Asked]:
        """Returns the phrasings of a sentence about the subject of a number, and what it answers."""
        fields: dict[str, object] = {
            "name": self._names[number],
            "thing": self._things[number],
            "place": self._places[number],
            "food": self._foods[number],
            "job": self._jobs[number],
            "age": self._ages[number],
        }
        if sort is _OWN:
            colour = self._random.choice(COLOURS)
            fields |= {"colour": colour, "article": "an" if colour == "orange" else "a"}
        asked = [(question.format(**fields), answer.format(**fields)) for question, answer in sort.asked]
        return [phrasing.format(**fields) for phrasing in sort.phrasings], asked


class Signature:
    """Line of a program that defines a function."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._name = invent(random)
        self._arguments = random.sample(ARGUMENTS, random.randint(1, _MOST))
        self.text = f"def {self._name}({', '.join(self._arguments)}):"

    def ask(self) -> Question:
        """Returns a question about the arguments, or about one that the function lacks."""
        if self._random.random() < 1 / (_MOST + 1):
            return about(self.text, f"How many arguments does {self._name} take?", str(len(self._arguments)))
        place = self._random.randrange(_MOST)
        answer = self._arguments[place] if place < len(self._arguments) else UNKNOWN
        return about(self.text, f"What is the {ORDINALS[place]} argument of {self._name}?", answer)


def about(text: str, asked: str, answer: str) -> Question:
    """Returns a question about a text, which is held out with the text."""
    kind = "unknown" if answer == UNKNOWN else "text"
    return Question(kind, f"{text} {asked}", asked, answer, text)
