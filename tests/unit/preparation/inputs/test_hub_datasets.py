"""Data sets of the Hugging Face hub, from a hub on the loopback, and folders of `datasets`."""

import hashlib
import json
import random
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow
import pyarrow.parquet
import pytest
from fsspec.utils import glob_translate

from pretrain.config.prepare import InputConfig
from pretrain.errors import ConfigError, DataError
from pretrain.preparation.inputs.hub_datasets import PathPattern, choose_files
from pretrain.preparation.prepare import prepare
from tests.helpers.corpus import digests
from tests.helpers.prepare_config import prepare_config
from tests.helpers.reading import listing, texts

NAME = "hf://datasets/lab/words"


class Hub:
    """A hub with one data set, `lab/words`: commits in order, the last one is `main`; gives ranges of files."""

    def __init__(self):
        self.commits = {}
        self.asked = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def answer(self, status, body=b"", **headers):
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def do_GET(self):
                hub.asked.append(self.path)
                path = self.path.partition("?")[0]
                found = re.fullmatch(r"/(api/)?datasets/lab/words(?:/(revision|tree|resolve)/([^/]+)(?:/(.*))?)?", path)
                if found is None:
                    return self.answer(404, X_Error_Code="RepoNotFound")
                api, what, revision, below = found.groups()
                revision = list(hub.commits)[-1] if revision in (None, "main") else revision
                if revision not in hub.commits:
                    return self.answer(404, X_Error_Code="RevisionNotFound")
                files = hub.commits[revision]
                if what == "resolve":
                    first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups()
                    return self.answer(206, files[below][int(first) : int(last) + 1])
                assert api
                found = {"id": "lab/words", "sha": revision, "siblings": []}
                if what == "tree":
                    found = tree(files, below or "", "recursive=true" in self.path.lower())
                return self.answer(200, json.dumps(found).encode(), Content_Type="application/json")

            do_HEAD = do_GET

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def commit(self, **files):
        """Adds a commit; returns its hash."""
        files = {name: body if isinstance(body, bytes) else body.encode() for name, body in files.items()}
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[sha] = files
        return sha


def tree(files, below, is_recursive):
    """What the hub lists below a folder."""
    rows = {}
    prefix = below + "/" if below else ""
    for path, body in files.items():
        if not path.startswith(prefix):
            continue
        first, slash, _ = path[len(prefix) :].partition("/")
        oid = hashlib.sha1(body).hexdigest()
        if slash:
            rows[prefix + first] = {"type": "directory", "path": prefix + first, "oid": oid, "size": 0}
        if not slash or is_recursive:
            rows[path] = {"type": "file", "path": path, "size": len(body), "oid": oid}
    return list(rows.values())


