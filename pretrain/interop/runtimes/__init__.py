"""Formats of other programs that run models, by their names for `pretrain export --to`."""

from pretrain.interop.runtimes.ctranslate2_model import CTRANSLATE2
from pretrain.interop.runtimes.gguf_model import LLAMA_CPP
from pretrain.interop.runtimes.onnx_graph import ONNX_RUNTIME
from pretrain.interop.runtimes.runtime import Exported, Runtime

RUNTIMES: dict[str, Runtime] = {"gguf": LLAMA_CPP, "onnx": ONNX_RUNTIME, "ctranslate2": CTRANSLATE2}

__all__ = ["RUNTIMES", "Exported", "Runtime"]
