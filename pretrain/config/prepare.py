"""How the turns of a conversation are written as text: by role, with `{content}` where the words of a turn go.

What stands around the words may name special tokens of the tokenizer, and becomes them; the words never do. Of a turn
that is learned, what follows its words is learned with them: that is how a model knows when to stop.
"""

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from pretrain.config.base import Section

TEMPLATES: dict[str, dict[str, str]] = {
    "instruction": {
        "system": "{content}\n\n",
        "user": "### Instruction:\n{content}\n\n",
        "assistant": "### Response:\n{content}\n\n",
    },
    "chatml": {
        role: f"<|im_start|>{role}\n{{content}}<|im_end|>\n" for role in ("system", "user", "assistant", "tool")
    },
}

"""By the name that `inputs.N.template` takes. `chatml` wants tokenizer.special_tokens: [<|im_start|>, <|im_end|>]."""

CONTENT = "{content}"


def check_template(template: str | dict[str, str] | None) -> str | dict[str, str] | None:
    """Returns a template that is none, one of `TEMPLATES`, or one of its own. Raises: ValueError."""
    if isinstance(template, str) and template not in TEMPLATES:
        raise ValueError(
            f"template={template!r} is unknown; use {' or '.join(TEMPLATES)}, or give a text for each role"
        )
    for role, text in template.items() if isinstance(template, dict) else ():
        if text.count(CONTENT) != 1:
            raise ValueError(f"template.{role}={text!r} must have {CONTENT} once")
    return template


def turns_of(template: str | dict[str, str]) -> dict[str, tuple[str, str]]:
    """Returns by role what stands before and after the words."""
    texts = TEMPLATES[template] if isinstance(template, str) else template
    return {role: (text.partition(CONTENT)[0], text.partition(CONTENT)[2]) for role, text in texts.items()}


# The config of `pretrain prepare`: which text becomes which token shards.


DataKind = Literal["text", "pairs", "records", "classes", "tags"]

DATA_KINDS: tuple[DataKind, ...] = get_args(DataKind)

Format = Literal["auto", "text", "lines", "jsonl", "json", "parquet", "webdataset"]


class NormalizeConfig(Section):
    """What an input's text goes through before anything else sees it: filters, split, duplicates, tokenizer.

    Attributes:
        steps: In order. `lowercase`; `punctuation` and `moses`: punctuation is normalised, and words and marks are
            parted by spaces, as the scripts of Moses do it (Koehn et al. 2007).
        language: Of the text, such as `en`, by which Moses knows abbreviations and quotes; of pairs, of the source.
        target_language: Pairs: of the target.
    """

    steps: list[Literal["lowercase", "punctuation", "moses"]] = Field(min_length=1)
    language: str | None = Field(default=None, pattern=r"^[a-z]{2,3}$")
    target_language: str | None = Field(default=None, pattern=r"^[a-z]{2,3}$")

    @property
    def needs_language(self) -> bool:
        """Steps differ by language."""
        return any(step != "lowercase" for step in self.steps)

    @model_validator(mode="after")
    def _check(self) -> "NormalizeConfig":
        if self.needs_language and self.language is None:
            raise ValueError("punctuation and moses need a language, such as language: en")
        return self


class InputConfig(Section):
    """One input, or several that are read alike.

    Attributes:
        path: Files, folders, globs, or URLs of http, https, s3, gs. None given at all: this Python's standard library.
        format: How documents lie in a file; `auto` goes by its name. `text`: a file is a document; `lines`: a line is
            one; `json`: a list of records; `webdataset`: tars with a text or JSON member a sample.
        text_field: Field or column of the text.
        source_field: Pairs: field of the source; the target is in `target_field`.
        target_field: Pairs: field of the target.
        paired_path: Pairs as files: the n-th line there is the target of the n-th line of `path`. As many files.
        prompt_field: Records: field of the prompt, which is not learned.
        response_field: Records: field of the response, which is.
        messages_field: Records: field of a list of {role, content}; turns of the assistant are learned.
        template: Records: what is written around the words of each role: a name (`instruction`, `chatml`), or a text
            for each role with `{content}` in it; a prompt is the user's. None: nothing.
        label_field: Classes: field of the label, text or a number; the text is in `text_field`.
        words_field: Tags: field of the list of a text's words.
        tags_field: Tags: field of the list of their labels.
        max_document_bytes: A longer document or line is refused.
        normalize: Done to the text as it is read. None: it stays as it is.
        split: All documents go there. None: as `split` of the whole says.
    """

    path: str | list[str] = Field(default_factory=list)
    format: Format = "auto"
    text_field: str = "text"
    source_field: str = "source"
    target_field: str = "target"
    paired_path: str | list[str] | None = None
    prompt_field: str = "prompt"
    response_field: str = "response"
    messages_field: str | None = None
    template: Annotated[str | dict[str, str] | None, AfterValidator(check_template)] = None
    label_field: str = "label"
    words_field: str = "tokens"
    tags_field: str = "tags"
    max_document_bytes: int = Field(default=64 * 2**20, ge=1)
    normalize: NormalizeConfig | None = None
    split: Literal["train", "validation"] | None = None

    @property
    def paths(self) -> list[str]:
        """`path` as a list."""
        return [self.path] if isinstance(self.path, str) else self.path


