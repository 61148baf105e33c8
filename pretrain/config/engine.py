"""`engine:` -- what runs a step: DeepSpeed ZeRO, DDP or one process, at what precision."""

from typing import Any, Literal

from pydantic import Field, model_validator

from pretrain.config.base import Section


class EngineConfig(Section):
    """How the step is run. None of it changes what is computed, up to rounding.

    Attributes:
        kind: DeepSpeed, torch's DDP, or neither (one process).
        zero_stage: ZeRO stage (Rajbhandari et al. 2020): 1 shards optimizer state, 2 gradients too, 3 weights too.
        precision: Compute dtype. bf16 keeps fp32 master weights under DeepSpeed, and autocasts under ddp and single.
            fp16 keeps them too, and scales the loss by what its gradients bear: ZeRO 1 to 3 on a GPU only.
        device: `auto` takes CUDA where there is one.
        attention: Entry of `model/backends`, or `auto`.
        activation_checkpointing: `full` recomputes each block in the backward pass; `selective` keeps the results of
            matrix products and attention and recomputes the rest.
        activation_checkpointing_every: Only each n-th block is checkpointed.
        compile: torch.compile each block.
        deterministic: Deterministic kernels on CUDA (CPU always is).
        offload_optimizer: `cpu` keeps master weights and optimizer state in the host's memory and steps them there.
        offload_params: `cpu` keeps the working weights there too, between their uses; ZeRO stage 3 only.
        timeout_s: Longest time in a phase of a step, a wait for another rank included, before the job is ended and the
            rank that holds it up is named; three times as long to load, compile, evaluate and save.
    """

    kind: Literal["deepspeed", "ddp", "single"] = "deepspeed"
    zero_stage: int = Field(default=2, ge=0, le=3)
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention: str = "auto"
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    activation_checkpointing_every: int = Field(default=1, ge=1)
    compile: bool = False
    deterministic: bool = False
    offload_optimizer: Literal["none", "cpu"] = "none"
    offload_params: Literal["none", "cpu"] = "none"
    timeout_s: int = Field(default=600, ge=1)

    @property
    def group_timeout_s(self) -> int:
        """The process group's own timeout, which names nobody: later than any limit of the watchdog."""
        return 3 * self.timeout_s + 60

    @model_validator(mode="before")
    @classmethod
    def _without_zero(cls, values: Any) -> Any:
        """Only DeepSpeed has stages: elsewhere the one that was not named is 0, also when the config is written out."""
        if isinstance(values, dict) and values.get("kind") in ("ddp", "single"):
            return {"zero_stage": 0, **values}
        return values

    @model_validator(mode="after")
    def _check(self) -> "EngineConfig":
        if self.kind != "deepspeed" and self.zero_stage:
            raise ValueError(f"zero_stage={self.zero_stage} needs kind=deepspeed, not {self.kind}; set zero_stage=0")
        if self.precision == "fp16" and self.kind != "deepspeed":
            raise ValueError(
                f"precision=fp16 needs a loss scale, which kind=deepspeed has and {self.kind} has not; use bf16 or fp32"
            )
        if self.precision == "fp16" and self.device == "cpu":
            raise ValueError("precision=fp16 needs a GPU: DeepSpeed has no fp16 on device=cpu; use bf16 or fp32")
        if self.precision == "fp16" and not self.zero_stage:
            # FP16_UnfusedOptimizer of 0.19 unscales gradients, DeepSpeedEngine.backward scales for ZeRO only.
            raise ValueError(
                "precision=fp16 is wrong at zero_stage=0: DeepSpeed divides gradients by a loss scale that it has not "
                "multiplied the loss by; use zero_stage=1, 2 or 3"
            )
        if self.offload_optimizer != "none" and not self.zero_stage:
            raise ValueError(
                "offload_optimizer=cpu moves what ZeRO has cut up; use kind=deepspeed and zero_stage=1, 2 or 3"
            )
        if self.offload_params != "none" and self.zero_stage != 3:
            raise ValueError("offload_params=cpu needs weights that are cut up: use kind=deepspeed and zero_stage=3")
        return self


PLAIN_ENGINE = EngineConfig(kind="single", zero_stage=0, precision="fp32")
"""One process, fp32, nothing special: for a model that is used rather than trained."""
