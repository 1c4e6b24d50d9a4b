"""The limits of flash-attn in its source and in our rules; calls of `flash_stand_in` check its signature."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from llmtrain.errors import RecipeError
from llmtrain.models.varlen import KERNEL_STEP, KERNEL_TYPES, check_device
from llmtrain.plan.rules import resolve
from llmtrain.plan.rules.model import FLASH_HEAD, WITHOUT_FLASH_3
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import tiny_recipe
from tests.helpers.flash_stand_in import FACTS, signature_of

ARCHITECTURES = {"a100": "sm_80", "h100": "sm_90", "h200": "sm_90", "b200": "sm_100"}


def test_the_facts_are_of_the_version_that_is_named():
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")
    assert re.findall(r"^flash-attn==(\S+)$", constraints, re.MULTILINE) == [FACTS["version"]]


def test_limits_of_rules_and_of_torchs_copy_are_those_of_the_source():
    limits = FACTS["limits"]
    assert (limits["largest_head"], limits["head_step"]) == (FLASH_HEAD, KERNEL_STEP)
    assert sorted(KERNEL_TYPES, key=str) == sorted((getattr(torch, name.lower()) for name in limits["types"]), key=str)


def test_another_argument_is_an_error():
    with pytest.raises(TypeError, match="dropout_p"):
        signature_of("flash_attention_3").bind(*range(7), dropout_p=0.0)


@pytest.mark.parametrize("device", ARCHITECTURES)
@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3"])
def test_devices_without_machine_code_are_refused(attention, device):
    recipe = tiny_recipe(**{"model.attention": attention, "parallel.precision": "bf16", "parallel.zero_stage": 1})
    cluster = Cluster(devices_per_node=2, device=device)
    if ARCHITECTURES[device] in FACTS[attention]["compiled_for"]:
        resolve(recipe, cluster)
    else:
        assert device in WITHOUT_FLASH_3
        with pytest.raises(RecipeError, match=r"compiled for Ampere and Hopper.*\[model.attention_device\]"):
            resolve(recipe, cluster)


@pytest.mark.parametrize(
    ("attention", "capability", "told"),
    [
        ("varlen", (7, 5), "needs a compute capability of at least 8.0, but this GPU has 7.5"),
        ("flash_attention_2", (7, 0), "needs a compute capability of at least 8.0, but this GPU has 7.0"),
        ("flash_attention_3", (12, 0), "of at least 8.0 and below 10.0, but this GPU has 12.0"),
        ("flash_attention_3", (9, 0), ""),
        ("flash_attention_2", (12, 0), ""),
        ("varlen", (8, 0), ""),
        ("sdpa", (7, 0), ""),
    ],
)
def test_an_unknown_gpu_is_checked_by_its_compute_capability(monkeypatch, attention, capability, told):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if told:
        with pytest.raises(RecipeError, match=re.escape(told)):
            check_device(attention, torch.device("cuda"))
    else:
        check_device(attention, torch.device("cuda"))
    check_device(attention, torch.device("cpu"))
