"""Files about the project: continuous integration, pre-commit, the citation and the changelog."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import yaml
from documents import ROOT
from packaging.requirements import Requirement

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def load_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_workflow_runs_ci_with_the_oldest_python() -> None:
    [job] = load_yaml(".github/workflows/ci.yml")["jobs"].values()
    [python] = [step["with"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert PROJECT["requires-python"] == f">={python['python-version']}"
    assert python["cache"] == "pip"
    assert all((ROOT / name).is_file() for name in python["cache-dependency-path"].split())
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]


def test_pre_commit_lints_with_the_ruff_of_the_project() -> None:
    [ruff] = load_yaml(".pre-commit-config.yaml")["repos"]
    [required] = [one for one in map(Requirement, PROJECT["optional-dependencies"]["test"]) if one.name == "ruff"]
    assert ruff["rev"].removeprefix("v") in required.specifier
    assert [hook["id"] for hook in ruff["hooks"]] == ["ruff-check", "ruff-format"]


def test_the_citation_is_of_this_version_and_names_the_paper() -> None:
    citation = load_yaml("CITATION.cff")
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    paper = citation["preferred-citation"]
    assert "2602.02108" in paper["url"] and paper["title"].startswith("Out of the Memory Barrier")
    assert all({"given-names", "family-names"} == set(author) for author in paper["authors"])


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## \[(\S+)\] - \S+", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == PROJECT["version"]
