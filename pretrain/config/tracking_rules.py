"""Rules of `tracking.samples` and `tracking.attention`: what a model can show, and when."""

from pretrain.config.recurrent import AnyModelConfig, RecurrentConfig
from pretrain.config.tracking import AttentionConfig, TrackingConfig
from pretrain.config.train import EvalConfig


def check_tracking(tracking: TrackingConfig, evaluation: EvalConfig, model: AnyModelConfig) -> None:
    """Checks that what is to be shown of a run can be. Raises: ValueError, that names keys from the root."""
    samples, attention = tracking.samples, tracking.attention
    wanted = {"samples.prompts": bool(samples.prompts), "attention.text": attention.text is not None}
    for key, is_set in wanted.items():
        if is_set and not evaluation.every_steps:
            raise ValueError(
                f"tracking.{key}: nothing is shown without evaluations; set eval.every_steps, which is 0, or remove it"
            )
    if samples.prompts and model.decoder is None:
        raise ValueError(
            "tracking.samples: a model without a decoder generates no text; remove tracking.samples.prompts"
        )
    if attention.text is not None:
        _check_attention(attention, model)


def _check_attention(attention: AttentionConfig, model: AnyModelConfig) -> None:
    if isinstance(model, RecurrentConfig):
        raise ValueError("tracking.attention: model.kind=recurrent has no heads to draw; remove tracking.attention")
    stacks = {name: stack for name in ("encoder", "decoder") if (stack := getattr(model, name)) is not None}
    if len(stacks) == 2 and attention.target is None:
        raise ValueError("tracking.attention.text is what the encoder reads; set tracking.attention.target, too")
    if len(stacks) == 1 and attention.target is not None:
        raise ValueError("tracking.attention.target is for models of two stacks; leave it out")
    kinds = {"self": list(stacks.values()), **{name: [stack] for name, stack in stacks.items()}}
    if len(stacks) == 2:
        kinds["cross"] = [stacks["decoder"]]
    kind = attention.kind or ("cross" if "cross" in kinds else "self")
    if kind not in kinds:
        raise ValueError(f"tracking.attention.kind={kind}: the model has none; use {' or '.join(kinds)}")
    _check_numbers("layers", attention.layers, max(stack.layers for stack in kinds[kind]))
    _check_numbers("heads", attention.heads, min(stack.heads for stack in kinds[kind]))


def _check_numbers(key: str, numbers: list[int] | None, count: int) -> None:
    if numbers is not None and max(numbers) >= count:
        raise ValueError(f"tracking.attention.{key}={numbers}: there are {count}; use 0 to {count - 1}")
