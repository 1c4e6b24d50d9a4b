"""Authenticates the messages between the processes of a run with HMAC-SHA256.

A launcher passes a secret to each of its ranks in the environment. The secret is on no command line, in no log, in no
store and in no run directory; `/proc` shows it to the same user only.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Self

from llmtrain.errors import Problem, RecipeError, WorkerError

SECRET_VARIABLE = "LLMTRAIN_SECRET"
MIN_SECRET_LENGTH = 32
"""Minimum number of characters of a secret that a user sets."""
TAG_LENGTH = 64
"""Number of characters of the hexadecimal HMAC-SHA256 tag at the beginning of a signed message."""
RETRY_S = 5.0
"""Seconds for which a forged message in the store may be replaced by an authentic one."""


@dataclass(frozen=True)
class MessageAuthenticator:
    """Signs messages with HMAC-SHA256, and verifies signed ones."""

    key: str = field(repr=False)

    def sign(self, purpose: str, message: str) -> str:
        """Returns the message after its tag.

        purpose: a message signed for one purpose is invalid for any other.
        """
        tag = hmac.new(self.key.encode(), f"{purpose}\0{message}".encode(), hashlib.sha256).hexdigest()
        return f"{tag} {message}"

    def verify(self, purpose: str, signed: bytes) -> str:
        """Returns the message. Raises ValueError if it was not signed with this key for this purpose."""
        message = signed[TAG_LENGTH + 1 :].decode()
        if not hmac.compare_digest(signed, self.sign(purpose, message).encode()):
            raise ValueError("not signed by this run")
        return message


@dataclass(frozen=True)
class Secret:
    """The secret of a rank, from its launcher or generated."""

    text: str = field(repr=False)
    is_given: bool
    """False if the launcher provides none: then rank 0 sends its own to the others through the store."""

    @classmethod
    def new(cls) -> Self:
        """Returns a random secret."""
        return cls(secrets.token_hex(), is_given=False)

    @classmethod
    def of_worker(cls, env: MutableMapping[str, str] | None = None) -> Self:
        """Returns this process's secret and removes it from the environment of its children.

        Raises RecipeError if it is too short.
        """
        text = (os.environ if env is None else env).pop(SECRET_VARIABLE, "")
        if not text:
            return cls.new()
        if len(text) < MIN_SECRET_LENGTH:
            message = f"has {len(text)} characters, fewer than {MIN_SECRET_LENGTH}"
            fix = f"export {SECRET_VARIABLE}=$(openssl rand -hex 32), the same for all ranks"
            raise RecipeError(Problem("launch.secret", SECRET_VARIABLE, message, fix))
        return cls(text, is_given=True)

    @property
    def environment(self) -> dict[str, str]:
        """The variable that passes the secret to a worker."""
        return {SECRET_VARIABLE: self.text}

    @property
    def authenticator(self) -> MessageAuthenticator:
        """An authenticator whose key is a hash of the secret, from which the secret cannot be computed."""
        return MessageAuthenticator(hashlib.sha256(self.text.encode()).hexdigest())


def read_verified(store: Any, key: str, authenticator: MessageAuthenticator, purpose: str) -> str:
    """Returns the message that a rank of this run has written to a key of the rendezvous store, and waits for it.

    Raises WorkerError if another program wrote there, and no authentic message replaces it.
    """
    deadline = time.monotonic() + RETRY_S
    while True:
        try:
            return authenticator.verify(purpose, store.get(key))
        except ValueError:
            if time.monotonic() > deadline:
                message = f"contains a text for '{key}' that no rank of this run wrote"
                fix = (
                    "another program can reach the rendezvous port of the ranks: see docs/guides/launching.md, The "
                    "network"
                )
                raise WorkerError(Problem("worker.stranger", "MASTER_PORT", message, fix)) from None
            time.sleep(0.1)