@pytest.fixture
def hub(monkeypatch):
    """A hub that huggingface_hub asks."""
    found = Hub()
    thread = threading.Thread(target=found.server.serve_forever, args=(0.005,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{found.server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", url, raising=False)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    yield found
    found.server.shutdown()
    found.server.server_close()
    thread.join()


def rows(*names):
    return "".join(json.dumps({"text": name}) + "\n" for name in names)


def parquet(*names):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": list(names)}), sink)
    return sink.getvalue().to_pybytes()


def test_files_at_an_address_are_read_in_ranges(hub):
    hub.commit(**{"data/a.jsonl": rows("a", "b"), "data/b.parquet": parquet("c"), "data/x.log": "1"})
    assert texts(f"{NAME}/data/a.jsonl") == ["a", "b"]
    assert texts(f"{NAME}/data/*.jsonl") == ["a", "b"]
    assert sorted(texts(f"{NAME}@main/data")) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("files", "split", "expected"),
    [
        ({"train.jsonl": rows("a"), "test.jsonl": rows("t")}, None, ["a"]),
        ({"train.jsonl": rows("a"), "test.jsonl": rows("t")}, "test", ["t"]),
        ({"data/dev/0.jsonl": rows("v"), "data/train/0.jsonl": rows("a")}, "validation", ["v"]),
        ({"data/train_sft-00000-of-00001.parquet": parquet("a")}, "train_sft", ["a"]),
        ({"data/train-00000-of-00001.parquet": parquet("a"), "trainer.json": "{}"}, None, ["a"]),
        ({"one.json": rows("a", "b"), "strain.json": rows("c"), "dataset_infos.json": "{}"}, None, ["a", "b", "c"]),
    ],
)
def test_the_files_of_a_split_are_found_by_their_names(hub, files, split, expected):
    hub.commit(**{"README.md": "# No head", "LICENSE": "MIT", "load.py": "1 / 0", **files})
    assert texts(NAME, dataset_split=split) == expected


README = """---
license: mit
configs:
- config_name: en
  data_files:
  - {split: train, path: [en/**, more/en.jsonl]}
  - {split: test, path: test/en.jsonl}
- config_name: de
  data_files: de/*.jsonl
- config_name: fr
  default: true
  data_dir: fr
  data_files: a*.jsonl
---
"""


def test_the_files_of_a_subset_are_those_that_the_readme_names(hub):
    names = ("en/deep/a", "more/en", "test/en", "de/a", "fr/a", "fr/b")
    hub.commit(**{"README.md": README, **{f"{name}.jsonl": rows(name) for name in names}})
    assert texts(NAME) == ["fr/a"]
    assert texts(NAME, subset="de") == ["de/a"]
    assert texts(NAME, subset="en") == ["en/deep/a", "more/en"]
    assert texts(NAME, subset="en", dataset_split="test") == ["test/en"]
    with pytest.raises(ConfigError, match=r"there is no subset 'es'; subsets: en, de, fr; give one of these as subset"):
        listing(NAME, subset="es")
    with pytest.raises(
        ConfigError, match=r"there is no split 'x'; splits: train, test; give one of these as dataset_s"
    ):
        listing(NAME, subset="en", dataset_split="x")


def test_what_is_not_there_is_named(hub):
    described = hub.commit(**{"README.md": README.replace("default: true", "x: 1"), "train.jsonl": rows("a")})
    hub.commit(**{"train.jsonl": rows("a")})
    with pytest.raises(ConfigError, match="several subsets, and none is the default; subsets: en, de, fr"):
        listing(f"{NAME}@{described}")
    with pytest.raises(ConfigError, match=r"subset=en: README\.md of this data set names none"):
        listing(NAME, subset="en")
    with pytest.raises(ConfigError, match=r"no split 'test'; splits: train"):
        listing(NAME, dataset_split="test")
    with pytest.raises(ConfigError, match="dataset_split=test go with a whole data set; leave them out"):
        listing(f"{NAME}/train.jsonl", dataset_split="test")
    for url, what in (
        ("hf://datasets/lab/none", "the hub has no such data set or revision"),
        (f"{NAME}@none", "the hub has no such data set or revision"),
        ("hf://lab/words", "not an address of a data set"),
        ("hf://datasets/one", "not an address of a data set"),
    ):
        with pytest.raises(DataError, match=what):
            prepare(prepare_config("out", [url]))


def chosen(card, *files, **options):
    """Returns the files, by their names, that a data set with this card has for an input."""
    root = "hf://datasets/lab/words"
    names = [f"{root}/{name}" for name in ("README.md", *files)]
    content = card if isinstance(card, bytes) else card.encode()
    found = choose_files(root, names, InputConfig(path=root, **options), lambda _, most: content[:most])
    return [name.removeprefix(f"{root}/") for name in found]


def head(*lines):
    return "\n".join(["---", *lines, "---", ""])


ALIASES = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'x'}]" for n in range(13)]
SUBSET = "configs: [{config_name: default, data_files: %s}]"


