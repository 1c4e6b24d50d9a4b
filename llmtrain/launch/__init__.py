"""Starts workers, and determines which worker a process is; pure."""

from llmtrain.launch.failure import Failure
from llmtrain.launch.local import run_workers
from llmtrain.launch.place.discovery import discover, without_local_rank
from llmtrain.launch.place.rank import Rank

__all__ = ["Failure", "Rank", "discover", "run_workers", "without_local_rank"]
