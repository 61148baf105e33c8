"""The commands as functions, for scripts and notebooks.

    prepare(folder, texts)   train(config)   generate(model, text)   evaluate(model)   export(model, out)

Each does what the command of its name does, with the same defaults, and raises `PretrainError`.
A training is a process of its own, whose signals and logs are those of a real run.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, overload

from pretrain.errors import EXIT_OK, EXIT_RESUME_ME, LaunchError

if TYPE_CHECKING:
    from pretrain.artifact.open import Artifact
    from pretrain.config.run import RunConfig


def prepare(
    output: str | Path,
    inputs: str | Sequence[str] = (),
    *,
    processes: int | None = None,
    **options: Any,
) -> Path:
    """Writes token shards of texts or images, with an index, statistics and a card.

    Args:
        output: Folder to write.
        inputs: Files, folders, globs or addresses; or a YAML file of `pretrain prepare`, whose keys
            `options` then override. None: the standard library of Python.
        processes: Workers. None: one a core.
        options: `tokenizer`, `vocab_size`, `split`, `kind`, `text_field` ... of `pretrain prepare`.

    Returns:
        `output`.

    Raises:
        ConfigError: An option does not fit.
        DataError: The inputs are missing, damaged or empty.
    """
    from pretrain.config.load import load_section, short_prepare
    from pretrain.config.prepare import PrepareConfig
    from pretrain.preparation.prepare import run_prepare

    if isinstance(inputs, str) and inputs.endswith((".yaml", ".yml")):
        overrides = [f"{key}={value}" for key, value in {"output": output, **options}.items()]
        config = load_section(PrepareConfig, inputs, overrides)
    else:
        config = short_prepare(output, [inputs] if isinstance(inputs, str) else inputs, **options)
    print(run_prepare(config, "1/1", processes), flush=True)
    return Path(output)


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A run after `train`; `folder` is what `generate`, `evaluate` and `export` take."""

    folder: Path
    is_complete: bool  # False: it was stopped, and the same call continues it


def train(
    config: "str | Path | RunConfig",
    overrides: Sequence[str] = (),
    *,
    ranks: int = 1,
) -> TrainedRun:
    """Trains, or continues a run, on this machine, and prints its log.

    Args:
        config: A YAML file, a name of `pretrain recipes`, or a config of `load_config`.
        overrides: Changes of it, as `optim.lr=3e-4`.
        ranks: Processes: 1, or one a GPU.

    Raises:
        ConfigError: The config is wrong.
        LaunchError: The training failed; its exit code and log say why.
    """
    from pretrain.config.load import dump_config, load_config
    from pretrain.config.run import RunConfig

    with TemporaryDirectory(prefix="pretrain-train-") as temporary:
        if isinstance(config, RunConfig):
            source = Path(temporary) / "run.yaml"
            source.write_text(dump_config(config))
        else:
            source = Path(config)
        # An error of the config is raised here, with its class.
        folder = load_config(source, list(overrides)).folder
        command = ["train", str(source)]
        if ranks > 1:
            command = ["launch", "local", str(source), "--ranks", str(ranks)]
        code = _run([sys.executable, "-m", "pretrain", *command, *overrides])
    if code not in (EXIT_OK, EXIT_RESUME_ME):
        text = f"the training ended with exit code {code}"
        raise LaunchError(text, where=str(folder), fix="see its last lines")
    return TrainedRun(folder, is_complete=code == EXIT_OK)


