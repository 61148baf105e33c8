"""Whether a model's tokens mean in the data what they meant to the model: every one has the same number."""

from pathlib import Path

from tokenizers import Tokenizer

from pretrain.artifact.what import TOKENIZER_FOLDER, What
from pretrain.config.prepare import TokenizerConfig
from pretrain.errors import DataError
from pretrain.tokenizer import parse_tokenizer
from pretrain.tokenizer.given import read_given


def check_tokens(what: What, data: Path) -> None:
    """Compares the tokenizer of a model with that of the data, which may have further tokens.

    Args:
        what: The model; one without a tokenizer fits any.
        data: The tokenizer.json of the data.

    Raises:
        DataError: A token has another number in the data, or none.
    """
    theirs = _tokenizer_of(what)
    if theirs is None:
        return
    ours = parse_tokenizer(data.read_bytes(), str(data)).get_vocab(with_added_tokens=True)
    known = sorted(theirs.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    different = [(token, number) for token, number in known if ours.get(token) != number]
    if different:
        token, number = different[0]
        found = ours.get(token, "none")
        raise DataError(
            f"the tokenizer of the data is not that of {what.path}: {token!r} has the number {number} there "
            f"and {found} here, and {len(different) - 1} others differ",
            where=str(data),
            fix=f"prepare them with tokenizer: {{kind: given, path: {what.path}}}, or say init.check_tokenizer=false",
        )


def _tokenizer_of(what: What) -> Tokenizer | None:
    files = dict(what.load_tokenizer_files())
    if not files:
        return None
    content = files.get("tokenizer.json")
    if content is None:
        folder = what.path / TOKENIZER_FOLDER
        path = folder if folder.is_dir() else what.path
        content = read_given(TokenizerConfig(kind="given", path=str(path)))
    return parse_tokenizer(content, str(what.path))
