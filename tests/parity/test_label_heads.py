"""Heads over labels give the scores of transformers' models for classification, of texts and of tokens."""

import pytest
import torch
import transformers

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.model import Transformer, build_model
from pretrain.types import Batch
from tests.helpers.lent import lend, quiet_transformers

NAMES = ["a", "b", "c"]
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
"""fp32 through two layers, summed in other orders."""

BERT = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 32, "num_labels": 3,
}  # fmt: skip
MODERNBERT = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 32, "num_labels": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip


def labelled(theirs, base, folder, head: HeadConfig, extra: dict[str, str]) -> Transformer:
    """Our encoder with the weights of their base model, and of their head under our names."""
    with quiet_transformers():
        lent = lend(base, folder)
    values = lent.release.config.model_dump()
    values |= {"head": head.model_dump(), "tied_embeddings": False}
    model = build_model(ModelConfig.model_validate(values), PLAIN_ENGINE, torch.device("cpu"))
    found = dict(lent.ours.named_parameters()) | {ours: theirs.get_parameter(name) for ours, name in extra.items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(found[name])
    return model.eval()


def padded_batch() -> tuple[Batch, dict[str, torch.Tensor]]:
    tokens = torch.randint(3, 99, (3, 11), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([11, 4, 7], dtype=torch.int32)
    mask = (torch.arange(11) < lengths[:, None]).long()
    return Batch(tokens, tokens, lengths_B=lengths), {"input_ids": tokens, "attention_mask": mask}


def compare_scores(ours: Transformer, theirs: torch.nn.Module, kind: str) -> None:
    """A text's scores are at its first token, a token's at the token; padding has none."""
    batch, inputs = padded_batch()
    scores, expected = ours(batch).logits_BTV, theirs(**inputs).logits
    if kind == "Sequence":
        torch.testing.assert_close(scores[:, 0], expected, **TOLERANCE)
    else:
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(scores[real], expected[real], **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Sequence", "Token"])
def test_bert(tmp_path, kind):
    torch.manual_seed(0)
    config = transformers.BertConfig(**BERT)
    theirs = getattr(transformers, f"BertFor{kind}Classification")(config).eval()
    torch.nn.init.normal_(theirs.classifier.bias)
    head = HeadConfig(kind="labels", bias=True, labels=NAMES, dropout=0.1)
    extra = {"head.weight": "classifier.weight", "head.bias": "classifier.bias"}
    ours = labelled(theirs, theirs.bert, tmp_path, head, extra)
    assert (ours.pooler is not None) == (kind == "Sequence")
    compare_scores(ours, theirs, kind)


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["cls", "mean", None])
def test_modernbert(tmp_path, pooling):
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        **MODERNBERT, classifier_pooling=pooling or "cls", attn_implementation="eager"
    )
    kind = "Token" if pooling is None else "Sequence"
    theirs = getattr(transformers, f"ModernBertFor{kind}Classification")(config).eval()
    torch.nn.init.normal_(theirs.classifier.bias)
    torch.nn.init.normal_(theirs.head.norm.weight)
    head = HeadConfig(kind="labels", transform=True, bias=True, labels=NAMES, mean=pooling == "mean")
    extra = {"head.weight": "classifier.weight", "head.bias": "classifier.bias"}
    extra |= {"head.transform.weight": "head.dense.weight", "head.norm.weight": "head.norm.weight"}
    ours = labelled(theirs, theirs.model, tmp_path, head, extra)
    compare_scores(ours, theirs, kind)
