"""Starts workers, and determines the rank of a worker."""

from llmtrain.launch.discovery.discover import discover, named_launcher, without_local_rank
from llmtrain.launch.discovery.rank import Launcher, Rank
from llmtrain.launch.failure import Failure
from llmtrain.launch.local import run_workers

__all__ = ["Failure", "Launcher", "Rank", "discover", "named_launcher", "run_workers", "without_local_rank"]
