"""Style that a linter does not check: sizes, docstrings, ASCII, and words that have no place in the repository."""

import ast
import re
import subprocess

from tests.repo.source import ROOT, SOURCE_FILES, TEST_FILES, findings_by_file, name

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_FORWARD_PARAMETERS = 4  # beside self: what belongs together is one NamedTuple
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".tmpl", ".sbatch", ".sh", ""}
# Written in pieces, so that this file does not contain what it looks for.
FORBIDDEN_WORDS = re.compile(
    "|".join(["/wo" + "rk/", "/ro" + "ot/", "/ho" + r"me/\w", r"/tm" + r"p/\w", "pypi\\.o" + "rg", "pythonhos" + "ted"])
)
PLACEHOLDERS = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]) + r")\b")


def tracked_text_files():
    """Returns the files that git tracks and that are text."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / entry for entry in listed.split("\0") if entry]
    return [path for path in paths if path.suffix in TEXT_SUFFIXES and path.is_file()]


def long_functions(tree: ast.Module, limit: int) -> list[str]:
    """Returns the functions with more than `limit` lines, the docstring not counted."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node):
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            if lines > limit:
                found.append(f"{node.name}: {lines} lines")
    return found


def shapeless(tree: ast.Module) -> list[str]:
    """Returns each `forward` of a module with too many parameters, and functions of a tensor or a tuple."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        parameters = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        if node.name == "forward" and parameters[:1] == ["self"] and len(parameters) > 1 + MAX_FORWARD_PARAMETERS:
            found.append(f"forward: {len(parameters) - 1} parameters")
        options = ast.unparse(node.returns).split(" | ") if node.returns else []
        if "Tensor" in options and any(option.startswith("tuple[") for option in options):
            found.append(f"{node.name}: a tensor or a tuple")
    return found


def undocumented(tree: ast.Module) -> list[str]:
    """Returns public classes and functions without a docstring, methods of public classes included.

    Not `forward` of a module, whose meaning the class states, and no override or overload that a decorator names.
    """
    found = [] if ast.get_docstring(tree) else ["the module"]

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            is_override = any(
                ast.unparse(decorator).endswith(("override", "overload")) for decorator in node.decorator_list
            )
            if node.name.startswith("_") or is_override:
                continue
            if not ast.get_docstring(node) and not (prefix and node.name == "forward"):
                found.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")

    visit(tree.body, "")
    return found


def test_source_files_have_one_idea_and_short_functions():
    sizes = {name(path): len(path.read_text().splitlines()) for path in SOURCE_FILES}
    assert {file: lines for file, lines in sizes.items() if lines >= MAX_FILE_LINES} == {}
    assert findings_by_file(SOURCE_FILES, lambda tree: long_functions(tree, MAX_FUNCTION_LINES - 1)) == {}


def test_a_forward_has_few_parameters_and_a_function_one_kind_of_result():
    assert findings_by_file(SOURCE_FILES, shapeless) == {}


def test_what_is_public_has_a_docstring():
    assert findings_by_file(SOURCE_FILES, undocumented) == {}


def test_python_is_ascii_and_finished():
    texts = {name(path): path.read_bytes() for path in (*SOURCE_FILES, *TEST_FILES)}
    assert [file for file, text in texts.items() if not text.isascii()] == []
    found = {file: PLACEHOLDERS.findall(text.decode(errors="replace")) for file, text in texts.items()}
    assert {file: words for file, words in found.items() if words} == {}


def test_no_file_names_a_machine_or_a_registry():
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in tracked_text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if FORBIDDEN_WORDS.search(line)
    ]
    assert found == []


def test_the_rules_themselves():
    long = "def f():\n    'doc'\n" + "    x = 1\n" * 5
    assert long_functions(ast.parse(long), 5) == ["f: 6 lines"]
    assert long_functions(ast.parse(long), 6) == []
    code = "def forward(self, a, b, c, *, d, e): ...\ndef forward(context, a, b, c, d, e): ...\n"
    assert shapeless(ast.parse(code)) == ["forward: 5 parameters"]
    code = "def f() -> Tensor | tuple[Tensor, ...]: ...\ndef g() -> tuple[Tensor | None, ...]: ...\n"
    assert shapeless(ast.parse(code)) == ["f: a tensor or a tuple"]
    code = (
        "def shown(): ...\ndef _hidden(): ...\nclass A:\n  'doc'\n  def method(self): ...\n  def __init__(self): ...\n"
    )
    assert undocumented(ast.parse(code)) == ["the module", "shown", "A.method"]
    assert FORBIDDEN_WORDS.search("see /wo" + "rk/notes")
    assert not FORBIDDEN_WORDS.search("a framework/of, network/home")
