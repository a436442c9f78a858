"""The documentation site builds without a warning: no broken link, no page left out, every docstring renders."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from documents import ROOT
from waiting import HANG_S

import oomb


@pytest.mark.timing
def test_the_site_builds_and_documents_every_public_name() -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "docs/build_site.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "site" / "docs" / "api" / "index.html").read_text()
    assert set(re.findall(r'<h2 id="oomb(\w+)"', page)) == {name.lower() for name in oomb._HOME}
    # A heading other than "Examples:" would make quotations of the prompts.
    assert "<blockquote>" not in page and page.count("&gt;&gt;&gt;") >= len(oomb._HOME)
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert pages <= set(re.findall(r"docs/\w+\.md", (ROOT / "mkdocs.yml").read_text())), "the navigation lacks a page"
