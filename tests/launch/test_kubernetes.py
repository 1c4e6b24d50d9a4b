"""A plan as a JobSet, checked against the schemas of Kubernetes and JobSet, without a cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

import jsonschema
import kubernetes_validate
import pytest
import yaml

from llmtrain.errors import RecipeError
from llmtrain.launch.jobs.kubernetes import KubernetesOptions, render_manifest
from llmtrain.launch.jobs.slurm import parse_job_options
from llmtrain.recipe.cluster import Cluster
from tests.helpers.launching_doc import commands

REPOSITORY = Path(__file__).parents[2]
GIVEN = ("image=registry.example/llmtrain:1", "pvc=runs")
ALL = (
    *("namespace=research", "name=mine", "cpu=64", "memory=900Gi", "shm=64Gi", "grace_s=900", "max_restarts=3"),
    *("secret=hub", "secret=wandb", "env=NCCL_DEBUG=INFO", "env=A=x=y $(HOME) 'q' <&>"),
    "node_selector=gpu.vendor/model=h100",
    *("service_account=trainer", "queue=big", "mount=/shared", "workdir=/src", "gpu_resource=nvidia.com/mig-3g.40gb"),
)
KUBERNETES = ("1.30", "1.37")
"""Versions whose schemas a Job is held against: an old one, and the newest that is there."""


def _object(required: tuple[str, ...] = (), **properties: object) -> dict[str, object]:
    """Nothing but what is named."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
NAMES = {"type": "array", "items": TEXT, "uniqueItems": True}
ACTIONS = ["FailJobSet", *(f"Restart{what}{how}" for what in ("JobSet", "Job") for how in ("", "AndIgnoreMaxRestarts"))]
# The fields of a JobSet that we may use, from its Go types: kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go
# of 0.10 and later (`onJobFailureMessagePatterns`). Its own schema is larger, and that of Jobs within it is not checked
# here but by kubernetes_validate.
JOBSET = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_object(("name",), name=TEXT, namespace=TEXT, labels={"type": "object", "additionalProperties": TEXT}),
    spec=_object(
        ("replicatedJobs",),
        network=_object(enableDNSHostnames=FLAG, subdomain=TEXT, publishNotReadyAddresses=FLAG),
        failurePolicy=_object(
            maxRestarts=NUMBER,
            restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
            rules={
                "type": "array",
                "items": _object(
                    ("name", "action"),
                    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                    action={"enum": ACTIONS},
                    onJobFailureReasons=NAMES,
                    onJobFailureMessagePatterns=NAMES,
                    targetReplicatedJobs=NAMES,
                ),
            },
        ),
        replicatedJobs={
            "type": "array",
            "items": _object(("name", "template"), name=TEXT, replicas=NUMBER, template={"type": "object"}),
        },
    ),
)


def _document(*options: str, nodes: int = 2, device: str = "h100", script: tuple[str, ...] = ("recipes/tiny.py",)):
    cluster = Cluster(nodes=nodes, devices_per_node=8, device=device)
    parsed = parse_job_options(KubernetesOptions, "kubernetes", [*GIVEN, *options])
    run_dir = PurePosixPath(parsed.mount) / "runs" / "tiny"
    return yaml.safe_load(render_manifest("tiny", cluster, script, run_dir, parsed))


