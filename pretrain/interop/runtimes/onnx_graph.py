"""ONNX graphs, traced from the exported model of transformers by `torch.onnx`.

    decoder         model.onnx: scores of whole rows; model_with_past.onnx: of further tokens, from a cache
    two stacks      encoder_model.onnx; decoder_model.onnx; decoder_with_past_model.onnx
    encoder         model.onnx: scores, or hidden states without a head

Sizes are free, and a cache may be empty. Weights are beside a graph, in NAME.data; the graph with a cache has
those of the one before it. Names of inputs, outputs and files are those of optimum, and so are config.json and
generation_config.json, which say how a text begins and ends.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pretrain.config.model import ModelConfig
from pretrain.errors import ConfigError
from pretrain.families.config_json import CONFIG
from pretrain.interop.release_files import GENERATION
from pretrain.interop.runtimes.runtime import Exported, Rules, Runtime
from pretrain.utils.io import write_file

FILE = "model.onnx"
_CACHED = "model_with_past.onnx"
_ENCODER, _DECODER, _CACHED_DECODER = (f"{part}_model.onnx" for part in ("encoder", "decoder", "decoder_with_past"))
_ONE_STACK: Rules = {
    "head.kind": ("lm",),
    "decoder.rope_scaling.kind": (None, "linear", "llama3", "yarn"),
}
_BARE_OR_MASKED: Rules = {"head.kind": ("lm", "none")}
# No experts, which are chosen by operations that torch.onnx does not translate, and no states, whose caches are no
# keys and values.
_DECODERS = {"gpt2", "llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "olmo3", "smollm3", "phi", "phi3"}
_DECODERS |= {"starcoder2", "gemma", "gemma2", "gemma3_text", "gpt_neox", "stablelm", "falcon", "granite"}
_DECODERS |= {"cohere", "cohere2", "plbart", "mbart"}
_PAIRS = {"t5", "mt5", "umt5", "marian", "bart"}
_ENCODERS = {"bert", "roberta", "xlm-roberta", "distilbert", "electra", "modernbert"}
_RULES = (
    dict.fromkeys(_DECODERS, _ONE_STACK) | dict.fromkeys(_PAIRS, Rules()) | dict.fromkeys(_ENCODERS, _BARE_OR_MASKED)
)


class _Traced(nn.Module):
    """A model of transformers, or its encoder, with tensors alone as inputs and outputs."""

    def __init__(self, model: nn.Module, generates: bool) -> None:
        super().__init__()
        self.model = model
        self.generates = generates

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: list[tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns scores [B, T, V] or hidden states; with a cache [B, K, S, H] its keys and values, too."""
        from transformers import DynamicCache, EncoderDecoderCache
        from transformers.modeling_outputs import BaseModelOutput

        of_two = encoder_hidden_states is not None
        inputs: dict[str, Any] = {"decoder_input_ids" if of_two else "input_ids": input_ids}
        inputs["attention_mask"] = attention_mask
        if of_two:
            inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=encoder_hidden_states)
        if self.generates:
            inputs["use_cache"] = past_key_values is not None
        cache = DynamicCache()
        for number, pair in enumerate(past_key_values or ()):
            cache.update(*pair, number)
        if past_key_values is not None:
            # Keys and values of the source are made again: they need no input of their own.
            inputs["past_key_values"] = EncoderDecoderCache(cache, DynamicCache()) if of_two else cache
        output = self.model(**inputs)
        scores: Tensor = output.logits if "logits" in output else output.last_hidden_state
        if past_key_values is None:
            return (scores,)
        return (scores, *(values for layer in cache.layers for values in (layer.keys, layer.values)))


