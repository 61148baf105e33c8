"""The layering rule: a module imports only from a lower layer or its own folder. Lazy imports count too.

0 errors | 1 utils | 2 config.base | 3 kinds | 4 config.model | 5 families | 6 config run rows parts
7 plan shards types dist | 8 tokenizer | 9 data preparation model objective optim tracking
10 engine checkpoint generation interop resolve | 11 artifact | 12 attention_maps
13 evaluation report doctor datacheck inspect | 14 training drill scale | 15 api release | 16 cli
launch beside them: layers 0 to 6, plan, shards
"""

import ast
from pathlib import Path

import pytest

from tests.repo.source import SOURCE_FILES, module_name, name, parse

LAYERS = [
    {"errors"},
    {"utils"},
    {"config.base"},
    {"kinds"},
    {"config.model"},
    {"families"},
    {"config", "run", "rows", "parts"},
    {"plan", "shards", "types", "dist"},
    {"tokenizer"},
    {"data", "preparation", "model", "objective", "optim", "tracking"},
    {"engine", "checkpoint", "generation", "interop", "resolve"},
    {"artifact"},
    {"attention_maps"},
    {"evaluation", "report", "doctor", "datacheck", "inspect"},
    {"training", "drill", "scale"},
    {"api", "release"},
    {"cli"},
]
LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}
LAUNCH_MAY_USE = set().union(*LAYERS[:7]) | {"plan", "shards"}
ENTRY_POINTS = {"pretrain", "pretrain.__main__"}
"""The version, and `python -m pretrain`, which only calls the command line."""
BY_NAME = {("pretrain.config.load", "pretrain.interop.release")}
"""References to a higher layer by name: the model of `init.from`, where that is a Hugging Face folder."""
TORCH_FREE = (*(f"pretrain.{part}" for part in sorted(LAUNCH_MAY_USE)), "pretrain_launch")
ON_RANKS = ("pretrain.parts", "pretrain.run.heartbeat", "pretrain.run.watchdog")
"""Modules of these rooms that only ranks import."""
BY_NAME_CALLS = ("import_module", "__import__", "resolve_name")
HEAVY = {"torch", "deepspeed", "accelerate", "transformers"}


def part_of(module: str) -> str:
    """Returns the part of `pretrain` that a module belongs to: its room, or `config.base` and its like."""
    names = module.split(".")[1:3]
    inner = ".".join(names)
    return inner if inner in LAYER_OF else names[0]


