"""`pretrain inspect`: the facts of checkpoints and runs, the proof of their bytes, and the list of their parameters."""

import json
import math
import os
from pathlib import Path

import pytest

from pretrain.checkpoint.format import MANIFEST, load_manifest
from pretrain.config.load import dump_config, load_config
from pretrain.errors import CheckpointError, ConfigError
from pretrain.inspect import describe
from pretrain.inspect.describe import inspect, print_facts
from pretrain.inspect.tensor_list import print_tensors
from pretrain.run.lease import Lease
from pretrain.utils.io import make_dir, write_json
from pretrain_launch.runs import read_run
from tests.unit.checkpoint.stand_in import save


def shown(capsys, path, **options):
    """What is printed about a path, as JSON."""
    inspect(path, as_json=True, **options)
    return json.loads(capsys.readouterr().out)


def make_run(folder: Path, *steps: int) -> Path:
    """A run folder that has only a record and checkpoints."""
    attempt = {"number": 1, "started": "now", "versions": {"torch": "2"}, "reason": "done"}
    write_json(make_dir(folder) / "run.json", {"id": "1", "name": "run", "created": "now", "attempts": [attempt]})
    save(folder / "checkpoints", *steps)
    return folder


def flip(file: Path, place: int) -> None:
    """Changes one bit."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_a_checkpoint_tells_where_it_stands_and_what_wrote_it(tmp_path, capsys):
    (path,) = save(tmp_path, 7)
    facts = shown(capsys, path)
    assert (facts["kind"], facts["step"], facts["tokens"], facts["position"]) == ("checkpoint", 7, 70, 21)
    assert (facts["data_hash"], facts["tokenizer_hash"]) == ("data", "tokenizer")
    assert (facts["parameters"], facts["moments"]) == (17, ["exp_avg", "exp_avg_sq"])
    assert facts["files"] == 1
    assert facts["bytes"] == (path / "rank-00000.safetensors").stat().st_size
    assert facts["written_by"]["world_size"] == 1
    assert facts["saved"].startswith("20")
    keys = list(facts)
    assert keys.index("step") < keys.index("position") < keys.index("data_hash") < keys.index("saved")


def test_the_best_checkpoint_of_a_run_goes_by_name(tmp_path, capsys):
    run = make_run(tmp_path / "run", 7, 8)
    with pytest.raises(CheckpointError, match="this run marks no best checkpoint"):
        inspect(run / "best")
    write_json(run / "checkpoints/best.json", {"metric": "val_loss", "value": 2.0, "step": 7})
    facts = shown(capsys, run / "best", verify=True)
    assert (facts["kind"], facts["step"]) == ("checkpoint", 7)
    assert facts["verified"] == "every byte of 1 checkpoint is as it was written"


def test_the_targets_of_a_classifier_are_labels(tmp_path, capsys):
    run = make_run(tmp_path / "run", 7)
    config = load_config("vit_digits", [f"run.dir={tmp_path}", "run.name=run"])
    (run / "config.yaml").write_text(dump_config(config))
    facts = shown(capsys, run / "checkpoints/step-00000007")
    assert facts["labels"] == 70 and "tokens" not in facts


def test_a_hash_is_cut_in_the_table_and_whole_in_json(capsys):
    facts = {"written_by": {"world_size": 1, "config": "0123456789abcdef" * 4}}
    print_facts(facts, as_json=False)
    assert capsys.readouterr().out.split() == ["written_by", "world_size", "1,", "config", "0123456789ab"]
    print_facts(facts, as_json=True)
    assert json.loads(capsys.readouterr().out) == facts


def test_a_run_tells_of_its_newest_whole_checkpoint_and_names_what_is_damaged(tmp_path, capsys):
    run = make_run(tmp_path / "run", 1, 2)
    (run / "checkpoints/step-00000002/rank-00000.safetensors").write_bytes(b"")
    (run / "checkpoints/step-00000003.bad-damaged").mkdir()
    facts = shown(capsys, run)
    assert facts["checkpoints"] == ["step-00000001", "step-00000002"]
    assert (facts["newest"]["step"], facts["newest"]["tokens"]) == (1, 10)
    assert facts["damaged"] == {"step-00000002": "missing, or not of its size"}
    assert facts["set_aside"] == ["step-00000003.bad-damaged"]
    assert facts["model"] == "not known: config.yaml is missing or damaged"


def test_a_run_with_experts_tells_their_number_choice_balance_and_active_parameters(tmp_path, capsys):
    run = make_run(tmp_path / "run", 1)
    experts = "{count: 8, top_k: 2, width: 16, shared: 1, balance: bias}"
    model = f"{{preset: llama-tiny, vocab_size: 64, decoder: {{layers: 2, experts: {experts}}}}}"
    rest = "run: {name: run}\ndata: {path: d}\nbatch: {global_tokens: 64, seq_len: 16, micro: 4}\ntrain: {steps: 9}\n"
    rest += "optim: {lr: 1e-3, schedule: {kind: constant}}\nengine: {kind: single, zero_stage: 0, precision: fp32}\n"
    (run / "config.yaml").write_text(f"{rest}model: {model}\n")
    facts = shown(capsys, run)
    said = "8 experts a layer of which a token passes 2 and 1 shared one, balanced by a bias;"
    assert said in facts["model"], facts["model"]
    width = load_config(run / "config.yaml").model.decoder.width
    assert facts["parameters"] - facts["active_parameters"] == 2 * (8 - 2) * 3 * 16 * width


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_run_tells_how_its_last_attempt_is(tmp_path, capsys, is_alive):
    run = make_run(tmp_path / "run", 1)
    (run / "audit.jsonl").write_text('{"step":3}\n{"step":4}\n{"st')
    record = json.loads((run / "run.json").read_text())
    record["attempts"][0] |= {"reason": "no space left", "exit_code": 74}
    write_json(run / "run.json", record)
    facts = shown(capsys, run)
    assert (facts["last_attempt"], facts["exit_code"], facts["step"]) == ("no space left", 74, 4)
    # A full disk took the row of the metrics, and no more of the ledger: `launch status` says the same.
    (run / "metrics.jsonl").write_text('{"step":6,"loss":1.0}\n')
    assert shown(capsys, run)["step"] == read_run(run).step == 6
    record["attempts"].append({"number": 2, "started": "now"})
    write_json(run / "run.json", record)
    lease = Lease(run / "lease")
    try:
        if not is_alive:
            lease.release()
        facts = shown(capsys, run)
    finally:
        lease.release()
    alive = f"running: process {os.getpid()} on "
    assert facts["last_attempt"].startswith(alive if is_alive else "lost: killed, node lost, or disk full")
    assert "exit_code" not in facts


def test_a_checkpoint_of_a_run_whose_manifest_is_gone_is_named_and_so_is_one_that_the_run_went_back_behind(
    tmp_path, capsys
):
    run = make_run(tmp_path / "run", 1, 2)
    (run / "checkpoints/step-00000002" / MANIFEST).unlink()
    (run / "checkpoints/step-00000003.rolled-back").mkdir()
    facts = shown(capsys, run)
    assert facts["newest"]["step"] == 1
    assert facts["damaged"] == {"step-00000002": "not a checkpoint (no manifest.json)"}
    assert facts["set_aside"] == ["step-00000003.rolled-back"]
    with pytest.raises(CheckpointError, match=r"1 of 2 checkpoints damaged: manifest\.json: not a .*step-00000001"):
        inspect(run, verify=True)


def test_verifying_says_that_every_byte_is_there(tmp_path, capsys):
    run = make_run(tmp_path / "run", 1, 2)
    assert shown(capsys, run, verify=True)["verified"] == ("every byte of 2 checkpoints is as it was written")
    path = run / "checkpoints/step-00000001"
    assert "1 checkpoint is" in shown(capsys, path, verify=True)["verified"]


def test_verifying_names_every_bad_file_and_chunk_and_a_checkpoint_to_use(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pretrain.utils.io.CRC_CHUNK_BYTES", 64)
    run = make_run(tmp_path / "run", 1, 2)
    bad = run / "checkpoints/step-00000002"
    for place in (0, 70, 200):
        flip(bad / "rank-00000.safetensors", place)
    message = r"step-00000002: 1 of 2 checkpoints damaged: rank-00000.*chunk 0 .*, and 2 more; use .*step-00000001"
    with pytest.raises(CheckpointError, match=message):
        inspect(run, verify=True, as_json=True)
    problems = json.loads(capsys.readouterr().out)["damaged"][str(bad)]
    assert problems == [
        f"rank-00000.safetensors: CRC32 of chunk {number} (at byte {64 * number}) does not match"
        for number in (0, 1, 3)
    ]
    with pytest.raises(CheckpointError, match=r"damaged: rank-00000.*and 2 more; use another checkpoint"):
        inspect(bad, verify=True)
    assert "chunk 3" in capsys.readouterr().out


@pytest.mark.parametrize("at", [1, 2])
def test_verifying_a_run_beside_its_training_leaves_out_what_retention_removed(tmp_path, capsys, monkeypatch, at):
    run = make_run(tmp_path / "run", 1, 2)
    read, names = describe.find_damage, []

    def read_beside_the_run(path, record):
        names.append(path.parent.name)
        if len(names) == at:
            save(run / "checkpoints", 3, *([4] if at == 1 else []))
        return read(path, record)

    monkeypatch.setattr(describe, "find_damage", read_beside_the_run)
    facts = shown(capsys, run, verify=True)
    assert facts["verified"] == "every byte of 2 checkpoints is as it was written"
    assert facts["newest"]["step"] == (4 if at == 1 else 3)
    assert "damaged" not in facts


def test_a_damaged_manifest_is_damage(tmp_path):
    (path,) = save(tmp_path, 1)
    flip(path / MANIFEST, 40)
    for is_verified in (False, True):
        with pytest.raises(CheckpointError, match="the manifest is damaged"):
            inspect(path, verify=is_verified)


def test_a_missing_file_is_seen_without_reading(tmp_path):
    (path,) = save(tmp_path, 1)
    (path / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors: missing, or not of its size; use another"):
        inspect(path)


def test_what_has_no_checksums_is_not_verified(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="it has no checksums to verify; give a run, a checkpoint or a model"):
        inspect(tmp_path, verify=True)
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(ConfigError, match="a shard folder has its own proof; run `pretrain data verify"):
        inspect(tmp_path, verify=True)


def test_a_run_without_a_checkpoint_has_nothing_to_verify(tmp_path):
    with pytest.raises(CheckpointError, match="this run has no checkpoint; check the path"):
        inspect(make_run(tmp_path / "run"), verify=True)


def test_parameters_are_listed_with_what_their_values_are_like(tmp_path, capsys):
    (path,) = save(tmp_path, 3)
    listed = shown(capsys, path, tensors=True)["tensors"]
    assert listed == [
        {"name": name, "shape": shape, "dtype": "fp32"} for name, shape in load_manifest(path).shapes.items()
    ]
    embed, norm = shown(capsys, path, stats=True)["tensors"]
    assert embed == {
        "name": "embed", "shape": [3, 4], "dtype": "fp32", "norm": pytest.approx(3 * math.sqrt(12), rel=1e-12),
        "largest": 3.0, "non_finite": 0,
    }  # fmt: skip
    assert norm["norm"] == pytest.approx(3 * math.sqrt(5), rel=1e-12)


def test_a_parameter_of_a_hostile_name_is_listed_with_its_characters_escaped(capsys):
    print_tensors([{"name": "\x1b]0;owned\x07[/red]w", "shape": [2], "dtype": "fp32"}])
    assert r"\x1b]0;owned\x07[/red]w" in capsys.readouterr().out


def test_a_listed_parameter_is_a_line_that_a_pipe_can_read(tmp_path, capsys):
    (path,) = save(tmp_path, 3)
    inspect(path, stats=True)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("embed")]
    assert line.split() == ["embed", "3", "x", "4", "12", "fp32", "10.392", "3", "0"]
