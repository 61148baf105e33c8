"""Choices of a run by the plan of its card: what the model is built with."""

import pytest
import torch

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.load import load_config
from pretrain.config.model import parse_model
from pretrain.config.presets import expand_preset
from pretrain.dist import World
from pretrain.model import build_model
from pretrain.plan.task import ParallelLayout, task_of
from pretrain.training.fitted import cluster_of, fit_engine, fit_loss

CPU = torch.device("cpu")
RECIPE = "configs/run/quickstart.yaml"


def test_a_known_card_is_the_cluster_of_a_run_and_an_unknown_one_none(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    cluster = cluster_of(World(0, 8, 0), torch.device("cuda"))
    assert (cluster.nodes, cluster.per_node, cluster.gpu.name) == (2, 4, "H200 SXM 141GB")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Abacus 3000")
    assert cluster_of(World(0, 8, 0), torch.device("cuda")) is None


def test_fp8_auto_is_off_on_a_cpu_and_says_so(caplog):
    config = load_config(RECIPE, ["engine.fp8=auto", "engine.precision=bf16"])
    with caplog.at_level("INFO"):
        assert fit_engine(config, cluster_of(World(0, 1, 0), CPU)).fp8 == "off"
    assert "engine.fp8=auto: off, by `pretrain plan`" in caplog.messages


@pytest.mark.parametrize(("chunk", "logits"), [("auto", 0), ("whole", 4 * 256 * 512)])
def test_the_head_holds_all_logits_of_a_micro_batch_where_that_is_asked_for(chunk, logits):
    values = [
        "model.vocab_size=512",
        f"engine.loss_chunk={chunk}",
        "batch={seq_len: 256, micro: 4, global_tokens: 4096}",
    ]
    config = load_config(RECIPE, values)
    model = build_model(parse_model(expand_preset({"preset": "llama-tiny", "vocab_size": 512})), PLAIN_ENGINE, CPU)
    fit_loss(model, task_of(config), ParallelLayout(config.engine, 4, 1), cluster_of(World(0, 1, 0), CPU))
    assert model.head.chunk_logits == logits