@pytest.mark.parametrize(
    ("card", "what"),
    [
        (head(*ALIASES, SUBSET % "*a12"), r"README\.md:3:10: aliases \(\*name\) are not allowed"),
        (head("configs: " + "[" * 50_000), "nested too deeply"),
        (head("configs: " + "{a: " * 20_000), "nested too deeply"),
        (head("? " + "k" * 100_000 + "\n: {a: 1}"), "has more than 500 characters"),
        (head("configs: 5"), "configs is no list of subsets; give the paths of files"),
        (head("configs: [1, x]"), "configs is no list of subsets"),
        (head("configs: !!python/object:os.system [ls]"), r"README\.md:2:10: tags .* are not allowed"),
        (head("a: 1", "a: 2"), r"README\.md:3:1: key 'a' stands twice"),
        (head("configs: [{config_name: [x], data_files: a}]"), r"config_name: \['x'\] is no name"),
        (head("configs: [{data_dir: {x: 1}, data_files: a}]"), r"data_dir: \{'x': 1\} is no name"),
        (head(SUBSET % "5"), "data_files has 5 where a path is expected"),
        (head(SUBSET % "{train: a}"), r"data_files has \{'train': 'a'\} where a path is expected"),
        (head(SUBSET % "[{split: train}]"), "data_files has null where a path is expected"),
        (head(SUBSET % "[{split: [1], path: a}]"), r"split: \[1\] is no name"),
        (head(SUBSET % "[a, {path: b}]"), r"data_files has \{'path': 'b'\} where a path is expected"),
        (head(SUBSET % '"data/**.parquet"'), r"'data/\*\*\.parquet': \*\* stands for whole folders"),
        (head(SUBSET % ("'" + "*a" * 1000 + "'")), "more than 1000 patterns with wildcards of 1000 characters"),
        (head(SUBSET % str(["*"] * 1001)), "more than 1000 patterns with wildcards of 1000 characters"),
        ("---\n" + "a\n" * 2**19, "the head has no end within 1,048,576 bytes"),
    ],
)
def test_a_card_that_is_not_sound_is_an_error_with_its_place(card, what):
    with pytest.raises(DataError, match=what):
        chosen(card, "train.jsonl")


@pytest.mark.parametrize(
    "card", ["---" + "\n" * 100_000, "---\n---\n", "--- \r\n---", "", "# \n---\nconfigs: 5\n---\n", b"\xff"]
)
def test_a_card_without_a_head_names_no_files(card):
    assert chosen(card, "train.jsonl", "test.jsonl") == ["train.jsonl"]


def test_the_head_of_a_card_ends_where_datasets_ends_it():
    text = "---\r\nconfigs:\r\n- {config_name: 2024, data_files: a.jsonl}\r\n---\r\nconfigs: 5\n---\n" + "x" * 2**21
    assert chosen(text, "a.jsonl", "b.jsonl", subset="2024") == ["a.jsonl"]


def test_patterns_of_paths_match_as_those_of_fsspec_do():
    chance = random.Random(1)
    parts = ["*", "**", "a", "a*", "*b", "[ab]", "[!a]", "?", "a?b", "*a*b*", "[a", "]", "[]a]", "."]
    names = ["a", "b", "ab", "aab", "a.b", "[a", "cab", "A", ".a"]
    paths = ["/".join(chance.choices(names, k=chance.randint(1, 4))) for _ in range(100)]
    for _ in range(300):
        pattern = "/".join(chance.choices(parts, k=chance.randint(1, 4)))
        theirs = re.compile(glob_translate(pattern))
        ours = PathPattern.of(pattern)
        assert [ours.matches(path) for path in paths] == [bool(theirs.match(path)) for path in paths], pattern


def test_a_pattern_of_paths_takes_each_component_once_to_each_part():
    class Rule:
        num_calls = 0

        def fullmatch(self, part):
            self.num_calls += 1
            return part == "a"

    rule = Rule()
    assert not PathPattern((None, rule) * 12).matches("/".join("a" * 40 + "b"))
    assert rule.num_calls <= 12 * 41
    assert chosen(head(SUBSET % f"'{'*a' * 12}b'"), "a" * 200, "a" * 200 + "b") == ["a" * 200 + "b"]


