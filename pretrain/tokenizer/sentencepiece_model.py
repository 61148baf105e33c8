"""A sentencepiece model as a tokenizer of `tokenizers`, compared with sentencepiece itself.

    .model -> pieces, scores, rules of normalization -> tokenizer.json -> a probe, encoded by both

transformers converts such models by the rules of the class that a folder names: it puts no space
before a text of Mistral's, orders merges by ids, and drops the second accent of a letter with two.
Here the rules are those of the model; ids, special tokens and the post-processor are theirs.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pretrain.errors import DataError
from pretrain.tokenizer.roles import unknown_id
from pretrain.tokenizer.words import SPACE
from pretrain.utils.safe_read import parse_json

_UNIGRAM, _BPE, _WORD, _CHAR = 1, 2, 3, 4
_NORMAL, _USER_DEFINED = 1, 4
_COMPOSING = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf")


def convert_sentencepiece(path: Path, theirs: Tokenizer, texts: Sequence[str]) -> Tokenizer:
    """Returns the tokenizer of a sentencepiece model, with the ids and special tokens of `theirs`.

    `texts` have no special token. Raises: DataError: sentencepiece encodes one of them otherwise,
    or it is no such model.
    """
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    formats: Any = sentencepiece_model_pb2
    proto = formats.ModelProto()
    try:
        program = SentencePieceProcessor(model_file=str(path))
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf, OSError and RuntimeError
        reason = " ".join(str(error).split())
        raise DataError(
            f"not a sentencepiece model: {reason}",
            where=str(path),
            fix="fetch it again",
        ) from None
    converted = _build(proto, theirs)
    # Families have a name of their own for it.
    unknown = {program.unk_id(): converted.id_to_token(unknown_id(converted) or 0)}
    symbols = [one.piece for one in proto.pieces if one.type == _USER_DEFINED][:100]
    inside = [text for one in symbols for text in (one, f"a {one} b{one}c", f"{one}{one} a")]
    for text in (*texts, *inside):
        wanted = [unknown.get(one) or program.id_to_piece(one) for one in program.encode(text)]
        ids = converted.encode(text, add_special_tokens=False).ids
        tokens = [converted.id_to_token(one) for one in ids]
        if tokens != wanted:
            message = f"sentencepiece encodes {text!r} as {wanted}, and a tokenizer.json of its model"
            fix = "give a folder with the tokenizer.json of its makers, or train a tokenizer"
            raise DataError(f"{message} as {tokens}", where=str(path), fix=fix)
    return converted


def _build(proto: Any, theirs: Tokenizer) -> Tokenizer:
    rules, state = proto.normalizer_spec, parse_json(theirs.to_str())
    added = state["added_tokens"]
    if proto.trainer_spec.model_type == _UNIGRAM:
        # There user-defined symbols are pieces, and white space beside them stays.
        symbols = {one.piece for one in proto.pieces if one.type == _USER_DEFINED}
        added = [one for one in added if one["special"] or one["content"] not in symbols]
    built = Tokenizer(_build_model(proto, theirs, state["model"]))
    built.normalizer = _build_normalizer(rules)
    built.pre_tokenizer = _build_words(proto, state)
    spaces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    first = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
    built.decoder = decoders.Sequence([*spaces, *first])
    changes = {"added_tokens": added, "post_processor": state["post_processor"]}
    return Tokenizer.from_str(json.dumps(parse_json(built.to_str()) | changes))


def _build_words(proto: Any, state: dict[str, Any]) -> pre_tokenizers.PreTokenizer:
    rules, scheme = proto.normalizer_spec, "never"
    if rules.add_dummy_prefix:
        # Before each part between special tokens, or the first alone, as transformers does.
        parts = json.dumps([state["pre_tokenizer"], state["normalizer"]])
        scheme = "always" if '"always"' in parts or '"Prepend"' in parts else "first"
    # Metaspace puts none before a text that begins with its replacement: the first has another.
    first = pre_tokenizers.Metaspace(" ", prepend_scheme=scheme, split=False)
    # Words alone, where no piece has more: the same pieces in less time.
    split = not any(SPACE in one.piece[1:] for one in proto.pieces)
    second = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=split)
    steps: list[pre_tokenizers.PreTokenizer] = [first, second]
    if proto.trainer_spec.model_type == _UNIGRAM and proto.trainer_spec.byte_fallback:
        # A text that spells the piece of a byte does not mean that byte.
        steps.append(pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "isolated"))
    return pre_tokenizers.Sequence(steps)


def _build_model(proto: Any, theirs: Tokenizer, state: dict[str, Any]) -> Any:
    trained = proto.trainer_spec
    numbers = {one.piece: number for number, one in enumerate(proto.pieces)}
    vocab = theirs.get_vocab(with_added_tokens=False)
    if not numbers.keys() <= vocab.keys():
        vocab = numbers
    if trained.model_type == _UNIGRAM:
        if state["type"] == "Unigram":  # with pieces of their own, such as sentinels
            scored, unknown = [tuple(one) for one in state["vocab"]], state["unk_id"]
            names = [piece for piece, _ in scored]  # T5's class has 2 for every model
            if (piece := proto.pieces[trained.unk_id].piece) in names:
                unknown = names.index(piece)
        else:
            scored, unknown = [(one.piece, one.score) for one in proto.pieces], trained.unk_id
        return models.Unigram(scored, unknown, byte_fallback=trained.byte_fallback)
    if trained.model_type == _WORD:
        raise DataError(
            "a sentencepiece model of whole words",
            fix="give one of unigram, bpe or char",
        )
    merges = _find_merges(proto) if trained.model_type == _BPE else []
    options = {"unk_token": proto.pieces[trained.unk_id].piece, "fuse_unk": True}
    return models.BPE(vocab, merges, byte_fallback=trained.byte_fallback, **options)


def _find_merges(proto: Any) -> list[tuple[str, str]]:
    """Returns every pair of pieces that makes a piece, the highest score of the result first."""
    scores = {one.piece: one.score for one in proto.pieces if one.type == _NORMAL}
    ordered = sorted(scores, key=lambda piece: -scores[piece])
    pairs = ((piece[:at], piece[at:]) for piece in ordered for at in range(1, len(piece)))
    return [pair for pair in pairs if pair[0] in scores and pair[1] in scores]


def _build_normalizer(rules: Any) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
        if rules.name in _COMPOSING:
            # `Precompiled` takes the shortest match of a letter with its accents, and drops the
            # others. So they are joined before, and again with what it made. Of 176,085 characters
            # and their decompositions, all but two are then as in sentencepiece.
            steps = [normalizers.NFC(), *steps, normalizers.NFC()]
        if rules.name.startswith("nmt"):
            steps.insert(0, normalizers.Replace(Regex(r"\r(?=\n)"), " "))  # for the same reason
    if not rules.remove_extra_whitespaces:
        return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    # A space before a text is left to the pre-tokenizer, which must see the first character.
    edges = f"[ {SPACE}]+\\z" + ("" if rules.add_dummy_prefix else r"|\A +")
    shorter = (normalizers.Replace(Regex(edges), ""), normalizers.Replace(Regex(" +"), " "))
    return normalizers.Sequence([*steps, *shorter])
