"""MkDocs' hook: adds the generated pages, and the documents that are stored outside of `docs/`.

Links in documents lead to files of the repository, so that they work wherever the sources are read. On the site a link to
a document leads to its page; a link to any other file becomes its name.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

import plots
import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ROOT / "build/docs-packages"  # (what mkdocs.yml tells mkdocstrings to read)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]*)\]\((?P<target>[^)\s]+)\)")
_IMAGE = re.compile(r"!\[(?P<text>[^\]\n]*)\]\((?P<target>[^)\s]+)\)")


def documents() -> dict[str, str]:
    """The page of each document outside of `docs/`, by its path in the repository."""
    found = {
        "README.md": "index.md",
        "ARCHITECTURE.md": "internals/architecture.md",
        "CONTRIBUTING.md": "contributing.md",
        "CHANGELOG.md": "changelog.md",
        "examples/README.md": "examples.md",
    }
    results = sorted((ROOT / "benchmarks/results").glob("*.md"))
    return found | {f"benchmarks/results/{path.name}": f"benchmarks/{path.name}" for path in results}


def on_startup(command: str, dirty: bool) -> None:
    """Make a tree of links in which `zgraph.passes` and `zgraph.codegen` are inside of `zgraph`, as they are installed."""
    shutil.rmtree(PACKAGES, ignore_errors=True)
    (PACKAGES / "zgraph").mkdir(parents=True)
    for entry in [*(ROOT / "zgraph").iterdir(), ROOT / "passes", ROOT / "codegen"]:
        os.symlink(entry, PACKAGES / "zgraph" / entry.name)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, the documents from outside, and the pictures that these show."""
    for path, make in reference.PAGES.items():
        files.append(File.generated(config, path, content=make()))
    for path, page in documents().items():
        text = (ROOT / path).read_text()
        if page.startswith("benchmarks/"):
            text = plots.with_plot(Path(path).stem, text)
        files.append(File.generated(config, page, content=text))
    for picture in sorted((ROOT / "benchmarks/results").glob("*.svg")):
        files.append(File.generated(config, f"benchmarks/{picture.name}", content=picture.read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to pages of the site."""
    outside = {page: path for path, page in documents().items()}
    here = outside.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    known = {f"docs/{file.src_uri}": file.src_uri for file in files if file.src_uri not in outside} | documents()
    known |= {
        f"benchmarks/results/{path.name}": f"benchmarks/{path.name}"
        for path in (ROOT / "benchmarks/results").glob("*.svg")
    }

    def moved(match: re.Match[str]) -> str:
        target, hash_, heading = match["target"].partition("#")
        if "://" in target or not target or match["target"].startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        text = match["text"]
        if path not in known:
            return text if text.startswith("`") else f"`{path}`" if text == path or "/" in text else text
        link = posixpath.relpath(known[path], posixpath.dirname(page.file.src_uri) or ".")
        return f"{'!' if match[0].startswith('!') else ''}[{text}]({link}{hash_}{heading})"

    return outside_of_code(markdown, lambda text: _LINK.sub(moved, _IMAGE.sub(moved, text)))


def outside_of_code(markdown: str, change: Any) -> str:
    """Change a page's text, but not its blocks of code."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)
    return "".join(part if part.startswith("```") else change(part) for part in parts)
