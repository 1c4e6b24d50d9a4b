"""The rules on the real engine: refused plans fail or deviate, and allowed plans train.

Truth is a plain torch loop (see `engine_probe.py`).
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.launch.rendezvous import reserved_port
from llmtrain.plan.draft import Draft
from llmtrain.plan.ds_config import render
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.rules import DEEPSPEED_RULES, assemble, broken
from llmtrain.recipe.cluster import Cluster

SWEPT = [rule for rule in DEEPSPEED_RULES if rule.id.startswith(("precision.", "zero."))]
PROBE = Path(__file__).parents[2] / "helpers/engine_probe.py"
PRECISIONS = ("fp32", "bf16", "fp16", "autocast_bf16", "autocast_fp16")
# How far a weight may end up from the plain loop's, relative to the way it went. fp16 rounds scaled gradients.
TOLERANCE = {"fp32": 5e-5, "bf16": 5e-5, "autocast_bf16": 5e-5, "fp16": 5e-3, "autocast_fp16": 5e-3}


def run_probe(cases: list[dict], ranks: int, folder: Path) -> dict[str, dict]:
    (folder / "cases.json").write_text(json.dumps(cases))
    workers = []
    with reserved_port() as port:
        for rank in range(ranks):
            rendezvous = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            environment = os.environ | {key: str(value) for key, value in rendezvous.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(PROBE), "cases.json", "results.json"]
            log = (folder / f"{rank}.log").open("w")
            workers.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log))
        codes = [worker.wait(timeout=240) for worker in workers]
    assert codes == [0] * ranks, (folder / "0.log").read_text()[-3000:]
    return json.loads((folder / "results.json").read_text())


class Sweep:
    """Variants of one recipe with what the rules and the engine say to each."""

    def __init__(self, recipe, ranks):
        self.base = recipe.with_(**{"optim.lr": 1e-2, "optim.clip_grad_norm": 0.02, "batch.micro_batch_size": 4})
        self.base = self.base.with_(**{"batch.global_batch_size": 16 * ranks})
        self.facts = model_facts(recipe.model, recipe.vocab_size)
        self.ranks = ranks
        self.drafts = {}

    def add(self, precision="fp32", stage=0, **fields):
        parallel = {"precision": precision, "zero_stage": stage, **fields}
        parallel = {f"parallel.{key}" if "." not in key else key: value for key, value in parallel.items()}
        name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in parallel.items())
        self.drafts[name] = Draft(
            self.base.with_(**parallel), Cluster(devices_per_node=self.ranks, device="gpu"), self.facts
        )

    def run(self, folder):
        cases = []
        for name, draft in self.drafts.items():
            config = render(assemble(draft))
            for offload in ("offload_optimizer", "offload_param"):
                if "pin_memory" in (block := config["zero_optimization"].get(offload, {})):
                    block["pin_memory"] = False
            cases.append({"id": name, "config": config, "precision": draft.parallel.precision, "allow_fp16": True})
        return run_probe(cases, self.ranks, folder)


def falsified(draft, outcome) -> str:
    """Returns how the engine deviated from its options; empty if it did not."""
    if "error" in outcome:
        return outcome["error"]
    parallel = draft.parallel
    asked = (
        parallel.offload_optimizer != "none",
        parallel.offload_param != "none",
        parallel.offload_optimizer == "nvme",
    )
    did = (outcome["offloads_optimizer"], outcome["offloads_param"], outcome["swaps"])
    if asked != did:
        return f"offload was {asked} and is {did}"
    if outcome["norm_deviation"] is not None and outcome["norm_deviation"] > 2e-3:
        return f"gradient norm off by {outcome['norm_deviation']:.1e}"
    given, tolerance = parallel.grad_accum_dtype, TOLERANCE[parallel.precision]
    if given not in ("fp32", draft.weight_dtype):
        # Not the exact sum, or not the one that was asked for (ignored, or dependent on the layout).
        apart = max(outcome["deviation_from_fp32_sum"], outcome["deviation"])
        return f"sum of gradients off by {apart:.1e}" if apart > tolerance else ""
    if given == draft.weight_dtype != "fp32" and draft.cluster.world_size > 1:
        return ""  # another order of summation rounds differently: only the norm above can be compared
    if outcome["deviation"] > tolerance:
        return f"weights off by {outcome['deviation']:.1e}"
    return ""


def disagreements(sweep, results):
    for name, draft in sweep.drafts.items():
        refused, wrong = broken(draft)[0], falsified(draft, results[name])
        if bool(refused) != bool(wrong):
            yield f"{name}: rules {[problem.rule for problem in refused] or 'let it pass'}, engine: {wrong or 'right'}"


def everything(sweep):
    """Each precision × stage × accumulator × offload that a CPU can run."""
    for precision, stage, grad_accum, optimizer, param in itertools.product(
        PRECISIONS, range(4), ("fp32", "bf16", "fp16"), ("none", "cpu"), ("none", "cpu")
    ):
        sweep.add(precision, stage, grad_accum_dtype=grad_accum, offload_optimizer=optimizer, offload_param=param)
    return sweep


def selection(sweep):
    """The same with one accumulator each, and what is left out above."""
    for precision, stage in itertools.product(PRECISIONS, range(4)):
        sweep.add(precision, stage)
    for stage, optimizer in itertools.product(range(4), ("adamw", "adam", "sgd")):
        sweep.add("fp32", stage, offload_optimizer="cpu", **{"optim.name": optimizer})
        sweep.add("fp32", stage, offload_param="cpu", **{"optim.name": optimizer})
    for stage in (1, 2):
        sweep.add("bf16", stage, offload_optimizer="nvme", nvme_path="/nvme")
    for stage, grad_accum in itertools.product((1, 2, 3), ("bf16", "fp16")):
        sweep.add("fp32", stage, grad_accum_dtype=grad_accum)
        sweep.add("bf16", stage, grad_accum_dtype=grad_accum)
    for stage, clip in itertools.product(range(4), (0.0, 0.02)):
        sweep.add("bf16", stage, grad_accum_dtype="bf16", **{"optim.clip_grad_norm": clip})
        sweep.add("fp32", stage, **{"optim.clip_grad_norm": clip})
    return sweep


@pytest.mark.slow
def test_rules_and_engine_agree(tiny, tmp_path):
    sweep = selection(Sweep(tiny, ranks=1))
    results = sweep.run(tmp_path)
    assert not (found := list(disagreements(sweep, results))), "\n".join(found)
    # Both directions were observed, for every rule that claims so.
    tried = {problem.rule for draft in sweep.drafts.values() for problem in broken(draft)[0]}
    # Below, in `test_rules_engine_directed`, and in `test_rules_hierarchical`.
    elsewhere = {"precision.fp16_cpu", "zero.nvme_path", "zero.expert"}
    elsewhere |= {"zero.hierarchical_stage", "zero.hierarchical_groups"}
    claimed = {rule.id for rule in SWEPT if rule.evidence == "run"} - elsewhere
    assert tried == claimed
    assert sum(not broken(draft)[0] for draft in sweep.drafts.values()) >= 20


def test_fp16_does_not_start_on_a_cpu(tiny, tmp_path):
    sweep = Sweep(tiny, ranks=1)
    sweep.add("fp16", 1)
    sweep.add("fp32", 1)
    (fp16, fp32) = (Draft(draft.recipe, Cluster(), draft.facts) for draft in sweep.drafts.values())
    assert [problem.rule for problem in broken(fp16)[0]] == ["precision.fp16_cpu"]
    assert not broken(fp32)[0]
    cases = [
        {"id": draft.parallel.precision, "config": render(assemble(draft)), "precision": draft.parallel.precision}
        for draft in (fp16, fp32)
    ]
    results = run_probe(cases, 1, tmp_path)
    assert "fp16 is not supported" in results["fp16"]["error"]
    assert results["fp32"]["deviation"] < TOLERANCE["fp32"]


@pytest.mark.breadth
@pytest.mark.parametrize("ranks", [1, 2])
def test_rules_and_engine_agree_on_everything(tiny, tmp_path, ranks):
    sweep = everything(Sweep(tiny, ranks))
    results = sweep.run(tmp_path)
    assert not (found := list(disagreements(sweep, results))), "\n".join(found)
