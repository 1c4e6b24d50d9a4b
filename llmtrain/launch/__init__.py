"""Starting workers, and finding out who a worker is; pure."""

from llmtrain.launch.discovery import Rank, accelerate_processes, discover, without_local_rank
from llmtrain.launch.failure import Failure
from llmtrain.launch.local import run_workers

__all__ = ["Failure", "Rank", "accelerate_processes", "discover", "run_workers", "without_local_rank"]
