"""Tables of tests of which the gate runs a part, and the drills all: rows beyond it run no other code.

@pairwise(mask=MASKS, biased=[False, True], kv_heads=[1, 2, 4])    every pair of values, of every combination
@pytest.mark.parametrize(("shape", "mode"), alternating(SHAPES, MODES))    every value of either, by turns
@pytest.mark.parametrize("preset", thinned(PRESETS, 4))            every fourth of a list
@pytest.mark.parametrize("preset", distinct(PRESETS))               one of those that differ in numbers alone
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

import pytest


def pairwise(**axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with all combinations of values; the gate has each value beside each of every other axis.

    Args:
        axes: The values of each argument, or, by their names in the report, those that have no short text.
    """
    named = [list(axis.items()) if isinstance(axis, Mapping) else [(str(value), value) for value in axis]
             for axis in axes.values()]  # fmt: skip
    rows = list(product(*(range(len(axis)) for axis in named)))
    drawn = Random(0).sample(rows, len(rows))  # in order, rows that follow each other would share most pairs
    seen: set[tuple[tuple[int, int], ...]] = set()
    in_gate = set()
    for row in drawn:
        pairs = set(combinations(enumerate(row), 2))
        if not pairs <= seen:
            seen |= pairs
            in_gate.add(row)
    params = []
    for row in rows:
        chosen = [axis[place] for axis, place in zip(named, row, strict=True)]
        values, name = (value for _, value in chosen), "-".join(name for name, _ in chosen)
        params.append(pytest.param(*values, id=name, marks=() if row in in_gate else pytest.mark.long))
    return pytest.mark.parametrize(tuple(axes), params)


def alternating(first: Iterable[Any], second: Sequence[Any]) -> list[Any]:
    """Marks as `long` all pairs but one for each value of the longer list, with those of the other by turns."""
    return [
        pytest.param(one, other, marks=() if place % len(second) == number else pytest.mark.long)
        for place, one in enumerate(first)
        for number, other in enumerate(second)
    ]


def thinned(values: Iterable[Any], every: int, keep: Iterable[Any] = ()) -> list[Any]:
    """Marks as `long` all values but each `every`th and those of `keep`."""
    kept = [*keep]
    values = list(values)
    assert all(one in values for one in kept), kept
    return [
        value if number % every == 0 or value in kept else pytest.param(value, marks=pytest.mark.long)
        for number, value in enumerate(values)
    ]


def distinct(models: Mapping[str, Any]) -> list[Any]:
    """Marks as `long` the names whose values differ in numbers alone from those of a name before."""
    seen: set[Any] = set()
    params = []
    for name, values in models.items():
        structure = _structure(values)
        params.append(pytest.param(name, marks=pytest.mark.long if structure in seen else ()))
        seen.add(structure)
    return params


def _structure(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted((key, _structure(inner)) for key, inner in value.items()))
    if isinstance(value, list | tuple):
        return tuple(dict.fromkeys(map(_structure, value)))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return "a number" if is_number else repr(value)
