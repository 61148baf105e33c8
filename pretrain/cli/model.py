"""`pretrain generate`, `classify`, `import`, `export`, `serve` and `inspect`."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from typer import Argument, Option

from pretrain.cli.chat import hold_conversation, note_limits, note_stdin, typed_lines
from pretrain.cli.completion import complete_run
from pretrain.cli.options import Device, Json, ModelPath
from pretrain.errors import ConfigError, LaunchError, install_fix
from pretrain.utils.status_line import status_line

_SERVING = ("fastapi", "uvicorn", "openai")
"""Packages that `transformers serve` imports."""


def generate_command(
    model: ModelPath,
    prompt: Annotated[list[str] | None, Option(help="Text to continue or translate.")] = None,
    file: Annotated[str | None, Option(help="Prompts, one per line or .jsonl; - for standard input.")] = None,
    image: Annotated[list[str] | None, Option(help="Image to caption.")] = None,
    max_tokens: Annotated[int | None, Option(min=1, help="Default: the model's, or 128.")] = None,
    temperature: Annotated[float | None, Option(help="0 is greedy. Default: 0.8 to continue a text.")] = None,
    top_k: Annotated[int | None, Option(help="Sample from k tokens; candidates of a mask.")] = None,
    top_p: Annotated[float | None, Option(help="Nucleus sampling: total probability.")] = None,
    repetition_penalty: Annotated[float | None, Option(help="Above 1: fewer repeated tokens.")] = None,
    no_repeat_ngram_size: Annotated[int | None, Option(min=0, help="N-grams that come once only.")] = None,
    stop: Annotated[list[str] | None, Option(help="Text before which one ends.")] = None,
    seed: Annotated[int, Option(help="Seed of sampling; independent of the batch.")] = 0,
    beams: Annotated[int | None, Option(min=1, help="Default: the model's.")] = None,
    length_penalty: Annotated[float | None, Option(help="Above 0: longer texts.")] = None,
    early_stopping: Annotated[str | None, Option(help="Beam search: true, false, never.")] = None,
    n_best: Annotated[int | None, Option(min=1, help="Texts per prompt, with scores.")] = None,
    batch_size: Annotated[int, Option(min=1, help="Prompts per batch.")] = 16,
    chat: Annotated[bool, Option("--chat", help="Prompts are a user's turns; typed, without one.")] = False,
    tokenized: Annotated[bool, Option("--tokenized", help="Translations with the tokens of Moses.")] = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Continue texts, translate them, caption images, or fill in [MASK], as the model can.

    Without --prompt and --file, prompts are piped in, one a line; without that, a document begins,
    or with --chat a conversation in the terminal; what is piped in is one conversation then.

    Example: pretrain generate runs/quickstart --prompt "def main(" --temperature 0
    """

    status_line().enter("importing torch")
    from pretrain.artifact.model_path import open_source
    from pretrain.artifact.open import load_artifact
    from pretrain.generation.chat import ChatCodec
    from pretrain.generation.command import run_generate
    from pretrain.generation.constraints import Codec
    from pretrain.generation.generation_options import Options
    from pretrain.generation.text import ImageCodec, open_images
    from pretrain.preparation.normalize import build_detokenizer

    search = (beams, length_penalty, early_stopping, n_best)
    repeats = (repetition_penalty, no_repeat_ngram_size)
    stops = None if stop is None else tuple(stop)
    options = Options(max_tokens, temperature, top_k, top_p, *search, *repeats, stops)
    prompts = _find_prompts(prompt, file, image, chat)
    status_line().enter(f"reading {model}")
    source = open_source(model)
    artifact = load_artifact(source, device)
    status_line().close()
    note_stdin(prompt or image, file, prompts, "--prompt", chat and not as_json)
    if chat and prompts is None:
        prompts = typed_lines(as_json)
    note_limits(artifact, max_tokens)
    codec: Codec | ImageCodec = artifact.codec
    if image:
        codec = open_images(artifact.model, artifact.codec, source.run)
    elif prompts is not None:
        prompts = iter(artifact.normalized(prompts))
    if chat and not (prompt or file or as_json):
        hold_conversation(artifact, options, prompts, seed)
        return
    finish = None
    if artifact.model.encoder is not None and not tokenized:
        finish = build_detokenizer(artifact.normalize)
    num_blank = run_generate(
        artifact.model,
        ChatCodec(artifact.codec) if chat else codec,
        artifact.generation,
        options,
        prompts,
        sys.stdout,
        seed=seed,
        batch_size=batch_size,
        as_json=as_json,
        finish=finish,
    )
    _note_blank(num_blank)


