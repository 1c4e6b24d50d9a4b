"""Imports point downward only, and commands for login nodes import nothing heavy."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from llmtrain.checkpoint.manifest import Manifest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "llmtrain"
LINT = ROOT / "packages/lint/llmtrain_lint"

# From the bottom up; a module imports from its own row and those above it in this list.
LAYERS = (
    {"errors"},
    {"system"},
    {"recipe"},
    {"plan"},
    {"run_dir"},
    {"overrides"},
    {"launch"},
    {"data"},
    {"objectives"},
    {"models"},
    {"engines"},
    {"checkpoint"},
    {"report"},
    {"train"},
    {"trials"},
    {"library"},
    {"commands"},
    {"cli"},
    {"__init__", "__main__"},
)
ROOMS_OF_PLAN = ("facts", "predict", "rules", "search")
"""Directories of `plan/`, likewise."""
HEAVY = {"torch", "deepspeed", "transformers", "datasets", "accelerate", "peft"}
PURE = {"errors", "system", "recipe", "plan", "run_dir", "launch", "report", "commands", "library", "cli"}
ENGINE_ONLY = {"deepspeed", "accelerate"}
USES_LINT = {"library", "commands", "cli"}
FOR_ALL = ("llmtrain_lint.yaml_text.", "llmtrain_lint.reading.", "llmtrain_lint.document.Unreadable")
"""Read YAML and JSON with the positions of the keys, which recipes, data and settings of other programs need, too."""
OF_LINT = {"hjson", "typer", "yaml"}
"""The packages that the linter may import."""


@cache
def _modules() -> list[tuple[str, Path]]:
    """(top-level part, file) of every module."""
    return [(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path) for path in sorted(PACKAGE.rglob("*.py"))]


@cache
def _imports(path: Path, lazy: bool) -> list[str]:
    """Dotted names that a module imports when it is loaded; with `lazy`, also those in functions and for types."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not lazy and (inner or typing_only):
            skipped.update(ast.walk(node))
    names = []
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def _level(part: str) -> int:
    return next(index for index, row in enumerate(LAYERS) if part in row)


def test_every_module_has_a_layer():
    assert {part for part, _ in _modules()} == set().union(*LAYERS)


def test_imports_point_downward():
    parts = set().union(*LAYERS)
    for part, path in _modules():
        for name in _imports(path, lazy=True) if part != "__init__" else ():
            package, _, rest = name.partition(".")
            imported = rest.partition(".")[0]
            if package == "llmtrain" and imported in parts:
                assert _level(imported) <= _level(part), f"{path} imports {name}"
            if package == "llmtrain_lint" and not name.startswith(FOR_ALL):
                assert part in USES_LINT, f"{path} imports {name}"


def test_the_linter_depends_on_nothing_of_llmtrain_and_on_nothing_heavy():
    for path in LINT.rglob("*.py"):
        roots = {name.split(".")[0] for name in _imports(path, lazy=True)}
        assert roots - sys.stdlib_module_names <= {"llmtrain_lint", *OF_LINT}, path


def test_rooms_of_a_plan_import_downward():
    for level, room in enumerate(ROOMS_OF_PLAN):
        for path in (PACKAGE / "plan" / room).rglob("*.py"):
            found = {name.split(".")[2] for name in _imports(path, lazy=True) if name.startswith("llmtrain.plan.")}
            assert not found & {*ROOMS_OF_PLAN[level + 1 :]}, path


def test_there_are_at_most_fourteen_packages():
    assert sum(path.is_dir() for path in PACKAGE.iterdir() if path.name != "__pycache__") <= 14


def test_no_modules_import_each_other_in_a_circle():
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for _, path in _modules()
    }
    del files["llmtrain"]  # what users import from it is loaded on first use
    for path in LINT.rglob("*.py"):
        files[".".join(path.relative_to(LINT.parent).with_suffix("").parts).removesuffix(".__init__")] = path
    graph = {}
    for module, path in files.items():
        names = (name if name in files else name.rpartition(".")[0] for name in _imports(path, lazy=True))
        graph[module] = {*names} & {*files} - {module}
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules of a circle


def test_heavy_imports_stay_where_they_belong():
    for part, path in _modules():
        roots = {name.split(".")[0] for name in _imports(path, lazy=False)}
        if part in PURE:
            assert not roots & HEAVY, path
        everything = {name.split(".")[0] for name in _imports(path, lazy=True)}
        has_trackers = path.parent.name == "metrics"  # accelerate has them
        if part not in {"overrides", "engines", "checkpoint"} and not has_trackers:
            assert not everything & ENGINE_ONLY, path


BLOCKED = """
import json, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {heavy!r}:
            raise ImportError(f"{{name}} must not be imported here")
sys.meta_path.insert(0, Block())
from llmtrain.cli import main
commands, code = json.loads(sys.argv[1])
for arguments in commands:
    print("$", *arguments, flush=True)
    sys.argv = ["llmtrain", *arguments]
    try:
        main()
    except SystemExit as end:
        assert (end.code or 0) == code, arguments
"""
"""Runs commands where none of the heavy packages can be imported."""


def _run_without_heavy(*commands: list[str], code: int = 0) -> str:
    """Runs commands that all end with one exit code, in one process; returns their output, each after its command."""
    program = [sys.executable, "-c", BLOCKED.format(heavy=HEAVY), json.dumps([commands, code])]
    result = subprocess.run(program, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_login_node_needs_no_torch():
    helps = [["--help"], *([name, "--help"] for name in ("train", "lint", "verify", "checkpoint", "doctor"))]
    plans = [["plan", "recipes/llama3_70b.py"], ["plan", "recipes/qwen3_30b_a3b.py", "--json"]]
    output = _run_without_heavy(*helps, *plans, ["lint", "ds_configs/llama3_8b.json"])
    assert "memory" in output


def test_a_mistake_is_reported_without_torch():
    misspelt = ("recipes/tiny.py", "--set", "optim.lrr=1")
    generate = ["generate", "no/such/folder", "--prompt", "a"]
    _run_without_heavy(*([name, *misspelt] for name in ("train", "tune", "verify", "data")), generate, code=2)


def test_a_search_needs_no_torch():
    assert "--set" in _run_without_heavy(["plan", "recipes/gpt2_124m.py", "--search"])


def test_a_checkpoint_is_verified_without_torch(tmp_path):
    folder = tmp_path / "step_00000001"
    folder.mkdir()
    about = {"save": "a", "part": 0, "hosts": ["here"], "run": "r", "recipe": "d", "step": 1, "samples": 8}
    more = {"eval_loss": None, "written": "", "world_size": 1, "layout": {}, "versions": {}, "files": {}}
    Manifest(**about, **more).write(folder)
    assert "is complete" in _run_without_heavy(["checkpoint", "verify", str(folder)])


def test_a_run_is_inspected_without_torch(tmp_path):
    runs = [tmp_path / name for name in ("a", "b")]
    for run in runs:
        run.mkdir()
        (run / "recipe.json").write_text("{}")
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    first, both = str(runs[0]), [*map(str, runs)]
    page = tmp_path / "out.html"
    _run_without_heavy(["report", first], ["report", "--out", str(page), *both], ["inspect", first], ["compare", *both])
    assert page.exists()
