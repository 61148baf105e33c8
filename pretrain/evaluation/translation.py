"""A translator on a test set: decoded with one or several beam sizes, scored, and compared.

texts one a line -> normalised like the training text -> ids, sentences of similar length together
                 -> batches of `batch_tokens`, dealt out to the ranks -> decoded -> Hypotheses
                 -> Measure -> scores, significance
"""

import gzip
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.artifact.open import find_normalize, load_artifact
from pretrain.artifact.source import ModelSource
from pretrain.config.prepare import NormalizeConfig
from pretrain.errors import ConfigError, DataError
from pretrain.evaluation.distributed import collect, current, deal, open_together, with_bar
from pretrain.evaluation.evaluation_log import Data, Subject, find_subject, hash_lines
from pretrain.evaluation.translation_metrics import RESAMPLES, Hypotheses, Measure, MetricScore, PairedComparison
from pretrain.generation.beam import Beams, beam_search
from pretrain.generation.constraints import Codec, Constraints
from pretrain.generation.generation_options import Options
from pretrain.generation.incremental_decoder import check_prompt, check_prompts
from pretrain.generation.sampling import generate
from pretrain.generation.text import Method
from pretrain.model import Transformer
from pretrain.preparation.normalize import build_normalizers
from pretrain.preparation.readers.record_fields import RecordError, parse_object
from pretrain.utils.io import write_file
from pretrain.utils.log import printable

BATCH_TOKENS = 8192
"""Source tokens of a batch, with padding and beams: caches of small models stay below 100 MiB."""


def read_texts(file: Path) -> list[str]:
    """Returns the lines of a UTF-8 file, plain or gzip, empty ones too. Raises: ConfigError, DataError.

    Only line feeds divide lines: a text may have other characters that Unicode calls line ends.
    """
    try:
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"truncated or damaged gzip: {error}",
            where=str(file),
            fix="copy it again",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot read it: {error.strerror}",
            where=str(file),
            fix="check --source and --reference",
        ) from None
    if not content:
        raise DataError("holds no line", where=str(file), fix="give one text a line")
    texts = []
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"not UTF-8: byte {line[error.start]:#04x}",
                where=f"{file}:{number}",
                fix="convert it",
            ) from None
        texts.append(text.removesuffix("\r"))
    return texts


