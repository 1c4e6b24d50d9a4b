"""The table of checks of a host, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmtrain.doctor import devices, limits, network, versions
from llmtrain.doctor.finding import CheckResult, Scene, caution


@dataclass(frozen=True)
class Check:
    """Examines one thing and judges it."""

    name: str
    """Group and name; reported if the check itself fails."""
    look: Callable[[Scene], Iterable[CheckResult]]


CHECKS = (
    Check("versions.python", versions.python),
    Check("versions.packages", versions.packages),
    Check("versions.torch", versions.torch_build),
    Check("versions.optional", versions.optional),
    Check("devices.host", devices.host),
    Check("devices.gpus", devices.gpus),
    Check("devices.slots", devices.slots),
    Check("interconnect.gpus", devices.gpu_links),
    Check("interconnect.adapters", devices.adapters),
    Check("network.interfaces", network.interfaces),
    Check("network.host_name", network.host_name),
    Check("network.choices", network.choices),
    Check("storage.shm", limits.shared_memory),
    Check("storage.folders", limits.folders),
    Check("limits.limits", limits.limits),
    Check("tools.compilers", versions.compilers),
    Check("tools.operators", versions.operators),
    Check("tools.launchers", versions.launchers),
)


def look(scene: Scene, checks: Iterable[Check] = CHECKS) -> list[CheckResult]:
    """Runs the checks and returns all findings.

    A check that raises an exception is reported as a warning and does not hide the others.
    """
    found: list[CheckResult] = []
    for check in checks:
        try:
            found += check.look(scene)
        except Exception as error:  # machines vary more than expected: the other checks still report
            text = f"the check failed: {type(error).__name__}: {error}"
            found.append(caution(check.name, text, "please report this"))
    return found
