"""Programs that reach the machine but not the run: the interfaces that listen, and messages of an attacker."""

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from llmtrain.errors import RecipeError, WorkerError
from llmtrain.launch import authentication
from llmtrain.launch.authentication import SECRET_VARIABLE, MessageAuthenticator, Secret, read_verified
from llmtrain.launch.discovery.rank import Rank
from tests.helpers.harness import run_ranks

AUTHENTICATOR = MessageAuthenticator("secret")
LISTENING = "0A"


def listening() -> set[str]:
    """The addresses that this process listens on."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            inodes.add(str(descriptor.readlink()))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and f"socket:[{inode}]" in inodes:
                raw = bytes.fromhex(local.partition(":")[0])
                words = [raw[at : at + 4][::-1] for at in range(0, len(raw), 4)]
                found.add(socket.inet_ntop(family, b"".join(words)))
    return found


def _listening(rank):
    import torch
    from torch import distributed as dist

    dist.all_reduce(torch.ones(1))
    return listening()


def test_ranks_of_one_machine_listen_on_its_loopback():
    assert run_ranks(2, _listening) == [{"127.0.0.1"}, {"127.0.0.1"}]


FORGED = ("", "abc", "15", "-1", "[" * 60_000, MessageAuthenticator("guess").sign("stop 0 request", "15"))


def _agree(rank, forged):
    """Rank 1 also acts as the attacker, who can reach the store."""
    from llmtrain.engines.runtime.distributed import barrier, store
    from llmtrain.train.signals import StopAgreement, StopSignals

    stop, reached, step = StopAgreement(StopSignals(), AUTHENTICATOR), store("stop/0"), 0
    while not stop.should_stop(step):
        barrier()  # neither is far ahead
        assert step < 60
        if rank == 1 and step < 20:
            reached.set("request", forged)
        if rank == 1 and step == 30:
            os.kill(os.getpid(), signal.SIGTERM)
        step += 1
    stop.close()
    barrier()
    return step >= 30, int(stop.stopped_by)


@pytest.mark.parametrize("forged", FORGED)
def test_an_unsigned_message_does_not_stop_a_run(forged):
    assert run_ranks(2, _agree, forged) == [(True, signal.SIGTERM)] * 2


class Shelf(dict):
    """A store whose keys are all there."""

    def get(self, key):
        return self[key]


def test_a_signed_decision_counts_only_for_its_step(monkeypatch):
    monkeypatch.setattr(authentication, "RETRY_S", 0.0)
    genuine = AUTHENTICATOR.sign("stop 0 57", "15").encode()
    assert read_verified(Shelf({"57": genuine}), "57", AUTHENTICATOR, "stop 0 57") == "15"
    replayed = [genuine, genuine.replace(b" 15", b" 10"), b"", b"\xff", b" ", genuine + b"\n"]
    for forged in replayed:
        with pytest.raises(WorkerError) as error:
            read_verified(Shelf({"58": forged}), "58", AUTHENTICATOR, "stop 0 58")
        assert error.value.problems[0].rule == "worker.stranger"


def test_an_invalid_decision_that_is_replaced_in_time_is_read():
    answers = [b"junk", b"junk", AUTHENTICATOR.sign("a", "15").encode()]

    class Mended:
        def get(self, key):
            return answers.pop(0)

    assert read_verified(Mended(), "1", AUTHENTICATOR, "a") == "15"


def _agreed(rank, given):
    from llmtrain.engines.runtime.distributed import agreed_secret, barrier

    secret = Secret.of_worker({SECRET_VARIABLE: given[rank]})
    place = Rank(rank, rank, 2, 2, "127.0.0.1", 1, "test")
    try:
        return agreed_secret(secret, place).authenticator.key
    except RecipeError as error:
        return error.problems[0].message
    finally:
        barrier()  # rank 0 keeps the store


A, B = "a" * 32, "b" * 32


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((A, A), None),
        (("", ""), None),
        ((A, B), "is another one for rank 1, unlike rank 0"),
        ((A, ""), "is not set for rank 1, unlike rank 0"),
        (("", A), "is another one for rank 1, unlike rank 0"),
    ],
)
def test_all_ranks_have_the_same_secret_or_none(given, says):
    first, second = run_ranks(2, _agreed, given)
    assert second == (says or first)


def test_a_secret_is_removed_from_the_environment_and_not_shown():
    env = {SECRET_VARIABLE: A}
    secret = Secret.of_worker(env)
    assert env == {}
    assert A not in repr(secret) + repr(secret.authenticator)
    assert secret.authenticator.key != A
    with pytest.raises(RecipeError):
        Secret.of_worker({SECRET_VARIABLE: "short"})
