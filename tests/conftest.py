"""Shared by all tests: a CPU world, quiet, offline."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from llmtrain.recipe import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    Source,
    TrainConfig,
    TrainedTokenizer,
)
from llmtrain.system.kernel_caches import use_kernel_caches
from tests.helpers.small_runs import write_small_recipe

pytest_plugins = ["tests.helpers.torchvision_folder", "tests.helpers.budget"]

# Before torch or deepspeed is imported anywhere.
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["COLUMNS"] = "200"
os.environ["TRITON_INTERPRET"] = "1"
use_kernel_caches(os.environ)  # one for all tests, also for those with a cache of their own

# A shell that starts the tests in the background, or nohup, ignores these, and children inherit that:
# a test that sends them to a child would wait for nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for processes that they started."""
    return len(os.sched_getaffinity(0)) + 1


LONGEST_FILES = (
    "tests/test_tutorials.py",
    "tests/launch/test_two_hosts.py",
    "tests/launch/test_slurm.py",
    "tests/trials/self_test/",
    "tests/train/",
    "tests/checkpoint/",
    "tests/engines/",
)
"""Files of minutes, and folders with such. They come first: at the end, one process would run the last of them while
the others wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {start: place for place, start in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: next((places[s] for s in places if item.nodeid.startswith(s)), len(places)))


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs takes root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs takes the right to mount")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(scope="session")
def tiny() -> Recipe:
    """The recipe that the tests change one thing of."""
    return Recipe(
        name="tiny",
        model=ModelConfig(
            architecture="llama",
            config={
                "hidden_size": 192,
                "intermediate_size": 512,
                "num_hidden_layers": 4,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "max_position_embeddings": 256,
                "tie_word_embeddings": True,
            },
        ),
        data=DataConfig(sources=[Source("stdlib")], tokenizer=TrainedTokenizer(vocab_size=4096), sequence_length=256),
        optim=OptimConfig(lr=1e-3),
        batch=BatchConfig(global_batch_size=16, micro_batch_size=8),
        train=TrainConfig(max_steps=10),
    )


@pytest.fixture(scope="session")
def small_recipe(tmp_path_factory) -> Path:
    """A recipe file that trains in a second."""
    return write_small_recipe(tmp_path_factory.mktemp("small"))
