"""Exports that llama.cpp, ONNX Runtime and CTranslate2 run: the tokens of ours, or a refusal and nothing written.

The programs are real, and the models tiny ones of transformers, with random weights.
"""

import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import normalizers

from pretrain.artifact.open import open_artifact
from pretrain.artifact.runtime_export import export_for_runtime
from pretrain.config.model import SpecialTokens
from pretrain.errors import ConfigError
from pretrain.generation.constraints import Constraints
from pretrain.generation.sampling import generate
from pretrain.interop.runtimes import find_runtime
from pretrain.interop.tokenizer import wrap_tokenizer_json
from pretrain.tokenizer.file import dump_tokenizer
from tests.helpers.lent import lend, quiet_transformers
from tests.helpers.tokenizers import train_bpe, train_sentencepiece

VOCAB = 300
LONGEST = 64
NEW_TOKENS = 12
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": LONGEST, "initializer_range": 0.1, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": LONGEST}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 1.5}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 5}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
PAIR = {
    "vocab_size": VOCAB, "d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 6,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 80, "max_position_embeddings": LONGEST,
    "init_std": 0.3, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 0, "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    "vocab_size": VOCAB, "d_model": 48, "d_kv": 10, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 3,
    "num_heads": 6, "relative_attention_num_buckets": 10, "relative_attention_max_distance": 20,
    "initializer_factor": 1.4, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 0, "decoder_start_token_id": 1,
}  # fmt: skip
GATED = {"feed_forward_proj": "gated-gelu", "initializer_factor": 1.15}
RELEASED = {"relative_attention_max_distance": 128, "num_layers": 3}
BERT = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 80,
    "max_position_embeddings": LONGEST, "initializer_range": 0.2, "pad_token_id": 1,
}  # fmt: skip
DISTILBERT = {"dim": 48, "n_layers": 3, "n_heads": 6, "hidden_dim": 80}
PAIRS = {
    "bart": PAIR,
    "bart, scaled": PAIR | {"scale_embedding": True, "activation_function": "quick_gelu"},
    "marian": PAIR | {"scale_embedding": True, "activation_function": "silu", "pad_token_id": VOCAB - 1},
    "t5": T5,
    "t5, gated, odd buckets": T5 | {"feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 7},
    "t5, its own head": T5 | {"scale_decoder_outputs": False, "layer_norm_epsilon": 1e-2},
    "mt5": T5 | {"feed_forward_proj": "gated-silu"},
    "umt5": T5 | {"relative_attention_max_distance": 30},
    "t5, as released": T5 | RELEASED | {"relative_attention_num_buckets": 16},
    # llama.cpp computes GELU in fp16, by a table, which larger values would show.
    "t5, gated, as released": T5 | RELEASED | GATED | {"num_decoder_layers": 2},
    "mt5, as released": T5 | RELEASED | GATED,
    "umt5, relu": T5 | RELEASED | {"feed_forward_proj": "relu"},
    "t5, longer decoder": T5 | RELEASED | {"num_layers": 2},
}
"""Models of two stacks."""
ENCODERS = {
    "bert": BERT | {"layer_norm_eps": 1e-3},
    "roberta": BERT | {"hidden_act": "gelu_new", "pad_token_id": 4, "type_vocab_size": 3},
    "xlm-roberta": BERT,
    "distilbert": BERT | DISTILBERT,
}
"""Encoders without a head."""
MODELS = {
    "gpt2": GPT2,
    "gpt2 with its own head": GPT2 | {"tie_word_embeddings": False, "n_inner": 80},
    "llama": {"head_dim": 8},
    "llama with biases": {"attention_bias": True, "head_dim": 10, "num_key_value_heads": 6, "rms_norm_eps": 1e-3},
    "llama with all biases": {"attention_bias": True, "mlp_bias": True},
    "llama, tied, llama3": {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "llama, linear": {"rope_parameters": LINEAR},
    "mistral": {"sliding_window": None, "head_dim": 8},
    "mixtral": {"sliding_window": None, "num_local_experts": 5},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2, linear": {"rope_parameters": LINEAR},
    "qwen3": {"head_dim": 12},
    "qwen3_moe": EXPERTS | {"head_dim": 12, "norm_topk_prob": True},
    "gemma": {"head_dim": 12, "num_key_value_heads": 1},
    "gemma2": GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0},
    "gemma3_text": GEMMA | {"num_hidden_layers": 6},
    "gemma3_text, any windows": GEMMA
    | {
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "final_logit_softcapping": 1.3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 300.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "phi3": {"sliding_window": None},
    "olmo": {},
    "olmo, tied": {"tie_word_embeddings": True, "num_key_value_heads": 6},
    "olmo2": {},
    "olmo2, tied": {"tie_word_embeddings": True, "num_key_value_heads": 6, "rms_norm_eps": 1e-3},
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 5},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 6},
    "smollm3": {"num_hidden_layers": 4},
    "granite": GRANITE,
    "granite with biases": GRANITE | {"attention_bias": True, "tie_word_embeddings": True},
    "starcoder2": {"sliding_window": None},
    "gpt_neox": {},
    "phi": {},
    "stablelm": {"partial_rotary_factor": 0.5},
    "falcon": {"ffn_hidden_size": 96, "alibi": False},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3, "num_hidden_layers": 4, "sliding_window": 5},
}
"""Values of decoders by model type, with a remark."""
TEXTS = [
    "It's 2017:  x=12345; caf\u00e9 e\u0301 \u212b\n\n\tDON'T (a_b)... ",
    "\u4f60\u597d, \u043c\u0438\u0440! \U0001f680 1 22 333 4444 \u0664\u0665 \u2167 a\u200db",
    "def main():\n    return  0 \t\r\n\n\n<|endoftext|> end",
]


