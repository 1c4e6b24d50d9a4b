"""`llmtrain verify` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

SMALLER = ("--set", "model.config.hidden_size=32", "--set", "data.eval_fraction=0.2", "--steps", "3")


BROKEN = """
import os, signal, sys

if "llmtrain.launch.fork_server" in sys.orig_argv:
    from llmtrain.trials.verify import train

    compare_plan = train.compare_plan

    def broken(name, *arguments):
        if os.environ["RANK"] == "1":
            if name == "dp2-zero1-acc1":
                raise ValueError("cannot be trained")
            if name == "dp2-zero1-acc2":
                os.kill(os.getpid(), signal.SIGKILL)
        return compare_plan(name, *arguments)

    train.compare_plan = broken
"""


def _verify(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmtrain", "verify", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **env})


@pytest.fixture(scope="module")
def data(verify_corpus):
    sources = json.dumps([{"name": str(verify_corpus)}])
    return ("--set", f"data.sources={sources}", "--set", f"data.cache_dir={verify_corpus.parent / 'cache'}")


def test_json_contains_the_certificate(data, tmp_path):
    plans = ("--nproc", "2", "--plans", "dp1-zero0-acc1,dp2-zero1-acc2")
    result = _verify("recipes/tiny.py:verify", *SMALLER, *data, *plans, "--json", "--run-dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer == json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert [plan["name"] for plan in answer["plans"]] == ["dp1-zero0-acc1", "dp2-zero1-acc2"]
    for plan in answer["plans"]:
        assert plan["certified"]
        assert set(plan["max_deviation"]) == {"loss", "grad_norm", "weights"}
        assert plan["layout"]["dp"] in (1, 2)
        assert plan["seconds"] > 0
    assert {"name": "dp2-zero0-acc1-offload", "rule": "zero.offload_optimizer_stage"} in answer["refused"]
    assert answer["recipe"]["name"] == "tiny"
    assert answer["recipe"]["model"]["config"]["hidden_size"] == 32
    assert {"llmtrain", "torch", "deepspeed", "transformers"} <= set(answer["environment"]["packages"])
    assert answer["environment"]["python"]
    assert answer["device"] == "cpu"
    assert datetime.now(UTC) - datetime.fromisoformat(answer["started"]) < timedelta(minutes=10)
    # The clipping of the probe bites at every step.
    sgd = answer["reference"]["probes"]["sgd"]
    assert min(sgd["grad_norm"]) > sgd["fields"]["optim.clip_grad_norm"]


@pytest.mark.slow
def test_a_failing_plan_does_not_affect_other_verdicts(data, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    plans = ("--nproc", "2", "--plans", "dp1-zero0-acc1,dp2-zero1-*,dp2-zero2-acc1")
    arguments = (*SMALLER, *data, *plans, "--run-dir", tmp_path / "run")
    result = _verify("recipes/tiny.py:verify", *arguments, PYTHONPATH=path)
    assert result.returncode == 1, result.stderr
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    failures = {plan["name"]: plan["failure"] for plan in certificate["plans"]}
    assert "cannot be trained" in failures.pop("dp2-zero1-acc1")
    assert "SIGKILL" in failures.pop("dp2-zero1-acc2")
    assert failures == dict.fromkeys(
        ["dp1-zero0-acc1", "dp2-zero1-acc1-offload", "dp2-zero1-acc2-offload", "dp2-zero2-acc1"]
    )
    assert {plan["name"] for plan in certificate["plans"] if plan["certified"]} == set(failures)
    assert "dp2-zero1-acc1 FAILED: rank 1: ValueError: cannot be trained" in result.stdout
    assert "4 of 6 plans certified" in result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plans", "dp1-zero7-acc1"], ["--plans", "dp1-zero", "verify.plans"]),
        (["--plans", "dp1-zero0-acc1-offload"], ["zero.offload_optimizer_stage"]),
        (["--set", "parallel.precision=autocast_fp16"], ["parallel.precision", "verify.precision"]),
        (["--steps", "0"], ["steps"]),
    ],
)
def test_bad_input_starts_nothing(arguments, words, tmp_path):
    result = _verify("recipes/tiny.py:verify", *arguments, "--run-dir", tmp_path / "run")
    assert result.returncode == 2, result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_one_deviating_probe_is_exit_1(monkeypatch, data, tmp_path, capsys):
    from llmtrain import cli
    from llmtrain.trials.verify import certify
    from llmtrain.trials.verify.job import Certificate, Deviation, Reference, Verdict

    def verified(recipe, plans, refused, steps, run_dir):
        allowed = Deviation(loss=1e-5, grad_norm=1e-5, weights=1e-5, same_lr=True)
        reference = Reference(fields={}, tolerance=allowed, loss=(), grad_norm=(), lr=(), evaluation=None)
        found = {"recipe": allowed, "sgd": allowed.model_copy(update={"weights": None})}
        layout = plans[0].plan.layout()
        return Certificate(
            recipe=recipe,
            steps=steps,
            device="cpu",
            started="2026-01-01T00:00:00+00:00",
            seconds=1.0,
            environment={},
            reference={"recipe": reference, "sgd": reference},
            verdicts=(Verdict(name=plans[0].name, layout=layout, deviations=found, seconds=1.0),),
            refused=(),
        )

    monkeypatch.setattr(certify, "verify", verified)
    arguments = ["verify", "recipes/tiny.py:verify", "--run-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as end:
        cli.main([*arguments, *data, "--set", "data.eval_fraction=0.2"])
    assert end.value.code == 1
    shown = capsys.readouterr().out
    assert "not finite" in shown
    assert "DEVIATES" in shown
    assert "0 of 1 plans certified" in shown
