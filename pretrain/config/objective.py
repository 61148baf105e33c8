"""`objective:` -- what is predicted from what, and which model shape that needs."""

from typing import Literal

from pretrain.config.base import Section

SHAPE_OF_OBJECTIVE: dict[str, str] = {"causal": "decoder"}
"""The stacks that each objective needs: `encoder`, `decoder`, or `encoder+decoder`."""


class ObjectiveConfig(Section):
    """The training objective.

    Attributes:
        kind: Entry of `objective/`.
    """

    kind: Literal["causal"] = "causal"
