"""The package as a whole: who imports whom, what it needs, and whether its documents tell the truth."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from documents import DOCUMENTS, ROOT, commands, fences
from packaging.requirements import Requirement
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner
from waiting import HANG_S

import oomb
from oomb.cli import main
from oomb.models import load, presets

PACKAGE = ROOT / "oomb"
CONSTRAINTS = ROOT / "tests" / "constraints.txt"

# Import only from lower floors, and on your own floor only along the arrow.
FLOORS = (
    ("utils", "config", "ops", "distributed"),
    ("models", "attention", "memory", "data"),
    ("planner", "engine"),
    ("trainers", "eval", "cli"),
)
ARROWS = {
    "models": {"attention", "memory", "data"},
    "config": {"utils"},
    "ops": {"config", "utils"},
    "engine": {"planner"},
    "cli": {"trainers", "eval"},
}
LEVEL = {name: level for level, floor in enumerate(FLOORS) for name in floor}
ENTRY_POINTS = {"oomb", "oomb.__main__"}
WITH_TRITON = "oomb.ops.triton_kernels"
"""The only package that imports triton. Its users look for Triton first."""

# Not needed to import anything of ours. The first group are our extras, the others are what users often have besides.
OPTIONAL = [
    "peft", "triton", "pytest", "hypothesis", "xdist", "ruff", "mypy",
    "trl", "datasets", "liger_kernel", "flash_attn", "bitsandbytes", "deepspeed", "xformers", "wandb", "tensorboard",
    "matplotlib", "trackio", "pyte", "optuna", "sentencepiece", "gguf", "scipy", "pandas", "sklearn", "tiktoken",
]  # fmt: skip


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether at the top of the file) of every import; those for type checkers alone are left out."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: imports are absolute here"
            if node.module == "oomb":
                found += [(f"oomb.{alias.name}", id(node) in top) for alias in node.names]
            else:
                found.append((node.module, id(node) in top))
    return found


def our_imports(path: Path) -> set[str]:
    """The entries of the package that a file imports. What `oomb/__init__.py` defines itself is not a module."""
    names = {name.split(".")[1] for name, _ in imports(path) if name.startswith("oomb.")}
    return {name for name in names if (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()}


def floor_violations(name: str, imported: set[str]) -> set[str]:
    below = {other for other in imported if LEVEL[other] < LEVEL[name]}
    return imported - below - ARROWS.get(name, set()) - {name}


def test_every_module_has_its_floor() -> None:
    ours = {name.split(".")[1] for name in modules() if name not in ENTRY_POINTS}
    assert ours == set(LEVEL)


def test_imports_only_go_down() -> None:
    for name, path in modules().items():
        if name not in ENTRY_POINTS:
            wrong = floor_violations(name.split(".")[1], our_imports(path))
            assert not wrong, f"{name} imports {wrong}, which is neither on a lower floor nor along an arrow"


def test_files_are_short() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert not {name: length for name, length in lengths.items() if length > 400}


def test_an_upward_import_would_be_seen(tmp_path: Path) -> None:
    file = tmp_path / "memory.py"
    file.write_text(
        "def late():\n    from oomb.engine.engine import Engine\n    from oomb import models, __version__\n"
    )
    assert our_imports(file) == {"engine", "models"}
    assert floor_violations("memory", our_imports(file)) == {"engine", "models"}
    assert floor_violations("engine", {"memory", "models", "planner"}) == set()
    assert floor_violations("planner", {"engine"}) == {"engine"}


def test_only_the_engine_joins_attention_and_memory() -> None:
    for name, path in modules().items():
        if not name.startswith("oomb.engine"):
            assert not {"attention", "memory"} <= our_imports(path), name


def test_packages_do_not_re_export() -> None:
    for name, path in modules().items():
        if path.name == "__init__.py" and name != "oomb":
            [docstring] = ast.parse(path.read_text()).body
            assert isinstance(docstring, ast.Expr), f"{name} is more than a docstring"


def test_every_module_says_what_it_does() -> None:
    for name, path in modules().items():
        text = ast.get_docstring(ast.parse(path.read_text()))
        assert text and re.match(r"[`A-Z].*[.:]", text.splitlines()[0]), name


def test_third_party_imports_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {re.split(r"[<>=\[ ]", entry)[0] for entry in project["dependencies"]}
    core = {{"pyyaml": "yaml"}.get(name, name) for name in core}
    extras = {
        re.split(r"[<>=\[ ]", entry)[0]
        for extra in ("peft", "plot", "trl", "datasets")
        for entry in project["optional-dependencies"][extra]
    }
    for name, path in modules().items():
        for imported, at_top in imports(path):
            package = imported.split(".")[0]
            if package in ("oomb", *sys.stdlib_module_names):
                continue
            if package == "triton":
                assert name.startswith(WITH_TRITON), f"{name} imports triton"
                continue
            assert package in (core if at_top else core | extras), f"{name} imports {package}"


@pytest.mark.timing
def test_every_module_imports_with_the_core_dependencies_alone() -> None:
    program = f"""
