"""Tokens as labels of a picture: white space made visible, long ones cut, and nothing that no font can draw."""

import functools
import unicodedata
from collections.abc import Callable, Sequence

from pretrain.generate.codec import Codec

SPACE = "\u2423"
"""The open box: how a space is written where it has to be seen."""

SENTENCEPIECE_SPACE = "\u2581"
"""How the pieces of sentencepiece spell a space."""

ELLIPSIS = "\u2026"
LONGEST_COLUMNS = 12

FONTS = (
    "DejaVu Sans Mono",
    "Noto Sans Mono",
    "Noto Sans Mono CJK SC",
    "Noto Sans Mono CJK JP",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "WenQuanYi Micro Hei Mono",
    "WenQuanYi Zen Hei Mono",
    "Droid Sans Fallback",
    "IPAexGothic",
    "IPAGothic",
    "MS Gothic",
    "Hiragino Sans",
    "Arial Unicode MS",
    "DejaVu Sans",
    "Noto Sans",
    "Noto Sans Arabic",
    "Noto Sans Hebrew",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "FreeSans",
    "Unifont",
)
"""Tried in this order for each character; the first and `DejaVu Sans` come with matplotlib."""

REPLACEMENT = "\ufffd"
"""What bytes that are not whole characters decode to."""

MOST_PARTS = 8
"""Tokens that are looked at for the rest of a character; it has at most four bytes, but tokens may straddle two."""


def spell_tokens(codec: Codec, ids: Sequence[int]) -> list[str]:
    """Returns what each token stands for; the parts of a cut character as that character with `[1/3]`, `[2/3]` ...

    Tokenizers of bytes cut the characters of a script that they were not trained on; such a token has no text itself.
    """
    shown = codec.tokens(list(ids))
    start = 0
    while start < len(ids):
        end = _end_of_character(codec, ids, start)
        if end - start > 1:
            text = codec.decode(list(ids[start:end]))
            text = text if len(text) <= 3 else text[:2] + ELLIPSIS
            shown[start:end] = [f"{text}[{part}/{end - start}]" for part in range(1, end - start + 1)]
        start = end
    return shown


def _end_of_character(codec: Codec, ids: Sequence[int], start: int) -> int:
    """Returns where the tokens end that have to be decoded together; one further where nothing completes them."""
    for end in range(start + 1, min(start + MOST_PARTS, len(ids)) + 1):
        if REPLACEMENT not in codec.decode(list(ids[start:end])):
            return end
    return start + 1


@functools.cache
def label_fonts() -> list[str]:
    """Returns those of `FONTS` that this machine has."""
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    return [name for name in FONTS if name in installed]


@functools.cache
def _drawable_code_points() -> frozenset[int]:
    from matplotlib import font_manager

    found: set[int] = set()
    for name in label_fonts():
        path = font_manager.findfont(font_manager.FontProperties(family=[name]), fallback_to_default=False)
        found |= font_manager.get_font(path).get_charmap().keys()
    return frozenset(found)


def is_drawable(character: str) -> bool:
    """Whether some font of this machine has the character."""
    return ord(character) in _drawable_code_points()


def columns(text: str) -> int:
    """Returns the width of a text in columns of a monospaced font: two for the wide characters of East Asia."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def label(token: str, drawable: Callable[[str], bool] = is_drawable) -> str:
    r"""Returns what to write beside a row or column for a token.

    Spaces, sentencepiece's too, become open boxes; other white space, control characters and what no font has become
    escapes (`\n`, `\u0e01`); more than `LONGEST_COLUMNS` columns are cut. An empty token is written as two quotes.
    """
    if not token:
        return '""'
    shown = [_visible(character, drawable) for character in token]
    text = "".join(shown)
    if columns(text) <= LONGEST_COLUMNS:
        return text
    kept = ""
    for piece in shown:
        if columns(kept + piece) >= LONGEST_COLUMNS:
            break
        kept += piece
    return kept + ELLIPSIS


def _visible(character: str, drawable: Callable[[str], bool]) -> str:
    if character in (" ", SENTENCEPIECE_SPACE):
        return SPACE
    is_blank = character.isspace() or unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp", "Zs")
    if is_blank or not drawable(character):
        return character.encode("unicode_escape").decode("ascii")
    return character