def imported_modules(tree: ast.Module, module: str, is_package: bool) -> set[str]:
    """Returns the absolute dotted names that any import statement of a file names, at whatever depth."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            # `from pretrain import io` names a module by its alias.
            found |= {f"{source}.{alias.name}" for alias in node.names} if source == "pretrain" else {source}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(BY_NAME_CALLS):
            named = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            found |= {str(value).partition(":")[0] for value in named}
    return found


def violations(module: str, imports: set[str]) -> list[str]:
    """Returns each import that the rule forbids, with the reason."""
    if module in ENTRY_POINTS:
        return []
    root, *rest = module.split(".")
    found = []
    for target in sorted(imports):
        target_root, *target_rest = target.split(".")
        if target_root == "pretrain_launch" and root != "pretrain_launch" and rest[0] != "cli":
            found.append(f"{module} imports {target}: only the command line may use launch")
        if target_root != "pretrain" or not target_rest or target_rest[0].startswith("__"):
            continue
        used = part_of(target)
        if used not in LAYER_OF:
            found.append(f"{module} imports {target}: {used} has no layer")
        elif root == "pretrain_launch":
            if used not in LAUNCH_MAY_USE:
                found.append(f"{module} imports {target}: launch may use {sorted(LAUNCH_MAY_USE)} only")
        elif part_of(module) != used:
            mine, its = LAYER_OF[part_of(module)], LAYER_OF[used]
            if its >= mine and (module, target) not in BY_NAME:
                found.append(f"{module} (layer {mine}) imports {target} (layer {its})")
    return found


def check(path: Path) -> list[str]:
    """Returns the violations of one file."""
    return violations(module_name(path), imported_modules(parse(path), module_name(path), path.name == "__init__.py"))


def test_every_source_file_belongs_to_a_layer():
    modules = {module_name(path) for path in SOURCE_FILES} - ENTRY_POINTS
    parts = {part_of(module) for module in modules if module.startswith("pretrain.")}
    assert parts <= LAYER_OF.keys()
    assert {"errors", "config", "config.base", "types", "optim"} <= parts


def test_a_module_imports_only_from_below_or_its_own_folder():
    assert [violation for path in SOURCE_FILES for violation in check(path)] == []


def test_what_login_nodes_run_imports_no_torch():
    torch_free = [
        path for path in SOURCE_FILES if module_name(path).startswith(TORCH_FREE) and module_name(path) not in ON_RANKS
    ]
    imports = {name(path): imported_modules(parse(path), module_name(path), False) for path in torch_free}
    roots = {file: {module.split(".")[0] for module in modules} for file, modules in imports.items()}
    assert torch_free and {file: found & HEAVY for file, found in roots.items() if found & HEAVY} == {}


@pytest.mark.parametrize(
    ("module", "code", "allowed"),
    [
        ("pretrain.data.stream", "from pretrain.shards.index import DataIndex", True),
        ("pretrain.data.stream", "from pretrain.data.order import Order", True),
        ("pretrain.data.stream", "from .order import Order", True),
        ("pretrain.data.stream", "import numpy, torch", True),
        ("pretrain.run.folder", "from pretrain.config.run import RunConfig", False),
        ("pretrain.utils.io", "from pretrain.errors import DiskError", True),
        ("pretrain.training.loop", "from pretrain.engine.engine import Engine", True),
        ("pretrain.cli.nodes", "from pretrain_launch.local import launch_local", True),
        ("pretrain.data.stream", "from pretrain.model import build_model", False),
        ("pretrain.data.stream", "from ..model import build_model", False),
        ("pretrain.data.stream", "from .. import model", False),
        ("pretrain.data.stream", "def f():\n    from pretrain.engine import Engine", False),
        ("pretrain.data.stream", "import importlib\nimportlib.import_module('pretrain.engine')", False),
        ("pretrain.data.stream", "import pkgutil\npkgutil.resolve_name('pretrain.engine.engine:Engine')", False),
        ("pretrain.engine.engine", "import pretrain.checkpoint.manager", False),
        ("pretrain.utils.io", "from pretrain import run", False),
        ("pretrain.config.load", "from pretrain.plan import params", False),
        ("pretrain.config.load", "from pretrain.kinds.optimizers import OPTIMIZERS", True),
        ("pretrain.kinds.optimizers", "from pretrain.config.base import Section", True),
        ("pretrain.kinds.optimizers", "from pretrain.config.run import RunConfig", False),
        ("pretrain.config.base", "from pretrain.kinds.optimizers import OPTIMIZERS", False),
        ("pretrain.config.presets", "from pretrain.families import PRESETS", True),
        ("pretrain.families.decoders.gpt2", "from pretrain.config.model import StackConfig", True),
        ("pretrain.families.decoders.gpt2", "from pretrain.config.presets import PRESETS", False),
        ("pretrain.training.loop", "from pretrain.cli import main", False),
        ("pretrain.data.stream", "from pretrain.nowhere import x", False),
        ("pretrain.training.loop", "import pretrain_launch.local", False),
        ("pretrain_launch.local", "from pretrain.run.folder import RunDir", True),
        ("pretrain_launch.local", "from pretrain.plan.params import count_parameters", True),
        ("pretrain_launch.local", "from pretrain_launch.local import torchrun", True),
        ("pretrain_launch.local", "from pretrain.dist import read_world", False),
    ],
)
def test_the_rule_itself(module, code, allowed):
    assert (violations(module, imported_modules(ast.parse(code), module, False)) == []) == allowed
