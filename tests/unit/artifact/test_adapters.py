"""Checkpoints of adapters: merged when they are opened, exported for peft, refused beside other weights."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pretrain.artifact.average import average_checkpoints
from pretrain.artifact.lora import add_adapters, export_adapter, train_beside
from pretrain.artifact.model_path import open_source
from pretrain.artifact.open import open_artifact
from pretrain.artifact.source import MAGNITUDE_SUFFIX, AdaptedModel, is_adapter
from pretrain.artifact.transfer import export_model
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.state import TrainState
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.load import dump_config, load_config
from pretrain.dist import World
from pretrain.errors import CheckpointError, ConfigError
from pretrain.interop.tensors import parameter_shapes
from pretrain.model import build_model
from pretrain.model.build import fill_weights
from pretrain.types import Batch, Fragment
from tests.unit.artifact.runs import write_text_run, write_texts

TOKENS = torch.arange(3, 43).view(2, 20)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
"""Logits are of order 10: fp32 products in another order."""


class Trained:
    """The parameters of a model that are trained, as one rank's fragments."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def owned_fragments(self):
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield Fragment(name, 0, tuple(parameter.shape), {"weight": parameter.detach().reshape(-1)})

    def scalars(self):
        return {}


def draw(name: str, shape: torch.Size, base: AdaptedModel) -> torch.Tensor:
    """The base's weight, or noise that is no adapter's beginning: B is not zeros."""
    own = name.replace(".base_layer.", ".")
    if name.endswith(MAGNITUDE_SUFFIX):  # norms that were trained
        weight = base.read(name.removesuffix(MAGNITUDE_SUFFIX) + ".weight")
        return weight.norm(dim=1) * (1 + torch.rand(shape, generator=torch.Generator().manual_seed(1)))
    if is_adapter(name) or own not in base:
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) * 0.05
    return base.read(own)


def write_adapters(base: Path, folder: Path, **finetune: object) -> tuple[Path, torch.nn.Module]:
    """Writes what a LoRA run over `base` leaves; returns it, and the model with its adapters."""
    folder.mkdir()
    text = (base / "config.yaml").read_text().replace(f"name: {base.name}", f"name: {folder.name}")
    values = {"kind": "lora", "rank": 3, **finetune}
    (folder / "config.yaml").write_text(text)
    config = load_config(folder / "config.yaml", [f"finetune={json.dumps(values)}", f"init.from={base}"])
    (folder / "config.yaml").write_text(dump_config(config))
    shutil.copy(base / "tokenizer.json", folder)
    source = AdaptedModel(open_source(base), config.model, parameter_shapes(config.model))
    model = build_model(config.model, PLAIN_ENGINE, torch.device("cpu"))
    add_adapters(model, config.finetune)
    train_beside(model, source.anew, config.finetune.also)
    fill_weights(model, partial(draw, base=source))
    state = TrainState(step=4, base_hash=source.fingerprint())
    CheckpointManager(folder / "checkpoints", 2, World(0, 1, 0), {}).save(Trained(model), state)
    return folder, model.eval()


@pytest.fixture(params=["llama-tiny", "gpt2-tiny"])
def base(request, tmp_path):
    data = write_texts(tmp_path / "data", ["To be, or not to be, that is the question.", "All the world's a stage."])
    return write_text_run(tmp_path / "base", data, request.param, "causal")


def logits(model, tokens=TOKENS):
    with torch.no_grad():
        return model(Batch(tokens, tokens)).logits_BTV[..., : model.vocab_size]


@pytest.mark.parametrize("dora", [False, True])
def test_a_run_of_adapters_is_opened_and_exported_with_them_merged(base, tmp_path, dora):
    run, trained = write_adapters(base, tmp_path / "tuned", also=["*.norm.weight"], dora=dora)
    size = sum(path.stat().st_size for path in (run / "checkpoints/step-00000004").glob("*.safetensors"))
    whole = sum(path.stat().st_size for path in (base / "checkpoints/step-00000001").glob("*.safetensors"))
    assert size < whole / 4
    merged = open_artifact(run).model
    torch.testing.assert_close(logits(merged), logits(trained), **TOLERANCE)
    assert (logits(merged) - logits(open_artifact(base).model)).abs().max() > 0.1
    export_model(run, tmp_path / "released")
    card = (tmp_path / "released" / "README.md").read_text()
    sections = card[card.index("```yaml\n") + 8 :]
    assert "finetune:" in sections and "\nguard:" not in sections and "\nprofile:" not in sections
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "released").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, logits(merged), **TOLERANCE)


