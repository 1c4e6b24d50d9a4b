"""`export --push` with the hub's own client, against a hub on the loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llmtrain.checkpoint.hub.push import push
from llmtrain.cli import app
from llmtrain.errors import CheckpointError, RecipeError
from tests.helpers.hub import TOKEN, running_hub

CARD = '---\nlibrary_name: transformers\n---\n\n# tiny\n\nmodel = AutoModelForCausalLM.from_pretrained("FOLDER")\n'


@pytest.fixture(scope="module")
def hub():
    with running_hub() as one:
        yield one


@pytest.fixture
def folder(tmp_path, hub) -> Path:
    hub.repositories.clear()
    hub.objects.clear()
    hub.requests.clear()
    hub.failing = ""
    out = tmp_path / "out"
    (out / "base").mkdir(parents=True)
    (out / "config.json").write_text('{"model_type": "llama"}')
    (out / "README.md").write_text(CARD)
    (out / "model.safetensors").write_bytes(os.urandom(10_000))
    (out / "base" / "weights.safetensors").write_bytes(os.urandom(5_000))
    (out / ".hidden").write_text("stays here")
    return out


def _export(hub, *arguments: str, token: str | None = TOKEN, endpoint: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint or hub.endpoint, "HF_HOME": "/nonexistent", "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_TOKEN": token} if token else {}
    command = [sys.executable, "-m", "llmtrain", "export", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert TOKEN not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def _content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_folder_is_pushed_in_one_commit_to_a_private_repository(hub, folder):
    before = _content(folder)
    done = _export(hub, str(folder), "--push", "me/tiny")
    assert done.returncode == 0, done.stderr
    assert f"pushed {folder} to {hub.endpoint}/me/tiny/commit/" in done.stdout
    repository = hub.repositories["me/tiny"]
    assert repository.private
    assert len(repository.commits) == 1
    card = CARD.replace("FOLDER", "me/tiny").encode()
    assert repository.files == before | {"README.md": card}
    assert len(hub.objects) == 2  # what is large went by LFS
    assert _content(folder) == before
    again = _export(hub, str(folder), "--push", "me/tiny")
    assert again.returncode == 0, again.stderr
    assert sum(request.startswith("PUT") for request in hub.requests) == 2  # nothing was sent twice


@pytest.mark.slow
def test_nothing_is_pushed_to_an_existing_public_repository_unasked(hub, folder):
    assert _export(hub, str(folder), "--push", "me/open", "--public").returncode == 0
    assert not hub.repositories["me/open"].private
    refused = _export(hub, str(folder), "--push", "me/open")
    assert refused.returncode == 2
    assert "me/open: exists and is public [hub.exists]\n    --public, or another name" in refused.stderr
    assert len(hub.repositories["me/open"].commits) == 1


@pytest.mark.parametrize(
    ("name", "token", "words"),
    [
        ("me/tiny", None, "there is no token for the hub [hub.token]\n    hf auth login"),
        pytest.param(
            "me/tiny", "hf_wrong", "me/tiny: the hub does not accept the token [hub.token]", marks=pytest.mark.slow
        ),
        ("others/tiny", TOKEN, "others/tiny: the hub refuses to write there: "),
        ("tiny", TOKEN, "--push: 'tiny' is not OWNER/NAME [hub.name]"),
        ("me/ti..ny", TOKEN, "[hub.name]"),
    ],
)
def test_refusals_of_the_hub_are_reported(hub, folder, name, token, words):
    done = _export(hub, str(folder), "--push", name, token=token)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert not hub.repositories


@pytest.mark.slow
def test_a_hub_that_is_not_reached_loses_nothing(hub, folder):
    before = _content(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    done = _export(hub, str(folder), "--push", "me/tiny", endpoint=endpoint)
    assert done.returncode == 75, done.stderr
    assert f"{endpoint}: " in done.stderr
    hub.failing = "/commit/"
    done = _export(hub, str(folder), "--push", "me/tiny")
    assert done.returncode == 75, done.stderr
    assert f"[hub.reached]\n    llmtrain export {folder} --push me/tiny" in done.stderr
    assert hub.repositories["me/tiny"].files == {}
    assert _content(folder) == before
    hub.failing = ""
    assert _export(hub, str(folder), "--push", "me/tiny").returncode == 0


def test_a_card_that_cannot_be_read_is_no_fault_of_the_hub(folder):
    (folder / "README.md").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"export\.read"):
        push(folder, "me/tiny")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--push", "me/tiny", "--dtype", "float16"], "--dtype: needs OUT"),
        (["--public"], "--public: is only supported with --push"),
        ([], "OUT: is required"),
    ],
)
def test_options_that_do_not_go_together(folder, arguments, words):
    with pytest.raises(RecipeError, match=words):
        _here(folder, *arguments)


def test_only_models_that_others_can_use_are_pushed(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder / "base")}))
    (folder / "secret").symlink_to("/etc/hostname")
    with pytest.raises(RecipeError) as caught:
        _here(folder, "--push", "me/tiny")
    assert [(one.rule, Path(one.field).name) for one in caught.value.problems] == [
        ("hub.folder", "secret"),
        ("hub.base", "out"),
    ]
    with pytest.raises(RecipeError, match="is not an exported folder"):
        _here(folder / "base", "--push", "me/tiny")


def _here(*arguments: object) -> None:
    """Runs the command in this process, for what is refused before the hub is asked."""
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    if result.exception:
        raise result.exception