def _pod(document):
    return document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def _expanded(text: str, variables: dict[str, str]) -> str:
    """What the kubelet makes of a word: `$(NAME)` is a variable where there is one, `$$` a dollar."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]),
        text,
    )


@pytest.mark.parametrize("options", [(), ALL], ids=["least", "all"])
@pytest.mark.parametrize(("nodes", "device"), [(1, "cpu"), (2, "h100"), (4, "mi300x")])
def test_the_manifest_matches_the_schemas(options, nodes, device):
    document = _document(*options, nodes=nodes, device=device)
    jsonschema.validate(document, JOBSET)
    [job] = document["spec"]["replicatedJobs"]
    for version in KUBERNETES:
        _check_job(job["template"], version)


def _check_job(template, version):
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **template}
    kubernetes_validate.validate(job, version, strict=True)


def test_the_schemas_refuse_misspelt_fields():
    document = _document()
    document["spec"]["failurePolicy"]["maxRestart"] = 1
    with pytest.raises(jsonschema.ValidationError, match="maxRestart"):
        jsonschema.validate(document, JOBSET)
    job = _document()["spec"]["replicatedJobs"][0]["template"]
    job["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        _check_job(job, KUBERNETES[-1])


def test_the_first_pod_is_the_rendezvous_and_each_pod_has_its_devices():
    document = _document()
    [container] = _pod(document)["containers"]
    command = [_expanded(word, {"JOB_COMPLETION_INDEX": "1"}) for word in container["command"]]
    assert command[:3] == ["python", "-m", "llmtrain.launch.torchrun"]
    told = dict(zip(command[3:13:2], command[4:13:2], strict=True))
    head = f"{document['metadata']['name']}-workers-0-0.{document['metadata']['name']}"
    assert told == {
        **{"--nnodes": "2", "--nproc-per-node": "8", "--node-rank": "1"},
        **{"--master-addr": head, "--master-port": "29500"},
    }
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert _document(device="mi300x")["spec"] != document["spec"]
    assert "resources" not in _pod(_document(device="cpu"))["containers"][0]


def test_exit_codes_decide_whether_the_job_restarts():
    spec = _document()["spec"]
    rules = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    actions = {}
    for code in (2, 3, 4, 5, 75):
        listed = [rule.get("onExitCodes", {"values": []})["values"] for rule in rules]
        number = next((at for at, values in enumerate(listed) if code in values), None)
        message = f"Container train for pod x failed with exit code {code} matching FailJob rule at index {number}"
        actions[code] = next(
            (
                rule["action"]
                for rule in spec["failurePolicy"]["rules"]
                if number is not None and re.search(rule["onJobFailureMessagePatterns"][0], message)
            ),
            "RestartJobSet",
        )
    assert actions == {
        **dict.fromkeys((2, 3, 4), "FailJobSet"),
        **{5: "RestartJobSet", 75: "RestartJobSetAndIgnoreMaxRestarts"},
    }


def test_options_arrive_in_the_manifest():
    document = _document(*ALL)
    pod = _pod(document)
    [container] = pod["containers"]
    assert document["metadata"] == {
        **{"name": "mine", "namespace": "research"},
        "labels": {"kueue.x-k8s.io/queue-name": "big"},
    }
    assert document["spec"]["failurePolicy"]["maxRestarts"] == 3
    assert pod["terminationGracePeriodSeconds"] == 900
    assert pod["serviceAccountName"] == "trainer"
    assert pod["nodeSelector"] == {"gpu.vendor/model": "h100"}
    assert [one["secretRef"]["name"] for one in container["envFrom"]] == ["hub", "wandb"]
    env = {one["name"]: _expanded(one["value"], {"HOME": "/root"}) for one in container["env"]}
    assert env == {"LLMTRAIN_CACHE": "/shared/cache", "NCCL_DEBUG": "INFO", "A": "x=y $(HOME) 'q' <&>"}
    assert container["resources"] == {
        "requests": {"cpu": "64", "memory": "900Gi"},
        "limits": {"memory": "900Gi", "nvidia.com/mig-3g.40gb": "8"},
    }
    assert pod["volumes"][1]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


NASTY = (
    *(
        "a b",
        "it's",
        '"',
        "$(touch executed)",
        "$(JOB_COMPLETION_INDEX)",
        "$$",
        "`id`",
        "-x",
        "ü 🙂",
        "a\nb",
        "#",
        ": ",
    ),
    *("{{ x }}", "\\", "\\n", "\x7f", "\u2028", "\x85", "yes", "null", ""),
)


def test_arguments_arrive_unchanged():
    [container] = _pod(_document(script=("recipes/tiny.py", *NASTY)))["containers"]
    words = [_expanded(word, {"JOB_COMPLETION_INDEX": "0"}) for word in container["command"]]
    assert words[-len(NASTY) :] == list(NASTY)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["pvc=runs"], "--kubernetes image: is required"),
        ([*GIVEN, "imag=x"], "--kubernetes imag: is unknown; did you mean 'image'?"),
        ([*GIVEN, "=x"], "--kubernetes '=x': is unknown"),
        ([*GIVEN, "env=HF_TOKEN=abc"], "looks like a secret"),
        ([*GIVEN, "env=nothing"], "is not NAME=VALUE"),
        ([*GIVEN, "namespace=Not_A_Label"], "--kubernetes namespace"),
        ([*GIVEN, "memory=lots"], "--kubernetes memory"),
        ([*GIVEN, "mount=data"], "is not an absolute path"),
        ([*GIVEN, "grace_s=5"], "--kubernetes grace_s"),
        ([*GIVEN, "node_selector=x y"], "is not KEY=VALUE"),
    ],
)
def test_impossible_options_are_refused(options, said):
    with pytest.raises(RecipeError) as error:
        parse_job_options(KubernetesOptions, "kubernetes", options)
    assert said in str(error.value)


def test_a_run_that_is_not_on_the_volume_is_refused():
    options = parse_job_options(KubernetesOptions, "kubernetes", GIVEN)
    with pytest.raises(RecipeError, match="is not on the volume"):
        render_manifest("tiny", Cluster(), ("x.py",), PurePosixPath("/home/me/run"), options)


@pytest.mark.parametrize(("recipe", "name"), [("Llama3_8B", "llama3-8b"), ("3b", None), ("ü", None), ("x" * 50, None)])
def test_the_name_is_derived_from_that_of_the_recipe(recipe, name):
    options = parse_job_options(KubernetesOptions, "kubernetes", GIVEN)
    given = (recipe, Cluster(), ("x.py",), PurePosixPath("/data/run"), options)
    if name is None:
        with pytest.raises(RecipeError, match="--kubernetes name"):
            render_manifest(*given)
    else:
        assert yaml.safe_load(render_manifest(*given))["metadata"]["name"] == name


def test_the_command_prints_the_manifest_and_applies_nothing():
    """By the documented line, up to where a cluster would get it."""
    [line] = commands("Kubernetes")
    command, _, rest = line.partition(" --dry-run ")
    assert rest == "| kubectl apply -f -"
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run([*words, "--dry-run"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document = yaml.safe_load(done.stdout)
    jsonschema.validate(document, JOBSET)
    assert _pod(document)["containers"][0]["command"][13:] == [
        *("-m", "llmtrain", "train", "recipes/tiny.py", "--resume", "auto", "--run-dir", "/data/runs/tiny")
    ]
    refused = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "--dry-run | kubectl apply -f -" in refused.stderr
