"""The cases of `tests/lint_corpus`: what is wrong with each, and what its reader and DeepSpeed answer."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_args

from llmtrain_lint import Finding, Reader, Result, Use, examine
from llmtrain_lint.report import merge_findings
from llmtrain_lint.schema import schema

CORPUS = Path(__file__).parents[1] / "lint_corpus"
COMPILED = ("lamb", "lion", "adagrad", "muadam", "muadamw", "onebitadam")
"""Optimizers whose kernels would be compiled first, or that other packages bring."""
NOT_SHOWN = (
    *("nvme", "quantized", "deepcompile", "zenflow", "super_offload", "hpz", "autoep", "autotp", "ulysses"),
    *("sequence_parallel", "tensor_parallel", "expert_parallel", "hybrid_engine", "load_universal", "comet", "wandb"),
    *("tensorboard", "autotuning", "aio", "bias_correction", "compression", "sparse_attention", "1e10"),
)
"""Words of features that an engine on one CPU does not show."""
_HEAD = re.compile(r"^# (About|World|For|Set|DeepSpeed|Wrong): (.*)$", re.MULTILINE)


def lint_file(path: Path, world_size: int | None = None) -> list[Finding]:
    """Returns everything that is wrong with a file, for `world_size` ranks."""
    return examine(str(path), path, Use(world_size=world_size)).findings


def lint_text(text: str, world_size: int | None = None, allow: Collection[str] = ()) -> list[Finding]:
    """Does the same for the text of a file."""
    return examine("", text, Use(world_size=world_size), allow).findings


@dataclass(frozen=True, eq=False)
class Case:
    """A file of the corpus, read from its first lines, which are not part of the configuration.

    about: its subject; wrong: its faults as `field rule`; world: the number of ranks; reader: who reads it; given:
    whether that is stated, since it cannot be guessed; arguments: those of the Trainer; deepspeed: the release, the
    newest unless the subject is an older one.
    """

    path: Path
    text: str
    about: str
    wrong: tuple[str, ...]
    world: int | None
    reader: Reader
    given: bool
    arguments: dict[str, float]
    deepspeed: str

    @property
    def result(self) -> Result:
        """What lint says for the release of the case."""
        return self.result_for(self.deepspeed)

    def result_for(self, deepspeed: str) -> Result:
        """What lint says for a release."""
        reader = self.reader if self.given else None
        return examine(self.path.name, self.text, Use(reader, self.world, None, self.arguments, deepspeed))

    @property
    def lines(self) -> int:
        """The number of lines that a reader of the findings sees."""
        return len(merge_findings(self.result.findings))

    def found(self, severity: str) -> list[Finding]:
        """Returns the findings of a severity."""
        return [one for one in self.result.findings if one.severity == severity]

    @property
    def buildable(self) -> bool:
        """Whether an engine on one CPU can show what the file does: nothing is compiled, and there is one rank."""
        text = self.text.lower()
        kernels = (f'"type": "{name}"' for name in COMPILED)
        asserted = "master_weights" in text and "offload" in text  # excludes torch's Adam, which the harness takes
        return not (asserted or any(word in text for word in (*NOT_SHOWN, *kernels)))

    @property
    def refused(self) -> bool:
        """Whether lint says that the file is refused."""
        return any(one.effect == "refuses" for one in self.found("error"))


@cache
def cases(kind: str) -> tuple[Case, ...]:
    """Returns the files of one part of the corpus: `malformed` or `valid`."""
    return tuple(_case(path) for path in sorted((CORPUS / kind).iterdir()))


def _case(path: Path) -> Case:
    text = path.read_text(encoding="utf-8")
    heads = _HEAD.findall(text)
    head = {"World": "", "For": "deepspeed", "DeepSpeed": schema().deepspeed, **dict(heads)}
    reader, _, given = head["For"].partition(", ")
    wrong = tuple(value for name, value in heads if name == "Wrong")
    world = int(head["World"]) if head["World"] else None
    [known] = [one for one in get_args(Reader) if one == reader]
    about = head["About"].replace("|", "\\|")
    arguments = {
        name: number == "true" or float(number)
        for one, value in heads
        if one == "Set"
        for name, number in [value.split("=")]
    }
    return Case(path, _HEAD.sub("", text), about, wrong, world, known, given == "given", arguments, head["DeepSpeed"])
