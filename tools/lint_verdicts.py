"""tests/lint/verdicts.json: what releases of DeepSpeed answer to the files of the corpus.

Each release is downloaded and imported, and reads all files. It builds an engine for those of which lint says that only
some releases refuse them, where one CPU can show it. `lint_verdicts:new` reads only files that have no verdict yet, and
drops the verdicts of files that are gone.

A file has an answer for each release, the oldest first; equal ones are joined: {"file": [["0.16.0", ""],
["0.19.6", "config: DeepSpeedConfigError"]]}. An answer is empty, or says who refuses the file and with which
exception: its reader and DeepSpeed's configuration, or the engine.
"""

from __future__ import annotations

import json
import os
from importlib import import_module
from itertools import groupby
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from tests.lint.corpus import Case, cases
from tools.lint_schema import of_each_release
from tools.page import ROOT, Files

RELEASES = ("0.16.0", "0.16.9", "0.17.1", "0.17.6", "0.18.3", "0.18.5", "0.18.9", "0.19.3", "0.19.6", "0.19.8")
"""The first and the last of each series, and those between in which what is refused changed."""
TARGET = "tests/lint/verdicts.json"
NEW = "LINT_VERDICTS_OF_NEW_FILES"
"""The variable of the environment that tells the releases to read only new files."""


def facts() -> dict[str, str]:
    """Returns the answer of the release that is imported to each file of the corpus."""
    from tests.lint.oracle import answer, build, read

    # One rank sends nothing, and the operator would be compiled for each release.
    vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ[name] = value
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
    made = {}
    known = _known() if os.environ.get(NEW) else {}
    for case in (one for one in _all() if one.path.name not in known):
        world, yaml = case.world or 1, case.path.suffix == ".yaml"
        said = answer(case.text, case.reader, world, yaml, case.arguments)
        by = "config"
        if not said and case.buildable and _differs(case):
            said, by = build(read(case.text, case.reader, world, yaml, case.arguments)), "engine"
        made[case.path.name] = f"{by}: {said.partition(':')[0]}" if said else ""
    return made


def _all() -> tuple[Case, ...]:
    return *cases("malformed"), *cases("valid")


def _known() -> dict[str, list[list[str]]]:
    known: dict[str, list[list[str]]] = json.loads((ROOT / TARGET).read_text(encoding="utf-8"))
    return {case.path.name: known[case.path.name] for case in _all() if case.path.name in known}


def _differs(case: Case) -> bool:
    """Whether lint says for some release only that the file is refused."""
    refused = {
        frozenset((one.field, one.rule) for one in case.result_for(release).findings if one.effect == "refuses")
        for release in RELEASES
    }
    return len(refused) > 1


def joined(by_release: dict[str, dict[str, str]]) -> dict[str, list[list[str]]]:
    """Returns the answers by file, where those of consecutive releases are joined."""
    names = next(iter(by_release.values()))
    made = {}
    for name in sorted(names):
        series = [(release, said[name]) for release, said in by_release.items()]
        made[name] = [list(next(group)) for _, group in groupby(series, lambda pair: pair[1])]
    return made


def written(verdicts: dict[str, list[list[str]]]) -> str:
    """Returns the file, with a line for each case."""
    lines = (f" {json.dumps(name)}: {json.dumps(changes)}" for name, changes in verdicts.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def files(which: str = "all") -> Files:
    """Returns the file with the answers of all releases, or, if asked for `new`, adds those to new files."""
    if which == "new":
        os.environ[NEW] = "1"
    by_release: dict[str, Any] = dict(of_each_release("tools.lint_verdicts", RELEASES))
    made = (_known() if which == "new" else {}) | joined(dict(reversed(by_release.items())))
    return {TARGET: written(dict(sorted(made.items())))}
