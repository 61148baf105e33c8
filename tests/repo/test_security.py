"""What the source never does: unpickle, evaluate text, run a shell, trust code that comes with data."""

import ast

import pytest

from tests.repo.source import ROOT, SOURCE_FILES, findings_by_file

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
FORBIDDEN_CALLS = {
    "eval": "evaluates text",
    "exec": "evaluates text",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "subprocess.getoutput": "runs a shell",
    "subprocess.getstatusoutput": "runs a shell",
    "torch.load": "unpickles; weights are safetensors",
    "torch.save": "pickles; weights are safetensors",
    "tempfile.mktemp": "is a race",
    "pandas.read_pickle": "unpickles",
    "joblib.load": "unpickles",
    "torch.jit.load": "runs what is saved",
    "runpy.run_path": "runs a file",
}
LENIENT_READERS = {
    **dict.fromkeys(
        ("json.loads", "json.load", "json.JSONDecoder", "json.decoder.JSONDecoder"),
        "has no limit of nesting, as pretrain.utils.safe_read.parse_json has",
    ),
    **dict.fromkeys(
        (f"yaml.{name}{which}" for name in ("load", "safe_load", "full_load", "unsafe_load", "compose", "parse", "scan")
         for which in ("", "_all")),
        "follows aliases, and may build any object; pretrain.config.yaml_nodes.parse_yaml reads strictly",
    ),
}  # fmt: skip
"""Not even named: what strangers may have written is read by one reader, which files of ours go through too."""
READER_NAMES = {name.rpartition(".")[2] for name in LENIENT_READERS}
FORBIDDEN_METHODS = {
    "extractall": "writes wherever an archive says",
    "extract": "writes wherever an archive says",
    **dict.fromkeys(
        ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
        "unpickles what another rank sends; pretrain.dist sends JSON",
    ),
}
FORBIDDEN_TRUE_KEYWORDS = {"shell": "runs a shell", "trust_remote_code": "runs code that comes with a model",
                           "allow_pickle": "unpickles"}  # fmt: skip
WEIGHTS_MAY_BE_UNPICKLED_IN = ROOT / "pretrain" / "interop"
"""Releases of others may be `.bin` files only; there `torch.load` may be called with a literal weights_only=True."""
THE_READER = ROOT / "pretrain" / "utils" / "safe_read.py"


def full_names(tree: ast.Module) -> dict[str, str]:
    """Maps each imported name of a file to what it stands for: `sp` to `subprocess`, `load` to `torch.load`."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _loads_weights_only(call: ast.Call, called: str) -> bool:
    values = [keyword.value for keyword in call.keywords if keyword.arg == "weights_only"]
    return called == "torch.load" and any(isinstance(value, ast.Constant) and value.value is True for value in values)


def _findings_of_call(call: ast.Call, names: dict[str, str], may_load_weights: bool) -> list[str]:
    first, dot, rest = ast.unparse(call.func).partition(".")
    called = names.get(first, first) + dot + rest
    found = []
    if called in FORBIDDEN_CALLS and not (may_load_weights and _loads_weights_only(call, called)):
        found.append(f"line {call.lineno}: {called} {FORBIDDEN_CALLS[called]}")
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method in FORBIDDEN_METHODS:
        found.append(f"line {call.lineno}: {method} {FORBIDDEN_METHODS[method]}")
    if called == "numpy.load" and len(call.args) > 2:
        found.append(f"line {call.lineno}: numpy.load with allow_pickle by position")
    for keyword in call.keywords:
        # Anything but a literal False could be True when it runs.
        literal_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in FORBIDDEN_TRUE_KEYWORDS and not literal_false:
            found.append(f"line {call.lineno}: {keyword.arg}= {FORBIDDEN_TRUE_KEYWORDS[keyword.arg]}")
    return found


def _findings_of_name(node: ast.Attribute | ast.Name, names: dict[str, str]) -> list[str]:
    if isinstance(node, ast.Attribute) and node.attr not in READER_NAMES:
        return []
    first, dot, rest = ast.unparse(node).partition(".")
    named = names.get(first, first) + dot + rest
    return [f"line {node.lineno}: {named} {LENIENT_READERS[named]}"] if named in LENIENT_READERS else []


def findings(tree: ast.Module, *, may_load_weights: bool = False, is_reader: bool = False) -> list[str]:
    """Returns every forbidden thing in a file, with its line."""
    names = full_names(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [
                f"line {node.lineno}: {module}" for module in modules if module.split(".")[0] in FORBIDDEN_MODULES
            ]
        if isinstance(node, ast.Attribute | ast.Name) and not is_reader:
            found += _findings_of_name(node, names)
        if isinstance(node, ast.Call):
            found += _findings_of_call(node, names, may_load_weights)
    return found


def test_no_source_file_does_anything_forbidden():
    exempt = [path for path in SOURCE_FILES if path.parent == WEIGHTS_MAY_BE_UNPICKLED_IN]
    others = [path for path in SOURCE_FILES if path not in (*exempt, THE_READER)]
    assert findings_by_file([THE_READER], lambda tree: findings(tree, is_reader=True)) == {}
    assert exempt and findings_by_file(exempt, lambda tree: findings(tree, may_load_weights=True)) == {}
    assert findings_by_file(others, findings) == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import pickle as p",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x', weights_only=True)",
        "from torch import load\nload('x')",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "import yaml\nyaml.compose(text)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess as sp\nsp.run('ls', shell=flag)",
        "import os\nos.system('ls')",
        "from os import system\nsystem('ls')",
        "eval('1')",
        "exec('1')",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', None, True)",
        "import os\nos.popen('ls')",
        "from os import popen as p\np('ls')",
        "import tarfile\ntarfile.open('x').extractall()",
        "archive.extract(member, folder)",
        "import yaml\nyaml.load(text, yaml.FullLoader)",
        "import torch\ntorch.jit.load('x')",
        "import joblib\njoblib.load('x')",
        "import numpy as np\nnp.load('x', allow_pickle=flag)",
        "import dill",
        "import json\njson.load(file)",
        "from json import loads as read\nread(text)",
        "import json\nread(path, json.loads)",
        "import json\nread = json.JSONDecoder().raw_decode",
        "import yaml\nyaml.safe_load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "import torch.distributed as td\ntd.all_gather_object(found, value)",
    ],
)
def test_the_rule_sees_each_way_of_breaking_it(code):
    assert len(findings(ast.parse(code))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "import json\njson.dumps(value)",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "model.eval()",
        "AutoModel.from_pretrained(x, trust_remote_code=False)",
    ],
)
def test_the_rule_lets_harmless_code_pass(code):
    assert findings(ast.parse(code)) == []


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import torch\ntorch.load(path, weights_only=True, mmap=True)", True),
        ("from torch import load\nload(path, weights_only=True)", True),
        ("import torch\ntorch.load(path)", False),
        ("import torch\ntorch.load(path, weights_only=False)", False),
        ("import torch\ntorch.load(path, weights_only=flag)", False),
        ("import torch\ntorch.load(path, **options)", False),
        ("import torch\ntorch.save(x, path, weights_only=True)", False),
        ("import pickle", False),
    ],
)
def test_where_weights_of_others_are_read_only_the_restricted_unpickler_passes(code, allowed):
    assert (findings(ast.parse(code), may_load_weights=True) == []) == allowed