@pytest.mark.usefixtures("pictures")
def test_a_folder_is_continued_at_the_commit_with_which_it_was_begun(tmp_path, hub):
    first = hub.commit(**{"train.jsonl": rows(*(f"word {number}" for number in range(200)))})
    config = prepare_config(tmp_path / "out", [NAME], vocab_size=300, split="hash:0.2")
    prepare(config, processes=1)
    before = digests(tmp_path / "out")
    options = json.loads((tmp_path / "out/prepare.json").read_text())
    assert options["options"]["revisions.datasets/lab/words@main"] == first
    assert options["inputs"][0].endswith(f"hf://datasets/lab/words@{first}/train.jsonl")
    hub.commit(**{"train.jsonl": rows("other words")})
    (tmp_path / "out/index.json").unlink()
    prepare(config, processes=1)
    assert digests(tmp_path / "out") == before
    pinned = prepare_config(tmp_path / "at", [f"{NAME}@{first}"], vocab_size=300, split="hash:0.2")
    prepare(pinned, processes=1)
    assert {name: digest for name, digest in digests(tmp_path / "at").items() if name != "prepare.json"} == {
        name: digest for name, digest in before.items() if name != "prepare.json"
    }
    prepare(prepare_config(tmp_path / "new", [NAME], vocab_size=300, split="hash:0"), processes=1)
    assert "other words" not in (tmp_path / "out/tokenizer.json").read_text()
    assert json.loads((tmp_path / "new/statistics.json").read_text())["splits"]["train"]["num_documents"] == 1


def save(folder, *names, shards=1):
    """Writes what `save_to_disk` writes."""
    folder.mkdir(parents=True)
    paths = [f"data-{number:05d}-of-{shards:05d}.arrow" for number in range(shards)]
    for number, path in enumerate(paths):
        table = pyarrow.table({"text": names[number::shards], "n": list(range(len(names[number::shards])))})
        with pyarrow.OSFile(str(folder / path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    (folder / "dataset_info.json").write_text('{"citation": ""}')
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": path} for path in paths]}))


def test_a_folder_that_was_saved_is_read_by_its_state(tmp_path):
    save(tmp_path / "d/train", *"abcde", shards=2)
    save(tmp_path / "d/test", "t")
    (tmp_path / "d/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "d/train/data-00000-of-00009.arrow").write_bytes(b"left by another save")
    assert texts(tmp_path / "d") == ["a", "c", "e", "b", "d"]
    assert texts(tmp_path / "d/train") == ["a", "c", "e", "b", "d"]
    assert texts(tmp_path / "d", dataset_split="test") == ["t"]
    with pytest.raises(ConfigError, match=r"there is no split 'dev'; splits: test, train"):
        listing(tmp_path / "d", dataset_split="dev")
    (tmp_path / "d/train/data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00002\.arrow: a file of a saved data set is missing"):
        listing(tmp_path / "d")


@pytest.mark.parametrize(
    "state",
    [
        *("[", "{}", "[]", "[" * 200_000, '{"_data_files": [{}]}', '{"_data_files": 5}', '{"_data_files": [5]}'),
        *('{"_data_files": [{"filename": [1]}]}', '{"_indices_data_files": [{"filename": "i"}]}'),
    ],
)
def test_a_state_that_says_nothing_is_refused(tmp_path, state):
    save(tmp_path / "d", "a")
    (tmp_path / "d/state.json").write_text(state)
    with pytest.raises(DataError, match=r"state\.json: (damaged|not a state|rows are selected by a table of indices)"):
        listing(tmp_path / "d")


@pytest.mark.long
def test_folders_that_datasets_saved_are_read_as_datasets_reads_them(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"text": [f"text {number}" for number in range(3000)]})
    table.shuffle(seed=1).save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": table, "test": table.select([5, 2])}).save_to_disk(tmp_path / "two")
    table.to_parquet(tmp_path / "three/train.parquet")
    assert texts(tmp_path / "one") == datasets.load_from_disk(tmp_path / "one")["text"][:]
    assert texts(tmp_path / "two") == table["text"][:]
    assert texts(tmp_path / "two", dataset_split="test") == ["text 5", "text 2"]
    assert texts(tmp_path / "three") == table["text"][:]
