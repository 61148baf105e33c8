"""Attributes of DeepSpeed whose names begin with an underscore: touched by the engine alone, and each is in a fake.

That the installed DeepSpeed has what the fakes have is in tests/integration/test_deepspeed_private.py.
"""

import ast

from tests.helpers.fake_deepspeed import FakeEngine, offered
from tests.helpers.thread_ranks import Ranks
from tests.repo.source import ROOT, SOURCE_FILES, name, parse
from tests.unit.engine.toy import Toy, adamw

PRIVATE = {"_hp_mapping", "_get_norm_groups", "_global_grad_norm", "_invalidate_trace"}
PRIVATE |= {"_DeepSpeedZeRoOffload__allgather_stream"}
GROUPS = {"_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP_RANKS"}
"""Of `deepspeed.utils.groups`, which no fake has: tests/integration/test_expert_parallel.py needs them."""

FOREACH = {"_foreach_copy_", "_foreach_zero_"}
"""Of torch: operations over lists of tensors."""


ACCELERATE = {"_reset_state"}
"""Of accelerate's states, which have no public way to be set up again: the self-check starts two engines."""


def touched(tree: ast.Module) -> set[str]:
    """Names with one underscore at their front, of attributes of others than `self` or `cls`, and in strings."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found |= set() if is_own else {node.attr}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
    return {text for text in found if text.startswith("_") and not text.startswith("__")}


def of_fakes() -> set[str]:
    found = set()
    for stage, precision in ((0, "fp32"), (0, "bf16"), (2, "bf16"), (3, "bf16")):
        module = Toy()
        engine = FakeEngine(module, adamw(module), Ranks(1), stage, precision)
        found |= {*offered(engine), *(key for parameter in module.parameters() for key in vars(parameter))}
        found |= set() if engine.optimizer is engine.basic_optimizer else set(offered(engine.optimizer))
        if stage == 3:
            gathers = engine.optimizer.parameter_offload
            found |= {*offered(gathers), *offered(gathers.param_coordinator)}
    return {text for text in found if text.startswith("_")}


def test_each_that_the_engine_touches_is_offered_by_a_fake_and_no_other():
    files = [path for path in SOURCE_FILES if path.parent == ROOT / "pretrain" / "engine"]
    assert set().union(*(touched(parse(path)) for path in files)) == PRIVATE | GROUPS | FOREACH | ACCELERATE
    assert of_fakes() == PRIVATE


def test_nothing_else_touches_them():
    others = [path for path in SOURCE_FILES if path.parent != ROOT / "pretrain" / "engine"]
    assert len(others) > 100
    named = [path for path in others if any(text in path.read_text() for text in PRIVATE | GROUPS)]
    assert [name(path) for path in named if touched(parse(path)) & (PRIVATE | GROUPS)] == []


def test_the_rule_itself():
    code = "self._a\ncls._b\nx._c = y.z._d\ngetattr(x, '_e')\nx.__f__\n'_not a name'\n"
    assert touched(ast.parse(code)) == {"_c", "_d", "_e"}
