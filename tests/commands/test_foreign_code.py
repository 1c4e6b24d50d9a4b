"""A run, a checkpoint or a model that somebody else wrote runs no code, unless the command line permits it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from llmtrain.checkpoint.folder import write_exported
from llmtrain.checkpoint.manifest import read_manifests
from llmtrain.cli import app
from llmtrain.errors import CheckpointError, Exit, RecipeError, UserError
from llmtrain.plan.facts.own_optimizer import TriedOptimizer
from llmtrain.run_dir import RunDir, write_json
from tests.helpers.commands import forked_llmtrain
from tests.helpers.hand_made import make_run, seal
from tests.helpers.small_plan import small_plan

CODE = """
from pathlib import Path
from transformers import LlamaConfig

Path({marker!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = {kind!r}
"""


class Trap:
    """A folder of a model whose code leaves a file when it is run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._marker = folder / "model", folder / "was_run"
        self.folder.mkdir(parents=True)
        # transformers keeps the modules of a process by the name of the folder and of the file.
        kind = f"own_{folder.parent.name}"
        auto = {"AutoConfig": f"{kind}.OwnConfig", "AutoModelForCausalLM": f"{kind}.OwnModel"}
        write_json(self.folder / "config.json", {"model_type": kind, "auto_map": auto})
        (self.folder / f"{kind}.py").write_text(CODE.format(marker=str(self._marker), kind=kind))

    @property
    def was_run(self) -> bool:
        return self._marker.exists()


@pytest.fixture
def trap(tmp_path) -> Trap:
    return Trap(tmp_path / "foreign")


@pytest.fixture
def foreign(tmp_path, trap) -> RunDir:
    """A run that claims that the model's code may be run."""
    run = make_run(tmp_path / "run")
    plan = small_plan()
    fields = {"architecture": None, "config": {}, "pretrained": str(trap.folder), "trust_remote_code": True}
    model = plan.recipe.model.model_copy(update=fields)
    plan = plan.model_copy(update={"recipe": plan.recipe.model_copy(update={"model": model})})
    (checkpoint,) = run.checkpoints.glob("step_*")
    (checkpoint / "plan.json").write_text(plan.model_dump_json())
    (checkpoint / "MANIFEST.json").unlink()
    seal(checkpoint)
    return run


def _failure(*arguments: object) -> UserError:
    """The error of a command."""
    with pytest.raises(UserError) as caught:
        app([str(one) for one in arguments], standalone_mode=False)
    return caught.value


@pytest.mark.parametrize("command", [("export",), ("checkpoint", "convert")], ids=" ".join)
def test_a_checkpoint_cannot_permit_its_own_code(command, foreign, trap, tmp_path):
    error = _failure(*command, foreign.path, tmp_path / "out")
    assert not trap.was_run
    assert isinstance(error, CheckpointError), error
    (problem,) = error.problems
    assert problem.rule == "checkpoint.remote_code"
    assert problem.field.endswith("plan.json: model.trust_remote_code")
    assert "--trust-remote-code" in problem.fix
    assert not (tmp_path / "out").exists()


def test_an_export_does_not_call_an_optimizer_that_only_a_checkpoint_names(tmp_path):
    """One that averages has to be asked for the weights to export."""
    run, plan, marker = make_run(tmp_path / "run"), small_plan(), tmp_path / "was_run"
    (tmp_path / "averaging.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    recipe = plan.recipe.with_(**{"optim.name": "averaging:Averaging", "code_dir": str(tmp_path)})
    tried = TriedOptimizer(unit="element", deviation=0.0, averages=True)
    (checkpoint,) = run.checkpoints.glob("step_*")
    plan = plan.model_copy(update={"recipe": recipe, "optimizer": tried})
    (checkpoint / "plan.json").write_text(plan.model_dump_json())
    (checkpoint / "MANIFEST.json").unlink()
    seal(checkpoint)
    error = _failure("export", run.path, tmp_path / "out")
    assert [problem.rule for problem in error.problems] == ["checkpoint.own_code"]
    assert not marker.exists()


@pytest.mark.parametrize("command", [("export",), ("checkpoint", "convert")], ids=" ".join)
def test_the_command_line_permits_the_code_of_a_checkpoint(command, foreign, trap, tmp_path):
    with pytest.raises(Exception, match=r"OwnModel|comput|build"):  # its code is no model
        app([*command, str(foreign.path), str(tmp_path / "out"), "--trust-remote-code"], standalone_mode=False)
    assert trap.was_run


def _save_tokenizer(folder: Path) -> None:
    inner = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>").save_pretrained(folder)


def test_generate_asks_no_question_about_code(trap, monkeypatch):
    """A process with a terminal was asked, and one whose input says `y` ran the code."""
    monkeypatch.setattr("builtins.input", lambda _: "y")
    _save_tokenizer(trap.folder)
    error = _failure("generate", trap.folder, "--prompt", "a")
    assert not trap.was_run
    assert isinstance(error, RecipeError)
    assert error.problems[0].field == str(trap.folder)
    assert "--trust-remote-code" in error.problems[0].fix
    with pytest.raises(Exception, match="OwnModel"):
        app(["generate", str(trap.folder), "--prompt", "a", "--trust-remote-code"], standalone_mode=False)
    assert trap.was_run


def test_a_merge_does_not_run_the_code_of_the_base(trap, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(trap.folder), "target_modules": ["q_proj"]}
    write_json(adapter / "adapter_config.json", settings)
    error = _failure("export", "--merge", adapter, tmp_path / "out")
    assert not trap.was_run
    assert (error.problems[0].rule, error.problems[0].field) == ("model.remote_code", str(trap.folder))
    assert "--trust-remote-code" in error.problems[0].fix
    with pytest.raises(Exception, match="OwnModel"):
        app(["export", "--merge", str(adapter), str(tmp_path / "out"), "--trust-remote-code"], standalone_mode=False)
    assert trap.was_run


def test_a_run_cannot_permit_the_code_of_its_tasks(tmp_path):
    pytest.importorskip("lm_eval")
    run = make_run(tmp_path / "run")
    LlamaForCausalLM(
        LlamaConfig(vocab_size=2, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    ).save_pretrained(run.export)
    _save_tokenizer(run.export)
    (checkpoint,) = run.checkpoints.glob("step_*")
    write_exported(run.export, read_manifests(checkpoint)[0])
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    marker = tmp_path / "was_run"
    (tasks / "code.py").write_text(f"open({str(marker)!r}, 'w')\n\ndef documents(*_):\n    raise OSError('run')\n")
    (tasks / "trap.yaml").write_text("task: trap\ncustom_dataset: !function code.documents\ntest_split: test\n")
    recipe = json.loads(run.recipe_file.read_text())
    recipe["tasks"] |= {"names": ["trap"], "include_path": str(tasks)}
    write_json(run.recipe_file, recipe)
    refused = forked_llmtrain("eval", run.path)
    assert not marker.exists()
    assert refused.returncode == Exit.USAGE
    assert f"{run.recipe_file}: tasks.include_path: is '{tasks}'" in refused.stderr
    assert f"--include-path {tasks}" in refused.stderr
    assert "--trust-remote-code" in refused.stderr
    for permitted in (["--include-path", tasks], ["--trust-remote-code"]):
        forked_llmtrain("eval", run.path, *permitted)  # fails in the function
        assert marker.exists(), permitted
        marker.unlink()
