"""Kernels by measurement: the candidates, the choice, and the kernels with which a run continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import cycle
from select import select

import pytest
import torch

from llmtrain import Custom
from llmtrain.data import MicroBatch
from llmtrain.engines.runtime.cpu import matmul_of
from llmtrain.errors import Problem, RecipeError
from llmtrain.models import precision
from llmtrain.plan import KernelChoice
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from llmtrain.train.tune import choice, request, search, trial
from llmtrain.train.tune.choice import KERNELS, alternatives, open_kernels
from llmtrain.train.tune.trial import Comparison
from tests.helpers.batches import CLASSIFIER
from tests.helpers.own_losses import hidden_tokens
from tests.helpers.small_plan import small_plan

CPU = torch.device("cpu")
T = 128


@pytest.fixture
def batch():
    tokens = torch.randint(0, 256, (2, T), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(50), torch.arange(T - 50)]).repeat(2, 1)
    return MicroBatch(input_ids=tokens, position_ids=positions, labels=tokens.roll(-1))


class Timed:
    """A stand-in for the clock: every trial takes what is said of its plan, and the fastest wins each turn."""

    def __init__(self, monkeypatch, seconds):
        self.seconds = seconds
        monkeypatch.setattr(search, "compare_in_turns", self.compare_in_turns)
        monkeypatch.setattr(search.Trial, "seconds", lambda one, least_s=0: self(one))
        monkeypatch.setattr(trial, "WARM_PASSES", 1)

    def __call__(self, one):
        return self.seconds(one.plan.recipe)

    def compare_in_turns(self, one, other):
        return Comparison(self(one), self(other) / self(one), self(other) < self(one))


def _tune(plan, batch, always=True, threads=1):
    said = []
    return search.tune(plan, lambda _: batch, CPU, threads, always, said.append), said


@pytest.mark.parametrize("hidden", [False, True], ids=["outputs", "hidden"])
def test_a_trial_computes_the_users_own_loss(hidden, batch, monkeypatch):
    """The tokens are no labels of a head of three outputs, and a loss of hidden states computes its own logits."""
    monkeypatch.setattr(trial, "WARM_PASSES", 1)
    fields = {"objective": Custom(hidden_tokens, hidden_states=True)} if hidden else CLASSIFIER
    plan = resolve(small_plan().recipe.with_(**fields), Cluster())
    one = search.Trial(plan, batch, CPU)
    loss, (seen,) = one.warm(), one.objective._seen
    count = int(torch.isin(batch.labels, torch.tensor([3, 4, 5])).sum())
    assert seen[0] == (batch.labels.numel() if hidden else count)
    assert loss > 0


def test_kernels_set_by_the_recipe_are_not_measured():
    plan = small_plan()
    assert open_kernels(plan.recipe) == KERNELS
    names = {"kernels.blocks": "eager", "kernels.loss": "whole", "model.attention": "eager"}
    named = small_plan(**names, **{"kernels.matmul": "torch"})
    assert open_kernels(named.recipe) == ("kernels.threads",)
    assert dict(alternatives(named, on_cpu=True, threads=4)) == {"kernels.threads": [4, 2, 1]}


def test_both_matmul_kernels_are_measured_on_a_cpu(monkeypatch):
    for default, other in (("torch", "onednn"), ("onednn", "torch")):
        monkeypatch.setattr(choice, "matmul_of", lambda plan: default)  # noqa: B023
        assert dict(alternatives(small_plan(), on_cpu=True, threads=1))["kernels.matmul"] == [default, other]
    monkeypatch.setattr(choice, "matmul_of", lambda plan: "torch")
    low = small_plan(**{"parallel.precision": "bf16", "parallel.zero_stage": 1})
    assert dict(alternatives(low, on_cpu=True, threads=1))["kernels.matmul"] == ["torch"]


def test_gpu_kernels_are_measured_on_a_gpu():
    h100 = Cluster(devices_per_node=2, device="h100")
    plan = resolve(small_plan(**{"parallel.precision": "bf16", "parallel.zero_stage": 1}).recipe, h100)
    tried = dict(alternatives(plan, on_cpu=False, threads=1))
    assert tried["model.attention"][0] == "sdpa"
    assert "eager" not in tried["model.attention"]
    assert {"varlen", "flex_attention"} < set(tried["model.attention"])
    assert "liger" in tried["kernels.loss"]
    assert "kernels.threads" not in tried


def test_kernels_refused_by_a_rule_are_not_measured():
    h100 = Cluster(devices_per_node=2, device="h100")
    plan = resolve(small_plan().recipe.with_(**{"parallel.backend": "data_parallel"}), h100)
    tried = dict(alternatives(plan, on_cpu=False, threads=1))
    assert tried["kernels.loss"] == ["whole"]  # nn.DataParallel must have the logits


def test_whole_logits_beyond_the_planned_memory_are_not_measured():
    large = {"model.config.vocab_size": 200_000, "data.sequence_length": 4096}
    tried = dict(alternatives(small_plan(**large), on_cpu=True, threads=1))
    assert tried["kernels.loss"][0] == "chunked"
    assert "whole" not in tried["kernels.loss"]


@pytest.mark.slow
def test_the_fastest_value_of_each_field_is_chosen(monkeypatch, batch):
    Timed(monkeypatch, lambda recipe: 1.0 - 0.3 * (recipe.model.attention == "eager"))
    found, said = _tune(small_plan(**{"kernels.blocks": "eager"}), batch)
    products = matmul_of(small_plan())
    chosen = {"kernels.threads": 1, "kernels.matmul": products}
    assert found.values == {**chosen, "model.attention": "eager", "kernels.loss": "whole"}
    assert found.milliseconds["model.attention"]["eager"] == 700
    assert found.milliseconds["kernels.loss"] == {"whole": 700, "chunked": 700, "compiled": 700}
    assert "model.attention=eager" in said


def test_the_time_of_each_precision_is_reported(monkeypatch, batch):
    Timed(monkeypatch, lambda recipe: {"fp32": 1.0, "bf16": 0.5, "autocast_bf16": 0.7}[recipe.parallel.precision])
    monkeypatch.setattr(search, "alternatives", lambda *_: [])
    found, _ = _tune(small_plan(), batch)
    assert found.milliseconds["parallel.precision"] == {"fp32": 1000, "bf16": 500, "autocast_bf16": 700}
    assert "parallel.precision" not in found.values


def _micro_batches(monkeypatch, batch, times, **fields):
    """What is shown of micro-batches if a pass takes these times; the recipe has 2 of 64 sequences."""
    Timed(monkeypatch, lambda recipe: times[recipe.batch.micro_batch_size])
    monkeypatch.setattr(search, "alternatives", lambda *_: [])
    monkeypatch.setattr(search, "PRECISIONS", ())
    found, said = _tune(small_plan(**{"batch.global_batch_size": 64, **fields}), batch)
    assert "batch.micro_batch_size" not in found.values
    return found.milliseconds.get("batch.micro_batch_size"), found.failed, said


def test_larger_micro_batches_are_measured_until_they_are_not_faster(monkeypatch, batch):
    found, _, said = _micro_batches(monkeypatch, batch, {2: 1.0, 4: 1.8, 8: 3.59, 16: 1.0})
    assert found == {"2": 1000, "4": 900, "8": 897.5}  # less than 2% faster
    assert said == ["batch.micro_batch_size=4", "batch.micro_batch_size=8"]


def test_smaller_micro_batches_are_measured_if_larger_ones_are_slower(monkeypatch, batch):
    found, _, _ = _micro_batches(monkeypatch, batch, {1: 0.4, 2: 1.0, 4: 2.1})
    assert found == {"2": 1000, "4": 1050, "1": 800}


def test_a_micro_batch_that_does_not_fit_ends_the_search(monkeypatch, batch):
    own = search.Trial.warm

    def warm(self):
        if self.plan.batch.micro_batch_size == 4:
            raise MemoryError("no room")
        return own(self)

    monkeypatch.setattr(search.Trial, "warm", warm)
    found, failed, _ = _micro_batches(monkeypatch, batch, {1: 0.5, 2: 1.0})
    assert found == {"2": 1000, "1": 1000}
    assert failed["batch.micro_batch_size=4"] == "MemoryError: no room"


def test_a_micro_batch_that_a_rule_refuses_is_reported_with_the_reason(monkeypatch, batch):
    def refuse(recipe, cluster, facts):
        raise RecipeError(Problem("memory.fits", "memory", "it does not fit", "a smaller one"))

    monkeypatch.setattr(search, "resolve", refuse)
    _, failed, _ = _micro_batches(monkeypatch, batch, {2: 1.0})
    assert failed["batch.micro_batch_size=4"] == "it does not fit"


def test_micro_batches_are_those_of_the_same_run(monkeypatch, batch):
    times = {1: 0.6, 2: 1.0, 4: 1.8}
    few = {"batch.global_batch_size": 4}  # 2 for each of 2 ranks
    assert _micro_batches(monkeypatch, batch, times, **few)[0] == {"2": 1000, "1": 1200}
    stages = {"parallel.pipeline": 2, "optim.clip_grad_norm": 0.0}
    assert _micro_batches(monkeypatch, batch, times, **stages)[0] is None


def test_times_of_a_field_are_scaled_to_one_speed_of_the_device(monkeypatch, batch):
    """Which drifts from one comparison to the next."""
    speeds = iter([1.0, 2.0, 4.0])
    Timed(monkeypatch, lambda recipe: 1.0)
    monkeypatch.setattr(search, "compare_in_turns", lambda one, other: Comparison(next(speeds), 1.1, False))
    monkeypatch.setattr(search, "alternatives", lambda *_: [("model.attention", ["sdpa", "eager", "varlen"])])
    found, _ = _tune(small_plan(), batch)
    assert found.milliseconds["model.attention"] == {"sdpa": 1000, "eager": 1100, "varlen": 1100}


def test_a_small_gain_is_not_accepted(monkeypatch, batch):
    Timed(monkeypatch, lambda recipe: 1.0 - 0.01 * (recipe.model.attention == "eager"))
    monkeypatch.setattr(search, "alternatives", lambda *_: [("model.attention", ["sdpa", "eager"])])
    assert _tune(small_plan(), batch)[0].values["model.attention"] == "sdpa"


def test_a_kernel_with_deviating_results_is_not_chosen(monkeypatch, batch):
    Timed(monkeypatch, lambda recipe: 1.0 - 0.3 * (recipe.model.attention == "eager"))
    own = search.Trial.warm
    monkeypatch.setattr(
        search.Trial, "warm", lambda self: own(self) * (1.01 if self.plan.recipe.model.attention == "eager" else 1)
    )
    found, _ = _tune(small_plan(**{"kernels.blocks": "eager", "kernels.loss": "whole"}), batch)
    assert found.values["model.attention"] == "sdpa"
    assert "was expected" in found.failed["model.attention=eager"]


def test_a_kernel_that_cannot_run_is_reported_and_skipped(monkeypatch, batch):
    Timed(monkeypatch, lambda recipe: 1.0)
    monkeypatch.setattr(search, "alternatives", lambda *_: [("model.attention", ["sdpa", "flash_attention_2"])])
    found, _ = _tune(small_plan(), batch)
    assert found.values == {"model.attention": "sdpa"}
    assert "FlashAttention2" in found.failed["model.attention=flash_attention_2"]


def test_a_short_run_does_not_measure(monkeypatch, batch):
    Timed(monkeypatch, lambda recipe: 0.1)
    plan = small_plan()  # 2 layers, 2 micro-batches a step, 100 steps
    assert search.run_seconds(plan, 0.1) == pytest.approx(20)
    found, said = _tune(plan, batch, always=False)
    assert (found.values, found.milliseconds, said) == ({}, {}, [])
    assert "too short" in found.why
    long = small_plan(**{"train.max_steps": 100_000, "kernels.blocks": "eager"})
    assert _tune(long, batch, always=False)[0].milliseconds


def test_a_cached_choice_depends_only_on_device_packages_and_shapes():
    def key(device="a", **fields):
        return choice.key_of_run(small_plan(**fields), device)

    assert key() == key(**{"train.max_steps": 7, "optim.lr": 3.0, "batch.global_batch_size": 16})
    others = [
        key("b"),
        key(**{"batch.micro_batch_size": 1}),
        key(**{"data.sequence_length": 64}),
        key(**{"parallel.precision": "bf16", "parallel.zero_stage": 1}),
        key(**{"model.config.hidden_size": 32}),
        key(**{"kernels.loss": "whole"}),
        key(**{"data.mask_documents": False}),
    ]
    assert len({key(), *others}) == 1 + len(others)


def _choice(key, **values):
    measured = {"kernels.loss": {"whole": 2.0, "chunked": 1.0}}
    return KernelChoice(key=key, device="d", why="measured", values=values, milliseconds=measured)


def test_kernels_come_from_the_run_then_the_cache_then_the_rules(tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr(request, "measure", never)
    plan = small_plan(**{"data.cache_dir": str(tmp_path)})
    key = choice.key_of_run(plan, choice.device_name(CPU, 1))
    by_the_rules = request._choose(plan, CPU, 1, print)
    assert (by_the_rules.key, by_the_rules.values) == (key, {})

    choice.write_cached(plan.recipe.data, _choice(key, **{"kernels.loss": "chunked"}))
    cached = request._choose(plan, CPU, 1, print)
    assert choice.apply(plan, cached).recipe.kernels.loss == "chunked"
    # The run began before there was a measurement, and continues with its first choice.
    begun = plan.model_copy(update={"kernels": by_the_rules})
    assert request._choose(begun, CPU, 1, print) == by_the_rules
    # On another device it is chosen anew.
    elsewhere = plan.model_copy(update={"kernels": _choice("another key", **{"kernels.loss": "whole"})})
    assert request._choose(elsewhere, CPU, 1, print) == cached

    choice.cached_file(plan.recipe.data, key).write_text("{")
    assert request._choose(plan, CPU, 1, print) == by_the_rules


def test_only_the_measurement_is_lost_if_its_process_dies(tmp_path, monkeypatch):
    plan = small_plan(**{"data.cache_dir": str(tmp_path), "train.max_steps": 10**9})
    monkeypatch.setattr(request.sys, "executable", "/bin/false")
    found = request._choose(plan, CPU, 1, print)
    assert found.values == {}
    assert "exit code 1" in found.why


class Cores:
    """A stand-in for what others use of the cores: so much in one comparison after the other."""

    def __init__(self, monkeypatch, *used):
        self.used = iter(used)
        monkeypatch.setattr(trial, "CoreMeter", lambda: self)
        monkeypatch.setattr(trial, "available_cores", lambda: 2)

    def cores_used_by_others(self):
        return next(self.used)


class Passes:
    """A trial whose passes take so long, in turn."""

    def __init__(self, *seconds, device="cpu"):
        taken = cycle(seconds)
        self.device, self.seconds = torch.device(device), lambda least_s: next(taken)


@pytest.fixture
def five_turns(monkeypatch):
    monkeypatch.setattr(trial, "COMPARE_S", 0.0)


@pytest.mark.parametrize(
    ("others", "ratio", "is_faster"),
    [
        ((0.9, 0.8, 0.9, 0.7, 0.9), 0.9, True),
        ((0.9, 0.8, 0.9, 0.7, 1.1), 0.9, False),
        ((1.1, 1.2, 1.3, 1.2, 1.4), 1.2, False),
    ],
    ids=["always", "once slower", "slower"],
)
def test_a_kernel_that_may_be_faster_by_chance_is_not_chosen(monkeypatch, five_turns, others, ratio, is_faster):
    Cores(monkeypatch, 0.0)
    assert trial.compare_in_turns(Passes(2.0), Passes(*(2 * one for one in others))) == Comparison(
        2.0, ratio, is_faster
    )


def test_drifting_turns_are_compared_pair_by_pair(monkeypatch, five_turns):
    Cores(monkeypatch, 0.0)
    drift, others = (1.0, 5.0, 2.0, 4.0, 3.0), (0.75, 2.5, 1.5, 2.0, 2.25)  # of which the medians are 3 and 2
    assert trial.compare_in_turns(Passes(*drift), Passes(*others)) == Comparison(3.0, 0.75, True)


def test_a_comparison_is_repeated_if_other_processes_used_the_cores(monkeypatch, five_turns):
    cores = Cores(monkeypatch, 0.9, 0.16, 0.1, 0.7)
    assert trial.compare_in_turns(Passes(2.0), Passes(1.0)) == Comparison(2.0, 0.5, True)
    assert next(cores.used) == 0.7  # three were made


def test_nothing_is_chosen_on_a_busy_machine(monkeypatch, batch, five_turns):
    Cores(monkeypatch, *[0.9] * 3)
    monkeypatch.setattr(trial, "WARM_PASSES", 1)
    monkeypatch.setattr(trial, "TURN_S", 0.001)
    with pytest.raises(trial.BusyError, match=r"^others use 0\.90 of 2 cores$"):
        _tune(small_plan(**{"kernels.blocks": "eager"}), batch)


def test_busy_cores_do_not_matter_on_a_gpu(monkeypatch, five_turns):
    Cores(monkeypatch, 0.9)
    assert trial.compare_in_turns(Passes(2.0, device="cuda"), Passes(1.0, device="cuda")) == Comparison(2.0, 0.5, True)


def test_a_run_on_a_busy_machine_uses_the_rules_and_caches_nothing(tmp_path, monkeypatch):
    plan = small_plan(**{"data.cache_dir": str(tmp_path), "train.max_steps": 10**9})
    busy = tmp_path / "python"
    busy.write_text("""#!/bin/sh\necho '{"busy": "others use 0.90 of 2 cores"}'\n""")
    busy.chmod(0o755)
    monkeypatch.setattr(request.sys, "executable", str(busy))
    found = request._choose(plan, CPU, 1, print)
    assert found.values == {}
    assert found.why == "chosen by the rules, because measuring failed: others use 0.90 of 2 cores"
    assert choice.read_cached(plan.recipe.data, found.key) is None


