"""Authenticates the messages between a run's own processes.

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
from typing import Protocol, Self

from llmtrain.errors import Problem, RecipeError, WorkerError

SECRET_VARIABLE = "LLMTRAIN_SECRET"
SHORTEST_SECRET = 32
"""Minimum number of characters of a secret that a user sets."""
CODE_CHARACTERS = 64
"""Number of characters of the hexadecimal HMAC-SHA256 that a sealed text begins with."""
FORGED_S = 5.0
"""Seconds for which a forged text in the store may be replaced by the right one."""


class Store(Protocol):
    """The store at which the ranks meet: torch's, whose own methods are untyped."""

    def get(self, key: str) -> bytes:
        """Returns the value of a key, and waits until it is set."""


@dataclass(frozen=True)
class Seal:
    """Signs what a rank says with HMAC-SHA256, and recognises forged texts."""

    key: str = field(repr=False)

    def seal(self, about: str, content: str) -> str:
        """Returns the content after its code.

        about: its purpose; a text sealed for one purpose is invalid for any other.
        """
        code = hmac.new(self.key.encode(), f"{about}\0{content}".encode(), hashlib.sha256).hexdigest()
        return f"{code} {content}"

    def opened(self, about: str, sealed: bytes) -> str:
        """Returns the content. Raises ValueError if it was not sealed with this key for this purpose."""
        content = sealed[CODE_CHARACTERS + 1 :].decode()
        if not hmac.compare_digest(sealed, self.seal(about, content).encode()):
            raise ValueError("not sealed by this run")
        return content


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
        if len(text) < SHORTEST_SECRET:
            message = f"has {len(text)} characters, fewer than {SHORTEST_SECRET}"
            fix = f"export {SECRET_VARIABLE}=$(openssl rand -hex 32), the same for all ranks"
            raise RecipeError(Problem("launch.secret", SECRET_VARIABLE, message, fix))
        return cls(text, is_given=True)

    @property
    def environment(self) -> dict[str, str]:
        """The variable that passes the secret to a worker."""
        return {SECRET_VARIABLE: self.text}

    @property
    def seal(self) -> Seal:
        """A seal derived from the secret, which cannot be computed from the seal's key."""
        return Seal(hashlib.sha256(self.text.encode()).hexdigest())


def read_sealed(store: Store, key: str, seal: Seal, about: str) -> str:
    """Returns what a rank of this run left in the store.

    Raises WorkerError if another program wrote there, and no right text replaces it.
    """
    deadline = time.monotonic() + FORGED_S
    while True:
        try:
            return seal.opened(about, store.get(key))
        except ValueError:
            if time.monotonic() > deadline:
                message = f"contains a text for '{key}' that no rank of this run wrote"
                fix = (
                    "another program can reach the rendezvous port of the ranks: see docs/guides/launching.md, The "
                    "network"
                )
                raise WorkerError(Problem("worker.stranger", "MASTER_PORT", message, fix)) from None
            time.sleep(0.1)
