"""The table of checks of a host, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmtrain.doctor import devices, interconnect, limits, network, storage, tools, versions
from llmtrain.doctor.finding import Finding, warning
from llmtrain.doctor.scene import Scene


@dataclass(frozen=True)
class Check:
    """Looks at one thing and judges it."""

    name: str
    """Of its group, and what it is called where it fails itself."""
    look: Callable[[Scene], Iterable[Finding]]


CHECKS = (
    Check("versions.python", versions.python),
    Check("versions.packages", versions.packages),
    Check("versions.torch", versions.torch_build),
    Check("versions.optional", versions.optional),
    Check("devices.host", devices.host),
    Check("devices.gpus", devices.gpus),
    Check("devices.slots", devices.slots),
    Check("interconnect.gpus", interconnect.gpu_links),
    Check("interconnect.adapters", interconnect.adapters),
    Check("network.interfaces", network.interfaces),
    Check("network.host_name", network.host_name),
    Check("network.choices", network.choices),
    Check("storage.shm", storage.shared_memory),
    Check("storage.folders", storage.folders),
    Check("limits.limits", limits.limits),
    Check("tools.compilers", tools.compilers),
    Check("tools.operators", tools.operators),
    Check("tools.launchers", tools.launchers),
)


def look(scene: Scene, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """Everything that the checks find; one that fails itself is told as a warning, and hides no other."""
    found: list[Finding] = []
    for check in checks:
        try:
            found += check.look(scene)
        except Exception as error:  # machines are stranger than we think: the others still tell what they see
            text = f"could not be looked at: {type(error).__name__}: {error}"
            found.append(warning(check.name, text, "please report this"))
    return found
