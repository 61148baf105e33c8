"""Hooks of the documentation site: pages from outside `docs/`, the command reference, and the API pages."""

import json
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
    "slurm/README.md": "slurm.md",
    "benchmarks/results.md": "benchmarks.md",
    "docs/python.ipynb": "python.md",
}
"""Page of the site for each document that lies outside of `docs/`, or is no Markdown."""
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def _command_reference() -> str:
    """Returns the help texts of all commands as Markdown."""
    import typer
    from typer.cli import get_docs_for_click

    from pretrain.cli.commands import app

    command = typer.main.get_command(app)
    _lengthen(command)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="pretrain", title="Commands")
    return re.sub(r"^Example: (.+)$", r"    \1", text, flags=re.MULTILINE)


def _lengthen(command: Any) -> None:
    """Has the lists of commands show whole sentences, which typer cuts to 45 characters."""
    for inner in getattr(command, "commands", {}).values():
        inner.short_help = " ".join((inner.help or "").split("\n\n")[0].split())
        _lengthen(inner)


def _notebook_page(text: str) -> str:
    """Returns a notebook as Markdown, with the texts that its cells have printed."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            shown = "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))
            parts.append(f"```text\n{shown.rstrip()}\n```")
    return "\n\n".join(parts)


def _api_pages() -> dict[str, str]:
    """Returns a page for each package of the source tree, keyed by its address in the site."""
    pages = {}
    for root, package in ((ROOT, "pretrain"), (ROOT / "launch", "pretrain_launch")):
        folders = [root / package]
        if package == "pretrain":
            folders += sorted(path for path in (root / package).iterdir() if (path / "__init__.py").is_file())
        for folder in folders:
            pattern = "*.py" if folder.name == "pretrain" else "**/*.py"
            modules = [path for path in sorted(folder.glob(pattern)) if not path.stem.startswith("__")]
            names = [".".join(path.relative_to(root).with_suffix("").parts) for path in modules]
            title = ".".join(folder.relative_to(root).parts)
            pages[f"api/{title}.md"] = "\n\n".join([f"# `{title}`", *(f"::: {name}" for name in names)])
    return pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the API pages to the navigation."""
    assert config.nav is not None
    config.nav.append({"API": [{PurePosixPath(page).stem: page} for page in _api_pages()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are no files of `docs/`."""
    pages = {page: (ROOT / path).read_text(encoding="utf-8") for path, page in OUTSIDE.items()}
    pages["python.md"] = _notebook_page(pages["python.md"])
    pages["license.md"] = f"# Licence\n\n```text\n{pages['license.md']}```\n"
    for page, text in {**pages, "commands.md": _command_reference(), **_api_pages()}.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites links between documents of the repository to links between pages."""
    address = page.file.src_uri
    source = {page: path for path, page in OUTSIDE.items()}.get(address, f"docs/{address}")

    def rewrite(found: re.Match[str]) -> str:
        target = normpath(f"{PurePosixPath(source).parent}/{found[0]}")
        return relpath(OUTSIDE.get(target, target.removeprefix("docs/")), PurePosixPath(address).parent)

    return _LINK.sub(rewrite, markdown)
