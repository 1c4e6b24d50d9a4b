"""`--deepspeed`: the choice of the release, and findings for that release."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from llmtrain_lint import RULES, UsageError, Use, examine
from llmtrain_lint.schema import releases, schema, version
from llmtrain_lint.versions import choose_release
from tests.lint.corpus import Case, cases

NEWEST, OLDEST = releases()[0]["deepspeed"], releases()[-1]["deepspeed"]
VERDICTS = json.loads((Path(__file__).parent / "verdicts.json").read_text(encoding="utf-8"))
RELEASES = sorted({release for changes in VERDICTS.values() for release, _ in changes}, key=version)
CASES = tuple(case for case in (*cases("malformed"), *cases("valid")) if case.path.name in VERDICTS)
"""The files that these releases have read; `python tools/render.py lint_verdicts:new` adds later ones."""
NOT_COMPARED = ("removed_", "trainer_compression", "trainer_amp")
"""Cases of features that were removed later; the inner keys of their blocks are not compared."""
NOT_REFUSED = {
    "loss_scale_window_zero.json": "fails at the first step in fp16, which needs a GPU",
    "bf16_master_on_gpu.json": "releases before 0.19.2 ask for it only with states in fp32",
}


@pytest.mark.parametrize(
    ("asked", "chosen", "why"),
    [
        ("0.18.4", "0.18.4", "as asked"),
        ("==0.18.4", "0.18.4", "as asked"),
        ("<0.19", "0.18.9", "the newest known that fits <0.19"),
        ("<=0.18.4", "0.18.4", "the newest known that fits <=0.18.4"),
        (" >=0.16, <0.17 ", "0.16.9", "the newest known that fits >=0.16, <0.17"),
        ("~=0.18.2", "0.18.9", "the newest known that fits ~=0.18.2"),
        ("~=0.18", NEWEST, "the newest known that fits ~=0.18"),
        ("==0.17.*", "0.17.6", "the newest known that fits ==0.17.*"),
        ("<=0.18.9,!=0.18.9", "0.18.8", "the newest known that fits <=0.18.9,!=0.18.9"),
        (">=0.17", NEWEST, "the newest known that fits >=0.17"),
        ("0.18.20", "0.18.9", "the nearest known to 0.18.20"),
        ("0.15.4", OLDEST, "the nearest known to 0.15.4"),
        ("<0.16", OLDEST, "the nearest known to <0.16"),
        (">=7", NEWEST, "the nearest known to >=7"),
    ],
)
def test_the_newest_matching_release_is_chosen(asked, chosen, why):
    release = choose_release(asked)
    assert (release.deepspeed, release.why) == (chosen, why)


@pytest.mark.parametrize(
    "asked", ["", "latest", "0.18.x", "=>0.18", "1" * 200, "0.18;rm", "0.1.2.3.4.5", "٣", "<0.17,>0.18"]
)
def test_an_invalid_version_is_refused(asked):
    with pytest.raises(UsageError, match="--deepspeed"):
        choose_release(asked)


@pytest.mark.parametrize(
    ("installed", "chosen", "why"),
    [
        ("0.18.2", "0.18.2", "installed"),
        ("0.18.2+cu128", "0.18.2", "installed"),
        ("0.99.0", NEWEST, "the nearest known to the installed 0.99.0"),
        ("unknown", NEWEST, "the newest known"),
    ],
)
def test_the_installed_release_is_the_default(monkeypatch, installed, chosen, why):
    choose_release.cache_clear()
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    assert (choose_release().deepspeed, choose_release().why) == (chosen, why)
    choose_release.cache_clear()


def test_the_newest_known_is_the_default_without_deepspeed(monkeypatch):
    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    choose_release.cache_clear()
    monkeypatch.setattr(metadata, "version", none)
    assert choose_release().why == "the newest known"
    choose_release.cache_clear()


def test_releases_are_known_in_falling_order_for_two_years():
    numbers = [version(one["deepspeed"]) for one in releases()]
    assert numbers == sorted(numbers, reverse=True)
    assert len(numbers) >= 36
    assert numbers[-1] == (0, 16, 0)


def found(values: dict, deepspeed: str) -> set[str]:
    text = json.dumps({"train_batch_size": 8, "gradient_clipping": 1.0, **values})
    return {
        f"{one.rule} {one.field} {one.effect}"
        for one in examine("", text, Use("deepspeed", deepspeed=deepspeed)).findings
    }


@pytest.mark.parametrize(
    ("values", "last_without", "first_with"),
    [
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "0.17.1", "0.17.2"),
        ({"managed_gradient_accumulation": True}, "0.19.3", "0.19.4"),
        ({"compile": {"deepcompile": False}}, "0.16.5", "0.16.6"),
        ({"zero_optimization": {"stage": 3, "leaf_module": {}}}, "0.17.6", "0.18.0"),
        ({"aio": {"intra_op_parallelism": 2}}, "0.16.3", "0.16.4"),
        ({"seq_parallel_communication_data_type": "fp32"}, "0.16.4", "0.16.5"),
        ({"data_types": {"param_dtype": "bf16"}}, "0.19.1", "0.19.2"),
    ],
)
def test_keys_are_unknown_before_their_release(values, last_without, first_with):
    assert any("lint.unknown_key" in one for one in found(values, last_without))
    assert not any("lint.unknown_key" in one for one in found(values, first_with))


@pytest.mark.parametrize(
    ("values", "last_with", "first_without", "rule"),
    [
        ({"amp": {"enabled": True}}, "0.19.7", "0.19.8", "removed_key"),
        ({"nebula": {"enabled": False}}, "0.19.6", "0.19.7", "removed_key"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "0.19.6", "0.19.7", "removed_key"),
        ({"aio": {"thread_count": 2}}, "0.16.3", "0.16.4", "unknown_key"),
        ({"seq_parallel_comm_data_type": "fp32"}, "0.16.4", "0.16.5", "unknown_key"),
        ({"optimizer": {"type": "OneBitAdam", "params": {}}}, "0.19.6", "0.19.7", "optimizer"),
    ],
)
def test_keys_of_older_releases(values, last_with, first_without, rule):
    assert not any(f"lint.{rule} " in one for one in found(values, last_with))
    assert any(f"lint.{rule} " in one for one in found(values, first_without))


def test_types_and_defaults_are_those_of_the_release():
    loose = {"bf16": {"enabled": True, "loss_scale": 0}}
    assert "lint.unknown_key bf16.loss_scale ignores" in found(loose, "0.17.0")
    assert "lint.unknown_key bf16.loss_scale refuses" in found(loose, "0.17.1")
    bucket = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 0}}
    assert not any("lint.range" in one for one in found(bucket, "0.19.5"))
    assert any("lint.range" in one for one in found(bucket, "0.19.6"))
    text = json.dumps({"train_batch_size": 8})
    assert examine("", text, Use(deepspeed="0.19.2")).findings == []
    assert [one.rule for one in examine("", text, Use(deepspeed="0.19.3")).findings] == ["lint.clipping_default"]
    assert (schema("0.19.4").default("zero_optimization", "offload_param", "pin_memory")) is False
    assert (schema("0.19.5").default("zero_optimization", "offload_param", "pin_memory")) is True


def test_a_key_of_another_release_is_named_as_such():
    (one,) = examine("", '{"train_batch_size": 8, "torch_autocast": {}}', Use(deepspeed="0.17.1")).findings
    assert one.message.endswith("is not a key of DeepSpeed's configuration before 0.17.2")
    values = '{"train_batch_size": 8, "gradient_clipping": 0, "seq_parallel_comm_data_type": "fp32"}'
    (one,) = examine("", values, Use(deepspeed="0.18.0")).findings
    assert one.message.endswith("is not a key of DeepSpeed's configuration after 0.16.4")


def test_rules_state_releases_that_are_known():
    known = {one["deepspeed"] for one in releases()}
    assert {release for rule in RULES for release in (rule.since, rule.before) if release} <= known


def _verdict(case: Case, release: str) -> str:
    said = [answer for first, answer in VERDICTS[case.path.name] if version(first) <= version(release)]
    return said[-1]


def test_most_files_were_read_by_all_releases():
    assert {case.path.name for case in CASES} == VERDICTS.keys()  # no verdict of a file that is gone
    assert len(CASES) >= 300


@pytest.mark.parametrize("release", RELEASES)
def test_findings_match_the_results_of_the_release(release):
    """Whatever a release refuses is an error, and what it accepts is not said to be refused, where it was shown."""
    missed, false = [], []
    for case in CASES:
        if case.path.name.startswith(NOT_COMPARED) and release != NEWEST:
            continue
        result, said = case.result_for(release), _verdict(case, release)
        errors = [one for one in result.findings if one.severity == "error"]
        if said and not errors:
            missed.append((case.path.name, said))
        checked_by_config = {one.rule for one in errors} <= {"lint.unknown_key", "lint.removed_key", "lint.range"}
        refused = any(one.effect == "refuses" for one in errors)
        if refused and not said and checked_by_config and case.path.name not in NOT_REFUSED:
            false.append((case.path.name, [one.field for one in errors]))
    assert missed == []
    assert false == []
