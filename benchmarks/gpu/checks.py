"""Whether results on the first device are right, by commands as users give them; and what the worker costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.benchmark import sets
from benchmarks.gpu.case import FailedError, NotHereError, Numbers, Situation
from benchmarks.pairs import ROOT
from llmtrain.recipe.cluster import visible_gpus

TINY = "recipes/tiny.py"
BF16 = "parallel.precision=bf16"
KERNELS = ("model.attention=varlen", "kernels.blocks=compiled", "kernels.loss=compiled")
VERIFIED = "dp1-zero[123]-acc4*"
PUBLISHED = ("versions.packages", "versions.torch", "versions.optional", "devices.")
"""Findings of `llmtrain doctor` that have no names of hosts and folders."""
TAIL = 2000
"""Characters of a command's output that an error message has."""


def machine(given: Situation) -> Numbers:
    """Returns what `llmtrain doctor` and `nvidia-smi` say."""
    report = json.loads(_run(*_llmtrain("doctor", "--nproc", "1", "--json"), codes=(0, 5)))
    try:
        driver = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        driver = str(error)
    print(driver, json.dumps(report, indent=1), sep="\n", file=sys.stderr)
    findings = {one["check"]: one["text"] for host in report["hosts"] for one in host["findings"]}
    published = {check: text for check, text in findings.items() if check.startswith(PUBLISHED)}
    return {"faults": report["faults"], "warnings": report["warnings"], "findings": published}


def self_test(given: Situation) -> Numbers:
    """Compares every strategy of one device with plain PyTorch in fp32, and measures rates and a step."""
    report = json.loads(_run(*_llmtrain("doctor", "--self-test", "--nproc", "1", "--json"), codes=(0, 5)))
    plans = [plan for certificate in report["parity"] for plan in certificate["plans"]]
    found: Numbers = {
        "plans": len(plans),
        "certified": sum(plan["certified"] for plan in plans),
        "measured": report["measured"],
        "findings": report["findings"],
        "devices": report["devices"],
    }
    faults = [f"{one['check']}: {one['text']}" for one in report["findings"] if one["level"] == "fault"]
    if faults:
        raise FailedError("; ".join(faults), found)
    return found


def verify(given: Situation) -> Numbers:
    """Compares ZeRO 1 to 3, with and without offload, with plain PyTorch in bf16, with varlen and compiled kernels."""
    command = _llmtrain("verify", f"{TINY}:verify", "--nproc", "1", "--plans", VERIFIED, "--steps", "2", "--json")
    command += ["--run-dir", str(given.work / "verify"), *sets(BF16)]
    found: Numbers = {}
    if given.small and visible_gpus() and find_spec("triton") is None:  # an emulated GPU
        found["refused_kernels"] = "triton, which compiles for GPUs, is not installed"
    else:
        command += sets(*KERNELS)
    plans = json.loads(_run(*command, codes=(0, 1, 5)))["plans"]
    found |= {"plans": len(plans), "certified": sum(plan["certified"] for plan in plans)}
    found["deviations"] = {plan["name"]: plan["max_deviation"] for plan in plans}
    wrong = [f"{plan['name']} {plan.get('failure') or ''}".strip() for plan in plans if not plan["certified"]]
    if wrong or not plans:
        raise FailedError(f"not certified: {', '.join(wrong) or 'no plan was tried'}", found)
    return found


def resume(given: Situation) -> Numbers:
    """Trains twice, once without and once with a stop in the middle; compares all losses, and samples the export."""
    steps, stop, recipe = (12, 6, f"{TINY}:verify") if given.small else (300, 150, f"{TINY}:bf16")
    base = _llmtrain("train", recipe, "--nproc", "1")
    base += sets(f"train.max_steps={steps}", "logging.every_steps=1", "export.sample_prompt=def")
    _run(*_llmtrain("data", recipe))
    whole = [*base, "--run-dir", str(given.work / "whole")]
    parts = [*base, "--run-dir", str(given.work / "parts")]
    with subprocess.Popen(whole, cwd=ROOT, stdout=sys.stderr, stdin=subprocess.DEVNULL) as beside:
        _run(*parts, "--max-steps", str(stop))
        _run(*parts)
    if beside.returncode:
        raise FailedError(f"the uninterrupted run ended with exit code {beside.returncode}", {})
    one, other = (_losses(given.work / name) for name in ("whole", "parts"))
    sample = _run(*_llmtrain("generate", str(given.work / "parts"), "--prompt", "def ", "--tokens", "16"))
    found: Numbers = {
        "steps": steps,
        "compared": len(one),
        "same_bits": sum(loss == other.get(step) for step, loss in one.items()),
        "last_loss": one[steps],
        "sample": sample[-200:],
    }
    if len(one) != steps or found["same_bits"] != steps:
        raise FailedError(f"{found['same_bits']} of {steps} losses are the same bits", found)
    return found


def _losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def tests(given: Situation) -> Numbers:
    """Runs the tests of tests/gpu."""
    report = given.work / "tests.xml"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "not breadth", "-n", "0", "-p", "no:cacheprovider"]
    output = _run(*command, f"--junitxml={report}", codes=(0, 1, 5))
    print(output, file=sys.stderr)
    root = ElementTree.parse(report).getroot()
    outcomes: dict[str, list[str]] = {"failure": [], "error": [], "skipped": []}
    cases = list(root.iter("testcase"))
    for one in cases:
        for outcome, names in outcomes.items():
            if (why := one.find(outcome)) is not None:
                names.append(f"{one.get('name')}: {why.get('message', '')[:200]}")
    wrong = outcomes["failure"] + outcomes["error"]
    found: Numbers = {"passed": len(cases) - sum(map(len, outcomes.values())), "failed": wrong}
    found["skipped"] = outcomes["skipped"]
    if wrong:
        named = ", ".join(dict.fromkeys(one.partition(": ")[0].partition("[")[0] for one in wrong))
        raise FailedError(f"{len(wrong)} of {len(cases)} tests failed: {named}", found)
    if not found["passed"]:
        raise NotHereError(f"all {len(cases)} tests were skipped: {outcomes['skipped'][0].partition(': ')[2]}")
    return found


def wrapper(given: Situation) -> Numbers:
    """Alternates our worker and a bare DeepSpeed loop in one process (`benchmarks.programs.interleaved`)."""
    command = [sys.executable, "-m", "benchmarks.programs.interleaved", "--peer", "deepspeed", "--ranks", "1"]
    fields = ["parallel.zero_stage=1"]
    if not given.small:
        command += ["--recipe", "recipes/llama_1b.py"]
        data = {"sources": [{"name": "stdlib"}], "tokenizer": {"vocab_size": 4096}, "sequence_length": 2048}
        fields += [f"data={json.dumps(data)}", "model.config.vocab_size=4096"]
        fields += ["batch.micro_batch_size=4", "batch.global_batch_size=16"]
    output = _run(*command, "--blocks", "4" if given.small else "6", *sets(*fields))
    found: Numbers = json.loads(output.splitlines()[-1])
    return found


def _llmtrain(*words: str) -> list[str]:
    return [sys.executable, "-m", "llmtrain", *words]


def _run(*command: str, codes: Sequence[int] = (0,)) -> str:
    """Returns the output of a command. Raises RuntimeError for other exit codes than these."""
    done: Any = subprocess.run(
        command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=False
    )
    if done.returncode not in codes:
        print(done.stdout, file=sys.stderr)
        name = " ".join(command[2:5])
        raise RuntimeError(f"exit code {done.returncode} of {name}: {done.stdout[-TAIL:].strip()}")
    output: str = done.stdout
    return output
