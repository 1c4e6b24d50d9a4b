"""The tables of docs/reference/kernels.md: what each Triton kernel of a plan needs on each architecture of NVIDIA.

Builds the device of `tests/cuda_on_host/`, which takes g++.
"""

from __future__ import annotations

import re
from collections import defaultdict
from importlib.metadata import version
from typing import Any

from tests.cuda_on_host.build import build
from tests.cuda_on_host.kernels import GPUS, TOKENS, cases, compile_cases, groups
from tools.page import ROOT, Files, filled, paragraph, table

PAGE = "docs/reference/kernels.md"
LIBRARIES = ("triton", "torch", "liger-kernel", "torchao", "deepspeed", "transformers")
Results = dict[str, Any]
"""Name of a case → what `compile_cases` returns for it."""


def cells(results: Results) -> dict[str, tuple[int, str]]:
    """Returns for each kernel of a group on a device its number of variants, and its cell."""
    of_name = defaultdict(list)
    for kernels in results.values():
        for one in [] if isinstance(kernels, str) else kernels:
            of_name[re.sub(r"_\d+$", "", one["name"])].append(one)
    return {
        name: (
            len({one["code"] for one in found}),
            " / ".join(f"{max(one[what] for one in found):,}" for what in ("registers", "spilled", "shared")),
        )
        for name, found in of_name.items()
    }


def refusals(results: Results) -> dict[str, str]:
    """Returns the cases that a rule refuses, and its reason."""
    return {name: why.splitlines()[0] for name, why in results.items() if isinstance(why, str)}


def group_table(group: str, by_device: dict[str, Results]) -> str:
    """Returns the part of the page on a group of cases."""
    found = {device: cells(results) for device, results in by_device.items()}
    refused = defaultdict(list)
    for device, results in by_device.items():
        for name, why in refusals(results).items():
            refused[why].append(f"{name} on {device}")
    rows = (
        (
            f"`{name}`",
            str(max(of_device[name][0] for of_device in found.values() if name in of_device)),
            *(of_device.get(name, (0, "—"))[1] for of_device in found.values()),
        )
        for name in sorted(set().union(*found.values()))
    )
    names = sorted(name for name, case in cases().items() if case.group == group)
    text = f"\n## {group}\n\nOf: {', '.join(names)}.\n\n{table(('Kernel', 'Variants', *by_device), rows)}"
    if refused:
        text += "\nRefused:\n\n" + "".join(f"- {', '.join(where)}: {why}\n" for why, where in sorted(refused.items()))
    return text


def files(chosen: str = "") -> Files:
    """Returns the page with all groups compiled, or with one, such as fp8, and the others as they are."""
    if chosen and chosen not in groups():
        raise SystemExit(f"kernels:{chosen} is unknown; the groups are {', '.join(groups())}")
    libraries = build()
    present = (ROOT / PAGE).read_text(encoding="utf-8").partition("<!-- kernels: end -->")[0]
    tables = dict(zip(groups(), re.split(r"(?=\n## )", present)[1:], strict=True)) if chosen else {}
    for group in [chosen] if chosen else groups():
        by_device = {}
        for device in GPUS:
            print(f"{group} on {device}", flush=True)
            by_device[device] = compile_cases(libraries, device, groups()[group])
        tables[group] = group_table(group, by_device)
    versions = {name: version(name).split("+")[0] for name in LIBRARIES}
    used = paragraph(
        f"Compiled for micro-batches of {TOKENS:,} tokens, with "
        f"{', '.join(f'{name} {number}' for name, number in versions.items())}."
    )
    return filled(PAGE, kernels=used + "".join(part.rstrip() + "\n" for part in tables.values()))
