"""PrepareConfig, the config of `pretrain prepare`."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from pretrain.config.base import Conflicts, Section
from pretrain.config.texts.quality import (
    C4Config,
    FineWebConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
    LanguageConfig,
)
from pretrain.config.texts.templates import AUTO, Template, check_named_template, is_jinja
from pretrain.kinds.formats import FORMATS
from pretrain.kinds.layouts import LAYOUTS

DATA_KINDS = tuple(name for name, layout in LAYOUTS.items() if not layout.captions)
if TYPE_CHECKING:
    DataKind = str
    Format = str
else:
    DataKind = Literal[DATA_KINDS]
    Format = Literal["auto", *(name for name, one in FORMATS.items() if one.is_chosen)]


class NormalizeConfig(Section):
    """Text normalization of an input, before filters, split, deduplication and tokenizer."""

    steps: list[Literal["lowercase", "punctuation", "moses"]] = Field(min_length=1)
    """In order: `lowercase`; `punctuation` and `moses`: normalize punctuation, and split words and
    marks by spaces, like the scripts of Moses (Koehn et al. 2007)."""
    language: str | None = Field(default=None, pattern=r"^[a-z]{2,3}$")
    """Language code of the text or source, such as `en`, for abbreviations and quotes of Moses."""
    target_language: str | None = Field(default=None, pattern=r"^[a-z]{2,3}$")
    """Language code of the target, for pairs."""

    @property
    def needs_language(self) -> bool:
        """True if a step depends on the language."""
        return any(step != "lowercase" for step in self.steps)

    def _conflicts(self) -> Conflicts:
        if self.needs_language and self.language is None:
            yield "punctuation and moses need a language, such as language: en"


class InputConfig(Section):
    """One input, or several of the same format."""

    path: str | list[str] = Field(default_factory=list)
    """Files, folders, globs, or URLs (http, https, s3, gs, hf). Empty: Python's standard library."""
    subset: str | None = None
    """Configuration of a data set at hf://datasets/OWNER/NAME, as its README.md names it. None: its
    default, or its only one."""
    dataset_split: str | None = None
    """Split of a data set there, or of a folder of `datasets` (save_to_disk). None: train."""
    format: Format = "auto"
    """`auto`: by file name. `text`: a document a file. `lines`: a document a line. `jsonl`: a
    record a line. `json`: a list of records, or records one after the other. `csv`, `tsv`: a record
    a row, below a header. `parquet`, `arrow`: a
    document a row. `webdataset`: tars with
    one text or JSON member a sample. `warc`: a document a page of a web archive. `docstrings`: of
    Python source, for triples, functions with their documentation as queries."""
    text_field: str = "text"
    """Field or column of the text. Fields inside others have paths, in all options of fields:
    `doc.text`, `parts.0.text`; a field that is called so itself comes first."""
    joiner: str | None = None
    """Text between the strings of a list that a text field holds, such as a space. None: a list is
    no text."""
    source_field: str = "source"
    """Field of the source, for pairs."""
    target_field: str = "target"
    """Field of the target, for pairs."""
    paired_path: str | list[str] | None = None
    """Files of the targets, for pairs, as many as in `path`: line n is the target of its line n.
    None: both sides are fields of a record."""
    prompt_field: str | Annotated[list[str], Field(min_length=1)] = "prompt"
    """Field of the prompt, which has no loss; for records and preferences. Or several, joined by a
    blank line: those after the first may be absent or empty. Records without a prompt that have an instruction and an
    output (Alpaca) are read by `[instruction, input]` and `output`."""
    response_field: str = "response"
    """Field of the response, which has a loss; for records."""
    chosen_field: str = "chosen"
    """Field of the preferred answer to the prompt, for preferences: a text, or a list of {role,
    content}: turns after those of the prompt, or with them at its beginning."""
    rejected_field: str = "rejected"
    """Field of the other answer, for preferences."""
    messages_field: str | None = None
    """Field of a list of {role, content}, for records; only the assistant's turns have a loss, not
    those that have `weight: 0`, `train: false` or `masked: true`. None: prompt and response."""
    template: Annotated[Template | None, AfterValidator(check_named_template)] = None
    """Text around turns, for records and preferences: `instruction`, `chatml`, or a mapping from role
    to a text with `{content}`; or a chat template of transformers: `tokenizer` (that of the given tokenizer),
    a .jinja file, or a mapping with `jinja`, its text, `tool_use`, another one for conversations
    with tools, and `bos_token`, `eos_token` and the `date` for its `strftime_now`; or `auto`: that of
    the given tokenizer's folder or run, where it has one, else `chatml`, whose two tokens are added. A
    prompt has the role user. None: no such text."""
    label_field: str = "label"
    """Field of the label (text or number), for classes; `text_field` has the text. For feedback,
    true where the response is wanted, else false."""
    choices_field: str = "choices"
    """Field of the list of answers to choose from, for choices, or of an object with their `text`
    and `label`; `label_field` has the right one, by its place from 0, its label or its text."""
    words_field: str = "tokens"
    """Field of the list of words, for tags."""
    tags_field: str = "tags"
    """Field of the list of their labels, for tags."""
    question_field: str = "question"
    """Field of the question, for answers and choices."""
    context_field: str = "context"
    """Field of the text that has its answer, for answers."""
    answers_field: str = "answers"
    """Field of the answers with their `text` and `answer_start` in characters, for answers, as SQuAD
    has them; the first counts, and without one the text does not answer the question."""
    query_field: str = "query"
    """Field of the query, for triples."""
    positive_field: str = "positive"
    """Field of the text that belongs to the query, for triples."""
    negatives_field: str = "negatives"
    """Field of the list of texts that do not, hard negatives, for triples; may be absent."""
    group_field: str = "group"
    """Field of a name, for triples: texts of records that have it in common are no negatives of
    each other, and in one split; may be absent."""
    max_document_bytes: int = Field(default=64 * 2**20, ge=1)
    """Largest size of a document or line in bytes; a larger one is refused."""
    on_error: Literal["stop", "skip"] = "stop"
    """Bad items of the input, such as bytes that are not UTF-8, lines that are not JSON, absent
    fields, too long texts, damage: `stop`, with the first place, or `skip`: leave out the record,
    or the rest of a damaged file, and count it, up to `max_skipped_share`."""
    normalize: NormalizeConfig | None = None
    """Text normalization before everything else. None: no normalization."""
    split: Literal["train", "validation"] | None = None
    """Split of all documents of this input. None: as the `split` of the config says."""

    @property
    def paths(self) -> list[str]:
        """`path` as a list."""
        return [self.path] if isinstance(self.path, str) else self.path

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        if isinstance(values, dict) and "undecodable" in values:
            raise ValueError(f"undecodable={values['undecodable']} is now a case of on_error: write on_error instead")
        return values


