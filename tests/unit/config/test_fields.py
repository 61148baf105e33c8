"""Descriptions of the config's fields: explanations, the JSON schema and docs/config.md."""

import re
from operator import attrgetter

import pytest

from pretrain.config.fields import ROOTS, explain_key, json_schema, walk_fields, write_reference
from pretrain.config.load import dump_config, load_config
from pretrain.errors import ConfigError
from pretrain.kinds.objectives import OBJECTIVES
from pretrain.model.backends import BACKENDS
from tests.repo.source import ROOT


@pytest.mark.parametrize("root", ROOTS)
def test_every_field_has_a_description(root):
    fields = list(walk_fields(ROOTS[root]))
    assert [field.key for field in fields if len(field.description) < 10] == []
    assert [field.key for field in fields if not field.description.endswith((".", ")."))] == []


def test_a_number_whose_0_switches_off_takes_the_words_for_it():
    switches = re.compile(r"\b0: (never|none|off|no clipping|only)\b")
    fields = [field for field in walk_fields() if "null" not in field.type]
    assert [field.key for field in fields if switches.search(field.description) and "`off`" not in field.type] == []


OFF_KEYS = ("eval.every_steps", "checkpoint.every_steps", "checkpoint.keep_every_steps", "tracking.norms_every_steps",
            "tracking.log_every_steps", "tracking.samples.every_evals", "tracking.attention.every_evals",
            "tracking.stall_alert_s", "guard.check_replicas_every", "eval.tasks.every_steps", "optim.grad_clip",
            "optim.weight_decay", "optim.schedule.warmup_steps", "model.multi_token")  # fmt: skip


@pytest.mark.parametrize("word", ["null", "~", "off", "none", "never", "Off", "false", "0"])
def test_each_word_for_never_is_0_in_a_file_and_on_the_command_line(tmp_path, word):
    given = [f"{key}={word}" for key in OFF_KEYS]
    config = load_config("configs/run/quickstart.yaml", given)
    (tmp_path / "a.yaml").write_text(f"include: {ROOT}/configs/run/quickstart.yaml\neval: {{every_steps: {word}}}\n")
    assert load_config(tmp_path / "a.yaml").eval.every_steps == 0
    for key in OFF_KEYS:
        assert attrgetter(key)(config) == 0, key
    assert "eval:\n  every_steps: 0\n" in dump_config(config)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nope", "eval.every_steps: 'nope' is no number; write one, or off"),
        ("true", "input should be a valid integer; write a whole number"),
        ("-1", "input should be greater than or equal to 0"),
    ],
)
def test_another_word_is_refused_with_what_to_write(value, message):
    with pytest.raises(ConfigError, match=message):
        load_config("configs/run/quickstart.yaml", [f"eval.every_steps={value}"])


def test_the_reference_is_as_the_fields_are():
    """If this fails: python -m pretrain config --reference > docs/config.md."""
    text = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    assert text == write_reference()
    listed = [field.key for section in ROOTS.values() for field in walk_fields(section)]
    assert [key for key in listed if f"| `{key}` |" not in text] == []


def test_a_section_that_refers_to_another_has_its_keys_and_their_meanings():
    meanings: dict[str, set[str]] = {}
    for field in walk_fields():
        meanings.setdefault(field.key, set()).add(field.description)
    repeated = [field for field in walk_fields(repeats=True) if field.key not in meanings]
    for field in repeated:
        there = field.key.replace("model.encoder.", "model.decoder.").replace("objective.mixture.", "objective.")
        assert field.description in meanings[there], field.key
    assert len(repeated) > 100
    encoder, decoder = explain_key("model.encoder.layers"), explain_key("model.decoder.layers")
    assert encoder == decoder.replace("decoder", "encoder")


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
        ("engine.kind", '  type       `auto`, `deepspeed`, `ddp`, `single`\n  default    "auto"\n'),
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


@pytest.mark.parametrize(("key", "registry"), [("engine.attention", BACKENDS), ("objective.kind", OBJECTIVES)])
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
