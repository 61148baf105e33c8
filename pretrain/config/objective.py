"""`objective:` -- what is predicted from what, and which model shape that needs."""

from pydantic import field_validator

from pretrain.config.base import Section, check_name

SHAPE_OF_OBJECTIVE: dict[str, str] = {"causal": "decoder"}
"""The stacks that each objective needs: `encoder`, `decoder`, or `encoder+decoder`. Modules under `extend` may add."""


class ObjectiveConfig(Section):
    """The training objective.

    Attributes:
        kind: Entry of `objective/`.
    """

    kind: str = "causal"

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        return check_name(kind, SHAPE_OF_OBJECTIVE)