TRAINED = ("bpe", "wordpiece", "unigram", "char")
"""Kinds of tokenizers that are trained."""


class TokenizerConfig(Section):
    """Tokenizer, trained or given."""

    kind: Literal["bpe", "wordpiece", "unigram", "char", "given"] = "bpe"
    """Byte-level `bpe`, `wordpiece` (BERT), `unigram` (SentencePiece), `char`; `given`: at
    `path`."""
    path: str | None = None
    """For `given`: a tokenizer.json, a Hugging Face folder, or a name on its hub."""
    eos: str | None = None
    """End-of-document token of a given tokenizer. None: the `eos_token` of its folder, or the first of the usual
    names."""
    begin: bool | None = None
    """Begin documents of text and records with the start token of a given tokenizer. None: if its post-processor does,
    and ends them with nothing (LLaMA, Mistral, Gemma). The post-processor in the output is made to
    agree."""
    vocab_size: int | None = Field(default=None, ge=2)
    """Vocabulary size of a trained tokenizer in tokens, special tokens included. None: 8192."""
    lowercase: bool = False
    """Convert text to lower case first."""
    normalizer: Literal["none", "nfc", "nfkc"] = "none"
    """Unicode normalization form."""
    split_digits: bool = False
    """Split numbers into single digits."""
    special_tokens: list[str] = Field(default_factory=list)
    """Additional special tokens, in order, after those that `kind` and `roles` need."""
    roles: Literal["document", "bert", "t5"] = "document"
    """Set of special tokens. `document`: end of document. `bert`: `[PAD]`, `[UNK]`, `[CLS]`, `[SEP]`, `[MASK]`.
    `t5`: `<pad>`, `</s>`, `<unk>` and sentinels."""
    sentinels: int = Field(default=100, ge=0)
    """Number of <extra_id_N> tokens, for `roles: t5`."""
    vocab_multiple: int = Field(default=1, ge=1)
    """Fill the vocabulary up to a multiple of this size with unused tokens."""
    sample_bytes: int = Field(default=64 * 2**20, ge=1)
    """Size of the training text in bytes, sampled evenly from all input."""

    def _conflicts(self) -> Conflicts:
        if (self.kind == "given") != (self.path is not None):
            yield "path belongs to kind=given, and is needed there"
        for name in ("eos", "begin"):
            if self.kind != "given" and getattr(self, name) is not None:
                yield f"{name} goes with kind=given, not {self.kind}", "leave it out"
        if self.kind in ("given", "char") and self.vocab_size is not None:
            yield f"vocab_size={self.vocab_size} does not go with kind={self.kind}, which has its own"


