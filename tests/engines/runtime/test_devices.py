"""The choice of a rank's GPU. Only the last lines of `init_process_group` need one."""

import socket
from threading import Thread

import pytest
from torch import distributed as dist
from torch.distributed import HashStore

from llmtrain.engines.runtime import distributed
from llmtrain.engines.runtime.devices import check_distinct, device_index
from llmtrain.errors import RecipeError
from llmtrain.launch import Rank


def worker(local_rank, local_world_size=4, launcher="slurm"):
    return Rank(local_rank, local_rank, local_world_size, local_world_size, "n1", 1, launcher)


@pytest.mark.parametrize(
    ("rank", "visible", "index"),
    [
        (worker(3), 4, 3),
        (worker(3), 1, 0),  # each task sees its own alone
        (worker(0, 1), 1, 0),
        (worker(1, 2, "torchrun"), 8, 1),
    ],
)
def test_a_rank_uses_the_device_of_its_local_rank(rank, visible, index):
    assert device_index(rank, visible) == index


@pytest.mark.parametrize(
    ("rank", "visible", "says"),
    [
        (worker(3), 2, "sees 2 GPUs"),
        (worker(0, 4, "torchrun"), 0, "sees 0 GPUs"),
        (worker(0, 1), 8, "--ntasks-per-node=8"),
    ],
)
def test_gpus_that_do_not_match_the_ranks_are_refused(rank, visible, says):
    with pytest.raises(RecipeError, match=says):
        device_index(rank, visible)


def ask(identities):
    """Returns the message for each rank about the GPUs that the ranks report."""
    store = HashStore()
    told: dict[int, str] = {}

    def one(rank, identity):
        try:
            check_distinct(rank, len(identities), identity, store)
            told[rank] = ""
        except RecipeError as error:
            told[rank] = str(error)

    threads = [Thread(target=one, args=item) for item in enumerate(identities)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    return [told[rank] for rank in range(len(identities))]


def test_every_rank_knows_which_ranks_share_its_gpu():
    assert ask(["a GPU-1", "a GPU-2", "b GPU-3"]) == [""] * 3
    answers = ask(["a GPU-1", "a GPU-2", "a GPU-1", "b GPU-3"])
    assert len(set(answers)) == 1
    assert "ranks 0, 2 would share a GPU-1" in answers[0]


def test_gpus_are_compared_before_nccl_connects(monkeypatch):
    monkeypatch.setattr(dist, "init_process_group", lambda *arguments, **named: pytest.fail("too early"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    told = {}

    def one(rank):
        try:
            distributed._join(Rank(rank, rank, 2, 2, "127.0.0.1", port, "slurm"), "a GPU-1")
        except RecipeError as error:
            told[rank] = str(error)

    threads = [Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told[0] == told[1]
    assert "ranks 0, 1 would share a GPU-1" in told[0]
