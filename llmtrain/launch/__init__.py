"""Starts workers, and determines which worker a process is; pure."""

from llmtrain.launch.discovery import discover, without_local_rank
from llmtrain.launch.failure import Failure
from llmtrain.launch.local import run_workers
from llmtrain.launch.rank import Rank

__all__ = ["Failure", "Rank", "discover", "run_workers", "without_local_rank"]
