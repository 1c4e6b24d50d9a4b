"""`llmtrain lint` as a tool: files, exit codes, formats, fixes, settings of a project, pre-commit."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from llmtrain.commands.lint import LintRequest, lint_files
from llmtrain.errors import RecipeError
from llmtrain.lint import fixing
from llmtrain.lint.fixing import fixed
from llmtrain.lint.report import link, site
from llmtrain.lint.schema import schema
from tests.lint.corpus import cases, lint_text

ROOT = Path(__file__).parents[2]
CLEAN = {"train_batch_size": 8, "gradient_clipping": 1.0}
WARNED = {"train_batch_size": 8}
WRONG = {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 4}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    for name, values in {
        "clean": CLEAN,
        "warned": WARNED,
        "wrong": WRONG,
        "other": {"name": "no configuration"},
        "nested": {"model": "llama", "training": WRONG},  # of another program, as is the next one
        "project": {"model": "llama", "dataset": "stdlib", "train_batch_size": 8},
    }.items():
        (tmp_path / "configs" / f"{name}.json").write_text(json.dumps(values))
    return tmp_path


def run(capsys, *files: str, **options) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        lint_files(LintRequest(files=list(files), **options))
    return left.value.code, capsys.readouterr().out


def test_the_exit_code_depends_on_the_findings_and_limits(folder, capsys):
    assert run(capsys, "configs/clean.json")[0] == 0
    assert run(capsys, "configs/warned.json")[0] == 0
    assert run(capsys, "configs/warned.json", strict=True)[0] == 1
    assert run(capsys, "configs/warned.json", max_warnings=1)[0] == 0
    assert run(capsys, "configs/warned.json", max_warnings=0)[0] == 1
    assert run(capsys, "configs/wrong.json")[0] == 1
    assert run(capsys, "configs/clean.json", "configs/gone.json")[0] == 2
    with pytest.raises(RecipeError, match="no DeepSpeed configuration"):
        run(capsys, "configs/*.toml")


def test_folders_patterns_and_standard_input_are_checked(folder, capsys, monkeypatch):
    for name in ("configs", "configs/*.json", "**/*.json"):
        code, text = run(capsys, name)
        assert code == 1
        assert "3 files: 1 error, 1 warning" in text  # the others are no configurations
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(WRONG).encode())))
    assert run(capsys, "-", "-")[0] == 1  # which is one input


def test_equal_findings_share_a_line(folder, capsys):
    (folder / "tuned.json").write_text(
        json.dumps({**CLEAN, "zero_optimization": {"stage": 1, "stage3_max_live_parameters": 1, "sub_group_size": 2}})
    )
    _, text = run(capsys, "tuned.json")
    [line] = [line for line in text.splitlines() if "zero3_tuning" in line]
    assert "zero_optimization.stage3_max_live_parameters, zero_optimization.sub_group_size: DeepSpeed ignores" in line


def test_each_format_contains_the_findings(folder, capsys):
    _, text = run(capsys, "configs", form="json")
    data = json.loads(text)
    assert (data["errors"], data["warnings"]) == (1, 1)
    [finding] = data["files"][2]["findings"]
    assert (finding["rule"], finding["effect"], finding["page"]) == (
        "lint.range",
        "refuses",
        "docs/reference/lint.md#lintrange",
    )
    sarif = json.loads(run(capsys, "configs", form="sarif")[1])
    [job] = sarif["runs"]
    assert job["properties"]["deepspeed"] == data["deepspeed"]
    known = {rule["id"] for rule in job["tool"]["driver"]["rules"]}
    assert {one["ruleId"] for one in job["results"]} == {"lint.range", "lint.clipping_default"} <= known
    (folder / "a,b:c%.json").write_text(json.dumps(WRONG))
    _, text = run(capsys, "a,b:c%.json", form="github")
    assert text.splitlines()[1].startswith("::error file=a%2Cb%3Ac%25.json,line=1,col=")


def test_settings_are_read_from_a_project(folder, capsys):
    settings = '[tool.llmtrain.lint]\nfor = "deepspeed"\nallow = ["clipping_default"]\n'
    settings += '[tool.llmtrain.lint.per-file-allow]\n"configs/wr*.json" = ["range:zero_optimization.*"]\n'
    (folder / "pyproject.toml").write_text(settings)
    assert run(capsys, "configs", strict=True)[0] == 0
    for wrong in ('for = "me"', 'allow = "all"', "alow = []", 'allow = ["unknown_key"]'):
        (folder / "pyproject.toml").write_text(f"[tool.llmtrain.lint]\n{wrong}\n")
        with pytest.raises(RecipeError):
            run(capsys, "configs")


def test_settings_are_read_without_a_project(folder, capsys):
    (folder / "pyproject.toml").write_text('[tool.llmtrain.lint]\nfor = "me"\n')
    (folder / "llmtrain-lint.toml").write_text(
        'for = "deepspeed"\nallow = ["range", "clipping_default"]\ndeepspeed = "<0.19"\n'
    )
    code, text = run(capsys, "configs", strict=True)
    assert (code, text.splitlines()[0]) == (0, "as read by DeepSpeed 0.18.9 (the newest known that fits <0.19)")
    (folder / "llmtrain-lint.toml").write_text("alow = []\n")
    with pytest.raises(RecipeError, match=r"llmtrain-lint\.toml: 'alow' is not a setting; did you mean 'allow'"):
        run(capsys, "configs")


def test_auto_values_are_compared_with_the_arguments_in_a_file(folder, capsys):
    (folder / "ds.json").write_text(
        '{"train_batch_size": "auto", "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},'
        ' "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}'
    )
    (folder / "train.yaml").write_text("learning_rate: 2e-4\n")  # a text in YAML 1.1
    assert run(capsys, "ds.json", arguments=folder / "train.yaml")[0] == 1
    assert run(capsys, "ds.json", arguments=folder / "train.yaml", assignments=["learning_rate=1e-4"])[0] == 0


TEXT = """{
  // the batch
  "train_micro_batch_size_per_gpu": 4,  # of one GPU
  "stage": 2,
  "bf16": {"enabled": "true"},
  "zero_optimization": {
    "stage3_prefetch_bucket_size": 3774873.6,
    "gradient_clipping": 1.0
  },
  "gradient_accumulation_step": 2
}
"""
MENDED = """{
  "gradient_clipping": 1.0,
  // the batch
  "train_micro_batch_size_per_gpu": 4,  # of one GPU
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 2,
    "stage3_prefetch_bucket_size": 3774873
  },
  "gradient_accumulation_steps": 2
}
"""


def test_mechanical_errors_are_fixed(folder, capsys):
    file = folder / "ds.json"
    file.write_text(TEXT)
    _, text = run(capsys, "ds.json", diff=True)
    assert '+  "gradient_accumulation_steps": 2' in text
    assert file.read_text() == TEXT
    assert run(capsys, "ds.json", fix=True)[0] == 0
    assert file.read_text() == MENDED


def test_a_brace_in_a_comment_before_the_object_is_left_alone():
    text = '// sizes {per host}\n{"optimizer": {"type": "AdamW", "weight_decay": 0.1}, "stage": 2}\n'
    assert fixed(text, schema()).startswith("// sizes {per host}\n{")
    assert fixed(text, schema()).count("stage") == 1
    assert "zero_optimization" in fixed(text, schema()).splitlines()[1]


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("bf16: {enabled: true}\nstage: 2\n", None),  # no braces to put a block into
        ('{"bf16": {"enabled": true}, "stage": 2}', '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'),
        ('{"stage": 2}', None),  # a comma would be left, which JSON does not allow
        (
            '{\n  "bf16": {"enabled": true}, // a, b\n  "stage": 2 // c\n}\n',
            '{\n  "zero_optimization": {"stage": 2},\n  "bf16": {"enabled": true}, // a, b\n // c\n}\n',
        ),
        (
            '{\n  // a,\n  "stage": 2,\n  "bf16": {"enabled": true}\n}\n',
            '{\n  "zero_optimization": {"stage": 2},\n  // a,\n  "bf16": {"enabled": true}\n}\n',
        ),
        (
            "{\n  bf16: {enabled: true} # a,\n  stage: 2\n}\n",
            '{\n  "zero_optimization": {"stage": 2},\n  bf16: {enabled: true} # a,\n\n}\n',
        ),
        ('{"stage": 2 /* a, */, bf16: {}}', '{"zero_optimization": {"stage": 2},  /* a, */ bf16: {}}'),
    ],
)
def test_keys_are_moved_only_where_nothing_else_changes(text, after):
    assert fixed(text, schema()) == (after or text)


def test_whole_numbers_written_as_text_become_numbers():
    text = '{"gradient_clipping": "1.0", "fp16": {"loss_scale": "0"}, "optimizer": {"params": {}}}'
    assert json.loads(fixed(text, schema())) == json.loads(text.replace('"1.0"', "1").replace('"0"', "0"))


@pytest.mark.parametrize("block", ["null", "2", '"5e8"'])
def test_keys_are_not_moved_into_what_is_no_block(block):
    text = f'{{"zero_optimization": {{"stage": 2}}, "zero_optimization": {block}, "overlap_comm": true}}'
    assert fixed(text, schema()) == text


def test_line_ends_of_windows_are_kept():
    text = '{\n  "stage": 2,\n  "bf16": {"enabled": true}\n}\n'
    after = '{\n  "zero_optimization": {"stage": 2},\n  "bf16": {"enabled": true}\n}\n'
    assert fixed(text.replace("\n", "\r\n"), schema()) == after.replace("\n", "\r\n")


def test_the_faults_of_a_file_are_fixed_together(monkeypatch):
    """TokenizeOptions takes long if the file is large."""
    numbers = dict.fromkeys(("data_parallel_size", "sequence_parallel_size", "vocabulary_size"), "7")
    switches = {key: {"enabled": "true"} for key in ("fp16", "bf16", "flops_profiler", "tensorboard", "csv_monitor")}
    text, texts = json.dumps({**numbers, **switches, "stage": 2, "overlap_comm": "true"}), []
    read = fixing._read
    monkeypatch.setattr(fixing, "_read", lambda text, *rest: texts.append(text) or read(text, *rest))
    values = json.loads(fixed(text, schema()))
    assert values["zero_optimization"] == {"stage": 2, "overlap_comm": True}
    assert {values[key] for key in numbers} == {7}
    assert all(values[key] == {"enabled": True} for key in switches)
    assert len(texts) < 10


def test_links_and_permissions_are_kept_when_a_file_is_fixed(folder, capsys):
    (folder / "real.json").write_text(TEXT)
    (folder / "real.json").chmod(0o640)
    (folder / "link.json").symlink_to("real.json")
    assert run(capsys, "link.json", fix=True)[0] == 0
    assert (folder / "link.json").is_symlink()
    assert (folder / "real.json").read_text() == MENDED
    assert (folder / "real.json").stat().st_mode & 0o777 == 0o640


def test_arguments_next_to_params_are_moved_into_them():
    text = '{"optimizer": {"type": "AdamW", "lr": 0.1, "params": {"eps": 1e-8}}, "train_batch_size": 8}'
    moved = '{"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "eps": 1e-8}}, "train_batch_size": 8}'
    assert json.loads(fixed(text, schema())) == json.loads(moved)
    scaled = '{"train_batch_size": 8, "bf16": {"enabled": true, "loss_scale": 0}}'
    assert fixed(scaled, schema()) == scaled  # it has no place in fp16


def test_long_files_are_fixed_quickly():
    """A scan of all lines for each key would take minutes."""
    text = "{" + ",\n".join(f'"key{number}": 1' for number in range(40_000)) + ',\n"bf16": {"enabled": "true"}}'
    started = time.process_time()
    assert fixed(text, schema()).endswith('"bf16": {"enabled": true}}')
    assert time.process_time() - started < 20


def test_fixing_a_file_adds_no_findings():
    for case in (*cases("malformed"), *cases("valid")):
        if case.path.suffix == ".json" and case.result.readable:
            after = {
                (one.field, one.rule) for one in lint_text(fixed(case.text, schema())) if one.rule == "lint.unreadable"
            }
            assert not after, case.path
            errors = [one for one in lint_text(case.text) if one.severity == "error"]
            left = [one for one in lint_text(fixed(case.text, schema())) if one.severity == "error"]
            assert len(left) <= len(errors) or "stage" in case.text, case.path


ALONE = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {heavy!r}:
            raise ImportError(f"{{name}} is no dependency of llmtrain-lint")
sys.meta_path.insert(0, Block())
sys.argv = ["llmtrain-lint", *{words!r}]
from llmtrain.cli import lint_alone
lint_alone()
"""


