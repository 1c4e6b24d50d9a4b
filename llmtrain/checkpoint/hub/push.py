"""Uploads an exported folder to the hub in one commit, so that the repository never contains half a model.

The hub's client reads the token from HF_TOKEN or from its own file, and sends it; nothing here stores or prints it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmtrain.checkpoint.hub.model_card import FOLDER, portable
from llmtrain.errors import CheckpointError, HubError, Problem, RecipeError, reason
from llmtrain.system.untrusted import UNREADABLE, file_fault, read_json, read_text

CARD = "README.md"
_TRY_AGAIN = (408, 429)
"""HTTP status codes between 400 and 499 that do not mean that the request is wrong."""


def check_exported(folder: Path) -> None:
    """Raises RecipeError for a folder that is not an exported model, or that others could not use."""
    adapter = folder / "adapter_config.json"
    if not adapter.is_file() and not (folder / "config.json").is_file():
        message = "is not an exported folder: it has no config.json and no adapter_config.json"
        raise RecipeError(Problem("hub.folder", str(folder), message, "name a folder for the export: RUN OUT --push …"))
    problems = [
        Problem("hub.folder", str(path), "is not a plain file", "export to a new folder")
        for path in _content(folder)
        if path.is_symlink() or not path.is_file()
    ]
    try:
        base = read_json(adapter, dict[str, Any]).get("base_model_name_or_path") if adapter.is_file() else None
    except UNREADABLE as error:
        raise RecipeError(Problem("hub.folder", str(adapter), f"cannot be read: {reason(error)}")) from None
    if isinstance(base, str) and portable(base) != base:
        message = f"is an adapter for weights in {base}, a folder on this machine"
        problems.append(Problem("hub.base", str(folder), message, "export with --merge, and push the result"))
    if problems:
        raise RecipeError(problems)


def open_repository(name: str, public: bool) -> None:
    """Creates a repository, or finds it: before an export, which takes long, so that missing rights are known early.

    public: whether others may see it. Raises RecipeError for what the hub refuses, and for a repository that exists and
    is not as private as asked for, HubError if the hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token

    if name.count("/") != 1:
        raise RecipeError(Problem("hub.name", "--push", f"'{name}' is not OWNER/NAME", "--push OWNER/NAME"))
    with _user_errors(name):
        if not get_token():
            raise RecipeError(Problem("hub.token", "HF_TOKEN", "there is no token for the hub", "hf auth login"))
        hub = HfApi()
        try:
            hub.create_repo(name, private=not public)
        except Exception as error:
            if _status(error) != 409:
                raise
            existing = hub.repo_info(name)
            if bool(existing.private) == public:  # a private model must not be published by an old, public repository
                state = "private" if existing.private else "public"
                fix = "leave --public out" if public else "--public"
                raise RecipeError(
                    Problem("hub.exists", name, f"exists and is {state}", f"{fix}, or another name")
                ) from None


def push(folder: Path, name: str) -> str:
    """Uploads a folder that `check_exported` accepts to a repository, and returns the address of the commit.

    The model card then names the repository. Raises as `open_repository` does; the folder stays as it is.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    def content(path: Path) -> str | bytes:
        if path.name != CARD:
            return str(path)
        return read_text(path).replace(f'"{FOLDER}"', f'"{name}"').encode()

    try:
        files = [CommitOperationAdd(str(path.relative_to(folder)), content(path)) for path in _content(folder)]
    except UNREADABLE as error:
        raise CheckpointError(Problem("export.read", str(folder), f"cannot be read: {file_fault(error)}")) from None
    with _user_errors(name, f"llmtrain export {folder} --push {name}"):
        return str(HfApi().create_commit(name, files, commit_message="Add the model and its card").commit_url)


def _content(folder: Path) -> list[Path]:
    """Returns the files in a folder and in the folders in it, except for hidden ones."""
    files: list[Path] = []
    for path in sorted(folder.iterdir()):
        if not path.name.startswith("."):
            files += _content(path) if path.is_dir() and not path.is_symlink() else [path]
    return files


@contextmanager
def _user_errors(name: str, again: str = "") -> Iterator[None]:
    """Turns errors of the hub's client into user errors. again: the command that tries it again."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except RecipeError:
        raise
    except HFValidationError as error:
        raise RecipeError(Problem("hub.name", "--push", reason(error), "--push OWNER/NAME")) from None
    except Exception as error:  # the client raises those of its HTTP library, too
        status, answer = _status(error), reason(_error_with_response(error))
        if token := os.environ.get("HF_TOKEN") or get_token():
            answer = answer.replace(token, "…")
        if status == 401:
            message = "the hub does not accept the token"
            raise RecipeError(Problem("hub.token", name, message, "hf auth login, or another HF_TOKEN")) from None
        if status in (402, 403):
            fix = "use a token that may write there, or another owner"
            raise RecipeError(Problem("hub.rights", name, f"the hub refuses to write there: {answer}", fix)) from None
        if status is not None and 400 <= status < 500 and status not in _TRY_AGAIN:
            raise RecipeError(Problem("hub.refused", name, f"the hub refuses it: {answer}")) from None
        raise HubError(Problem("hub.reached", constants.ENDPOINT, answer, again or "try again")) from None


def _error_with_response(error: BaseException) -> BaseException:
    """Returns the first error in a chain of causes that has an HTTP response; `error` itself if none has."""
    cause: BaseException | None = error
    while cause is not None:
        if hasattr(cause, "response"):
            return cause
        cause = cause.__cause__
    return error


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(_error_with_response(error), "response", None), "status_code", None)
    return status if isinstance(status, int) else None
