"""Folders in which torch, Triton and DeepSpeed store compiled code, which they load again without a check.

torch's default is `/tmp/torchinductor_USER`, which another user can create first.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from llmtrain.errors import Problem, RecipeError, reason
from llmtrain.system.host import cache_root, installed_version

FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
}
"""Variable → name of the folder."""


def kernel_caches(environment: Mapping[str, str]) -> dict[str, Path]:
    """Returns the folders by their variables: those that the user has set, otherwise llmtrain's own.

    Code is compiled for the processor of a host, for a version of Python and for one of torch.
    """
    root = private_folder().absolute() / socket.gethostname()
    root /= f"python{sys.version_info[0]}.{sys.version_info[1]}-torch{installed_version('torch')}"
    return {name: Path(environment.get(name) or root / folder) for name, folder in FOLDERS.items()}


def private_folder() -> Path:
    """Returns the folder of this user's compiled code. Several users may share the cache around it."""
    return cache_root() / f"compiled-{os.getuid()}"


def use_kernel_caches(environment: MutableMapping[str, str]) -> None:
    """Sets the variables of the folders that the user has not set, before anything is compiled.

    Raises RecipeError if others could store code in llmtrain's folder.
    """
    if all(environment.get(name) for name in FOLDERS):
        return
    _check_private(private_folder())
    environment.update({name: str(folder) for name, folder in kernel_caches(environment).items()})


def _check_private(folder: Path) -> None:
    """Creates a folder for this user only, or checks an existing one."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            wrong = "is not a folder"
        elif status.st_uid != os.getuid():
            wrong = f"belongs to user {status.st_uid}"
        elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            wrong = f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
        else:
            return
        wrong = f"{wrong}, and would contain compiled code that is executed"
    except OSError as error:
        wrong = f"cannot be created: {reason(error)}"
    fix = "remove it, or name another cache with LLMTRAIN_CACHE=FOLDER"
    raise RecipeError(Problem("kernels.cache", str(folder), wrong, fix))
