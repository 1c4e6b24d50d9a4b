"""Kubernetes: renders a plan as a JobSet, for `kubectl apply -f -`; pure. Not yet tried on a cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import ConfigDict, Field, StringConstraints, field_validator

from llmtrain.errors import Problem, RecipeError
from llmtrain.launch.jobs import render_template
from llmtrain.launch.rendezvous import TORCHRUN_PORT
from llmtrain.recipe import Part
from llmtrain.recipe.cluster import Cluster
from llmtrain.run_dir import SECRET

USER = 10001
"""The user of the image (`Dockerfile`)."""
MAX_NAME_LENGTH = 40
"""Longest name of a job: pods and their host names append to it, and have at most 63 characters."""
LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
"""RFC 1035, which names of services and pods must match."""
Label = Annotated[str, StringConstraints(pattern=rf"^{LABEL}$", max_length=63)]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?$")]


class KubernetesOptions(Part):
    """Options of a job that are not part of the plan. Given by `--kubernetes KEY=VALUE`."""

    model_config = ConfigDict(strict=False)

    image: Annotated[str, StringConstraints(pattern=r"^[\w][\w./:@-]*$")]
    """Container image with llmtrain and the recipe in it."""
    pvc: Label
    """Claim of a volume that all nodes can write to, for runs and prepared data."""
    mount: str = "/data"
    """Mount point of the volume."""
    workdir: str = "/workspace"
    """Working directory in the image; a recipe's path is relative to it."""
    name: Annotated[str, StringConstraints(pattern=rf"^{LABEL}$", max_length=MAX_NAME_LENGTH)] | None = None
    """Name of the job; default: that of the recipe."""
    namespace: Label | None = None
    """Namespace; default: that of kubectl."""
    cpu: Quantity | None = None
    """CPU cores of each pod."""
    memory: Quantity | None = None
    """Host memory of each pod, such as `900Gi`."""
    shm: Quantity = "16Gi"
    """Shared memory of each pod, for NCCL and data loaders; it counts as memory."""
    gpu_resource: Annotated[str, StringConstraints(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")] | None = None
    """Resource name of a GPU; default: `nvidia.com/gpu`, or `amd.com/gpu`."""
    grace_s: int = Field(300, ge=30)
    """Seconds from SIGTERM to SIGKILL: enough for a step, a save and an upload."""
    max_restarts: int = Field(20, ge=0)
    """Largest number of restarts after failures; evictions are not counted."""
    secret: tuple[Label, ...] = ()
    """Secrets whose keys become environment variables of the workers."""
    env: tuple[str, ...] = ()
    """Environment variables of the workers, NAME=VALUE; not for secrets."""
    node_selector: tuple[str, ...] = ()
    """Labels of the nodes, KEY=VALUE."""
    service_account: Label | None = None
    """Service account of the pods."""
    queue: Label | None = None
    """Name of the Kueue queue."""

    @field_validator("mount", "workdir")
    @classmethod
    def _absolute(cls, path: str) -> str:
        if not path.startswith("/") or not path.isprintable() or ":" in path:
            raise ValueError(f"{path!r} is not an absolute path")
        return path

    @field_validator("env")
    @classmethod
    def _no_secrets(cls, env: tuple[str, ...]) -> tuple[str, ...]:
        for name, equals, _ in (assignment.partition("=") for assignment in env):
            if not equals or re.fullmatch(r"[A-Za-z_]\w*", name) is None:
                raise ValueError(f"'{name}' is not NAME=VALUE")
            if SECRET.search(name):
                raise ValueError(f"{name} looks like a secret, but anyone can read a manifest; use secret=NAME")
        return env

    @field_validator("node_selector")
    @classmethod
    def _labels(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        for label in labels:
            if re.fullmatch(r"[\w./-]+=[\w.-]*", label) is None:
                raise ValueError(f"'{label}' is not KEY=VALUE")
        return labels


def render_manifest(
    recipe: str, cluster: Cluster, script: Sequence[str], run_dir: PurePosixPath, options: KubernetesOptions
) -> str:
    """Renders a run as a JobSet in YAML.

    recipe: its name. script: its path in the image, and its arguments. run_dir: the run directory, as the pods see it.
    Raises RecipeError if the recipe's name cannot be turned into a Kubernetes name, or the run directory is not on the
    volume.
    """
    name, mount = options.name or _name_of(recipe), PurePosixPath(options.mount)
    if not run_dir.is_relative_to(mount) or ".." in run_dir.parts:
        message = f"{run_dir} is not on the volume, which is mounted at {mount}"
        raise RecipeError(Problem("kubernetes.run_dir", "--run-dir", message, f"--run-dir {mount / 'runs' / name}"))
    torchrun = [
        *("python", "-m", "llmtrain.launch.torchrun", "--nnodes", cluster.nodes),
        *("--nproc-per-node", cluster.devices_per_node, "--node-rank", "$(JOB_COMPLETION_INDEX)"),
        *("--master-addr", f"{name}-workers-0-0.{name}", "--master-port", TORCHRUN_PORT),
    ]
    return render_template(
        "jobset.yaml.j2",
        name=name,
        options=options,
        nodes=cluster.nodes,
        user=USER,
        summary=f"{recipe}: {cluster.nodes} pods of {cluster.devices_per_node} {cluster.device}",
        port=TORCHRUN_PORT,
        resources=_resources(options, cluster),
        # Kubernetes expands `$(NAME)` to a variable and `$$` to a dollar.
        command=[*map(str, torchrun), *(word.replace("$", "$$") for word in script)],
        env=dict(assignment.replace("$", "$$").split("=", 1) for assignment in options.env),
        node_selector=dict(label.split("=", 1) for label in options.node_selector),
        cache=str(mount / "cache"),
    )


def _name_of(recipe: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", recipe.lower()).strip("-")
    if re.fullmatch(LABEL, name) is None or len(name) > MAX_NAME_LENGTH:
        message = f"cannot be derived from the recipe's name '{recipe}'"
        raise RecipeError(Problem("kubernetes.option", "--kubernetes name", message, "--kubernetes name=NAME"))
    return name


def _resources(options: KubernetesOptions, cluster: Cluster) -> dict[str, dict[str, str]]:
    """Returns the resources of each pod. Memory is limited to the request; unused CPU time may be taken beyond it."""
    requests = {key: value for key, value in (("cpu", options.cpu), ("memory", options.memory)) if value}
    limits = {"memory": options.memory} if options.memory else {}
    if not cluster.spec.on_cpu:
        vendor = "amd.com/gpu" if cluster.device.startswith("mi") else "nvidia.com/gpu"
        limits[options.gpu_resource or vendor] = str(cluster.devices_per_node)
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}