def _run(command: list[str]) -> int:
    """Runs a command and prints its lines: the cells of a notebook show no output of children."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
    except KeyboardInterrupt:
        process.terminate()  # it saves, and can be continued
        for line in process.stdout:
            print(line, end="", flush=True)
    return process.wait()


@overload
def generate(model: "str | Path | Artifact", prompts: str, **options: Any) -> str: ...
@overload
def generate(model: "str | Path | Artifact", prompts: Sequence[str], **options: Any) -> list[str]: ...
def generate(
    model: "str | Path | Artifact",
    prompts: str | Sequence[str],
    *,
    chat: bool = False,
    seed: int = 0,
    batch_size: int = 16,
    device: str = "auto",
    **options: Any,
) -> str | list[str]:
    """Returns the continuation, translation or answer of each prompt, or the prompt without masks.

    Args:
        model: A run, checkpoint, model folder or Hugging Face folder; or an open artifact.
        prompts: One text, or several, which are decoded `batch_size` at a time.
        chat: Prompts are a user's turns, and texts the answers.
        seed: Seed of sampling, independent of the batch.
        device: `auto`, `cpu` or `cuda`, for a model that is not open.
        options: `max_tokens`, `temperature` (0: greedy), `top_k`, `top_p`, `beams`, `stop` ... of
            `pretrain generate`. Default: those of the model.

    Raises:
        ConfigError: The model, a prompt or an option does not fit.
    """
    from pretrain.artifact.open import Artifact, open_artifact
    from pretrain.generation.chat import ChatCodec
    from pretrain.generation.command import fill_masks
    from pretrain.generation.generation_options import Options
    from pretrain.generation.text import generate_text
    from pretrain.preparation.normalize import build_detokenizer

    artifact = model if isinstance(model, Artifact) else open_artifact(model, device)
    asked = list(artifact.normalized([prompts] if isinstance(prompts, str) else prompts))
    chosen = Options(**options)
    if artifact.model.is_causal:
        codec = ChatCodec(artifact.codec) if chat else artifact.codec
        constraints = chosen.constraints(artifact.model, codec, artifact.generation)
        method = chosen.method(artifact.model, artifact.generation)
        answers = generate_text(artifact.model, codec, asked, constraints, method, seed=seed, batch_size=batch_size)
        texts = [best.text.strip() if chat else best.text for best, *_ in answers]
        finish = None if artifact.model.encoder is None else build_detokenizer(artifact.normalize)
        texts = list(map(finish, texts)) if finish else texts
    else:
        top_k = chosen.candidates()
        texts = [fill_masks(artifact.model, artifact.codec, prompt, top_k).text for prompt in asked]
    return texts[0] if isinstance(prompts, str) else texts


def evaluate(
    model: str | Path,
    *,
    data: str | Sequence[str] = (),
    split: str = "validation",
    max_tokens: int | None = None,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Returns losses and scores on data, or of tasks, as `pretrain evaluate --json` prints them.

    Args:
        model: A run, checkpoint, model folder or Hugging Face folder.
        data: Folders of prepared data. None: those of the run.
        split: Split of the data, `validation` or `train`.
        max_tokens: The first tokens of the split alone.
        tasks: Tasks of lm-eval-harness, in place of data.
        limit: The first documents of each task alone.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        ConfigError: Model, data and options do not fit.
        DataError: The data are missing or damaged.
    """
    if tasks:
        from pretrain.evaluation.tasks import TaskChoice, evaluate_tasks

        choice = TaskChoice(tuple(tasks), limit=limit)
        return dict(evaluate_tasks(Path(model), choice, device=device).facts())
    from pretrain.evaluation.corpus import CorpusOptions
    from pretrain.evaluation.held_out import evaluate_held_out

    folders = (data,) if isinstance(data, str) else tuple(data)
    options = CorpusOptions(folders, split, max_tokens=max_tokens)
    return dict(evaluate_held_out(Path(model), options, device=device).facts())


def export(
    model: str | Path,
    out: str | Path,
    *,
    to: str = "hf",
    dtype: str = "fp32",
    family: str | None = None,
) -> Path:
    """Writes a Hugging Face folder, or files of another program; scores are compared with ours.

    Args:
        model: A run, checkpoint or model folder.
        out: Folder to write; must not exist, or be empty.
        to: `hf`, `gguf` (llama.cpp), `onnx` or `ctranslate2`.
        dtype: `fp32` or `bf16`.
        family: `model_type` to write. None: the first that represents the model exactly.

    Raises:
        ConfigError: Nothing represents the model; the key is named.
    """
    from pretrain.artifact.runtime_export import export_for_runtime
    from pretrain.artifact.transfer import export_model
    from pretrain.utils.io import check_new_folder

    check_new_folder(Path(out))
    if to == "hf":
        export_model(Path(model), Path(out), dtype=dtype, family=family)
    else:
        export_for_runtime(Path(model), Path(out), to, dtype=dtype, family=family)
    return Path(out)
