"""From a file and overrides to a config, or to one line for each problem that says where it stands."""

import ast
import re
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config.base import expand_home
from pretrain.config.fields import known_keys
from pretrain.config.load import dump_config, load_config
from pretrain.config.presets import PRESETS
from pretrain.config.recipes import find_config, list_recipes
from pretrain.config.run import RunConfig
from pretrain.config.yaml_nodes import read_yaml
from pretrain.errors import ConfigError
from pretrain.kinds.objectives import OBJECTIVES
from pretrain.kinds.optimizers.muon import MuonConfig
from tests.repo.source import SOURCE_FILES, parse

BASE = """\
run: {name: base}
data:
  path: shards
model: {preset: llama-tiny}
batch: {global_tokens: 256, seq_len: 64, micro: 2}
optim:
  lr: 1e-3
  schedule: {warmup_steps: 2}
train: {steps: 20}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file of the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(content: str | bytes, name: str = "a.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else textwrap.dedent(content).encode())
        return name

    return write


def problems(source: str, *overrides: str) -> list[str]:
    """The lines of the error that loading ends with."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    assert caught.value.exit_code == 64
    return str(caught.value).splitlines()


def test_numbers_and_words_are_what_they_look_like(write):
    config = load_config(
        write(
            BASE.replace("name: base", "name: no")
            .replace("lr: 1e-3", "lr: 1e-4")
            .replace("path: shards", "path: off")
            .replace("steps: 20", "steps: 2_000")
        )
    )
    assert (config.optim.lr, config.run.name, config.data.path, config.train.steps) == (1e-4, "no", "off", 2000)


@pytest.mark.parametrize(("text", "count"), [("1e4", 10_000), ("1.5e3", 1500), ("2E2", 200), ("1_0e2", 1000)])
def test_a_count_may_be_written_with_an_exponent(write, text, count):
    from_file = load_config(write(BASE.replace("steps: 20", f"steps: {text}"))).train.steps
    from_override = load_config(write(BASE), [f"train.steps={text}"]).train.steps
    assert from_file == from_override == count
    assert isinstance(load_config(write(BASE), [f"optim.lr={text}"]).optim.lr, float)


@pytest.mark.parametrize("text", ["1.5e0", "1e-1", "10.0", "1e17", "1e400"])
def test_a_number_that_is_no_count_is_refused(write, text):
    (line,) = problems(write(BASE), f"train.steps={text}")
    assert line.endswith("; write a whole number: 10000, 10_000 or 1e4")


def test_a_value_is_shown_as_it_was_written(write):
    (line,) = problems(write(BASE), "checkpoint={keep: null}")
    assert line.startswith("override 'checkpoint={keep: null}': checkpoint.keep=null: input should be")
    (line,) = problems(write(BASE), "train={steps: true}")
    assert "train.steps=true: " in line


def test_an_override_is_not_repeated_and_a_name_is_told_its_letters(write):
    (line,) = problems(write(BASE), "checkpoint.keep=1")
    assert line == "override 'checkpoint.keep=1': input should be greater than or equal to 2"
    (line,) = problems(write(BASE), "run.name=a b")
    assert line.endswith("'; use letters, digits, `.`, `_` and `-`, a letter or digit first")


def test_text_of_any_language_is_dumped_as_it_is(write):
    config = load_config(write(BASE), ["data.path=data/gr\xf6\xdfe-\u6570-\U0001f600"])
    assert "path: data/gr\xf6\xdfe-\u6570-\U0001f600" in dump_config(config)


def test_a_quoted_number_stays_text(write):
    assert load_config(write(BASE), ["run.name='2024'"]).run.name == "2024"
    (line,) = problems(write(BASE), "optim.lr='1'")
    assert line == """override "optim.lr='1'": input should be a valid number; write a number, without quotes"""


