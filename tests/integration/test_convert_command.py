"""`pretrain prepare --from`: tokens of another system become shards, and say that they are the same tokens."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models

from tests.helpers.cli import run_warm


@pytest.fixture
def end(tmp_path):
    """Writes a tokenizer of the words w1 to w89; returns its end-of-document token."""
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(1, 90)}, unk_token="w1"))
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tokenizer.token_to_id("<|endoftext|>")


def test_nanogpt_tokens_become_shards_with_the_hash_of_what_they_were(tmp_path, end):
    rng = np.random.default_rng(0)
    for name, count in (("train", 40), ("val", 4)):
        documents = [np.append(rng.integers(1, 89, rng.integers(3, 60)), end) for _ in range(count)]
        np.concatenate(documents).astype("<u2").tofile(tmp_path / f"{name}.bin")
    words = ["prepare", "--from", "nanogpt", "--input", "train.bin", "--input", "val.bin", "--output", "shards"]
    result = run_warm(*words, "--tokenizer", "tokenizer.json", "--processes", "1", cwd=tmp_path)
    assert result.code == 0, result.stderr
    assert "sha256 of all tokens, before and after: " in result.stdout
    assert "40 documents" in result.stdout or "44 documents" in result.stdout
    verified = run_warm("data", "verify", "shards", "--seq-len", "32", cwd=tmp_path)
    assert verified.code == 0, verified.stderr
    assert verified.stdout.rstrip().endswith("exactly once: yes")


def test_without_a_tokenizer_it_is_refused(tmp_path):
    result = run_warm("prepare", "--from", "nanogpt", "--input", "x.bin", "--output", "o", cwd=tmp_path)
    assert result.code == 64
    assert "--from needs --input, --output and --tokenizer" in result.stderr


def test_the_remedy_for_tokens_of_32_bits_can_be_followed(tmp_path, end):
    np.array([*range(1, 80), end] * 2, "<u4").tofile(tmp_path / "train.bin")
    words = ["prepare", "--from", "nanogpt", "--input", "train.bin", "--output", "o", "--tokenizer", "tokenizer.json"]
    refused = run_warm(*words, "--split", "hash:0", cwd=tmp_path)
    assert refused.code != 0
    assert "give --dtype uint32" in " ".join(refused.stderr.split())
    result = run_warm(*words, "--split", "hash:0", "--dtype", "uint32", "--processes", "1", cwd=tmp_path)
    assert result.code == 0, result.stderr
    assert "160 training tokens, 2 documents" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--from", "nanogpt", "--vocab-size", "300"), "--vocab-size does not go with --from: leave it out"),
        (("--from", "nanogpt", "--part", "2/4"), "--part does not go with --from: leave it out"),
        (("--dtype", "uint32"), "--dtype goes with --from: leave it out"),
    ],
)
def test_options_of_another_source_are_refused(tmp_path, words, message):
    result = run_warm("prepare", "--input", "x.bin", "--output", "o", *words, cwd=tmp_path)
    assert result.code == 64
    assert message in " ".join(result.stderr.split())