def test_the_separate_distribution_needs_only_its_dependencies(folder):
    def asked(path: str) -> tuple[set[str], dict[str, str]]:
        project = tomllib.loads((ROOT / path).read_text(encoding="utf-8"))["project"]
        return {re.split("[<>=]", one)[0] for one in project["dependencies"]}, project

    all_, project = asked("pyproject.toml")
    light, alone = asked("packages/lint/pyproject.toml")
    assert light < all_
    assert alone["version"] == project["version"]
    assert alone["scripts"]["llmtrain-lint"] == project["scripts"]["llmtrain-lint"]
    heavy = sorted(all_ - light - {"rich"})  # Typer brings Rich
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    mended = Path("mend.json")
    mended.write_text('{"train_batch_size": 8, "bf16": {"enabled": "true"}, "zero_optimization": {"stage": 1}}')
    for words, code, said in (
        (["configs/wrong.json"], 1, "lint.range"),
        (["--help"], 0, "Usage: llmtrain-lint [OPTIONS] [FILE"),
        (["--fix", "mend.json"], 0, "mend.json"),
    ):
        program = [sys.executable, "-c", ALONE.format(heavy=heavy, words=words)]
        done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == code, done.stderr
        assert said in done.stdout
    assert '"enabled": true' in mended.read_text()


