"""The share of positions at which a head is computed, for the speed of a run; what its loss is one of."""

import pytest

from pretrain.config.objective import ObjectiveConfig
from pretrain.kinds.objectives import OBJECTIVES


@pytest.mark.parametrize(
    ("objective", "share"),
    [
        ({"kind": "causal"}, 1.0),
        ({"kind": "masked"}, 0.15),
        ({"kind": "masked", "masked": {"rate": 0.3}}, 0.3),
        ({"mixture": [{"kind": "causal", "weight": 1}, {"kind": "masked", "weight": 9}]}, 1.0),
        (
            {
                "mixture": [
                    {"kind": "masked", "masked": {"rate": 0.2}, "weight": 3},
                    {"kind": "masked", "masked": {"rate": 0.6}, "weight": 1},
                ]
            },
            0.3,
        ),
    ],
)
def test_only_masked_objectives_leave_positions_out(objective, share):
    assert ObjectiveConfig.model_validate(objective).head_share == pytest.approx(share)


def test_perplexity_is_of_losses_of_words_alone():
    labels = {"answers", "choices", "replaced", "classify", "tag", "images", "masked_patches"}
    no_words = labels | {"dpo", "kto", "contrastive"}
    assert {kind for kind in OBJECTIVES if not ObjectiveConfig(kind=kind).scores_words} == no_words
