"""`engine:` -- what runs a step: DeepSpeed ZeRO, DDP or one process, at what precision."""

from typing import Literal

from pydantic import Field, model_validator

from pretrain.config.base import Section


class EngineConfig(Section):
    """How the step is run. None of it changes what is computed, up to rounding.

    Attributes:
        kind: DeepSpeed, torch's DDP, or neither (one process).
        zero_stage: ZeRO stage (Rajbhandari et al. 2020): 1 shards optimizer state, 2 gradients too, 3 weights too.
        precision: Compute dtype. bf16 keeps fp32 master weights under DeepSpeed, and autocasts under ddp and single.
        device: `auto` takes CUDA where there is one.
        attention: Entry of `model/backends`, or `auto`.
        activation_checkpointing: `full` recomputes each block in the backward pass; `selective` keeps the results of
            matrix products and attention and recomputes the rest.
        activation_checkpointing_every: Only each n-th block is checkpointed.
        compile: torch.compile each block.
        deterministic: Deterministic kernels on CUDA (CPU always is).
        timeout_s: Longest wait for another rank before the job is torn down.
    """

    kind: Literal["deepspeed", "ddp", "single"] = "deepspeed"
    zero_stage: int = Field(default=2, ge=0, le=3)
    precision: Literal["fp32", "bf16"] = "bf16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention: str = "auto"
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    activation_checkpointing_every: int = Field(default=1, ge=1)
    compile: bool = False
    deterministic: bool = False
    timeout_s: int = Field(default=600, ge=1)

    @model_validator(mode="after")
    def _check(self) -> "EngineConfig":
        if self.kind != "deepspeed" and "zero_stage" in self.model_fields_set and self.zero_stage:
            raise ValueError(f"zero_stage={self.zero_stage} needs kind=deepspeed, not {self.kind}; set zero_stage=0")
        return self


PLAIN_ENGINE = EngineConfig(kind="single", zero_stage=0, precision="fp32")
"""One process, fp32, nothing special: for a model that is used rather than trained."""