class NearDuplicatesConfig(Section):
    """Near duplicates by MinHash, verified by the similarity of their word n-grams."""

    threshold: float = Field(default=0.8, ge=0.3, le=1)
    """Jaccard similarity of the sets of n-grams from which on the later document is left out."""
    ngram: int = Field(default=5, ge=1, le=50)
    """Words of an n-gram, in lower case and without marks."""
    hashes: int = Field(default=128, ge=16, le=1024)
    """MinHash values a document. More of them find more pairs at low thresholds, for more disk."""
    seed: int = Field(default=1, ge=0, lt=2**32)
    """Seed of the hashes."""


class DecontaminateConfig(Section):
    """Evaluation sets, whose texts must not be in the documents."""

    inputs: list[InputConfig] = Field(min_length=1)
    """Inputs as those of documents, a text each; one for each field of a record."""
    ngram: int = Field(default=13, ge=1, le=100)
    """Words in common, in lower case and without marks, for which a document is left out."""


class FilterConfig(Section):
    """Rules that drop documents; the number of dropped documents is reported by rule."""

    min_chars: int = Field(default=1, ge=0)
    """Smallest length of a document in characters."""
    max_chars: int | None = Field(default=None, ge=1)
    """Largest length of a document in characters. None: no limit."""
    require: dict[str, list[str | int | bool]] = Field(default_factory=dict)
    """Keep only records whose fields have one of these values, such as `{language: [en, de]}`."""
    deduplicate: bool = False
    """Drop documents whose bytes have occurred before, in any input."""
    near_duplicates: NearDuplicatesConfig | None = None
    """Drop documents that are similar to an earlier one, in any input. None: they stay."""
    language: LanguageConfig | None = None
    """Languages to keep. None: all."""
    c4: C4Config | None = None
    """Rules of C4, which drop lines, too, before the other rules. None: off, as below."""
    gopher_repetition: GopherRepetitionConfig | None = None
    """Rules of Gopher for repetition."""
    gopher_quality: GopherQualityConfig | None = None
    """Rules of Gopher for quality."""
    fineweb: FineWebConfig | None = None
    """Rules of FineWeb."""
    decontaminate: DecontaminateConfig | None = None
    """Drop documents with a text of evaluation sets. None: they stay."""


OF_TEXTS = (
    *("near_duplicates", "language", "c4", "gopher_repetition", "gopher_quality", "fineweb"),
    "decontaminate",
)
"""Rules of the filter that are of whole texts."""


