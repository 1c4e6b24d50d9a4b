"""A watcher beside each rank: it ends a run that hangs, with every stack written down, and names slow ranks."""

from llmtrain.watchdog.process import Watch, start

__all__ = ["Watch", "start"]