def test_pre_commit_runs_the_hook(folder):
    program = shutil.which("pre-commit")
    if program is None:
        pytest.skip("needs pre-commit")
    tools = folder / "bin"
    tools.mkdir()
    (tools / "llmtrain-lint").write_text(f'#!/bin/sh\nexec {sys.executable} -m llmtrain lint "$@"\n')
    (tools / "llmtrain-lint").chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    home = {"HOME": str(folder), "PRE_COMMIT_HOME": str(folder / "cache"), "GIT_CONFIG_GLOBAL": os.devnull}
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **home}

    def git(*words: str, where: Path) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
        subprocess.run(["git", *identity, *words], cwd=where, env=environment, check=True, capture_output=True)

    hooks, used = folder / "hooks", folder / "used"
    for where in (hooks, used):
        where.mkdir()
        git("init", "-q", where=where)
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", hooks)
    (used / "ds_config_zero4.json").write_text(json.dumps(WRONG))
    (used / "package.json").write_text('{"zero": 1}')
    for where in (hooks, used):
        git("add", "-A", where=where)
        git("commit", "-qm", "a", where=where)
    done = subprocess.run(
        [program, "try-repo", str(hooks), "llmtrain-lint", "--all-files"],
        cwd=used,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ds_config_zero4.json" in done.stdout
    assert "lint.range" in done.stdout
    assert "package.json" not in done.stdout


YAML = """# the batch
train_micro_batch_size_per_gpu: 4  # of one GPU
'gradient_accumulation_step': 2
bf16: {enabled: "true"}
zero_optimization:
  stage: 2
  stage3_prefetch_bucket_size: 3774873.6   # bytes
  gradient_clipping: 1.0
fp16:
  enabled: &off "false"
  loss_scale_window: !!str 8
"""
YAML_MENDED = """# the batch
train_micro_batch_size_per_gpu: 4  # of one GPU
'gradient_accumulation_steps': 2
bf16: {enabled: true}
zero_optimization:
  stage: 2
  stage3_prefetch_bucket_size: 3774873   # bytes
  gradient_clipping: 1.0
fp16:
  enabled: &off "false"
  loss_scale_window: !!str 8
"""


def test_values_and_names_are_fixed_in_yaml(folder, capsys):
    """What moves, and values with anchors and tags, are left to people."""
    file = folder / "ds.yaml"
    file.write_text(YAML)
    run(capsys, "ds.yaml", fix=True)
    assert file.read_text() == YAML_MENDED


def test_hostile_files_are_reported(folder, capsys):
    (folder / "loop").mkdir()
    (folder / "loop" / "up").symlink_to("..")
    (folder / "self.json").symlink_to("self.json")
    os.mkfifo(folder / "fifo.json")
    contents = {
        "nul.json": b'{"train_batch_size": 8, "a\x00": 1}',
        "wide.json": '{"train_batch_size": 8}'.encode("utf-16"),
        "digits.json": b'{"train_batch_size": ' + b"9" * 100_000 + b"}",
        "constants.json": b'{"train_batch_size": NaN, "zero_optimization": {"stage": Infinity}}',
        "tag.yaml": b'train_batch_size: !!python/object/apply:os.system ["touch pwned"]\n',
        "bomb.yaml": b"a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n",
        "set.yaml": b"train_batch_size: 8\nfp16: !!set {enabled}\n",
        "key.yaml": b"? {a: 1}\n: 2\ntrain_batch_size: 8\n",
        "merge.yaml": b"<<: {train_batch_size: 8}\n",
        "two.yaml": b"train_batch_size: 8\n---\ntrain_batch_size: 9\n",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    for name in (*contents, "self.json", "fifo.json"):
        code, text = run(capsys, name)
        assert (code, "lint.unreadable" in text) == (2, True), name
        assert len(text) < 1000
        assert run(capsys, name, fix=True)[0] == 2
    assert not (folder / "pwned").exists()
    _, text = run(capsys, "**/wrong.json")
    assert text.count("lint.range") == 1  # though the loop leads to it again and again


def test_names_of_files_are_printed_without_control_characters(folder, capsys):
    name = "red\x1b[31m\n::error::.json"
    (folder / name).write_text(json.dumps(WRONG))
    for form in ("text", "github"):
        _, text = run(capsys, name, form=form)
        assert "\x1b" not in text.replace("%1B", "") or form == "github"
        assert not any(line.startswith("::error::") for line in text.splitlines())
    sarif = json.loads(run(capsys, name, form="sarif")[1])
    assert sarif["runs"][0]["columnKind"] == "unicodeCodePoints"
    location = sarif["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert location == "red%1B%5B31m%0A%3A%3Aerror%3A%3A.json"


def test_unreadable_files_have_no_position(folder, capsys):
    os.mkfifo(folder / "ds_config.json")
    assert run(capsys, "ds_config.json")[1].splitlines()[2].startswith("ds_config.json: error: file: it cannot be read")
    assert "::error file=ds_config.json,title=lint.unreadable::" in run(capsys, "ds_config.json", form="github")[1]
    [found] = json.loads(run(capsys, "ds_config.json", form="sarif")[1])["runs"][0]["results"]
    assert found["locations"][0]["physicalLocation"]["region"] == {"startLine": 1, "startColumn": 1}


def test_line_ends_are_kept_and_byte_order_marks_removed(folder, capsys):
    file = folder / "ds.json"
    text = '{\r\n  "train_micro_batch_size_per_gpu": "auto",\r\n  "gradient_accumulation_step": "auto",\r\n'
    file.write_bytes(b"\xef\xbb\xbf" + (text + '  "zero_optimization": {"stage": 2}\r\n}\r\n').encode())
    code, said = run(capsys, "ds.json")  # the Trainer reads it with json
    assert code == 1
    assert "it starts with a byte order mark" in said
    assert run(capsys, "ds.json", fix=True)[0] == 0
    mended = file.read_bytes()
    assert mended.count(b"\r\n") == 5 == mended.count(b"\n")
    assert mended.startswith(b"{\r\n")
    assert b'"gradient_accumulation_steps": "auto"' in mended


def test_findings_that_cannot_be_fixed_are_errors(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"{}")))
    with pytest.raises(RecipeError, match="standard input cannot be fixed"):
        run(capsys, "-", fix=True)
    (folder / "ds.json").write_text(TEXT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)  # root may write to every file
        with pytest.raises(RecipeError, match=r"ds\.json: cannot be written: it is read-only"):
            run(capsys, "ds.json", fix=True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RecipeError, match=r"ds\.json: cannot be written: No space left on device"):
            run(capsys, "ds.json", fix=True)
    assert (folder / "ds.json").read_text() == TEXT  # a full disk does not cost the file
    assert not [one for one in folder.iterdir() if one.name.startswith(".ds.json")]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b" " * (2**20 + 1))))
    assert run(capsys, "-")[0] == 2
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(RecipeError, match="standard input is closed"):
        run(capsys, "-")