def test_interpolations_stay_literal(write):
    assert load_config(write(BASE.replace("path: shards", "path: '${oc.env:HOME}'"))).data.path == "${oc.env:HOME}"
    assert load_config(write(BASE), ["data.path=${seed}", "optim.beta1=0.8"]).data.path == "${seed}"
    assert load_config(write(BASE), ["data.path=???"]).data.path == "???"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optim.lr=3e-4", "optim.lr", 3e-4),
        ("optim.lr=.5", "optim.lr", 0.5),
        ("extend=[json, csv]", "extend", ["json", "csv"]),
        ("extend=[]", "extend", []),
        ("optim.schedule={kind: linear, min_ratio: 0}", "optim.schedule.min_ratio", 0),
        ("tracking.name='a: b'", "tracking.name", "a: b"),
        ('tracking.project="x=y"', "tracking.project", "x=y"),
        ("tracking.project=x=y", "tracking.project", "x=y"),
        ("tracking.project=true story", "tracking.project", "true story"),
        ("train.stop_after=", "train.stop_after", None),
        ("train.stop_after=null", "train.stop_after", None),
        ("tracking.project=''", "tracking.project", ""),
        ("tracking.wandb=off", "tracking.wandb", "off"),
        ("engine.compile=true", "engine.compile", True),
        ("init.from=runs/a", "init.from_", "runs/a"),
        ("model.decoder.layers=7", "model.decoder.layers", 7),
    ],
)
def test_overrides_reach_their_key(write, override, key, value):
    section = load_config(write(BASE), [override])
    for name in key.split("."):
        section = getattr(section, name)
    assert section == value


def test_a_mapping_is_merged_and_the_last_override_wins(write):
    config = load_config(write(BASE), ["optim={beta2: 0.9}", "optim.lr=1.0", "optim.lr=2.0"])
    assert (config.optim.lr, config.optim.beta2, config.optim.schedule.warmup_steps) == (2.0, 0.9, 2)


def test_an_override_reaches_an_item_of_a_list(write):
    mixture = "data={path: null, mixture: [{name: a, path: a, weight: 1.0}, {name: b, path: b, weight: 1.0}]}"
    config = load_config(write(BASE), [mixture, "data.mixture.1.weight=3.0", "data.mixture.0={path: c}"])
    assert [(source.path, source.weight) for source in config.data.mixture] == [("c", 1.0), ("b", 3.0)]
    for item in ("2", "x"):
        (line,) = problems(write(BASE), mixture, f"data.mixture.{item}.weight=3.0")
        where = f"override 'data.mixture.{item}.weight=3.0'"
        assert line == f"{where}: there is no such item in the list; name an item by its number, from 0"


def test_a_preset_is_laid_under_the_keys_of_the_file(write):
    config = load_config(write(BASE), ["model.decoder.layers=3"])
    assert (config.model.decoder.layers, config.model.decoder.width) == (3, 64)


def test_includes_are_relative_merged_in_order_and_covered_by_the_file(write):
    write("optim: {lr: 5.0, beta1: 0.5}\ninclude: more/c.yaml\n", "parts/b.yaml")
    write("optim: {lr: 6.0, beta2: 0.6, eps: 1e-3}\n", "parts/more/c.yaml")
    write("optim: {beta1: 0.7}\n", "d.yaml")
    config = load_config(write("include: [parts/b.yaml, d.yaml]\n" + BASE))
    assert (config.optim.lr, config.optim.beta1, config.optim.beta2, config.optim.eps) == (1e-3, 0.7, 0.6, 1e-3)


def test_an_error_in_an_included_file_names_that_file(write):
    write("data:\n  lanes: x\n", "part.yaml")
    (line,) = problems(write("include: part.yaml\n" + BASE))
    assert line.startswith("part.yaml:2:3: data.lanes='x': input should be a valid integer")


def test_all_problems_are_told_at_once(write):
    lines = problems(write(BASE + "seeed: 1\nengine: {zero_stage: 9}\n"), "optim.lr=0", "batch.micro=x")
    assert [line.partition(": ")[0] for line in lines] == [
        "override 'batch.micro=x'",
        "override 'optim.lr=0'",
        "a.yaml:11:10",
        "a.yaml:10:1",
    ]
    assert lines[-1].endswith("unknown key 'seeed'; did you mean 'seed'?")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("optim.learning_rate", "known here: kind, lr, beta1"),
        ("optim.beta_2", "did you mean 'optim.beta2'?"),
        ("parallel.pipeline", "DeepSpeed's pipelines have a loop of their own"),
        ("data.global_tokens", "did you mean 'batch.global_tokens'?"),
        ("zero_stage", "did you mean 'engine.zero_stage'?"),
        ("model.decoder.layer", "did you mean 'model.decoder.layers'?"),
        ("tracking.wandb_api_key", "secrets are read from the environment only, never from a config"),
        ("tracking.token", "secrets are read from the environment only"),
        ("data.tokenizer", "known here: path, mixture"),
    ],
)
def test_an_unknown_key_has_a_hint(write, key, hint):
    (line,) = problems(write(BASE), f"{key}=1")
    assert f"unknown key {key!r}; {hint}" in line


