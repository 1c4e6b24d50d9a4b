"""The programs whose settings are translated: which one a file is for, and the recipe that it becomes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from llmtrain.errors import Problem, RecipeError, abbreviate, did_you_mean
from llmtrain.plan.migrate import accelerate, axolotl, deepspeed_json, llama_factory, swift, torchtitan, trainer, trl
from llmtrain.plan.migrate.files import ForeignFile, read_foreign
from llmtrain.plan.migrate.program import Given, Program
from llmtrain.plan.migrate.translation import Translation

PROGRAMS: dict[str, Program] = {
    program.name: program
    for program in (
        *(trainer.PROGRAM, *trl.PROGRAMS, deepspeed_json.PROGRAM, accelerate.PROGRAM),
        *(axolotl.PROGRAM, llama_factory.PROGRAM, swift.PROGRAM, torchtitan.PROGRAM),
    )
}
"""The known programs by their names on the command line."""

GENERATES = re.compile(
    r"(?:GRPO|PPO|RLOO|OnlineDPO|GKD)Config$|trl (?:grpo|rloo|ppo)\b|(?:^|_)(?:grpo|ppo|rloo)(?:_\w+)?\.py$"
)
GENERATION = frozenset({"num_generations", "reward_funcs", "vllm_mode", "num_ppo_epochs"})
"""What starts, or configures, training on generated texts."""


def translate(paths: Sequence[Path], devices: int | None = None, program: str | None = None) -> Translation:
    """Translates files of one program, and those that stand beside it, into a recipe.

    devices: the number of devices for which the files were written; default: what they say. program: which one the
    first file is for; by default it is recognised. Raises RecipeError.
    """
    if program is not None and program not in PROGRAMS:
        known = f"known: {', '.join(PROGRAMS)}"
        raise RecipeError(
            Problem("import.program", "--from", f"'{program}' is unknown{did_you_mean(program, PROGRAMS)}", known)
        )
    files = [read_foreign(path) for path in paths]
    chosen = [PROGRAMS[program] if program and not number else recognised(file) for number, file in enumerate(files)]
    own = [number for number, one in enumerate(chosen) if not one.beside] or [0]
    if len(own) > 1:
        message = f"is for {chosen[own[1]].title}, but {paths[own[0]]} is for {chosen[own[0]].title}"
        raise RecipeError(Problem("import.two", str(paths[own[1]]), message, "translate one run at a time"))
    beside = {one.name: file for number, (one, file) in enumerate(zip(chosen, files, strict=True)) if number != own[0]}
    if len(beside) < len(files) - 1:
        raise RecipeError(Problem("import.two", "FILE…", f"two files are for {chosen[-1].title}", "give one of them"))
    file = files[own[0]]
    translation = chosen[own[0]].translate(Given(file=file, beside=beside, devices=devices))
    noted = "\n".join(f"{line.key}\n{line.text}" for line in translation.lines)
    for key, value in file.launcher.items():
        if key not in noted:
            text = "starts the workers there; here `llmtrain train`, or a launcher with the recipe as its script"
            translation.same(f"--{key}", value, text=text)
    for key, expression in file.computed.items():
        written = file.written.get(key, key)
        translation.missing(written, f"the script computes it ({expression}): set what it stands for")
        for name, place in translation.places.items():
            if place.endswith(f": {written}"):
                translation.comments[name] = f"FILL IN: the script computes {written} ({expression})"
    return translation


def recognised(file: ForeignFile) -> Program:
    """Returns the program that a file is for. Raises RecipeError if it is none, or several."""
    own = [program for program in PROGRAMS.values() if program.has_generation_settings and _fits(program, file)]
    if GENERATES.search(file.program) or not (own or GENERATION.isdisjoint(file.values)):
        message = "trains on texts that the model generates (GRPO, PPO, RLOO, …), which is not supported"
        raise RecipeError(Problem("import.program", str(file.path), message, "DPO, KTO and ORPO train on given texts"))
    found = [program for program in PROGRAMS.values() if _fits(program, file)]
    included = {name for program in found for name in program.includes}
    left = [program for program in found if program.name not in included]
    if len(left) == 1:
        return left[0]
    if left:
        names = " and ".join(program.title for program in left)
        fix = " or ".join(f"--from {program.name}" for program in left)
        raise RecipeError(Problem("import.program", str(file.path), f"could be for {names}", fix))
    has = abbreviate(sorted(file.values)) or "nothing"
    message = f"is for no program that is known here; it has {has}"
    known = "; ".join(f"{one.title}: one of {abbreviate(sorted(one.marks), 4)}" for one in PROGRAMS.values())
    raise RecipeError(Problem("import.program", str(file.path), message, f"{known}; or name it with --from"))


def _fits(program: Program, file: ForeignFile) -> bool:
    """Whether a file is for a program: by what a command line starts, else by its settings."""
    if program.command and file.program and re.search(program.command, file.program):
        return True
    if program.recognise:
        return program.recognise(file)
    return not program.marks.isdisjoint(file.values)
