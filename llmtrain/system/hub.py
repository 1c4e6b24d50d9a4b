"""Files of folders and of repositories on the hub."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from llmtrain.system.untrusted import expanded, is_file, is_folder

SINGLE = "model.safetensors"
"""File with all weights of a model."""
INDEX = "model.safetensors.index.json"
"""File that names the files of the weights of a model."""
HUB_TIMEOUT_S = 3.0
"""Timeout of a request to the hub, in seconds."""


def is_path(name: str) -> bool:
    """Whether a name can only be a path: names on the hub are `NAME` or `OWNER/NAME`."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def hub_has(name: str, revision: str | None = None, repo_type: str = "model") -> bool | None:
    """Whether the hub has a repository; None if it does not answer.

    Sends one request with a timeout: the hub's client would retry for minutes to download a file. If there is no
    answer, this process and those that it starts do not ask again, and use only the local cache.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        url = hf_hub_url(name, "config.json", revision=revision, repo_type=repo_type)
        get_hf_file_metadata(url, timeout=HUB_TIMEOUT_S)
    except (HfHubHTTPError, ValueError) as error:  # an answer, even if it is an error
        return not isinstance(error, RepositoryNotFoundError) or isinstance(error, GatedRepoError)
    except Exception:  # the HTTP library of the hub's client may raise anything
        _stay_offline()
        return None
    return True


def probe_hub_for(name: str, revision: str | None = None) -> None:
    """Checks whether the hub answers, before a library that would retry for minutes reads a name on the hub."""
    if not is_path(name) and not is_folder(expanded(name)):
        hub_has(name, revision)


def probe_hub() -> None:
    """Checks whether the hub answers, before a library reads from it, such as the data sets of tasks."""
    hub_has("gpt2")  # any name will do


def _stay_offline() -> None:
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:  # it has copied the value
        config = sys.modules["datasets"].config
        config.HF_HUB_OFFLINE = config.HF_DATASETS_OFFLINE = True


def stored_file(name: str | Path, file: str, revision: str | None = None) -> Path | None:
    """Returns a file of a folder, or of a repository on the hub or in its local cache; None if it is not there."""
    folder = expanded(str(name))
    if is_folder(folder) or is_path(str(name)):
        return folder / file if is_file(folder / file) else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        is_offline = not hub_has(str(name), revision)
        return Path(hf_hub_download(str(name), file, revision=revision, local_files_only=is_offline))
    except (HfHubHTTPError, ValueError, OSError):  # among them: the cache does not have it
        return None
