"""ONNX graphs, traced from the exported model of transformers by `torch.onnx`.

The graph has the scores of whole rows, [batch, length, vocabulary], from `input_ids` and
`attention_mask`; sizes are free, and there is no cache. Weights are beside it, in model.onnx.data.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from pretrain.config.model import ModelConfig
from pretrain.errors import ConfigError
from pretrain.interop import FAMILIES
from pretrain.interop.runtimes.runtime import Exported, Rules, Runtime

FILE = "model.onnx"
_ONE_STACK: Rules = {
    "head.kind": ("lm",),
    "decoder.rope_scaling.kind": (None, "linear", "llama3", "yarn"),
}
# Experts are chosen by operations that torch.onnx does not translate.
_EXPERTS = {"mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3"}
_OTHERS = {"t5", "mt5", "umt5", "marian", "bart", "vit", "deit", "vit_mae", "vision-encoder-decoder"}
_ENCODERS = {"bert", "roberta", "xlm-roberta", "distilbert", "electra", "modernbert"}
_RULES = dict.fromkeys(FAMILIES.keys() - _EXPERTS - _OTHERS - _ENCODERS, _ONE_STACK)


class _Scores(nn.Module):
    """The scores alone of a model of transformers, without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Returns [B, T, V]."""
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        scores: Tensor = found.logits
        return scores


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out what torch.onnx prints and warns of: the result is compared."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _check(exported: Exported) -> None:
    """Nothing depends on several keys."""


def _convert(exported: Exported, folder: Path) -> None:
    import transformers

    options = {"dtype": torch.float32, "attn_implementation": "eager", "local_files_only": True}
    batch = torch.export.Dim("batch")
    # Not 0 or 1, which tracing would take for constants.
    tokens = torch.ones(2, 3, dtype=torch.int64)
    inputs = {"input_ids": tokens, "attention_mask": tokens.clone()}  # one tensor were one input
    longest = exported.config.max_seq_len
    length = torch.export.Dim("length", max=longest)
    sizes = {name: {0: batch, 1: length} for name in inputs}
    try:
        with _quiet(), torch.no_grad():
            kind = transformers.AutoModelForCausalLM
            model = kind.from_pretrained(exported.folder, **options).eval()
            torch.onnx.export(
                _Scores(model), (), str(folder / FILE), kwargs=inputs, dynamic_shapes=sizes,
                input_names=list(inputs), output_names=["logits"], dynamo=True, verbose=False,
            )  # fmt: skip
    except torch.onnx.errors.OnnxExporterError as error:
        reason = str(error).splitlines()[0]
        what = f"torch.onnx cannot translate a {exported.model_type}: {reason}"
        raise ConfigError(what, where="model", fix="export to hf") from None


def _scores(folder: Path, config: ModelConfig, tokens_BT: Tensor) -> Tensor:
    """Returns the logits of ONNX Runtime."""
    onnxruntime = import_module("onnxruntime")
    session = onnxruntime.InferenceSession(str(folder / FILE), providers=["CPUExecutionProvider"])
    values = {"input_ids": tokens_BT.numpy(), "attention_mask": np.ones(tokens_BT.shape, np.int64)}
    return torch.from_numpy(session.run(None, values)[0])


ONNX_RUNTIME = Runtime(
    name="ONNX Runtime",
    packages=("onnx", "onnxscript", "onnxruntime"),
    dtypes=("fp32",),
    families=_RULES,
    check=_check,
    convert=_convert,
    runner="onnxruntime",
    scores=_scores,
    use=lambda config: f'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{FILE}")',
)
