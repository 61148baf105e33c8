"""Records of objectives: what they name exists, and their fields fit each other."""

from pkgutil import resolve_name

import pytest

from pretrain.config.base import Section
from pretrain.config.objective import ObjectiveConfig
from pretrain.kinds.objectives import OBJECTIVES
from pretrain.objective import build_loss


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_what_a_record_names_exists(kind):
    record = OBJECTIVES[kind]
    parts = [record.rows, record.loss, record.token_kinds, *([record.row_note] if record.row_note else [])]
    assert all(callable(resolve_name(name)) for name in parts)
    assert record.next_command.count("{path}") == bool(record.next_command)
    assert callable(build_loss(ObjectiveConfig(kind=kind)))
    assert set(record.scored_as.values()) <= OBJECTIVES.keys()
    section = ObjectiveConfig(kind=kind).section
    assert type(section) is record.section if record.section else section is None
    assert 0 <= ObjectiveConfig(kind=kind).target_share <= 1


def test_the_keys_of_sections_are_those_of_the_records():
    sections = {name for name, info in ObjectiveConfig.model_fields.items() if isinstance(info.default, Section)}
    assert sections == {name for name, record in OBJECTIVES.items() if record.section}