def _note_blank(num_texts: int) -> None:
    from pretrain.utils.units import plural

    if num_texts:
        print(f"note: {plural(num_texts, 'text')} without a visible character", file=sys.stderr)


def _find_prompts(
    prompt: list[str] | None, file: str | None, image: list[str] | None, chat: bool
) -> Iterator[str] | None:
    """Returns prompts, or images, which no prompts go with; None: none. Raises: ConfigError."""
    from pretrain.generation.text import find_prompts

    if not image:
        return find_prompts(prompt or [], file)
    if prompt or file or chat:
        raise ConfigError("--image goes without --prompt, --file and --chat", fix="leave them out")
    return iter(image)


def classify_command(
    model: ModelPath,
    text: Annotated[list[str] | None, Option(help="Text to label.")] = None,
    file: Annotated[str | None, Option(help="Texts, one per line or .jsonl; - for standard input.")] = None,
    batch_size: Annotated[int, Option(min=1, help="Texts per batch.")] = 16,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Label texts, or their words, with a classifier: label, probability and text, a line each.

    Without --text and --file, texts are piped in, one a line. --json: the probability of every
    label.

    Example: pretrain classify runs/classify --text "How do I open a file?"
    """
    from pretrain.artifact.model_path import open_source
    from pretrain.artifact.open import load_artifact
    from pretrain.families.label_names import WORDS
    from pretrain.generation.classify import run_classify
    from pretrain.generation.text import find_prompts

    texts = find_prompts(text or [], file, "--text")
    if texts is None:
        raise ConfigError("there is no text", fix="give --text, --file, or pipe texts in")
    source = open_source(model)
    artifact = load_artifact(source, device)
    note_stdin(text, file, texts, "--text")
    run_classify(
        artifact.model,
        artifact.codec,
        artifact.model_config.head.labels,
        iter(artifact.normalized(texts)),
        sys.stdout,
        of_words=source.like.endswith(WORDS),
        batch_size=batch_size,
        as_json=as_json,
    )


def import_command(
    source: Annotated[str, Argument(metavar="HF", help="A folder, or a name on the hub.")],
    out: Annotated[Path, Argument(metavar="OUT", help="Model folder to write.")],
    as_json: Json = False,
) -> None:
    """Make a model folder of a released model, to generate with, fine-tune, or export again.

    Example: pretrain import Helsinki-NLP/opus-mt-en-it models/en-it
    """
    from pretrain.utils.io import check_new_folder

    check_new_folder(out)  # before seconds of imports
    status_line().enter(f"importing {source}")
    from pretrain.artifact.transfer import import_model
    from pretrain.inspect.describe import print_facts

    imported = import_model(source, out)
    status_line().close()
    print_facts({"kind": "model", "path": str(out), **asdict(imported)}, as_json)


def export_command(
    model: Annotated[
        Path, Argument(metavar="MODEL", help="A run, checkpoint or model folder.", autocompletion=complete_run)
    ],
    out: Annotated[Path, Argument(metavar="OUT", help="Folder to write.")],
    to: Annotated[str, Option(help="hf, gguf (llama.cpp), onnx or ctranslate2.")] = "hf",
    dtype: Annotated[str, Option(help="fp32 or bf16.")] = "fp32",
    family: Annotated[str | None, Option(help="model_type. Default: the first exact one.")] = None,
    adapter: Annotated[bool, Option("--adapter", help="LoRA run: export the adapters alone, for peft.")] = False,
    generator: Annotated[bool, Option("--generator", help="Replaced tokens: export their generator.")] = False,
    check: Annotated[bool, Option(help="Refuse if transformers has other scores.")] = True,
    push: Annotated[str | None, Option(help="Repository of the hub to upload to.")] = None,
    as_json: Json = False,
) -> None:
    """Write a Hugging Face folder: safetensors, config, tokenizer, model card. Needs no GPU.

    --to: files of another program, made of that folder, or a refusal that names the reason.
    --push: after an interruption the same command continues the upload.

    Example: pretrain export runs/quickstart released/quickstart --dtype bf16
    """
    from pretrain.utils.io import check_new_folder

    if push is None:
        check_new_folder(out)  # before seconds of imports
    _check_parts(generator=generator, adapter=adapter, is_plain=to == "hf" and push is None)
    status_line().enter(f"exporting {model}")
    from pretrain.artifact.lora import export_adapter
    from pretrain.artifact.runtime_export import check_export, export_for_runtime, was_exported
    from pretrain.artifact.transfer import export_model
    from pretrain.inspect.describe import print_facts
    from pretrain.utils.hub import open_repository, push_folder

    facts: dict[str, Any] = {"kind": "release" if to == "hf" else to, "path": str(out)}
    is_there = push is not None and was_exported(model, out, to, dtype)
    if not is_there:
        check_new_folder(out)
    if push is not None:
        if not is_there:
            check_export(model, to, dtype=dtype, family=family, check=check)  # before a repository is made
        open_repository(push)  # before the work: a token that may not write is known at once
    if adapter:
        facts |= {"kind": "adapter", **asdict(export_adapter(model, out, family=family))}
    elif is_there:
        print(f"note: {out} is an export of it, and is uploaded as it is", file=sys.stderr)
    elif to == "hf":
        facts |= asdict(export_model(model, out, dtype=dtype, family=family, check=check, generator=generator))
    else:
        facts |= asdict(export_for_runtime(model, out, to, dtype=dtype, family=family, check=check))
    if push is not None:
        facts["pushed"] = push_folder(out, push)
    status_line().close()
    print_facts(facts, as_json)


def _check_parts(*, generator: bool, adapter: bool, is_plain: bool) -> None:
    """Refuses an export of a part of a model that is not for transformers, or that is uploaded."""
    if generator and (adapter or not is_plain):
        raise ConfigError("--generator has no --to, --adapter and --push", fix="leave them out")
    if adapter and not is_plain:
        raise ConfigError(
            "adapters alone have no --to and no --push",
            fix="leave --adapter out: they are merged",
        )


def serve_command(
    model: ModelPath,
    host: Annotated[str, Option(help="Address to listen at; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    dtype: Annotated[str, Option(help="fp32 or bf16; a Hugging Face folder has its own.")] = "fp32",
    device: Device = "auto",
) -> None:
    """Serve a model over HTTP as OpenAI's API does, by `transformers serve`, until Ctrl-C.

    A run is exported for it, to a temporary folder; the name of the model is that of its folder.
    Whoever reaches the port can use the model; another one is not found.

    Example: pretrain serve runs/chat --port 8000
    """
    if missing := [name for name in _SERVING if find_spec(name) is None]:
        raise LaunchError(
            f"serving is done by `transformers serve`, which needs {', '.join(missing)}",
            fix=install_fix("serve"),
        )
    from pretrain.artifact.transfer import write_served
    from pretrain.interop.tokenizer import load_hub_tokenizer
    from pretrain.utils.net import refuse_used_port
    from pretrain.utils.process import wait_for_child

    refuse_used_port(host, port)
    with TemporaryDirectory(prefix="pretrain-serve-") as temporary:
        folder, chats = write_served(model, Path(temporary), dtype)
        if chats:
            load_hub_tokenizer(folder).check_chat_template()
        print(f'http://{host}:{port}/v1: {model}, as model "{folder.name}"', file=sys.stderr, flush=True)
        if not chats:
            print("note: no chat template: /v1/completions answers alone", file=sys.stderr, flush=True)
        options = ["--host", host, "--port", str(port), "--device", device]
        command = [sys.executable, "-m", "pretrain.artifact.served", "serve", folder.name, *options]
        # Relative to its parent, the folder's name is that of the model. Nothing is fetched.
        offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
        if code := wait_for_child(command, Path(temporary), offline):
            raise LaunchError(f"`transformers serve` ended with exit code {code}", fix="see its messages above")


def inspect_command(
    path: Annotated[
        Path, Argument(metavar="PATH", help="Shards, a run, checkpoint or model.", autocompletion=complete_run)
    ],
    verify: Annotated[bool, Option("--verify", help="Compare bytes with their CRC32.")] = False,
    tensors: Annotated[bool, Option("--tensors", help="List the parameters.")] = False,
    stats: Annotated[bool, Option("--stats", help="List the parameters with their norms.")] = False,
    as_json: Json = False,
) -> None:
    """Describe, verify or list a run, a checkpoint, or a folder of a model, of Hugging Face, or of shards.

    Example: pretrain inspect runs/quickstart --verify
    """
    status_line().enter(f"reading {path}")
    from pretrain.inspect.describe import inspect

    status_line().close()
    inspect(path, verify=verify, tensors=tensors, stats=stats, as_json=as_json)
