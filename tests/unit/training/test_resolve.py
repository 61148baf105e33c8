"""What a config leaves to the tokenizer of its data, and what its objective needs of it."""

import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pretrain.config.data import DataConfig
from pretrain.config.load import load_config
from pretrain.errors import ConfigError
from pretrain.resolve import build_context, context_of_run, fill_special, fit_config
from pretrain.shards.dataset import open_dataset
from tests.unit.report.data_folders import make_folder, make_texts

CONFIG = {
    "seed": 5,
    "run": {"name": "a"},
    "data": {"path": "data", "document_mask": False},
    "model": {"preset": "llama-tiny", "max_seq_len": 32},
    "batch": {"global_tokens": 64, "seq_len": 32, "micro": 2},
    "optim": {"lr": 1e-3},
    "train": {"steps": 500},
}


@pytest.fixture
def fitted(tmp_path, monkeypatch):
    """Loads a config over a folder and fits it."""
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "data", make_texts(5))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(CONFIG))
    dataset = open_dataset(DataConfig(path="data"))

    def fit(*overrides: str):
        return dataset, fit_config(load_config("a.yaml", overrides), dataset)

    return fit


def test_the_vocabulary_is_that_of_the_data_unless_the_config_says_more(fitted):
    dataset, config = fitted()
    assert config.model.vocab_size == dataset.index.vocab_size
    assert config.model.special_tokens.eos == dataset.index.eos_id
    assert fitted("model.vocab_size=100")[1].model.vocab_size == 100
    with pytest.raises(
        ConfigError, match=r"model.vocab_size=3 is smaller than the \d+ tokens of the shards; use model"
    ):
        fitted("model.vocab_size=3")


def test_special_tokens_that_a_config_names_stay(fitted):
    dataset, config = fitted("model.special_tokens.start=7")
    assert config.model.special_tokens.start == 7
    assert fill_special(config.model.special_tokens, dataset) == config.model.special_tokens


def test_an_objective_that_does_not_learn_from_the_data_is_refused(fitted):
    with pytest.raises(
        ConfigError, match=r"objective.kind=supervised learns from records, and the data are text; choose"
    ):
        fitted("objective.kind=supervised")


def test_rows_are_made_as_the_config_says(fitted):
    dataset, config = fitted()
    context = context_of_run(config, dataset)
    assert (context.seed, context.lengths, context.num_stacks, context.document_mask) == (5, config.lengths, 1, False)
    assert context.vocabulary.eos == dataset.index.eos_id and context.vocabulary.find_words is None
    masked = load_config("a.yaml", ["model.preset=bert-tiny", "objective={kind: masked, masked: {whole_words: true}}"])
    words = build_context(
        masked.objective,
        config.model.special_tokens,
        dataset,
        seed=1,
        lengths=masked.lengths,
        num_stacks=1,
        document_mask=True,
    )
    assert words.vocabulary.find_words is not None


@pytest.mark.parametrize(
    ("vocab_size", "new_in_data", "tied", "also"),
    [
        (300, False, False, []),
        (300, True, False, ["embedding.weight", "head.weight"]),  # rows for them are there, which nothing has trained
        (2, True, False, ["embedding.weight", "head.weight"]),
        (2, True, True, ["embedding.weight"]),
    ],
)
def test_tables_of_tokens_are_trained_where_the_data_have_new_ones(
    fitted, tmp_path, vocab_size, new_in_data, tied, also
):
    start = tmp_path / "start"
    start.mkdir()
    tokenizer = Tokenizer.from_file(str(tmp_path / "data/tokenizer.json"))
    names = [name for name, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    known = names[:-1] if new_in_data else names
    Tokenizer(WordLevel({name: number for number, name in enumerate(known)}, known[0])).save(
        str(start / "tokenizer.json")
    )
    model = f"model={{preset: llama-tiny, max_seq_len: 32, vocab_size: {vocab_size}, tied_embeddings: {tied}}}"
    for setting, expected in (("trained", also), ("frozen", [])):
        tuning = f"finetune={{kind: lora, new_tokens: {setting}}}"
        _, config = fitted(model.lower(), f"init.from={start}", tuning)
        assert config.finetune.also == expected
        assert fit_config(config, open_dataset(config.data)).finetune == config.finetune