def test_a_working_file_has_few_lines(folder, capsys):
    """The corpus's files of one fault have few; here everything that is a warning comes together."""
    values = {
        "train_batch_size": 8,
        "disable_allgather": True,
        "fp16": {"enabled": True, "initial_scale_power": 32},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "activation_checkpointing": {"profile": True},
        "zero_optimization": {"stage": 3},
    }
    (folder / "ds.json").write_text(json.dumps(values))
    code, text = run(capsys, "ds.json")
    assert code == 0
    first, counts, *lines, _ = text.splitlines()
    assert first.startswith("as read by DeepSpeed ")
    assert counts.endswith("0 errors, 7 warnings")
    assert len(lines) == 3
    assert lines[-1].startswith("ds.json: 5 further warnings, which --format json explains: ")


def test_links_are_urls_if_a_site_is_configured(monkeypatch):
    site.cache_clear()
    assert link("lint.range") == "docs/reference/lint.md#lintrange"
    page = (ROOT / "docs/reference/lint.md").read_text(encoding="utf-8")
    assert "## lint.range\n" in page
    with monkeypatch.context() as patch:
        patch.setenv("LLMTRAIN_LINT_DOCS", "https://github.com/o/llmtrain/blob/v1/docs/")
        assert link("lint.range") == "https://github.com/o/llmtrain/blob/v1/docs/reference/lint.md#lintrange"
    declared = Message()
    declared["Project-URL"] = "Documentation, https://docs.example.org/"
    site.cache_clear()
    monkeypatch.setattr(metadata, "metadata", lambda name: declared)
    assert link("lint.range") == "https://docs.example.org/reference/lint.html#lintrange"
    site.cache_clear()


