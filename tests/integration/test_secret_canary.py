"""What secret variables of the environment hold is in no file that a run makes, and in nothing that it prints."""

from tests.helpers.refused import CONFIG, fill_folder

NAMES = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "DATABASE_PASSWORD", "MY_LAB_SECRET")


def test_secrets_of_the_environment_are_in_nothing_that_a_run_leaves(warm, corpus, tmp_path):
    canaries = {name: f"canary{number}" * 5 for number, name in enumerate(NAMES)}
    folder = fill_folder(tmp_path, CONFIG, corpus)
    printed = [warm("--debug", "train", "a.yaml", "tracking.wandb=offline", cwd=folder, **canaries)]
    assert printed[0].code == 0, printed[0].stderr
    assert list((folder / "runs/run").rglob("*.wandb")), "Weights & Biases has written no file to look into"
    printed += [
        warm("train", "a.yaml", f"run.name={canaries['HF_TOKEN']}/x", cwd=folder, **canaries),
        warm("inspect", "runs/run", "--json", cwd=folder, **canaries),
    ]
    texts = [text.encode() for result in printed for text in (result.stdout, result.stderr)]
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {name.split("/")[2] for name in files if name.startswith("runs/run/")} >= {
        "config.yaml", "run.json", "metrics.jsonl", "audit.jsonl", "checkpoints", "logs", "wandb",
    }  # fmt: skip
    found = [name for name, content in files.items() for canary in canaries.values() if canary.encode() in content]
    assert found == []
    assert not any(canary.encode() in text for text in texts for canary in canaries.values())