@pytest.mark.parametrize("dora", [False, True])
def test_peft_reads_exported_adapters_beside_the_exported_model(base, tmp_path, dora):
    from peft import PeftModel

    run, trained = write_adapters(base, tmp_path / "tuned", dora=dora)
    exported = export_adapter(run, tmp_path / "adapter")
    assert exported.rank == 3
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] is None  # of a run peft could load nothing
    card = (tmp_path / "adapter" / "README.md").read_text()
    step = "base/checkpoints/step-00000001"
    assert f"Adapters of an export of `{step}`: `pretrain export {step} base-exported --family " in card
    assert '.from_pretrained("base-exported")' in card
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter")("To be").input_ids
    export_model(base, tmp_path / "released")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "released")
    tuned = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(tuned(TOKENS).logits, logits(trained), **TOLERANCE)
    # Merged by peft and by the export, the same weights.
    export_model(run, tmp_path / "merged")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, weight in tuned.merge_and_unload().state_dict().items():
        torch.testing.assert_close(weight, ours[name], rtol=1e-5, atol=1e-6)


def test_what_peft_has_no_place_for_is_refused(base, tmp_path):
    run, _ = write_adapters(base, tmp_path / "tuned", also=["embedding.weight"])
    with pytest.raises(
        ConfigError, match=r"holds adapters alone, and the run has embedding\.weight too; leave --adapter"
    ):
        export_adapter(run, tmp_path / "adapter")
    with pytest.raises(ConfigError, match="has no adapters; leave --adapter out"):
        export_adapter(base, tmp_path / "adapter")
    with pytest.raises(ConfigError, match="cannot average LoRA adapters; make models of them first"):
        average_checkpoints([run, run], None, tmp_path / "mean")


def test_adapters_are_not_merged_into_other_weights_or_none(base, tmp_path):
    run, _ = write_adapters(base, tmp_path / "tuned")
    kept = base.rename(tmp_path / "kept")
    with pytest.raises(
        CheckpointError,
        match=r"adapters belong to .*base, .*its place, in .*config.yaml as init.from or by pretrain train .*NEW/PLACE",
    ):
        open_source(run)
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace(str(base), str(kept)))
    open_source(run)
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace(str(kept), str(base)))
    other = write_text_run(tmp_path / "base", tmp_path / "data", _preset(kept), "causal", steps=[2])
    assert other == base
    with pytest.raises(CheckpointError, match=r"adapters were trained beside other weights than those of .*base"):
        open_source(run)


def test_the_base_of_adapters_is_found_above_or_beside_a_run_that_is_named_from_elsewhere(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_adapters(Path("base"), tmp_path / "tuned")
    (tmp_path / "away").mkdir()
    monkeypatch.chdir("away")
    assert open_source(Path("../tuned")).merged.base.source.run.path == base
    nested = tmp_path / "copies" / "runs"
    nested.mkdir(parents=True)
    shutil.copytree(tmp_path / "tuned", nested / "tuned")
    assert open_source(nested / "tuned").merged.base.source.run.path == base
    base.rename(nested / "base")  # beside the run
    assert open_source(nested / "tuned").merged.base.source.run.path == nested / "base"
    file = nested / "tuned" / "config.yaml"
    file.write_text(file.read_text().replace("from: base", "from: /gone/runs/base/checkpoints/step-00000001"))
    assert open_source(nested / "tuned").merged.base.source.run.path == nested / "base"
    other = write_text_run(tmp_path / "base", tmp_path / "data", _preset(nested / "base"), "causal", steps=[2])
    assert other == base
    with pytest.raises(
        CheckpointError, match=r"beside other weights than those of .*base.*write its place into .*yaml"
    ):
        open_source(tmp_path / "tuned")


def _preset(run: Path) -> str:
    return load_config(run / "config.yaml").model.preset
