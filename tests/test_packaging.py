"""What others use of this repository: the workflows, forms and citation of GitHub, and the built distributions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
import yaml

import llmtrain

ROOT = Path(__file__).parents[1]
PROJECT, LINT = (
    tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for folder in (ROOT, ROOT / "packages/lint")
)
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(set((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) - {ROOT / ".github/ISSUE_TEMPLATE/config.yml"})


def _tool(name: str) -> str:
    """Returns a program of this environment or of the system."""
    own = Path(sys.executable).with_name(name)
    found = str(own) if own.exists() else shutil.which(name)
    return found or pytest.skip(f"needs {name}")


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", WORKFLOWS),
        ("github-actions", [ROOT / "action.yml"]),
        ("github-issue-forms", FORMS),
        ("github-issue-config", [ROOT / ".github/ISSUE_TEMPLATE/config.yml"]),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_files_for_github_have_their_schema(schema, files):
    assert files
    command = [_tool("check-jsonschema"), "--builtin-schema", f"vendor.{schema}", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_actionlint_finds_nothing_in_the_workflows():
    done = subprocess.run([_tool("actionlint"), *WORKFLOWS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_test_every_python_that_is_declared():
    declared = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one}
    jobs = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text(encoding="utf-8"))["jobs"]
    assert set(jobs["test"]["strategy"]["matrix"]["python"]) == declared
    assert PROJECT["requires-python"] == f">={min(declared, key=lambda one: int(one.partition('.')[2]))}"


def test_scripts_and_files_that_workflows_name_exist():
    for file in WORKFLOWS:
        for name in re.findall(r"(?<![\w/])(?:\.ci|tests|benchmarks)/[\w./]+", file.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{file.name}: {name}"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_issue_forms_ask_for_the_output_of_doctor(form):
    labels = [part["attributes"]["label"] for part in yaml.safe_load(form.read_text(encoding="utf-8"))["body"]]
    assert "Output of `llmtrain doctor`" in labels


def test_the_citation_and_the_distributions_have_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {str(citation["version"]), LINT["version"], llmtrain.__version__} == {PROJECT["version"]}
    assert f"llmtrain-lint=={LINT['version']}" in PROJECT["dependencies"]
    assert citation["license"] == PROJECT["license"] == LINT["license"]
    assert (ROOT / "packages/lint/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert citation["authors"] == PROJECT["authors"]


def test_one_address_of_the_repository_is_used():
    """That of `project.urls`, in which OWNER stands for an account until the repository is public."""
    address = PROJECT["urls"]["Repository"]
    owner = address.removeprefix("https://github.com/")
    assert all(one.startswith(address) for one in [*PROJECT["urls"].values(), *LINT["urls"].values()])
    assert PROJECT["urls"].get("Documentation") == LINT["urls"].get("Documentation")  # findings link to it
    substitutions = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["metadata"]
    for one in substitutions["hooks"]["fancy-pypi-readme"]["substitutions"]:
        assert f"com/{owner}/" in one["replacement"]
    for page in (ROOT / "README.md", ROOT / "packages/lint/README.md", *(ROOT / "docs").rglob("*.md")):
        assert set(re.findall(r"[\w.-]+/llmtrain(?=@v)|github\.com/[\w.-]+/llmtrain", page.read_text())) <= {
            owner,
            f"github.com/{owner}",
        }


def test_hooks_of_pre_commit_are_valid():
    command = [sys.executable, "-m", "pre_commit", "validate-config", ROOT / ".pre-commit-config.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> list[Path]:
    """The sdist of each distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    for source in (ROOT, ROOT / "packages/lint"):
        command = [sys.executable, "-m", "build", "--outdir", folder, source]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return sorted(folder.iterdir())


@pytest.mark.slow
def test_distributions_pass_the_check_of_the_index(distributions):
    assert [file.suffix for file in distributions] == [".whl", ".gz"] * 2
    command = [sys.executable, "-m", "twine", "check", "--strict", *distributions]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


OWNERS = """
from importlib.metadata import distribution
files = [{str(file) for file in distribution(name).files} for name in ("llmtrain", "llmtrain-lint")]
print(len(files[0] & files[1]), [any(name.endswith("bin/llmtrain-lint") for name in one) for one in files])
"""


@pytest.mark.slow
def test_the_wheels_share_an_environment_link_to_the_repository_and_train(distributions, tmp_path):
    """In a new environment that sees only the dependencies of this one, and outside of the checkout."""
    venv.create(tmp_path / "env")
    [packages] = (tmp_path / "env").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    own |= {"OMP_NUM_THREADS": "1", "LLMTRAIN_CACHE": str(tmp_path / "cache")}

    def run(*command: object) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    python, program = tmp_path / "env/bin/python", tmp_path / "env/bin/llmtrain"
    wheels = [file for file in distributions if file.suffix == ".whl"]
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", *wheels)
    assert run(python, "-c", OWNERS) == "0 [False, True]\n"
    assert "Usage: llmtrain-lint " in run(program.with_name("llmtrain-lint"), "--help")
    text = run(python, "-c", "import importlib.metadata as found; print(found.metadata('llmtrain').get_payload())")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    names = [path.stem for path in sorted((ROOT / "recipes").glob("*.py"))]
    assert re.findall(r"^\w+", run(program, "recipe", "list"), re.MULTILINE) == names
    short = ["train.max_steps=2", "optim.warmup_steps=1", "data.tokenizer.vocab_size=512"]
    said = run(program, "train", "tiny", *(word for field in short for word in ("--set", field)))
    assert "trained 2 steps" in said
    assert (tmp_path / "runs/tiny/export/model.safetensors").exists()
