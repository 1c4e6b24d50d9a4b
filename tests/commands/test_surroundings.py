"""Unusual surroundings: closed or full streams, locales, inaccessible folders, unusual names."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import llmtrain, run
from tests.helpers.small_runs import write_small_recipe

ROOT = Path(__file__).parents[2]
TINY = ROOT / "recipes" / "tiny.py"
USAGE, DATA, CHECKPOINT = 2, 3, 4
AS_OTHERS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
"""Has root obey the permissions of files."""


def _shell(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in which $L is `llmtrain`."""
    variables = {**os.environ, "L": f"{sys.executable} -m llmtrain", "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300, env=variables)


def _one_line(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error: ") == 1
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("$L plan {tiny} >&-", 0, ""),
        ("$L plan {tiny} 0<&- >&- 2>&-", 0, ""),
        ("$L recipe schema | true; exit ${{PIPESTATUS[0]}}", 0, ""),
        ("$L plan {tiny} > /dev/full", USAGE, "error: the output: No space left on device"),
        ("$L plan nothing.py 2> /dev/full", USAGE, ""),
        ("PYTHONIOENCODING=ascii $L plan {tiny}", 0, ""),
        ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 $L plan {tiny}", 0, ""),
        ("unset HOME; $L plan {tiny}", 0, ""),
        ("PYTHONOPTIMIZE=2 $L plan {tiny}", USAGE, "without which transformers fails to import"),
        ("mkdir {folder}/gone; cd {folder}/gone; rmdir {folder}/gone; $L plan {tiny}", USAGE, "working directory"),
        ("$L plan {folder}/$(printf '\\xff').py", USAGE, "does not exist"),
        ("mkfifo {folder}/fifo; timeout 20 $L plan {folder}/fifo", USAGE, "recipe.file"),
        ("$L plan {folder}/$(printf 'x%.0s' {{1..300}}).py", USAGE, "error: "),
        ("$L plan {tiny} --set data.cache_dir='~nosuchuser/x'", 0, ""),
        ("$L data {tiny} --set data.cache_dir='~nosuchuser/x'", DATA, "this home directory is unknown"),
        ('$L data {tiny} --set \'data.sources=[{{"name": "~nosuchuser/x"}}]\'', DATA, "was not found"),
        ("$L checkpoint list {folder}/none", CHECKPOINT, "No such file"),
        ("touch {folder}/file; $L checkpoint list {folder}/file", CHECKPOINT, "Not a directory"),
    ],
)
def test_a_command_works_or_reports_the_fault(script, code, words, tmp_path):
    result = _shell(script.format(tiny=TINY, folder=tmp_path))
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert words in result.stderr
    if code == 0:
        assert result.stderr == ""


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_lint_opens_regular_files_only(kind, tmp_path):
    file = tmp_path / "config.json"
    os.mkfifo(file) if kind == "fifo" else file.symlink_to("/dev/zero")
    result = _shell(f"timeout 20 $L lint {file}")
    assert result.returncode == 2
    assert f"is a {kind if kind == 'device' else 'FIFO'}, not a file" in result.stdout


@pytest.fixture
def closed(tmp_path):
    """A folder without access rights, with a recipe and other files in it."""
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root may enter any folder, and there is no setpriv to take that away")
    folder = tmp_path / "closed"
    folder.mkdir()
    shutil.copy(TINY, folder / "tiny.py")
    (folder / "corpus.txt").write_text("text")
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("plan {closed}/tiny.py", USAGE, "Permission denied"),
        ("lint {closed}/config.json", USAGE, "Permission denied"),
        ("train {tiny} --run-dir {closed}/run", USAGE, "Permission denied"),
        ("plan {pretrained} --set model.pretrained={closed}/model", USAGE, "Permission denied"),
        ("data {tiny} --set data.cache_dir={closed}/cache", DATA, "Permission denied"),
        (
            'data {tiny} --set data.cache_dir={open} --set data.sources=[{{"name":"{closed}/corpus.txt"}}]',
            DATA,
            "Permission denied",
        ),
        ("data {tiny} --set data.cache_dir={open} --set data.tokenizer={closed}/tokenizer", DATA, "Permission denied"),
        ("checkpoint verify {closed}/run", CHECKPOINT, "Permission denied"),
        ("train {tiny} --run-dir {tiny}/below", USAGE, "--run-dir"),
        ("train {tiny} --run-dir {open}/" + "x" * 300, USAGE, "File name too long"),
        ("train {tiny} --run-dir {open}/" + "x/" * 2100, USAGE, "File name too long"),
    ],
)
def test_a_closed_folder_is_one_line(arguments, code, words, closed, tmp_path):
    command = arguments.format(
        closed=closed, tiny=TINY, open=tmp_path, pretrained=TINY.with_name("continue_pretrained.py")
    ).split(" ")
    prefix = AS_OTHERS if os.geteuid() == 0 else ()
    result = run(*prefix, sys.executable, "-m", "llmtrain", *command, PYTHONPATH=str(ROOT))
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert words in result.stderr
    assert code == 1 or result.stderr.count("error: ") == 1


@pytest.mark.slow
def test_a_run_survives_all_faulty_surroundings_at_once(tmp_path):
    """Terminal full, no × in the locale, no HOME; a run directory that begins with a dash and is not UTF-8."""
    recipe = write_small_recipe(tmp_path)
    surroundings = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    name = "-r\udcffn ×"
    script = 'unset HOME; umask 077; cd "$1"; exec $L train "$2" --nproc 2 --run-dir="$3" > /dev/full'
    env = {**os.environ, "L": f"{sys.executable} -m llmtrain", "PYTHONPATH": str(ROOT), **surroundings}
    result = subprocess.run(
        ["bash", "-c", script, "bash", tmp_path, recipe, os.fsencode(name)], capture_output=True, timeout=300, env=env
    )
    assert result.returncode == 0, result.stderr
    folder = tmp_path / name
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 14
    open_to_others = [path for path in folder.rglob("*") if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert open_to_others == []
    assert json.loads((folder / "recipe.json").read_text())["name"] == "small"


@pytest.mark.breadth
def test_a_run_continues_without_the_reader_of_its_output(tmp_path):
    recipe = write_small_recipe(tmp_path)
    result = _shell(f"$L train {recipe} --run-dir {tmp_path}/run | head -n 1; exit ${{PIPESTATUS[0]}}")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


def test_an_error_is_reported_on_a_terminal_without_utf_8():
    result = llmtrain("plan", TINY, "--set", "optim.lr=×", PYTHONIOENCODING="ascii")
    _one_line(result, USAGE, "optim.lr")