def test_unknown_keys_come_before_a_start_that_is_not_there(write):
    lines = problems(write(BASE.replace("model: {preset: llama-tiny}", "init: {from: nowhere, freez: []}\nseeed: 1")))
    assert "did you mean 'init.freeze'?" in lines[0] and "unknown key 'seeed'" in lines[1]
    assert len(lines) == 3 and "init.from=nowhere: no run" in lines[2]


def test_null_for_a_section_undoes_what_the_recipe_says_in_it(write):
    path = write(BASE.replace("  lr: 1e-3", "  lr: 1e-3\n  kind: muon\n  muon: {lr: 1e-2}"))
    (line,) = problems(path, "optim.kind=adamw")
    assert line.endswith("read under kind=muon only, not adamw; remove them, or write optim.muon=null optim.lr=0.001")
    assert load_config(path, ["optim.kind=adamw", "optim.muon=null"]).optim.muon == MuonConfig()


@pytest.mark.parametrize(
    ("override", "keys"),
    [
        ("data=nope", "data.path or data.mixture"),
        ("train=3", "train.steps or train.stop_after"),
        ("data.mixture=[a]", "data.mixture.0.name or data.mixture.0.path"),
    ],
)
def test_a_value_in_the_place_of_a_section_is_answered_with_keys_of_it(write, override, keys):
    (line,) = problems(write(BASE), override)
    section = keys.rpartition(".")[0].split()[-1]
    assert f"{override}': {section} is a section, not" in line
    assert line.endswith(f"; give keys of it, such as {keys}")


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://ann:hunter2@host/x", "http://host/x"),
        ("https://hunter2@host:8080/x/y", "https://host:8080/x/y"),
        ("https://ann:hun@ter2@host/x", "https://host/x"),
        ("https://host/x?token=hunter2", "https://host/x"),
        ("s3://host/x?versionId=hunter2#ter2", "s3://host/x"),
    ],
)
def test_an_address_of_data_with_credentials_is_refused_and_they_are_not_repeated(write, address, shown):
    what = f"{shown}: an address of data has no user, password, query or fragment; give credentials in the environment"
    source = write(BASE)
    for override, key in (
        (f"data.path={address}", "data.path"),
        (f"data={{path: '{address}'}}", "data.path"),
        (f"data={{path: null, mixture: [{{name: a, path: '{address}', weight: 1.0}}]}}", "data.mixture.0.path"),
    ):
        (line,) = problems(source, override)
        assert f": {key}: {what}" in line
        assert not any(secret in line for secret in ("hunter2", "ann", "ter2", "versionId"))
    (line,) = problems(write(BASE.replace("path: shards", f"path: {address!r}")))
    assert what in line


def test_folders_and_addresses_without_credentials_are_data(write):
    for path in ("a folder/with #and ?and @", "https://host/x", "s3://bucket/x", "gs://bucket/x"):
        assert load_config(write(BASE), [f"data.path='{path}'"]).data.path == path


def test_a_secret_is_not_repeated(write):
    (line,) = problems(write(BASE), "tracking.wandb_api_key=0123456789abcdef")
    assert "0123456789abcdef" not in line
    assert line.startswith("override 'tracking.wandb_api_key=***'")


