"""Vectors of texts, by a model whose head makes them (`pretrain embed`)."""

from collections.abc import Iterable

import numpy as np
import torch
from torch.nn.functional import normalize

from pretrain.errors import ConfigError
from pretrain.generation.constraints import Codec
from pretrain.generation.incremental_decoder import check_prompt
from pretrain.model import LanguageModel
from pretrain.model.parts.head import VectorHead
from pretrain.types import Batch


@torch.no_grad()
def embed_texts(
    model: LanguageModel,
    codec: Codec,
    texts: Iterable[str],
    *,
    prefix: str = "",
    width: int | None = None,
    batch_size: int = 32,
) -> np.ndarray:
    """Returns a vector of length 1 for each text, fp32 [texts, D].

    Args:
        model: In eval mode.
        codec: Tokenizer of the model.
        texts: Texts; of those longer than the model's rows the beginning is read, and their last
            token.
        prefix: Put before each text, as the data of the training have it.
        width: First dimensions that are kept, before the length is made 1. None: all.
        batch_size: Texts that are read at once; those of similar length together.

    Raises:
        ConfigError: The model makes no vectors, or none so wide, or a text has no tokens.
    """
    head = model.head
    if not isinstance(head, VectorHead):
        text = "the model makes no vectors: its head is another"
        raise ConfigError(text, fix="use one with head.kind=vectors")
    if width is not None and width > head.width:
        raise ConfigError(
            f"--width {width} is more than the {head.width} of the model's vectors",
            fix="use a smaller one",
        )
    rows = []
    for number, text in enumerate(texts, start=1):
        ids, _ = codec.encode_placed(prefix + text)
        if len(ids) > model.max_seq_len:
            end = [id for id in ids[-1:] if id in codec.eos_ids]
            ids = ids[: model.max_seq_len - len(end)] + end
        check_prompt(model, ids, where=f"text {number}", name="text")
        rows.append(ids)
    vectors = np.empty((len(rows), width or head.width), dtype=np.float32)
    device = model.embedding.weight.device
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        tokens = [torch.tensor(rows[row]) for row in places]
        tokens_BT = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        lengths_B = torch.tensor([len(one) for one in tokens], dtype=torch.int32)
        batch = Batch(tokens_BT, tokens_BT, lengths_B=lengths_B).to(device)
        hidden_BD = model(batch, logits=False).hidden_BTD[:, 0, :width]
        vectors[places] = normalize(hidden_BD.float(), dim=1).cpu().numpy()
    return vectors
