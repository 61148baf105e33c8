"""`pretrain prepare --from`: tokens of another system become shards, and say that they are the same tokens."""

import numpy as np
from tokenizers import AddedToken, Tokenizer, models

from tests.helpers.cli import run_warm


def test_nanogpt_tokens_become_shards_with_the_hash_of_what_they_were(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(1, 90)}, unk_token="w1"))
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
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