class TokenizerConfig(Section):
    """The tokenizer that makes the tokens.

    Attributes:
        kind: Trained here: byte-level `bpe`, `wordpiece` (BERT), `unigram` (SentencePiece), `char`; or `given`.
        path: `given`: a tokenizer.json, a folder of Hugging Face, or a name on its hub.
        vocab_size: Entries, special tokens included. None: 8192.
        lowercase: Texts are lower-cased first.
        normalizer: Unicode normalisation.
        split_digits: A number is one token a digit.
        special_tokens: Further ones, in order, after those that the kind and `roles` need.
        roles: `document`: an end of document. `bert`: [PAD] [UNK] [CLS] [SEP] [MASK]. `t5`: <pad> </s> <unk> and
            sentinels.
        sentinels: `t5`: number of <extra_id_N>.
        vocab_multiple: The vocabulary is filled up to a multiple of this with unused tokens.
        sample_bytes: Training text taken evenly from the whole input.
    """

    kind: Literal["bpe", "wordpiece", "unigram", "char", "given"] = "bpe"
    path: str | None = None
    vocab_size: int | None = Field(default=None, ge=2)
    lowercase: bool = False
    normalizer: Literal["none", "nfc", "nfkc"] = "none"
    split_digits: bool = False
    special_tokens: list[str] = Field(default_factory=list)
    roles: Literal["document", "bert", "t5"] = "document"
    sentinels: int = Field(default=100, ge=0)
    vocab_multiple: int = Field(default=1, ge=1)
    sample_bytes: int = Field(default=64 * 2**20, ge=1)

    @model_validator(mode="after")
    def _check(self) -> "TokenizerConfig":
        if (self.kind == "given") != (self.path is not None):
            raise ValueError("path belongs to kind=given, and is needed there")
        if self.kind in ("given", "char") and self.vocab_size is not None:
            raise ValueError(f"vocab_size={self.vocab_size} does not go with kind={self.kind}, which has its own")
        return self


class FilterConfig(Section):
    """Which documents are left out; each count is reported.

    Attributes:
        min_chars: Shorter ones.
        max_chars: Longer ones. None: no limit.
        require: Only records whose fields have one of these values, such as `{language: [en, de]}`.
        deduplicate: Documents whose bytes came before, whichever input they came from.
    """

    min_chars: int = Field(default=1, ge=0)
    max_chars: int | None = Field(default=None, ge=1)
    require: dict[str, list[str | int | bool]] = Field(default_factory=dict)
    deduplicate: bool = False


class PrepareConfig(Section):
    """Everything that defines a shard folder.

    Attributes:
        output: Folder to write.
        kind: What a document is: a text, a pair, a record of segments, a text with a label (`classes`), or a text whose
            words have labels (`tags`).
        inputs: Read in this order.
        tokenizer: Trained or given.
        filter: What is left out.
        split: `hash:F` by document, or `tail:F` of every document, held out for validation.
        seed: Salt of the hash split.
        part_bytes: Input bytes of one unit of work. None: by the size of the input.
        shard_tokens: A part starts a new shard at this many tokens.
        end_of_document: A document ends with the tokenizer's end-of-document token. Whatever is said here, a labelled
            one begins with the token that begins a text ([CLS]), where the tokenizer has one.
        labels: Classes, tags: names of the labels, by number. None: those of the training split, sorted.
    """

    output: str
    kind: DataKind = "text"
    inputs: list[InputConfig] = Field(default_factory=list)
    tokenizer: TokenizerConfig = TokenizerConfig()
    filter: FilterConfig = FilterConfig()
    split: str = "hash:0.01"
    seed: int = Field(default=0, ge=0, lt=2**64)
    part_bytes: int | None = Field(default=None, ge=1)
    shard_tokens: int = Field(default=2**27, ge=1)
    end_of_document: bool = True
    labels: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check(self) -> "PrepareConfig":
        if self.labels and self.kind not in ("classes", "tags"):
            raise ValueError(f"labels go with kind=classes or tags, not {self.kind}; leave them out")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError(f"labels names one twice: {', '.join(self.labels)}")
        for number, one in enumerate(self.inputs):
            if one.template is not None and self.kind != "records":
                raise ValueError(f"inputs.{number}.template goes with kind=records, not {self.kind}; leave it out")
            rules = one.normalize
            if rules is None:
                continue
            if self.kind == "tags":
                raise ValueError(
                    f"inputs.{number}.normalize would move words away from their tags; use tokenizer.lowercase instead"
                )
            if self.kind != "pairs" and rules.target_language is not None:
                raise ValueError(f"inputs.{number}.normalize.target_language goes with kind=pairs, not {self.kind}")
            if self.kind == "pairs" and rules.needs_language and rules.target_language is None:
                raise ValueError(f"inputs.{number}.normalize needs a target_language, such as target_language: de")
        return self
