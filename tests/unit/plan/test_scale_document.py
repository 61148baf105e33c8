"""docs/scale.md: its commands are run again, and every number in it is one that they or a benchmark print."""

import contextlib
import io
import re
import shlex

import pytest

from pretrain import cli
from tests.helpers.documents import ROOT, pretrain_arguments

DOCUMENT = "docs/scale.md"
SIMULATED = ("Ten thousand ranks, simulated", "A month with failures, simulated")
"""Sections whose numbers are those of benchmarks."""
TEXT = (ROOT / DOCUMENT).read_text(encoding="utf-8")
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_SHOWN = {
    match.group(1): match.group(2)
    for match in re.finditer(
        r"^```sh\n(pretrain plan [^`]*?)\n```\n+```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL
    )
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each plan of the document prints, in a terminal of 100 columns, with nothing measured on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield {command: run(command) for command in _SHOWN}


def run(command):
    """Returns what a command prints, without the blanks at the ends of its lines."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.run(pretrain_arguments(command)) == 0, command
    return "".join(line.rstrip() + "\n" for line in printed.getvalue().splitlines())


def sections():
    """Returns the sections of the document, by their headings."""
    parts = re.split(r"^## (.*)$", TEXT, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_what_the_document_shows_is_what_its_commands_print(outputs):
    assert len(_SHOWN) >= 4
    for command, shown in _SHOWN.items():
        assert shown in outputs[command], command


def test_every_number_of_the_table_is_printed_by_the_command_of_its_row(outputs):
    rows = [line for line in sections()["In short"].splitlines() if line.startswith("| ")]
    header, *rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if "---" not in row]
    for column, name in enumerate(header[1:], start=1):
        command = next(one for one in _SHOWN if f"configs/run/{name.strip('`')}.yaml" in one and "--time" in one)
        for what, *cells in rows:
            for number in _NUMBER.findall(cells[column - 1]):
                found = re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)", outputs[command] + command)
                assert found, (name, what, number)


def test_prose_has_no_number_that_no_command_prints(outputs):
    known = " ".join([*outputs, *outputs.values()])
    check_numbers([text for name, text in sections().items() if name not in SIMULATED], known)


def test_numbers_of_simulations_are_among_the_results_of_benchmarks():
    results = (ROOT / "benchmarks/results.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.*)$", results, flags=re.MULTILINE)
    known = " ".join(text for name, text in zip(parts[1::2], parts[2::2], strict=True) if name.startswith("Simulated"))
    check_numbers([sections()[name] for name in SIMULATED], known)


def check_numbers(texts, known):
    """Fails for a number in prose that is not among those known."""
    prose = _FENCED.sub("", "".join(texts))
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)|\(\w[^()]*\d{4}[^()]*\)", "", prose)
    for number in _NUMBER.findall(prose):
        assert re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)", known), number


def test_the_configs_save_no_less_often_than_daly_says(outputs):
    for command, printed in outputs.items():
        if "--sweep" in command or "--mtbf" in command:
            continue
        words = shlex.split(command)
        config = (ROOT / words[2]).read_text()
        every = int(re.search(r"checkpoint: \{every_steps: (\d+)", config)[1])
        best = int(re.search(r"checkpoint\.every_steps=(\d+) \(Daly\)", printed)[1])
        assert every <= best, command