RANK = """
import sys
from llmtrain.plan import Plan
from llmtrain.train.tune.request import measure
sys.executable = sys.argv[1]
measure(Plan.model_validate_json(sys.stdin.read()), "cpu", 1, True, print)
"""


def test_the_measuring_process_ends_with_its_rank(tmp_path):
    measuring, told = tmp_path / "python", tmp_path / "told"
    os.mkfifo(told)
    measuring.write_text(f"#!/bin/sh\necho $$ > {told}\nexec sleep 300\n")
    measuring.chmod(0o755)
    rank = subprocess.Popen([sys.executable, "-c", RANK, measuring], stdin=subprocess.PIPE)
    rank.stdin.write(small_plan().model_dump_json().encode())
    rank.stdin.close()
    reader = os.open(told, os.O_RDWR)
    assert select([reader], [], [], 60)[0]
    process = os.pidfd_open(int(os.read(reader, 100)))
    assert not select([process], [], [], 0)[0]
    rank.kill()
    rank.wait()
    assert select([process], [], [], 10)[0]  # readable: it has ended


def test_messages_of_the_measuring_process_are_passed_on():
    answer = _choice("k", **{"kernels.loss": "chunked"})
    said = []
    lines = [json.dumps({"trying": "a=b"}), json.dumps({"choice": answer.model_dump(mode="json")})]
    assert request._listen(iter(lines), said.append) == answer
    assert said == ["measuring kernels: a=b"]
    problem = Problem("kernels.fp8", "kernels.fp8", "is slower", "off")
    with pytest.raises(RecipeError, match="is slower"):
        request._listen(iter([json.dumps({"problems": [problem.as_dict()]})]), said.append)
    assert request._listen(iter([]), said.append) is None


