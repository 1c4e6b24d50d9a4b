"""The table of checks of a host, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from llmtrain.launch.doctor import devices, limits, network, versions
from llmtrain.launch.doctor.finding import Finding, HostContext, warning

Check = Callable[[HostContext], Iterable[Finding]]
"""Examines one thing and judges it."""
CHECKS: dict[str, Check] = {
    "versions.python": versions.python,
    "versions.packages": versions.packages,
    "versions.torch": versions.torch_build,
    "versions.optional": versions.optional,
    "devices.host": devices.host,
    "devices.gpus": devices.gpus,
    "devices.slots": devices.slots,
    "interconnect.gpus": devices.gpu_links,
    "interconnect.adapters": devices.adapters,
    "network.interfaces": network.interfaces,
    "network.host_name": network.host_name,
    "network.choices": network.choices,
    "storage.shm": limits.shared_memory,
    "storage.folders": limits.folders,
    "limits.limits": limits.limits,
    "tools.compilers": versions.compilers,
    "tools.operators": versions.operators,
    "tools.launchers": versions.launchers,
}
"""Group and name, reported if the check itself fails → check."""


def run_checks(context: HostContext, checks: Mapping[str, Check] = CHECKS) -> list[Finding]:
    """Runs the checks and returns all findings.

    A check that raises an exception is reported as a warning and does not hide the others.
    """
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += check(context)
        except Exception as error:  # machines vary more than expected: the other checks still report
            text = f"the check failed: {type(error).__name__}: {error}"
            findings.append(warning(name, text, "please report this"))
    return findings
