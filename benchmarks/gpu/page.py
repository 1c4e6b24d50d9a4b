"""Shows what `python -m benchmarks gpu` found: aims, tables, and the statements of other pages about GPUs.

Reads only `benchmarks/results/gpu.json` and `gpu_small_*.json`, which are rehearsals with small models.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.benchmark import Result, Verdict
from benchmarks.pairs import ROOT
from tools.page import Files, filled

Row = Mapping[str, Any]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = "docs/reference/gpu.md"
IN_PACKAGE = "llmtrain/plan/predict/measured.json"
"""What a plan says about the accuracy of its memory; the package has no results."""
README = "README.md"

LEAST_MFU, MOST_WRAPPER = 0.5, 0.005
LEAST_OF_PEER = {"Trainer": ("tokens_per_second", 1.3), "TRL": ("trained_per_second", 1.5)}
"""Peer → the number that is compared, and the least ratio of ours to the peer's."""
CLOSE, CLOSE_SHARE, UNDER = 0.03, 0.95, 0.01
"""The aim for memory: at least `CLOSE_SHARE` of the plans are off by at most `CLOSE`, and none is predicted too low by
more than `UNDER`."""
GIB = 2**30

READ = (
    "Predicted peaks are those of the plan without the framework's share, which torch does not allocate; those of now "
    "are by the present code. Measured ones are `max_memory_allocated`. MFU counts 6·N + 12·L·d·T FLOPs a token. TRL "
    "and the Trainer use PyTorch's attention, their default."
)
PLAN_COLUMNS = {
    "step_ms": ("step, ms", ",.1f"),
    "predicted_ms": ("predicted, ms", ",.1f"),
    "calibrated_ms": ("predicted with measured rates, ms", ",.1f"),
    "mfu": ("MFU", ".1%"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "measured_bytes": ("peak, GiB", ".2f"),
    "predicted_bytes": ("predicted, GiB", ".2f"),
    "error": ("error", "+.1%"),
    "now_bytes": ("predicted now, GiB", ".2f"),
    "now_error": ("error now", "+.1%"),
    "first_step_s": ("first step, s", ".1f"),
}


def found_of(row: Row) -> dict[str, Any]:
    """Returns the numbers of a case, with the error of its predicted memory."""
    found = dict(row.get("found") or {})
    if (error := memory_error(found)) is not None:
        found["error"] = error
    return found


def memory_error(found: Mapping[str, Any]) -> float | None:
    """Returns by which fraction the predicted memory is off; negative if it is too low."""
    predicted, measured = found.get("predicted_bytes"), found.get("measured_bytes")
    return predicted / measured - 1 if predicted and measured else None


def with_present_predictions(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows with the peaks that the present code predicts."""
    from benchmarks.gpu.cases import TIMED
    from benchmarks.gpu.steps import predicted_bytes

    changed = []
    for row in rows:
        found = dict(row.get("found") or {})
        if row["case"] in TIMED and "measured_bytes" in found and (now := predicted_bytes(TIMED[row["case"]])):
            found |= {"now_bytes": now, "now_error": now / found["measured_bytes"] - 1}
        changed.append({**row, "found": found} if found else row)
    return changed


def in_short(found: Mapping[str, Any]) -> str:
    """Returns the numbers of a case in a line; of one that takes steps, those of its table."""
    numbers = found_of({"found": found})
    if "step_ms" in found:
        return ", ".join(
            f"{PLAN_COLUMNS[name][0]} {_number(name, numbers[name])}" for name in PLAN_COLUMNS if name in numbers
        )
    return ", ".join(
        f"{name} {value:.5g}"
        for name, value in numbers.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    )


def _number(name: str, value: Any) -> str:
    if value is None:
        return ""
    return format(value / GIB if name.endswith("_bytes") else value, PLAN_COLUMNS[name][1])


def table(rows: Sequence[Row]) -> str:
    """Returns the results as two tables: cases that take steps, and the others."""
    timed = [row for row in rows if "step_ms" in (row.get("found") or {})]
    others = [row for row in rows if row not in timed]
    return "\n".join([*_plans(timed), "", *_others(others)]) + "\n"


def _plans(rows: Sequence[Row]) -> Iterator[str]:
    names = [name for name in PLAN_COLUMNS if any(name in found_of(row) for row in rows)]
    if rows:
        yield "| Case | " + " | ".join(PLAN_COLUMNS[name][0] for name in names) + " |"
        yield "|---" * (1 + len(names)) + "|"
    for row in rows:
        found = found_of(row)
        yield f"| {row['case']} | " + " | ".join(_number(name, found.get(name)) for name in names) + " |"


def _others(rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        yield "| Case | | |"
        yield "|---|---|---|"
    for row in rows:
        told = row.get("reason") or in_short(row.get("found") or {})
        yield f"| {row['case']} | {row['status']} | {_cell(told)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]


def verdicts(result: Result) -> list[Verdict]:
    """Returns whether each aim is met; one that was not measured is not met."""
    rows = {row["case"]: row for row in result["rows"]}
    done = {name: row["found"] for name, row in rows.items() if row["status"] == "done"}

    def missing(name: str) -> str:
        row = rows.get(name)
        return f"{row['status']}: {_cell(row['reason'])}" if row and "reason" in row else "not measured"

    found = []
    for name, aim in (
        ("self-test", "every strategy equals plain PyTorch in fp32"),
        ("verify bf16", "ZeRO 1 to 3 equal plain PyTorch in bf16 with compiled kernels"),
    ):
        numbers = done.get(name)
        told = f"{numbers['certified']} of {numbers['plans']} plans" if numbers else missing(name)
        found.append(Verdict(aim, told, numbers is not None and numbers["certified"] == numbers["plans"]))
    numbers = done.get("resume")
    told = f"{numbers['same_bits']} of {numbers['steps']} losses are the same bits" if numbers else missing("resume")
    found.append(Verdict("a resumed run equals an uninterrupted one", told, numbers is not None))
    numbers = done.get("tests")
    told = f"{numbers['passed']} passed, {len(numbers['skipped'])} skipped" if numbers else missing("tests")
    found.append(Verdict("the tests of tests/gpu pass", told, numbers is not None and numbers["passed"] > 0))
    mfu = done.get("1b compiled", {}).get("mfu")
    told = f"{mfu:.1%}" if mfu else missing("1b compiled")
    found.append(Verdict(f"MFU of 1B: at least {LEAST_MFU:.0%}", told, bool(mfu) and mfu >= LEAST_MFU))
    summed = memory_summary(result)
    told, is_met = (_memory_told(summed), bool(summed["aim_met"])) if summed else ("not measured", False)
    aim = f"memory of {CLOSE_SHARE:.0%} of the plans within {CLOSE:.0%}, none more than {UNDER:.0%} too low"
    found.append(Verdict(aim, told, is_met))
    for peer, (number, least) in LEAST_OF_PEER.items():
        ratios = _ratios(done, peer, number)
        told = f"{statistics.mean(ratios):.2f}× ({', '.join(f'{ratio:.2f}' for ratio in ratios)})" if ratios else ""
        is_met = bool(ratios) and statistics.mean(ratios) >= least
        found.append(Verdict(f"at least {least}× {peer}", told or missing(f"{peer} 1"), is_met))
    more = done.get("wrapper")
    told, is_met = missing("wrapper"), False
    if more:
        told = f"{more['more_ms'] / more['peer_ms']:+.2%} ± {more['error_ms'] / more['peer_ms']:.2%}"
        is_met = more["more_ms"] + more["error_ms"] <= MOST_WRAPPER * more["peer_ms"]
    found.append(Verdict(f"the worker costs at most {MOST_WRAPPER:.1%} of a step", told, is_met))
    return found


def _ratios(done: Mapping[str, Row], peer: str, number: str) -> list[float]:
    """Returns ours / the peer's for each turn in which both ran."""
    turns = [(f"beside {peer} {turn}", f"{peer} {turn}") for turn in (1, 2)]
    return [done[ours][number] / done[theirs][number] for ours, theirs in turns if ours in done and theirs in done]


def memory_summary(result: Result) -> dict[str, Any] | None:
    """Returns how many peaks the present code predicts closely, and the lowest and the highest error.

    None if nothing was measured. `before`: how many the code that was measured predicted closely.
    """
    rows = [row["found"] for row in with_present_predictions(result["rows"]) if "found" in row]
    errors = [found["now_error"] for found in rows if "now_error" in found]
    if not errors:
        return None
    before = [memory_error(found) for found in rows if "now_error" in found]
    close = sum(abs(error) <= CLOSE for error in errors)
    return {
        "plans": len(errors),
        "close": close,
        "before": sum(error is not None and abs(error) <= CLOSE for error in before),
        "lowest": min(errors),
        "highest": max(errors),
        "aim_met": close >= CLOSE_SHARE * len(errors) and min(errors) >= -UNDER,
    }


def _memory_told(summed: Mapping[str, Any]) -> str:
    errors = f"errors from {summed['lowest']:+.1%} to {summed['highest']:+.1%}"
    text = f"{summed['close']} of {summed['plans']} plans; {errors}"
    if summed["before"] != summed["close"]:
        text += f"; {summed['before']} when it was measured, before the prediction was corrected"
    return text


def device_of(result: Result) -> str:
    """Returns the name of the GPU, or of the processor."""
    gpus = result["hardware"]["gpus"]
    return str(gpus[0] if gpus else f"{result['hardware']['cores']} × {result['hardware']['cpu']}")


def render(result: Result | None, rehearsals: Sequence[Result]) -> str:
    """Returns the generated part of the page."""
    if result is None:
        return _not_yet(rehearsals)
    lines = [
        f"- {verdict.aim}: **{'met' if verdict.met else 'missed'}**, {verdict.found}" for verdict in verdicts(result)
    ]
    measured = table(with_present_predictions(result["rows"]))
    return f"{_taken(result)} {READ}\n\n" + "\n".join(lines) + f"\n\n{measured}"


def _taken(result: Result) -> str:
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("torch", "deepspeed", "transformers"))
    commit = f"commit {result['commit'][:12]}" if result["commit"] else "commit unknown"
    text = f"Measured on {device_of(result)}, Python {result['versions']['python']}, {versions}; {commit}."
    if result["earlier"]:
        others = dict.fromkeys(f"{device_of(one)} on {one['date'][:10]}" for one in result["earlier"])
        text += f" Cases of earlier calls: {', '.join(others)}."
    return text


def _not_yet(rehearsals: Sequence[Result]) -> str:
    text = "**Not measured on a GPU.** No GPU has run llmtrain yet. " if rehearsals else "**Not measured on a GPU.**\n"
    told = []
    for one in rehearsals:
        rows = one["rows"]
        what = f"- {sum(row['status'] == 'done' for row in rows)} of {len(rows)} cases ran on {_rehearsed_on(one)}."
        others = [f"{row['case']} ({row['status']}: {_cell(row['reason'])})" for row in rows if "reason" in row]
        plain = [row["case"] for row in rows if "refused_kernels" in (row.get("found") or {})]
        what += f" With PyTorch's kernels, because others need a real GPU: {', '.join(plain)}." if plain else ""
        told.append(what + (f" Not there: {'; '.join(others)}." if others else ""))
    if told:
        text += "The command below was rehearsed with small models (`--small`):\n\n" + "\n".join(told) + "\n"
    return text


def _rehearsed_on(result: Result) -> str:
    versions = result["versions"]
    where = f"{device_of(result)}, Python {versions['python']}, torch {versions['torch']}"
    return f"an emulated GPU ({where})" if result["hardware"]["gpus"] else where


def statement(result: Result | None) -> str:
    """Returns what README says about GPUs."""
    if result is None:
        return (
            "**Nothing here has been run on a GPU yet.** All results below are from CPUs. One command\n"
            "[measures your GPU](docs/reference/gpu.md) in nine minutes.\n"
        )
    met = sum(verdict.met for verdict in verdicts(result))
    return (
        f"**Measured on {device_of(result)}**: [{met} of {len(verdicts(result))} aims met](docs/reference/gpu.md).\n"
        "All other results below are from CPUs.\n"
    )


def stored() -> tuple[Result | None, list[Result]]:
    """Returns the committed result, or None, and the committed rehearsals."""
    result = RESULTS / "gpu.json"
    rehearsals = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("gpu_small_*.json"))]
    return json.loads(result.read_text(encoding="utf-8")) if result.is_file() else None, rehearsals


def files() -> Files:
    """Returns each file that says what was measured on a GPU."""
    result, rehearsals = stored()
    summed = memory_summary(result) if result else None
    in_package = None
    if result and summed:
        in_package = {"device": device_of(result), "plans": summed["plans"], "close": summed["close"], "within": CLOSE}
    return {
        **filled(PAGE, gpu=render(result, rehearsals)),
        **filled(README, gpu=statement(result)),
        IN_PACKAGE: json.dumps(in_package, indent=1) + "\n",
    }