@dataclass(frozen=True, slots=True)
class _Graph:
    """A graph to trace: names, examples and free sizes of the inputs of `_Traced.forward`."""

    file: str
    traced: _Traced
    inputs: dict[str, Any]
    sizes: dict[str, Any]
    outputs: tuple[str, ...] = ("logits",)
    names: dict[str, str] = field(default_factory=dict)  # where they differ
    shares: bool = False  # weights of the graph before it

    def input_names(self) -> list[str]:
        """Returns a name for each tensor."""
        plain = [self.names.get(name, name) for name in self.inputs if name != "past_key_values"]
        return plain + _cache_names("past_key_values", len(self.inputs.get("past_key_values", ())))


def _cache_names(of: str, layers: int) -> list[str]:
    return [f"{of}.{number}.{kind}" for number in range(layers) for kind in ("key", "value")]


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


def _plan_graphs(model: Any, config: ModelConfig) -> list[_Graph]:
    """Returns the graphs of a model, each that shares weights after the one that has them."""
    batch = torch.export.Dim("batch")
    length = torch.export.Dim("length", max=config.max_seq_len)
    # Not 0 or 1, which tracing would take for constants.
    tokens = torch.ones(2, 3, dtype=torch.int64)
    whole = {"input_ids": tokens, "attention_mask": tokens.clone()}  # one tensor were one input
    sizes: dict[str, Any] = {name: {0: batch, 1: length} for name in whole}
    if config.shape == "encoder":
        scores = "logits" if config.head.record.scores_words else "last_hidden_state"
        return [_Graph(FILE, _Traced(model, False), whole, sizes, (scores,))]
    first = _Graph(FILE, _Traced(model, True), whole, sizes)
    graphs, names, cached = [first], {}, _CACHED
    inputs = dict(whole)
    if config.encoder is not None:
        read = torch.ones(2, 5, dtype=torch.int64)
        source = {0: batch, 1: torch.export.Dim("source", max=config.max_seq_len)}
        encoder = _Traced(model.get_encoder(), False)
        graphs = [_Graph(_ENCODER, encoder, whole, sizes, ("last_hidden_state",))]
        inputs |= {"attention_mask": read, "encoder_hidden_states": encoder(read, read)[0]}
        sizes = sizes | {"attention_mask": source, "encoder_hidden_states": source}
        names, cached = {"attention_mask": "encoder_attention_mask"}, _CACHED_DECODER
        graphs.append(_Graph(_DECODER, first.traced, inputs, sizes, names=names))
    layers = config.last_stack.layers
    empty = [(torch.empty(0), torch.empty(0))] * layers
    past = [tuple(values) for values in _pairs(first.traced(**inputs, past_key_values=empty)[1:])]
    if config.encoder is None:
        # The cache and the new tokens are visible.
        inputs["attention_mask"] = torch.ones(2, 6, dtype=torch.int64)
        sizes = sizes | {"attention_mask": {0: batch, 1: torch.export.Dim.DYNAMIC}}
    before = {0: batch, 2: torch.export.Dim("past", max=config.max_seq_len - 1)}
    outputs = ("logits", *_cache_names("present", layers))
    inputs = inputs | {"past_key_values": past}
    sizes = sizes | {"past_key_values": [(before, before)] * layers}
    graphs.append(_Graph(cached, first.traced, inputs, sizes, outputs, names, shares=True))
    return graphs