import importlib, importlib.machinery, sys
blocked = {OPTIONAL!r}
class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in blocked else super().find_spec(name, path, target)
sys.meta_path[:] = [Without if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
for name in {[name for name in modules() if not name.startswith(WITH_TRITON + ".")]!r}:
    importlib.import_module(name)
import oomb
assert oomb.Trainer and oomb.Engine and oomb.Config and oomb.UnsupportedModelError
try:
    import peft
except ModuleNotFoundError:
    print("imported all without", *[name for name in blocked if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "imported all without"


@pytest.mark.timing
def test_import_oomb_and_help_stay_light() -> None:
    program = (
        "import sys, oomb, oomb.cli.main; print(*[m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=HANG_S)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


def test_an_installed_package_has_its_types(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "oomb", ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True, timeout=HANG_S)
    [wheel] = tmp_path.glob("*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    assert "oomb/py.typed" in files
    assert {name for name in files if name.endswith(".py")} == {
        path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py")
    }


def test_the_public_names() -> None:
    for name in oomb.__all__:
        assert getattr(oomb, name)
    # Those that need TRL are not part of `from oomb import *`.
    assert dir(oomb) == sorted([*oomb.__all__, "DPOTrainer", "SFTTrainer"])
    with pytest.raises(AttributeError, match="it has Config, DPOTrainer, Engine"):
        _ = oomb.Enginge
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == oomb.__version__


def test_files_stay_short_and_plain() -> None:
    beside = (path for folder in ("tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
    for path in [*PACKAGE.rglob("*.py"), *beside]:
        text = path.read_text()
        assert text.count("\n") <= 500, path
        assert not re.search(r"\b(TODO|FIXME|XXX)\b", text) or path.name == "test_packaging.py", path


def shown_commands() -> list[str]:
    """Each once, however many pages have it."""
    shown = (line for path in DOCUMENTS for block in fences(path, "bash", "sh") for line in commands(block))
    return list(dict.fromkeys(shown))


def test_commands_are_shown() -> None:
    programs = {command.split()[0] for command in shown_commands()}
    assert programs == {"oomb", "make", "torchrun"}
    assert {"make demo", "make test", "oomb train", "oomb verify demo"} <= set(shown_commands())


@pytest.mark.parametrize("command", shown_commands())
def test_shown_commands_are_real(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
        return
    if words[0] == "torchrun":
        started = get_args_parser().parse_args(words[1:])
        assert started.module and started.training_script == "oomb"
        words = ["oomb", *started.training_script_args]
    group: Any = typer.main.get_command(main.app)
    context = group.make_context("oomb", words[1:], resilient_parsing=False)
    name, subcommand, rest = group.resolve_command(context, words[1:])
    # Parses, or raises a usage error; runs nothing.
    subcommand.make_context(name, rest)


def test_a_command_that_is_not_real_would_be_seen() -> None:
    with pytest.raises(Exception, match="No such option"):
        test_shown_commands_are_real("oomb train --max_len 5")
    with pytest.raises(Exception, match="No such command"):
        test_shown_commands_are_real("oomb fly")


@pytest.mark.parametrize("command", [c for c in shown_commands() if "demo" in c.split() and c.startswith("oomb")])
def test_quick_commands_run(command: str) -> None:
    result = CliRunner().invoke(main.app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output


def test_the_readme_quickstart_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def tiny(name: str, dtype: torch.dtype) -> Any:
        config = presets.preset_config("demo", hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", staticmethod(tiny))
    blocks = fences(ROOT / "README.md", "python")
    names: dict[str, Any] = {}
    before = None
    for line in blocks[0].splitlines():
        exec(line, names)
        if line.startswith("engine"):
            before = [p.detach().clone() for p in names["model"].parameters()]
    assert before is not None
    after = list(names["model"].parameters())
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert float(names["loss"].detach()) == pytest.approx(5.6, abs=0.5)


def test_the_example_with_lora_and_data_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    monkeypatch.chdir(tmp_path)
    load.load_model("demo", device="cpu", dtype="bfloat16").save_pretrained("model")
    words = Tokenizer(models.WordLevel({"?": 0, "one": 1, "two": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained("model")
    Path("my_text.txt").write_text("one two two " * 100)
    [example] = [block for block in fences(ROOT / "docs" / "quickstart.md", "python") if "LoraConfig" in block]
    for large, small in (
        ("Qwen/Qwen2.5-0.5B", "model"),
        ("32_768", "64"),
        ("4096", "16"),
        ("max_steps=100", "max_steps=5"),
        ("2e-4", "1e-2"),
    ):
        assert large in example
        example = example.replace(large, small)
    names: dict[str, Any] = {}
    exec(example, names)
    losses = [record["loss"] for record in names["trainer"].state.log_history if "loss" in record]
    assert losses[-1] < losses[0]
    assert isinstance(names["model"], peft.PeftModel)
    trained = names["trainer"].model.state_dict()
    for name, value in names["model"].state_dict().items():
        if "lora" in name:
            torch.testing.assert_close(value.float().cpu(), trained[name].float().cpu())
    # And the one that scales RoPE.
    [example] = [block for block in fences(ROOT / "docs" / "quickstart.md", "python") if "yarn" in block]
    names["AutoConfig"] = AutoConfig
    exec(example, names)
    assert names["model"].model.rotary_emb.rope_type == "yarn"


def test_the_architecture_page_names_what_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = set(re.findall(r"^\| `(oomb/[\w/]+\.py)` \|", text, re.MULTILINE))
    assert listed == {str(path.relative_to(ROOT)) for path in modules().values() if path.name != "__init__.py"}
    named = set(re.findall(rf"(?<!tests/)\b((?:{'|'.join(LEVEL)})/[a-z0-9_/]+)", text))
    assert len(named) > 100
    for name in named:
        assert (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file(), name
    diagram = next(block for block in fences(ROOT / "docs" / "architecture.md", "") if "trainers" in block)
    drawn = [set(re.findall(r"\b[a-z]{3,}\b", line)) & set(LEVEL) for line in diagram.splitlines()]
    assert [floor for floor in drawn if floor] == [set(floor) for floor in FLOORS[::-1]]


def test_every_setting_is_documented() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", (ROOT / "docs" / "config.md").read_text(), re.MULTILINE)
    assert {name: ast.literal_eval(default) for name, default in rows} == dataclasses.asdict(oomb.Config())


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", path.read_text()):
            page = path.parent / target if target else path
            assert page.exists(), f"{path.name} links to {target}"
            assert not heading or heading in anchors(page), f"{path.name} links to {target}#{heading}"


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_headings_as_links_name_them(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# A page\n## Contexts beyond the model's range\n## 8-bit `pages`, 2.5 GiB?\n")
    assert anchors(tmp_path / "page.md") == {"a-page", "contexts-beyond-the-models-range", "8-bit-pages-25-gib"}


def test_the_documents_list_every_preset() -> None:
    assert all(f"`{name}`" in (ROOT / "README.md").read_text() for name in presets.PRESETS)


def test_ci_runs_the_tests() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert f"CONSTRAINTS ?= {CONSTRAINTS.relative_to(ROOT).as_posix()}\n" in makefile
    assert "$(if $(CONSTRAINTS),--constraint $(CONSTRAINTS),--upgrade --upgrade-strategy eager)" in makefile
    for target in ("setup", "demo", "test", "lint", "bench"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_tests_run_with_releases_that_the_package_takes() -> None:
    pinned = [Requirement(line) for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    ranges = [Requirement(text) for text in (*project["dependencies"], *(one for extra in extras for one in extra))]
    taken = {one.name: one.specifier for one in ranges}
    # transformers and mkdocstrings say what range of these they take.
    come_with = {"tokenizers", "griffelib", "mkdocstrings-python"}
    for one in pinned:
        [exact] = one.specifier
        assert exact.operator == "=="
        if one.name not in come_with:
            assert exact.version in taken[one.name], one
    [transformers] = [one for one in pinned if one.name == "transformers"]
    versions = re.search(r"transformers (\S+) and (\S+), and the model", (ROOT / "docs" / "limits.md").read_text())
    assert versions is not None
    assert str(transformers.specifier) == f"=={versions[2]}"
    assert f">={versions[1].removesuffix('.0')}" in str(taken["transformers"]).split(",")


@pytest.mark.timing
def test_tables_say_what_the_result_files_say() -> None:
    done = subprocess.run([sys.executable, "benchmarks/update_tables.py", "--check"], cwd=ROOT, timeout=HANG_S)
    assert done.returncode == 0, "run python benchmarks/update_tables.py"
