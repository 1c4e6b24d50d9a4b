"""Renders a certificate for people."""

from __future__ import annotations

from collections import Counter

from rich import box
from rich.table import Table

from llmtrain.trials.verify.job import NUMBERS, PROBES, Certificate, Verdict


def certificate_table(certificate: Certificate) -> Table:
    """Returns a table of the plans with their largest deviations, verdicts and durations in seconds."""
    shown = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    shown.add_column("plan", no_wrap=True)
    for name in ("loss", "grad norm", "weights"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("verdict", no_wrap=True)
    shown.add_column("s", justify="right")
    for verdict in certificate.verdicts:
        cells = ["", "", ""] if verdict.failure else _cells(certificate.max_deviation(verdict))
        shown.add_row(verdict.name, *cells, _verdict_text(certificate, verdict), f"{verdict.seconds:.0f}")
    return shown


def certificate_lines(certificate: Certificate) -> list[str]:
    """Returns lines on why plans failed, the tolerances, and how many plans are certified or refused by which rule."""
    total, others = len(certificate.verdicts), len(certificate.deviating)
    lines = [f"{verdict.name} FAILED: {verdict.failure}" for verdict in certificate.verdicts if verdict.failure]
    for probe in PROBES:
        loss, grad_norm, weights = _cells(certificate.reference[probe].tolerance.model_dump())
        lines.append(f"allowed ({probe}): loss {loss}, grad norm {grad_norm}, weights {weights}")
    text = f"{certificate.steps} steps, {certificate.recipe.parallel.precision}, {certificate.seconds:.0f} s"
    lines.append(f"{total - others} of {total} plans certified: {text}")
    if rounding := sorted({name for run in certificate.reference.values() for name in run.rounding}):
        names = ", ".join(rounding[:3]) + (f" and {len(rounding) - 3} more" if len(rounding) > 3 else "")
        lines.append(
            f"only compared under SGD, because their gradients are nothing but rounding, or amplify it: {names}"
        )
    if changing := certificate.recipe.gradient_callbacks:
        names = ", ".join(callback.object for callback in changing)
        lines.append(f"the reference also calls {names}: the proof covers these plans with that change of gradients")
    rules = Counter(refusal["rule"] for refusal in certificate.refused)
    if rules:
        text = ", ".join(f"{count} by {rule}" for rule, count in rules.most_common())
        lines.append(f"{len(certificate.refused)} refused: {text}")
    return lines


def _cells(deviation: dict[str, float | None]) -> list[str]:
    values = (deviation[name] for name in NUMBERS)
    return ["not finite" if value is None else f"{value:.1e}" for value in values]


def _verdict_text(certificate: Certificate, verdict: Verdict) -> str:
    if verdict.failure:
        return "FAILED"
    if certificate.certified(verdict):
        return "certified"
    return "DEVIATES" if all(deviation.same_lr for deviation in verdict.deviations.values()) else "DEVIATES (lr)"