def read_objects(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields place and JSON object of each line that is not blank. Raises: ConfigError, DataError."""
    for number, line in enumerate(read_texts(file), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            yield where, parse_object(line)
        except RecordError as error:
            raise error.at(where) from None


def read_parallel(source: Path, reference: Path) -> tuple[list[str], list[str]]:
    """Returns sources and references. Raises: ConfigError, DataError."""
    sources = read_texts(source)
    references = read_texts(reference)
    if len(sources) != len(references):
        raise DataError(
            f"has {len(references)} lines, {source} has {len(sources)}",
            where=str(reference),
            fix="give files whose lines belong together",
        )
    return sources, references


def write_texts(file: Path, texts: list[str]) -> None:
    """Writes one text a line; line breaks within one become spaces. Raises: DiskError."""
    lines = (" ".join(text.splitlines()) for text in texts)
    write_file(file, "".join(f"{line}\n" for line in lines).encode("utf-8", errors="replace"))


@dataclass(frozen=True, slots=True)
class Translations:
    """The translations of a test set, in the order of the sources."""

    texts: list[str]
    num_tokens: int  # without those that end a text
    num_cut: int  # texts that were ended by their length
    seconds: float


def encode_sources(model: Transformer, codec: Codec, texts: Sequence[str], where: str) -> list[list[int]]:
    """Returns the ids of each text and, as in training, of the token that ends a document.

    Raises: ConfigError: The model does not translate, or a text is too long for it; names the line.
    """
    check_prompts(model, [])
    if model.encoder is None:
        raise ConfigError(
            "--source is for models with an encoder and a decoder; this one has a decoder alone",
            fix="give --data, for its loss",
        )
    end = codec.eos_ids[:1]
    rows = []
    for number, text in enumerate(texts, start=1):
        ids = codec.encode(text)
        # The codec of a release ends its texts itself.
        rows.append([*ids, *(token for token in end if token not in ids)])
        check_prompt(model, rows[-1], where=f"{where}:{number}")
    return rows


def translate(
    model: Transformer,
    codec: Codec,
    sources: Sequence[Sequence[int]],
    constraints: Constraints,
    method: Method,
    *,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    label: str = "",
) -> Translations:
    """Decodes every source, a result of `encode_sources`. Collective.

    A batch has `batch_tokens` source tokens, times the beams, and at least one sentence; the texts
    do not depend on it, up to rounding. `label` is that of the progress bar.
    """
    started = time.monotonic()
    width = method.num_beams if isinstance(method, Beams) else 1
    batches = list(plan_batches(sources, batch_tokens // width))
    outputs: dict[int, tuple[list[int], bool]] = {}
    mine = [batches[number] for number in deal(len(batches))]
    for rows in with_bar(mine, label, len(mine)):
        batch = [sources[row] for row in rows]
        if isinstance(method, Beams):
            best = [one[0] for one in beam_search(model, batch, constraints, method)]
        else:
            best = generate(model, batch, constraints, method, seed=seed)
        outputs |= {row: (one.tokens, one.ended) for row, one in zip(rows, best, strict=True)}
    done = collect(outputs, len(sources))
    return Translations(
        texts=[codec.decode(tokens) for tokens, _ in done],
        num_tokens=sum(len(tokens) for tokens, _ in done),
        num_cut=sum(not ended for _, ended in done),
        seconds=time.monotonic() - started,
    )


def plan_batches(sources: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[int]]:
    """Yields the rows of each batch, the longest first: one beyond the memory fails at once."""
    batch: list[int] = []
    for row in sorted(range(len(sources)), key=lambda row: -len(sources[row])):
        # The first of a batch is its longest.
        if batch and len(sources[batch[0]]) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class TranslationTask:
    """A test set and settings of decoding, as in `pretrain generate`."""

    source: Path  # one a line
    reference: Path  # its translations, line by line
    preprocessed: bool = False  # both are already normalised like the training text
    beams: tuple[int, ...] = ()  # 1 is greedy; empty: the default of the release
    length_penalty: float | None = None
    early_stopping: str | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    max_tokens: int | None = None
    batch_tokens: int = BATCH_TOKENS
    resamples: int = RESAMPLES

    def options(self) -> list[Options]:
        """Returns the options of each beam size. Raises: ConfigError: A value out of its range."""
        several = any(number > 1 for number in self.beams)
        choices = []
        for number in self.beams or (None,):
            options = Options(
                max_tokens=self.max_tokens,
                beams=number,
                repetition_penalty=self.repetition_penalty,
                no_repeat_ngram_size=self.no_repeat_ngram_size,
            )
            # Next to a search, greedy decoding takes no options of the search.
            if number != 1 or not several:
                early = self.early_stopping
                options = replace(options, length_penalty=self.length_penalty, early_stopping=early)
            choices.append(options)
        return choices


@dataclass(frozen=True, slots=True)
class TranslationSet:
    """A model's translations with one beam size (1 is greedy); `model` is the given path."""

    model: str
    beams: int
    found: Translations
    normalize: NormalizeConfig | None

    @property
    def hypotheses(self) -> Hypotheses:
        """The texts to score."""
        method = "greedy" if self.beams == 1 else f"beam {self.beams}"
        return Hypotheses(f"{self.model}, {method}", self.found.texts, self.normalize)


@dataclass(frozen=True, slots=True)
class TranslationReport:
    """Scores of every system, comparisons of pairs of them, and the identity of the test set."""

    systems: list[tuple[TranslationSet, list[MetricScore]]]
    compared: list[PairedComparison]
    data: list[Data]
    subject: Subject | None

    def facts(self) -> dict[str, Any]:
        """Returns plain values."""
        systems = []
        for decoded, scores in self.systems:
            output = decoded.found
            count = len(output.texts)
            facts: dict[str, Any] = {"model": decoded.model, "beams": decoded.beams}
            facts["normalize"] = decoded.normalize and decoded.normalize.model_dump()
            facts |= {"sentences": count, "tokens": output.num_tokens, "cut": output.num_cut}
            facts["seconds"] = round(output.seconds, 3)
            facts["sentences_per_s"] = round(count / max(output.seconds, 1e-9), 2)
            systems.append(facts | {"scores": {score.metric: asdict(score) for score in scores}})
        compared = [asdict(paired) for paired in self.compared]
        return {"kind": "translation", "systems": systems, "compared": compared}

    def lines(self) -> list[str]:
        """Returns the lines of the report."""
        lines = []
        pair = None
        for decoded, scores in self.systems:
            output = decoded.found
            speed = len(output.texts) / max(output.seconds, 1e-9)
            cut = f", {output.num_cut} cut short" if output.num_cut else ""
            lines.append(
                f"{decoded.hypotheses.name}: {len(output.texts):,} sentences in {output.seconds:.1f} s "
                f"({speed:.1f} a second), {output.num_tokens:,} tokens{cut}"
            )
            has_lowercase = any(score.metric == "bleu_lowercase" for score in scores)
            for score in scores:
                details = f"  {score.details}" if score.details else ""
                lines.append(f"  {score.metric:<15}{score.score:6.2f}  {score.signature}{details}")
                if score.metric == "bleu" and has_lowercase:  # the model writes no capitals
                    lines[-1] += "  (with case: too low for this model, see the next row)"
        for paired in self.compared:
            # A heading for each pair, over its metrics.
            if pair != (paired.baseline, paired.system):
                pair = (paired.baseline, paired.system)
                lines.append(f"{paired.system} against {paired.baseline}")
            lines.append(
                f"  {paired.metric:<15}{paired.difference:+6.2f}  p {paired.p_value:.4f}  "
                f"(95%: +-{paired.system_ci:.2f} against +-{paired.baseline_ci:.2f})  {paired.signature}"
            )
        return lines


def evaluate_translation(
    model: Path,
    task: TranslationTask,
    *,
    other: Path | None = None,
    output: Path | None = None,
    device: str = "cpu",
) -> TranslationReport:
    """Translates a test set and scores it, compared with `other`, a baseline, decoded alike.

    `model` and `other` are runs, checkpoints, model folders or Hugging Face folders; `device` is
    that of `open_artifact`. Translations of `model` are written to `output`, in the form of the
    references; with several beam sizes `.beam5` and so on is appended to its name.

    Raises:
        ConfigError: A file cannot be read, a text does not fit, or the model does not translate.
        DataError: Sources and references do not belong together.
        LaunchError: A package is missing.
    """
    task.options()  # values out of range are refused before anything is loaded
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"there is no folder {output.parent}", where="--output", fix="create it, or correct the path")
    sources, references = read_parallel(task.source, task.reference)
    described = [open_together(path) for path in (model, other) if path is not None]
    subject = find_subject(described[0])
    steps = [find_normalize(one) for one in described]
    measure = Measure(references, next(filter(None, steps), None), preprocessed=task.preprocessed)
    mine = _decode(model, described[0], task, sources, steps[0], device)
    if output is not None and current()[0] == 0:
        _write(output, mine, measure)
    theirs = []
    if other is not None:
        theirs = _decode(other, described[1], task, sources, steps[1], device)
    # Larger beams against the first size, and each size against that of the baseline.
    pairs = [(mine[0], one) for one in mine[1:]] + list(zip(theirs, mine, strict=False))
    compared = [
        paired
        for baseline, system in pairs
        for paired in measure.compare(baseline.hypotheses, system.hypotheses, task.resamples)
    ]
    scored = [(one, measure.score(one.hypotheses)) for one in (*mine, *theirs)]
    test_set = {"source": (task.source, sources), "reference": (task.reference, references)}
    data = [Data(name, str(path), hash_lines(lines)) for name, (path, lines) in test_set.items()]
    return TranslationReport(scored, compared, data, subject)


