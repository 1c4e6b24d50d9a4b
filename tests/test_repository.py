"""The statements of the repository about itself are true."""

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.version import Version

import llmtrain
from llmtrain import recipe
from tests.helpers.launching_doc import shell_lines

ROOT = Path(__file__).parent.parent


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _readme_command(kind: str) -> str:
    command = [sys.executable, str(ROOT / ".ci/readme_command.py"), kind]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_readme_states_the_two_commands():
    assert (
        _readme_command("train")
        == "pip install -c constraints.txt -e packages/lint -e . && llmtrain train recipes/tiny.py"
    )
    assert _readme_command("test") == 'pip install -c constraints.txt -e packages/lint -e ".[test]" && pytest'


def test_ci_runs_the_readme_commands():
    script = (ROOT / ".ci/run").read_text()
    assert "readme_command.py test" in script
    assert "readme_command.py train" in script


def _dependencies() -> tuple[set[str], set[str]]:
    """Returns what both distributions require of others, and what the extras of llmtrain require."""
    paths = (ROOT / "pyproject.toml", ROOT / "packages/lint/pyproject.toml")
    projects = [tomllib.loads(path.read_text())["project"] for path in paths]
    required = {*chain.from_iterable(one["dependencies"] for one in projects)} - {
        f"{projects[1]['name']}=={projects[1]['version']}"
    }
    return required, {*chain.from_iterable(projects[0]["optional-dependencies"].values())}


def test_constraints_pin_the_dependencies_of_pyproject():
    asked = set.union(*_dependencies())
    names = {re.split(r"[><=!]", requirement)[0] for requirement in asked}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if line and not line.startswith("#")}
    assert names - pinned == set()


def test_the_oldest_versions_are_the_lower_bounds_of_the_dependencies():
    dependencies, _ = _dependencies()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    dependencies |= set(extras["images"])  # which `.ci/run` installs with them
    bounds = re.findall(r"^(.+?)>=([\d.]+)", "\n".join(dependencies), re.MULTILINE)
    pins = re.findall(r"^(.+)==(.+)$", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE)
    assert len(dict(bounds)) == len(dependencies)  # both distributions state one bound for a package
    assert {name: Version(version) for name, version in pins} == {name: Version(version) for name, version in bounds}


def test_every_link_of_the_documents_exists():
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name} links to {link}"


def test_commands_in_the_documents_exist():
    from typer.main import get_command

    from llmtrain.cli import app

    known = set(get_command(app).commands)
    for document in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = document.read_text(encoding="utf-8")
        lines = [*shell_lines(text), *re.findall(r"`([^`\n]+)`", text)]
        for name in chain.from_iterable(re.findall(r"^(?:\$ )?llmtrain ([a-z]+)", line) for line in lines):
            assert name in known, f"{document.name}: llmtrain {name}"


WITH_OUTPUT = [f"docs/guides/{name}.md" for name in ("lint", "planning", "troubleshooting")]


def _blocks(page: str) -> list[tuple[str, str]]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```console\n\$ (.*?)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", *WITH_OUTPUT])
def test_pages_show_what_the_commands_print(page):
    assert _blocks(page)
    for command, shown in _blocks(page):
        program, *arguments = shlex.split(command)
        assert program == "llmtrain"
        result = subprocess.run(
            [sys.executable, "-m", "llmtrain", *arguments], capture_output=True, text=True, cwd=ROOT
        )
        assert result.stdout + result.stderr == shown


def test_output_in_a_page_is_tested():
    pages = [page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert {page for page in pages if _blocks(page)} == {*WITH_OUTPUT}


def test_errors_of_troubleshooting_exist():
    text = (ROOT / "docs/guides/troubleshooting.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "llmtrain").rglob("*.py"))
    assert len(re.findall(r"^### ", text, re.MULTILINE)) >= 15
    assert [rule for rule in re.findall(r"\[([a-z_]+\.[a-z_0-9]+)\]", text) if f'"{rule}"' not in sources] == []
    titles = re.findall(r"^### (.*)", text, re.MULTILINE)
    shown = re.sub(r"^### .*", "", text, flags=re.MULTILINE)
    assert [title for title in titles if not all(part in shown for part in re.split(" ?… ?", title))] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs/design/decisions").glob("*.md")), ids=lambda page: page.stem)
def test_a_decision_has_at_most_ten_lines(page):
    text = page.read_text(encoding="utf-8")
    decisions = [one for block in text.split("\n\n") for one in re.split(r"^(?=- )", block, flags=re.MULTILINE)]
    assert [one for one in decisions if len(one.splitlines()) > 10] == []
    assert f"(decisions/{page.name})" in (ROOT / "docs/design/decisions.md").read_text(encoding="utf-8")


def test_errors_in_own_code_are_planted_where_the_page_says():
    page = (ROOT / "docs/guides/own_code.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and "Planted in" not in line]
    named = [re.fullmatch(r"\| .* \| `(tests/.+\.py)::(test_\w+)`(?:: `(\w+)`)? \|", row) for row in rows]
    assert len(rows) > 30
    for row, place in zip(rows, named, strict=True):
        assert place, row
        code = (ROOT / place[1]).read_text(encoding="utf-8")
        assert f"def {place[2]}(" in code, row
        assert not place[3] or re.search(rf"\b{place[3]}\b", code), row


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/first_run.md"])
def test_the_steps_on_a_page_are_those_that_were_measured(page):
    lines = (ROOT / "benchmarks/results/tiny_metrics.jsonl").read_text(encoding="utf-8").splitlines()
    measured = [json.loads(line) for line in lines]
    known = {f"step {one['step']}/300  loss {one['loss']:.4f}" for one in measured if "loss" in one}
    known |= {f"step {one['step']}  eval loss {one['eval_loss']:.4f}" for one in measured if "eval_loss" in one}
    shown = re.findall(
        r"^step \d+(?:/300  |  eval )loss [\d.]+", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(shown) > 3
    assert set(shown) <= known


def test_every_part_of_a_recipe_is_exported():
    parts = {name for name, item in vars(recipe).items() if isinstance(item, type) and issubclass(item, recipe.Part)}
    assert parts - {"Part"} <= set(llmtrain.__all__)
    assert all(hasattr(llmtrain, name) for name in llmtrain.__all__)


def test_every_function_of_the_library_is_in_the_reference():
    text = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    assert [name for name in llmtrain.__all__ if name.islower() and not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.slow
def test_type_checkers_find_the_installed_package(tmp_path):
    """From another folder, as in a user's project: an editable install must be a path, not an import hook."""
    (tmp_path / "mine.py").write_text("import llmtrain\n")
    options = ["--config-file=", "--follow-imports=skip", f"--python-executable={sys.executable}"]
    command = [sys.executable, "-m", "mypy", *options, "mine.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