class PrepareConfig(Section):
    """Config of a shard folder."""

    output: str
    """Output folder."""
    kind: DataKind = "text"
    """Kind of documents: `text`, `pairs`, `records` (prompts and responses), `preferences` (prompts
    with a chosen and a rejected answer), `feedback` (prompts and responses, wanted or not),
    `classes` (texts with a label), `tags` (texts with a label a word), `answers` (questions with a
    text that has the answer), `choices` (questions with answers to choose from), `triples` (queries
    with the text that belongs to each, and others that do not), `images` (folders of classes; or
    with captions, which need a tokenizer)."""
    inputs: list[InputConfig] = Field(default_factory=list)
    """Inputs, in the order in which they are read."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    filter: FilterConfig = FilterConfig()
    split: str = "hash:0.01"
    """Validation split: `hash:F` a share F of the documents, `tail:F` the end of every document."""
    seed: int = Field(default=0, ge=0, lt=2**64)
    """Salt of the hash split."""
    part_bytes: int | None = Field(default=None, ge=1)
    """Input bytes of one unit of work. None: chosen by the size of the input."""
    shard_tokens: int = Field(default=2**27, ge=1)
    """Largest size of a shard in tokens; a unit of work starts a new shard there."""
    end_of_document: bool = True
    """Append the end-of-document token to each document. A document with labels begins with [CLS]
    in any case, if the tokenizer has one."""
    max_text_tokens: int | None = Field(default=None, ge=8)
    """Largest length of each text of triples in tokens, with those around it: the rest of a longer
    one is left out.
    None: no limit."""
    max_skipped_share: float = Field(default=0.01, ge=0, le=1)
    """Largest share of bad items with `on_error: skip`, of all records and of all bytes; more of
    them end the preparation."""
    labels: list[str] = Field(default_factory=list)
    """Label names in the order of their ids. Empty: the sorted labels of the training split."""

    def _conflicts(self) -> Conflicts:
        layout = LAYOUTS[self.kind]
        yield from self._label_conflicts()
        if layout.images and self.differs("filter"):
            yield "filter is of text, which kind=images does not drop", "leave it out"
        if layout.most_mark and not self.end_of_document:
            yield f"kind={self.kind} needs end_of_document=true: a token behind each text"
        yield from self._filter_conflicts()
        if self.max_text_tokens is not None and not layout.cuts_texts:
            kinds = " or ".join(name for name, one in LAYOUTS.items() if one.cuts_texts)
            yield f"max_text_tokens goes with kind={kinds}, not {self.kind}", "leave it out"
        begun = [name for name, one in LAYOUTS.items() if one.begun]
        if self.tokenizer.begin is not None and self.kind not in begun:
            yield f"tokenizer.begin goes with kind={' or '.join(begun)}, not {self.kind}", "leave it out"
        for number, one in enumerate(self.inputs):
            yield from self._input_conflicts(f"inputs.{number}", one)

    def _filter_conflicts(self) -> Conflicts:
        texts = [name for name, one in LAYOUTS.items() if one.filtered]
        for name in OF_TEXTS:
            kinds = texts[:1] if name == "c4" else texts  # it drops lines, which conversations have not
            if getattr(self.filter, name) is not None and self.kind not in kinds:
                yield f"filter.{name} goes with kind={' or '.join(kinds)}, not {self.kind}", "leave it out"

    def _label_conflicts(self) -> Conflicts:
        # Documents of other kinds have no labels.
        if self.labels and not LAYOUTS[self.kind].names_labels:
            yield f"labels go with kind=classes, tags or images, not {self.kind}", "leave them out"
        if LAYOUTS[self.kind].images and self.labels and self.differs("tokenizer"):
            yield (
                "labels name classes, and tokenizer is of captions, which kind=images has in their place",
                "leave one out",
            )
        if len(set(self.labels)) < len(self.labels):
            yield f"labels names one twice: {', '.join(self.labels)}"

    def _input_conflicts(self, key: str, one: InputConfig) -> Conflicts:
        layout = LAYOUTS[self.kind]
        if one.template is not None and not layout.loss_mask:
            yield f"{key}.template goes with kind=records, preferences or feedback, not {self.kind}", "leave it out"
        if one.messages_field is not None and layout.two_sides:
            yield f"{key}.messages_field goes with kind=records", "chosen_field and rejected_field may have messages"
        if one.normalize is not None and not layout.normalized:
            yield f"{key}.normalize does not go with kind={self.kind}", "leave it out"
        if is_jinja(one.template) and one.normalize is not None:
            yield f"{key}.normalize would change the text of the chat template", "leave it out"
        is_theirs = one.template == AUTO or is_jinja(one.template)
        if is_theirs and isinstance(one.template, str) and self.tokenizer.kind != "given":
            yield f"{key}.template={one.template} needs the special tokens of a given tokenizer", "set tokenizer.path"
        if one.normalize is not None:
            yield from self._normalize_conflicts(f"{key}.normalize", one.normalize)

    def _normalize_conflicts(self, key: str, rules: NormalizeConfig) -> Conflicts:
        layout = LAYOUTS[self.kind]
        if layout.labels_words:
            yield f"{key} would move words away from their tags", "use tokenizer.lowercase instead"
        if not layout.has_source and rules.target_language is not None:
            yield f"{key}.target_language goes with kind=pairs, not {self.kind}"
        if layout.has_source and rules.needs_language and rules.target_language is None:
            yield f"{key} needs a target_language, such as target_language: de"
