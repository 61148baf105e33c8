"""Broken configs: each ends in ConfigError, never in another exception, and each line names the place."""

import re

import pytest

from pretrain.config.load import load_config
from pretrain.config.yaml_nodes import MAX_FILE_BYTES
from pretrain.errors import ConfigError
from tests.unit.config.test_load import BASE

PLACE = re.compile(r"^(override ['\"].*['\"](:\d+:\d+)?|a\.yaml(:\d+:\d+)?): .")

FILES: dict[str, str | bytes] = {
    "tab": "run:\n\tname: x\n",
    "duplicate key": BASE + "train: {steps: 3}\n",
    "duplicate nested key": BASE.replace("lr: 1e-3", "lr: 1e-3\n  lr: 1e-4"),
    "alias": BASE.replace("path: shards", "path: &p shards") + "extend: [*p]\n",
    "alias bomb": "a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n",
    "tag": BASE.replace("path: shards", "path: !!python/object/apply:os.system [x]"),
    "local tag": BASE.replace("path: shards", "path: !env HOME"),
    "tagged mapping": BASE.replace("run: {", "run: !x {"),
    "tagged list": BASE + "extend: !x [a]\n",
    "core tag of another type": BASE.replace("steps: 20", "steps: !!str 20"),
    "two documents": BASE + "---\na: 1\n",
    "a list at the top": "- a\n- b\n",
    "a word at the top": "hello\n",
    "a number at the top": "3\n",
    "unclosed brace": "run: {name: x\n",
    "unclosed bracket": BASE + "extend: [a\n",
    "unclosed quote": 'run: {name: "x}\n',
    "bad indentation": BASE.replace("  path: shards", " path: shards\n   lanes: 3"),
    "no space after colon": BASE.replace("name: base", "name:base"),
    "complex key": BASE + "? [a, b]\n: c\n",
    "mapping as key": BASE + "? {a: b}\n: c\n",
    "merge key": BASE + "<<: {seed: 3}\n",
    "dotted key": BASE + "optim.lr: 3\n",
    "number as key": BASE + "1: x\n",
    "empty key": BASE + '"": x\n',
    "null key": BASE + "~: x\n",
    "NUL character": b"run: {name: a\0b}\n",
    "escape character": b"run:\n  name: \x1b[31m\n",
    "NUL by escape in a path": BASE.replace("path: shards", 'path: "a\\0b"') + 'run.dir: "\\0"\n',
    "not UTF-8": b"run: {name: \xff\xfe}\n",
    "UTF-16": BASE.encode("utf-16"),
    "latin-1": "run: {name: caf\xe9}\n".encode("latin-1"),
    "binary": bytes(range(256)),
    "too large": b"# " + b"x" * MAX_FILE_BYTES,
    "nested without end": "a: " + "[" * 20_000,
    "nested mappings without end": "{a: " * 20_000,
    "deep but closed": "a: " + "[" * 600 + "]" * 600,
    "unknown section": BASE + "optimizer: {lr: 3}\n",
    "unknown key": BASE.replace("lr: 1e-3", "lr: 1e-3\n  momentum: 0.9"),
    "section missing": BASE.replace("train: {steps: 20}\n", ""),
    "key missing": BASE.replace("micro: 2", ""),
    "section is null": BASE.replace("run: {name: base}", "run:"),
    "section is a word": BASE.replace("run: {name: base}", "run: base"),
    "section is a list": BASE.replace("run: {name: base}", "run: [name, base]"),
    "model is a list": BASE.replace("{preset: llama-tiny}", "[llama-tiny]"),
    "preset is a number": BASE.replace("llama-tiny", "3"),
    "preset is a mapping": BASE.replace("llama-tiny", "{a: b}"),
    "stack is a word": BASE.replace("preset: llama-tiny", "preset: llama-tiny, decoder: big"),
    "text for a number": BASE.replace("steps: 20", "steps: many"),
    "float for an integer": BASE.replace("steps: 20", "steps: 2.5e0"),
    "integer of many digits": BASE + "seed: " + "9" * 5000 + "\n",
    "seed too large": BASE + "seed: 9223372036854775808\n",
    "negative": BASE.replace("micro: 2", "micro: -2"),
    "zero": BASE.replace("steps: 20", "steps: 0"),
    "not a number": BASE.replace("lr: 1e-3", "lr: .NaN"),
    "infinite": BASE.replace("lr: 1e-3", "lr: -.INF"),
    "infinite by size": BASE.replace("lr: 1e-3", "lr: 1e999"),
    "yes for a boolean": BASE + "engine: {compile: yes}\n",
    "boolean for a name": BASE.replace("name: base", "name: true"),
    "name with a slash": BASE.replace("name: base", "name: ../base"),
    "name with a newline": BASE.replace("name: base", 'name: "a\\nb"'),
    "name too long": BASE.replace("name: base", "name: " + "a" * 65),
    "unknown choice": BASE + "engine: {kind: fsdp}\n",
    "include of a number": "include: 3\n" + BASE,
    "include of a mapping": "include: {a: b}\n" + BASE,
    "include of a list of numbers": "include: [1, 2]\n" + BASE,
    "include of nothing": "include: ''\n" + BASE,
    "include of a missing file": "include: nope.yaml\n" + BASE,
    "include of a folder": "include: .\n" + BASE,
    "include of itself": "include: ./a.yaml\n" + BASE,
    "include with NUL": 'include: "a\\0b"\n' + BASE,
    "include of a name that is too long": "include: " + "a" * 5000 + "\n" + BASE,
    "include in a section": BASE.replace("run: {name: base}", "run: {include: a.yaml, name: base}"),
}

