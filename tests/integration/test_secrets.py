"""What an address holds that others must not see is in nothing that is printed or written."""

from functools import partial

import pytest

from tests.helpers.fork_server import ROOT
from tests.helpers.servers import Fault, serve_folder

SECRETS = ("hunter2", "hunter3", "aHVudGVy", "Omh1bnRlcj")  # and in the header of a request, base64


def leaks(folder, *texts):
    """Where a secret stands: files of a folder, by name, and texts."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found = files | {f"text {number}": text.encode() for number, text in enumerate(texts)}
    return [name for name, content in found.items() if any(secret.encode() in content for secret in SECRETS)]


def with_secrets(server, name):
    return server.url.replace("://", "://lab:hunter2@") + f"/{name}?X-Amz-Signature=hunter3"


@pytest.fixture
def warm(warm):
    """Commands that use no proxy."""
    return partial(warm, no_proxy="127.0.0.1", NO_PROXY="127.0.0.1")


@pytest.fixture
def server(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text(f"The words of text {number}, and some more of them.\n" * 40)
    (texts / "bad.jsonl").write_text('{"text": "one"}\n{"text": 2}\n')
    (texts / "source.lines").write_text("a b c\n" * 20)
    (texts / "target.lines").write_text("d e f\n" * 20)
    with serve_folder(texts) as server:
        yield server


def test_what_prepare_writes_and_says_of_its_inputs_has_no_secrets(server, warm, tmp_path):
    inputs = [with_secrets(server, f"{number}.txt") for number in range(4)]
    given = [word for url in inputs for word in ("--input", url)]
    server.faults += [Fault(path="1.txt", status=503, times=2), Fault(path="2.txt", cut_after=100, times=2)]
    folder = tmp_path / "out"
    made = warm("prepare", *given, "--output", "out", "--split", "hash:0.3", cwd=tmp_path)
    assert made.code == 0, made.stderr
    assert all(request.authorization == "Basic bGFiOmh1bnRlcjI=" for request in server.requests)
    assert "trying again" in made.stderr
    for name in ("prepare.json", "data_card.md", "statistics.json", "index.json"):
        assert (folder / name).is_file()
    assert f"{server.url}/1.txt" in (folder / "prepare.json").read_text()
    other = warm("prepare", *given[2:], "--output", "out", "--split", "hash:0.3", cwd=tmp_path)
    assert other.code == 65 and "begun with other inputs: 1 gone" in other.stderr
    assert leaks(folder, made.stdout, made.stderr, other.stdout, other.stderr) == []


def test_what_prepare_says_of_inputs_that_it_cannot_read_has_no_secrets(server, warm, tmp_path):
    config = tmp_path / "mine.yaml"
    texts = []
    for number, lines in enumerate(
        (
            f"inputs: [{{path: {with_secrets(server, 'bad.jsonl')!r}}}]",
            f"inputs: [{{path: {with_secrets(server, 'gone.txt')!r}}}]",
            f"inputs: [{{path: {with_secrets(server, '0.unknown')!r}}}]",
            f"inputs: [{{path: {with_secrets(server, 'source.lines')!r}, format: lines}}]\nkind: pairs",
            f"inputs: [{{path: {with_secrets(server, '0.txt').replace('http', 'ftp')!r}}}]",
        )
    ):
        config.write_text(f"output: {tmp_path / 'out'}-{number}\n{lines}\n")
        result = warm("prepare", str(config), cwd=tmp_path)
        assert result.code in (64, 65), result.stderr
        texts += [result.stdout, result.stderr]
    config.unlink()
    assert leaks(tmp_path, *texts) == []


def test_both_sides_of_pairs_are_entered_without_secrets(server, warm, tmp_path):
    sides = {"path": with_secrets(server, "source.lines"), "paired_path": with_secrets(server, "target.lines")}
    config = tmp_path / "mine.yaml"
    config.write_text(f"output: {tmp_path / 'out'}\nkind: pairs\nsplit: hash:0.3\ninputs: [{sides}]\n")
    made = warm("prepare", str(config), cwd=tmp_path)
    assert made.code == 0, made.stderr
    config.unlink()
    assert leaks(tmp_path, made.stdout, made.stderr) == []


def test_a_run_over_an_address_with_secrets_is_refused_and_writes_none(server, warm, tmp_path):
    path = f"data.path={with_secrets(server, 'data')}"
    run = warm("train", str(ROOT / "configs/run/quickstart.yaml"), path, f"run.dir={tmp_path / 'runs'}", cwd=tmp_path)
    assert run.code in (64, 65)
    assert f"{server.url}/data: an address of data has no user, password, query or fragment" in run.stderr
    assert leaks(tmp_path, run.stdout, run.stderr) == []