@cache
def tokenizer():
    return train_bpe([Path("README.md").read_text()], VOCAB)


def tokenizer_files(content: bytes = b"") -> dict[str, bytes]:
    return dict(wrap_tokenizer_json(content or dump_tokenizer(tokenizer()), SpecialTokens(eos=0)))


def write_release(folder: Path, name: str, files: dict[str, bytes] | None = None, **further: int) -> Path:
    """A release of transformers with random weights that matter, and a tokenizer."""
    torch.manual_seed(3)
    values = PAIRS.get(name) or ENCODERS.get(name) or SIZES | MODELS[name]
    config = transformers.AutoConfig.for_model(name.split()[0].rstrip(","), **(values | further))
    kind = "AutoModelForSeq2SeqLM" if name in PAIRS else "AutoModel" if name in ENCODERS else "AutoModelForCausalLM"
    with quiet_transformers():
        lend(getattr(transformers, kind).from_config(config), folder)
    for file, content in (tokenizer_files() if files is None else files).items():
        (folder / file).write_bytes(content)
    return folder


def make_prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(1, VOCAB) for _ in range(draw.randint(1, 30))] for _ in range(100)]


def run_llama_cpp(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    import llama_cpp

    F32 = llama_cpp.GGML_TYPE_F32
    model = llama_cpp.Llama(
        str(folder / "model.gguf"),
        n_ctx=LONGEST,
        verbose=False,
        type_k=F32,
        type_v=F32,
        n_threads=1,
        n_gpu_layers=0,
        logits_all=True,
    )
    assert model.token_eos() == 0
    found = []
    for prompt in prompts:
        model.reset()
        row: list[int] = []
        if llama_cpp.llama_model_has_encoder(model.model):
            source = (llama_cpp.llama_token * len(prompt))(*prompt)
            assert llama_cpp.llama_encode(model.ctx, llama_cpp.llama_batch_get_one(source, len(prompt))) == 0
            prompt = [llama_cpp.llama_model_decoder_start_token(model.model)]
        model.eval(prompt)
        while len(row) < NEW_TOKENS and (token := int(np.argmax(model.scores[model.n_tokens - 1]))) != 0:
            row.append(token)
            model.eval([token])
        found.append(row)
    return found


def batch_of(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    longest = max(map(len, rows))
    ids = np.array([row + [0] * (longest - len(row)) for row in rows])
    return ids, np.array([[1] * len(row) + [0] * (longest - len(row)) for row in rows])


def extend_whole(run, rows: list[list[int]], inputs, masked: bool) -> None:
    """Extends rows by a graph that reads them whole, as one batch."""
    first = [len(row) for row in rows]
    for _ in range(NEW_TOKENS):
        ids, mask = batch_of(rows)
        (scores,) = run(None, {"input_ids": ids} | inputs | ({"attention_mask": mask} if masked else {}))
        for row, of_row, start in zip(rows, scores, first, strict=True):
            if 0 not in row[start:]:
                row.append(int(np.argmax(of_row[len(row) - 1])))


def extend_cached(session, row: list[int], inputs, masked: bool) -> None:
    """Extends a row by a graph with a cache, which is empty at first."""
    caches = [one for one in session.get_inputs() if one.name.startswith("past")]
    cache = {one.name: np.zeros((1, one.shape[1], 0, one.shape[3]), np.float32) for one in caches}
    new = list(row)
    for _ in range(NEW_TOKENS):
        mask = {"attention_mask": np.ones((1, len(row)), np.int64)} if masked else {}
        scores, *values = session.run(None, {"input_ids": np.array([new])} | inputs | mask | cache)
        cache = dict(zip(cache, values, strict=True))
        new = [int(np.argmax(scores[0, -1]))]
        row += new
        if new == [0]:
            return


def run_onnx(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Half of the prompts by the graph of whole rows, the others by that with a cache."""
    import onnxruntime

    sessions = {file.name: onnxruntime.InferenceSession(str(file)) for file in folder.glob("*.onnx")}
    half, of_one = len(prompts) // 2, "model.onnx" in sessions
    rows = [list(prompt) for prompt in prompts]
    inputs = [{} for _ in prompts]
    if not of_one:
        start = json.loads((folder / "generation_config.json").read_text())["decoder_start_token_id"]
        rows = [[start] for _ in prompts]
        for sources in (prompts[:half], *([prompt] for prompt in prompts[half:])):
            ids, mask = batch_of(sources)
            (hidden,) = sessions["encoder_model.onnx"].run(None, {"input_ids": ids, "attention_mask": mask})
            place = 0 if len(sources) > 1 else half + prompts[half:].index(sources[0])
            inputs[place] = {"encoder_hidden_states": hidden, "encoder_attention_mask": mask}
    before = [len(row) for row in rows]
    extend_whole(sessions["model.onnx" if of_one else "decoder_model.onnx"].run, rows[:half], inputs[0], of_one)
    cached = sessions["model_with_past.onnx" if of_one else "decoder_with_past_model.onnx"]
    for row, of_row in zip(rows[half:], inputs[half:], strict=True):
        extend_cached(cached, row, of_row, of_one)
    return [[token for token in row[start:] if token] for row, start in zip(rows, before, strict=True)]


def run_ctranslate2(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    import ctranslate2

    names = transformers.AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens
    if (folder / "shared_vocabulary.json").exists():
        model = ctranslate2.Translator(str(folder), device="cpu", compute_type="float32", intra_threads=1)
        texts = [names(prompt) for prompt in prompts]
        found = model.translate_batch(texts, beam_size=1, min_decoding_length=0, max_decoding_length=NEW_TOKENS)
        ids = {token: number for number, token in enumerate(names(range(VOCAB)))}
        return [[ids[token] for token in one.hypotheses[0]] for one in found]
    model = ctranslate2.Generator(str(folder), device="cpu", compute_type="float32", intra_threads=1)
    options = {"max_length": NEW_TOKENS, "sampling_topk": 1, "end_token": [0]}
    options |= {"include_prompt_in_result": False, "max_batch_size": 1}  # a batch repeats prompts
    found = model.generate_batch([names(prompt) for prompt in prompts], **options)
    return [[token for token in one.sequences_ids[0] if token] for one in found]


RUN = {"gguf": run_llama_cpp, "onnx": run_onnx, "ctranslate2": run_ctranslate2}
CASES = [
    (to, name) for to in RUN for name in MODELS | PAIRS if name.split()[0].rstrip(",") in find_runtime(to).families
]

REFUSED = {
    ("ctranslate2", "llama with biases"),
    ("ctranslate2", "llama with all biases"),
    ("ctranslate2", "llama, tied, llama3"),
    ("ctranslate2", "llama, linear"),
    ("ctranslate2", "qwen2, linear"),
    ("gguf", "t5"),
    ("gguf", "t5, longer decoder"),
    ("gguf", "t5, gated, odd buckets"),
    ("gguf", "t5, its own head"),
    ("gguf", "mt5"),
    ("gguf", "umt5"),
}
"""Cases that the program does not compute."""


@pytest.mark.long
@pytest.mark.parametrize(("to", "name"), CASES)
def test_100_greedy_texts_are_those_of_ours_or_the_model_is_refused(to, name, tmp_path):
    pytest.importorskip(find_runtime(to).runner)
    release = write_release(tmp_path / "release", name)
    try:
        export_for_runtime(release, tmp_path / "out", to)
    except ConfigError as error:
        assert str(error).startswith(("model: decoder.", "model: encoder."))  # a key, and nothing is left
        assert (to, name) in REFUSED and [path.name for path in tmp_path.iterdir()] == ["release"]
        return
    assert (to, name) not in REFUSED
    prompts = make_prompts()
    model = open_artifact(release).model
    expected = [text.tokens for text in generate(model, prompts, Constraints(NEW_TOKENS, eos_ids=(0,)))]
    assert len(set(map(tuple, expected))) > 10
    assert RUN[to](tmp_path / "out", prompts) == expected


@pytest.mark.long
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "sentencepiece without a prefix"])
def test_texts_have_the_same_tokens_in_llama_cpp(kind, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    draw = random.Random(1)
    words = [word for text in TEXTS for word in text.split(" ")]
    texts = TEXTS + [" ".join(draw.choices(words, k=draw.randint(1, 20))) for _ in range(97)]
    files, ids = None, {}
    if kind != "bytes":
        pieces = train_sentencepiece(Path("README.md").read_text().splitlines(), 1000)
        texts += [
            "a</s> b<s>",
            "  two",
            "\u2581",
            "aaaaaaa  ||||||| -------",
            *Path("AGENTS.md").read_text().splitlines(),
        ]
        if "without" in kind:
            pieces.normalizer = normalizers.Replace(" ", "\u2581")
        ids = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": pieces.get_vocab_size()}
        files = dict(wrap_tokenizer_json(dump_tokenizer(pieces), SpecialTokens(bos=1, eos=2)))
    release = write_release(tmp_path / "release", "llama", files, **ids)
    export_for_runtime(release, tmp_path / "out", "gguf")
    model = llama_cpp.Llama(str(tmp_path / "out/model.gguf"), vocab_only=True, verbose=False)
    names = transformers.AutoTokenizer.from_pretrained(release)
    for text in texts:
        assert model.tokenize(text.encode(), add_bos=True, special=True) == names(text)["input_ids"], text


@pytest.mark.long
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_has_the_same_hidden_states_in_onnx_runtime(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    release = write_release(tmp_path / "release", name)
    export_for_runtime(release, tmp_path / "out", "onnx")
    ids, mask = batch_of([list(range(5, 25)), list(range(30, 37))])
    theirs = transformers.AutoModel.from_pretrained(release)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids), torch.tensor(mask)).last_hidden_state.numpy()
    session = onnxruntime.InferenceSession(str(tmp_path / "out/model.onnx"))
    (found,) = session.run(["last_hidden_state"], {"input_ids": ids, "attention_mask": mask})
    assert np.allclose(found[mask > 0], expected[mask > 0], atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_has_the_same_hidden_states_in_ctranslate2(name, tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2")
    release = write_release(tmp_path / "release", name)
    export_for_runtime(release, tmp_path / "out", "ctranslate2")
    tokens = torch.arange(5, 45).view(2, 20)
    theirs = transformers.AutoModel.from_pretrained(release)
    with torch.no_grad():
        expected = theirs(tokens, torch.ones_like(tokens))
    found = ctranslate2.Encoder(str(tmp_path / "out")).forward_batch(tokens.tolist())
    assert torch.allclose(torch.tensor(np.array(found.last_hidden_state)), expected.last_hidden_state, atol=1e-5)
    if found.pooler_output is not None:
        assert torch.allclose(torch.tensor(np.array(found.pooler_output)), expected.pooler_output, atol=1e-5)


@pytest.mark.long
def test_ctranslate2_never_gives_what_a_release_suppresses(tmp_path):
    pytest.importorskip("ctranslate2")
    release = write_release(tmp_path / "release", "marian")
    prompts = make_prompts()
    model = open_artifact(release).model
    often = generate(model, prompts, Constraints(1))[0].tokens[0]
    (release / "generation_config.json").write_text(json.dumps({"bad_words_ids": [[often]], "eos_token_id": 0}))
    export_for_runtime(release, tmp_path / "out", "ctranslate2")
    limits = Constraints(NEW_TOKENS, eos_ids=(0,), suppressed_ids=(often,))
    assert run_ctranslate2(tmp_path / "out", prompts) == [text.tokens for text in generate(model, prompts, limits)]


@pytest.mark.long
@pytest.mark.parametrize("to", ["gguf", "ctranslate2"])
def test_matrices_in_bf16_take_half_of_the_room_and_give_nearly_the_same_scores(to, tmp_path):
    pytest.importorskip(find_runtime(to).runner)
    release = write_release(tmp_path / "release", "llama")
    config, rows = open_artifact(release).model_config, torch.arange(1, 31)[None]
    scores = []
    for dtype in ("fp32", "bf16"):
        found = export_for_runtime(release, tmp_path / dtype, to, dtype=dtype)
        weights = max((tmp_path / dtype).iterdir(), key=lambda file: file.stat().st_size)
        scores.append((weights.stat().st_size, find_runtime(to).scores(tmp_path / dtype, config, rows)))
        assert found.total_bytes > weights.stat().st_size
    (whole, exact), (half, near) = scores
    assert half < 0.6 * whole
    assert 0 < (near - exact).abs().max() < 0.03 * exact.abs().max()
