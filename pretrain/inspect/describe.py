"""`pretrain inspect`: the facts of a run, a checkpoint, shards, a model or a Hugging Face folder.

    inspect  ->  find_damaged, if asked for  ->  describe  ->  list_tensors, if asked for

Damage is printed before it is refused. Not here: parameters, which need torch (tensor_list.py).
"""

import json
import math
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pydantic

from pretrain.checkpoint.format import MANIFEST, MODEL_FILE, Manifest, list_folders, load_manifest, step_name
from pretrain.checkpoint.retention import read_best
from pretrain.config.load import load_config
from pretrain.config.model import AnyModelConfig, parse_model
from pretrain.config.model.stack import ExpertsConfig, StackConfig
from pretrain.config.resumption import start_folder
from pretrain.errors import CheckpointError, ConfigError, DataError
from pretrain.plan.params import count_active, count_parameters
from pretrain.preparation.statistics import STATISTICS_NAME
from pretrain.run.folder import RunDir
from pretrain.run.owner import live_owner
from pretrain.shards.index import INDEX_NAME, SplitIndex, check_shards, load_index
from pretrain.utils.foreign_files import name_model
from pretrain.utils.io import find_damage
from pretrain.utils.log import printable
from pretrain.utils.safe_read import read_json
from pretrain.utils.units import plural

MAX_LISTED = 40
"""Values of a list that a table shows."""
_SHA256 = re.compile("[0-9a-f]{64}")


def inspect(
    path: Path, *, verify: bool = False, tensors: bool = False, stats: bool = False, as_json: bool = False
) -> None:
    """Prints the facts of a path, with the options of the command; `stats` implies `tensors`.

    Raises:
        DataError: It is nothing of ours, or its shards are damaged.
        CheckpointError: A checkpoint is damaged; with `verify`, after all bad chunks were printed.
        ConfigError: The record of a run is damaged, or there are no checksums to verify.
    """
    place = _find_named(path) or path
    damage = find_damaged(place) if verify else {}
    _refuse_damaged(damage, as_json)
    facts = describe(place)
    if place != path and path.name != "best":
        facts |= {"kind": "average of the weights", "path": str(place / path.name)}
    if damage:
        facts["verified"] = f"every byte of {plural(len(damage), 'checkpoint')} is as it was written"
    if not (tensors or stats):
        print_facts(facts, as_json)
        return
    from pretrain.inspect.tensor_list import list_tensors, print_tensors

    listed = list_tensors(path, stats)
    if as_json:
        print_facts(facts | {"tensors": listed}, as_json)
        return
    print_facts(facts, as_json)
    if listed:
        print()
        print_tensors(listed)


def _refuse_damaged(damage: dict[str, list[str]], as_json: bool) -> None:
    """Prints what `find_damaged` has found. Raises: CheckpointError: One is damaged."""
    bad = {where: problems for where, problems in damage.items() if problems}
    if not bad:
        return
    facts: dict[str, Any] = {Path(where).name: problems for where, problems in bad.items()}
    print_facts({"damaged": bad} if as_json else facts, as_json)
    where, problems = next(iter(bad.items()))
    text = f"damaged: {problems[0]}"
    if len(damage) > 1:
        text = f"{len(bad)} of {len(damage)} checkpoints {text}"
    if len(problems) > 1:
        text = f"{text}, and {len(problems) - 1} more"
    whole = [name for name in damage if name not in bad]
    raise CheckpointError(text, where=where, fix=f"use {whole[-1] if whole else 'another checkpoint'}")


def _find_named(path: Path) -> Path | None:
    """Returns the checkpoint of RUN/best or RUN/ema. Raises: CheckpointError: There is none."""
    if start_folder(path) == path:
        return None
    from pretrain.artifact.model_path import open_newest  # imports torch

    return open_newest(path).path


def describe(path: Path) -> dict[str, Any]:
    """Returns the facts of a folder of any of these kinds.

    Raises:
        DataError: It is of no kind, or its shards are damaged.
        CheckpointError: The manifest of a checkpoint is damaged, or a file is missing or cut short.
        ConfigError: The record of a run is damaged.
    """
    if (path / INDEX_NAME).is_file():
        return _describe_shards(path)
    if (path / MANIFEST).is_file():
        return describe_checkpoint(path)
    if RunDir(path).exists():
        return _describe_run(RunDir(path))
    if (path / "config.json").is_file():
        return _describe_release(path)
    text, fix = name_model(path) or ("neither a shard folder, a run, a checkpoint nor a model", "check the path")
    raise DataError(text, where=str(path), fix=fix)


