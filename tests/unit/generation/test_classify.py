"""Labels of texts and words: those of transformers' classifiers, in batches of any size."""

import io
import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pretrain.artifact import open_artifact
from pretrain.errors import ConfigError
from pretrain.generation.classify import LabelledText, LabelledWords, classify, run_classify
from tests.helpers.lent import quiet_transformers

LABELS = ["down", "flat", "up"]
TEXTS = ["the price rises", "it fell", "nothing changed at all today", ""]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "price", "ris", "##es", "it", "fell", "nothing", "today"]


@pytest.fixture(scope="module", params=["Sequence", "Token"])
def lent(request, tmp_path_factory):
    """A released classifier with random weights: ours, theirs and their tokenizer."""
    folder = tmp_path_factory.mktemp("lent")
    tokenizer = Tokenizer(models.WordPiece({piece: number for number, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    around = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    config = transformers.BertConfig(
        vocab_size=len(PIECES), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=16, initializer_range=0.5, id2label=dict(enumerate(LABELS)),
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = getattr(transformers, f"BertFor{request.param}Classification")(config).eval()
    with quiet_transformers():
        theirs.save_pretrained(folder)
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]"
        )
        fast.save_pretrained(folder)
    return request.param == "Token", open_artifact(folder), theirs, fast


@torch.no_grad()
def test_labels_and_probabilities_are_those_of_transformers(lent):
    of_words, ours, theirs, fast = lent
    for size in (1, 3):
        found = list(classify(ours.model, ours.codec, LABELS, TEXTS, of_words=of_words, batch_size=size))
        assert [one.text for one in found] == TEXTS
        for one in found:
            encoded = fast(one.text, return_tensors="pt")
            scores = theirs(**encoded).logits[0].softmax(dim=-1)
            if isinstance(one, LabelledText):
                assert one.probability == max(one.probabilities.values()) == one.probabilities[one.label]
                assert list(one.probabilities.values()) == pytest.approx(scores.tolist(), abs=1e-5)
                continue
            words = one.text.split()
            places = [encoded.word_to_tokens(number).start for number in range(len(words))]
            assert [word.word for word in one.words] == words
            assert [word.label for word in one.words] == [LABELS[int(scores[place].argmax())] for place in places]


def test_texts_are_written_a_line_each(lent):
    of_words, ours, _, _ = lent
    for as_json in (False, True):
        out = io.StringIO()
        texts = ["it fell\n", "the price"]
        run_classify(ours.model, ours.codec, LABELS, texts, out, of_words=of_words, as_json=as_json)
        lines = out.getvalue().splitlines()
        assert len(lines) == 2
        if as_json:
            assert json.loads(lines[0])["text"] == "it fell\n"
        elif of_words:
            assert [pair.rpartition("/")[0] for pair in lines[1].split()] == ["the", "price"]
        else:
            assert lines[0].split("\t")[2] == "it fell\\n"


def test_a_word_without_a_token_is_left_out(lent):
    _, ours, _, _ = lent
    (found,) = classify(ours.model, ours.codec, LABELS, ["the \u00ad price"], of_words=True)
    assert isinstance(found, LabelledWords)
    assert {"the", "price"} <= {word.word for word in found.words}


def test_texts_that_do_not_fit_are_refused_by_number(lent):
    _, ours, _, _ = lent
    with pytest.raises(ConfigError, match="text 2: the text has 22 tokens"):
        list(classify(ours.model, ours.codec, LABELS, ["it", "it " * 20]))
