"""Checks a machine for offload to disk, for which DeepSpeed compiles an operator at the first use."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan import Plan

LIBAIO = "apt install libaio-dev (Debian), dnf install libaio-devel (Fedora), or name its folder in CFLAGS and LDFLAGS"
PROGRAM = "void io_submit(void); int main(int count, char** words) { io_submit(); return 0; }"


def check_disks(plan: Plan) -> None:
    """Raises RecipeError with what this machine lacks to offload to disk, if the plan does that."""
    parallel = plan.recipe.parallel
    fields = [name for name in ("offload_optimizer", "offload_param") if getattr(parallel, name) == "nvme"]
    if not fields:
        return
    instead = " ".join(f"--set parallel.{name}=cpu" for name in fields) + " --set parallel.nvme_path=null"
    problems = [
        Problem("nvme.machine", f"parallel.{fields[0]}", f"'nvme' cannot be used: {lack}", f"{fix}; or {instead}")
        for lack, fix in ([] if _is_built() else _lacking())
    ]
    problems += _folder_problems(Path(parallel.nvme_path or ""))
    if problems:
        raise RecipeError(problems)


def _is_built() -> bool:
    """Whether DeepSpeed was installed with its operator compiled (`DS_BUILD_AIO=1`)."""
    spec = find_spec("deepspeed")
    roots = spec.submodule_search_locations or () if spec else ()
    return any([*Path(root).glob("ops/aio/async_io_op*.so")] for root in roots)


def _lacking() -> Iterator[tuple[str, str]]:
    """Yields the missing programs and libraries that the operator is compiled with, and how to install them."""
    if not shutil.which("ninja"):
        yield "ninja, which torch compiles with, is not on the PATH", "pip install ninja"
    compiler = compiler_of(os.environ)
    if not shutil.which(compiler):
        yield f"there is no C++ compiler ({compiler})", "apt install g++, dnf install gcc-c++"
    if not has_libaio():
        yield "libaio, which DeepSpeed reads and writes disks with, is not found", LIBAIO


def compiler_of(environ: Mapping[str, str]) -> str:
    """Returns the program of `CXX`, without its arguments, or c++. It may be any text, even an empty one."""
    command = environ.get("CXX", "c++")
    with suppress(ValueError, IndexError):  # an unbalanced quote, or nothing
        return shlex.split(command)[0]
    return command


def has_disk_operator() -> bool:
    """Whether DeepSpeed's disk operator is compiled, or could be as far as libaio is concerned."""
    return _is_built() or has_libaio()


def has_libaio() -> bool:
    """Whether a program can be linked with libaio, tried as DeepSpeed does (`op_builder/builder.py:has_function`)."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "aio.c"
        source.write_text(PROGRAM)
        try:
            flags = [shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
            command = [*shlex.split(compiler), *flags[0], str(source), "-o", f"{folder}/aio", *flags[1], "-laio"]
            return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
        except (OSError, ValueError, subprocess.TimeoutExpired):  # such as an unbalanced quote
            return False


def nearest_existing(folder: Path) -> Path:
    """Returns the absolute path of a folder, or of its nearest existing parent."""
    absolute = folder.absolute()
    return next(path for path in (absolute, *absolute.parents) if path.exists())


def _folder_problems(folder: Path) -> list[Problem]:
    """Checks that states can be written below a folder, which is created if it does not exist."""
    existing = nearest_existing(folder)
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return []
    reason = f"{existing} cannot be written to" if existing.is_dir() else f"{existing} is not a folder"
    message = f"'{folder}' cannot be used: {reason}"
    return [Problem("nvme.path", "parallel.nvme_path", message, "name a folder on a local disk of each node")]