def find_damaged(path: Path) -> dict[str, list[str]]:
    """Compares every byte of a checkpoint, a model, or all checkpoints of a run with the CRC32s.

    Returns:
        The damage of each: a line for each bad file or 16 MiB chunk; none where it is whole.

    Raises:
        ConfigError: The folder has no checksums of ours.
        CheckpointError: A run has no checkpoint.
    """
    if (path / MANIFEST).is_file():
        return {str(path): _find_damage(path)}
    if (path / INDEX_NAME).is_file():
        raise ConfigError(
            "a shard folder has its own proof",
            where=str(path),
            fix=f"run `pretrain data verify {shlex.quote(str(path))}`",
        )
    if not RunDir(path).exists():
        raise ConfigError(
            "it has no checksums to verify",
            where=str(path),
            fix="give a run, a checkpoint or a model",
        )
    # Folders with a damaged manifest too, which a load would skip.
    folders = list_folders(RunDir(path).checkpoints)
    if not folders:
        raise CheckpointError("this run has no checkpoint", where=str(path), fix="check the path")
    damage = {str(checkpoint): _find_damage(checkpoint) for checkpoint in folders}
    # The run may have removed some meanwhile; those that were read to their end count.
    damage = {place: problems for place, problems in damage.items() if not problems or Path(place).exists()}
    return damage or find_damaged(path)


def _find_damage(path: Path) -> list[str]:
    """Reads every byte of a checkpoint; returns a line for each bad file or chunk."""
    try:
        files = load_manifest(path).files
    except CheckpointError as error:
        return [f"{MANIFEST}: {error.what}"]
    return [problem for record in files for problem in find_damage(path / record.name, record)]


def _describe_shards(path: Path) -> dict[str, Any]:
    index = load_index(path)
    check_shards(path, index)
    facts: dict[str, Any] = {"kind": "shards", "path": str(path), "of": index.kind}
    if index.has_tokenizer:
        facts |= {"vocab_size": index.vocab_size, "dtype": index.dtype}
    if index.labels:
        facts |= {"classes": len(index.labels), "labels": list(index.labels)}
    for name, split in index.splits.items():
        if index.has_images:
            facts[name] = _describe_images(path, name, split)
            continue
        facts[name] = {
            "tokens": split.num_tokens,
            "documents": split.num_documents,
            "shards": len(split.shards),
            "bytes_per_token": round(split.num_bytes_text / max(split.num_tokens, 1), 3),
        }
    return facts


def _describe_images(path: Path, name: str, split: SplitIndex) -> dict[str, Any]:
    """Returns the facts of a split of images; sizes in pixels, least to most, where statistics.json has them."""
    num_bytes = sum(shard.num_bytes for shard in split.shards)
    facts: dict[str, Any] = {"images": split.num_documents, "shards": len(split.shards), "bytes": num_bytes}
    with suppress(OSError, ValueError, LookupError, TypeError):
        of_split = read_json(path / STATISTICS_NAME)["splits"][name]
        for side in ("width", "height"):
            least, median, most = (int(of_split[side][key]) for key in ("least", "median", "most"))
            facts[side] = f"{least}" if least == most else f"{least} to {most} (median {median})"
    return facts


def _describe_release(path: Path) -> dict[str, Any]:
    from pretrain.interop.release import open_release  # imports torch

    release = open_release(path)
    # The files have no padding of the vocabulary, which our model of them has.
    config = release.config.model_copy(update={"vocab_multiple": 1})
    return {
        "kind": "Hugging Face model",
        "path": str(path),
        "model_type": release.family.model_type,
        "model": describe_model(config),
        "parameters": count_parameters(config),
        **_describe_active(config),
        "dtype": release.dtype,
        "not_read": release.ignored,
    }


