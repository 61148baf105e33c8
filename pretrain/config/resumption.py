"""What may differ between a run and its resumption: every key of the config has a class.

free    how the work is done, or where; said
warn    the run takes another course from here on; said loudly
allow   changes what the run means: refused unless `resume.allow` names the key, or a section that it is in
never   the checkpoints do not fit, or their numbers would stand for something else: refused
"""

import logging
import re
from collections.abc import Iterator
from typing import Any

from pretrain.config.base import Section
from pretrain.config.load import sections_of
from pretrain.config.run import RunConfig
from pretrain.config.yaml_nodes import short
from pretrain.errors import ConfigError

_TABLE = {
    "free": """
        run.{dir,name}
        data.{path,mixture.path} data.{max_skipped_rows,cache_dir,cache_gib,workers,prefetch}
        model.preset
        optim.max_bad_steps
        train.stop_after
        eval.{every_steps,max_tokens}
        engine.{device,activation_checkpointing,activation_checkpointing_every,offload_optimizer,offload_params}
        engine.timeout_s
        checkpoint.{every_steps,keep,keep_every_steps,best}
        guard.{max_skips,max_rollbacks,check_replicas_every}
        tracking.{log_every_steps,norms_every_steps,wandb,project,entity,alerts,stall_alert_s,artifacts}
        tracking.samples.{prompts,every_evals,max_tokens,temperature}
        tracking.attention.{text,target,every_evals,kind,layers,heads}
        profile.{steps,ranks,memory_history}
        init.check_tokenizer
        resume.allow
        launch.{elastic,max_idle_restarts}
    """,
    "warn": """
        extend
        data.on_error
        batch.micro
        model.{init,init_std,init_scaled}
        optim.{lr,beta1,beta2,eps,weight_decay,grad_clip,layer_decay}
        optim.muon.{lr,momentum,nesterov,ns_steps,weight_decay,adjust_lr_fn}
        optim.adafactor.{decay_rate,clip_threshold,min_scale}
        guard.{on_spike,spike_window,spike_threshold}
        optim.schedule.{kind,cooldown_shape,min_ratio} optim.schedule.{warmup,decay,cooldown,hold}_{steps,tokens}
        train.steps
        engine.{kind,zero_stage,precision,attention,compile,deterministic}
        init.from
        finetune.dropout
    """,
    "allow": """
        seed
        data.mixture.{name,weight,repeat} data.curriculum.{tokens,weights}
        data.{packing,lanes,block_samples,document_mask}
        batch.{global_tokens,seq_len,source_len}
        model.{encoder,decoder}.{activation,norm_eps,scaled_attention,sinusoid,rope_theta,rope_local_theta}
        model.{encoder,decoder}.rope_scaling.{kind,factor,original_max_seq_len,low_freq_factor,high_freq_factor}
        model.{encoder,decoder}.{relative_max_distance,window,global_every,dropout,attention_dropout}
        model.head.{scaled,soft_cap,mean,dropout}
        model.{max_seq_len,scaled_embeddings}
        model.special_tokens.{pad,bos,eos,start,mask}
        objective.{,mixture.}kind objective.mixture.weight objective.{label_smoothing,z_loss}
        objective.{,mixture.}masked.{rate,random,keep,whole_words} objective.{,mixture.}span.{density,mean_length}
        objective.{,mixture.}ul2.denoisers.{density,mean_length,mode,prefix,weight}
        objective.{,mixture.}fim.{rate,spm_rate,max_documents,tokens}
    """,
    "never": """
        model.kind
        model.{encoder,decoder}.{layers,width,heads,kv_heads,head_width,ff_width,gated,norm,norm_placement,input_norm}
        model.{encoder,decoder}.{bias,qkv_bias,qk_norm,position,relative_buckets,token_types,cell,bidirectional}
        model.{attention,score,input_feeding}
        model.head.{kind,transform,bias,labels}
        model.{vocab_size,vocab_multiple,tied_embeddings,pooler}
        optim.kind
        init.freeze finetune.{kind,rank,alpha,targets,also}
    """,
}


def _expand(pattern: str) -> Iterator[str]:
    """Yields what a pattern stands for, as a shell would: `a.{b,c}` for `a.b` and `a.c`."""
    match = re.search(r"\{(.*?)\}", pattern)
    if match is None:
        yield pattern
        return
    for choice in match[1].split(","):
        yield from _expand(pattern[: match.start()] + choice + pattern[match.end() :])


