"""Records of layouts and heads: what they name exists, and their fields fit each other."""

from pkgutil import resolve_name

import pytest

from pretrain.config.model import HeadConfig
from pretrain.config.prepare import InputConfig
from pretrain.kinds.heads import HEADS
from pretrain.kinds.layout import BESIDE_COLUMNS, IMAGE_COLUMNS, SOURCE_COLUMNS, TOKEN_COLUMNS
from pretrain.kinds.layouts import LAYOUTS
from pretrain.kinds.objectives import OBJECTIVES, objective_of_data


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_a_layout_names_exists(kind):
    layout = LAYOUTS[kind]
    assert callable(resolve_name(layout.document)) and callable(resolve_name(layout.pieces))
    assert set(layout.fields) <= InputConfig.model_fields.keys()
    assert kind in OBJECTIVES[objective_of_data(kind)].data
    beside = BESIDE_COLUMNS if layout.loss_mask or layout.has_labels else TOKEN_COLUMNS
    expected = SOURCE_COLUMNS if layout.has_source else beside
    assert layout.table_columns == (IMAGE_COLUMNS if layout.images else expected)


@pytest.mark.parametrize("kind", HEADS)
def test_what_a_head_names_are_keys(kind):
    assert set(HEADS[kind].settings) <= HeadConfig.model_fields.keys()
    assert {record.head for record in OBJECTIVES.values()} <= HEADS.keys()