def test_rules_are_explained(capsys):
    lint_files(LintRequest(explain="muon_zero"))
    text = capsys.readouterr().out
    assert text.startswith("lint.muon_zero: error; the setting is refused\nMuon needs whole gradients")
    with pytest.raises(RecipeError, match="is not a rule"):
        lint_files(LintRequest(explain="muno"))
    with pytest.raises(RecipeError, match="no file is given"):
        lint_files(LintRequest())


HOSTILE = "$(touch pwned) `touch pwned` ; touch pwned & ' \" | > pwned *"


@pytest.mark.parametrize(
    ("files", "options", "code", "expected"),
    [
        ("configs", "--deepspeed <0.19", 1, "as read by DeepSpeed 0.18.9"),
        ("configs/clean.json\nconfigs/warned.json", "", 0, "::warning file=configs/warned.json"),
        ("configs", "", 1, "https://github.com/o/llmtrain/blob/v0.1.0/docs/reference/lint.md#lintrange"),
        ("name?with?spaces.json", "--for deepspeed", 1, "name with spaces.json"),
        ("configs", HOSTILE, 2, ""),
        (HOSTILE, "", 2, ""),
        ("--fix configs/wrong.json", "", 2, "::error"),
    ],
)
def test_the_action_executes_nothing_in_its_inputs(folder, files, options, code, expected):
    """Runs the steps as GitHub does; a stub takes the place of pip, which would download the dependencies."""
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    known = {"inputs.files": files, "inputs.options": options, "steps.python.outputs.python-path": "stub/python"}
    known |= {"github.server_url": "https://github.com", "github.action_repository": "o/llmtrain"}
    known["github.action_ref"] = "v0.1.0"
    assert set(action["inputs"]) == {"files", "options"}
    (folder / "name with spaces.json").write_text(json.dumps(WRONG))
    program = f'#!/bin/sh\nexec "{sys.executable}" -m llmtrain lint "$@"\n'
    python = (
        f'#!/bin/sh\nmkdir -p "$3/bin"\ncp stub/pip "$3/bin/python"\ncat > "$3/bin/llmtrain-lint" <<"E"\n{program}E\n'
    )
    (folder / "stub").mkdir()
    for name, text in {"python": python + 'chmod +x "$3"/bin/*\n', "pip": '#!/bin/sh\necho "$@" > pip.log\n'}.items():
        (folder / "stub" / name).write_text(text)
        (folder / "stub" / name).chmod(0o755)
    base = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RUNNER_TEMP": str(folder / "temp dir"),
        "GITHUB_ACTION_PATH": "/a b",
    }
    for step in (one for one in action["runs"]["steps"] if "run" in one):
        assert "${{" not in step["run"]  # GitHub would paste the input into the script
        given = {name: known[value.removeprefix("${{ ").removesuffix(" }}")] for name, value in step["env"].items()}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            env={**base, **given},
            capture_output=True,
            text=True,
            check=False,
        )
    assert (folder / "pip.log").read_text() == "-m pip install --quiet /a b/packages/lint\n"
    assert done.returncode == code, done.stderr
    assert expected in done.stdout
    assert not (folder / "pwned").exists()