def _pairs(values: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(values[::2], values[1::2], strict=True)


def _share(model: Any, saved: Path) -> None:
    """Refers to the weights that a saved graph has, too, in its file. Others stay in the graph."""
    ir = import_module("onnx_ir")
    initializers = ir.load(saved).graph.initializers
    for name, value in model.graph.initializers.items():
        there = initializers[name].const_value if name in initializers else None
        if isinstance(there, ir.ExternalTensor) and np.array_equal(there.numpy(), value.const_value.numpy()):
            value.const_value = there


def _convert(exported: Exported, folder: Path) -> None:
    import transformers

    options = {"dtype": torch.float32, "attn_implementation": "eager", "local_files_only": True}
    config = exported.config
    kind = {"encoder": "MaskedLM", "decoder": "CausalLM"}.get(config.shape, "Seq2SeqLM")
    name = f"AutoModelFor{kind}" if config.head.record.scores_words else "AutoModel"
    for file in (CONFIG, GENERATION):
        if (exported.folder / file).exists():
            write_file(folder / file, (exported.folder / file).read_bytes())
    before = folder
    try:
        with _quiet(), torch.no_grad():
            model = getattr(transformers, name).from_pretrained(exported.folder, **options).eval()
            for graph in _plan_graphs(model, config):
                program = torch.onnx.export(
                    graph.traced, (), kwargs=graph.inputs, dynamic_shapes=graph.sizes,
                    input_names=graph.input_names(), output_names=list(graph.outputs), dynamo=True, verbose=False,
                )  # fmt: skip
                assert program is not None
                if graph.shares:
                    _share(program.model, before)
                    import_module("onnx_ir").save(program.model, folder / graph.file)
                else:
                    program.save(folder / graph.file, external_data=True)
                before = folder / graph.file
    except torch.onnx.errors.OnnxExporterError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"torch.onnx cannot translate a {exported.model_type}: {reason}",
            where="model",
            fix="export to hf",
        ) from None


def _scores(folder: Path, config: ModelConfig, tokens_BT: Tensor) -> Tensor:
    """Returns logits of ONNX Runtime, or hidden states; the last row's by the graph with a cache."""
    onnxruntime = import_module("onnxruntime")
    ids, mask = tokens_BT.numpy(), np.ones(tokens_BT.shape, np.int64)
    values = {"input_ids": ids, "attention_mask": mask}

    def run(file: str, values: dict[str, Any]) -> list[Any]:
        session = onnxruntime.InferenceSession(str(folder / file), providers=["CPUExecutionProvider"])
        for one in session.get_inputs():
            shape = [size if isinstance(size, int) else 0 for size in one.shape]
            values = {one.name: np.zeros([len(ids[-1:]), *shape[1:]], np.float32)} | values
        outputs: list[Any] = session.run(None, values)
        return outputs

    if config.shape == "encoder":
        return torch.from_numpy(run(FILE, values)[0])
    plain, cached = FILE, _CACHED
    visible = "attention_mask"
    if config.encoder is not None:
        hidden = run(_ENCODER, values)[0]
        plain, cached, visible = _DECODER, _CACHED_DECODER, "encoder_attention_mask"
        values = {"input_ids": ids, "encoder_hidden_states": hidden, visible: mask}
    whole = run(plain, values)[0]
    half = ids.shape[1] // 2
    last = {name: value[-1:] for name, value in values.items()}
    first = last | {"input_ids": ids[-1:, :half]}
    if config.encoder is None:
        first["attention_mask"] = mask[-1:, :half]
    scores, *cache = run(cached, first)
    names = _cache_names("past_key_values", config.last_stack.layers)
    rest = last | {"input_ids": ids[-1:, half:]} | dict(zip(names, cache, strict=True))
    whole[-1] = np.concatenate([scores[0], run(cached, rest)[0][0]])
    return torch.from_numpy(whole)


def _use(config: ModelConfig) -> str:
    """Returns the lines of the model card."""
    files = [FILE] if config.encoder is None or config.decoder is None else [_ENCODER, _DECODER]
    names = ["encoder", "decoder"] if len(files) > 1 else ["session"]
    made = "\n".join(
        f'{name} = onnxruntime.InferenceSession("{file}")' for name, file in zip(names, files, strict=True)
    )
    return f"import onnxruntime\n\n{made}"


ONNX_RUNTIME = Runtime(
    name="ONNX Runtime",
    packages=("onnx", "onnxscript", "onnxruntime"),
    dtypes=("fp32",),
    families=_RULES,
    check=_check,
    convert=_convert,
    runner="onnxruntime",
    scores=_scores,
    use=_use,
)
