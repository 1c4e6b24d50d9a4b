"""tests/helpers/flash_attn.json: how flash-attn's kernels are called, and their limits, read from its source.

flash-attn cannot be installed without CUDA's compiler. pip downloads its source archive, in the version of
`constraints.txt`, and nothing of it is run.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from tools.page import ROOT, Files

FUNCTION = "flash_attn_varlen_func"
INTERFACES = {
    "flash_attention_2": ("flash_attn/flash_attn_interface.py", "setup.py"),
    "flash_attention_3": ("hopper/flash_attn_interface.py", "hopper/setup.py"),
}
"""Attention → where its function is, and what says for which GPUs it is compiled."""
LIMITS = "csrc/flash_attn/flash_api.cpp"


def facts(sources: dict[str, str], version: str) -> dict[str, Any]:
    """Returns the facts. sources: path in the archive → text."""
    called = {
        attention: {"parameters": _parameters(sources[interface]), "compiled_for": _architectures(sources[setup])}
        for attention, (interface, setup) in INTERFACES.items()
    }
    # What the function for documents of several lengths checks, and its backward pass.
    passes = re.findall(r"\nmha_varlen_(?:fwd|bwd)\(.*?\n}\n", sources[LIMITS], re.DOTALL)
    found = [
        {
            "largest_head": int(_only(r"\(head_size <= (\d+)", body)),
            "head_step": int(_only(r"head_size % (\d+) == 0", body)),
            "types": sorted(set(re.findall(r"q_dtype == torch::k(\w+)", body))),
            "bounds": _only(r"cu_seqlens_q.dtype\(\) == torch::k(\w+)", body),
        }
        for body in passes
    ]
    if len(found) != 2 or found[0] != found[1]:
        raise SystemExit(f"{LIMITS}: the forward and the backward pass have other limits than each other: {found}")
    return {"version": version, **called, "limits": found[0]}


def _parameters(source: str) -> dict[str, str | None]:
    """Returns the names of the function's parameters, and their defaults as they are written."""
    function = next(
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == FUNCTION
    )
    parameters: dict[str, str | None] = dict.fromkeys(one.arg for one in function.args.args)
    defaults = function.args.defaults
    return parameters | dict(zip([*parameters][-len(defaults) :], map(ast.unparse, defaults), strict=True))


def _architectures(setup: str) -> list[str]:
    """Returns the GPUs that machine code is made for: a list, or the ends of the names of the source files."""
    if listed := re.search(r'"FLASH_ATTN_CUDA_ARCHS", "([\d;]+)"', setup):
        return [f"sm_{one}" for one in listed[1].split(";")]
    return sorted({f"sm_{one}" for one in re.findall(r'f"instantiations/\w+\{.*_sm(\d+)\.cu"', setup)})


def _only(pattern: str, text: str) -> str:
    (found,) = set(re.findall(pattern, text))
    return str(found)


def files() -> Files:
    """Downloads the archive and returns the facts."""
    (version,) = re.findall(r"^flash-attn==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        command += ["--no-binary=:all:", f"--dest={folder}", f"flash-attn=={version}"]
        subprocess.run(command, env=os.environ | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}, check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as file:
            sources = {}
            for path in {LIMITS, *(path for paths in INTERFACES.values() for path in paths)}:
                found = file.extractfile(f"{archive.name.removesuffix('.tar.gz')}/{path}")
                assert found
                sources[path] = found.read().decode()
    return {"tests/helpers/flash_attn.json": json.dumps(facts(sources, version), indent=2) + "\n"}
