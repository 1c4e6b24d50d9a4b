"""What a run's own processes tell each other, kept apart from what a stranger says.

A launcher hands each of its ranks a secret by their environment. It is on no command line, in no log, in no store and
in no run directory; `/proc` shows it to the same user only.
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
"""Characters of a secret that a user sets."""
CODE_CHARACTERS = 64
"""Of the hexadecimal HMAC-SHA256 that a sealed text begins with."""
FORGED_S = 5.0
"""A text in the store that a stranger wrote may be replaced by the right one for so long."""


class Store(Protocol):
    """Where the ranks meet: torch's, whose own methods have no types."""

    def get(self, key: str) -> bytes:
        """What a key holds, once it is there."""


@dataclass(frozen=True)
class Seal:
    """Signs what a rank says by HMAC-SHA256, and tells it from what somebody else wrote."""

    key: str = field(repr=False)

    def seal(self, about: str, content: str) -> str:
        """The content behind its code. about: what it means; the same words mean nothing anywhere else."""
        code = hmac.new(self.key.encode(), f"{about}\0{content}".encode(), hashlib.sha256).hexdigest()
        return f"{code} {content}"

    def opened(self, about: str, sealed: bytes) -> str:
        """The content. Raises ValueError where it was not sealed with this key, about this."""
        content = sealed[CODE_CHARACTERS + 1 :].decode()
        if not hmac.compare_digest(sealed, self.seal(about, content).encode()):
            raise ValueError("not sealed by this run")
        return content


@dataclass(frozen=True)
class Secret:
    """What a rank got from its launcher, or has made up."""

    text: str = field(repr=False)
    is_given: bool
    """False where the launcher gives none: then rank 0's goes to the others through the store that they meet at."""

    @classmethod
    def new(cls) -> Self:
        """A random one."""
        return cls(secrets.token_hex(), is_given=False)

    @classmethod
    def of_worker(cls, env: MutableMapping[str, str] | None = None) -> Self:
        """That of this process, which its children do not inherit. Raises RecipeError where it is too short."""
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
        """What hands it to a worker."""
        return {SECRET_VARIABLE: self.text}

    @property
    def seal(self) -> Seal:
        """Made of it; the secret cannot be computed from its key."""
        return Seal(hashlib.sha256(self.text.encode()).hexdigest())


def opened(store: Store, key: str, seal: Seal, about: str) -> str:
    """What a rank of this run left in the store. Raises WorkerError where somebody else wrote there and it stays so."""
    deadline = time.monotonic() + FORGED_S
    while True:
        try:
            return seal.opened(about, store.get(key))
        except ValueError:
            if time.monotonic() > deadline:
                message = f"holds a text for '{key}' that no rank of this run wrote"
                fix = (
                    "another program reaches the port that the ranks meet at: see docs/guides/launching.md, The network"
                )
                raise WorkerError(Problem("worker.stranger", "MASTER_PORT", message, fix)) from None
            time.sleep(0.1)