def _describe_run(run: RunDir) -> dict[str, Any]:
    record = run.read_record()
    last = record["attempts"][-1]
    model: dict[str, Any] = {"model": "not known: config.yaml is missing or damaged"}
    counted = "tokens"
    with suppress(ConfigError):
        # Code of the user is not run to describe a folder.
        whole = load_config(run.config, extensions="ignore")
        config, counted = whole.model, whole.counted
        model = {"model": describe_model(config), "parameters": count_parameters(config), **_describe_active(config)}
    return {
        "kind": "run",
        "path": str(run.path),
        "id": record["id"],
        "name": record["name"],
        "created": record["created"],
        "attempts": len(record["attempts"]),
        **_describe_attempt(run, last),
        **model,
        **_describe_checkpoints(run, counted),
        "versions": last.get("versions", {}),
    }


def _describe_attempt(run: RunDir, attempt: dict[str, Any]) -> dict[str, Any]:
    """Returns how the last attempt of a run is or ended, its exit code, and the last step that was trained."""
    if "reason" in attempt:
        facts = {"last_attempt": attempt["reason"], "exit_code": attempt.get("exit_code")}
    elif owner := live_owner(run.lease):
        facts = {"last_attempt": f"running: {owner}"}
    else:
        facts = {"last_attempt": "lost: killed, node lost, or disk full"}
    return facts | {"step": run.last_step()}


def _describe_checkpoints(run: RunDir, unit: str) -> dict[str, Any]:
    """Returns the checkpoints of a run, those with visible damage, and the facts of the newest other.

    `unit`: targets that the run learns from, tokens or labels.
    """
    folders = list_folders(run.checkpoints)
    facts: dict[str, Any] = {"checkpoints": [path.name for path in folders]}
    best = read_best(run.checkpoints)
    if best is not None:
        facts["best"] = {"checkpoint": step_name(best.step), best.metric: best.value}
    damaged = {}
    # From the newest on, up to the first that is whole.
    for path in reversed(folders):
        try:
            manifest = load_manifest(path)
            check_sizes(path, manifest)
            files = _describe_files(path, manifest)
        except (CheckpointError, OSError) as error:
            if not path.exists():  # the run removed it meanwhile, and has a newer one
                return _describe_checkpoints(run, unit)
            damaged[path.name] = getattr(error, "what", str(error))
            continue
        names = {"step": "step", "tokens": unit}
        state = {name: manifest.state[key] for key, name in names.items() if key in manifest.state}
        facts["newest"] = {**state, **files, "written_by": manifest.topology}
        break
    if damaged:
        facts["damaged"] = damaged
    # Renamed by a load that found them damaged, or by a rollback.
    aside = sorted(path.name for path in run.checkpoints.glob("step-*.*"))
    return facts | ({"set_aside": aside} if aside else {})


def print_facts(facts: dict[str, Any], as_json: bool) -> None:
    """Prints facts as a table, or as JSON."""
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    # Only a table needs rich, which takes a while to import.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in facts.items():
        table.add_row(Text(printable(key), "bold"), printable(_text(value)))
    Console(markup=False).print(table)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        more = f" and {len(value) - MAX_LISTED:,} more" if len(value) > MAX_LISTED else ""
        return (", ".join(map(str, value[:MAX_LISTED])) or "none") + more  # --json has all of them
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) and _SHA256.fullmatch(value):
        return value[:12]  # --json has all of it
    return f"{value:,}" if isinstance(value, int) else str(value)


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """Returns the facts of a checkpoint or a model folder by its manifest and its file sizes.

    Raises:
        CheckpointError: The manifest is damaged, or files are missing or have another size.
    """
    manifest = load_manifest(path)
    check_sizes(path, manifest)
    is_model = (path / MODEL_FILE).is_file()
    config = _find_config(path, is_model)
    state = {} if is_model else {key: manifest.state[key] for key in sorted(manifest.state, key=_place)}
    if config is not None:
        counted = config.head.record.counted
        state = {counted if key == "tokens" else key: value for key, value in state.items()}
    unknown = f"not known: {MODEL_FILE if is_model else 'config.yaml of the run'} is missing or damaged"
    return {
        "kind": "model" if is_model else "checkpoint",
        "path": str(path),
        **state,
        **_describe_files(path, manifest),
        "model": unknown if config is None else describe_model(config),
        "parameters": sum(math.prod(shape) for shape in manifest.shapes.values()),
        "moments": manifest.moments,
        **({"scalars": manifest.scalars} if manifest.scalars else {}),
        "written_by": manifest.topology,
    }


