import sysconfig
from pathlib import Path

import pytest

from pretrain.config.prepare import InputConfig
from pretrain.errors import ConfigError, DataError, LaunchError
from pretrain.preparation.inputs.listing import list_inputs, list_stdlib
from tests.helpers.reading import listing, touch


def listed(folder, *inputs, **options):
    return [Path(file.path).relative_to(folder).as_posix() for file in listing(*inputs, **options)]


def test_folder_is_read_recursively_sorted_without_hidden_or_unsupported_files(tmp_path):
    touch(tmp_path, "b.txt", "a/z.md", "a/y.py", "a.jsonl", "c.jsonl.gz", ".x.txt", ".git/x.txt", "d.log", "e.gz")
    assert listed(tmp_path, str(tmp_path)) == ["a/y.py", "a/z.md", "a.jsonl", "b.txt", "c.jsonl.gz"]


def test_files_of_a_folder_that_are_not_read_are_counted_by_their_ending(tmp_path, caplog):
    touch(tmp_path, "a.txt", "b.log", "c/d.log.gz", "c/e.log", "h.parquet.gz", "README", ".hidden.log")
    with caplog.at_level("INFO"):
        assert listed(tmp_path, str(tmp_path)) == ["a.txt"]
        listed(tmp_path, str(tmp_path / "a.txt"))
    endings = "2 .log, 1 .log.gz, 1 .parquet.gz, 1 without ending"
    fix = "every file of an input is read as text by a config's `inputs: [{path: ..., format: text}]`"
    assert caplog.messages == [f"{tmp_path}: 5 files of other types left out: {endings}; {fix}"]


def test_format_and_compression_go_by_the_name(tmp_path):
    names = [
        "a.json",
        "b.jsonl.zst",
        "c.md.gz",
        "d.parquet",
        "e.tar.gz",
        "f.tar",
        "g.txt.zst",
        "h.parquet.gz",
        "i.TXT.GZ",
    ]
    touch(tmp_path, *names)
    found = [(Path(file.path).name, file.format, file.compression, file.is_cuttable) for file in listing(tmp_path)]
    assert found == [
        ("a.json", "json", "", False),
        ("b.jsonl.zst", "jsonl", "zstd", False),
        ("c.md.gz", "text", "gzip", False),
        ("d.parquet", "parquet", "", True),
        ("e.tar.gz", "webdataset", "gzip", False),
        ("f.tar", "webdataset", "", False),
        ("g.txt.zst", "text", "zstd", False),
        ("i.TXT.GZ", "text", "gzip", False),
    ]


def test_with_a_format_every_file_is_taken_whatever_its_name(tmp_path):
    touch(tmp_path, "train.en", "train.de.gz", ".hidden")
    files = listing(tmp_path, format="lines")
    found = [(Path(file.path).name, file.format, file.compression, file.is_cuttable) for file in files]
    assert found == [("train.de.gz", "lines", "gzip", False), ("train.en", "lines", "", True)]


def test_inputs_keep_their_order_and_a_file_named_twice_is_read_once(tmp_path):
    touch(tmp_path, "a.txt", "b.txt", "sub/c.txt")
    names = [str(tmp_path / "b.txt"), str(tmp_path), f"{tmp_path}/*.txt"]
    assert listed(tmp_path, *names) == ["b.txt", "a.txt", "sub/c.txt"]


def test_a_file_of_two_inputs_is_read_twice_only_where_it_is_read_in_two_ways(tmp_path):
    touch(tmp_path, "a.jsonl", "b.jsonl")
    paths = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    alike = [InputConfig(path=paths[0]), InputConfig(path=[f"{tmp_path}/../{tmp_path.name}/a.jsonl", *paths])]
    assert [(file.path, file.input) for file in list_inputs(alike)] == [(paths[0], 0), (paths[1], 1)]
    other = [InputConfig(path=paths[0]), InputConfig(path=paths[0], text_field="title")]
    assert [(file.path, file.input) for file in list_inputs(other)] == [(paths[0], 0), (paths[0], 1)]


def test_glob_matches_supported_files_and_folders(tmp_path):
    touch(tmp_path, "x1/a.txt", "x2.txt", "x3.log", "y.txt")
    assert listed(tmp_path, f"{tmp_path}/x*") == ["x1/a.txt", "x2.txt"]
    assert listed(tmp_path, f"{tmp_path}/**/*.txt") == ["x1/a.txt", "x2.txt", "y.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_a_file(tmp_path):
    touch(tmp_path, "a[1].txt")
    assert listed(tmp_path, f"{tmp_path}/a[1].txt") == ["a[1].txt"]


def test_a_file_url_is_a_path(tmp_path):
    touch(tmp_path, "a b.txt")
    assert listed(tmp_path, (tmp_path / "a b.txt").as_uri()) == ["a b.txt"]


def test_linked_folders_are_followed_once(tmp_path):
    touch(tmp_path, "in/a.txt", "elsewhere/b.txt")
    (tmp_path / "in/loop").symlink_to(tmp_path / "in")
    (tmp_path / "in/out").symlink_to(tmp_path / "elsewhere")
    assert listed(tmp_path, str(tmp_path / "in")) == ["in/a.txt", "in/out/b.txt"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.txt", r"none\.txt: no such file or folder; correct the path"),
        ("*.txt", r"\*\.txt: nothing to read; give files of \.txt \.py \.md \.jsonl \.json .* \.warc \.wet, or these"),
        ("", r": nothing to read; give files of"),
        ("a.log", r"a\.log: unsupported file type; give one of \.txt .*; every file of an input is read as text "),
    ],
)
def test_input_that_names_nothing_readable_is_refused(tmp_path, name, message):
    touch(tmp_path, "a.log")
    with pytest.raises(DataError, match=message):
        listing(tmp_path / name)


