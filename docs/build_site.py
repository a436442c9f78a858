"""Build the documentation site in site/ from the Markdown files of the repository.

python docs/build_site.py            # or: make docs

The pages are staged in the repository's own layout, so the links that work on GitHub work on the site. A broken link
fails the build.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import oomb

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
STAGED = (
    "*.md",
    "LICENSE",
    "CITATION.cff",
    "docs/*.md",
    "docs/*.png",
    "docs/*.html",
    "examples/*",
    "benchmarks/results/*",
)


def stage() -> None:
    """Copy the pages and what they link to, and write the page of the Python API."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for pattern in STAGED:
        for path in filter(Path.is_file, ROOT.glob(pattern)):
            target = PAGES / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    (PAGES / "docs" / "api.md").write_text(api_page())


def api_page() -> str:
    """Return a page that renders the docstring of every public name."""
    names = sorted(oomb._HOME, key=lambda name: (name != "Engine", name))
    # TRL's subclasses are created on import; their docstrings are those of the mixins.
    classes = {"DPOTrainer": "DPOMixin", "SFTTrainer": "SFTMixin"}
    options = "    options: {show_root_heading: false}\n"
    sections = [f"## oomb.{name}\n\n::: {oomb._HOME[name]}.{classes.get(name, name)}\n{options}" for name in names]
    return "\n".join(["# Python API\n", "Import everything on this page from `oomb`.\n", *sections])


if __name__ == "__main__":
    stage()
    sys.exit(subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=ROOT).returncode)