@pytest.mark.parametrize("always", [True, False])
def test_fp8_that_is_slower_is_refused(batch, monkeypatch, always):
    """Also for a short run, and with the kernels that were chosen; on a stand-in for a device with fp8."""
    converted = []
    monkeypatch.setattr(precision, "check_fp8", lambda *_: None)
    monkeypatch.setattr(precision, "use_fp8", lambda model, kind: converted.append(kind))
    open_loss = {"model.attention": "eager", "kernels.threads": 1, "kernels.blocks": "eager"}
    low = {"parallel.precision": "bf16", "parallel.zero_stage": 1, "kernels.fp8": "rowwise"}
    recipe = small_plan(**open_loss).recipe.with_(**low)
    plan = resolve(recipe, Cluster(devices_per_node=2, device="h100"))
    of_fp8 = {"off": 2.0, "rowwise": 1.5}

    def seconds(recipe):
        return of_fp8[recipe.kernels.fp8] - (recipe.kernels.loss == "chunked")

    Timed(monkeypatch, seconds)
    found, _ = _tune(plan, batch, always)
    if always:
        assert found.milliseconds["kernels.fp8"] == {"off": 1000.0, "rowwise": 500.0}
    assert "rowwise" in converted
    of_fp8["rowwise"] = 2.5
    with pytest.raises(
        RecipeError, match=r"kernels\.fp8: 'rowwise' cannot be used: .* ms in fp8, but only .* ms in bf16"
    ):
        _tune(plan, batch, always)


def test_fp8_is_measured_even_if_all_kernels_are_set_and_the_run_is_short(tmp_path, monkeypatch):
    plan = small_plan(**{"data.cache_dir": str(tmp_path)})
    in_fp8 = plan.model_copy(update={"recipe": plan.recipe.with_(**{"kernels.fp8": "rowwise"})})
    asked = []
    monkeypatch.setattr(request, "measure", lambda plan, *_, **__: asked.append(plan) or _choice("k"))
    request._choose(plan, CPU, 1, print)
    assert asked == []
    request._choose(in_fp8, CPU, 1, print)
    assert asked == [in_fp8]
