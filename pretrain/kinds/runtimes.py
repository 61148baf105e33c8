"""Programs that `pretrain export --to` writes for, by the name of their format. A new one: a line here."""

RUNTIMES = {
    "gguf": "pretrain.interop.runtimes.gguf_model:LLAMA_CPP",
    "onnx": "pretrain.interop.runtimes.onnx_graph:ONNX_RUNTIME",
    "ctranslate2": "pretrain.interop.runtimes.ctranslate2_model:CTRANSLATE2",
}
"""`"module:NAME"` of the record (`pretrain/interop/runtimes/runtime.py`), whose parts compute with torch."""