def test_a_key_of_ours_that_ends_like_a_secret_shows_its_value(write):
    (line,) = problems(write(BASE), "model.multi_token=1000000")
    assert line.startswith("override 'model.multi_token=1000000': input should be less than")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["batch.global_tokens=1000"],
            "override 'batch.global_tokens=1000': batch.global_tokens=1000 must be a multiple of batch.seq_len=64; "
            "use 896 or 1024",
        ),
        (
            ["model.max_seq_len=32"],
            "override 'model.max_seq_len=32': batch.seq_len=64 exceeds model.max_seq_len=32; use batch.seq_len=32 or "
            "model.max_seq_len=64",
        ),
        (
            ["batch.seq_len=256", "model.preset=gpt2-tiny"],
            "override 'batch.seq_len=256': batch.seq_len=256 exceeds model.max_seq_len=128; use batch.seq_len=128 or ",
        ),
        (
            ["model.preset=bert-tiny"],
            "override 'model.preset=bert-tiny': objective.kind=causal needs a model with decoder, "
            "model.preset=bert-tiny has encoder; use objective.kind=masked, or another model.preset",
        ),
        (
            ["model.decoder.heads=5"],
            "override 'model.decoder.heads=5': model.decoder: width=64 must be a multiple of heads=5, or set head",
        ),
        (
            ["engine={kind: ddp, zero_stage: 1}"],
            "override 'engine={kind: ddp, zero_stage: 1}': engine: zero_stage=1 needs kind=deepspeed, not ddp; "
            "set zero_stage=0",
        ),
        (
            ["model.preset=lama-tiny"],
            "override 'model.preset=lama-tiny': unknown model.preset 'lama-tiny'; use llama-tiny",
        ),
        (["model.decoder=null"], "a.yaml:4:1: model: needs an encoder, a decoder, or a preset that has one"),
    ],
)
def test_a_rule_over_several_fields_names_field_value_rule_and_fix(write, overrides, line):
    (found,) = problems(write(BASE), *overrides)
    assert found.startswith(line)


def test_a_preset_that_a_key_of_the_file_does_not_fit_is_the_place(write):
    path = write(BASE.replace("seq_len: 64", "seq_len: 256").replace("llama-tiny", "llama-5m"))
    (line,) = problems(path, "model.preset=gpt2-tiny")
    fix = "use batch.seq_len=128 or model.max_seq_len=256"
    assert line == f"override 'model.preset=gpt2-tiny': batch.seq_len=256 exceeds model.max_seq_len=128; {fix}"
    assert load_config(path, ["model.preset=gpt2-tiny", "batch.seq_len=128"]).batch.seq_len == 128


def test_folders_are_below_the_home_folder_where_the_config_says_so(write, monkeypatch):
    monkeypatch.setenv("HOME", "/users/ann")
    assert load_config(write(BASE)).folder == Path("runs/base")
    assert load_config(write(BASE), ["run.dir=~/runs"]).folder == Path("/users/ann/runs/base")
    assert load_config(write(BASE), ["run.dir=~nobody-here/runs"]).folder == Path("~nobody-here/runs/base")
    assert load_config(write(BASE), ["data.path=~/data"]).data.paths == ["/users/ann/data"]
    given = load_config(write(BASE), ["init.from=~/model", "run.dir=~/runs"])
    # The nodes of a cluster use the folders of the one who submitted, whatever is their home.
    assert (given.init.from_, given.run.dir) == ("/users/ann/model", "/users/ann/runs")


def test_the_run_folder_is_computed_in_one_place():
    named = [path for path in SOURCE_FILES if ".run.dir" in path.read_text(encoding="utf-8")]
    joins = {path for path in named if re.search(r"\.run\.dir\b", ast.unparse(parse(path)))}  # not in a comment
    assert [path.parts[-2:] for path in joins] == [("config", "run.py")]


def test_required_keys_are_named(write):
    assert problems(write("# nothing\n")) == [
        f"a.yaml: {key} is required; add it, or pass {key}=..."
        for key in ("run", "data", "batch", "model", "optim", "train")
    ]


def test_a_builtin_config_is_found_by_name_from_any_folder(write):
    write("")
    assert load_config("configs/run/quickstart.yaml").run.name == "quickstart"
    assert find_config("run/quickstart.yaml").is_file()
    write(BASE, "configs/run/quickstart.yaml")
    assert load_config("configs/run/quickstart.yaml").run.name == "base"


PLAIN = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=200)
NUMBER_LIKE = ["1e5", "1e-4", "12e03", "1.5e5", "007", "0o7", "1_000", ".5", "1.", "no", "True", "null", "~", ".inf"]
MARKUP_LIKE = ["a: b", "[x", "{", "'", '"', "#", " x", "x ", "- a", "&a", "*a", "!t", "%", "@", "=", "<<", "a\nb", "\t"]
LOOKALIKES = st.sampled_from([*NUMBER_LIKE, *MARKUP_LIKE])


