"""Starting workers, and finding out who a worker is; pure."""

from llmtrain.launch.discovery import discover, without_local_rank
from llmtrain.launch.failure import Failure
from llmtrain.launch.local import run_workers
from llmtrain.launch.rank import Rank

__all__ = ["Failure", "Rank", "discover", "run_workers", "without_local_rank"]