def _write(output: Path, decoded: Sequence[TranslationSet], measure: Measure) -> None:
    for one in decoded:
        path = output if len(decoded) == 1 else output.with_name(f"{output.name}.beam{one.beams}")
        write_texts(path, measure.in_form(one.hypotheses, "text"))


def _decode(
    path: Path,
    source: ModelSource,
    task: TranslationTask,
    texts: Sequence[str],
    normalize: NormalizeConfig | None,
    device: str,
) -> list[TranslationSet]:
    artifact = load_artifact(source, device)
    for setting in artifact.generation.not_honoured if current()[0] == 0 else ():
        print(printable(f"note: the own {setting} of {path} is not honoured"), file=sys.stderr)
    if normalize is not None and not task.preprocessed:
        to_source = build_normalizers(normalize)[0]
        texts = [to_source(text) for text in texts]
    opened, codec, defaults = artifact.model, artifact.codec, artifact.generation
    sources = encode_sources(opened, codec, texts, str(task.source))
    decoded = []
    for options in task.options():
        method = options.method(opened, defaults)
        beams = int(getattr(method, "num_beams", 1))
        output = translate(
            opened,
            codec,
            sources,
            options.constraints(opened, codec, defaults),
            method,
            batch_tokens=task.batch_tokens,
            label=f"{path.name}, beam {beams}",
        )
        decoded.append(TranslationSet(str(path), beams, output, normalize))
    return decoded


def parse_beams(text: str | None) -> tuple[int, ...]:
    """Reads beam sizes such as `1,5`. Raises: ConfigError."""
    if text is None:
        return ()
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise ConfigError(f"--beams {text} is no list of beam sizes", fix="use 1,5 or so; 1 is greedy")
    return sizes