@pytest.mark.parametrize("examples", [25, pytest.param(60, marks=pytest.mark.long)])
def test_a_dumped_config_loads_as_the_same_config(tmp_path, examples):
    (tmp_path / "a.yaml").write_text(BASE)
    base = load_config(tmp_path / "a.yaml")

    @settings(max_examples=examples)
    @given(path=PLAIN | LOOKALIKES, lr=st.floats(1e-30, 1e30), steps=st.integers(21, 10**15))
    def check(path, lr, steps):
        config = base.model_copy(
            update={
                "data": base.data.model_copy(update={"path": expand_home(path)}),
                "optim": base.optim.model_copy(update={"lr": lr}),
                "train": base.train.model_copy(update={"steps": steps}),
                "extend": [path],
            }
        )
        for changed in (False, True):
            (tmp_path / "b.yaml").write_text(dump_config(config, changed=changed), encoding="utf-8")
            assert load_config(tmp_path / "b.yaml", extensions="ignore") == config

    check()


@pytest.mark.parametrize("recipe", [one.short for one in list_recipes(["run"])])
def test_what_differs_from_the_defaults_and_the_preset_is_the_whole_config(tmp_path, recipe):
    config = load_config(recipe, ["seed=99", "eval.every_steps=0", "optim.schedule.warmup_steps=3"])
    text = dump_config(config, changed=True)
    (tmp_path / "a.yaml").write_text(text)
    assert load_config(tmp_path / "a.yaml") == config
    assert len(text.splitlines()) < 35 < 150 < len(dump_config(config).splitlines())
    assert "seed: 99" in text and "extend" not in text


@pytest.mark.parametrize("kind", ["single", "ddp"])
def test_an_engine_without_stages_is_dumped_with_none_and_loads_again(write, tmp_path, kind):
    config = load_config(write(BASE), [f"engine={{kind: {kind}, precision: fp32}}"])
    assert config.engine.zero_stage == 0
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config


def test_every_known_key_is_in_a_resolved_config(write):
    text = dump_config(load_config(write(BASE)))
    # Sections that this config does not have.
    absent = ("model.encoder.", "model.decoder.rope_scaling.", "model.decoder.experts.", "data.mixture.")
    absent = (*absent, "data.curriculum.", "model.input.", "objective.mixture.", "optim.transfer.", "batch.schedule.")
    absent = (*absent, "batch.short_rows.", "batch.short_windows.", "model.decoder.latent.")
    absent = (*absent, "objective.distill.")
    words = {key.rpartition(".")[2] for key in known_keys(model_kind="transformer") if not key.startswith(absent)}
    assert [word for word in sorted(words) if not re.search(rf"\b{word}:", text)] == []


def test_a_module_under_extend_may_add_names_before_they_are_checked(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for registry, name in ((PRESETS, "lab-tiny"), (OBJECTIVES, "lab")):
        monkeypatch.setitem(registry, name, None)  # what the module puts there is removed at the end
    (tmp_path / "lab_names.py").write_text(
        "from pretrain.config.presets import PRESETS\n"
        "from pretrain.kinds.objectives import OBJECTIVES\n"
        "PRESETS['lab-tiny'] = PRESETS['llama-tiny'] | {'max_seq_len': 77}\n"
        "OBJECTIVES['lab'] = OBJECTIVES['causal']\n"
    )
    config = load_config(write(BASE), ["extend=[lab_names]", "model={preset: lab-tiny}", "objective.kind=lab"])
    assert config.objective.kind == "lab"
    with pytest.raises(ConfigError, match=r"objective.kind: unknown name 'labb'; use lab, or add it by a module"):
        load_config(write(BASE), ["extend=[lab_names]", "objective.kind=labb"])


def test_rows_too_long_for_pretrained_weights_are_to_be_shorter():
    raw = load_config("quickstart", []).model_dump(by_alias=True)
    raw["init"]["from"] = "base"
    raw["batch"] |= {"seq_len": 4096, "global_tokens": 4096 * raw["batch"]["micro"]}
    with pytest.raises(ValueError, match=r"exceeds model\.max_seq_len=(\d+); use batch\.seq_len=\1\b(?! or)"):
        RunConfig.model_validate(raw)


def test_a_file_that_is_read_again_gives_a_tree_of_its_own_and_what_it_has_then(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("run: {names: [a]}")
    read_yaml(path).values["run"]["names"].append("b")
    assert read_yaml(path).values == {"run": {"names": ["a"]}}
    path.write_text("seed: 3")
    assert read_yaml(path).values == {"seed": 3}