OVERRIDES = [
    "",
    "=",
    "=3",
    "optim.lr",
    "optim..lr=3",
    ".optim.lr=3",
    "optim.=3",
    "optim-lr=3",
    "extend.0=x",
    "extend.x=1",
    "extend=['']",
    "extend=['..x']",
    "extend=['a b', 5]",
    'extend=["a\\0"]',
    "optim.lr.x=3",
    "optim.lr==3",
    "optim.lr=",
    "optim.lr=x",
    "optim.lr=[1]",
    "optim.lr={a: 1}",
    "optim.lr=[1",
    "optim.lr={",
    "optim.lr='1",
    "optim.lr=*a",
    "optim.lr=&a 1\n---\n2",
    "optim.lr=!!float 3x",
    "optim.lr=\t3\0",
    "optim.lr=${",
    "optim=",
    "optim=3",
    "optim={lr: 1, lr: 2}",
    "optim={lr: [" + "[" * 5000,
    "optim.lrr=3",
    "nothing.at.all=3",
    "include=b.yaml",
    "batch=[1, 2]",
    "run.name=a b",
    "run.dir=",
    "__class__=3",
    "model.decoder.__init__=3",
    "seed=" + "9" * 10_000,
]


def check_lines(error: ConfigError) -> None:
    """Every line names its place, is short enough to read, and is one line."""
    lines = str(error).splitlines()
    assert lines
    for line in lines:
        assert PLACE.match(line), line
        assert len(line) < 700, line
        assert line.isprintable(), line


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_a_broken_file_is_refused_with_its_place(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        load_config("a.yaml")
    check_lines(caught.value)


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda text: ascii(text[:30]))
def test_a_broken_override_is_refused_by_name(tmp_path, monkeypatch, override):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(BASE)
    with pytest.raises(ConfigError) as caught:
        load_config("a.yaml", [override])
    check_lines(caught.value)
    assert "override" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["", ".", "nope.yaml", "configs/run/nope.yaml", "../a/../b.yaml", "a" * 5000, "/dev/zero"]
)
def test_a_config_that_is_no_file_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no such config file; check|cannot read the config: |larger than"):
        load_config(name)


def test_includes_that_double_end_after_a_hundred_reads(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.yaml").write_text(f"include: [{number + 1}.yaml, {number + 1}.yaml]\n")
    (tmp_path / "30.yaml").write_text(BASE)
    with pytest.raises(ConfigError, match="the includes make more than 100 reads of files; include each file once"):
        load_config(tmp_path / "0.yaml")


@pytest.mark.parametrize("name", ["secrets", "linked.yaml"])
def test_a_file_that_is_no_config_is_not_included_and_not_quoted(tmp_path, name):
    (tmp_path / "secrets").write_text("root:$6$hash:20000:0:99999:7:::\n")
    (tmp_path / "linked.yaml").symlink_to("secrets")
    (tmp_path / "a.yaml").write_text(f"include: {name}\n" + BASE)
    with pytest.raises(ConfigError, match=r"a.yaml:1:1: included file .* is not a .yaml file; include") as refused:
        load_config(tmp_path / "a.yaml")
    assert "hash" not in str(refused.value)


def test_a_circle_of_includes_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("include: [b.yaml]\n" + BASE)
    (tmp_path / "b.yaml").write_text("include: sub/../a.yaml\n")
    (tmp_path / "sub").mkdir()
    with pytest.raises(
        ConfigError, match=r"b.yaml:1:1: include 'sub/../a.yaml' leads back to itself; break the circle"
    ):
        load_config("a.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "a.yaml").write_text("include: loop.yaml\n" + BASE)
    with pytest.raises(ConfigError, match=r"a.yaml:1:1: included file 'loop.yaml' does not exist"):
        load_config("a.yaml")


def test_a_start_whose_name_no_file_can_have_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text(BASE.replace("model: {preset: llama-tiny}", 'init: {from: "a\\0b"}'))
    with pytest.raises(ConfigError, match="no run, checkpoint, model folder or Hugging Face folder is there"):
        load_config(tmp_path / "a.yaml")