CLASSES = {key: name for name, text in _TABLE.items() for pattern in text.split() for key in _expand(pattern)}

"""Class by dotted key, without places in lists."""


def without_places(key: str) -> str:
    """Returns a key without places in lists: `data.mixture.weight` for `data.mixture[2].weight`."""
    return re.sub(r"\[\d+\]", "", key)


def class_of(key: str) -> str:
    """Returns the class of a key, with or without places in lists."""
    return CLASSES[without_places(key)]


def changed_keys(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Returns {dotted key: (old value, new value)} of all that differs; None where a section is not there."""
    left, right = dict(_leaves(old)), dict(_leaves(new))
    keys = [*left, *(key for key in right if key not in left)]
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def _leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every key with a value of its own, with its place in a list: `data.mixture[2].weight`."""
    for name, info in type(section).model_fields.items():
        key, value = f"{prefix}{info.alias or name}", getattr(section, name)
        if isinstance(value, Section):
            yield from _leaves(value, f"{key}.")
        elif not any(sections_of(info.annotation, in_lists=True)):
            yield key, value
        else:
            for place, item in enumerate(value or []):
                yield from _leaves(item, f"{key}[{place}].")


# Whether a run goes on with another config: every difference is shown, and what changes its meaning
# is refused.


log = logging.getLogger(__name__)

Changes = dict[str, tuple[Any, Any]]


def check_config(stored: RunConfig, config: RunConfig, *, has_saved: bool = True) -> None:
    """Compares the config of a run with that of its resumption, and logs every difference, by class.

    Args:
        stored: What the run was started with.
        config: What is to go on.
        has_saved: Whether there is a checkpoint to go on from; without one all may change.

    Raises:
        ConfigError: Keys that define the run differ; all are named with both values, and what to add to go on.
    """
    changes = changed_keys(stored, config)
    groups: dict[str, Changes] = {}
    for key, values in changes.items():
        kind = class_of(key)
        if kind == "allow" and is_allowed(without_places(key), config.resume.allow):
            kind = "allowed"
        groups.setdefault(kind, {})[key] = values
    if has_saved and groups.keys() & {"allow", "never"}:
        raise _refusal(config, groups.get("allow", {}), groups.get("never", {}))
    if changes:
        lines = [
            f"    {kind:<7} {_shown(key, values)}"
            for kind in ("never", "allow", "allowed", "warn", "free")
            for key, values in groups.get(kind, {}).items()
        ]
        level = logging.INFO if groups.keys() <= {"free"} else logging.WARNING
        going_on = "resuming" if has_saved else "starting over, as nothing was saved,"
        log.log(level, "%s with a config that differs from the run's so far:\n%s", going_on, "\n".join(lines))


def _shown(key: str, values: tuple[Any, Any]) -> str:
    return f"{key}: {short(values[0])} -> {short(values[1])}"


def _refusal(config: RunConfig, allow: Changes, never: Changes) -> ConfigError:
    listed, fixes = [], []
    if allow:
        listed.append("on purpose only: " + ", ".join(_shown(key, values) for key, values in allow.items()))
    if never:
        listed.append("never: " + ", ".join(_shown(key, values) for key, values in never.items()))
        fixes.append(f"restore {', '.join(never)}")
    if allow:
        names = dict.fromkeys([*config.resume.allow, *map(without_places, allow)])
        fixes.append(f"add resume.allow=[{','.join(names)}]")
    return ConfigError(
        f"the run {config.run.name} was started with another config ({'; '.join(listed)})",
        fix=f"use another run.name, or {' and '.join(fixes)}",
    )


def is_allowed(key: str, allow: list[str]) -> bool:
    """Whether `resume.allow` names a key, or a section that it is in."""
    return any(key == name or key.startswith(f"{name}.") for name in allow)


def fill_from(stored: RunConfig, config: RunConfig) -> RunConfig:
    """Fills in what a config leaves to the data with what the run has found there: the data need not be at hand."""
    old, model = stored.model, config.model
    named = {name: number for name, number in model.special_tokens if number is not None}
    filled: dict[str, Any] = {"special_tokens": old.special_tokens.model_copy(update=named)}
    if model.vocab_size is None or config.init.from_ is not None:  # whose tables grow with the data's
        filled["vocab_size"] = old.vocab_size
    if not model.head.labels:
        filled["head"] = model.head.model_copy(update={"labels": old.head.labels})
    return config.model_copy(update={"model": model.model_copy(update=filled)})
