"""Descriptions of the config's fields: explanations, the JSON schema and docs/config.md."""

import pytest

from pretrain.config.fields import ROOTS, explain_key, json_schema, known_keys, walk_fields, write_reference
from pretrain.config.load import load_config
from pretrain.config.objective import NEEDS
from pretrain.errors import ConfigError
from pretrain.model.backends import BACKENDS
from tests.repo.source import ROOT


@pytest.mark.parametrize("root", ROOTS)
def test_every_field_has_a_description(root):
    fields = list(walk_fields(ROOTS[root]))
    assert [field.key for field in fields if len(field.description) < 10] == []
    assert [field.key for field in fields if not field.description.endswith((".", ")."))] == []


def test_the_reference_is_as_the_fields_are():
    """If this fails: python -m pretrain config --reference > docs/config.md."""
    text = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    assert text == write_reference()
    assert [key for section in ROOTS.values() for key in known_keys(section) if f"| `{key}` |" not in text] == []


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (
            "optim.lr",
            "optim.lr (a run)\n  type       number (> 0)\n  default    required\n  on resume  warn\n"
            "  Peak learning rate.",
        ),
        (
            "init.from",
            "init.from (a run)\n  type       text or null\n  default    null\n  on resume  warn\n"
            "  Run, checkpoint, model folder",
        ),
        ("engine.kind", '  type       `deepspeed`, `ddp`, `single`\n  default    "deepspeed"\n'),
        ("data.mixture", "  type       list of section\n  default    []\n"),
        ("data.mixture.weight", "  type       number (>= 0)\n  default    required\n  on resume  allow\n"),
        ("model.encoder.cell", '  default    "lstm"\n  on resume  never\n'),
        ("tokenizer.kind", "tokenizer.kind (pretrain prepare)\n  type       `bpe`"),
        ("inputs.0.path", "inputs.path (pretrain prepare)\n"),
        (
            "optim.schedule",
            "  min_ratio        number (>= 0, <= 1), default 0.1: Final learning rate divided by the peak; for\n"
            "                   `inverse_sqrt` the lower bound.",
        ),
        ("optim.schedule", "  kind             `cosine`, `linear`, `constant`, `inverse_sqrt`, `wsd`, default "),
        ("optim", "  lr              number (> 0): Peak learning rate.\n"),
        ("engine.attention", "`auto`, `eager`, `sdpa`, `flex`, `varlen`"),
        ("model.preset", "Name of `pretrain presets`"),
        ("tracking.attention.heads", "  type       list of integer (>= 0) or null (at least 1 item(s))\n"),
    ],
)
def test_a_key_is_explained(key, text):
    assert text in explain_key(key)


@pytest.mark.parametrize(("key", "registry"), [("engine.attention", BACKENDS), ("objective.kind", NEEDS)])
def test_the_names_of_a_registry_are_explained(key, registry):
    assert [name for name in registry if f"`{name}`" not in explain_key(key)] == []


def test_a_key_of_a_run_and_of_prepare_is_explained_for_both():
    assert explain_key("seed").count("seed (") == 2
    assert explain_key("model.decoder.layers").count("model.decoder.layers (") == 2
    with pytest.raises(ConfigError, match="there is no key 'sead'; did you mean seed"):
        explain_key("sead")


@pytest.mark.parametrize(
    ("key", "near"), [("learning_rate", "optim.lr or"), ("gradient_clipping", "optim.grad_clip"), ("rate", "objective")]
)
def test_an_unknown_key_is_answered_by_meaning_and_by_its_last_word(key, near):
    with pytest.raises(ConfigError, match=rf"there is no key '{key}'; did you mean {near}"):
        explain_key(key)


def resolve(part, schema):
    """Returns the sections that a part of a schema may be."""
    if "$ref" in part:
        return [schema["$defs"][part["$ref"].rpartition("/")[2]]]
    options = [*part.get("anyOf", ()), *part.get("oneOf", ()), *([part["items"]] if "items" in part else ())]
    return [section for option in options for section in resolve(option, schema)]


def test_the_schema_knows_every_key_with_its_description():
    schema = json_schema()
    for field in walk_fields():
        sections = [schema]
        *parents, name = field.key.split(".")
        for parent in parents:
            found = [section["properties"][parent] for section in sections if parent in section["properties"]]
            sections = [section for part in found for section in resolve(part, schema)]
        parts = [section["properties"][name] for section in sections if name in section["properties"]]
        assert field.description in [part["description"] for part in parts], field.key


def test_the_schema_requires_no_key_and_knows_includes(tmp_path):
    schema = json_schema()
    assert all("required" not in part for part in (schema, *schema["$defs"].values()))
    assert schema["additionalProperties"] is False and "include" in schema["properties"]
    (tmp_path / "a.yaml").write_text(
        "# yaml-language-server: $schema=schema.json\ninclude: configs/run/quickstart.yaml\n"
    )
    assert load_config(tmp_path / "a.yaml") == load_config("configs/run/quickstart.yaml")
