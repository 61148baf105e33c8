"""What the documents say is there: paths, commands, config keys, and the constants of the quickstart."""

import re

import pytest

from pretrain import cli, errors
from pretrain.config.load import known_keys, load_config
from pretrain.config.prepare import PrepareConfig
from tests.helpers.documents import ROOT, pretrain_arguments, read_blocks, read_commands
from tests.repo.source import SOURCE_FILES, name

DOCUMENTS = [
    *("README.md", "AGENTS.md", "CONTRIBUTING.md", "slurm/README.md"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
]
MAX_README_LINES = 151

PATH = re.compile(r"(?<![\w/.-])((?:pretrain|launch|configs|docs|tests|benchmarks|\.ci)/[\w./-]*\w/?)")
LINK = re.compile(r"\]\((?!http)([^)#]+)\)")
POINTER = re.compile(r"\(`?((?:\w+/)*\w+(?:\.py|/))`?\)")
"""A file or folder of the source or of the tests in parentheses, by the end of its path."""
KEY = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`")


def text_of(document):
    return (ROOT / document).read_text(encoding="utf-8")


def test_readme_fits_a_few_screens():
    assert len(text_of("README.md").splitlines()) < MAX_README_LINES


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_that_a_document_names_exists(document):
    paths = {match.group(1) for match in PATH.finditer(text_of(document))}
    links = {match.group(1) for match in LINK.finditer(text_of(document))}
    missing = [path for path in sorted(paths) if not (ROOT / path).exists()]
    missing += [link for link in sorted(links) if not ((ROOT / document).parent / link).exists()]
    assert (paths or links) and missing == []


def test_every_file_that_a_source_file_points_to_exists():
    paths = [path for folder in ("pretrain", "launch", "tests") for path in (ROOT / folder).rglob("*")]
    ends = {"/".join(path.parts[start:]) for path in paths for start in range(len(path.parts))}
    pointers = [(name(path), match.group(1)) for path in SOURCE_FILES for match in POINTER.finditer(path.read_text())]
    assert len(pointers) > 50
    assert [pointer for pointer in pointers if pointer[1].rstrip("/") not in ends] == []


@pytest.mark.parametrize(
    ("document", "count"),
    [
        ("README.md", 4),
        ("docs/train.md", 4),
        ("docs/released_runs.md", 2),
        ("docs/reproduce.md", 1),
        ("slurm/README.md", 4),
    ],
)
def test_every_command_of_a_document_parses(document, count, capsys):
    command_lines = [line for line in read_commands(document) if pretrain_arguments(line)]
    assert len(command_lines) > count
    for line in command_lines:
        # The parser sees the whole line before --help ends the command: an unknown option or command fails here.
        assert cli.run([*pretrain_arguments(line), "--help"]) == 0, line
    capsys.readouterr()


def test_a_command_that_does_not_exist_is_noticed(capsys):
    assert cli.run(["generate", "runs/x", "--beam", "4", "--help"]) == errors.EXIT_USAGE
    assert cli.run(["pretend", "--help"]) == errors.EXIT_USAGE
    capsys.readouterr()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_config_key_that_a_document_names_exists(document):
    keys = set(known_keys())
    sections = {key.partition(".")[0] for key in keys}
    named = {match.group(1) for match in KEY.finditer(text_of(document))}
    named = {key for key in named if key.partition(".")[0] in sections and not key.endswith((".json", ".yaml"))}
    assert named <= keys
    for line in read_commands(document):
        words = pretrain_arguments(line) or []
        overrides = [word for word in words if re.match(r"[a-z_]+\.[a-z_.]+=", word)]
        known = set(known_keys(PrepareConfig)) if words[:1] == ["prepare"] else keys
        assert {word.partition("=")[0] for word in overrides} <= known, line


def test_the_config_in_the_readme_is_valid(tmp_path):
    (block,) = [block for block in read_blocks("README.md") if block.language == "yaml"]
    (tmp_path / "mine.yaml").write_text(block.text)
    assert load_config(tmp_path / "mine.yaml").run.name == "mine"


def test_the_exit_codes_of_the_document_are_those_of_the_errors():
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    shown = {int(code) for code in re.findall(r"\| (\d+) \| ", text_of("docs/resume.md"))}
    assert shown == codes