def _place(key: str) -> tuple[bool, bool, str]:
    """Returns the sort key of an entry of a state: progress first, hashes last."""
    return key.endswith("hash"), key not in ("step", "tokens"), key


def _describe_files(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Returns the time of a checkpoint, and its files and bytes."""
    written = datetime.fromtimestamp((path / MANIFEST).stat().st_mtime, UTC)
    num_bytes = sum(record.num_bytes for record in manifest.files)
    saved = written.isoformat(timespec="seconds")
    return {"saved": saved, "files": len(manifest.files), "bytes": num_bytes}


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Checks that every file exists with its size. Raises: CheckpointError, naming the first."""
    for record in manifest.files:
        file = path / record.name
        if not file.is_file() or file.stat().st_size != record.num_bytes:
            raise CheckpointError(
                "missing, or not of its size",
                where=str(file),
                fix="use another checkpoint",
            )


def describe_model(config: AnyModelConfig) -> str:
    """Returns a model's shape in a line: stacks, vocabulary and longest sequence."""
    stacks = []
    for name in ("encoder", "decoder"):
        stack = getattr(config, name)
        if stack is None:
            continue
        if config.kind == "recurrent":
            stacks.append(f"{name} of {stack.layers} {stack.cell} layers, width {stack.width}")
        else:
            stacks.append(", ".join([f"{name} of {stack.layers} layers", *_describe_stack(stack)]))
    if config.kind != "recurrent" and (patches := config.input) is not None:
        sides = f"{patches.image} x {patches.image} x {patches.channels}"
        stacks.append(f"images of {sides} in patches of {patches.size} x {patches.size}")
        if not config.captions:
            return "; ".join(stacks)
    vocabulary = ""
    if config.vocab_size:
        # The count of parameters includes the padding, which an export leaves out.
        rows = config.padded_vocab_size
        vocabulary = f"vocabulary {config.vocab_size:,}{f' in {rows:,} rows' * (rows > config.vocab_size)}, "
    return f"{'; '.join(stacks)}; {vocabulary}up to {config.max_seq_len:,} tokens"


def _describe_stack(stack: StackConfig) -> Iterator[str]:
    yield f"width {stack.width}"
    if stack.has_attention:
        heads = f"{stack.heads} heads"
        # Grouped-query attention: several heads of queries share one of keys and values.
        if stack.num_kv_heads != stack.heads:
            heads += f" ({stack.num_kv_heads} of keys)"
        if stack.latent is not None:
            heads += f" (keys and values from {stack.latent.kv_rank} numbers a token)"
        yield heads
    for name, layers in stack.replaced_by.items():
        section = stack.mixer_section(name)
        yield f"{plural(layers, 'layer')} of them by {section.describe(stack.width, stack.heads)}"
    if stack.experts is not None:
        yield _describe_experts(stack.experts)
    elif not stack.ff_width:
        yield "no feed-forward layers"


def _describe_experts(experts: ExpertsConfig) -> str:
    shared = f" and {plural(experts.shared, 'shared one')}" if experts.shared else ""
    balance = "not balanced" if experts.balance == "none" else f"balanced by a {experts.balance}"
    return f"{experts.count} experts a layer of which a token passes {experts.top_k}{shared}, {balance}"


def _describe_active(config: AnyModelConfig) -> dict[str, int]:
    """Returns the parameters that a token meets in a model with experts; of a dense model it meets all."""
    active = count_active(config)
    return {} if active == count_parameters(config) else {"active_parameters": active}


def _find_config(path: Path, is_model: bool) -> AnyModelConfig | None:
    """Returns a checkpoint's model by its run's config, or by its own `model.json`; None: unreadable."""
    try:
        if is_model:
            facts = read_json(path / MODEL_FILE)
            return parse_model(facts["model"])
        config = RunDir(path.resolve().parent.parent).config
        return load_config(config, extensions="ignore").model
    except (ConfigError, OSError, ValueError, KeyError, TypeError, pydantic.ValidationError):
        return None
