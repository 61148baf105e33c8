"""Runs that generate texts and draw attention train the same as runs that do not, bit for bit, whatever the shape of
the model and however its weights lie on the ranks; and what they show does not depend on that."""

import numpy as np
import pytest
from PIL import Image

from pretrain.run.folder import RunDir
from pretrain.tracking.audit import compare, read_audit
from pretrain.utils.jsonl import read_rows
from tests.helpers import two_stacks
from tests.helpers.runs import RunMaker

CONFIG = (
    two_stacks.CONFIG
    + """batch: {{global_tokens: 288, seq_len: 48, micro: 3}}
optim: {{lr: 1e-2, schedule: {{warmup_steps: 2}}}}
train: {{steps: 6}}
eval: {{every_steps: 3}}
engine: {{kind: single, zero_stage: 0, precision: fp32, device: cpu}}
tracking: {{log_every_steps: 3, norms_every_steps: 0, wandb: off}}
"""
)
PROMPTS = ["alpha <extra_id_0> gamma", "beta", ""]
TEXTS = f"tracking.samples={{prompts: {PROMPTS}, max_tokens: 12, temperature: 1.0}}"
PICTURES = 'tracking.attention={text: "alpha <extra_id_0> delta", target: "beta", every_evals: 2}'
OBJECTIVE = "span: {density: 0.15, mean_length: 3.0}"
SHAPES = {
    "encoder-decoder": [TEXTS, PICTURES],
    "decoder": ["model.encoder=null", f"objective={{kind: causal, {OBJECTIVE}}}", TEXTS,
                "tracking.attention={text: alpha beta, every_evals: 2}"],
    "encoder": ["model.decoder=null", f"objective={{kind: masked, {OBJECTIVE}}}",
                "tracking.attention={text: 'alpha [MASK] beta', every_evals: 2}"],
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> RunMaker:
    """Runs over a vocabulary with sentinels and a mask."""
    output = two_stacks.prepare_words(tmp_path_factory, ["[MASK]"])
    return RunMaker(tmp_path_factory.mktemp("runs"), output, CONFIG)


def complete(runs: RunMaker, name: str, *overrides: str, ranks: int = 1) -> RunDir:
    """Runs to the end."""
    runs.train(name, *overrides, ranks=ranks)
    return runs.folder(name)


def check_shown(shown: RunDir, bare: RunDir, *, has_texts: bool) -> None:
    """A run has its texts and its picture, and the ledger of one that shows nothing."""
    assert compare(bare.audit, shown.audit) is None
    assert len(read_audit(shown.audit)) == 6
    assert [path.name for path in (shown.path / "attention").iterdir()] == ["step-00000006.png"]
    assert pixels(shown).std() > 10
    assert not (bare.path / "attention").exists() and not (bare.path / "samples.jsonl").exists()
    if has_texts:
        rows = read_rows(shown.path / "samples.jsonl")
        assert [row["step"] for row in rows] == [3, 6]
        assert all([sample["prompt"] for sample in row["samples"]] == PROMPTS for row in rows)
        assert all(any(sample["text"] for sample in row["samples"]) for row in rows)


def pixels(run: RunDir) -> np.ndarray:
    """The picture of step 6, grey."""
    return np.asarray(Image.open(run.path / "attention" / "step-00000006.png").convert("L")).astype(int)


@pytest.mark.long
@pytest.mark.parametrize(
    "shape", ["encoder-decoder", *(pytest.param(s, marks=pytest.mark.long) for s in list(SHAPES)[1:])]
)
def test_texts_and_pictures_change_nothing_of_what_is_trained(runs, shape):
    overrides = SHAPES[shape]
    kept = [item for item in overrides if not item.startswith("tracking.")]
    bare = complete(runs, f"{shape}-bare", *kept)
    shown = complete(runs, f"{shape}-shown", *overrides)
    check_shown(shown, bare, has_texts=TEXTS in overrides)


@pytest.mark.long
def test_every_zero_stage_shows_the_same_and_trains_as_without(runs):
    found = {}
    for stage in (0, 2, 3):
        engine = f"engine={{kind: deepspeed, zero_stage: {stage}, precision: fp32, device: cpu}}"
        bare = complete(runs, f"bare-{stage}", engine, ranks=2)
        found[stage] = shown = complete(runs, f"shown-{stage}", engine, TEXTS, PICTURES, ranks=2)
        check_shown(shown, bare, has_texts=True)
    for stage in (2, 3):
        assert (found[stage].path / "samples.jsonl").read_text() == (found[0].path / "samples.jsonl").read_text()
        # Weights that differ in their last digits may turn a pixel by one shade of 256.
        assert np.abs(pixels(found[stage]) - pixels(found[0])).max() <= 1


@pytest.mark.long
def test_a_prompt_that_does_not_fit_ends_all_ranks_before_the_first_step(runs):
    engine = "engine={kind: deepspeed, zero_stage: 3, precision: fp32, device: cpu}"
    picture = f"tracking.attention={{text: '{'alpha ' * 50}', target: beta}}"
    said = runs.train("long", engine, picture, expect=64)
    assert "tracking.attention.text: the prompt has 52 tokens, model.max_seq_len is 48" in said