@pytest.mark.parametrize("url", ["ftp://host/a.txt", "simplecache::s3://bucket/a.txt", "pipe://rm", "memory://a.txt"])
def test_urls_of_other_kinds_are_refused(url):
    with pytest.raises(DataError, match=r"URLs of '\w+' are not read; use a path, or a URL of http, https, s3, gs"):
        listing(url)


def test_an_input_without_a_path_is_refused():
    with pytest.raises(ConfigError, match="inputs: input 1 names no path; give it a path"):
        list_inputs([InputConfig(path=str(Path(__file__))), InputConfig()])


def test_an_input_whose_file_is_missing_is_named_by_its_number_and_split(tmp_path):
    missing = InputConfig(path=str(tmp_path / "validation.jsonl"), split="validation")
    message = r"no such file.*inputs\.1\.path of a config\), or leave out this input, of split: validation"
    with pytest.raises(DataError, match=message):
        list_inputs([InputConfig(path=str(Path(__file__))), missing])


def test_dangling_link_is_named(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"a\.txt: cannot be read: No such file"):
        listing(tmp_path)


def test_paired_files_are_matched_in_order(tmp_path):
    touch(tmp_path, "en/1.txt", "en/2.txt", "de/1.txt", "de/2.txt.gz")
    files = listing(tmp_path / "en", paired_path=str(tmp_path / "de"), kind="pairs")
    found = [(Path(file.path).name, Path(file.pair.path).name, file.pair.compression) for file in files]
    assert found == [("1.txt", "1.txt", ""), ("2.txt", "2.txt.gz", "gzip")]
    assert all(file.format == "paired" and not file.is_cuttable for file in files)


def test_paired_files_of_unequal_number_are_refused(tmp_path):
    touch(tmp_path, "en/1.txt", "en/2.txt", "de/1.txt")
    with pytest.raises(DataError, match="path names 2 files, paired_path 1; name as many files in the one as in the"):
        listing(tmp_path / "en", paired_path=str(tmp_path / "de"), kind="pairs")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "pairs"}, r"a\.txt: format=text holds no pairs; give records with source_field and target_field"),
        ({"kind": "records"}, r"a\.txt: format=text holds no records; give \.jsonl"),
        ({"kind": "records", "format": "lines"}, r"a\.txt: format=lines holds no records"),
        ({"paired_path": "{}/a.txt"}, r"paired_path goes with kind=pairs, not with kind=text; leave it out"),
        ({"kind": "pairs", "paired_path": "{}/a.txt", "format": "json"}, "paired_path does not go with format=json"),
    ],
)
def test_files_that_cannot_hold_the_kind_of_data_are_refused(tmp_path, options, message):
    touch(tmp_path, "a.txt")
    options = {key: value.format(tmp_path) for key, value in options.items()}
    with pytest.raises(ConfigError, match=message):
        listing(tmp_path / "a.txt", **options)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    touch(tmp_path, "a.parquet")
    monkeypatch.setattr("pretrain.preparation.inputs.listing.find_spec", lambda name: None)
    message = r"Parquet files are read by pyarrow, which is not installed; .*-e '\.\[parquet\]'"
    with pytest.raises(LaunchError, match=message):
        listing(tmp_path / "a.parquet")


def test_default_corpus_is_the_standard_library_without_installed_packages():
    files = list_inputs([])
    assert files == list_stdlib()
    root = Path(sysconfig.get_path("stdlib"))
    names = [Path(file.path).relative_to(root).parts for file in files]
    assert ("os.py",) in names and ("json", "decoder.py") in names
    assert names == sorted(names)
    assert not any("site-packages" in parts or "__pycache__" in parts for parts in names)
    tables = ("encodings", "pydoc_data", "stringprep.py", "entities.py")
    assert not any(set(tables) & set(parts) or parts[-1].startswith("_sysconfigdata") for parts in names)


def test_a_named_file_without_an_ending_is_text_and_one_in_a_folder_is_not_read(tmp_path):
    touch(tmp_path, "LICENSE", "README.gz", "a.txt")
    for name, compression in (("LICENSE", ""), ("README.gz", "gzip")):
        (file,) = listing(tmp_path / name)
        assert (file.format, file.compression) == ("text", compression)
    assert [Path(file.path).name for file in listing(tmp_path)] == ["a.txt"]
