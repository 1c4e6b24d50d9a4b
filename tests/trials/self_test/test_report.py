"""The findings of a self-test on made-up measurements, and the rates that a prediction uses."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from llmtrain.errors import RecipeError
from llmtrain.plan.predict import memory_of
from llmtrain.plan.predict.assumptions import EAGER
from llmtrain.plan.predict.rates import AchievedRates
from llmtrain.plan.predict.time import predict
from llmtrain.recipe import cluster as machine
from llmtrain.recipe.cluster import Cluster, local_cluster, measured_on, self_test_folder
from llmtrain.trials.self_test.job import MODELS, DeviceRates, timed_plan
from llmtrain.trials.self_test.measure import is_right
from llmtrain.trials.self_test.report import findings, measured_by

DEVICES = 4
FAST = {"bf16": 6e14}
PLAN = timed_plan(Cluster(device="h100", devices_per_node=DEVICES), FAST)


def _rates(rank, **changed):
    """What the prediction assumes, but for `changed`."""
    by_type = {dtype: AchievedRates.of(PLAN.cluster, dtype, EAGER) for dtype in ("fp32", "fp16", "bf16")}
    assumed = by_type["bf16"]
    fields = {
        "rank": rank,
        "product": "NVIDIA H100 80GB HBM3",
        "memory_bytes": PLAN.cluster.spec.memory_bytes,
        "wrong": (),
        "matmul": {dtype: rates.matmul for dtype, rates in by_type.items()},
        "attention": {dtype: rates.attention for dtype, rates in by_type.items()},
        "memory_bandwidth": assumed.memory,
        "launch_s": assumed.launch_s,
        "host_bandwidth": assumed.host,
        "node_bandwidth": assumed.node,
        "pair_bandwidth": tuple(None if other == rank else assumed.node for other in range(DEVICES)),
        "step_s": predict(PLAN).step_s,
        "allocated_bytes": memory_of(PLAN).allocated,
    }
    return DeviceRates(**fields | changed)


def _found(*ranks):
    return {one.check: one for one in findings(PLAN, ranks, measured_by(ranks, "h100"))}


def test_a_machine_as_predicted_has_no_warning():
    found = _found(*(_rates(rank) for rank in range(DEVICES)))
    assert {one.level for one in found.values()} == {"ok"}
    assert "1 of the assumed" in found["compute.bf16"].text


def test_the_size_of_the_timed_model_follows_the_speed():
    widths = [timed_plan(Cluster(), {"bf16": rate}).model.hidden_size for rate in (6e14, 5e12, 1e11, 1e8)]
    assert widths == [*(model.width for model in MODELS), MODELS[-1].width]


SLOW_PRODUCTS = dict.fromkeys(("fp32", "fp16", "bf16"), 1e13)
PLANTED = {
    "a slow all-reduce": ({"node_bandwidth": 5e9}, "links.node", "warning", "5 GB/s, 0.014 of the assumed"),
    "a slow host": ({"host_bandwidth": 5e9}, "links.host", "warning", "rank 2 reaches 0.098 of the median"),
    "slow memory": ({"memory_bandwidth": 5e11}, "memory.bandwidth", "warning", "rank 2 reaches 0.19 of the median"),
    "slow products": ({"matmul": SLOW_PRODUCTS}, "compute.bf16", "warning", "rank 2 reaches 0.016 of the median"),
    "slow attention": ({"attention": SLOW_PRODUCTS}, "compute.attention_bf16", "warning", "rank 2 reaches 0.03"),
    "a wrong product": ({"wrong": ("bf16",)}, "compute.products", "fault", "rank 2 (NVIDIA H100 80GB HBM3) in bf16"),
    "less memory": ({"memory_bytes": 40 * 2**30}, "devices.memory", "warning", "rank 2 has 40.0 GiB"),
    "a slow step": ({"step_s": 9.0}, "step.time", "warning", "took 9.00 s"),
    "a large step": ({"allocated_bytes": 70 * 2**30}, "step.memory", "warning", "held 70.0 GiB"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_of_one_device_is_named(name):
    changed, check, level, text = PLANTED[name]
    found = _found(*(_rates(rank, **(changed if rank == 2 else {})) for rank in range(DEVICES)))
    assert [(one.check, one.level) for one in found.values() if one.level != "ok"] == [(check, level)] or (
        name in ("slow products", "slow attention")  # in every data type
    )
    assert found[check].level == level
    assert text in found[check].text
    assert found[check].fix


def _with_links(slow, share):
    """All devices, of which the pairs in `slow` reach a share of the assumed rate."""
    rate = AchievedRates.of(PLAN.cluster, "bf16", EAGER).node
    for rank in range(DEVICES):
        rates = [rate * (share if {rank, other} in slow else 1) for other in range(DEVICES)]
        yield _rates(rank, pair_bandwidth=(*rates[:rank], None, *rates[rank + 1 :]))


def test_a_slow_link_is_named_by_its_ends_and_a_device_with_slow_links_alone():
    found = _found(*_with_links([{1, 3}], 0.25))["links.pairs"]
    assert found.level == "warning"
    assert "ranks 1 and 3 reach 0.25 of the fastest two, 360 GB/s" in found.text
    found = _found(*_with_links([{1, 0}, {1, 2}, {1, 3}], 0.25))["links.pairs"]
    assert "; rank 1 reaches 0.25 of the fastest two" in found.text
    found = _found(*_with_links([{a, b} for a in range(DEVICES) for b in range(a)], 0.25))["links.pairs"]
    assert found.level == "warning"
    assert "90 GB/s at least, between ranks 0 and 1, 0.25 of the assumed 360 GB/s: slower" in found.text


def test_a_rate_below_the_assumed_one_on_all_devices_is_a_warning():
    found = _found(*(_rates(rank, memory_bandwidth=2e12) for rank in range(DEVICES)))
    assert found["memory.bandwidth"].level == "warning"
    assert "0.75 of the assumed 2.68 TB/s: slower" in found["memory.bandwidth"].text


def test_predictions_use_the_measured_rates(monkeypatch, tmp_path):
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "visible_gpus", lambda: ("NVIDIA H100 80GB HBM3",) * DEVICES)
    monkeypatch.delenv("DS_ACCELERATOR")
    assert local_cluster().measured is None
    slow = {"matmul": SLOW_PRODUCTS, "node_bandwidth": 1e9, "host_bandwidth": 2e9, "memory_bandwidth": 3e11}
    measured = measured_by([_rates(0, **slow), _rates(1)], "h100")
    self_test_folder().mkdir(parents=True)
    report = self_test_folder() / "report.json"
    report.write_text(json.dumps({"measured": measured.model_dump()}))
    cluster = local_cluster()
    assert cluster.measured == measured == measured_on(report)
    rates = asdict(AchievedRates.of(cluster, "bf16", EAGER))
    assert rates == asdict(AchievedRates.of(PLAN.cluster, "bf16", EAGER)) | {
        "matmul": 1e13,
        "node": 1e9,
        "host": 2e9,
        "memory": 3e11,
    }
    assert predict(PLAN.model_copy(update={"cluster": cluster})).step_s > 5 * predict(PLAN).step_s
    monkeypatch.setattr(machine, "visible_gpus", lambda: ("NVIDIA A100-SXM4-80GB",))
    assert local_cluster().measured is None, "another device"
    report.write_text("{}")
    assert local_cluster().measured is None
    with pytest.raises(ValueError, match="was measured on 'h100', but the device is 'a100'"):
        Cluster(device="a100", measured=measured)
    assert cluster.resized(8, 8, "h100").measured == measured
    assert cluster.resized(8, 8, "a100").measured is None


def test_a_wrong_product_is_found(monkeypatch):
    assert is_right(torch.bfloat16, torch.device("cpu"), seed=0)
    own = torch.Tensor.__matmul__

    def wrong(a, b):
        product = own(a, b)
        if a.dtype == torch.bfloat16:
            product[7, 11] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    assert not is_right(torch.bfloat16, torch.device("cpu"), seed=0)
    assert is_right(torch.float32, torch.device("cpu"), seed=0)


def test_a_named_report_is_used_and_one_without_rates_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "visible_gpus", lambda: ("NVIDIA H100 80GB HBM3",))
    monkeypatch.delenv("DS_ACCELERATOR")
    report, measured = tmp_path / "h100.json", measured_by([_rates(0)], "h100")
    monkeypatch.setenv("LLMTRAIN_SELF_TEST", str(report))
    assert local_cluster(is_measured=False).measured is None, "the self-test will write it"
    for text, fault in (
        (None, "has no rates: No such file or directory"),
        ("{", "has no rates: "),
        ('{"measured": null}', "has no rates: "),
        (json.dumps({"measured": measured.model_dump() | {"device": "a100"}}), "was measured on 'a100'"),
    ):
        if text:
            report.write_text(text)
        with pytest.raises(RecipeError) as error:
            local_cluster()
        (problem,) = error.value.problems
        assert problem.field == "LLMTRAIN_SELF_TEST"
        assert problem.message.startswith(f"'{report}' {fault}"), problem.message
        assert "llmtrain doctor --self-test" in problem.fix
    report.write_text(json.dumps({"measured": measured.model_dump()}))
    assert local_cluster().measured == measured
