"""A model is fetched from the hub, over real HTTP: what is needed and nothing else; every failure is one line.

huggingface_hub reads its endpoint when it is imported, so each case is a process of its own.
"""

import json
from pathlib import Path

import pytest

from pretrain.errors import ConfigError
from pretrain.interop.release import fetch_release
from tests.helpers.warm_python import run_python
from tests.unit.interop.hub_server import Hub

FETCH = """
import json, sys
from pretrain.errors import PretrainError
from pretrain.interop.release import fetch_release
found = {}
for name in sys.argv[1:]:
    try:
        folder = fetch_release(name)
        found[name] = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}
    except PretrainError as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""

SMALL = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "modeling_custom.py": b"raise SystemExit('executed')",
    "README.md": b"card",
    "original/consolidated.00.pth": b"x",
    "onnx/model.onnx": b"x",
    "onnx/config.json": b"x",
    "training_args.bin": b"x",
}
WANTED = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
REPOSITORIES = {
    "lab/single": SMALL
    | {"model.safetensors": b"weights", "pytorch_model.bin": b"pickle", "consolidated.safetensors": b"x"},
    "lab/sharded": SMALL
    | {
        "model.safetensors.index.json": b"{}",
        "model-00001-of-00002.safetensors": b"one",
        "model-00002-of-00002.safetensors": b"two",
    },
    "lab/pickled": SMALL | {"pytorch_model.bin": b"pickle"},
    "lab/gated": SMALL | {"model.safetensors": b"weights"},
}  # fmt: skip


def fetch(home: Path, url: str, *names: str, **environment: str):
    """Runs `fetch_release` on each name, with a hub of its own; returns files, or the error, by name."""
    plain = {"HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "", "NO_PROXY": "127.0.0.1"}
    plain |= {"HF_HUB_ETAG_TIMEOUT": "100", "HF_HUB_DOWNLOAD_TIMEOUT": "100"}  # the server may be slow
    done = run_python(FETCH, *names, anew=["huggingface_hub"], **{**plain, **environment})
    assert done.code == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_what_can_be_read_is_fetched_and_nothing_else(tmp_path):
    with Hub(REPOSITORIES, gated=("lab/gated",)) as hub:
        found = fetch(tmp_path, hub.url, *REPOSITORIES, "lab/nothing")
        assert set(found["lab/single"]) == WANTED | {"model.safetensors"}
        assert found["lab/single"]["model.safetensors"] == "weights"
        shards = {name for name in REPOSITORIES["lab/sharded"] if name.startswith("model-")}
        assert set(found["lab/sharded"]) == WANTED | shards | {"model.safetensors.index.json"}
        assert set(found["lab/pickled"]) == WANTED | {"pytorch_model.bin"}
        assert found["lab/gated"] == (
            "ConfigError: lab/gated: gated model; accept its licence on the hub and set HF_TOKEN"
        )
        assert found["lab/nothing"] == (
            "ConfigError: lab/nothing: no such file or folder, and no such model on the hub; check it, or set HF_TOKEN"
        )
        assert not any(name.endswith((".py", ".pth", ".onnx")) or "training_args" in name for name in hub.asked)
        count = len(hub.asked)
        assert fetch(tmp_path, hub.url, "lab/single")["lab/single"] == found["lab/single"]
        assert len(hub.asked) == count
    # The server is gone: what is in the cache is still found.
    again = fetch(tmp_path, hub.url, "lab/single", "lab/other")
    assert again["lab/single"] == found["lab/single"]
    unreachable = "no such file or folder, and the Hugging Face hub cannot be reached; give a path, or try again"
    assert again["lab/other"] == f"LaunchError: lab/other: {unreachable}"


def test_without_a_network_the_cache_is_asked_at_once(tmp_path):
    found = fetch(tmp_path, "http://127.0.0.1:9", "lab/single", HF_HUB_OFFLINE="1")
    assert found["lab/single"].startswith(
        "LaunchError: lab/single: no such file or folder, and the Hugging Face hub cannot"
    )


def test_a_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    assert fetch_release(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert fetch_release("owner/model") == Path("owner/model")


@pytest.mark.parametrize("name", ["", "a/b/c", "/no/such/folder", "./nothing", "~/nothing", "a b", "owner/", "a\n"])
def test_what_is_neither_a_folder_nor_a_name_is_refused(name):
    with pytest.raises(ConfigError, match="is neither a folder nor a name on the Hugging Face hub; check the path"):
        fetch_release(name)


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "weights").write_text("x")
    with pytest.raises(ConfigError, match="is neither a folder nor a name"):
        fetch_release(str(tmp_path / "weights"))
